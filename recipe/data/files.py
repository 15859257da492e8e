"""Read documents from files of all supported kinds, plain or compressed. Only a .json array is read as a whole."""

import codecs
import contextlib
import csv
import glob
import hashlib
import io
import json
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub.utils.sha import sha_fileobj

from recipe.errors import UserError, one_line

KINDS = (".txt", ".jsonl", ".json", ".csv", ".parquet")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
BLOCK_BYTES = 2**20  # per read
PIECE_CHARACTERS = 1_000_000  # longer .txt documents are split into pieces of about this length
HASHED_CHARACTERS = 100_000  # of a document, to recognize it again; the first piece is never shorter than that
Text = str | np.ndarray  # or, if the source is already tokenized, token ids: int64 [tokens]
Part = tuple[Text, bool]  # a document or a piece of one, and whether the document ends with it
csv.field_size_limit(2**31 - 1)


@dataclass
class ReadReport:
    """What only reading the whole text reveals."""

    skipped: list[str] = field(default_factory=list)  # the error of each skipped file
    num_separators: int = 0
    duplicates_of_validation: int = 0  # training documents


def read_file(path: str, text_column_name: str, separator: str | None, report: ReadReport) -> Iterator[Part]:
    """Yield the nonblank documents of a file. Raises `UserError` naming the file if it cannot be read."""
    kind = kind_of(path)
    try:
        if kind == ".txt":
            yield from read_text(open_stream(path), separator, report)
            return
        if kind == ".parquet":
            rows = _read_parquet(path, text_column_name)
        elif kind == ".csv":
            rows = csv.DictReader(io.TextIOWrapper(open_stream(path), encoding="utf-8-sig", newline=""))
        else:
            rows = (_read_jsonl if kind == ".jsonl" else _read_json)(open_stream(path))
        yield from ((text, True) for text in texts_of(rows, text_column_name, path))
    except GeneratorExit:  # at interpreter exit, the names below may no longer exist
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason}") from error
    except (OSError, EOFError, ValueError, RecursionError, csv.Error, pa.ArrowException) as error:
        raise UserError(f"cannot read {path}: {one_line(error)}") from error


def read_text(stream: BinaryIO, separator: str | None, report: ReadReport) -> Iterator[Part]:
    """Yield the nonblank documents of a UTF-8 stream, cut at each separator; long documents come in pieces.

    A line break in the separator also matches a Windows line break.
    """
    decoder, buffer, attempt_at, at_end = codecs.getincrementaldecoder("utf-8-sig")(), "", PIECE_CHARACTERS, False
    pattern = re.compile(r"\r?\n".join(map(re.escape, separator.split("\n")))) if separator is not None else None
    begun = False  # whether a piece of the current document has been yielded
    while not at_end:
        block = stream.read(BLOCK_BYTES)
        at_end = not block
        buffer += decoder.decode(block, final=at_end)
        if pattern is not None:
            *documents, buffer = pattern.split(buffer)
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


def _read_jsonl(stream: BinaryIO) -> Iterator[dict]:
    for number, line in enumerate(stream, start=1):
        if line.strip(codecs.BOM_UTF8 + b" \t\r\n"):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} is not JSON: {error}") from error
            yield row


def _read_json(stream: BinaryIO) -> Iterator[dict]:
    """Read an array of objects, all at once, or JSON lines."""
    if stream.peek(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1] != b"[":
        return _read_jsonl(stream)
    return iter(json.load(stream))


def _read_parquet(path: str, column: str) -> Iterator[dict]:
    file = pq.ParquetFile(path)
    columns = [column] if column in file.schema_arrow.names else None  # all, for the error message of `texts_of`
    for batch in file.iter_batches(batch_size=1000, columns=columns):
        yield from batch.to_pylist()


def texts_of(rows: Iterable[dict], column: str, where: str) -> Iterator[Text]:
    """Yield the text of each row, or its token ids; skip rows without any (null, empty or blank)."""
    for number, row in enumerate(rows, start=1):
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
                yield ids.astype(np.int64)
            continue
        if not isinstance(text, (str, type(None))):
            raise UserError(f"{where}, row {number}: column '{column}' holds {type(text).__name__}, not text")
        if text and not text.isascii():  # JSON can escape half a surrogate pair, which is not a character
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        if text and not text.isspace():
            yield text


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
