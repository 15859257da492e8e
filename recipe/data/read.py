"""A unit of text -> its documents, each assigned to train or validation."""

import codecs
import csv
import functools
import hashlib
import io
import itertools
import json
import lzma
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recipe.config import STANDARD_LIBRARY
from recipe.data.source import (
    BLOCK,
    SMALL_SOURCE,
    Part,
    TextSource,
    Unit,
    compression_of,
    kind_of,
    read_standard_library,
)
from recipe.errors import UserError, one_line

SPLITS = ("train", "validation")
HASHED_CHARACTERS = 100_000  # the part of a document that its hash covers
ROWS_PER_READ = 100
# A unit with no more documents is held in memory to hold some out exactly.
MOST_HELD_BACK = 10_000
Text = str | np.ndarray  # or, if the source is already tokenized, token ids: int64 [tokens]
READ_ERRORS = (UserError, OSError, EOFError, ValueError, RecursionError, csv.Error, lzma.LZMAError, pa.ArrowException)
csv.field_size_limit(2**31 - 1)
NUL = "it contains NUL bytes, so it is binary, or text in UTF-16: convert it with iconv -f UTF-16 -t UTF-8"


class Document(NamedTuple):
    """A document, or a part of one that continues in the next unit."""

    split: str
    text: Text
    ends: bool = True


@dataclass
class ReadReport:
    """What only reading the text reveals. It can be written as JSON."""

    num_blank: int = 0  # rows whose text is null, empty or blank
    num_without_column: int = 0  # rows
    columns: list[str] = field(default_factory=list)  # the columns found instead, up to 20
    num_separators: int = 0
    skipped: list[str] = field(default_factory=list)  # the error of each skipped file

    def add(self, other: "ReadReport") -> None:
        for name, value in vars(other).items():
            new = [item for item in value if item not in self.columns] if name == "columns" else value
            setattr(self, name, getattr(self, name) + new)


def read_unit(source: TextSource, unit: Unit, report: ReadReport) -> Iterator[Document]:
    """Yield the documents of a unit that hold text. Raises `UserError` naming the file if it cannot be read."""
    parts = (document for part in map(Part._make, unit.parts) for document in _read_part(source, part, report))
    return assign_splits(parts, source.validation_split_percentage, unit.is_only)


def read_texts(paths: Iterable[str], text_column_name: str, document_separator: str | None) -> Iterator[str]:
    """Yield all documents of files, folders and patterns. Raises `UserError` if they cannot be read or hold ids."""
    options = {"text_column_name": text_column_name, "document_separator": document_separator}
    source = TextSource(tuple(paths), validation_split_percentage=0, **options)
    parts: list[str] = []
    for unit in source.units():
        for document in read_unit(source, unit, ReadReport()):
            if not isinstance(document.text, str):
                raise UserError(f"column '{text_column_name}' holds token ids, not text")
            parts.append(document.text)
            if document.ends:
                yield "".join(parts)
                parts = []


def assign_splits(
    documents: Iterable[tuple[str | None, Text, bool]], percentage: float, exact: bool
) -> Iterator[Document]:
    """Hold out a percentage of the documents by their hashes, so equal documents are never in both splits.

    exact: hold out exactly this percentage if they are few (the smallest hashes; at least one document, never all).
    """
    documents, threshold = iter(documents), math.floor(percentage / 100 * 2**64)
    head = []
    if exact and percentage:
        characters = 0
        for document in documents:
            head.append(document)
            characters += len(document[1])
            if len(head) >= MOST_HELD_BACK or characters >= SMALL_SOURCE:
                break
        else:
            ordered = sorted({hash64(text) for split, text, _ in head if split is None})
            count = min(max(1, round(len(ordered) * percentage / 100)), len(ordered) - 1)
            threshold = ordered[count - 1] + 1 if count > 0 else 0
    for split, text, ends in itertools.chain(head, documents):
        yield Document(split or ("validation" if hash64(text) < threshold else "train"), text, ends)


def hash64(text: Text) -> int:
    """Hash the start of a document."""
    head = text[:HASHED_CHARACTERS]
    content = head.encode("utf-8") if isinstance(head, str) else head.tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


# ------------------------------------------------------------------ files


