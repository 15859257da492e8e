"""Read documents from files of all supported kinds, plain or compressed. Only a .json array is read as a whole."""

import codecs
import contextlib
import csv
import glob
import hashlib
import io
import itertools
import json
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub.utils.sha import sha_fileobj

from recipe.data.bad_files import NUL, describe_bad_file
from recipe.errors import UserError, one_line

KINDS = (".txt", ".jsonl", ".json", ".csv", ".parquet", ".wet")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
BLOCK_BYTES = 2**20  # per read
PARQUET_ROWS = 100  # per read
PIECE_CHARACTERS = 1_000_000  # longer .txt documents are split into pieces of about this length
HASHED_CHARACTERS = 100_000  # of a document, to recognize it again; the first piece is never shorter than that
Text = str | np.ndarray  # or, if the source is already tokenized, token ids: int64 [tokens]
csv.field_size_limit(2**31 - 1)


class Part(NamedTuple):
    """A document, or a part of one."""

    text: Text
    ends: bool  # whether the document ends with it
    place: dict | None = None  # where its source resumes reading directly after it, as a JSON value


@dataclass
class ReadReport:
    """What only reading the whole text reveals."""

    skipped: list[str] = field(default_factory=list)  # the error of each skipped file
    num_separators: int = 0
    duplicates_of_validation: int = 0  # training documents


def read_file(
    path: str, text_column_name: str, separator: str | None, report: ReadReport, start: dict | None = None
) -> Iterator[Part]:
    """Yield the nonblank documents of a file. Raises `UserError` naming the file if it cannot be read.

    start: the place of an earlier part; only the parts after it follow. Text and JSON lines before it are not read
    (of a compressed file, only decompressed), nor are the row groups of a Parquet file.
    """
    kind, start = kind_of(path), start or {}
    try:
        if kind == ".txt":
            yield from read_text(open_stream(path), separator, report, start)
            return
        if kind == ".wet":
            yield from _read_wet(open_stream(path), start)
            return
        if kind == ".parquet":
            rows = _read_parquet(path, text_column_name, start)
        elif kind == ".csv":
            lines = io.TextIOWrapper(open_stream(path), encoding="utf-8-sig", newline="")
            rows = _number(csv.DictReader(map(_without_nul, lines)), start)
        else:
            rows = (_read_jsonl if kind == ".jsonl" else _read_json)(open_stream(path), start)
        yield from texts_of(rows, text_column_name, path)
    except GeneratorExit:  # at interpreter exit, the names below may no longer exist
        raise
    except (OSError, EOFError, ValueError, RecursionError, csv.Error, pa.ArrowException) as error:
        if reason := describe_bad_file(path, *suffix_and_compression(path)):
            raise UserError(f"cannot read {path}: {reason}") from error
        if isinstance(error, UnicodeDecodeError):
            remedy = "convert it, from Latin-1 for example with iconv -f LATIN1 -t UTF-8"
            raise UserError(f"{path} is not UTF-8 text: {error.reason}; {remedy}") from error
        raise UserError(f"cannot read {path}: {one_line(error)}") from error


