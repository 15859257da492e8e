"""Tokenizers: load, train, identify, save.

A tokenizer is its tokenizer.json. `PreTrainedTokenizerFast` loads it as it is; other classes of Transformers 5, such
as GPT2Tokenizer, rebuild parts of it. The processes that tokenize get the JSON, and import nothing from transformers.
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm

from recipe.disk import write_file
from recipe.environment import only_cached
from recipe.errors import UserError, check_local_path, one_line, short_reason
from recipe.progress import progress_target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
OWN_CLASS = "PreTrainedTokenizerFast"
TOKENIZER_CONFIG = "tokenizer_config.json"
ADDING_OPTIONS = ("add_bos_token", "add_eos_token")  # classes of Transformers make a template from these
DROP_SPACES = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit"}  # in tokenizer.json
LONG_WORD = re.compile(r"\S{1000}(?=\S)")


def load_tokenizer(name_or_path: str, revision: str | None = None) -> "PreTrainedTokenizerFast":
    """Load a tokenizer from a folder or the Hub: its tokenizer.json as it is, or what its class makes of other files.

    Raises `UserError` if it lacks an end-of-text token.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.utils.hub import has_file

    def by_class() -> Any:
        from transformers import AutoTokenizer  # imports torch, which takes seconds

        return AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False, **options)

    check_local_path(name_or_path)
    try:
        local = not Path(name_or_path).is_dir() and only_cached(name_or_path)
        options: dict[str, Any] = {"revision": revision, "local_files_only": local}
        if has_file(name_or_path, "tokenizer.json", **options):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(name_or_path, trust_remote_code=False, **options)
            if tokenizer.eos_token is None:  # only its class knows it: GPT-2's files on the Hub do not name it
                tokenizer.add_special_tokens(by_class().special_tokens_map)
        else:
            tokenizer = by_class()
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
    if not document_prefix:
        without_template(tokenizer)
        tokenizer.bos_token = tokenizer.eos_token  # what is in front of a document
    tokenizer.split_special_tokens = tokenizer.init_kwargs["split_special_tokens"] = not parse_special_tokens
    return tokenizer


def saved_files(tokenizer: "PreTrainedTokenizerFast") -> dict[str, bytes]:
    """Return the files of a tokenizer, by name, as Transformers 4 and 5 read them. Raises `UserError` on failure."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    except Exception as error:  # tokenizers (0.23) raises a plain one if the disk is full
        raise UserError(f"cannot write a tokenizer to {tempfile.gettempdir()}: {short_reason(error)}") from error
    config = json.loads(files[TOKENIZER_CONFIG])
    # These two say how this process loaded the tokenizer.
    config = {key: value for key, value in config.items() if key not in ("is_local", "local_files_only")}
    return files | {TOKENIZER_CONFIG: as_json(config | for_transformers_4(config))}


def save_tokenizer(tokenizer: "PreTrainedTokenizerFast", directory: Path) -> None:
    """Write a tokenizer's files atomically, tokenizer.json last."""
    for name, content in sorted(saved_files(tokenizer).items(), key=lambda item: item[0] == "tokenizer.json"):
        write_file(directory / name, content)


def for_transformers_4(config: dict[str, Any]) -> dict[str, Any]:
    """Return the changes that let Transformers 4 read a tokenizer_config.json written by 5.24."""
    changes: dict[str, Any] = {}
    if config.get("tokenizer_class") == "TokenizersBackend":
        names = config.get("model_input_names", ["input_ids", "attention_mask"])  # 4 adds token_type_ids
        changes = {"tokenizer_class": OWN_CLASS, "model_input_names": names}
    tokens = config.get("extra_special_tokens")
    if isinstance(tokens, list):
        changes |= {"additional_special_tokens": tokens, "extra_special_tokens": {}}
    return changes


def as_json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


# ------------------------------------------------------------------ train


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE like GPT-2's: it encodes any text, and `<|endoftext|>` ends documents.

    A small text may yield fewer than vocab_size tokens, but at least 257.
    """
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(continuing_subword_prefix="", end_of_word_suffix=""))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END_OF_TEXT], **options)
    size = 100_000  # characters per slice of a text, because one thread counts each slice
    slices = (text[start : start + size] for text in documents for start in range(0, len(text), size))
    options = {"unit": "char", "unit_scale": True, "dynamic_ncols": True, "delay": 2, **progress_target()}
    with tqdm(desc="train tokenizer", **options) as progress:

        def words() -> Iterator[str]:
            for text in slices:
                yield from cut_words(text)
                progress.update(len(text))

        backend.train_from_iterator(words(), trainer)
    end = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **end)


def cut_words(text: str) -> Iterator[str]:
    """Cut stretches without white space every 1,000 characters: training takes quadratic time in a word's length."""
    start = 0
    for word in LONG_WORD.finditer(text):
        yield text[start : word.end()]
        start = word.end()
    yield text[start:]


