"""A unit of text -> its documents, each in train or validation.

Whatever cannot be read goes to one function, `bad`, which raises an error or counts it as skipped.
"""

import codecs
import csv
import functools
import io
import itertools
import json
import lzma
import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recipe.arguments import shell_command
from recipe.config import STANDARD_LIBRARY
from recipe.data.cut import SMALL_SOURCE, FilePart, HoldOut, ShardPart, Unit, cut, hash64
from recipe.data.encode import SAMPLE_CHARACTERS
from recipe.data.files import BLOCK, TOKENS, kind_of, open_decompressed, read_standard_library
from recipe.data.source import TextSource
from recipe.data.tokens import TokenStream, find_tokens, read_tokens
from recipe.errors import UserError, one_line

SHOWN_ERRORS, MOST_COLUMNS = 10, 20
LONGEST_NAME = 60  # characters shown of a column's name, which is text in a CSV file without a header
TOKENIZER_CHARACTERS = 2_000_000_000  # the most that a tokenizer is trained on
ROWS_PER_READ = 100
MOST_COUNTED = 10_000  # documents; up to this number, exactly the percentage is held out
MASK = "attention_mask"  # a column beside token ids: 0 for padding
PADDING = 8  # equal ids at the end of a row; so many are rarely anything but padding
Text = str | np.ndarray | TokenStream  # or, if the source is already tokenized, token ids: int64 [tokens]
Bad = Callable[[str, int], None]  # gets what cannot be read, and its size in bytes, or 0 if that is not known
READ_ERRORS = (OSError, EOFError, ValueError, RecursionError, csv.Error, lzma.LZMAError, pa.ArrowException)
csv.field_size_limit(2**31 - 1)


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
    num_skipped: int = 0  # lines and rows that cannot be read, and ends of files
    skipped_bytes: int = 0  # of those whose size is known
    num_row_ids: int = 0  # token ids in rows without a mask
    num_padding: int = 0  # of these, in runs of one id at the end of a row
    errors: list[str] = field(default_factory=list)  # the first reasons for skipping something

    def add(self, other: "ReadReport") -> None:
        for name, value in vars(other).items():
            new = [item for item in value if item not in self.columns] if name == "columns" else value
            setattr(self, name, getattr(self, name) + new)

    def skip(self, reason: str, num_bytes: int) -> None:
        self.num_skipped += 1
        self.skipped_bytes += num_bytes
        if len(self.errors) < SHOWN_ERRORS:
            self.errors.append(reason)


def list_units(source: TextSource) -> list[Unit]:
    """Return the units from `cut`, with a threshold that gives at least one document to each split.

    Raises `UserError` for bad input.
    """
    units = cut(source)
    parts = [part for unit in units for part in unit.parts]
    if not any(part.hold_out.by_hash for part in parts):
        return units
    threshold = _choose_threshold(source, [unit for unit in units if not unit.is_validation])

    def adjusted(part: FilePart | ShardPart) -> FilePart | ShardPart:
        held_out = part.hold_out
        return part._replace(hold_out=HoldOut(threshold)) if held_out.by_hash else part

    return [unit._replace(parts=list(map(adjusted, unit.parts))) for unit in units]


def _choose_threshold(source: TextSource, units: list[Unit]) -> int:
    """Return the threshold: documents with a lower hash are held out.

    In a small source, exactly the percentage of the different documents is below the threshold. In others, this holds
    on average, and a few documents are read to make sure that both splits get some.
    """
    by_percentage = next(part.hold_out.threshold for unit in units for part in unit.parts if part.hold_out.by_hash)
    hashes, is_exact, count, characters = set(), len(units) == 1, 0, 0
    for part in itertools.chain.from_iterable(unit.parts for unit in units):
        if isinstance(part, FilePart) and part.hold_out.tail and kind_of(part.path) == TOKENS:
            continue
        for _, text in read_unit(source, Unit([part], 0), ReadReport()):
            if part.hold_out.by_hash and not isinstance(text, TokenStream):  # a stream is held out by its end
                hashes.add(hash64(text))
            count += 1
            characters += len(text)
            is_exact = is_exact and count < MOST_COUNTED and characters < SMALL_SOURCE
            if not is_exact and hashes and min(hashes) < by_percentage <= max(hashes):
                return by_percentage
    ordered = sorted(hashes)
    share = by_percentage / 2**64 * len(ordered) if is_exact else sum(value < by_percentage for value in ordered)
    num_held_out = min(max(1, round(share)), len(ordered) - 1)
    return ordered[num_held_out - 1] + 1 if num_held_out > 0 else 0


