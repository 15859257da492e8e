"""Options -> units of text, each of which can be read on its own (recipe/data/read.py), and what identifies the text.

Unit k is a pure function of (source, k), so any process can read it, at any time, and gets the same documents.
"""

import dataclasses
import functools
import hashlib
import os
import re
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from recipe.config import STANDARD_LIBRARY, TEXT_OPTIONS, TrainConfig
from recipe.data.files import (
    Files,
    compression_of,
    digest_files,
    find_files,
    identify_files,
    identify_standard_library,
    kind_of,
)
from recipe.errors import UserError, check_local_path, one_line

if TYPE_CHECKING:
    import datasets

COMPRESSION_RATIO = 4  # bytes of text per byte of a compressed file, roughly
# A source up to this size is one unit. Its documents are held out exactly, and one core prepares it in a second.
SMALL_SOURCE = 32_000_000
SMALLEST_UNIT, LARGEST_UNIT, NUM_UNITS = 8_000_000, 128_000_000, 256  # 256 units, if their size permits
FEW_TEXTS = 40  # fewer text files have too few documents to hold some out, so the end of each is held out


class FilePart(NamedTuple):
    """A stretch of a file: bytes of plain text or JSON lines, row groups of Parquet; another file as a whole."""

    path: str
    rule: str  # which documents are validation; see `split_of` in recipe/data/read.py
    start: int = 0
    stop: int | None = None  # None: to the end


class ShardPart(NamedTuple):
    """Some shards of a dataset: the number-th of count equal shares of a split's."""

    split: str  # the dataset's name for it
    rule: str
    number: int
    count: int


class Unit(NamedTuple):
    """What one process reads and tokenizes at a time."""

    parts: list[FilePart] | list[ShardPart]
    num_bytes: int  # bytes of text; 0 if unknown


