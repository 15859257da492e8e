"""A unit of text -> its documents, each in train or validation.

Damage that is rare is counted, and more of it is an error: bytes that are not UTF-8, which become U+FFFD, and rows
that cannot be read. A damaged file is an error.
"""

import codecs
import csv
import io
import itertools
import json
import lzma
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recipe.config import STANDARD_LIBRARY
from recipe.data.cut import SMALL_SOURCE, FilePart, HoldOut, ShardPart, Unit, cut, hash64
from recipe.data.encode import SAMPLE_CHARACTERS
from recipe.data.files import BLOCK, kind_of, open_decompressed, read_standard_library
from recipe.data.source import TextSource
from recipe.errors import UserError, one_line

SHOWN_ERRORS = 10
MOST_FINDINGS = 50
TOKENIZER_CHARACTERS = 2_000_000_000  # the most that a tokenizer is trained on
ROWS_PER_READ = 100
MOST_COUNTED = 10_000  # documents; up to this number, exactly the percentage is held out
LONGEST_SEARCH = 8_000_000  # bytes after the start of a unit in which a separator is looked for
FEW_BYTES = 10  # that are not UTF-8, in a text that is UTF-8
SMALL_SHARE = 0.001  # of its bytes
SKIPPED_SHARE = 0.01  # the most rows of a part that may be skipped
DIALOGS = "write each as one text: 'Dialogs' in recipe/data/README.md"
MASK = "attention_mask"  # a column beside token ids: 0 for padding
# What only reading the text reveals: findings, and how often.
Report = Counter[str]
BLANK = "rows without text (null, empty or blank)"
SKIPPED = f"rows that cannot be read (up to {SHOWN_ERRORS} are listed)"
REPLACED = "bytes that are not UTF-8, or NUL, and became U+FFFD"
WINDOWS_ENDS = "Windows line ends, which stay in the text and take tokens"
SEPARATORS = "separators"
READ_ERRORS = (OSError, EOFError, ValueError, RecursionError, csv.Error, lzma.LZMAError, pa.ArrowException)
csv.field_size_limit(2**31 - 1)


class Document(NamedTuple):
    split: str
    text: str | np.ndarray  # or, if the source is already tokenized, token ids: int64 [tokens]


def list_units(source: TextSource) -> list[Unit]:
    """Return the units from `cut`, with a threshold that gives at least one document to each split.

    Raises `UserError` for bad input.
    """
    units = cut(source)
    if not any(part.hold_out.by_hash for unit in units for part in unit.parts):
        return units
    threshold = _choose_threshold(source, units)

    def adjusted(part: FilePart | ShardPart) -> FilePart | ShardPart:
        return part._replace(hold_out=HoldOut(threshold)) if part.hold_out.by_hash else part

    return [unit._replace(parts=list(map(adjusted, unit.parts))) for unit in units]


def _choose_threshold(source: TextSource, units: list[Unit]) -> int:
    """Return the threshold: documents with a lower hash are held out.

    In a small source, exactly the percentage of the different documents is below the threshold. In others, this holds
    on average, and a few documents are read to make sure that both splits get some.
    """
    parts = [part for unit in units for part in unit.parts if part.hold_out.by_hash]
    by_percentage = parts[0].hold_out.threshold
    hashes = set()
    count = 0
    characters = 0
    lowest, highest = 2**64, -1
    is_exact = len(units) == 1
    for part in parts:
        for _, text in read_unit(source, Unit([part], 0), Report()):
            value = hash64(text)
            hashes.add(value)
            lowest, highest = min(lowest, value), max(highest, value)
            count += 1
            characters += len(text)
            is_exact = is_exact and count < MOST_COUNTED and characters < SMALL_SOURCE
            if not is_exact and lowest < by_percentage <= highest:
                return by_percentage
    ordered = sorted(hashes)
    share = by_percentage / 2**64 * len(ordered) if is_exact else sum(value < by_percentage for value in ordered)
    num_held_out = min(max(1, round(share)), len(ordered) - 1)
    return ordered[num_held_out - 1] + 1 if num_held_out > 0 else 0


