"""Read documents from files of all supported kinds, plain or compressed. Only a .json array is read as a whole."""

import codecs
import contextlib
import csv
import glob
import hashlib
import io
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from recipe.data.bad_files import NUL, describe_bad_file
from recipe.data.rows import (
    Part,
    read_csv,
    read_json,
    read_jsonl,
    read_parquet,
    read_wet,
    skip_bytes,
    texts_of,
)
from recipe.errors import UserError, one_line

KINDS = (".txt", ".jsonl", ".json", ".csv", ".parquet", ".wet")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
BLOCK_BYTES = 2**20  # per read
PIECE_CHARACTERS = 1_000_000  # longer .txt documents are split into pieces of about this length
HASHED_CHARACTERS = 100_000  # of a document, to recognize it again; the first piece is never shorter than that


@dataclass
class ReadReport:
    """What only reading the whole text reveals."""

    skipped: list[str] = field(default_factory=list)  # the error of each skipped file
    num_separators: int = 0
    duplicates_of_validation: int = 0  # training documents


def read_file(
    path: str,
    text_column_name: str,
    separator: str | None,
    report: ReadReport,
    start: dict | None = None,
    row_groups: Sequence[int] | None = None,
) -> Iterator[Part]:
    """Yield the nonblank documents of a file. Raises `UserError` naming the file if it cannot be read.

    start: the place of an earlier part; only the parts after it follow. Text and JSON lines before it are not read
    (of a compressed file, only decompressed), nor are the row groups of a Parquet file.
    row_groups: of a Parquet file; by default, all.
    """
    kind, start = kind_of(path), start or {}
    try:
        if kind == ".txt":
            if reason := describe_bad_file(path, *suffix_and_compression(path)):  # some are plain ASCII: PDF, RTF
                raise ValueError(reason)
            yield from read_text(open_stream(path), separator, report, start)
            return
        if kind == ".wet":
            yield from read_wet(open_stream(path), start)
            return
        if kind == ".parquet":
            rows = read_parquet(path, text_column_name, start, row_groups)
        elif kind == ".csv":
            rows = read_csv(open_stream(path), start)
        else:
            rows = (read_jsonl if kind == ".jsonl" else read_json)(open_stream(path), start)
        yield from texts_of(rows, text_column_name, path)
    except GeneratorExit:  # at interpreter exit, the names below may no longer exist
        raise
    except (OSError, EOFError, ValueError, RecursionError, csv.Error, pa.ArrowException) as error:
        if reason := describe_bad_file(path, *suffix_and_compression(path)):
            raise UserError(f"cannot read {path}: {reason}") from error
        reason = f"cannot read {path}: {one_line(error).rstrip('.')}"
        if isinstance(error, UnicodeDecodeError):
            reason = f"{path} is not UTF-8 text: {error.reason}"
        if isinstance(error.__cause__ or error, UnicodeDecodeError):
            reason += "; convert it, from Latin-1 for example with iconv -f LATIN1 -t UTF-8"
        raise UserError(reason) from error


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
                text = buffer[text_start : match.start()]
                offset += count_utf8_bytes(text) + count_utf8_bytes(match[0])
                text, text_start = text.removesuffix(before), match.end()
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
        return open(path, "rb", BLOCK_BYTES)
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


def file_sha256(path: Path) -> bytes:
    """Hash a file's bytes, or the reason why it cannot be read (reading the text reports it)."""
    try:
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
        return digest.digest()
    except OSError as error:
        return hashlib.sha256(str(error).encode()).digest()


def name_size_time(path: Path) -> bytes:
    """Identify a file without reading it."""
    return f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}".encode()


def name_of_text(text: str) -> str:
    """Derive a folder name from a path, pattern or Hub id: its last part without suffixes and special characters."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(text).name.split(".")[0]).strip("-.") or "text"


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
