"""Generate text: with a saved model, or with the model in training."""

import functools
import inspect
import itertools
import math
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    DynamicCache,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from recipe.data.tokenizer import added_ids, count_ids, end_of_text, list_ids, load_tokenizer
from recipe.errors import UserError
from recipe.evaluation.scoring import show_progress
from recipe.model.check import sees_later_tokens
from recipe.model.weights import check_vocabulary, load_model_weights, load_pretrained

SAMPLE_TOKENS = 64  # of a model in training


def load_model(
    model_name_or_path: str | Path, device: str | torch.device, revision: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load a saved model in fp32, or an int8 model as it is, in evaluation mode, and its tokenizer.

    revision: branch, tag or commit of a Hub id.

    Raises `UserError` if that fails, if the model lacks weights, or if its type cannot be scored.
    """
    if revision is not None and Path(model_name_or_path).is_dir():
        raise UserError(f"--revision selects a branch of a Hub model, but {model_name_or_path} is a folder")
    options = {} if revision is None else {"revision": revision}
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


def build_processors(temperature: float, top_k: int, top_p: float, repetition_penalty: float) -> LogitsProcessorList:
    """Build the processors that turn a next token's scores into those to sample from, in the order of `generate`.

    top_k 0, top_p 1 and repetition_penalty 1 change nothing. Raises `UserError` for a value out of range.
    """
    for name, value, lowest, highest in (
        ("temperature, if not 0,", temperature or 1.0, 1e-4, 1e4),  # beyond, scores overflow, or are all the same
        ("repetition_penalty", repetition_penalty, 1e-4, 1e4),
        ("top_p", top_p, 0.0, 1.0),
        ("top_k", top_k, 0, math.inf),
    ):
        if not lowest <= value <= highest:
            raise UserError(f"{name} must be from {lowest:g} to {highest:g}, got {value}")
    processors = LogitsProcessorList()
    if repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(float(repetition_penalty)))
    if temperature != 0:
        processors.append(TemperatureLogitsWarper(float(temperature)))
    if top_k != 0:
        processors.append(TopKLogitsWarper(top_k))
    if top_p != 1:
        processors.append(TopPLogitsWarper(top_p))
    return processors


@torch.no_grad()
def generate_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    num_samples: int = 1,
    temperature: float = 0.8,
    top_k: int = 200,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    seed: int = 1337,
    vocab_size: int | None = None,
    stream: Callable[[str], None] | None = None,
    bar: str | None = None,
) -> list[str]:
    """Return num_samples texts: the prompt and its continuation up to the end-of-text token.

    The model sees the last `max_position_embeddings` tokens. A temperature of 0 always takes the most likely token.
    A sample depends on the seed and its number alone; PyTorch's random state stays as it was.
    model: in evaluation mode. vocab_size: without padding. stream: called with each new piece of a single sample.
    bar: the name of a progress bar, which appears if generating takes long.
    """
    processors = build_processors(temperature, top_k, top_p, repetition_penalty)
    seeds = [seed + number * 0x9E3779B1 for number in range(num_samples)]  # a CPU's generator reads 32 bits
    generators = [torch.Generator(model.device).manual_seed(number) for number in seeds]
    eos, context = end_of_text(tokenizer), model.config.max_position_embeddings
    configs = model.config, model.generation_config  # of a chat model, this one names what ends a turn, too
    ends = {eos, *(end for config in configs for end in list_ids(getattr(config, "eos_token_id", None)))}
    # As in training, a template's prefix comes first. An empty prompt starts a new document.
    prompt_ids = added_ids(tokenizer)[0] + tokenizer(prompt, add_special_tokens=False)["input_ids"] or [eos]
    ids, cache = torch.tensor([prompt_ids] * num_samples, device=model.device), DynamicCache(config=model.config)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # before 5.24
    # Decoded with the prompt, because some tokenizers drop the first space of what they decode.
    decode = functools.partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    before, shown = prompt_ids if prompt else [], ""
    head = str(decode(before))  # a list of texts only for a list of lists

    def continuation(row: list[int]) -> str:
        tokens = row[len(prompt_ids) :]
        tokens = [*itertools.takewhile(lambda token: token not in ends, tokens)]
        text = str(decode(before + tokens))
        return text[len(head) :] if text.startswith(head) else str(decode(tokens))

    ended = torch.zeros(num_samples, dtype=torch.bool, device=model.device)
    steps = range(max_new_tokens)
    for _ in steps if bar is None else show_progress(steps, bar, max_new_tokens, "token"):
        if ids.shape[1] <= context:
            new = ids[:, cache.get_seq_length() :]
            outputs = model(new, **{name: cache}, use_cache=True, logits_to_keep=1)
        else:  # the window slides, and with it the position of every token, so nothing cached is of use
            outputs = model(ids[:, -context:], use_cache=False, logits_to_keep=1)
        scores = processors(ids[:, -context:], outputs.logits[:, -1, :vocab_size].float())
        if temperature == 0:
            tokens = scores.argmax(dim=-1)
        else:
            choices = zip(scores.softmax(dim=-1), generators, strict=True)
            tokens = torch.cat([torch.multinomial(each, 1, generator=generator) for each, generator in choices])
        ids = torch.cat([ids, tokens[:, None]], dim=1)
        ended |= torch.isin(tokens, torch.tensor([*ends], device=model.device))
        if ended.all():
            break
        if stream is not None and not (text := continuation(ids[0].tolist())).endswith("\ufffd"):  # half a character
            stream(text[len(shown) :])
            shown = text
    texts = [continuation(row) for row in ids.tolist()]
    if stream is not None:
        stream(texts[0][len(shown) :])
    return [prompt + text for text in texts]


def sample_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompt: str, seed: int, vocab_size: int
) -> str:
    """Return a short sample of the model in training, and leave its mode as it was.

    model: unwrapped, with a padded vocabulary. vocab_size: its real size; tokens of the padding are never chosen.
    """
    was_training = model.training
    model.eval()
    try:
        options = {"max_new_tokens": SAMPLE_TOKENS, "seed": seed, "vocab_size": vocab_size, "bar": "sampling"}
        return generate_texts(model, tokenizer, prompt, **options)[0]
    finally:
        model.train(was_training)