def read_unit(source: TextSource, unit: Unit, report: ReadReport) -> Iterator[Document]:
    """Yield the documents of a unit that hold text. Raises `UserError` naming the file if it cannot be read."""
    errors = (Exception,) if source.dataset_name else READ_ERRORS  # the network and datasets raise various errors
    for part in unit.parts:
        where = part.path if isinstance(part, FilePart) else f"dataset {source.dataset_name}"
        bad = report.skip if source.skip_bad_files and not source.dataset_name else functools.partial(_refuse, source)
        try:
            yield from _read_part(source, part, where, report, bad)
        except (GeneratorExit, UserError):  # at interpreter exit, the names below may no longer exist
            raise
        except errors as error:
            bad(_describe(error, where), 0)


def _refuse(source: TextSource, reason: str, _: int) -> None:
    """Raise `UserError` for what cannot be read, in a source that skips nothing."""
    has_option = source.validation_split_percentage and not source.dataset_name  # not in `read_texts`
    has_option = has_option and "; unpack it" not in reason
    raise UserError(reason + "; --skip_bad_files skips what cannot be read" * bool(has_option))


def _describe(error: Exception, where: str) -> str:
    if isinstance(error.__cause__ or error, UnicodeDecodeError):
        return not_utf8(where)
    if "too much memory for decoding" in str(error):  # pyarrow takes windows of 128 MB
        command = shell_command("zstd", "-d", "--rm", "--long=31", where)
        return f"{where} was compressed with a long window; unpack it: {command}"
    return f"cannot read {where}: {one_line(error).rstrip('.')}"


def not_utf8(where: str) -> str:
    return f"{where} is not UTF-8 text; convert it, from Latin-1 for example with iconv -f LATIN1 -t UTF-8"


def not_text(where: str) -> str:
    how = "it contains NUL bytes, so it is binary, or text in UTF-16: convert it with iconv -f UTF-16 -t UTF-8"
    return f"cannot read {where}: {how}"


def read_texts(
    paths: Iterable[str], text_column_name: str | tuple[str, ...], document_separator: str | None
) -> Iterator[str]:
    """Yield all documents of files, folders and patterns. Raises `UserError` if they cannot be read or hold ids."""
    options = {"text_column_name": text_column_name, "document_separator": document_separator}
    source = TextSource(tuple(paths), validation_split_percentage=0, **options)
    for unit in list_units(source):
        for document in read_unit(source, unit, ReadReport()):
            if not isinstance(document.text, str):
                raise UserError(f"{source.name} holds token ids, not text")
            yield document.text


