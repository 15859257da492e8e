"""Read documents from rows: of JSON, CSV and Parquet files, and from the records of WET files.

Each row comes with the place where reading resumes after it.
"""

import codecs
import csv
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recipe.data.bad_files import NUL
from recipe.errors import UserError

if TYPE_CHECKING:
    import datasets

ROWS_PER_READ = 100
SKIPPED_BYTES = 2**20  # per read
Text = str | np.ndarray  # or, if the source is already tokenized, token ids: int64 [tokens]
csv.field_size_limit(2**31 - 1)


class Part(NamedTuple):
    """A document, or a part of one."""

    text: Text
    ends: bool  # whether the document ends with it
    place: dict | None = None  # where its source resumes reading directly after it, as a JSON value


def _without_nul(line: str) -> str:
    if "\0" in line:
        raise ValueError(NUL)
    return line


def read_wet(stream: BinaryIO, start: dict) -> Iterator[Part]:
    """Yield the text of each page in Common Crawl's extracted text: the "conversion" records of a WARC 1.0 file."""
    offset = start.get("offset", 0)
    skip_bytes(stream, offset)
    while version := stream.readline():
        lines = [version]
        while lines[-1].strip():
            lines.append(stream.readline())
        header = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        length = header.get(b"content-length", b"")
        if not version.startswith(b"WARC/") or not length.isdigit() or len(length) > 10:
            raise ValueError(f"there is no WARC record at byte {offset:,} of its content")
        payload, end = stream.read(int(length)), stream.read(4)
        if end != b"\r\n\r\n":
            raise ValueError(f"the WARC record at byte {offset:,} of its content is incomplete or of another length")
        offset += sum(map(len, lines)) + len(payload) + len(end)
        text = payload.decode("utf-8") if header.get(b"warc-type") == b"conversion" else ""
        if text and not text.isspace():
            yield Part(text, True, {"offset": offset})


def read_csv(stream: BinaryIO, start: dict) -> Iterator[tuple[dict, Any]]:
    lines = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    return number_rows(csv.DictReader(map(_without_nul, lines)), start)


def read_jsonl(stream: BinaryIO, start: dict) -> Iterator[tuple[dict, Any]]:
    try:  # not at the top, because training on a packed dataset does not need it
        from orjson import loads
    except ImportError:
        from json import loads
    offset = start.get("offset", 0)
    skip_bytes(stream, offset)
    for number, line in enumerate(stream, start.get("row", 0) + 1):
        offset += len(line)
        try:
            row = loads(line)
        except ValueError:
            if not line.strip(codecs.BOM_UTF8 + b" \t\r\n"):
                continue
            if b"\0" in line:
                raise ValueError(NUL) from None
            try:  # json accepts more: a byte order mark, NaN, half of a surrogate pair, deep nesting
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} is not JSON: {error}") from error
        yield {"row": number, "offset": offset}, row


def read_json(stream: BinaryIO, start: dict) -> Iterator[tuple[dict, Any]]:
    """Read an array of objects, all at once, or JSON lines."""
    if stream.peek(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1] != b"[":
        return read_jsonl(stream, start)
    return number_rows(json.load(stream), start)


def read_parquet(
    path: str, column: str, start: dict, row_groups: Sequence[int] | None = None
) -> Iterator[tuple[dict, Any]]:
    """Yield (place, row) for each row of these row groups; by default, of all."""
    file = pq.ParquetFile(path, pre_buffer=False)
    columns = [column] if column in file.schema_arrow.names else None  # all, for the error message of `texts_of`
    groups = list(range(file.num_row_groups) if row_groups is None else row_groups)
    done, skipped = start.get("row", 0), 0
    while groups and skipped + (num_rows := file.metadata.row_group(groups[0]).num_rows) <= done:
        skipped += num_rows
        del groups[0]
    batches = file.iter_batches(ROWS_PER_READ, groups, columns)
    if columns is None:
        rows = (row for batch in batches for row in batch.to_pylist())
    else:
        rows = ({column: value} for batch in batches for value in batch.column(0).to_pylist())
    return number_rows(rows, start, skipped)


def count_row_groups(path: str, column: str) -> int | None:
    """Count the row groups of a Parquet file; None if its column does not hold text, or the file is damaged."""
    try:
        file = pq.ParquetFile(path)
        kind = file.schema_arrow.field(column).type
    except (OSError, KeyError, pa.ArrowException):
        return None
    return file.num_row_groups if pa.types.is_string(kind) or pa.types.is_large_string(kind) else None


def read_dataset(rows: "datasets.IterableDataset", column: str, start: dict) -> Iterator[tuple[dict, Any]]:
    """Yield (place, row) for each row of a dataset; a place is a number of rows after a state of `rows`."""
    rows = rows.select_columns([column]) if column in (rows.column_names or ()) else rows.shard(1, 0)
    state, done = start.get("state"), start.get("rows_after_state", 0)
    if state:
        rows.load_state_dict(state)  # of the new object: it would stay in the caller's
    number = start.get("row", 0) - done
    for batch in rows.iter(ROWS_PER_READ):
        values = batch.get(column)
        if values is None:
            yield {"row": number + 1}, batch  # an error, which names the columns of the batch
            return
        for i in range(done, len(values)):
            yield {"row": number + i + 1, "state": state, "rows_after_state": i + 1}, {column: values[i]}
        number, done, state = number + len(values), 0, rows.state_dict()


def number_rows(rows: Iterable, start: dict, skipped: int = 0) -> Iterator[tuple[dict, Any]]:
    """Yield (place, row) for each row after the start. skipped: the number of rows before the first one."""
    done = start.get("row", 0)
    return (({"row": n}, row) for n, row in enumerate(itertools.islice(rows, done - skipped, None), done + 1))


def texts_of(rows: Iterable[tuple[dict, Any]], column: str, where: str) -> Iterator[Part]:
    """Yield the text of each row, or its token ids; skip rows without any (null, empty or blank).

    rows: (place after the row, which holds its number as "row"; the row).
    """
    for place, row in rows:
        number = place["row"]
        if not isinstance(row, dict):
            raise UserError(f"{where}, row {number} is a {type(row).__name__}, not an object with a text column")
        if column not in row:
            names = ", ".join(map(str, row)) or "none"
            if number > 1:
                raise UserError(f"{where}, row {number} has no column '{column}' (it has {names}), unlike row 1")
            raise UserError(f"{where} has no column '{column}'; pass --text_column_name with one of {names}")
        text = row[column]
        if isinstance(text, (list, np.ndarray)):
            ids = np.asarray(text)
            if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
                found = f"column '{column}' holds a list that is not a list of token ids"
                raise UserError(f"{where}, row {number}: {found}")
            if len(ids):
                yield Part(ids.astype(np.int64), True, place)
            continue
        if not isinstance(text, (str, type(None))):
            raise UserError(f"{where}, row {number}: column '{column}' holds {type(text).__name__}, not text")
        if text and not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError:  # JSON can escape half a surrogate pair, which is not a character
                text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        if text and not text.isspace():
            yield Part(text, True, place)


def skip_bytes(stream: BinaryIO, num_bytes: int) -> None:
    """Move to a position in a stream that has not been read; one of compressed bytes must be read to there."""
    if stream.seekable():
        stream.seek(num_bytes)
        return
    while num_bytes > 0 and (block := stream.read(min(num_bytes, SKIPPED_BYTES))):
        num_bytes -= len(block)
