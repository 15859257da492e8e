"""A unit of text -> its documents, each in train or validation."""

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

from recipe.arguments import shell_command
from recipe.config import SPLITS, STANDARD_LIBRARY
from recipe.data.encode import SAMPLE_CHARACTERS
from recipe.data.files import BLOCK, kind_of, open_stream, read_standard_library
from recipe.data.source import SMALL_SOURCE, FilePart, ShardPart, TextSource, Unit
from recipe.errors import UserError, one_line

SHOWN_ERRORS, MOST_COLUMNS = 10, 20
LONGEST_NAME = 60  # characters that are shown of a column's name, which is text in a CSV file without names
TOKENIZER_CHARACTERS = 2_000_000_000  # the most that a tokenizer is trained on
HASHED_CHARACTERS = 100_000  # the part of a document that its hash covers
ROWS_PER_READ = 100
MOST_HELD_BACK = 10_000  # documents: of no more, exactly the percentage is held out
Text = str | np.ndarray  # or, if the source is already tokenized, token ids: int64 [tokens]
READ_ERRORS = (UserError, OSError, EOFError, ValueError, RecursionError, csv.Error, lzma.LZMAError, pa.ArrowException)
csv.field_size_limit(2**31 - 1)
NUL = "it contains NUL bytes, so it is binary, or text in UTF-16: convert it with iconv -f UTF-16 -t UTF-8"


class Document(NamedTuple):
    split: str
    text: Text


@dataclass
class ReadReport:
    """What only reading the text reveals. It can be written as JSON."""

    num_blank: int = 0  # rows whose text is null, empty or blank
    num_without_column: int = 0  # rows
    columns: list[str] = field(default_factory=list)  # the columns found instead that hold text or ids, up to 20
    num_separators: int = 0
    num_skipped: int = 0  # documents that cannot be read, and ends of files
    errors: list[str] = field(default_factory=list)  # the errors of the first of them

    def add(self, other: "ReadReport") -> None:
        for name, value in vars(other).items():
            new = [item for item in value if item not in self.columns] if name == "columns" else value
            setattr(self, name, getattr(self, name) + new)

    def skip(self, reason: str) -> None:
        self.num_skipped += 1
        if len(self.errors) < SHOWN_ERRORS:
            self.errors.append(reason)


def read_unit(source: TextSource, unit: Unit, report: ReadReport) -> Iterator[Document]:
    """Yield the documents of a unit that hold text. Raises `UserError` naming the file if it cannot be read."""
    found = _read_documents(source, unit, report)
    threshold, head = math.floor(source.validation_split_percentage / 100 * 2**64), []
    if threshold and any(part.rule == "few" for part in unit.parts):
        head, threshold = _few(found, threshold)
    for rule, text, is_end in itertools.chain(head, found):
        yield Document(split_of(rule, text, is_end, threshold), text)


def read_texts(paths: Iterable[str], text_column_name: str, document_separator: str | None) -> Iterator[str]:
    """Yield all documents of files, folders and patterns. Raises `UserError` if they cannot be read or hold ids."""
    options = {"text_column_name": text_column_name, "document_separator": document_separator}
    source = TextSource(tuple(paths), validation_split_percentage=0, **options)
    for unit in source.units():
        for document in read_unit(source, unit, ReadReport()):
            if not isinstance(document.text, str):
                raise UserError(f"column '{text_column_name}' holds token ids, not text")
            yield document.text


def read_train_texts(source: TextSource, units: list[Unit]) -> Iterator[str]:
    """Yield the training text, to train a tokenizer; of a large source, the beginning of each unit."""
    read_sample(source, units)  # raises if there is no text
    limit = TOKENIZER_CHARACTERS // len(units)
    for unit in units:
        characters = 0
        for document in read_unit(source, unit, ReadReport()):
            if not isinstance(document.text, str):
                name = source.text_column_name
                raise UserError(f"column '{name}' is already tokenized; pass its --tokenizer_name")
            if document.split == "train":
                yield document.text[: limit - characters]
            characters += len(document.text)
            if characters >= limit:
                break