def _read_part(source: TextSource, part: Part, report: ReadReport) -> Iterator[tuple[str | None, Text, bool]]:
    """Yield (split or None, text, whether the document ends) of a part."""
    errors = (Exception,) if source.dataset_name else READ_ERRORS  # the network and datasets raise various errors
    where = f"dataset {source.dataset_name}" if source.dataset_name else part.path
    try:
        if source.dataset_name == STANDARD_LIBRARY:
            rows = ({source.text_column_name: text} for text in read_standard_library())
        elif source.dataset_name:
            rows = _read_dataset(source, part)
        else:
            kind = kind_of(part.path)
            with open_stream(part.path) as stream:
                if kind in (".txt", ".md"):
                    yield from _read_text(stream, source, part, report)
                    return
            rows = _read_rows(kind, source, part)
        for text in texts_of(rows, source.text_column_name, where, report):
            yield part.split, text, True
    except GeneratorExit:  # at interpreter exit, the names below may no longer exist
        raise
    except errors as error:
        reason = str(error) if isinstance(error, UserError) else f"cannot read {where}: {one_line(error).rstrip('.')}"
        if isinstance(error.__cause__ or error, UnicodeDecodeError):
            reason = f"{where} is not UTF-8 text; convert it, from Latin-1 for example with iconv -f LATIN1 -t UTF-8"
        if source.dataset_name or not source.skip_bad_files:
            is_preparing = source.validation_split_percentage and not source.dataset_name  # `read_texts` has no option
            raise UserError(reason + ("; --skip_bad_files skips such files" if is_preparing else "")) from error
        report.skipped.append(reason)


def open_stream(path: str) -> BinaryIO:
    """Open a file as a buffered stream of decompressed bytes."""
    match compression_of(path):
        case None:
            return open(path, "rb", BLOCK)
        case ".xz":
            return lzma.open(path)
        case suffix:  # pyarrow recognizes lowercase suffixes only
            name = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}[suffix]
            return io.BufferedReader(pa.input_stream(path, compression=name), BLOCK)


def _read_text(
    stream: BinaryIO, source: TextSource, part: Part, report: ReadReport
) -> Iterator[tuple[str | None, str, bool]]:
    """Yield the documents of a text that begin in a part; without a separator, the lines that do, as one document."""
    pattern = separator_pattern(source.document_separator)
    size, start, stop = None, 0, None
    if part.stop is not None:
        size = os.path.getsize(part.path)
        find = find_line if source.document_separator is None else functools.partial(find_start, pattern=pattern)
        start, stop = (find(stream, position, size) for position in (part.start, part.stop))
        stream.seek(start)
    if source.document_separator is not None:
        before = b"\r" if source.document_separator.startswith("\n") else b""
        for number, document in enumerate(_split(stream, stop and stop - start, pattern)):
            report.num_separators += number > 0
            text = _decode(document.removesuffix(before), is_first=start == number == 0)
            if not text.isspace() and text:
                yield part.split, text, True
        return
    content = stream.read() if stop is None else stream.read(stop - start)
    file, size, limit = (io.BytesIO(content), len(content), 0) if size is None else (stream, size, 0)
    if part.split == "tail":
        limit = round(size * (1 - source.validation_split_percentage / 100))
        limit = find_line(file, limit, size, reach=(size - limit) // 2)
    head, tail = content[: max(0, limit - start)], content[max(0, limit - start) :]
    for split, data, ends in (
        ("train", head, start + len(content) >= limit),
        ("validation" if part.split == "tail" else part.split, tail, start + len(content) == size),
    ):
        text = _decode(data, is_first=start == 0)
        is_whole = start == 0 and ends
        if text and not (is_whole and text.isspace()):  # blank lines at the end of a unit belong to its document
            yield split, text, ends


def separator_pattern(separator: str | None) -> re.Pattern:
    """Match a separator, or the end of a line. A line break in it also matches a Windows line break."""
    lines = map(re.escape, (separator or "\n").encode().split(b"\n"))
    # An optional character in front makes the search ten times as slow; the reader removes it.
    return re.compile(rb"\r?\n".join(lines).removeprefix(rb"\r?"))


def find_start(file: BinaryIO, position: int, size: int, pattern: re.Pattern) -> int:
    """Return the first start of a document at or after a position: where a separator ends, or the file.

    It is a function of the file and the position, so a unit ends exactly where the next one begins.
    """
    if position <= 0 or position >= size:
        return position
    longest = 4 * len(pattern.pattern)
    base = max(0, position - longest)
    file.seek(base)
    buffer = file.read(BLOCK)
    while True:
        for match in pattern.finditer(buffer):
            if base + match.end() >= position:
                return base + match.end()
        if not (block := file.read(BLOCK)):
            return size
        base += max(0, len(buffer) - longest)
        buffer = buffer[-longest:] + block


def find_line(file: BinaryIO, position: int, size: int, reach: int = BLOCK) -> int:
    """Return the last start of a line within `reach` bytes before a position; else of a word; else of a character."""
    if position <= 0 or position >= size:
        return position
    begin = max(0, position - reach)
    file.seek(begin)
    window = file.read(position - begin)
    for mark in (b"\n", b" "):
        if (found := window.rfind(mark)) >= 0:
            return begin + found + 1
    return position + next(i for i, byte in enumerate(file.read(4) + b" ") if byte & 0xC0 != 0x80)


def _split(stream: BinaryIO, num_bytes: int | None, pattern: re.Pattern) -> Iterator[bytes]:
    """Yield the pieces of the next bytes (None: all) between the matches of a pattern."""
    left, rest = math.inf if num_bytes is None else num_bytes, b""
    while block := stream.read(
        int(min(left, max(BLOCK, len(rest))))
    ):  # more for a long piece, which is searched again
        left -= len(block)
        *pieces, rest = pattern.split(rest + block)
        yield from pieces
    yield rest


def _decode(data: bytes, is_first: bool) -> str:
    if b"\0" in data:
        raise ValueError(NUL)
    return (data.removeprefix(codecs.BOM_UTF8) if is_first else data).decode("utf-8")


# ------------------------------------------------------------------ rows


def _read_rows(kind: str, source: TextSource, part: Part) -> Iterator[Any]:
    """Yield the rows of a part of a file."""
    if kind == ".parquet":
        file = pq.ParquetFile(part.path, pre_buffer=False)
        column = source.text_column_name
        groups = range(file.num_row_groups) if part.stop is None else range(part.start, part.stop)
        if column not in file.schema_arrow.names:
            num_rows = sum(file.metadata.row_group(number).num_rows for number in groups)
            yield from itertools.repeat(dict.fromkeys(file.schema_arrow.names), num_rows)
            return
        for batch in file.iter_batches(ROWS_PER_READ, groups, [column], use_threads=False):
            yield from ({column: text} for text in batch.column(0).to_pylist())
        return
    with open_stream(part.path) as stream:
        if kind == ".csv":
            yield from csv.DictReader(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""))
        elif kind == ".wet":
            yield from ({source.text_column_name: text} for text in read_wet(stream))
        elif kind == ".json" and stream.peek(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
            yield from json.load(stream)
        else:
            yield from _read_jsonl(stream, part)


def _read_jsonl(stream: BinaryIO, part: Part) -> Iterator[Any]:
    """Yield the rows of the lines that begin in a part."""
    from orjson import loads

    position, stop = 0, math.inf
    if part.stop is not None:
        size, pattern = os.path.getsize(part.path), separator_pattern(None)
        position, stop = (find_start(stream, at, size, pattern) for at in (part.start, part.stop))
        stream.seek(position)
    for line in stream:
        if position >= stop:
            return
        position += len(line)
        try:
            row = loads(line)
        except ValueError:
            if not line.strip(codecs.BOM_UTF8 + b" \t\r\n"):
                continue
            if b"\0" in line:
                raise ValueError(NUL) from None
            try:  # json accepts more: a byte order mark, NaN, half of a surrogate pair, deep nesting
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"the line that ends at byte {position:,} is not JSON: {error}") from error
        yield row


