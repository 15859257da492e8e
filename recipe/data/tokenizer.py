"""Tokenizers: load, train, identify, save."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerBase

from recipe.errors import UserError, check_local_path, one_line


def load_tokenizer(name_or_path: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load a fast tokenizer from a folder or the Hub. Raises `UserError` if it lacks an end-of-text token."""
    check_local_path(name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, revision=revision)
    except Exception as error:  # transformers and the Hub client raise OSError, ValueError, KeyError, ...
        where = f"'{name_or_path}' (neither a folder with tokenizer.json nor a Hub id that can be reached)"
        raise UserError(f"no tokenizer at {where}: {one_line(error)}") from error
    # Transformers 5 creates an empty tokenizer for a folder that holds a GPT-2 model without a tokenizer.
    if not tokenizer.is_fast or len(tokenizer) <= len(tokenizer.all_special_ids):
        remedy = "save a fast tokenizer there or pass --tokenizer_name"
        raise UserError(f"there is no tokenizer.json in {name_or_path}; {remedy}")
    if tokenizer.eos_token_id is None:
        remedy = "set its eos_token and save it again"
        raise UserError(f"the tokenizer at {name_or_path} has no end-of-text token; {remedy}")
    return tokenizer


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE like GPT-2's: it encodes any text, and `<|endoftext|>` ends documents.

    A small text may yield fewer than vocab_size tokens, but at least 257.
    """
    size = 100_000  # slices long texts, because a single thread counts each
    slices = (text[start : start + size] for text in documents for start in range(0, len(text), size))
    return GPT2Tokenizer().train_new_from_iterator(slices, vocab_size=vocab_size, show_progress=False)


def describe_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> str:
    """Return the size of a newly trained tokenizer, and why it is not vocab_size."""
    if len(tokenizer) == vocab_size:
        return f"{vocab_size:,} tokens"
    return f"{len(tokenizer):,} tokens (the text is too small for the requested {vocab_size:,})"


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash everything that turns text into ids. Saving and loading does not change it."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    relevant = {key: content[key] for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
    relevant["eos_token_id"] = tokenizer.eos_token_id
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path, block_size: int) -> None:
    """Save a tokenizer with the context length of its model."""
    tokenizer.model_max_length = block_size
    tokenizer.save_pretrained(directory)