def read_train_texts(source: TextSource, units: list[Unit]) -> Iterator[str]:
    """Yield the training text for a tokenizer. From a large source, yields the beginning of each unit."""
    read_sample(source, units)  # raises if there is no text
    limit = TOKENIZER_CHARACTERS // len(units)
    for unit in units:
        characters = 0
        for document in read_unit(source, unit, ReadReport()):
            if not isinstance(document.text, str):
                raise UserError(f"{source.name} is already tokenized; pass its --tokenizer_name")
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
            if characters >= SAMPLE_CHARACTERS or isinstance(document.text, TokenStream):
                break
        if texts:
            return [text for text in texts if isinstance(text, str)]
    reason = "it is empty or contains only whitespace"
    if report.num_skipped:
        reason = f"what cannot be read: {report.num_skipped:,}; the first: {report.errors[0]}"
    if report.num_without_column:
        paths = [part.path for unit in units for part in unit.parts if isinstance(part, FilePart)]
        reason = f"it has no column '{source.column_of(paths[0] if paths else None)}'"
        if report.columns:
            names = [name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..." for name in report.columns]
            reason += f"; pass --text_column_name with one of {', '.join(names)}"
            if any(kind_of(path) == ".csv" for path in paths):
                reason += "; if that is text, insert a first line that names the columns"
        else:
            reason += ", and no other column holds text; write each conversation or record as one text"
    raise UserError(f"there is no text in {source.name}: {reason}")


# ------------------------------------------------------------------ text


def _read_part(
    source: TextSource, part: FilePart | ShardPart, where: str, report: ReadReport, bad: Bad
) -> Iterator[Document]:
    if isinstance(part, FilePart) and kind_of(part.path) == TOKENS:
        yield from _read_token_file(part, source.id_bytes)
    elif isinstance(part, FilePart) and kind_of(part.path) in (".txt", ".md"):
        with open_decompressed(part.path) as stream:
            if source.document_separator is not None:
                yield from _read_separated(stream, source.document_separator, part, report, bad)
            elif part.stop is None:  # it is compressed
                content = stream.read()
                yield from _read_stretch(io.BytesIO(content), len(content), part, bad)
            else:
                yield from _read_stretch(stream, os.path.getsize(part.path), part, bad)
    else:
        column = source.column_of(part.path if isinstance(part, FilePart) else None)
        for text in texts_of(_read_rows(source, part, where, bad), column, where, report, bad):
            yield Document(part.hold_out.split_of(text), text)


def _read_token_file(part: FilePart, id_bytes: int) -> Iterator[Document]:
    """Yield the ids of a part of a file of token ids. The last ids of the file may be held out."""
    start, stop, id_bytes = find_tokens(part.path, id_bytes)
    limit = stop - id_bytes * round((stop - start) // id_bytes * part.hold_out.tail)
    end = stop if part.stop is None else part.stop
    cut_at = min(max(part.start, limit), end)
    with open(part.path, "rb") as file:
        for tokens in read_tokens(file, part.start, cut_at, id_bytes):
            yield Document(part.hold_out.split_of(tokens.ids), tokens)
        for tokens in read_tokens(file, cut_at, end, id_bytes):
            yield Document("validation", tokens)


def _read_separated(
    stream: IO[bytes], separator: str, part: FilePart, report: ReadReport, bad: Bad
) -> Iterator[Document]:
    """Yield the documents between separators that begin in a part of a text."""
    pattern, start, num_bytes = separator_pattern(separator), 0, None
    if part.stop is not None:
        size = os.path.getsize(part.path)
        start, stop = (find_start(stream, position, size, pattern) for position in (part.start, part.stop))
        num_bytes = stop - start
        stream.seek(start)
    before = b"\r" if separator.startswith("\n") else b""
    for number, data in enumerate(_split(stream, num_bytes, pattern)):
        report.num_separators += number > 0
        text = decode(data.removesuffix(before), part.path, bad, is_first=start == number == 0)
        if text and not text.isspace():
            yield Document(part.hold_out.split_of(text), text)


def _read_stretch(file: IO[bytes], size: int, part: FilePart, bad: Bad) -> Iterator[Document]:
    """Yield the lines that begin in a part of a text, as one document; two if a part of them is held out."""
    end = size if part.stop is None else part.stop
    start, stop = (find_line(file, position, size) for position in (part.start, end))
    limit = round(size * (1 - part.hold_out.tail))
    limit = find_line(file, limit, size, reach=min(BLOCK, (size - limit) // 2))
    cut_at = min(max(start, limit), stop)
    file.seek(start)
    for num_bytes, is_end in ((cut_at - start, False), (stop - cut_at, True)):
        if data := file.read(num_bytes):
            text = decode(data, part.path, bad, is_first=start == 0 and not is_end)
            if text and not (text.isspace() and stop - start == size):  # a text may have blank lines
                yield Document("validation" if is_end else part.hold_out.split_of(text), text)


def separator_pattern(separator: str | None) -> re.Pattern:
    """Match a separator, or the end of a line. A line break in it also matches a Windows line break."""
    lines = map(re.escape, (separator or "\n").encode().split(b"\n"))
    # An optional character in front makes the search ten times as slow; the reader removes it.
    return re.compile(rb"\r?\n".join(lines).removeprefix(rb"\r?"))


def find_start(file: IO[bytes], position: int, size: int, pattern: re.Pattern) -> int:
    """Return the first start of a document at or after a position: where a separator ends, or the file.

    The result depends on the file and the position only, so a unit ends exactly where the next one begins.
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


def find_line(file: IO[bytes], position: int, size: int, reach: int = BLOCK) -> int:
    """Return the last start of a line within `reach` bytes before a position; else of a word; else of a character."""
    if position <= 0 or position >= size:
        return position
    begin = max(0, position - reach)
    file.seek(begin)
    window = file.read(position - begin)
    for mark in (b"\n", b" "):
        if (index := window.rfind(mark)) >= 0:
            return begin + index + 1
    return position + next(i for i, byte in enumerate(file.read(4) + b" ") if byte & 0xC0 != 0x80)


def _split(stream: IO[bytes], num_bytes: int | None, pattern: re.Pattern) -> Iterator[bytes]:
    """Yield the pieces of the next bytes (None: all) between the matches of a pattern."""
    left, rest = math.inf if num_bytes is None else num_bytes, b""
    while block := stream.read(
        int(min(left, max(BLOCK, len(rest))))
    ):  # more for a long piece, which is searched again
        left -= len(block)
        *pieces, rest = pattern.split(rest + block)
        yield from pieces
    yield rest


def decode(data: bytes, where: str, bad: Bad, is_first: bool = False) -> str:
    """Return the text, without lines that are not UTF-8 or contain NUL bytes."""
    data = data.removeprefix(codecs.BOM_UTF8) if is_first else data
    try:
        if b"\0" not in data:
            return data.decode()
    except UnicodeDecodeError:
        pass
    lines = []
    for line in data.splitlines(keepends=True):
        try:
            if b"\0" in line:
                bad(not_text(where), len(line))
            else:
                lines.append(line.decode())
        except UnicodeDecodeError:
            bad(not_utf8(where), len(line))
    return "".join(lines)


# ------------------------------------------------------------------ rows


def _read_rows(source: TextSource, part: FilePart | ShardPart, where: str, bad: Bad) -> Iterator[Any]:
    """Yield the rows of a part."""
    if isinstance(part, ShardPart):
        yield from _read_shards(source, part)
        return
    kind, column = kind_of(part.path), source.column_of(part.path)
    if kind == ".parquet":
        yield from _read_parquet(part, column, bad)
        return
    with open_decompressed(part.path) as stream:
        if kind == ".csv":
            yield from _read_csv(stream, column, where, bad)
        elif kind == ".wet":
            yield from ({column: decode(page, where, bad)} for page in read_wet(stream))
        elif kind == ".json" and stream.peek(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
            yield from json.load(stream)
        else:
            yield from _read_jsonl(stream, part, bad)


def _read_parquet(part: FilePart, column: str, bad: Bad) -> Iterator[dict]:
    file = pq.ParquetFile(part.path, pre_buffer=False)
    schema = file.schema_arrow
    groups = range(file.num_row_groups) if part.stop is None else range(part.start, part.stop)
    if column not in schema.names:
        num_rows = sum(file.metadata.row_group(number).num_rows for number in groups)
        empty = dict(zip(schema.names, map(_empty_value, schema.types), strict=True))
        yield from itertools.repeat(empty, num_rows)
        return
    names = [column] + [MASK] * (MASK in schema.names and _empty_value(schema.field(column).type) == [])
    for batch in file.iter_batches(ROWS_PER_READ, groups, names, use_threads=False):
        try:
            columns = [batch.column(name).to_pylist() for name in names]
        except UnicodeDecodeError:
            texts = batch.column(column).cast(pa.binary()).to_pylist()
            columns = [[text and decode(text, part.path, bad) for text in texts]]
        yield from (dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True))


def _empty_value(kind: pa.DataType) -> str | list | None:
    """Return a value for a column that is not read: text, token ids, or None for a type that holds neither."""
    lists = pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list
    if any(is_list(kind) for is_list in lists) and pa.types.is_integer(kind.value_type):
        return []
    return None if pa.types.is_nested(kind) or pa.types.is_primitive(kind) else ""


def _read_csv(stream: IO[bytes], column: str, where: str, bad: Bad) -> Iterator[dict]:
    """Yield the rows with as many fields as the header. After a bad quote, reads on from the row's second line."""
    lines = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    row_lines, to_reread = [], deque()
    names, number = None, 0  # names of the columns; lines before the row

    def feed() -> Iterator[str]:
        while line := to_reread.popleft() if to_reread else lines.readline():
            row_lines.append(line)
            yield line

    reader = csv.reader(feed(), strict=True)
    while True:
        row_lines.clear()
        try:
            fields = next(reader, None)
        except csv.Error:  # the error may be a thousand lines after the quote
            reason = f"cannot read {where}: line {number + 1:,} has a quote that is not closed, or text after a quote"
            bad(reason, len(row_lines[0]))
            to_reread.extendleft(reversed(row_lines[1:]))
            reader, number = csv.reader(feed(), strict=True), number + 1
            continue
        if fields is None:
            return
        line, number = number + 1, number + len(row_lines)
        if names is None:
            names = fields
            if not is_utf8("".join(names)):
                reason = not_text if "\0" in "".join(names) else not_utf8
                bad(reason(where), os.path.getsize(where))
                return
            continue
        # pandas writes an index without a name as the first column. Other columns without a name hold cut text.
        has_cut_text = any(text and not name for name, text in zip(names[1:], fields[1:], strict=False))
        if fields and (len(fields) != len(names) or has_cut_text):
            count = f"{len(fields)} fields, the header {len(names) - names[1:].count('')}"
            reason = f"cannot read {where}: line {line:,} has {count}; put text that contains commas in quotes"
            bad(reason, sum(map(len, row_lines)))
            continue
        row = dict(zip(names, fields, strict=False))
        if not is_utf8(row.get(column, "")):
            bad(not_utf8(f"{where}, line {line:,},"), sum(map(len, row_lines)))
        elif fields:
            yield row


def is_utf8(text: str) -> bool:
    """Return whether a text read with `surrogateescape` was UTF-8."""
    return text.isascii() or not re.search("[\udc80-\udcff]", text)


def _read_jsonl(stream: IO[bytes], part: FilePart, bad: Bad) -> Iterator[Any]:
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
            try:  # json accepts more: a byte order mark, NaN, half of a surrogate pair, deep nesting
                row = json.loads(line)
            except UnicodeDecodeError:
                bad(not_text(part.path) if b"\0" in line else not_utf8(part.path), len(line))
                continue
            except (ValueError, RecursionError) as error:
                reason = f"cannot read {part.path}: the line that ends at byte {position:,} is not JSON: {error}"
                bad(not_text(part.path) if b"\0" in line else reason, len(line))
                continue
        yield row


def read_wet(stream: IO[bytes]) -> Iterator[bytes]:
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
            yield payload


def _read_shards(source: TextSource, part: ShardPart) -> Iterator[dict]:
    """Yield the rows of some shards of a dataset."""
    column = source.column_of()
    if source.dataset_name == STANDARD_LIBRARY:
        yield from ({column: text} for text in read_standard_library())
        return
    rows = source.dataset[part.split].rows.shard(part.count, part.number)
    if column in (names := rows.column_names or ()):
        rows = rows.select_columns([name for name in (column, MASK) if name in names])
    for batch in rows.iter(ROWS_PER_READ):
        yield from (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))


def texts_of(rows: Iterable[Any], column: str, where: str, report: ReadReport, bad: Bad) -> Iterator[str | np.ndarray]:
    """Yield the text of each row, or its token ids, and count the rows without any."""
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            bad(f"{where}, row {number} is a {type(row).__name__}, not an object with a text column", 0)
            continue
        text = row.get(column)
        if column not in row:
            report.num_without_column += 1
            names = [
                str(name) for name, value in row.items() if isinstance(value, str) or token_ids(value) is not None
            ]
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
        elif (ids := token_ids(text)) is None:
            problem = f"column '{column}' holds {type(text).__name__}, neither text nor a list of token ids"
            bad(f"{where}, row {number}: {problem}", 0)
        elif (mask := row.get(MASK)) is None:
            report.num_row_ids += len(ids)
            report.num_padding += count_padding(ids)
            yield ids
        elif (mask := token_ids(mask)) is None or len(mask) != len(ids):
            bad(f"{where}, row {number}: {MASK} is not a list with one number for each id in column '{column}'", 0)
        elif mask.any():
            yield ids[mask != 0]
        else:
            report.num_blank += 1


def token_ids(value: Any) -> np.ndarray | None:
    """Return a list of token ids as int64 [tokens], or None for anything else."""
    if not isinstance(value, (list, np.ndarray)):
        return None
    try:
        ids = np.asarray(value)
    except ValueError:  # lists of several lengths
        return None
    return ids.astype(np.int64) if ids.ndim == 1 and (len(ids) == 0 or ids.dtype.kind in "iu") else None


def count_padding(ids: np.ndarray) -> int:
    """Return the length of a run of one id at the end of a row, if it is so long that it may be padding."""
    others = np.flatnonzero(ids != ids[-1]) if len(ids) else ids
    length = len(ids) - (int(others[-1]) + 1 if len(others) else 0)
    return length if length >= PADDING else 0
