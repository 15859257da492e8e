"""Files of text -> documents: every kind that can be read, plain or compressed, as a stream whatever its size."""

import codecs
import csv
import glob
import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recipe.errors import UserError

KINDS = (".txt", ".jsonl", ".json", ".csv", ".parquet")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
BLOCK_BYTES = 2**20  # read at once
PIECE_CHARACTERS = 1_000_000  # longer documents come in pieces of about this length
HASHED_CHARACTERS = 100_000  # of a document, by which it is known again; no first piece is shorter than that
Text = str | np.ndarray  # or its token ids, int64 [tokens], where the source is tokenized already
Part = tuple[Text, bool]  # a document or a piece of it, and whether it ends there
csv.field_size_limit(2**31 - 1)


@dataclass
class ReadReport:
    """What reading finds out beside the documents: why files were skipped, and how often the separator occurred."""

    skipped: list[str] = field(default_factory=list)
    num_separators: int = 0


def read_file(
    path: str, text_column_name: str, separator: str | None, report: ReadReport | None = None
) -> Iterator[Part]:
    """The documents of a file, blank ones left out. Raises `UserError` naming the file if it cannot be read."""
    kind = kind_of(path)
    try:
        if kind == ".parquet":
            rows = _read_parquet(path, text_column_name)
        else:
            stream = open_stream(path)
            if kind == ".txt":
                yield from read_text(stream, separator, report)
                return
            rows = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv}[kind](stream)
        yield from ((text, True) for text in texts_of(rows, text_column_name, path))
    except GeneratorExit:  # closed while the interpreter ends, when the names below may be gone
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason}") from error
    except (OSError, EOFError, ValueError, RecursionError, csv.Error, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"cannot read {path}: {reason}") from error


def read_text(stream: BinaryIO, separator: str | None, report: ReadReport | None = None) -> Iterator[Part]:
    """Documents of a UTF-8 stream, cut at each separator; a long one in pieces, blank ones left out.

    A line break of the separator also stands for Windows' two characters.
    """
    decoder, buffer, attempt_at, at_end = codecs.getincrementaldecoder("utf-8-sig")(), "", PIECE_CHARACTERS, False
    pattern = re.compile(r"\r?\n".join(map(re.escape, separator.split("\n")))) if separator is not None else None
    begun = False  # a document, with pieces that went before
    while not at_end:
        block = stream.read(BLOCK_BYTES)
        at_end = not block
        buffer += decoder.decode(block, final=at_end)
        if pattern is not None:
            *documents, buffer = pattern.split(buffer)
            if report is not None:
                report.num_separators += len(documents)
            for text in documents:
                if begun or text.strip():
                    yield text, True
                begun = False
        if len(buffer) >= attempt_at and not at_end:
            cut = find_cut(buffer, len(buffer) - 2 * len(separator or ""))
            if cut >= HASHED_CHARACTERS:
                yield buffer[:cut], False
                buffer, begun = buffer[cut:], True
            attempt_at = len(buffer) + PIECE_CHARACTERS
    if begun or buffer.strip():
        yield buffer, True


def find_cut(text: str, end: int) -> int:
    """The last place before `end` where tokenizers cut text anyway, whatever stands around it; 0 if there is none.

    That is after a line break, or before a space, between two characters that are neither: GPT-2's pattern and its
    successors end a word there.
    """
    for mark, shift in (("\n", 1), (" ", 0)):
        position = text.rfind(mark, 1, end - 1)
        while position > 0:
            if not text[position - 1].isspace() and not text[position + 1].isspace():
                return position + shift
            position = text.rfind(mark, 1, position)
    return 0


def _read_jsonl(stream: BinaryIO) -> Iterator[dict]:
    for number, line in enumerate(stream, start=1):
        if line.strip(codecs.BOM_UTF8 + b" \t\r\n"):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} is not JSON: {error}") from error
            yield _as_row(row, f"line {number}")