def read_unit(source: TextSource, unit: Unit, report: Report) -> Iterator[Document]:
    """Yield the documents of a unit that hold text. Raises `UserError` naming the file if it cannot be read."""
    for part in unit.parts:
        yield from PartReader(source, part, report).documents()


def read_texts(paths: Iterable[str], text_column_name: str, document_separator: str | None) -> Iterator[str]:
    """Yield all documents of files, folders and patterns. Raises `UserError` if they cannot be read or hold ids."""
    options = {"text_column_name": text_column_name, "document_separator": document_separator}
    source = TextSource(tuple(paths), validation_split_percentage=0, **options)
    if source.is_tokenized:
        raise UserError(f"{source.name} holds token ids, not text")
    for unit in list_units(source):
        for document in read_unit(source, unit, Report()):
            if not isinstance(document.text, str):
                raise UserError(f"{source.name} holds token ids, not text")
            yield document.text


def read_train_texts(source: TextSource, units: list[Unit]) -> Iterator[str]:
    """Yield the training text for a tokenizer. From a large source, yields the beginning of each unit."""
    read_sample(source, units)  # raises if there is no text
    limit = TOKENIZER_CHARACTERS // len(units)
    for unit in units:
        characters = 0
        for document in read_unit(source, unit, Report()):
            if not isinstance(document.text, str):
                raise UserError(f"{source.name} is already tokenized; pass its --tokenizer_name")
            if document.split == "train":
                yield document.text[: limit - characters]
            characters += len(document.text)
            if characters >= limit:
                break


