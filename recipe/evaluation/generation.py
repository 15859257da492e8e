"""Generate text by Transformers' `generate`: with a saved model, or with the model in training."""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast, TextStreamer

from recipe.data.tokenizer import added_ids, count_ids, end_of_text, list_ids, load_tokenizer
from recipe.errors import UserError
from recipe.model.check import sees_later_tokens
from recipe.model.files import SAMPLING
from recipe.model.weights import check_vocabulary, load_model_weights, load_pretrained, output_layer

SAMPLE_TOKENS = 64  # of a model in training

Turns = list[dict[str, str]]  # of a dialog: {"role": "user", "content": "Hello."}


def load_model(
    model_name_or_path: str | Path,
    device: str | torch.device,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load a saved model in fp32, or an int8 model as it is, in evaluation mode, and its tokenizer.

    revision: branch, tag or commit of a Hub id. trust_remote_code: run the code that the model brings.

    Raises `UserError` if that fails, if the model lacks weights, or if its type cannot be scored.
    """
    if revision is not None and Path(model_name_or_path).is_dir():
        raise UserError(f"--revision selects a branch of a Hub model, but {model_name_or_path} is a folder")
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if revision is not None:
        options["revision"] = revision
    config = load_pretrained(AutoConfig, model_name_or_path, **options)
    tokenizer = load_tokenizer(str(model_name_or_path), revision)
    check_vocabulary(count_ids(tokenizer), config.vocab_size, model_name_or_path)
    if not hasattr(config, "max_position_embeddings"):
        raise UserError(f"the model in {model_name_or_path} is not supported: it has no max_position_embeddings")
    dtype = "auto" if getattr(config, "quantization_config", None) else torch.float32
    model = load_model_weights(model_name_or_path, dtype=dtype, device_map={"": device}, **options).eval()
    if sees_later_tokens(model):
        raise UserError(f"the model in {model_name_or_path} is not a causal one: its tokens see later ones")
    return model, tokenizer


def encode_prompt(tokenizer: PreTrainedTokenizerFast, prompt: str | Turns) -> list[int]:
    """Return the ids that the model continues. The turns of a dialog take the form of the tokenizer's chat template.

    As in training, what the tokenizer puts before a text comes first. An empty text starts a new document.
    """
    if isinstance(prompt, str):
        ids = added_ids(tokenizer)[0] + tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
        return ids or [end_of_text(tokenizer)]
    # The template's marks are tokens, whatever those in a text are.
    encoding = {"split_special_tokens": False, "verbose": False}
    options = {"add_generation_prompt": True, "return_dict": True, "tokenizer_kwargs": encoding}
    return tokenizer.apply_chat_template(prompt, **options)["input_ids"]  # pyright: ignore


@torch.no_grad()
def generate_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompt: str | Turns,
    *,
    max_new_tokens: int = 200,
    num_samples: int = 1,
    seed: int = 1337,
    stream: Callable[[str], None] | None = None,
    **options: Any,
) -> list[str]:
    """Return num_samples continuations of a text, or answers to a dialog, up to a token that ends them.

    PyTorch's random state stays as it was. Within the model's context, this is one call of `generate`; when a text
    fills the context, another call continues from its second half. stream: called with each new piece of a single
    sample. options: replace those of the model's generation_config, such as `temperature`.
    """
    context = model.config.max_position_embeddings
    device = model.device
    generate: Any = model.generate
    settings: Any = copy.deepcopy(model.generation_config)
    if settings.do_sample is None:  # the model does not say how
        settings.update(**SAMPLING)
    settings.update(**options)
    ends = list_ids(settings.eos_token_id)
    if settings.pad_token_id is None and ends:
        settings.pad_token_id = ends[0]
    prompt_ids = encode_prompt(tokenizer, prompt)
    before = [] if prompt == "" else prompt_ids
    streamer = None if stream is None else Streamer(tokenizer, ends, stream)
    rows = [list(prompt_ids) for _ in range(num_samples)]
    ended = [False] * num_samples
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed)
        while max_new_tokens > 0 and not all(ended):
            unfinished = [i for i in range(num_samples) if not ended[i]]
            length = len(rows[unfinished[0]])  # of all of them
            window = length if length < context else max(1, context // 2)
            ids = torch.tensor([rows[i][-window:] for i in unfinished], device=device)
            count = min(max_new_tokens, context - window)
            if settings.max_length is None:
                settings.max_new_tokens = count
            else:  # generate warns of both, and takes what is None from the model
                settings.max_length = window + count
            found = generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=settings,
                streamer=streamer,
                synced_gpus=False,  # one process of a sharded run samples, and the others wait
            )
            for i, new in zip(unfinished, found[:, window:].tolist(), strict=True):
                kept = list(itertools.takewhile(lambda token: token not in ends, new))
                rows[i] += kept
                ended[i] = len(kept) < len(new)
            max_new_tokens -= count
    return [decode_after(tokenizer, before, row[len(prompt_ids) :]) for row in rows]


def decode_after(tokenizer: PreTrainedTokenizerFast, before: list[int], ids: list[int]) -> str:
    """Decode ids with those before them, because some tokenizers drop the first space of what they decode."""
    head = str(tokenizer.decode(before, clean_up_tokenization_spaces=False))
    whole = str(tokenizer.decode(before + ids, clean_up_tokenization_spaces=False))
    return whole[len(head) :] if whole.startswith(head) else str(tokenizer.decode(ids))


class Streamer(TextStreamer):
    """Passes each new piece of a text on. ends: ids that are not shown."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, ends: list[int], write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, clean_up_tokenization_spaces=False)
        self.ends = ends
        self.write = write

    def put(self, value: torch.Tensor) -> None:
        if self.next_tokens_are_prompt:  # decoded, but not shown: see `decode_after`
            self.token_cache = [token for token in value.flatten().tolist() if token not in self.ends]
            self.next_tokens_are_prompt = False
            self.print_len = len(str(self.tokenizer.decode(self.token_cache, **self.decode_kwargs)))
        elif value.item() not in self.ends:
            super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.write(text)


def sample_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompt: str, seed: int, vocab_size: int
) -> str:
    """Return a short sample of the model in training, with its prompt, and leave the model as it was.

    With a chat template, the prompt is a user's turn. model: unwrapped, with a padded vocabulary. vocab_size: its real
    size; tokens of the padding are never chosen.
    """
    was_training = model.training
    is_chat = bool(tokenizer.chat_template)
    turns = [{"role": "user", "content": prompt}] if is_chat else prompt
    hook = output_layer(model).register_forward_hook(lambda module, inputs, logits: logits[..., :vocab_size])
    model.eval()
    try:
        (text,) = generate_texts(model, tokenizer, turns, max_new_tokens=SAMPLE_TOKENS, seed=seed)
        return f"user: {prompt}\n\nassistant: {text}" if is_chat else prompt + text
    finally:
        hook.remove()
        model.train(was_training)
