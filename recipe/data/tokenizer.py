"""Tokenizers: load, train, identify, save.

A tokenizer is its tokenizer.json. The processes that tokenize read it directly; transformers, which takes seconds to
import, loads the tokenizers of users.
"""

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import Unigram, WordPiece
from tqdm import tqdm

from recipe.environment import only_cached
from recipe.errors import UserError, check_local_path, one_line
from recipe.progress import progress_target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Types of the parts of a tokenizer.json.
DROP_SPACES = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit", "Removed"}
SPELLS_BYTES = "ByteLevel"
ADDING_OPTIONS = ("add_bos_token", "add_eos_token")  # classes of Transformers make a template from these
# Loads any tokenizer.json as it is. In Transformers 5, classes such as GPT2Tokenizer rebuild parts of it.
OWN_CLASS = "PreTrainedTokenizerFast"
LONG_WORD = re.compile(r"\S{1000}(?=\S)")


@dataclass
class TextTokenizer:
    """A tokenizer.json and its tokenizer_config.json, with the names that transformers' tokenizers have."""

    backend_tokenizer: Tokenizer
    config: dict

    @property
    def eos_token(self) -> str:
        token = self.config["eos_token"]
        return token["content"] if isinstance(token, dict) else token

    @property
    def eos_token_id(self) -> int:
        return cast(int, self.backend_tokenizer.token_to_id(self.eos_token))  # `read_tokenizer` found it

    @functools.cached_property
    def token_bytes(self) -> np.ndarray:
        """From `count_token_bytes`, int64 [vocabulary]."""
        return count_token_bytes(self)

    def __len__(self) -> int:
        return len(self.token_bytes)

    @functools.cached_property
    def unknown_id(self) -> int | None:
        return unknown_id(self)

    @functools.cached_property
    def prefix(self) -> list[int]:
        """The ids in front of each document."""
        return added_ids(self)[0]

    @functools.cached_property
    def sha256(self) -> str:
        return _sha256(self)

    @property
    def files(self) -> dict[str, bytes]:
        """Both files, by name."""
        config = json.dumps(self.config, indent=2, sort_keys=True) + "\n"
        content = {"tokenizer.json": self.backend_tokenizer.to_str(pretty=True), "tokenizer_config.json": config}
        return {name: text.encode() for name, text in content.items()}

    def save_pretrained(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (directory / name).write_bytes(content)


def open_tokenizer(directory: Path) -> TextTokenizer:
    """Open the tokenizer of a prepared dataset."""
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return TextTokenizer(backend, json.loads((directory / "tokenizer_config.json").read_text("utf-8")))


def read_tokenizer(name_or_path: str) -> TextTokenizer:
    """Read a tokenizer from a folder or the Hub. Raises `UserError` if it lacks an end-of-text token."""
    return _plain(load_tokenizer(name_or_path))


def _plain(tokenizer: "PreTrainedTokenizerFast") -> TextTokenizer:
    """Keep what determines the ids, and the template for chats."""
    config = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name.endswith("_token")}
    config |= {"chat_template": tokenizer.chat_template} if tokenizer.chat_template else {}
    return TextTokenizer(tokenizer.backend_tokenizer, config | {"tokenizer_class": OWN_CLASS})