def read_sample(source: TextSource, units: list[Unit]) -> list[str]:
    """Return the first documents, to check the encoder. Raises `UserError` if the first units hold no text."""
    texts: list[Text] = []
    report = ReadReport()
    for unit in units if len(units) < 4 else units[:: len(units) // 4]:
        characters = 0
        for document in read_unit(source, unit, report):
            texts.append(document.text)
            characters += len(document.text)
            if characters >= SAMPLE_CHARACTERS:
                break
        if texts:
            return [text for text in texts if isinstance(text, str)]
    where = source.dataset_name or ", ".join(source.train_files[:3])
    reason = "it is empty or contains only whitespace"
    if report.num_skipped:
        reason = f"what cannot be read: {report.num_skipped:,}; the first: {report.errors[0]}"
    if report.num_without_column:
        reason = f"it has no column '{source.text_column_name}'"
        if report.columns:
            names = [name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..." for name in report.columns]
            reason += f"; pass --text_column_name with one of {', '.join(names)}"
            paths = [part.path for unit in units for part in unit.parts if isinstance(part, FilePart)]
            if any(kind_of(path) == ".csv" for path in paths):
                reason += "; if that is text, insert a first line that names the columns"
        else:
            reason += ", and no other column holds text; write each conversation or record as one text"
    raise UserError(f"there is no text in {where}: {reason}")


def split_of(rule: str, text: Text, is_end: bool, threshold: int) -> str:
    """Return the split of a document.

    rule: of its part: the split itself; "end": validation is the end of a file that is one document; "hash": documents
    with a hash below the threshold, so that equal documents are never in both splits; "few": the same, with the
    threshold that holds out exactly the percentage.
    """
    if rule in SPLITS:
        return rule
    is_validation = is_end if rule == "end" else hash64(text) < threshold
    return "validation" if is_validation else "train"


def _few(found: Iterator[tuple[str, Text, bool]], threshold: int) -> tuple[list, int]:
    """Return documents taken from `found`, and the threshold that holds out exactly a share of them, if that is all.

    It is the smallest hashes' of at least one document, and never of all. Many documents need no exact one.
    """
    head, characters = [], 0
    for document in found:
        head.append(document)
        characters += len(document[1])
        if len(head) >= MOST_HELD_BACK or characters >= SMALL_SOURCE:
            return head, threshold
    ordered = sorted({hash64(text) for rule, text, _ in head if rule == "few"})
    count = min(max(1, round(len(ordered) * threshold / 2**64)), len(ordered) - 1)
    return head, ordered[count - 1] + 1 if count > 0 else 0


def hash64(text: Text) -> int:
    """Hash the start of a document."""
    head = text[:HASHED_CHARACTERS]
    content = head.encode("utf-8") if isinstance(head, str) else head.tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


# ------------------------------------------------------------------ files


def _read_documents(source: TextSource, unit: Unit, report: ReadReport) -> Iterator[tuple[str, Text, bool]]:
    """Yield (rule, text, whether it is the end of its file that is held out), and count what cannot be read."""
    for part in unit.parts:
        where = f"dataset {source.dataset_name}" if source.dataset_name else part.path
        for text, is_end in _read_part(source, part, where, report):
            if not isinstance(text, Exception):
                yield part.rule, text, is_end
                continue
            reason = str(text) if isinstance(text, UserError) else f"cannot read {where}: {one_line(text).rstrip('.')}"
            if isinstance(text.__cause__ or text, UnicodeDecodeError):
                remedy = "convert it, from Latin-1 for example with iconv -f LATIN1 -t UTF-8"
                reason = f"{where} is not UTF-8 text; {remedy}"
            has_option = source.validation_split_percentage and not source.dataset_name  # not in `read_texts`
            if "too much memory for decoding" in str(text):  # pyarrow takes windows of 128 MB
                has_option, command = False, shell_command("zstd", "-d", "--rm", "--long=31", where)
                reason = f"{where} was compressed with a long window; unpack it: {command}"
            if source.dataset_name or not source.skip_bad_files:
                remedy = "; --skip_bad_files skips what cannot be read" if has_option else ""
                raise UserError(reason + remedy) from text
            report.skip(reason)


def _read_part(
    source: TextSource, part: FilePart | ShardPart, where: str, report: ReadReport
) -> Iterator[tuple[Text | Exception, bool]]:
    """Yield the same of a part, and in place of what cannot be read the error."""
    errors = (Exception,) if source.dataset_name else READ_ERRORS  # the network and datasets raise various errors
    try:
        if isinstance(part, ShardPart):
            rows = _read_shards(source, part)
        elif part.path == STANDARD_LIBRARY:
            rows = ({source.text_column_name: text} for text in read_standard_library())
        elif (kind := kind_of(part.path)) in (".txt", ".md"):
            with open_stream(part.path) as stream:
                yield from _read_text(stream, source, part, report)
            return
        else:
            rows = _read_rows(kind, source, part)
        yield from ((text, False) for text in texts_of(rows, source.text_column_name, where, report))
    except GeneratorExit:  # at interpreter exit, the names below may no longer exist
        raise
    except errors as error:
        yield error, False


def _read_text(
    stream: BinaryIO, source: TextSource, part: FilePart, report: ReadReport
) -> Iterator[tuple[str | Exception, bool]]:
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
            if not isinstance(text, str) or (text and not text.isspace()):
                yield text, False
        return
    content = stream.read() if stop is None else stream.read(stop - start)
    file, size = (io.BytesIO(content), len(content)) if size is None else (stream, size)
    limit = size
    if part.rule == "end":
        limit = round(size * (1 - source.validation_split_percentage / 100))
        limit = find_line(file, limit, size, reach=min(BLOCK, (size - limit) // 2))
    cut, is_whole = max(0, limit - start), len(content) == size
    for data, is_end in ((content[:cut], False), (content[cut:], True)):
        text = _decode(data, is_first=start == 0 and not is_end)
        if data and not (is_whole and isinstance(text, str) and text.isspace()):  # a text may have blank lines
            yield text, is_end


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


def _decode(data: bytes, is_first: bool) -> str | ValueError:
    """Return the text, or the error if it is none."""
    if b"\0" in data:
        return ValueError(NUL)
    try:
        return (data.removeprefix(codecs.BOM_UTF8) if is_first else data).decode("utf-8")
    except UnicodeDecodeError as error:
        return error


# ------------------------------------------------------------------ rows


def _read_rows(kind: str, source: TextSource, part: FilePart) -> Iterator[Any]:
    """Yield the rows of a part of a file, and the error in place of one that cannot be read."""
    if kind == ".parquet":
        file = pq.ParquetFile(part.path, pre_buffer=False)
        column = source.text_column_name
        groups = range(file.num_row_groups) if part.stop is None else range(part.start, part.stop)
        if column not in file.schema_arrow.names:
            num_rows = sum(file.metadata.row_group(number).num_rows for number in groups)
            empty = dict(zip(file.schema_arrow.names, map(_empty_value, file.schema_arrow.types), strict=True))
            yield from itertools.repeat(empty, num_rows)
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


def _empty_value(kind: pa.DataType) -> str | list | None:
    """Return a value for a column that is not read: text, token ids, or None for a type that holds neither."""
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_integer(kind.value_type):
        return []
    return None if pa.types.is_nested(kind) or pa.types.is_primitive(kind) else ""


def _read_jsonl(stream: BinaryIO, part: FilePart) -> Iterator[Any]:
    """Yield the rows of the lines that begin in a part, and the error in place of one that is not JSON."""
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
            try:  # json accepts more: a byte order mark, NaN, half of a surrogate pair, deep nesting
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                row = ValueError(NUL)
                if b"\0" not in line:
                    row = ValueError(f"the line that ends at byte {position:,} is not JSON: {error}")
                    row.__cause__ = error
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


def _read_shards(source: TextSource, part: ShardPart) -> Iterator[dict]:
    """Yield the rows of some shards of a dataset."""
    rows = source.dataset[part.split].rows.shard(part.count, part.number)
    if source.text_column_name in (rows.column_names or ()):
        rows = rows.select_columns([source.text_column_name])
    for batch in rows.iter(ROWS_PER_READ):
        yield from (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))


def texts_of(rows: Iterable[Any], column: str, where: str, report: ReadReport) -> Iterator[Text | Exception]:
    """Yield the text of each row, its token ids, or the error if it has neither, and count the rows without any."""
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            found = f"{where}, row {number} is a {type(row).__name__}, not an object with a text column"
            yield row if isinstance(row, Exception) else UserError(found)
            continue
        text = row.get(column)
        if column not in row:
            report.num_without_column += 1
            names = [str(name) for name, of in row.items() if isinstance(of, str) or token_ids(of) is not None]
            names = [name for name in names if name not in report.columns]
            report.columns += names[: MOST_COLUMNS - len(report.columns)]
        elif text is None or (isinstance(text, str) and (not text or text.isspace())):
            report.num_blank += 1
        elif isinstance(text, str):
            if not text.isascii():
                try:
                    text.encode("utf-8")
                except UnicodeEncodeError:  # JSON can escape half a surrogate pair, which is not a character
                    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            yield text
        elif (ids := token_ids(text)) is not None:
            yield ids
        else:
            found = f"column '{column}' holds {type(text).__name__}, neither text nor a list of token ids"
            yield UserError(f"{where}, row {number}: {found}")


def token_ids(value: Any) -> np.ndarray | None:
    """Return a list of token ids as int64 [tokens], or None for anything else."""
    if not isinstance(value, (list, np.ndarray)):
        return None
    try:
        ids = np.asarray(value)
    except ValueError:  # lists of several lengths
        return None
    return ids.astype(np.int64) if ids.ndim == 1 and (len(ids) == 0 or ids.dtype.kind in "iu") else None
