"""Read pieces of documents from files, Hub datasets or the Python standard library, for train and validation."""

import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recipe.config import STANDARD_LIBRARY
from recipe.data.documents import Piece, cut_ids_into_documents, cut_off_tail, split_documents, take_head
from recipe.data.files import (
    ReadReport,
    count_bytes,
    expand_paths,
    file_sha256,
    kind_of,
    name_size_time,
    read_file,
    read_standard_library,
    suffix_and_compression,
)
from recipe.data.rows import Part, count_row_groups, read_dataset, texts_of
from recipe.errors import UserError, check_local_path, one_line

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class TextSource:
    """Where documents come from. Without validation text, a share of the training documents is held out.

    train_files, validation_files: files, folders (all supported files in them) and glob patterns.
    document_separator: cuts .txt files into documents, for example a blank line; without it, a file is a document.
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
    head_characters: int | None = None  # read only this much training text, and as much validation text
    num_shards: int = 1  # each shard takes every num_shards-th file; of fewer files, row group or document
    shard_index: int = 0

    def __post_init__(self):
        index, last, percentage = self.shard_index, self.num_shards - 1, self.validation_split_percentage
        for is_valid, message in (
            (0 <= index <= last, f"shard_index must be from 0 to num_shards - 1 = {last}, got {index}"),
            (bool(self.train_files) != bool(self.dataset_name), "pass exactly one of --train_file and --dataset_name"),
            (self.train_files or not self.validation_files, "--validation_file needs --train_file"),
            (0 < percentage < 100, f"validation_split_percentage must be between 0 and 100, got {percentage}"),
            (self.document_separator != "", "document_separator must not be empty"),
        ):
            if not is_valid:
                raise UserError(message)
        for path in self._train_paths + self._validation_paths:
            kind_of(path)  # raises for an unsupported kind

    @functools.cached_property
    def _train_paths(self) -> list[str]:
        return expand_paths(self.train_files)

    @functools.cached_property
    def _validation_paths(self) -> list[str]:
        return expand_paths(self.validation_files)

    @property
    def _files_of_shard(self) -> list[str]:
        """The training files of this shard: all of them if there are fewer files than shards."""
        by_file = len(self._train_paths) >= self.num_shards
        return self._train_paths[self.shard_index :: self.num_shards] if by_file else self._train_paths

    @functools.cached_property
    def _row_groups(self) -> list[range] | None:
        """The row groups of each training file that this shard reads, if there are fewer Parquet files than shards."""
        paths = self._train_paths
        if len(paths) >= self.num_shards or {*map(kind_of, paths)} != {".parquet"}:
            return None
        counts = [count_row_groups(path, self.text_column_name) for path in paths]
        if None in counts or sum(counts) < self.num_shards:
            return None
        starts = ((self.shard_index - before) % self.num_shards for before in itertools.accumulate(counts, initial=0))
        return [range(start, count, self.num_shards) for start, count in zip(starts, counts, strict=False)]

    @property
    def files(self) -> list[str]:
        """The files that this shard reads, training files first."""
        return self._files_of_shard + self._validation_paths

    @property
    def has_validation(self) -> bool:
        """Whether the validation text is separate rather than held out of the training documents."""
        if not self.dataset_name or self.dataset_name == STANDARD_LIBRARY:
            return bool(self.validation_files)
        return self.dataset_split == "train" and "validation" in self._splits

    @functools.cached_property
    def _splits(self) -> dict:
        """The splits of a Hub dataset, a local one, or one written by `save_to_disk`, opened for streaming."""
        import datasets  # not at the top, because training on a packed dataset does not need it

        folder = Path(self.dataset_name)
        check_local_path(self.dataset_name)
        try:
            if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
                loaded = datasets.load_from_disk(folder)
                if not isinstance(loaded, dict):
                    loaded = {"train": loaded}
                loaded = {name: rows.with_format(None).to_iterable_dataset() for name, rows in loaded.items()}
            else:
                options = {"revision": self.revision, "streaming": True}
                loaded = datasets.load_dataset(self.dataset_name, self.dataset_config_name, **options)
        except Exception as error:  # the Hub client, datasets and the file system raise various errors
            raise UserError(f"cannot open dataset {self.dataset_name}: {one_line(error)}") from error
        return loaded if isinstance(loaded, dict) else {"train": loaded}

    @property
    def num_bytes(self) -> int | None:
        """Bytes of text for a progress bar, or None if only reading the text would tell."""
        in_part = self.head_characters or self.dataset_name or self._row_groups
        if in_part or any(suffix_and_compression(path)[1] for path in self.files):
            return None
        return sum(Path(path).stat().st_size for path in self.files)

    def describe(self) -> dict:
        """Return the source as the metadata of a prepared dataset records it."""
        held_out = None if self.has_validation else self.validation_split_percentage
        names = ("dataset_name", "dataset_config_name") if self.dataset_name else ("train_files", "validation_files")
        return {**{name: getattr(self, name) for name in names}, "validation_split_percentage": held_out}

    @functools.cached_property
    def revision(self) -> str | None:
        """The commit of a Hub dataset; None for local data, and if the Hub cannot be reached."""
        if not self.dataset_name or self.dataset_name == STANDARD_LIBRARY or Path(self.dataset_name).exists():
            return None
        from huggingface_hub import HfApi  # takes 0.1 s, which files need not wait for

        try:
            return HfApi().dataset_info(self.dataset_name).sha
        except Exception:  # no network or no such dataset: opening it raises the error that says which
            return None

    @property
    def _options(self) -> tuple:
        """The options that, besides the text, determine the documents; equal for all shards of a dataset."""
        options = (
            *(self.dataset_name, self.dataset_config_name, self.dataset_split, self.revision),
            *(self.text_column_name, self.document_separator, self.validation_split_percentage),
            *(len(self._validation_paths), self.head_characters, self.num_shards),
        )
        return (*options, self.has_validation) if self.dataset_name and self.num_shards > 1 else options

    @property
    def _dataset_files(self) -> list[Path]:
        """The files of dataset_name, sorted, if it is a folder."""
        return sorted(p for p in Path(self.dataset_name).rglob("*") if p.is_file()) if self.dataset_name else []

    @property
    def whole_sha256(self) -> str:
        """Hash of the options and of the names and sizes of all files; equal for all shards of a dataset."""
        files = [*map(Path, self._train_paths + self._validation_paths), *self._dataset_files]
        named = [(path.name, path.stat().st_size) for path in files]
        return hashlib.sha256(repr((self._options, named)).encode()).hexdigest()

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the documents: options and the bytes of the files.

        Names, sizes and times replace the bytes of dataset files and of files of which only a part is read.
        skip_bad_files is not part of it: the text before a bad file is the same either way.
        """
        digest = hashlib.sha256(repr((*self._options, self.shard_index)).encode())
        with ThreadPoolExecutor() as threads:  # hashing releases Python's lock
            in_part = self.head_characters or self._row_groups
            paths, identify = list(map(Path, self.files)), name_size_time if in_part else file_sha256
            for path, identity in zip(paths, threads.map(identify, paths), strict=True):
                digest.update("".join(path.suffixes[-2:]).lower().encode())  # determines how the bytes are read
                digest.update(identity)
        if self.dataset_name == STANDARD_LIBRARY:
            for document in read_standard_library():
                digest.update(document.encode())
        for path in self._dataset_files:
            digest.update(str(path.relative_to(self.dataset_name)).encode())
            digest.update(name_size_time(path))
        return digest.hexdigest()

    def pieces(
        self, report: ReadReport | None = None, eos_token_id: int | None = None, start: dict | None = None
    ) -> Iterator[Piece]:
        """Yield every document in reading order, separate validation text first. Raises `UserError` for bad input.

        Every shard yields the whole separate validation text, to find its duplicates in the training text.
        report: filled in while documents are read; eos_token_id: ends documents in token ids.
        start: the `place` of a piece; only the pieces after it follow, and what lies before is skipped, not read. So
        is separate validation text, whose pieces have no place. The report covers what is read after the start.
        """
        report, is_empty = report or ReadReport(), self.num_shards == 1 and not start  # a shard may be empty
        pieces = self._all_pieces(report, eos_token_id, start)
        for piece in take_head(pieces, self.head_characters) if self.head_characters else pieces:
            is_empty = is_empty and piece.split != "train"
            yield piece
        if is_empty:
            reason = "it is empty or contains only whitespace"
            if report.skipped:
                reason = f"files that cannot be read: {len(report.skipped):,}; the first: {report.skipped[0]}"
            where = self.dataset_name or ", ".join(self.train_files[:3])
            raise UserError(f"there is no text in {where}: {reason}")

    def _all_pieces(self, report: ReadReport, eos_token_id: int | None, start: dict | None) -> Iterator[Piece]:
        if self._is_a_few_texts():  # too few documents to hold some out: hold out the end of each
            first = start.get("file", 0) if start else 0
            for number, path in enumerate(self.files[first:], first):
                begin = start if start and number == first else {"file": number}
                parts = self._read_files(self.files[: number + 1], report, begin)
                yield from cut_off_tail(parts, count_bytes(path), self.validation_split_percentage, begin)
            return
        validation: Iterable[Part] = ()
        if self.train_files:
            validation = self._read_files(self._validation_paths, report)
            train = self._read_files(self._files_of_shard, report, start, self._row_groups)
            by_file = len(self._train_paths) >= self.num_shards or self._row_groups is not None
        elif self.dataset_name == STANDARD_LIBRARY:
            train, by_file = (Part(text, True) for text in read_standard_library()), False
        else:
            if self.dataset_split not in self._splits:
                missing = f"has no split '{self.dataset_split}' (it has {', '.join(self._splits)})"
                raise UserError(f"dataset {self.dataset_name} {missing}; pass --dataset_split")
            rows = self._splits[self.dataset_split]
            by_file = rows.num_shards >= self.num_shards
            train = self._read_rows(rows.shard(self.num_shards, self.shard_index) if by_file else rows, start)
            if self.has_validation:
                validation = self._read_rows(self._splits["validation"])
        train = cut_ids_into_documents(train, eos_token_id, start)
        if not by_file:
            train = self._documents_of_shard(train, start)
        if self.has_validation:
            if not start:
                parts = cut_ids_into_documents(validation, eos_token_id)
                yield from (Piece("validation", text, ends) for text, ends, _ in parts)
            yield from (Piece("train", *part) for part in train)
        else:  # all shards must use the same threshold, so a shard cannot fit it to its own documents
            yield from split_documents(train, self.validation_split_percentage, self.num_shards == 1, start)

    def train_texts(self) -> Iterator[str]:
        """Yield the training text, to train a tokenizer."""
        for piece in self.pieces():
            if not isinstance(piece.text, str):
                raise UserError(f"column '{self.text_column_name}' is already tokenized; pass its --tokenizer_name")
            if piece.split == "train":
                yield piece.text

    def _is_a_few_texts(self) -> bool:
        if self.document_separator is not None or self.dataset_name or self.validation_files or self.num_shards > 1:
            return False
        return len(self.files) * self.validation_split_percentage < 200 and {*map(kind_of, self.files)} == {".txt"}

    def _read_files(
        self, paths: Sequence[str], report: ReadReport, start: dict | None = None, row_groups: list | None = None
    ) -> Iterator[Part]:
        first = start.get("file", 0) if start else 0
        for number, path in enumerate(paths[first:], first):
            begin = start if start and number == first else {}
            ends = not begin.get("begun", False)
            try:
                groups = row_groups[number] if row_groups else None
                parts = read_file(path, self.text_column_name, self.document_separator, report, begin, groups)
                for text, ends, place in parts:
                    yield Part(text, ends, {"file": number, **place})
            except UserError as error:
                if not self.skip_bad_files:
                    raise UserError(f"{error}; --skip_bad_files skips such files") from error
                report.skipped.append(str(error))
                if not ends:  # end the document here, or it would continue in the next file
                    yield Part("", True)

    def _read_rows(self, rows: "datasets.IterableDataset", start: dict | None = None) -> Iterator[Part]:
        try:
            numbered = read_dataset(rows, self.text_column_name, start or {})
            yield from texts_of(numbered, self.text_column_name, f"dataset {self.dataset_name}")
        except UserError:
            raise
        except Exception as error:  # the network, datasets and pyarrow raise various errors
            raise UserError(f"cannot read dataset {self.dataset_name}: {one_line(error)}") from error

    def _documents_of_shard(self, parts: Iterable[Part], start: dict | None) -> Iterator[Part]:
        """Yield every num_shards-th document."""
        number = start.get("document", 0) if start else 0
        for text, ends, place in parts:
            is_included = number % self.num_shards == self.shard_index
            number += ends
            if is_included:
                yield Part(text, ends, place and {**place, "document": number})