@dataclass(frozen=True)
class TextSource:
    """Where documents come from. Without validation text, a share of the training documents is held out.

    train_files, validation_files: files, folders (all supported files in them) and glob patterns.
    dataset_revision: branch, tag or commit of a dataset on the Hub; by default the newest.
    document_separator: cuts text files into documents, for example a blank line; without it, a file is a document.
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
    skip_bad_files: bool = False

    def __post_init__(self):
        for is_valid, message in (
            (bool(self.train_files) != bool(self.dataset_name), "pass exactly one of --train_file and --dataset_name"),
            (self.train_files or not self.validation_files, "--validation_file needs --train_file"),
            (self.document_separator != "", "document_separator must not be empty"),
        ):
            if not is_valid:
                raise UserError(message)

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

    @property
    def has_validation(self) -> bool:
        """Whether the validation text is separate, not held out of the training documents."""
        if self.dataset_name in (None, STANDARD_LIBRARY):
            return bool(self.validation_files)
        return self.dataset_split == "train" and "validation" in self.dataset

    def units(self) -> list[Unit]:
        """Return the units in reading order, separate validation text first. Raises `UserError` for bad input."""
        if self.dataset_name == STANDARD_LIBRARY:
            return [Unit([FilePart(STANDARD_LIBRARY, "few")], 0)]
        if self.dataset_name:
            return self._units_of_dataset()
        validation = group(self._stretches(self.held_out_files.paths, "validation"))
        train = group(self._stretches(self.files.paths, "train" if self.has_validation else "hash"))
        return validation + (exact(train) if len(train) == 1 else train)

    def _stretches(self, paths: list[str], rule: str) -> Iterator[tuple[FilePart, int]]:
        """Yield (part, bytes of text) of files, none much larger than a unit where the kind allows it."""
        kinds = [".compressed" if compression_of(path) else kind_of(path) for path in paths]
        ratios = [COMPRESSION_RATIO if kind in (".compressed", ".parquet") else 1 for kind in kinds]
        sizes = [os.path.getsize(path) * ratio for path, ratio in zip(paths, ratios, strict=True)]
        unit_bytes = unit_size(sum(sizes))
        has_many = len(paths) * self.validation_split_percentage >= FEW_TEXTS * 5.0
        for path, size in zip(paths, sizes, strict=True):
            kind, part = kind_of(path), FilePart(path, rule)
            if kind == ".parquet":
                yield from self._row_groups(part, unit_bytes)
                continue
            is_text = kind in (".txt", ".md")
            is_document = is_text and self.document_separator is None
            if is_document and rule == "hash" and not (has_many and size <= unit_bytes):
                part = part._replace(rule="end")
            if compression_of(path) or not (is_text or kind == ".jsonl"):
                yield part, size
                continue
            for start in range(0, max(1, size), unit_bytes):
                yield part._replace(start=start, stop=min(start + unit_bytes, size)), min(unit_bytes, size - start)

    def _row_groups(self, part: FilePart, unit_bytes: int) -> Iterator[tuple[FilePart, int]]:
        """Yield the row groups of a Parquet file; a damaged file as a whole, whose reading says what is wrong."""
        try:
            metadata = pq.ParquetFile(part.path).metadata
        except (OSError, pa.ArrowException):
            metadata = None
        if metadata is None or not metadata.num_row_groups:
            yield part, 0
            return
        # A list's column is `ids.list.element`.
        paths = [f"{metadata.schema.column(index).path}." for index in range(metadata.num_columns)]
        columns = [index for index, path in enumerate(paths) if path.startswith(f"{self.text_column_name}.")]
        start, num_bytes = 0, 0
        for number in range(metadata.num_row_groups):
            rows = metadata.row_group(number)
            num_bytes += sum(rows.column(index).total_uncompressed_size for index in columns)
            if num_bytes >= unit_bytes or number + 1 == metadata.num_row_groups:
                yield part._replace(start=start, stop=number + 1), num_bytes
                start, num_bytes = number + 1, 0

    @functools.cached_property
    def dataset(self) -> "dict[str, OpenedSplit]":
        return open_dataset(self.dataset_name, self.dataset_config_name, self.commit)

    def _units_of_dataset(self) -> list[Unit]:
        splits, rule = self.dataset, "train" if self.has_validation else "hash"
        if self.dataset_split not in splits:
            missing = f"has no split '{self.dataset_split}' (it has {', '.join(splits)})"
            raise UserError(f"dataset {self.dataset_name} {missing}; pass --dataset_split")
        num_bytes = COMPRESSION_RATIO * sum(size for _, _, size in self.dataset_files or ())
        count = min(splits[self.dataset_split].rows.num_shards, -(-num_bytes // unit_size(num_bytes)) or NUM_UNITS)
        units = [Unit([ShardPart(self.dataset_split, rule, number, count)], 0) for number in range(count)]
        if self.has_validation:
            return [Unit([ShardPart("validation", "validation", 0, 1)], 0), *units]
        return exact(units) if count == 1 else units

    def describe(self) -> dict:
        """Return the source as the metadata of a prepared dataset records it."""
        names = ("dataset_name", "dataset_config_name") if self.dataset_name else ("train_files", "validation_files")
        held_out = None if self.has_validation else self.validation_split_percentage
        described = {**{name: getattr(self, name) for name in names}, "validation_split_percentage": held_out}
        return described | {"dataset_revision": self.commit}

    @functools.cached_property
    def inputs(self) -> dict:
        """All that determines the documents: options, and names, sizes and content of the files, as JSON.

        `content` is None for a dataset of a Hub out of reach.
        """
        names = ("text_column_name", "document_separator", "validation_split_percentage", "skip_bad_files")
        if self.dataset_name is None:
            content = [identify_files(files.paths) for files in (self.files, self.held_out_files)]
            return {**{name: getattr(self, name) for name in names}, "content": content}
        options = {name: getattr(self, name) for name in ("dataset_config_name", "dataset_split", *names)}
        options["dataset_name"] = self.dataset_name if self.is_on_hub else Path(self.dataset_name).name
        if self.dataset_name == STANDARD_LIBRARY:
            return {**options, "content": identify_standard_library()}
        files = self.dataset_files
        return {**options, "content": files and hashlib.sha256(repr(sorted(files)).encode()).hexdigest()}

    @property
    def is_on_hub(self) -> bool:
        return self.dataset_name not in (None, STANDARD_LIBRARY) and not Path(self.dataset_name).exists()

    @functools.cached_property
    def hub_files(self) -> tuple[str, dict[str, tuple[str, int]]] | None:
        """The commit of a dataset on the Hub, and hash and bytes of its files. None if the Hub does not say."""
        from huggingface_hub import HfApi  # imported here because it takes 0.1 s, which files do not need

        try:
            options = {"revision": self.dataset_revision, "files_metadata": True, "timeout": 30}
            found = HfApi().dataset_info(self.dataset_name, **options)
        except Exception:  # no network or no such dataset: opening it raises the error that says which
            return None
        return found.sha, {file.rfilename: (file.blob_id, file.size or 0) for file in found.siblings}

    @property
    def commit(self) -> str | None:
        """The commit of a dataset on the Hub: the revision's when it was first asked for."""
        if not self.is_on_hub:
            return None
        return self.hub_files[0] if self.hub_files else self.dataset_revision

    @functools.cached_property
    def dataset_files(self) -> list[tuple[str, str, int]] | None:
        """The name, content hash and bytes of each file of the splits that are read. None if the Hub does not say."""
        if self.is_on_hub and self.hub_files is None:
            return None
        read = {self.dataset_split, "validation" if self.has_validation else self.dataset_split}
        paths = [path for split in sorted(read & set(self.dataset)) for path in self.dataset[split].files]
        if self.is_on_hub:
            names = [path.partition(f"@{self.commit}/")[2] for path in paths]
            return [(name, *self.hub_files[1][name]) for name in names]
        names = [os.path.relpath(path, self.dataset_name) for path in paths]
        return list(zip(names, digest_files(paths), map(os.path.getsize, paths), strict=True))