def load_tokenizer(name_or_path: str, revision: str | None = None) -> "PreTrainedTokenizerFast":
    """Load a tokenizer from a folder or the Hub: its tokenizer.json as it is, or what its class makes of other files.

    Raises `UserError` if it lacks an end-of-text token.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils.hub import has_file

    check_local_path(name_or_path)
    try:
        local = not Path(name_or_path).is_dir() and only_cached(name_or_path)
        options: dict[str, Any] = {"revision": revision, "local_files_only": local}
        auto_class = PreTrainedTokenizerFast if has_file(name_or_path, "tokenizer.json", **options) else AutoTokenizer
        tokenizer = auto_class.from_pretrained(name_or_path, trust_remote_code=False, **options)
        if tokenizer.eos_token is None:  # the class may know it
            by_class = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False, **options)
            tokenizer.add_special_tokens(by_class.special_tokens_map)
    except Exception as error:  # transformers and the Hub client raise OSError, ValueError, KeyError, ...
        where = f"'{name_or_path}' (neither a folder with tokenizer.json nor a Hub id that can be reached)"
        raise UserError(f"no tokenizer at {where}: {one_line(error)}") from error
    # Transformers 5 creates an empty tokenizer for a folder that holds a GPT-2 model without a tokenizer.
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or len(tokenizer) <= len(tokenizer.all_special_ids):
        remedy = "save a fast tokenizer there or pass --tokenizer_name"
        raise UserError(f"there is no tokenizer.json in {name_or_path}; {remedy}")
    if tokenizer.eos_token_id is None:
        remedy = "set its eos_token and save it again"
        raise UserError(f"the tokenizer at {name_or_path} has no end-of-text token; {remedy}")
    return tokenizer


def load_saved_tokenizer(
    directory: Path, sha256: str, document_prefix: list[int], parse_special_tokens: bool
) -> "PreTrainedTokenizerFast":
    """Load the tokenizer of a packed dataset, set to encode text as it was packed.

    Raises `UserError` if its `tokenizer_sha256` is not this one.
    """
    tokenizer = load_tokenizer(str(directory))
    if tokenizer_sha256(tokenizer) != sha256:
        raise UserError(f"{directory} is not the tokenizer that made this dataset; prepare the dataset again")
    if added_ids(tokenizer) != ([], []) and not document_prefix:
        tokenizer.backend_tokenizer.post_processor = None
    if not document_prefix:
        tokenizer.bos_token = tokenizer.eos_token  # what is in front of a document
    tokenizer.split_special_tokens = tokenizer.init_kwargs["split_special_tokens"] = not parse_special_tokens
    return tokenizer


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Train a byte-level BPE like GPT-2's: it encodes any text, and `<|endoftext|>` ends documents.

    A small text may yield fewer than vocab_size tokens, but at least 257.
    """
    from transformers import GPT2Tokenizer

    size = 100_000  # characters per slice of a text, because one thread counts each slice
    slices = (text[start : start + size] for text in documents for start in range(0, len(text), size))
    options = {"unit": "char", "unit_scale": True, "dynamic_ncols": True, "delay": 2, **progress_target()}
    with tqdm(desc="train tokenizer", **options) as progress:

        def words() -> Iterator[str]:
            for text in slices:
                yield from cut_words(text)
                progress.update(len(text))

        trained = GPT2Tokenizer().train_new_from_iterator(words(), vocab_size=vocab_size, show_progress=False)
    return _plain(trained)


def cut_words(text: str) -> Iterator[str]:
    """Cut stretches without white space every 1,000 characters: training takes quadratic time in a word's length."""
    start = 0
    for word in LONG_WORD.finditer(text):
        yield text[start : word.end()]
        start = word.end()
    yield text[start:]


def describe_vocabulary(tokenizer: TextTokenizer, vocab_size: int) -> str:
    """Return the size of a newly trained tokenizer, and why it is not vocab_size."""
    if len(tokenizer) == vocab_size:
        return f"{vocab_size:,} tokens"
    return f"{len(tokenizer):,} tokens (the text is too small for the requested {vocab_size:,})"


def tokenizer_sha256(tokenizer: "TextTokenizer | PreTrainedTokenizerFast") -> str:
    """Hash everything that turns text into ids. Saving and loading does not change it."""
    return tokenizer.sha256 if isinstance(tokenizer, TextTokenizer) else _sha256(tokenizer)


