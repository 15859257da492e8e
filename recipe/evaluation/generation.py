"""Generate text from a saved model."""

from itertools import takewhile
from pathlib import Path

import torch
from accelerate.utils import set_seed
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.errors import UserError, short_reason
from recipe.model.weights import load_pretrained


def generate_texts(
    model_name_or_path: str | Path,
    prompt: str,
    max_new_tokens: int = 200,
    num_samples: int = 1,
    temperature: float = 0.8,
    top_k: int = 200,
    top_p: float = 1.0,
    seed: int = 1337,
    device: str | torch.device = "cpu",
) -> list[str]:
    """Return num_samples texts: the prompt and its continuation up to the end-of-text token.

    temperature 0 always takes the most likely token; top_k 0 and top_p 1 restrict nothing. The model sees the last
    block_size tokens. Raises `UserError` if the model cannot be loaded or an option is out of range.
    """
    for name, value, is_valid, expected in (
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "at least 1"),
        ("num_samples", num_samples, num_samples >= 1, "at least 1"),
        ("temperature", temperature, temperature >= 0, "at least 0"),
        ("top_k", top_k, top_k >= 0, "at least 0"),
        ("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1"),
        ("seed", seed, 0 <= seed < 2**32, "from 0 to 2**32 - 1"),
        ("prompt", prompt, prompt.encode(errors="ignore").decode() == prompt, "valid UTF-8 text"),
    ):
        if not is_valid:
            raise UserError(f"{name} must be {expected}, got {value!r}")
    tokenizer = load_pretrained(AutoTokenizer, model_name_or_path)
    model = load_pretrained(AutoModelForCausalLM, model_name_or_path).to(device).eval()
    eos, block_size = tokenizer.eos_token_id, model.config.max_position_embeddings
    sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    if temperature == 0:
        sampling = {"do_sample": False}
    set_seed(seed)
    # Without special tokens, as in training. An empty prompt starts a new document.
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"] or [eos]
    ids = torch.tensor([prompt_ids] * num_samples, device=device)
    start, end = len(prompt_ids), len(prompt_ids) + max_new_tokens
    while ids.shape[1] < end and not (ids[:, start:] == eos).any(dim=1).all():
        # `generate` cannot slide the context. It fills the room that is left, then adds one token at a time; the last
        # new token is not fed back, hence + 1.
        context = ids[:, -block_size:]
        room = min(end - ids.shape[1], block_size - context.shape[1] + 1)
        mask = torch.ones_like(context)
        new = model.generate(context, attention_mask=mask, max_new_tokens=room, pad_token_id=eos, **sampling)
        ids = torch.cat([ids, new[:, context.shape[1] :]], dim=1)
    continuations = [list(takewhile(lambda token: token != eos, row)) for row in ids[:, start:].tolist()]
    return [prompt + tokenizer.decode(tokens, clean_up_tokenization_spaces=False) for tokens in continuations]


def sample_from(model_dir: Path, prompt: str, seed: int, device: str | torch.device) -> str:
    """Return a sample to print at the end of a run, or a warning: a failure must not end the run."""
    try:
        text = generate_texts(model_dir, prompt, seed=seed, device=device)[0]
    except Exception as error:  # for example out of memory
        return f"warning: no sample could be generated: {short_reason(error)}"
    return "\n".join(["", f"A sample for the prompt {prompt!r}:", *("    " + line for line in text.splitlines())])