def read_text(
    stream: BinaryIO, separator: str | None, report: ReadReport, start: dict | None = None
) -> Iterator[Part]:
    """Yield the nonblank documents of a UTF-8 stream, cut at each separator; long documents come in pieces.

    A line break in the separator also matches a Windows line break. After a start, the parts are the same: a place
    holds the bytes that had been read beyond it, so that reads end where they did, and the state of the buffer.
    """
    start = start or {}
    offset, unread = start.get("offset", 0), start.get("unread", 0)  # offset: of the buffer's first byte
    attempt_at = start.get("attempt_at", PIECE_CHARACTERS)  # length of the buffer
    begun = start.get("begun", False)  # whether a piece of the current document has been yielded
    decoder, buffer, position, at_end = codecs.getincrementaldecoder("utf-8")(), "", offset, False
    lines = map(re.escape, (separator or "").split("\n"))
    # An optional character in front makes the search ten times as slow; `removesuffix` below has the same effect.
    pattern = re.compile(r"\r?\n".join(lines).removeprefix(r"\r?"))
    before = "\r" if separator is not None and separator.startswith("\n") else ""

    def part(text: str, ends: bool) -> Part:
        place = {"offset": offset, "unread": position - offset, "attempt_at": attempt_at, "begun": not ends}
        return Part(text, ends, place)

    skip_bytes(stream, offset)
    while not at_end:
        block = stream.read(unread or BLOCK_BYTES)
        at_end, unread = not block, 0
        position += len(block)
        if b"\0" in block:
            raise ValueError(NUL)
        buffer += decoder.decode(block, final=at_end)
        if offset == 0 and buffer.startswith("\ufeff"):  # a byte order mark
            buffer, offset = buffer[1:], len(codecs.BOM_UTF8)
        if separator is not None:
            text_start = 0
            for match in pattern.finditer(buffer):
                text = buffer[text_start : match.start()].removesuffix(before)
                offset += count_utf8_bytes(buffer[text_start : match.end()])
                text_start = match.end()
                report.num_separators += 1
                if begun or (text and not text.isspace()):
                    yield part(text, True)
                begun = False
            buffer = buffer[text_start:]
        if len(buffer) >= attempt_at and not at_end:
            cut = find_cut(buffer, len(buffer) - 2 * len(separator or ""))
            cut = cut if cut >= HASHED_CHARACTERS else 0
            text, buffer = buffer[:cut], buffer[cut:]
            offset += count_utf8_bytes(text)
            attempt_at = len(buffer) + PIECE_CHARACTERS
            if cut:
                begun = True
                yield part(text, False)
    if begun or (buffer and not buffer.isspace()):
        offset = position
        yield part(buffer, True)


def find_cut(text: str, end: int) -> int:
    """Return the last position before `end` where every tokenizer splits text in any context, or 0.

    GPT-2's pattern and its successors end a word after a line break, and before a space, if the characters on both
    sides are not white space.
    """
    for mark, shift in (("\n", 1), (" ", 0)):
        position = text.rfind(mark, 1, end - 1)
        while position > 0:
            if not text[position - 1].isspace() and not text[position + 1].isspace():
                return position + shift
            position = text.rfind(mark, 1, position)
    return 0


def count_utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8"))


def _without_nul(line: str) -> str:
    if "\0" in line:
        raise ValueError(NUL)
    return line


def _read_wet(stream: BinaryIO, start: dict) -> Iterator[Part]:
    """Yield the text of each page in Common Crawl's extracted text: the "conversion" records of a WARC 1.0 file."""
    offset = start.get("offset", 0)
    skip_bytes(stream, offset)
    while version := stream.readline():
        lines = [version]
        while lines[-1].strip():
            lines.append(stream.readline())
        header = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        length = header.get(b"content-length", b"")
        if not version.startswith(b"WARC/") or not length.isdigit():
            raise ValueError(f"there is no WARC record at byte {offset:,} of its content")
        payload, end = stream.read(int(length)), stream.read(4)
        if end != b"\r\n\r\n":
            raise ValueError(f"the WARC record at byte {offset:,} of its content is incomplete or of another length")
        offset += sum(map(len, lines)) + len(payload) + len(end)
        text = payload.decode("utf-8") if header.get(b"warc-type") == b"conversion" else ""
        if text and not text.isspace():
            yield Part(text, True, {"offset": offset})


def _read_jsonl(stream: BinaryIO, start: dict) -> Iterator[tuple[dict, Any]]:
    offset = start.get("offset", 0)
    skip_bytes(stream, offset)
    for number, line in enumerate(stream, start.get("row", 0) + 1):
        offset += len(line)
        try:
            row = orjson.loads(line)
        except ValueError:
            if not line.strip(codecs.BOM_UTF8 + b" \t\r\n"):
                continue
            try:  # json accepts more: a byte order mark, NaN, half of a surrogate pair, deep nesting
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} is not JSON: {error}") from error
        yield {"row": number, "offset": offset}, row


def _read_json(stream: BinaryIO, start: dict) -> Iterator[tuple[dict, Any]]:
    """Read an array of objects, all at once, or JSON lines."""
    if stream.peek(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1] != b"[":
        return _read_jsonl(stream, start)
    return _number(json.load(stream), start)


