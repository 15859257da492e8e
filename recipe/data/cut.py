"""A source -> units of text, each of which can be read on its own (recipe/data/read.py).

Unit k is a pure function of (source, k), so any process can read it, at any time, and gets the same documents.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recipe.config import STANDARD_LIBRARY
from recipe.data.files import compression_of, kind_of
from recipe.data.source import NUM_UNITS, SMALLEST_UNIT, TextSource
from recipe.errors import UserError

COMPRESSION_RATIO = 4  # bytes of text per byte of a compressed file, roughly
SMALL_SOURCE = 32_000_000  # a source up to this size is one unit, which one core prepares in a second
LARGEST_UNIT = 128_000_000  # a larger source has `NUM_UNITS` units, if their size permits
MIN_TEXTS_BY_DOCUMENT = 40  # with fewer text files, the end of each is held out instead of whole files
HASHED_CHARACTERS = 100_000  # the part of a document that its hash covers
EVERY_HASH = 2**64  # greater than any


class HoldOut(NamedTuple):
    """Which text of a part is held out for validation.

    Either documents with a hash below the threshold, so that duplicates stay in one split, or the end of a file that
    is one document.
    """

    threshold: int = 0  # 0: none; `EVERY_HASH`: all
    tail: float = 0.0  # share of the file

    @property
    def by_hash(self) -> bool:
        return 0 < self.threshold < EVERY_HASH

    def split_of(self, text: str | np.ndarray) -> str:
        """Return the split of a document."""
        is_validation = hash64(text) < self.threshold if self.by_hash else self.threshold > 0
        return "validation" if is_validation else "train"


TRAIN = HoldOut()
VALIDATION = HoldOut(EVERY_HASH)


class FilePart(NamedTuple):
    """A stretch of a file: bytes of text or JSON lines, row groups of Parquet. Other files stay whole."""

    path: str
    hold_out: HoldOut
    start: int = 0
    stop: int | None = None  # None: to the end


class ShardPart(NamedTuple):
    """Some shards of a split of a dataset: share `number` of `count` equal ones."""

    split: str  # the dataset's name for it
    hold_out: HoldOut
    number: int
    count: int


class Unit(NamedTuple):
    """What one process reads and tokenizes at a time."""

    parts: Sequence[FilePart | ShardPart]
    num_bytes: int  # bytes of text; 0 if unknown

    @property
    def is_validation(self) -> bool:
        """Whether it holds separate validation text."""
        return self.parts[0].hold_out == VALIDATION


def hash64(text: str | np.ndarray) -> int:
    """Hash the start of a document."""
    head = text[:HASHED_CHARACTERS]
    content = head.encode("utf-8") if isinstance(head, str) else head.tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def cut(source: TextSource) -> list[Unit]:
    """Return the units in reading order, separate validation text first. Raises `UserError` for bad input.

    Their hold-out threshold holds on average. In a source of few documents, it may leave a split empty, so it is
    adjusted when these are read.
    """
    by_hash = HoldOut(int(source.validation_split_percentage / 100 * EVERY_HASH))
    if source.dataset_name == STANDARD_LIBRARY:
        return [Unit([ShardPart("train", by_hash, 0, 1)], 0)]
    if source.dataset_name:
        return _cut_dataset(source, by_hash)
    validation = group(_stretches(source, source.held_out_files.paths, VALIDATION))
    return validation + group(_stretches(source, source.files.paths, TRAIN if source.has_validation else by_hash))


def _stretches(source: TextSource, paths: list[str], hold_out: HoldOut) -> Iterator[tuple[FilePart, int]]:
    """Cut files into (part, bytes of text), none much larger than a unit if the kind of file allows it."""
    kinds = [".compressed" if compression_of(path) else kind_of(path) for path in paths]
    ratios = [COMPRESSION_RATIO if kind in (".compressed", ".parquet") else 1 for kind in kinds]
    sizes = [os.path.getsize(path) * ratio for path, ratio in zip(paths, ratios, strict=True)]
    unit_bytes = unit_size(sum(sizes))
    has_many = len(paths) * source.validation_split_percentage >= MIN_TEXTS_BY_DOCUMENT * 5.0
    of_end = HoldOut(tail=source.validation_split_percentage / 100) if hold_out.by_hash else hold_out
    for path, size in zip(paths, sizes, strict=True):
        kind = kind_of(path)
        part = FilePart(path, hold_out)
        if kind == ".parquet":
            yield from _row_groups(part, source, unit_bytes)
            continue
        is_text = kind in (".txt", ".md")
        if is_text and source.document_separator is None and not (has_many and size <= unit_bytes):
            part = part._replace(hold_out=of_end)
        if compression_of(path) or not (is_text or kind == ".jsonl"):
            yield part, size
            continue
        for begin in range(0, max(1, size), unit_bytes):
            end = min(begin + unit_bytes, size)
            yield part._replace(start=begin, stop=end), end - begin


def _row_groups(part: FilePart, source: TextSource, unit_bytes: int) -> Iterator[tuple[FilePart, int]]:
    """Yield the row groups of a Parquet file. A damaged file stays whole; reading it will say what is wrong."""
    try:
        with open(part.path, "rb") as file:  # pyarrow itself opens only names in UTF-8
            metadata = pq.ParquetFile(file).metadata
    except (OSError, pa.ArrowException):
        metadata = None
    if metadata is None or not metadata.num_row_groups:
        yield part, 0
        return
    paths = [f"{metadata.schema.column(index).path}." for index in range(metadata.num_columns)]
    # A list's column is `ids.list.element`.
    columns = [index for index, path in enumerate(paths) if path.startswith(f"{source.text_column_name}.")]
    start = 0
    num_bytes = 0
    for number in range(metadata.num_row_groups):
        rows = metadata.row_group(number)
        num_bytes += sum(rows.column(index).total_uncompressed_size for index in columns)
        if num_bytes >= unit_bytes or number + 1 == metadata.num_row_groups:
            yield part._replace(start=start, stop=number + 1), num_bytes
            start = number + 1
            num_bytes = 0


def _cut_dataset(source: TextSource, hold_out: HoldOut) -> list[Unit]:
    splits = source.dataset
    name = source.dataset_split
    if name not in splits:
        missing = f"has no split '{name}' (it has {', '.join(splits)})"
        raise UserError(f"dataset {source.dataset_name} {missing}; pass --dataset_split")
    num_bytes = COMPRESSION_RATIO * source.num_dataset_bytes
    count = min(splits[name].rows.num_shards, -(-num_bytes // unit_size(num_bytes)) or NUM_UNITS)
    held_out = TRAIN if source.has_validation else hold_out
    separate = [Unit([ShardPart("validation", VALIDATION, 0, 1)], 0)] if source.has_validation else []
    return separate + [Unit([ShardPart(name, held_out, number, count)], 0) for number in range(count)]


def unit_size(num_bytes: int) -> int:
    if num_bytes <= SMALL_SOURCE:
        return max(1, num_bytes)
    return min(LARGEST_UNIT, max(SMALLEST_UNIT, num_bytes // NUM_UNITS))


def group(stretches: Iterable[tuple[FilePart, int]]) -> list[Unit]:
    """Join consecutive parts until they fill a unit, so that small files share one."""
    stretches = list(stretches)
    unit_bytes = unit_size(sum(size for _, size in stretches))
    units = []
    parts = []
    num_bytes = 0
    for part, size in stretches:
        parts.append(part)
        num_bytes += size
        if num_bytes >= unit_bytes:
            units.append(Unit(parts, num_bytes))
            parts = []
            num_bytes = 0
    if parts:
        units.append(Unit(parts, num_bytes))
    return units