def read_wet(stream: BinaryIO) -> Iterator[str]:
    """Yield the text of each page in Common Crawl's extracted text: the "conversion" records of a WARC 1.0 file."""
    while version := stream.readline():
        lines = [version]
        while lines[-1].strip():
            lines.append(stream.readline())
        header = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        length = header.get(b"content-length", b"")
        if not version.startswith(b"WARC/") or not length.isdigit() or len(length) > 10:
            raise ValueError(f"expected a WARC record, found {version[:20]!r}")
        payload = stream.read(int(length))
        if stream.read(4) != b"\r\n\r\n":
            raise ValueError("a WARC record is incomplete or of another length")
        if header.get(b"warc-type") == b"conversion":
            yield payload.decode("utf-8")


def _read_dataset(source: TextSource, part: Part) -> Iterator[dict]:
    """Yield the rows of some shards of a split. part: the split, the number of this unit, the number of units."""
    rows = source.opened_dataset[part.path].shard(part.stop, part.start)
    if source.text_column_name in (rows.column_names or ()):
        rows = rows.select_columns([source.text_column_name])
    for batch in rows.iter(ROWS_PER_READ):
        yield from (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))


def texts_of(rows: Iterable[Any], column: str, where: str, report: ReadReport) -> Iterator[Text]:
    """Yield the text of each row, or its token ids, and count the rows without any."""
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise UserError(f"{where}, row {number} is a {type(row).__name__}, not an object with a text column")
        text = row.get(column)
        if column not in row:
            report.num_without_column += 1
            report.columns += [str(name) for name in row if str(name) not in report.columns][
                : 20 - len(report.columns)
            ]
        elif text is None or (isinstance(text, str) and (not text or text.isspace())):
            report.num_blank += 1
        elif isinstance(text, str):
            if not text.isascii():
                try:
                    text.encode("utf-8")
                except UnicodeEncodeError:  # JSON can escape half a surrogate pair, which is not a character
                    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            yield text
        else:
            ids = np.asarray(text)
            if not isinstance(text, (list, np.ndarray)) or ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
                found = f"column '{column}' holds {type(text).__name__}, neither text nor a list of token ids"
                raise UserError(f"{where}, row {number}: {found}")
            yield ids.astype(np.int64)
