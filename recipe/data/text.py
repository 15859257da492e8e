"""Text: files, Hub datasets or the Python standard library -> a stream of documents, split by document.

A document comes as one or more pieces, the last of which says so. Nothing here knows about tokens.
"""

import functools
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import HfApi

from recipe.config import STANDARD_LIBRARY
from recipe.data.documents import Piece, cut_ids_into_documents, cut_off_tail, split_documents, take_head
from recipe.data.files import (
    COMPRESSIONS,
    Part,
    ReadReport,
    Text,
    count_bytes,
    expand_paths,
    file_sha256,
    kind_of,
    read_file,
    texts_of,
)
from recipe.data.standard_library import read_standard_library
from recipe.errors import UserError, check_not_a_missing_folder

if TYPE_CHECKING:  # imported where it is used: a packed dataset is trained on without it
    import datasets


@dataclass(frozen=True)
class TextSource:
    """Where documents come from; without validation files a share of the training documents is held out.

    train_files, validation_files: files, folders (all files below of a kind that can be read) and glob patterns.
    document_separator: cuts .txt files into documents, e.g. a blank line; without it, a file is a document.
    """

    train_files: tuple[str, ...] = ()
    validation_files: tuple[str, ...] = ()
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    dataset_split: str = "train"
    text_column_name: str = "text"
    document_separator: str | None = None
    validation_split_percentage: float = 5.0
    skip_bad_files: bool = False
    head_characters: int | None = None  # of training text; only these, and as many of validation text, are read
    num_shards: int = 1  # of which this one takes every num_shards-th file, or document where files are fewer
    shard_index: int = 0

    def __post_init__(self):
        if not 0 <= self.shard_index < self.num_shards:
            raise UserError(
                f"shard_index must be from 0 to num_shards - 1, got {self.shard_index} of {self.num_shards}"
            )
        if bool(self.train_files) == bool(self.dataset_name):
            raise UserError("pass exactly one of --train_file and --dataset_name")
        if self.validation_files and not self.train_files:
            raise UserError("--validation_file needs --train_file")
        if not 0 < self.validation_split_percentage < 100:
            raise UserError(
                f"validation_split_percentage must be between 0 and 100, got {self.validation_split_percentage}"
            )
        if self.document_separator == "":
            raise UserError("document_separator must not be empty")
        for path in self._files("train_files") + self._files("validation_files"):
            kind_of(path)  # named but not there, or of a kind that cannot be read

    @functools.cached_property
    def files(self) -> list[str]:
        """The files this shard reads, training files first. Raises `UserError` for one that is not there."""
        return self._shard(self._files("train_files")) + self._files("validation_files")

    def _files(self, kind: str) -> list[str]:
        return expand_paths(getattr(self, kind))

    def _shard(self, files: list[str]) -> list[str]:
        return files[self.shard_index :: self.num_shards] if len(files) >= self.num_shards else files

    @property
    def has_validation(self) -> bool:
        """Whether the validation text is given as a whole, rather than held out of the training documents."""
        if not self.dataset_name or self.dataset_name == STANDARD_LIBRARY:
            return bool(self.validation_files)
        return self.dataset_split == "train" and "validation" in self._splits

    @functools.cached_property
    def _splits(self) -> "dict[str, datasets.IterableDataset]":
        """The splits of dataset_name, opened once however often they are read."""
        return open_dataset(self.dataset_name, self.dataset_config_name, self.revision)

    @property
    def num_bytes(self) -> int | None:
        """Bytes of text to come, for a progress bar, or None where only reading would tell."""
        if (
            self.head_characters
            or self.dataset_name
            or any(Path(path.lower()).suffix in COMPRESSIONS for path in self.files)
        ):
            return None
        return sum(Path(path).stat().st_size for path in self.files)

    def describe(self) -> dict:
        """What the metadata of a prepared dataset says of its source."""
        held_out = None if self.has_validation else self.validation_split_percentage
        if self.dataset_name:
            description = {"dataset_name": self.dataset_name, "dataset_config_name": self.dataset_config_name}
        else:
            description = {"train_files": list(self.train_files), "validation_files": list(self.validation_files)}
        return {**description, "validation_split_percentage": held_out}

    def describe_emptiness(self, report: ReadReport) -> str:
        """The message for a source that gave no training document. report: of reading all of it."""
        names = [*self.train_files[:3], "..."] if len(self.train_files) > 3 else self.train_files
        where = f"there is no text in {f'dataset {self.dataset_name}' if self.dataset_name else ', '.join(names)}"
        if report.skipped:
            return f"{where}: skipped files: {len(report.skipped):,}, the first because: {report.skipped[0]}"
        return f"{where}: it is empty, or holds nothing but white space"

    def describe_unused_separator(self, report: ReadReport) -> str | None:
        """Why document_separator cut nothing, if it did not. report: of reading all documents."""
        if self.document_separator is None or report.num_separators:
            return None
        if not any(kind_of(path) == ".txt" for path in self.files):
            return "--document_separator has no effect: it cuts .txt files, and the text has none"
        return f"the document separator {self.document_separator!r} never occurs; each .txt file is one document"

    @functools.cached_property
    def revision(self) -> str | None:
        """The commit of a dataset on the Hub; None for local data, and where the Hub cannot be asked."""
        if not self.dataset_name or self.dataset_name == STANDARD_LIBRARY or Path(self.dataset_name).exists():
            return None
        try:
            return HfApi().dataset_info(self.dataset_name).sha
        except Exception:  # no network, no such dataset: loading it will say which
            return None

    @property
    def _options(self) -> tuple:
        """What decides the documents beside the text, for all shards of a whole."""
        return (
            self.dataset_name,
            self.dataset_config_name,
            self.dataset_split,
            self.revision,
            self.text_column_name,
            self.document_separator,
            self.validation_split_percentage,
            len(self._files("validation_files")),
            self.head_characters,
            self.num_shards,
            # Until has_validation looked for the split, shards without one lost text: they must not pass for these.
            *([self.has_validation] if self.dataset_name and self.num_shards > 1 else []),
        )

    @property
    def _local_dataset_files(self) -> list[Path]:
        """The files of dataset_name where it is a folder, sorted."""
        return (
            sorted(path for path in Path(self.dataset_name).rglob("*") if path.is_file()) if self.dataset_name else []
        )

    @property
    def whole_sha256(self) -> str:
        """The same for all shards of one whole, by its options and the names and sizes of all files."""
        files = [*map(Path, self._files("train_files") + self._files("validation_files")), *self._local_dataset_files]
        named = [(path.name, path.stat().st_size) for path in files]
        return hashlib.sha256(repr((self._options, named)).encode()).hexdigest()

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides the documents: the files' bytes, or the dataset's revision and files.

        Of files whose head alone is read, names, sizes and times stand for the bytes. (skip_bad_files is no part of
        it: what was done before a bad file turned up is as good with it.)
        """
        digest = hashlib.sha256(repr((*self._options, self.shard_index)).encode())
        for path in self.files:
            digest.update("".join(Path(path.lower()).suffixes[-2:]).encode())  # it decides how the bytes are read
            digest.update(_name_size_time(Path(path)) if self.head_characters else file_sha256(path))
        if self.dataset_name == STANDARD_LIBRARY:
            for document in read_standard_library():
                digest.update(document.encode())
        for path in self._local_dataset_files:
            digest.update(str(path.relative_to(self.dataset_name)).encode())
            digest.update(_name_size_time(path))
        return digest.hexdigest()

    def pieces(self, report: ReadReport | None = None, eos_token_id: int | None = None) -> Iterator[Piece]:
        """Every document in reading order, validation files and splits first. Raises `UserError` for bad input.

        Validation text that is given as a whole is in every shard, to find duplicates of it in the training text.
        report: is filled in while the documents are read; eos_token_id: ends documents in token ids.
        """
        pieces = self._all_pieces(report or ReadReport(), eos_token_id)
        return take_head(pieces, self.head_characters) if self.head_characters else pieces

    def _all_pieces(self, report: ReadReport, eos_token_id: int | None) -> Iterator[Piece]:
        def read_files(paths: Iterable[str]) -> Iterator[Part]:
            return cut_ids_into_documents(self._read_parts(paths, report), eos_token_id)

        def read_rows(rows: Iterable[dict]) -> Iterator[Part]:
            texts = texts_of(rows, self.text_column_name, f"dataset {self.dataset_name}")
            parts = ((text, True) for text in _guarded(texts, self.dataset_name))
            return cut_ids_into_documents(parts, eos_token_id)

        def read_train_files() -> Iterator[Part]:
            """This shard's files, or its part of the documents where there are fewer files than shards."""
            files = self._files("train_files")
            parts = read_files(self._shard(files))
            return parts if len(files) >= self.num_shards else self._take(parts)

        if self.validation_files:
            yield from (Piece("validation", *part) for part in read_files(self._files("validation_files")))
            yield from (Piece("train", *part) for part in read_train_files())
        elif self._is_a_few_texts():  # too few documents to hold whole ones out: each gives its own tail
            for path in self.files:
                try:
                    num_bytes = count_bytes(path)
                except UserError as error:
                    if not self.skip_bad_files:
                        raise
                    report.skipped.append(str(error))
                    continue
                parts = read_files([path])
                yield from cut_off_tail(parts, num_bytes, self.validation_split_percentage)
        elif self.train_files:
            yield from self._split(read_train_files())
        elif self.dataset_name == STANDARD_LIBRARY:
            yield from self._split(self._take((text, True) for text in read_standard_library()))
        else:
            splits = self._splits
            if self.dataset_split not in splits:
                raise UserError(
                    f"dataset {self.dataset_name} has no split '{self.dataset_split}' "
                    f"(it has {', '.join(splits)}); pass --dataset_split"
                )
            documents = splits[self.dataset_split]
            if self.num_shards > 1 and getattr(documents, "num_shards", 1) >= self.num_shards:
                documents = read_rows(documents.shard(self.num_shards, self.shard_index))  # by files
            else:
                documents = self._take(read_rows(documents))
            if self.has_validation:
                yield from (Piece("validation", *part) for part in read_rows(splits["validation"]))
                yield from (Piece("train", *part) for part in documents)
            else:
                yield from self._split(documents)

    def train_texts(self) -> Iterator[str]:
        """The training text alone, for training a tokenizer. Raises `UserError` if there is none."""
        is_empty, report = True, ReadReport()
        for piece in self.pieces(report):
            if not isinstance(piece.text, str):
                raise UserError(f"column '{self.text_column_name}' is tokenized already; pass its --tokenizer_name")
            if piece.split == "train":
                is_empty = False
                yield piece.text
        if is_empty:
            raise UserError(self.describe_emptiness(report))

    def _is_a_few_texts(self) -> bool:
        if self.document_separator is not None or not self.files or self.num_shards > 1:
            return False
        return all(kind_of(path) == ".txt" for path in self.files) and (
            len(self.files) * self.validation_split_percentage < 200
        )

    def _read_parts(self, paths: Iterable[str], report: ReadReport) -> Iterator[Part]:
        for path in paths:
            ends = True
            try:
                for text, ends in read_file(path, self.text_column_name, self.document_separator, report):
                    yield text, ends
            except UserError as error:
                if not self.skip_bad_files:
                    raise UserError(f"{error}; --skip_bad_files skips such files") from error
                report.skipped.append(str(error))
                if not ends:  # it broke off within a document, which must not run on into the next file's
                    yield "", True

    def _take(self, parts: Iterable[Part]) -> Iterator[Part]:
        """Every num_shards-th document."""
        number = 0
        for text, ends in parts:
            if number % self.num_shards == self.shard_index:
                yield text, ends
            number += ends

    def _split(self, parts: Iterable[Part]) -> Iterator[Piece]:
        # Shards must draw the same line through the hashes, so none of them may fit it to its own documents.
        return split_documents(parts, self.validation_split_percentage, exact=self.num_shards == 1)


def open_dataset(name: str, config_name: str | None, revision: str | None) -> "dict[str, datasets.IterableDataset]":
    """The splits of a Hub or local dataset (also one written by `save_to_disk`), streamed."""
    import datasets

    folder = Path(name)
    check_not_a_missing_folder(name)
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            loaded = datasets.load_from_disk(name)
        else:
            loaded = datasets.load_dataset(name, config_name, revision=revision, streaming=True)
    except Exception as error:  # the Hub client, datasets and the file system each raise their own
        raise UserError(f"cannot open dataset {name}: {' '.join(str(error).split())[:300]}") from error
    return loaded if isinstance(loaded, dict) else {"train": loaded}


def _guarded(texts: Iterator[Text], name: str) -> Iterator[Text]:
    try:
        yield from texts
    except UserError:
        raise
    except Exception as error:  # the network, datasets and pyarrow each raise their own
        raise UserError(f"cannot read dataset {name}: {' '.join(str(error).split())[:300]}") from error


def name_of_text(text: str) -> str:
    """A folder's name for a text: the last part of a path, pattern or Hub id, without endings and odd characters."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(text).name.split(".")[0]).strip("-.")
    return name or "text"


def _name_size_time(path: Path) -> bytes:
    return f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}".encode()