def read_sample(source: TextSource, units: list[Unit]) -> list[str | np.ndarray]:
    """Return the first documents, to check the encoder. Raises `UserError` if the first units hold no text."""
    texts = []
    report = Report()
    chosen = units if len(units) < 4 else units[:: len(units) // 4]
    for unit in chosen:
        characters = 0
        for document in read_unit(source, unit, report):
            texts.append(document.text)
            characters += len(document.text)
            if characters >= SAMPLE_CHARACTERS:
                break
        if texts:
            return texts
    findings = [f"{finding.removeprefix('warning: ')}: {count:,}" for finding, count in report.items()]
    reason = "; ".join(findings[:SHOWN_ERRORS]) or "it is empty or contains only whitespace"
    raise UserError(f"there is no text in {source.name}: {reason}")


# ------------------------------------------------------------------ a part of a unit


class PartReader:
    """Reads the documents of a part of a unit."""

    def __init__(self, source: TextSource, part: FilePart | ShardPart, report: Report) -> None:
        self.source = source
        self.part = part
        self.report = report
        self.where = part.path if isinstance(part, FilePart) else f"dataset {source.dataset_name}"
        self.kind = kind_of(part.path) if isinstance(part, FilePart) else ""
        self.num_bytes = 0  # read
        self.num_bad = 0  # bytes that are not UTF-8, or NUL
        self.problem = ""  # the first row that cannot be read
        self.num_skipped = 0  # rows that cannot be read
        self.number = 0  # of the row or line, from 1
        self.first_number = 0  # rows or lines before the part
        self.position = 0  # byte after the line

    def documents(self) -> Iterator[Document]:
        errors = (Exception,) if self.source.dataset_name else READ_ERRORS  # the Hub's libraries raise various errors
        try:
            documents = self._read_text() if self.kind in (".txt", ".md") else self._read_rows()
            for split, text in documents:
                if isinstance(text, str):
                    self.num_bytes += len(text) if text.isascii() else len(text.encode())
                    count = text.count("\r\n")
                    if count > 0:
                        self.report[WINDOWS_ENDS] += count
                yield Document(split or self.part.hold_out.split_of(text), text)
        except (GeneratorExit, UserError):  # at interpreter exit, the names below may no longer exist
            raise
        except errors as error:
            raise UserError(f"cannot read {self.where}: {one_line(error).rstrip('.')}") from error
        if self.num_skipped > SKIPPED_SHARE * self.number:
            count = f"{self.num_skipped:,} of {self.number:,} rows here cannot be read"
            raise UserError(f"{self.problem} ({count}; up to {SKIPPED_SHARE:.0%} would be skipped)")
        if is_other_encoding(self.num_bad, self.num_bytes):  # a few in each row
            self.number = 0
            raise UserError(self._not_utf8())

    def skip(self, problem: str) -> None:
        """Count a row that cannot be read."""
        self.problem = self.problem or problem
        self.num_skipped += 1
        self.report[SKIPPED] += 1
        if self.report[SKIPPED] <= SHOWN_ERRORS:
            self.report[f"skipped: {problem}"] += 1

    def decode(self, data: bytes, is_first: bool = False) -> str:
        """Return a document or row as text, with U+FFFD for a few bad bytes. Raises `UserError` if there are many."""
        data = data.removeprefix(codecs.BOM_UTF8) if is_first else data
        num_bad = num_zeros = data.count(0)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = data.decode(errors="replace")
            num_bad += text.count("\ufffd") - data.count(b"\xef\xbf\xbd")
        if is_other_encoding(num_bad, len(data)):
            raise UserError(self._not_utf8())
        if num_bad:
            self.num_bad += num_bad
            self.report[REPLACED] += num_bad
        return text.replace("\0", "\ufffd") if num_zeros else text

    def _not_utf8(self) -> str:
        how = "convert it, for example with iconv -f LATIN1 -t UTF-8, or -f UTF-16"
        return f"{self.place()} is binary, or text that is not in UTF-8; {how}"

    def place(self) -> str:
        """Name the file, or dataset, and the line or row that is being read."""
        if not self.number:
            return self.where
        if self.first_number and self.kind == ".jsonl":  # the number of lines before this part is unknown
            return f"{self.where}, the line that ends at byte {self.position:,}"
        word = "line" if self.kind in (".jsonl", ".csv") else "row"
        return f"{self.where}, {word} {self.first_number + self.number:,}"

    # -------------------------------------------------------------- text

    def _read_text(self) -> Iterator[tuple[str | None, str]]:
        """Yield (split, or None if it is the part's, document)."""
        assert isinstance(self.part, FilePart)
        with open_decompressed(self.part.path) as stream:
            if self.source.document_separator is not None:
                yield from self._read_separated(stream, self.source.document_separator)
            elif self.part.stop is None:  # it is compressed
                content = stream.read()
                yield from self._read_stretch(io.BytesIO(content), len(content))
            else:
                yield from self._read_stretch(stream, os.path.getsize(self.part.path))

    def _read_separated(self, stream: Any, separator: str) -> Iterator[tuple[None, str]]:
        """Yield the documents between separators that begin in a part of a text."""
        part = self.part
        assert isinstance(part, FilePart)
        pattern = separator_pattern(separator)
        start = 0
        num_bytes = sys.maxsize
        if part.stop is not None:
            size = os.path.getsize(part.path)
            start = find_start(stream, part.start, size, pattern, LONGEST_SEARCH)
            stop = find_start(stream, part.stop, size, pattern, LONGEST_SEARCH)
            num_bytes = stop - start
            stream.seek(start)
        before = b"\r" if separator.startswith("\n") else b""
        for number, data in enumerate(self._split(stream, num_bytes, pattern)):
            self.report[SEPARATORS] += number > 0
            text = self.decode(data.removesuffix(before), is_first=start == number == 0)
            if text and not text.isspace():
                yield None, text

    def _split(self, stream: Any, num_bytes: int, pattern: re.Pattern) -> Iterator[bytes]:
        """Yield the pieces of the next bytes between the matches of a pattern."""
        rest = b""
        # A long piece is searched again with each block, so blocks grow with it.
        while block := stream.read(min(num_bytes, max(BLOCK, len(rest)))):
            num_bytes -= len(block)
            *pieces, rest = pattern.split(rest + block)
            yield from pieces
        yield rest

    def _read_stretch(self, file: IO[bytes], size: int) -> Iterator[tuple[str | None, str]]:
        """Yield the lines that begin in a part of a text, as one document; two if a part of them is held out."""
        part = self.part
        assert isinstance(part, FilePart)
        end = size if part.stop is None else part.stop
        start = find_line(file, part.start, size)
        stop = find_line(file, end, size)
        limit = round(size * (1 - part.hold_out.tail))
        limit = find_line(file, limit, size, reach=min(BLOCK, (size - limit) // 2))
        file.seek(start)
        data = file.read(stop - start)
        text = self.decode(data, is_first=start == 0)
        if text.isspace() and stop - start == size:  # a part of a text may be blank
            return
        tail = data[max(0, limit - start) :].decode(errors="replace").replace("\0", "\ufffd")
        head = text[: len(text) - len(tail)]
        if head:
            yield None, head
        if tail:
            yield "validation", text[len(head) :]

    # -------------------------------------------------------------- rows

    def _read_rows(self) -> Iterator[tuple[None, str | np.ndarray]]:
        """Yield the text of each row, or its token ids, and count the rows without any."""
        column = self.source.text_column_name
        for row in self._rows():
            if not isinstance(row, dict):
                self.skip(f"{self.place()}, is a {type(row).__name__}, not an object with a text column")
                continue
            if column not in row:
                self._note_columns(row)
                continue
            text = row[column]
            if isinstance(text, str) and ("\0" in text or not is_unicode(text)):
                text = text.encode(errors="surrogateescape") if self.kind == ".csv" else self._repair(text)
            if isinstance(text, bytes):
                text = self.decode(text)
            if text is None or text == [] or (isinstance(text, str) and (not text or text.isspace())):
                self.report[BLANK] += 1
                continue
            if isinstance(text, str):
                yield None, text
                continue
            ids = token_ids(text)
            if ids is None:
                what = f"{type(text).__name__}, neither text nor token ids"
                if isinstance(text, list) and isinstance(text[0], str):
                    what = "lists of strings; join each into one text"
                elif isinstance(text, list) and isinstance(text[0], dict):
                    what = f"dialogs; {DIALOGS}"
                self.skip(f"{self.place()}: column '{column}' holds {what}")
                continue
            if row.get(MASK) is None:
                yield None, ids
                continue
            mask = token_ids(row[MASK])
            if mask is None or len(mask) != len(ids):
                self.skip(f"{self.place()}: {MASK} is not a list with one number for each id in column '{column}'")
            elif mask.any():
                yield None, ids[mask != 0]
            else:
                self.report[BLANK] += 1

    def _repair(self, text: str) -> str:
        """Replace NULs, and halves of surrogate pairs, which JSON can escape, and which are not characters."""
        repaired = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").replace("\0", "\ufffd")
        self.report[REPLACED] += repaired.count("\ufffd") - text.count("\ufffd")
        return repaired

    def _note_columns(self, row: dict, count: int = 1) -> None:
        """Count rows without the text column, by the other places in which they have text. row: one of them."""
        found = []
        for name, value in row.items():
            shown = name[:60]  # in a CSV file without a header, it is text
            if isinstance(value, str) or (token_ids(value) is not None and name != MASK):
                remedy = f"pass --text_column_name '{shown}'"
                if self.kind == ".csv":
                    remedy += "; if that is text, insert a first line that names the columns"
                found.append(f"but text in column {shown} ({remedy})")
            elif isinstance(value, dict):
                texts = [key for key, text in value.items() if isinstance(text, str)]
                found += [f"but text in column {shown}.{key} (write it into a column of its own)" for key in texts]
            elif isinstance(value, list) and value and isinstance(value[0], dict):
                found = [f"but dialogs in column {shown} ({DIALOGS})"]
                break
        for what in found[:5] or ["and without any other text"]:
            finding = f"warning: rows without a column '{self.source.text_column_name}', {what}"
            if finding in self.report or len(self.report) < MOST_FINDINGS:
                self.report[finding] += count

    def _rows(self) -> Iterator[Any]:
        """Yield the rows of the part, and set `number`."""
        if isinstance(self.part, ShardPart):
            yield from self._numbered(self._read_shards(self.part))
        elif self.kind == ".parquet":
            yield from self._numbered(self._read_parquet(self.part))
        else:
            with open_decompressed(self.part.path) as stream:
                if self.kind == ".csv":
                    yield from self._read_csv(stream)
                elif self.kind == ".json" and stream.peek(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
                    yield from self._numbered(json.loads(self.decode(stream.read(), is_first=True)))
                else:
                    yield from self._read_jsonl(stream, self.part)

    def _numbered(self, rows: Iterable[Any]) -> Iterator[Any]:
        for row in rows:
            self.number += 1
            yield row

    def _read_parquet(self, part: FilePart) -> Iterator[dict]:
        with open(part.path, "rb") as opened:  # pyarrow itself opens only names in UTF-8
            file = pq.ParquetFile(opened, pre_buffer=False)
            schema = file.schema_arrow
            sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
            groups = range(file.num_row_groups) if part.stop is None else range(part.start, part.stop)
            self.first_number = sum(sizes[: groups.start])
            column = self.source.text_column_name
            if column not in schema.names:
                for batch in itertools.islice(file.iter_batches(1, groups), 1):
                    self._note_columns(batch.to_pylist()[0], sum(sizes[number] for number in groups))
                return
            self._check_repeated(schema.names)
            names = [name for name in (column, MASK) if name in schema.names]
            for batch in file.iter_batches(ROWS_PER_READ, groups, names, use_threads=False):
                try:
                    yield from batch.to_pylist()
                except UnicodeDecodeError:
                    yield from ({column: text} for text in batch.column(column).cast(pa.binary()).to_pylist())

    def _check_repeated(self, names: list[str]) -> None:
        name = self.source.text_column_name
        if names.count(name) > 1:
            raise UserError(f"{self.where} has {names.count(name)} columns named '{name}'; rename one")

    def _read_csv(self, stream: Any) -> Iterator[dict]:
        """Yield the rows. An open quote is an error, because the start of the next row is unknown."""
        lines = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        reader = csv.reader(lines, strict=True)
        names = None
        while True:
            self.number = reader.line_num + 1
            try:
                fields = next(reader, None)
            except csv.Error as error:
                reason = "has a quote that is not closed, or text after a quote"
                raise ValueError(f"line {self.number:,} {reason}") from error
            if fields is None:
                return
            if names is None:
                names = fields
                self._check_repeated(names)
                if "\0" in ",".join(names):
                    raise UserError(self._not_utf8())
                continue
            if fields and len(fields) != len(names):
                remedy = "; put text that contains commas in quotes" if len(fields) > len(names) else ""
                self.skip(f"{self.place()}: {len(fields)} fields, but {len(names)} in the header{remedy}")
            elif fields:
                yield dict(zip(names, fields, strict=True))

    def _read_jsonl(self, stream: Any, part: FilePart) -> Iterator[Any]:
        """Yield the rows of the lines that begin in a part."""
        from orjson import loads

        stop = math.inf
        if part.stop is not None:
            size = os.path.getsize(part.path)
            pattern = separator_pattern(None)
            self.position = find_start(stream, part.start, size, pattern)
            stop = find_start(stream, part.stop, size, pattern)
            self.first_number = part.start
            stream.seek(self.position)
        for line in stream:
            if self.position >= stop:
                return
            self.position += len(line)
            self.number += 1
            try:
                yield loads(line)
            except ValueError:
                if not line.strip(codecs.BOM_UTF8 + b" \t\r\n"):
                    continue
                try:  # json accepts more: NaN, half of a surrogate pair, deep nesting
                    row = json.loads(self.decode(line, is_first=True))
                except (ValueError, RecursionError) as error:
                    self.skip(f"{self.place()} is not JSON: {getattr(error, 'msg', error)}")  # without its column
                    continue
                yield row

    def _read_shards(self, part: ShardPart) -> Iterator[dict]:
        """Yield the rows of some shards of a dataset."""
        column = self.source.text_column_name
        if self.source.dataset_name == STANDARD_LIBRARY:
            yield from ({column: text} for text in read_standard_library())
            return
        rows = self.source.dataset[part.split].rows.shard(part.count, part.number)
        names = rows.column_names or ()
        if column in names:
            rows = rows.select_columns([name for name in (column, MASK) if name in names])
        for batch in rows.iter(ROWS_PER_READ):
            yield from (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))


# ------------------------------------------------------------------ bytes


def is_other_encoding(num_bad: int, num_bytes: int) -> bool:
    """Return whether a text has too many bad bytes to be damaged UTF-8."""
    return num_bad > max(FEW_BYTES, SMALL_SHARE * num_bytes)


def is_unicode(text: str) -> bool:
    """Return whether a text has no surrogates, which stand for bytes that are not UTF-8, or for half a character."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def separator_pattern(separator: str | None) -> re.Pattern:
    """Match a separator, or the end of a line. A line break in it also matches a Windows line break."""
    lines = map(re.escape, (separator or "\n").encode().split(b"\n"))
    # An optional character in front makes the search ten times as slow; the reader removes it.
    return re.compile(rb"\r?\n".join(lines).removeprefix(rb"\r?"))


def find_start(file: IO[bytes], position: int, size: int, pattern: re.Pattern, reach: float = math.inf) -> int:
    """Return the first start of a document at or after a position: where a separator ends, or the file.

    Without a separator within `reach` bytes, the start of a line there. The result depends on the file and the
    position only, so a unit ends exactly where the next one begins.
    """
    if position <= 0 or position >= size:
        return position
    longest = 4 * len(pattern.pattern)
    base = max(0, position - longest)
    file.seek(base)
    buffer = file.read(BLOCK)
    while base < position + reach:
        for match in pattern.finditer(buffer):
            if base + match.end() >= position:
                return base + match.end()
        block = file.read(BLOCK)
        if not block:
            return size
        base += max(0, len(buffer) - longest)
        buffer = buffer[-longest:] + block
    return find_line(file, int(position + reach), size)


def find_line(file: IO[bytes], position: int, size: int, reach: int = BLOCK) -> int:
    """Return the last start of a line within `reach` bytes before a position; else of a word; else of a character."""
    if position <= 0 or position >= size:
        return min(position, size)
    begin = max(0, position - reach)
    file.seek(begin)
    window = file.read(position - begin)
    for mark in (b"\n", b" "):
        index = window.rfind(mark)
        if index >= 0:
            return begin + index + 1
    return position + next(i for i, byte in enumerate(file.read(4) + b" ") if byte & 0xC0 != 0x80)


# ------------------------------------------------------------------ rows


def token_ids(value: Any) -> np.ndarray | None:
    """Return a list of token ids as int64 [tokens], or None for anything else."""
    if not isinstance(value, (list, np.ndarray)):
        return None
    try:
        ids = np.asarray(value)
    except ValueError:  # lists of several lengths
        return None
    return ids.astype(np.int64) if ids.ndim == 1 and (len(ids) == 0 or ids.dtype.kind in "iu") else None
