"""Options -> a source of text, and what identifies it: its files, or a dataset of the Hub at one commit."""

import dataclasses
import functools
import hashlib
import os
import re
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from recipe.config import STANDARD_LIBRARY, TEXT_OPTIONS, TrainConfig, check_value
from recipe.data.files import (
    TOKENS,
    Files,
    digest_files,
    find_files,
    identify_files,
    identify_standard_library,
    is_packed,
    kind_of,
)
from recipe.data.tokenizer import count_ids
from recipe.data.tokens import read_token_file
from recipe.errors import UserError, check_local_path, one_line

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerFast

NUM_UNITS = 256  # of a large source
SMALLEST_UNIT = 8_000_000  # bytes of text; a source with less text has fewer units


@dataclass(frozen=True)
class TextSource:
    """Where documents come from. Without validation text, a share of the training documents is held out.

    train_files, validation_files: files, folders (all supported files in them) and glob patterns.
    dataset_revision: branch, tag or commit of a dataset on the Hub; by default the newest.
    text_column_name: the column that holds the text of a row.
    document_separator: cuts text files into documents, for example a blank line; without it, a file is a document.
    parse_special_tokens: whether special tokens of the tokenizer in a text become their ids.
    vocab_size: of the tokenizer that made token files; their ids have 32 bits if it is above 65,536.
    """

    train_files: tuple[str, ...] = ()
    validation_files: tuple[str, ...] = ()
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    dataset_revision: str | None = None
    dataset_split: str = "train"
    text_column_name: str = "text"
    document_separator: str | None = None
    validation_split_percentage: float = 5.0
    parse_special_tokens: bool = False
    vocab_size: int = 2**16

    def __post_init__(self):
        for is_valid, message in (
            (bool(self.train_files) != bool(self.dataset_name), "pass exactly one of --train_file and --dataset_name"),
            (self.train_files or not self.validation_files, "--validation_file needs --train_file"),
            (self.document_separator != "", "document_separator must not be empty"),
        ):
            if not is_valid:
                raise UserError(message)
        separator = self.document_separator
        if separator:  # a shell passes \n as two characters
            for escaped, character in (("\\n", "\n"), ("\\t", "\t"), ("\\r", "\r")):
                separator = separator.replace(escaped, character)
            object.__setattr__(self, "document_separator", separator)

    def __reduce__(self):  # without what is cached; another process opens the dataset itself, at the same commit
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return TextSource, tuple((options | {"dataset_revision": self.commit}).values())

    @functools.cached_property
    def held_out_files(self) -> Files:
        """The separate validation files."""
        return find_files(self.validation_files)

    @functools.cached_property
    def files(self) -> Files:
        """The training files, which exclude the validation files."""
        return find_files(self.train_files, self.held_out_files.paths)

    @functools.cached_property
    def is_tokenized(self) -> bool:
        """Whether the files are token files of other programs. Raises `UserError` if only some of them are."""
        paths = [*self.files.paths, *self.held_out_files.paths]
        count = sum(kind_of(path) == TOKENS for path in paths)
        if 0 < count < len(paths):
            remedy = "prepare both with scripts/prepare_data.py, and pass --dataset_dir A B"
            raise UserError(f"{self.name}: {TOKENS} files of token ids and text are two datasets; {remedy}")
        return count > 0

    def for_tokenizer(self, tokenizer: "PreTrainedTokenizerFast | None") -> "TextSource":
        """Return the source as it is read for a tokenizer, which token files must have."""
        if not self.is_tokenized:
            return self
        if tokenizer is None:
            raise UserError(f"{self.name} is already tokenized; pass its --tokenizer_name")
        size = count_ids(tokenizer)
        return self if size == self.vocab_size else dataclasses.replace(self, vocab_size=size)

    @property
    def has_validation(self) -> bool:
        """Whether the validation text is separate, not held out of the training documents."""
        if self.dataset_name in (None, STANDARD_LIBRARY):
            return bool(self.validation_files)
        return self.dataset_split == "train" and "validation" in self.dataset

    @property
    def name(self) -> str:
        """For messages."""
        return self.dataset_name or ", ".join(self.train_files[:3])

    @property
    def splits_lines(self) -> bool:
        """Whether each line is a document, as `datasets` reads .txt files."""
        paths = () if self.dataset_name in (None, STANDARD_LIBRARY) else self.dataset_paths or ()
        return any(".txt" in Path(path).suffixes for path in paths)

    @functools.cached_property
    def dataset(self) -> "dict[str, OpenedSplit]":
        return open_hub_splits(self.name, self.dataset_config_name, self.commit)

    def describe(self) -> dict:
        """Return the source as the metadata of a prepared dataset records it."""
        names = ("dataset_name", "dataset_config_name") if self.dataset_name else ("train_files", "validation_files")
        held_out = None if self.has_validation else self.validation_split_percentage
        described = {**{name: getattr(self, name) for name in names}, "validation_split_percentage": held_out}
        return described | {"dataset_revision": self.commit}

    # -------------------------------------------------------------- identity

    @functools.cached_property
    def inputs(self) -> dict:
        """What determines the text: options, and names, sizes and content of the files, as JSON.

        `content` is None if the Hub is out of reach.
        """
        names = ("text_column_name", "document_separator", "validation_split_percentage")
        options = {name: getattr(self, name) for name in names}
        if self.parse_special_tokens:
            options["parse_special_tokens"] = True
        if self.dataset_name is not None:
            options |= {name: getattr(self, name) for name in ("dataset_config_name", "dataset_split")}
            options["dataset_name"] = self.dataset_name if self.is_on_hub else Path(self.dataset_name).name
        return {**options, "content": self.content_identity()}

    def content_identity(self) -> list[str] | str | None:
        """Return what identifies the content."""
        if self.dataset_name is None:
            digest = self.count_ids if self.is_tokenized else None
            return [identify_files(files.paths, digest) for files in (self.files, self.held_out_files)]
        if self.dataset_name == STANDARD_LIBRARY:
            return identify_standard_library()
        if (paths := self.dataset_paths) is None:
            return None
        if self.is_on_hub and self.hub_files:
            names = [path.partition(f"@{self.commit}/")[2] for path in paths]
            files = [(name, *self.hub_files[1][name]) for name in names]
        else:
            names = [os.path.relpath(path, self.dataset_name) for path in paths]
            files = list(zip(names, digest_files(paths), map(os.path.getsize, paths), strict=True))
        return hashlib.sha256(repr(sorted(files)).encode()).hexdigest()

    @functools.cached_property
    def token_files(self) -> dict[str, dict[str, Any]]:
        """The token files that `count_ids` has read so far, by path: their type, size, hash and counts."""
        return {}

    def count_ids(self, path: str) -> str:
        """Count the ids of a token file. Returns its hash, which the same pass finds."""
        self.token_files[path] = read_token_file(
            path, self.vocab_size, not self.has_validation and self.held_out_share
        )
        return self.token_files[path]["digest"]

    @property
    def held_out_share(self) -> float:
        return self.validation_split_percentage / 100

    @property
    def num_dataset_bytes(self) -> int:
        """The size of the files of the dataset that are read; 0 if the Hub does not say."""
        if (paths := self.dataset_paths) is None:
            return 0
        if self.is_on_hub and self.hub_files:
            return sum(self.hub_files[1][path.partition(f"@{self.commit}/")[2]][1] for path in paths)
        return sum(map(os.path.getsize, paths))

    # -------------------------------------------------------------- the Hub

    @property
    def is_on_hub(self) -> bool:
        return self.dataset_name not in (None, STANDARD_LIBRARY) and not Path(self.dataset_name).exists()

    @functools.cached_property
    def hub_files(self) -> tuple[str | None, dict[str, tuple[str | None, int]]] | None:
        """The commit of a dataset on the Hub, and hash and bytes of its files. None if the Hub does not say."""
        from huggingface_hub import HfApi  # imported here because it takes 0.1 s, which files do not need

        try:
            options: dict[str, Any] = {"revision": self.dataset_revision, "files_metadata": True, "timeout": 30}
            info = HfApi().dataset_info(self.name, **options)
        except Exception:  # no network or no such dataset: opening it raises the error that says which
            return None
        return info.sha, {file.rfilename: (file.blob_id, file.size or 0) for file in info.siblings or ()}

    @property
    def commit(self) -> str | None:
        """The commit of a dataset on the Hub, as found by the first look-up of its revision."""
        if not self.is_on_hub:
            return None
        return self.hub_files[0] if self.hub_files else self.dataset_revision

    @functools.cached_property
    def dataset_paths(self) -> list[str] | None:
        """The files of the splits that are read. None if the Hub does not say what they hold."""
        if self.is_on_hub and self.hub_files is None:
            return None
        read = {self.dataset_split}
        if self.has_validation:
            read.add("validation")
        return [path for split in sorted(read & set(self.dataset)) for path in self.dataset[split].files]