def _sha256(tokenizer: "TextTokenizer | PreTrainedTokenizerFast") -> str:
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    relevant = {key: content[key] for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
    relevant["eos_token_id"] = tokenizer.eos_token_id
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()


def count_ids(tokenizer: "TextTokenizer | PreTrainedTokenizerFast", with_added_tokens: bool = True) -> int:
    """Return the largest id + 1, which is more than the number of tokens if there are gaps."""
    return 1 + max(tokenizer.backend_tokenizer.get_vocab(with_added_tokens).values(), default=-1)


def end_of_text(tokenizer: "TextTokenizer | PreTrainedTokenizerFast") -> int:
    """Return the id of the end-of-text token; Transformers' type allows anything."""
    return cast(int, tokenizer.eos_token_id)


def list_ids(ids: int | list[int] | None) -> list[int]:
    """Return the ids that a model's config has for a role: none, one or several."""
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def special_tokens(tokenizer: TextTokenizer) -> set[str]:
    """Return the tokens that stand for no text."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    return {tokenizer.eos_token, *(token.content for token in added if token.special)}


def state_of(part: Any) -> dict:
    """Return a part of a tokenizer as in tokenizer.json. Writing the whole tokenizer would take 0.1 s."""
    return json.loads(part.__getstate__())


def steps_of(backend: Tokenizer) -> set[str]:
    """Return the types of the pre-tokenizers and decoders; `Removed` for one that drops what it matches."""

    def types(state: dict) -> Iterator[str]:
        yield "Removed" if state.get("behavior") == "Removed" else state["type"]
        for part in state.get("pretokenizers") or state.get("decoders") or ():
            yield from types(part)

    parts = (backend.pre_tokenizer, backend.decoder)
    return {name for part in parts if part is not None for name in types(state_of(part))}


def unknown_id(tokenizer: "TextTokenizer | PreTrainedTokenizerFast") -> int | None:
    """Return the id for text that the tokenizer cannot spell; None if it spells all bytes, or has no such id."""
    backend = tokenizer.backend_tokenizer
    if SPELLS_BYTES in steps_of(backend):
        return None
    if isinstance(backend.model, Unigram):
        return state_of(backend.model)["unk_id"]
    return backend.token_to_id(backend.model.unk_token or "")


def count_token_bytes(tokenizer: "TextTokenizer | PreTrainedTokenizerFast") -> np.ndarray:
    """Count the bytes of text of each id, int64 [vocabulary].

    Special tokens have 0. The count is -1 where it is unknown: for the token of unknown text, and for all tokens of a
    tokenizer that drops white space.
    """
    backend = tokenizer.backend_tokenizer
    steps, counts = steps_of(backend), np.zeros(count_ids(tokenizer), np.int64)
    count_bytes = functools.partial(_count_spelled, has_bytes=_has_bytes(backend))
    if SPELLS_BYTES in steps:
        count_bytes = len  # each character of such a token stands for a byte
    for token, index in backend.get_vocab(with_added_tokens=False).items():
        counts[index] = count_bytes(token)
    if steps & DROP_SPACES or isinstance(backend.model, WordPiece):
        counts[:] = -1
    for index, token in backend.get_added_tokens_decoder().items():  # as they are in the text
        counts[index] = 0 if token.special else len(token.content.encode())
    if (unknown := unknown_id(tokenizer)) is not None:
        counts[unknown] = -1
    counts[end_of_text(tokenizer)] = 0
    return counts


def _has_bytes(backend: Tokenizer) -> bool:
    """Return whether tokens such as <0xE4> stand for one byte."""
    model = backend.model
    return state_of(model)["byte_fallback"] if isinstance(model, Unigram) else getattr(model, "byte_fallback", False)


def _count_spelled(token: str, has_bytes: bool) -> int:
    """Count the bytes of a token that spells its text, as SentencePiece's do."""
    if has_bytes and re.fullmatch("<0x[0-9A-F]{2}>", token):
        return 1
    return len(token.replace("\u2581", " ").encode())


# ------------------------------------------------------------------ what is put around a text


def added_ids(tokenizer: "TextTokenizer | PreTrainedTokenizerFast") -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer's template puts before and after each text."""
    backend = tokenizer.backend_tokenizer
    text, whole = (backend.encode("a", add_special_tokens=added).ids for added in (False, True))
    start = next(i for i in range(len(whole)) if whole[i : i + len(text)] == text)
    return whole[:start], whole[start + len(text) :]


def document_start(tokenizer: "PreTrainedTokenizerFast") -> list[int]:
    """Return the ids before a document in training: the template's, or the end of the previous document."""
    return added_ids(tokenizer)[0] or [end_of_text(tokenizer)]


def without_template(tokenizer: TextTokenizer) -> TextTokenizer:
    """Return a tokenizer that puts nothing around a text. New models are trained that way."""
    if not any(added_ids(tokenizer)):
        return tokenizer
    tokenizer.backend_tokenizer.post_processor = None
    return TextTokenizer(tokenizer.backend_tokenizer, tokenizer.config | dict.fromkeys(ADDING_OPTIONS, False))
