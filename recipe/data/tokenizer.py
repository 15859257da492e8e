"""Tokenizers: read, load, train, identify, save.

Preparing data reads tokenizer.json directly. transformers, which takes seconds to import, is needed only for models,
to train a tokenizer, and for one that is saved in other files.
"""

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from recipe.environment import only_cached
from recipe.errors import UserError, check_local_path, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class TextTokenizer:
    """A tokenizer.json and its tokenizer_config.json, with the names that transformers' tokenizers have."""

    backend_tokenizer: Tokenizer
    config: dict

    @property
    def eos_token(self) -> str | None:
        token = self.config.get("eos_token")
        return token["content"] if isinstance(token, dict) else token

    @property
    def eos_token_id(self) -> int | None:
        return self.backend_tokenizer.token_to_id(self.eos_token) if self.eos_token else None

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    @functools.cached_property
    def sha256(self) -> str:
        return _sha256(self)

    def save_pretrained(self, directory: Path) -> None:
        """Write both files."""
        directory.mkdir(parents=True, exist_ok=True)
        self.backend_tokenizer.save(str(directory / "tokenizer.json"))
        text = json.dumps(self.config, indent=2, sort_keys=True)
        (directory / "tokenizer_config.json").write_text(text + "\n")


def read_tokenizer(name_or_path: str) -> TextTokenizer:
    """Read a tokenizer from a folder or the Hub, without transformers if its files say everything.

    Raises `UserError` if it lacks an end-of-text token.
    """
    check_local_path(name_or_path)
    with contextlib.suppress(Exception):  # load_tokenizer raises the error that says what is wrong
        from huggingface_hub import hf_hub_download

        folder, names = Path(name_or_path), ("tokenizer.json", "tokenizer_config.json")
        if folder.is_dir():
            paths = [folder / name for name in names]
        else:
            local = only_cached(name_or_path)
            paths = [hf_hub_download(name_or_path, name, local_files_only=local) for name in names]
        backend, config = Tokenizer.from_file(str(paths[0])), json.loads(Path(paths[1]).read_text("utf-8"))
        special = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
        if "eos_token" not in config and len(special) == 1:  # GPT-2's files on the Hub leave it to the class
            config |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), special[0])
        if config.get("eos_token") and "auto_map" not in config and _named_tokens(config) <= {*special}:
            # Transformers 5 has classes that change the tokenizer.json that they load.
            if not config.get("tokenizer_class", "GPT2Tokenizer").startswith("GPT2Tokenizer"):
                config["tokenizer_class"] = "PreTrainedTokenizerFast"
            return TextTokenizer(backend, {"tokenizer_class": "GPT2Tokenizer", **config})
    return _plain(load_tokenizer(name_or_path))


def _plain(tokenizer: "PreTrainedTokenizerBase") -> TextTokenizer:
    """Keep what determines the ids. Transformers 5 has classes that change the tokenizer.json that they load."""
    config = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name.endswith("_token")}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if type(tokenizer).__name__.startswith("GPT2Tokenizer"):
        config["tokenizer_class"] = "GPT2Tokenizer"
    return TextTokenizer(tokenizer.backend_tokenizer, config)