# ------------------------------------------------------------------ what its ids are


def tokenizer_sha256(tokenizer: "PreTrainedTokenizerFast") -> str:
    """Hash everything that turns text into ids. Saving and loading does not change it."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    relevant = {key: content[key] for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
    relevant["eos_token_id"] = tokenizer.eos_token_id
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()


def count_ids(tokenizer: "PreTrainedTokenizerFast", with_added_tokens: bool = True) -> int:
    """Return the largest id + 1, which is more than the number of tokens if there are gaps."""
    return 1 + max(tokenizer.backend_tokenizer.get_vocab(with_added_tokens).values(), default=-1)


def end_of_text(tokenizer: "PreTrainedTokenizerFast") -> int:
    """Return the id of the end-of-text token; Transformers' type allows anything."""
    return cast(int, tokenizer.eos_token_id)


def list_ids(ids: int | list[int] | None) -> list[int]:
    """Return the ids that a model's config has for a role: none, one or several."""
    if ids is None:
        return []
    return ids if isinstance(ids, list) else [ids]


def special_tokens(tokenizer: "PreTrainedTokenizerFast") -> dict[int, str]:
    """Return the tokens that stand for no text, by id. The one for unknown text does."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    unknown = unknown_id(tokenizer)
    special = {index: token.content for index, token in added.items() if token.special and index != unknown}
    return special | {end_of_text(tokenizer): str(tokenizer.eos_token)}


def text_ids(tokenizer: "PreTrainedTokenizerFast") -> np.ndarray:
    """Return which ids stand for text, bool [vocabulary]."""
    is_text = np.ones(count_ids(tokenizer), bool)
    is_text[list(special_tokens(tokenizer))] = False
    return is_text


def unknown_id(tokenizer: "PreTrainedTokenizerFast") -> int | None:
    """Return the id for text that the tokenizer cannot spell; None if it spells all bytes, or has no such id."""
    backend = tokenizer.backend_tokenizer
    if spells_bytes(backend):
        return None
    if isinstance(backend.model, models.Unigram):
        return json.loads(backend.model.__getstate__())["unk_id"]
    return backend.token_to_id(getattr(backend.model, "unk_token", None) or "")


def pre_tokenizers_of(backend: Tokenizer) -> list[dict[str, Any]]:
    """Return what splits a text into words, as in tokenizer.json."""
    state = json.loads(backend.pre_tokenizer.__getstate__()) if backend.pre_tokenizer else {"pretokenizers": []}
    return state.get("pretokenizers", [state])


def spells_bytes(backend: Tokenizer) -> bool:
    """Return whether all bytes have tokens, as in GPT-2's vocabulary and its successors'."""
    is_byte_level = any(part["type"] == "ByteLevel" for part in pre_tokenizers_of(backend))
    return is_byte_level and None not in map(backend.token_to_id, pre_tokenizers.ByteLevel.alphabet())


def count_token_bytes(tokenizer: "PreTrainedTokenizerFast") -> np.ndarray | None:
    """Count the bytes of text of each id, int64 [vocabulary]; special tokens have none.

    None unless the tokenizer spells all bytes and changes none; otherwise, ids do not say how long their text was.
    """
    backend = tokenizer.backend_tokenizer
    parts = pre_tokenizers_of(backend)
    changes = any(part.get("add_prefix_space") or part.get("behavior") == "Removed" for part in parts)
    changes = changes or backend.normalizer is not None or any(part["type"] in DROP_SPACES for part in parts)
    if changes or not spells_bytes(backend):
        return None
    counts = np.zeros(count_ids(tokenizer), np.int64)
    for token, index in backend.get_vocab(with_added_tokens=False).items():
        counts[index] = len(token)
    for index, token in backend.get_added_tokens_decoder().items():  # as they are in the text
        counts[index] = len(token.content.encode())
    counts[list(special_tokens(tokenizer))] = 0
    return counts


# ------------------------------------------------------------------ what is put around a text


def added_ids(tokenizer: "PreTrainedTokenizerFast") -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer's template puts before and after each text."""
    backend = tokenizer.backend_tokenizer
    text = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    start = next(i for i in range(len(whole)) if whole[i : i + len(text)] == text)
    return whole[:start], whole[start + len(text) :]


def document_start(tokenizer: "PreTrainedTokenizerFast") -> list[int]:
    """Return the ids before a document in training: the template's, or the end of the previous document."""
    return added_ids(tokenizer)[0] or [end_of_text(tokenizer)]


def without_template(tokenizer: "PreTrainedTokenizerFast") -> "PreTrainedTokenizerFast":
    """Let a tokenizer put nothing around a text, and return it. New models are trained that way."""
    if any(added_ids(tokenizer)):
        tokenizer.backend_tokenizer.post_processor = None
        tokenizer.init_kwargs.update(dict.fromkeys(ADDING_OPTIONS, False))
    return tokenizer
