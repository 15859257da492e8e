"""Tokenizers: load, train, identify, save."""

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerBase

from recipe.errors import UserError, check_not_a_missing_folder


def load_tokenizer(name_or_path: str) -> PreTrainedTokenizerBase:
    """Load a fast tokenizer from a folder or the Hub. Raises `UserError` if it lacks an end-of-text token."""
    check_not_a_missing_folder(name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    except Exception as error:  # transformers and the Hub client raise OSError, ValueError, KeyError, ...
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"no tokenizer at '{name_or_path}' (neither a folder with tokenizer.json nor a Hub id that "
            f"can be reached): {reason}"
        ) from error
    # Transformers 5 makes an empty tokenizer for a folder that holds a GPT-2 and no tokenizer.
    if not tokenizer.is_fast or len(tokenizer) <= len(tokenizer.all_special_ids):
        raise UserError(
            f"there is no tokenizer.json in {name_or_path}; save a fast tokenizer there, or pass --tokenizer_name"
        )
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer at {name_or_path} has no end-of-text token (eos_token), which separates "
            "documents; set one and save it again"
        )
    return tokenizer


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE like GPT-2's: any text can be encoded, `<|endoftext|>` ends documents.

    A small text has fewer than vocab_size tokens to offer; the tokenizer then has those, at least 257.
    """
    return GPT2Tokenizer().train_new_from_iterator(_slices(documents), vocab_size=vocab_size, show_progress=False)


def describe_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> str:
    """The size of a tokenizer that was just trained, and why it is not vocab_size."""
    if len(tokenizer) == vocab_size:
        return f"{vocab_size:,} tokens"
    return f"{len(tokenizer):,} tokens (the text is too small to give the {vocab_size:,} that were asked for)"


def _slices(documents: Iterable[str], characters: int = 100_000) -> Iterator[str]:
    """A single huge string would be counted by one thread."""
    for text in documents:
        for start in range(0, len(text), characters):
            yield text[start : start + characters]


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Identity of what turns text into ids: equal before and after saving, whatever the file's key order."""
    return _sha256_of(tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id)


@functools.lru_cache(maxsize=1)
def _sha256_of(tokenizer_json: str, eos_token_id: int) -> str:
    content = json.loads(tokenizer_json)
    relevant = {key: content[key] for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
    relevant["eos_token_id"] = eos_token_id
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path, block_size: int) -> None:
    """Save with the context length of the model it is meant for."""
    tokenizer.model_max_length = block_size
    tokenizer.save_pretrained(directory)