def _named_tokens(config: dict) -> set[str]:
    """Return the tokens in a tokenizer_config.json. Transformers adds those that a tokenizer.json lacks."""
    named = [value for key, value in config.items() if key.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"):
        values = config.get(key) or []
        named += values.values() if isinstance(values, dict) else values
    contents = (value["content"] if isinstance(value, dict) else value for value in named)
    return {content for content in contents if isinstance(content, str)}


def load_tokenizer(name_or_path: str, revision: str | None = None) -> "PreTrainedTokenizerBase":
    """Load a fast tokenizer from a folder or the Hub. Raises `UserError` if it lacks an end-of-text token."""
    from transformers import AutoTokenizer

    check_local_path(name_or_path)
    try:
        local = not Path(name_or_path).is_dir() and only_cached(name_or_path)
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, revision=revision, local_files_only=local)
    except Exception as error:  # transformers and the Hub client raise OSError, ValueError, KeyError, ...
        where = f"'{name_or_path}' (neither a folder with tokenizer.json nor a Hub id that can be reached)"
        files, folder = ("vocab.json", "merges.txt"), Path(name_or_path)
        if all((folder / name).is_file() for name in files) and not (folder / "tokenizer_config.json").exists():
            remedy = 'for a tokenizer like GPT-2\'s, create it with {"tokenizer_class": "GPT2Tokenizer"}'
            raise UserError(f"there is no tokenizer_config.json in {name_or_path}; {remedy}") from error
        raise UserError(f"no tokenizer at {where}: {one_line(error)}") from error
    # Transformers 5 creates an empty tokenizer for a folder that holds a GPT-2 model without a tokenizer.
    if not tokenizer.is_fast or len(tokenizer) <= len(tokenizer.all_special_ids):
        remedy = "save a fast tokenizer there or pass --tokenizer_name"
        raise UserError(f"there is no tokenizer.json in {name_or_path}; {remedy}")
    if tokenizer.eos_token_id is None:
        remedy = "set its eos_token and save it again"
        raise UserError(f"the tokenizer at {name_or_path} has no end-of-text token; {remedy}")
    return tokenizer


def load_saved_tokenizer(directory: Path, sha256: str) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a packed dataset for a model. Raises `UserError` if its `tokenizer_sha256` is another."""
    tokenizer = load_tokenizer(str(directory))
    if tokenizer_sha256(tokenizer) != sha256:
        raise UserError(f"{directory} is not the tokenizer that made this dataset; prepare the dataset again")
    return tokenizer


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Train a byte-level BPE like GPT-2's: it encodes any text, and `<|endoftext|>` ends documents.

    A small text may yield fewer than vocab_size tokens, but at least 257.
    """
    from transformers import GPT2Tokenizer

    size = 100_000  # slices long texts, because a single thread counts each
    slices = (text[start : start + size] for text in documents for start in range(0, len(text), size))
    trained = GPT2Tokenizer().train_new_from_iterator(slices, vocab_size=vocab_size, show_progress=False)
    return _plain(trained)


def describe_vocabulary(tokenizer: TextTokenizer, vocab_size: int) -> str:
    """Return the size of a newly trained tokenizer, and why it is not vocab_size."""
    if len(tokenizer) == vocab_size:
        return f"{vocab_size:,} tokens"
    return f"{len(tokenizer):,} tokens (the text is too small for the requested {vocab_size:,})"


def tokenizer_sha256(tokenizer: "TextTokenizer | PreTrainedTokenizerBase") -> str:
    """Hash everything that turns text into ids. Saving and loading does not change it."""
    return tokenizer.sha256 if isinstance(tokenizer, TextTokenizer) else _sha256(tokenizer)


def _sha256(tokenizer: "TextTokenizer | PreTrainedTokenizerBase") -> str:
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    relevant = {key: content[key] for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
    relevant["eos_token_id"] = tokenizer.eos_token_id
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()


def count_token_bytes(tokenizer: "TextTokenizer | PreTrainedTokenizerBase") -> np.ndarray:
    """Count the bytes of text of each id, int64 [vocabulary]; special tokens have none."""
    characters, backend = set(ByteLevel.alphabet()), tokenizer.backend_tokenizer
    special = {tokenizer.eos_token, *(t.content for t in backend.get_added_tokens_decoder().values() if t.special)}
    vocabulary = {token: index for token, index in backend.get_vocab().items() if token not in special}
    is_byte_level = characters.issuperset("".join(vocabulary))
    counts = np.zeros(len(tokenizer), np.int64)
    for token, index in vocabulary.items():
        if is_byte_level or re.fullmatch("<0x[0-9A-F]{2}>", token):
            counts[index] = len(token) if is_byte_level else 1
        else:  # SentencePiece's mark of a space
            counts[index] = len(token.replace("\u2581", " ").encode())
    return counts


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", directory: Path, block_size: int) -> None:
    """Save a tokenizer with the context length of its model."""
    tokenizer.model_max_length = block_size
    tokenizer.save_pretrained(directory)