class OpenedSplit(NamedTuple):
    rows: "datasets.IterableDataset"  # in as many shards as it has
    files: list[str]


def open_hub_splits(name: str, config_name: str | None, commit: str | None) -> dict[str, OpenedSplit]:
    """Open a Hub dataset, a local one, or one written by `save_to_disk`.

    Raises `UserError` if that fails, or if its card names files of others.
    """
    import datasets  # imported here because it takes a second, which files do not need

    folder = Path(name)
    opened = {}
    check_local_path(name)
    if is_packed(folder):
        raise UserError(f"{name} is a packed dataset; pass it as --dataset_dir")
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            loaded = datasets.load_from_disk(folder)
            splits = loaded if isinstance(loaded, dict) else {"train": loaded}
            for split, rows in splits.items():
                num_shards = max(1, min(len(rows), NUM_UNITS, (rows.data.nbytes or 0) // SMALLEST_UNIT))
                shards = rows.with_format(None).to_iterable_dataset(num_shards=num_shards)
                opened[split] = OpenedSplit(shards, [file["filename"] for file in rows.cache_files])
                check_inside(name, opened[split].files)
            return opened
        builder: Any = datasets.load_dataset_builder(name, config_name, revision=commit)
        for files in builder.config.data_files.values():
            check_inside(name, files)
        for split, rows in builder.as_streaming_dataset().items():
            opened[split] = OpenedSplit(rows.reshard(), list(builder.config.data_files[split]))
        return opened
    except UserError:
        raise
    except Exception as error:  # the Hub client, datasets and the file system raise various errors
        raise UserError(f"cannot open dataset {name}: {one_line(error)}") from error


def check_inside(name: str, paths: Iterable[str]) -> None:
    """Raise `UserError` for a file outside of a dataset, which its card, written by a stranger, may name."""
    folder = Path(name)
    roots = [folder.absolute(), folder.resolve()] if folder.is_dir() else []
    for path in paths:
        is_own = path.startswith(f"hf://datasets/{name}@") and ".." not in Path(path).parts
        is_own = is_own or any(Path(os.path.abspath(path)).is_relative_to(root) for root in roots if "://" not in path)
        if not is_own:
            raise UserError(f"dataset {name} names a file outside of it: {path}")


def source_from(config: TrainConfig | Namespace) -> TextSource:
    """Build the text source of a run's config or a script's arguments. Raises `UserError` if it does not exist."""
    options = {name: getattr(config, name) for name in ("dataset_name", *TEXT_OPTIONS)}
    for name, value in options.items():
        check_value(name, value)
    source = TextSource(tuple(config.train_file or ()), tuple(options.pop("validation_file") or ()), **options)
    _ = source.files  # raises if they do not exist
    return source


def name_of_text(text: str) -> str:
    """Derive a folder name from a path, pattern or Hub id: its last part without suffixes and special characters.

    The name has room for additions: the limit is 255 characters, and 143 on an encrypted disk (eCryptfs).
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(text).name.split(".")[0])[:100].strip("-.") or "text"