def _read_json(stream: BinaryIO) -> Iterator[dict]:
    """An array of objects, read as a whole, or JSON lines under another name."""
    first = stream.peek(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    if first != b"[":
        yield from _read_jsonl(stream)
        return
    for number, row in enumerate(json.load(stream), start=1):
        yield _as_row(row, f"item {number}")


def _as_row(row: object, where: str) -> dict:
    if not isinstance(row, dict):
        raise ValueError(f"{where} is a {type(row).__name__}, not an object with a column of text")
    return row


def _read_csv(stream: BinaryIO) -> Iterator[dict]:
    return csv.DictReader(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""))


def _read_parquet(path: str, column: str) -> Iterator[dict]:
    file = pq.ParquetFile(path)
    if column not in file.schema_arrow.names:
        yield dict.fromkeys(file.schema_arrow.names)  # let the reader of rows say which columns there are
        return
    for batch in file.iter_batches(batch_size=1000, columns=[column]):
        yield from batch.to_pylist()


def texts_of(rows: Iterable[dict], column: str, where: str) -> Iterator[Text]:
    """The text of each row, or its ids if it is tokenized; rows without any (null or blank) are skipped."""
    for number, row in enumerate(rows, start=1):
        if column not in row:
            names = ", ".join(map(str, row)) or "none"
            if number > 1:
                raise UserError(f"{where}, row {number} has no column '{column}' (it has {names}), unlike row 1")
            raise UserError(f"{where} has no column '{column}'; pass --text_column_name with one of {names}")
        text = row[column]
        if isinstance(text, (list, np.ndarray)):
            ids = np.asarray(text)
            if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
                raise UserError(f"{where}, row {number}: column '{column}' holds a list that is not one of token ids")
            if len(ids):
                yield ids.astype(np.int64)
            continue
        if not isinstance(text, (str, type(None))):
            raise UserError(f"{where}, row {number}: column '{column}' holds {type(text).__name__}, not text")
        if text and not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError:  # half a surrogate pair, as JSON may escape it, is no character
                text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        if text and not text.isspace():
            yield text


def kind_of(path: str) -> str:
    """A file's kind by its ending, compression aside. Raises `UserError` for one that cannot be read."""
    name = Path(path.lower())
    if name.suffix in COMPRESSIONS:
        name = name.with_suffix("")
    if name.suffix not in KINDS:
        raise UserError(f"cannot read {path}: use {', '.join(KINDS)} files, plain or .gz or .zst")
    return name.suffix


def expand_paths(paths: Iterable[str]) -> list[str]:
    """Files as they are, folders and patterns as the files they stand for, sorted."""
    files: list[str] = []
    for path in paths:
        if not path:
            raise UserError("a file name is empty")
        if Path(path).is_file():
            files.append(path)
            continue
        pattern = f"{glob.escape(path)}/**" if Path(path).is_dir() else path
        found = [p for p in sorted(glob.glob(pattern, recursive=True)) if Path(p).is_file()]
        if Path(path).is_dir():
            found = [p for p in found if Path(p.lower().removesuffix(".gz").removesuffix(".zst")).suffix in KINDS]
        if not found:
            raise UserError(f"no file in {path} can be read" if Path(path).is_dir() else f"there is no file {path}")
        files += found
    return files


def open_stream(path: str) -> BinaryIO:
    """A buffered stream of a file's bytes, decompressed."""
    compression = COMPRESSIONS.get(Path(path.lower()).suffix)
    if compression is None:
        return open(path, "rb")
    return io.BufferedReader(pa.input_stream(path, compression=compression), 2**20)


def count_bytes(path: str) -> int:
    """Bytes of a file, decompressed. Raises `UserError` for an archive that cannot be read to its end."""
    if Path(path.lower()).suffix not in COMPRESSIONS:
        return Path(path).stat().st_size
    try:
        with open_stream(path) as stream:
            return sum(map(len, iter(lambda: stream.read(BLOCK_BYTES), b"")))
    except (OSError, EOFError) as error:
        raise UserError(f"cannot read {path}: {' '.join(str(error).split())[:200]}") from error


def file_sha256(path: str) -> bytes:
    """Of a file's bytes; of one that cannot be read, of the reason, which reading it will give."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        digest.update(str(error).encode())
    return digest.digest()