class OpenedSplit(NamedTuple):
    rows: "datasets.IterableDataset"  # in as many shards as it has
    files: list[str]


def open_dataset(name: str, config_name: str | None, commit: str | None) -> dict[str, OpenedSplit]:
    """Open a Hub dataset, a local one, or one written by `save_to_disk`. Raises `UserError` if that fails."""
    import datasets  # imported here because it takes a second, which files do not need

    folder, opened = Path(name), {}
    check_local_path(name)
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            loaded = datasets.load_from_disk(folder)
            for split, rows in (loaded if isinstance(loaded, dict) else {"train": loaded}).items():
                num_shards = max(1, min(len(rows), NUM_UNITS, (rows.data.nbytes or 0) // SMALLEST_UNIT))
                shards = rows.with_format(None).to_iterable_dataset(num_shards=num_shards)
                opened[split] = OpenedSplit(shards, [file["filename"] for file in rows.cache_files])
            return opened
        builder = datasets.load_dataset_builder(name, config_name, revision=commit)
        for split, rows in builder.as_streaming_dataset().items():
            opened[split] = OpenedSplit(rows.reshard(), list(builder.config.data_files[split]))
        return opened
    except Exception as error:  # the Hub client, datasets and the file system raise various errors
        raise UserError(f"cannot open dataset {name}: {one_line(error)}") from error


def exact(units: list[Unit]) -> list[Unit]:
    """Let the only unit of training text hold out exactly its percentage."""
    parts = [part._replace(rule="few") if part.rule == "hash" else part for unit in units for part in unit.parts]
    return [Unit(parts, units[0].num_bytes)]


def unit_size(num_bytes: int) -> int:
    if num_bytes <= SMALL_SOURCE:
        return max(1, num_bytes)
    return min(LARGEST_UNIT, max(SMALLEST_UNIT, num_bytes // NUM_UNITS))


def group(stretches: Iterable[tuple[FilePart, int]]) -> list[Unit]:
    """Put consecutive parts together until they are a unit, so that small files share one."""
    stretches = list(stretches)
    unit_bytes, units, parts, num_bytes = unit_size(sum(size for _, size in stretches)), [], [], 0
    for part, size in stretches:
        parts.append(part)
        num_bytes += size
        if num_bytes >= unit_bytes:
            units.append(Unit(parts, num_bytes))
            parts, num_bytes = [], 0
    return units + ([Unit(parts, num_bytes)] if parts else [])


def source_from(config: TrainConfig | Namespace) -> TextSource:
    """Build the text source of a run's config or a script's arguments. Raises `UserError` if it does not exist."""
    options = {name: getattr(config, name) for name in ("dataset_name", *TEXT_OPTIONS)}
    if not 0 < (percentage := options["validation_split_percentage"]) < 100:
        raise UserError(f"validation_split_percentage must be between 0 and 100, got {percentage}")
    if options["document_separator"]:  # a shell passes \n as two characters
        for escaped, character in (("\\n", "\n"), ("\\t", "\t"), ("\\r", "\r")):
            options["document_separator"] = options["document_separator"].replace(escaped, character)
    source = TextSource(tuple(config.train_file or ()), tuple(options.pop("validation_file") or ()), **options)
    _ = source.files  # raises if they do not exist
    return source


def name_of_text(text: str) -> str:
    """Derive a folder name from a path, pattern or Hub id: its last part without suffixes and special characters.

    It leaves room for additions, because a name may have 255 characters, and 143 on an encrypted disk (eCryptfs).
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(text).name.split(".")[0])[:100].strip("-.") or "text"
