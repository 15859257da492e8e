"""Generate text: from a saved model, token by token, or from the model in training."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import torch
from accelerate.utils import set_seed
from tokenizers.decoders import DecodeStream
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import BaseStreamer

from recipe.errors import UserError
from recipe.model.build import residual_source
from recipe.model.weights import check_vocabulary, load_pretrained


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens. Raises `UserError` for a value out of range.

    temperature 0 always takes the most likely token; top_k 0, top_p 1 and repetition_penalty 1 change nothing. A
    repetition_penalty above 1 makes the tokens that the model has in its context less likely (arXiv:1909.05858).
    """

    max_new_tokens: int = 200
    num_samples: int = 1
    temperature: float = 0.8
    top_k: int = 200
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 1337

    def __post_init__(self):
        for name, is_valid, expected in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("num_samples", self.num_samples >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "at least 0"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "above 0"),
            ("seed", 0 <= self.seed < 2**32, "from 0 to 2**32 - 1"),
        ):
            if not is_valid:
                raise UserError(f"{name} must be {expected}, got {getattr(self, name)!r}")


class TokenStream(BaseStreamer):
    """Receives tokens as `generate` chooses them: counts and times them, and passes on the text of a single sample.

    num_tokens, seconds: of all texts so far, without the first token of each, which includes reading the prompt.
    """

    def __init__(self, write: Callable[[str], object] | None = None) -> None:
        """write: is called with each piece of text whose characters are complete."""
        self.write, self.num_tokens, self.seconds = write, 0, 0.0

    def start(self, prompt: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """Begin a text; each `generate` call that continues it only adds tokens."""
        self.tokenizer, self.last_at, self.num_written = tokenizer, None, 0
        self.decoder = DecodeStream(skip_special_tokens=False)
        self._pass_on(prompt)

    def put(self, value: torch.Tensor) -> None:
        """value: int64 [num_samples, length], the context, at the start of each call; then int64 [num_samples]."""
        if value.ndim == 2:
            return
        if self.last_at is not None:
            self.seconds += time.perf_counter() - self.last_at
            self.num_tokens += int((value != self.tokenizer.eos_token_id).sum())  # samples that ended are padded
        if self.write is not None and value[0] != self.tokenizer.eos_token_id:
            self._pass_on(self.decoder.step(self.tokenizer.backend_tokenizer, int(value[0])) or "")
        self.last_at = time.perf_counter()  # a reader that is slow to accept the text does not count

    def end(self) -> None:
        """Do nothing at the end of a `generate` call: the text may continue in another one."""

    def finish(self, text: str) -> None:
        """Pass on what is left of the complete text, such as the first bytes of a character that has no more."""
        self._pass_on(text[self.num_written :])

    def _pass_on(self, piece: str) -> None:
        if self.write is not None and piece:
            self.write(piece)
            self.num_written += len(piece)


def load_generator(
    model_name_or_path: str | Path, device: str | torch.device, revision: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a saved model and its tokenizer. revision: branch of a Hub model. Raises `UserError` if that fails."""
    if revision is not None and Path(model_name_or_path).is_dir():
        raise UserError(f"--revision selects a branch of a Hub model, but {model_name_or_path} is a folder")
    options = {} if revision is None else {"revision": revision}
    config = load_pretrained(AutoConfig, model_name_or_path, **options)
    tokenizer = load_pretrained(AutoTokenizer, model_name_or_path, **options)
    check_vocabulary(len(tokenizer), config.vocab_size, model_name_or_path)
    return load_pretrained(AutoModelForCausalLM, model_name_or_path, **options).to(device).eval(), tokenizer


def check_prompt(prompt: str) -> None:
    """Raise `UserError` for a prompt that has bytes which are no text, as command lines can."""
    if prompt.encode(errors="ignore").decode() != prompt:
        raise UserError(f"prompt must be valid UTF-8 text, got {prompt!r}")


def continue_prompt(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    sampling: Sampling,
    vocab_size: int | None = None,
    stream: TokenStream | None = None,
) -> list[str]:
    """Return num_samples texts: the prompt and its continuation up to the end-of-text token.

    The model sees the last block_size tokens. It draws from PyTorch's generators as they are; seed them first.
    vocab_size: never take a token from here up. stream: receives the tokens as they come.
    """
    eos, block_size = tokenizer.eos_token_id, model.config.max_position_embeddings
    options = {"eos_token_id": eos, "pad_token_id": eos, "repetition_penalty": sampling.repetition_penalty}
    if sampling.temperature == 0:
        options |= {"do_sample": False}
    else:
        chances = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
        options |= {"do_sample": True, **chances}
    if vocab_size is not None and vocab_size < model.config.vocab_size:
        options["suppress_tokens"] = list(range(vocab_size, model.config.vocab_size))
    if stream is not None:
        stream.start(prompt, tokenizer)
    # Without special tokens, as in training. An empty prompt starts a new document.
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"] or [eos]
    ids = torch.tensor([prompt_ids] * sampling.num_samples, device=model.device)
    start, end = len(prompt_ids), len(prompt_ids) + sampling.max_new_tokens
    while ids.shape[1] < end and not (ids[:, start:] == eos).any(dim=1).all():
        # `generate` cannot slide the context. It fills the room that is left, then adds one token at a time; the last
        # new token is not fed back, hence + 1.
        context = ids[:, -block_size:]
        room = min(end - ids.shape[1], block_size - context.shape[1] + 1)
        mask = torch.ones_like(context)
        new = model.generate(context, attention_mask=mask, max_new_tokens=room, streamer=stream, **options)
        ids = torch.cat([ids, new[:, context.shape[1] :]], dim=1)
    continuations = [list(takewhile(lambda token: token != eos, row)) for row in ids[:, start:].tolist()]
    texts = [prompt + tokenizer.decode(tokens, clean_up_tokenization_spaces=False) for tokens in continuations]
    if stream is not None:
        stream.finish(texts[0])
    return texts


def generate_texts(
    model_name_or_path: str | Path,
    prompt: str,
    *,
    device: str | torch.device = "cpu",
    revision: str | None = None,
    **sampling,
) -> list[str]:
    """Load a saved model and return num_samples texts, the prompt and its continuation.

    sampling: the fields of `Sampling`. Raises `UserError` if the model cannot be loaded or an option is out of range.
    """
    how = Sampling(**sampling)
    check_prompt(prompt)
    model, tokenizer = load_generator(model_name_or_path, device, revision)
    set_seed(how.seed)
    return continue_prompt(model, tokenizer, prompt, how)


def sample_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    max_new_tokens: int = 64,
    seed: int = 1337,
    vocab_size: int | None = None,
) -> str:
    """Return a sample of the model in training, and leave the model and PyTorch's random generators as they were.

    model: unwrapped, with a padded vocabulary. vocab_size: its real size; tokens of the padding are never chosen.
    """
    device, was_training = model.device, model.training
    devices = [] if device.type == "cpu" else [device]
    # The bf16 residual stream of `build_model` relies on autocast, which is off here.
    back_to_fp32 = residual_source(model).register_forward_hook(lambda module, inputs, output: output.float())
    try:
        # A compiled model would be compiled again for each length.
        with torch.random.fork_rng(devices, device_type=device.type), torch.compiler.set_stance("force_eager"):
            torch.default_generator.manual_seed(seed)
            for _ in devices:
                torch.get_device_module(device).manual_seed(seed)
            model.eval()
            sampling = Sampling(max_new_tokens=max_new_tokens)
            return continue_prompt(model, tokenizer, prompt, sampling, vocab_size)[0]
    finally:
        back_to_fp32.remove()
        model.train(was_training)