def _read_parquet(path: str, column: str, start: dict) -> Iterator[tuple[dict, Any]]:
    file = pq.ParquetFile(path, pre_buffer=False)
    columns = [column] if column in file.schema_arrow.names else None  # all, for the error message of `texts_of`
    groups, done, skipped = list(range(file.num_row_groups)), start.get("row", 0), 0
    while groups and skipped + (num_rows := file.metadata.row_group(groups[0]).num_rows) <= done:
        skipped += num_rows
        del groups[0]
    batches = file.iter_batches(PARQUET_ROWS, groups, columns)
    if columns is None:
        rows = (row for batch in batches for row in batch.to_pylist())
    else:
        rows = ({column: value} for batch in batches for value in batch.column(0).to_pylist())
    return _number(rows, start, skipped)


def _number(rows: Iterable, start: dict, skipped: int = 0) -> Iterator[tuple[dict, Any]]:
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


def suffix_and_compression(path: str) -> tuple[str, str | None]:
    """`a.JSONL.gz` -> (".jsonl", "gzip")."""
    name = Path(path.lower())
    compression = COMPRESSIONS.get(name.suffix)
    return (name.with_suffix("") if compression else name).suffix, compression


def kind_of(path: str) -> str:
    """Return a file's suffix without that of its compression. Raises `UserError` for an unsupported one."""
    kind = suffix_and_compression(path)[0]
    if kind not in KINDS:
        raise UserError(f"cannot read {path}: use {', '.join(KINDS)} files, plain or compressed as .gz or .zst")
    return kind


def expand_paths(paths: Iterable[str]) -> list[str]:
    """Replace each folder by the supported files in it and each glob pattern by its matches, sorted."""
    files: list[str] = []
    for path in paths:
        is_folder = Path(path).is_dir()
        pattern = f"{glob.escape(path)}/**" if is_folder else path
        found = [path] if Path(path).is_file() else sorted(glob.glob(pattern, recursive=True))
        found = [p for p in found if Path(p).is_file() and (not is_folder or suffix_and_compression(p)[0] in KINDS)]
        if not found:
            missing = f"folder {path} holds no file of a supported kind" if is_folder else f"there is no file {path}"
            raise UserError(missing)
        files += found
    return files


def open_stream(path: str) -> BinaryIO:
    """Open a file as a buffered stream of decompressed bytes."""
    compression = suffix_and_compression(path)[1]
    if compression is None:
        return open(path, "rb")
    return io.BufferedReader(pa.input_stream(path, compression=compression), BLOCK_BYTES)


def skip_bytes(stream: BinaryIO, num_bytes: int) -> None:
    """Move to a position in a stream that has not been read; one of compressed bytes must be read to there."""
    if stream.seekable():
        stream.seek(num_bytes)
        return
    while num_bytes > 0 and (block := stream.read(min(num_bytes, BLOCK_BYTES))):
        num_bytes -= len(block)


def count_bytes(path: str) -> int:
    """Count a file's decompressed bytes, up to the damage in a damaged archive (reading the text reports it)."""
    if suffix_and_compression(path)[1] is None:
        return Path(path).stat().st_size
    num_bytes = 0
    with contextlib.suppress(OSError, EOFError), open_stream(path) as stream:
        while block := stream.read(BLOCK_BYTES):
            num_bytes += len(block)
    return num_bytes


def file_sha256(path: str) -> bytes:
    """Hash a file's bytes, or the reason why it cannot be read (reading the text reports it)."""
    try:
        with open(path, "rb") as file:
            return sha_fileobj(file)
    except OSError as error:
        return hashlib.sha256(str(error).encode()).digest()


def read_standard_library() -> Iterator[str]:
    """Yield the documents of Python's standard library: reference documentation, then sources without tests.

    Raises `UserError` if the interpreter ships without sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    # `encodings` holds tables of character names.
    skipped = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "pydoc_data", "encodings"}
    sources = sorted(p for p in root.rglob("*.py") if not skipped & set(p.relative_to(root).parts))
    if len(sources) < 50:
        remedy = "pass --train_file TEXT.txt with a megabyte of text or more"
        raise UserError(f"{root} holds no Python sources for the demo to train on; {remedy}")
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions omit the documentation
        topics = {}
    yield from (text for _, text in sorted(topics.items()))
    for path in sources:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a few sources deliberately use another encoding
        if text.strip():
            yield text
