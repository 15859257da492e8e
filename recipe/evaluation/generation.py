"""Text from a saved model."""

from pathlib import Path

import torch
from accelerate.utils import set_seed
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from recipe.errors import UserError, check_local_path


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
    """Continue `prompt`; returns prompt and continuation, up to the end-of-text token, once per sample.

    temperature 0 takes the likeliest token; top_k 0 and top_p 1 do not restrict. The model sees the last
    block_size tokens. Raises `UserError` if there is no model or an option is out of range.
    """
    for ok, message in (
        (max_new_tokens >= 1, f"max_new_tokens must be at least 1, got {max_new_tokens}"),
        (num_samples >= 1, f"num_samples must be at least 1, got {num_samples}"),
        (temperature >= 0, f"temperature must be at least 0, got {temperature}"),
        (top_k >= 0, f"top_k must be at least 0, got {top_k}"),
        (0 <= seed < 2**32, f"seed must be from 0 to 2**32 - 1, got {seed}"),
        (0 < top_p <= 1, f"top_p must be above 0 and at most 1, got {top_p}"),
    ):
        if not ok:
            raise UserError(message)
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError("the prompt is not valid UTF-8 text") from error
    check_local_path(str(model_name_or_path))
    folder = Path(model_name_or_path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        found = sorted(str(path.parent) for path in folder.glob("*/config.json"))
        raise UserError(f"there is no model in {folder}" + (f"; there is one in {', '.join(found)}" if found else ""))
    disable_progress_bar()  # a second bar for loading weights that takes milliseconds
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_name_or_path)
        model = AutoModelForCausalLM.from_pretrained(model_name_or_path).to(device).eval()
    except Exception as error:  # missing folder, missing file, unreachable Hub, damaged weights
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"cannot load a model and its tokenizer from '{model_name_or_path}': {reason}") from error
    block_size = model.config.max_position_embeddings
    sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    if temperature == 0:
        sampling = {"do_sample": False}
    set_seed(seed)
    # As the corpus was encoded: nothing around the text.
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"] or [tokenizer.eos_token_id]
    ids = torch.tensor([prompt_ids] * num_samples, device=device)
    num_prompt_tokens, end = ids.shape[1], ids.shape[1] + max_new_tokens
    while ids.shape[1] < end and not _all_ended(ids[:, num_prompt_tokens:], tokenizer.eos_token_id):
        context = ids[:, -block_size:]
        # The last new token is never fed back, so block_size - length + 1 of them fit; then one at a time.
        room = min(end - ids.shape[1], block_size - context.shape[1] + 1)
        with torch.inference_mode():
            out = model.generate(
                context,
                attention_mask=torch.ones_like(context),
                max_new_tokens=room,
                pad_token_id=tokenizer.eos_token_id,
                **sampling,
            )
        ids = torch.cat([ids, out[:, context.shape[1] :]], dim=1)
    return [prompt + _decode_until_end(tokenizer, row[num_prompt_tokens:].tolist()) for row in ids]


def sample_from(model_dir: Path, prompt: str, seed: int, device: str | torch.device) -> str:
    """A sample to show at the end of a run, or a warning: a run does not fail for it."""
    try:
        text = generate_texts(model_dir, prompt, seed=seed, device=device)[0]
    except Exception as error:  # above all, running out of memory beside what is left of the training
        return f"warning: no sample could be generated: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "\n".join(["", f"A sample, from the prompt {prompt!r}:", *("    " + line for line in text.splitlines())])


def _all_ended(new_ids: torch.Tensor, eos_token_id: int) -> bool:
    return new_ids.shape[1] > 0 and bool((new_ids == eos_token_id).any(dim=1).all())


def _decode_until_end(tokenizer, ids: list[int]) -> str:
    if tokenizer.eos_token_id in ids:
        ids = ids[: ids.index(tokenizer.eos_token_id)]
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)
