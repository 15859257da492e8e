"""Documents come out of files of every kind unchanged; what cannot be read is an error, or skipped and counted."""

import bz2
import codecs
import dataclasses
import gzip
import io
import lzma

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import KINDS, csv_of, read, texts_of, wet_of, write_jsonl, write_parquet, write_text
from helpers import make_documents, wet_record

from recipe.config import STANDARD_LIBRARY
from recipe.data.read import ReadReport, read_texts
from recipe.data.source import TextSource
from recipe.errors import UserError

GOOD, LAST = b'{"text": "good"}\n', b'{"text": "last"}\n'
BOM = codecs.BOM_UTF8
COMPRESSIONS = {
    "": bytes,
    ".gz": lambda data: gzip.compress(data[:999]) + gzip.compress(data[999:]),  # as WET files are compressed
    ".GZ": gzip.compress,
    ".zst": lambda data: pa.compress(data, "zstd", asbytes=True),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_documents_come_out_of_each_kind_of_file_unchanged(tmp_path, kind, compression):
    pages = ['a "quoted", text\nof two lines\r\n', "text\r\n\r\nWARC/1.0\r\nContent-Length: 3\r\n\r\n", "line\n\n"]
    documents = [*make_documents(20), *pages]
    path = tmp_path / f"a.{kind}{compression}"
    path.write_bytes(COMPRESSIONS[compression](KINDS[kind](documents, "body")))
    assert list(read_texts([str(path)], "body", "<sep>")) == documents


ODD_FILES = {
    "bom.txt": (BOM + b"file a\r\n\n\nend", ["file a\r\n\n\nend"]),
    "bom.jsonl": (BOM + GOOD + b"\r\n \r\n" + GOOD, ["good", "good"]),
    "bom.json": (BOM + b' [{"text": "one"}, {"text": "two"}]', ["one", "two"]),
    "bom.csv": (BOM + b"text\none\n", ["one"]),
    "constants.jsonl": (b'{"text": "one", "n": NaN}', ["one"]),
    "surrogates.jsonl": (b'{"text": "a\\ud800b \\ud83d\\ude00"}', ["a\ufffdb \U0001f600"]),
    "blank.jsonl": (b'{"text": null}\n{"text": ""}\n{"text": " \\n"}\n' + GOOD, ["good"]),
    "blank.txt": (b" \n\t\r\n", []),
}


@pytest.mark.parametrize("name", ODD_FILES)
def test_byte_order_marks_blank_rows_and_half_surrogates_are_not_text(tmp_path, name):
    content, expected = ODD_FILES[name]
    (tmp_path / name).write_bytes(content)
    assert list(read_texts([str(tmp_path / name)], "text", None)) == expected


@pytest.mark.parametrize(
    ("separator", "expected"), [(r"\n\n", ["one", "two\tthree"]), (r"\t", ["one\n\ntwo", "three"])]
)
def test_a_separator_may_be_written_as_a_shell_passes_it(tmp_path, separator, expected):
    path = write_text(tmp_path / "a.txt", "one\n\ntwo\tthree")
    assert list(read_texts([path], "text", separator)) == expected


@pytest.mark.parametrize("block", [3, 2**20])
def test_a_separator_matches_windows_line_ends(tmp_path, monkeypatch, block):
    """Blank documents between separators are dropped, also if a separator is longer than the blocks read."""
    monkeypatch.setattr("recipe.data.read.BLOCK", block)
    path = write_text(tmp_path / "a.txt", "\n\none\r\nline\r\n\r\ntwo\n\n\n\n \n\n\nthree\n\n")
    assert list(read_texts([path], "text", "\n\n")) == ["one\r\nline", "two", "\nthree"]


def test_the_text_column_may_differ_by_kind_of_file(tmp_path):
    """Files of other kinds have the column that is given without a kind, or `text`."""
    (tmp_path / "a.csv").write_bytes(csv_of(["csv"], "body"))
    write_jsonl(tmp_path / "b.jsonl", ["jsonl"], "content")
    write_jsonl(tmp_path / "c.json", ["json"])
    write_parquet(tmp_path / "d.parquet", ["parquet"], "my text")
    write_text(tmp_path / "e.txt", "txt")
    by_kind = ("csv=body", "jsonl=content", "parquet=my text")
    assert list(read_texts([str(tmp_path)], by_kind, None)) == ["csv", "jsonl", "json", "parquet", "txt"]
    assert list(read_texts([str(tmp_path)], ("content", "csv=body"), None)) == ["csv", "jsonl", "txt"]
    assert list(read_texts([str(tmp_path / "b.jsonl")], "content", None)) == ["jsonl"]


def test_the_standard_library_is_a_corpus_for_the_demo():
    """The corpus has megabytes of the interpreter's documentation and sources, without tests."""
    documents = texts_of(TextSource(dataset_name=STANDARD_LIBRARY))
    assert all(text.strip() for text in documents)  # some modules are empty
    assert sum(map(len, documents)) > 2_000_000
    assert any("def dataclass(" in text for text in documents)
    assert not any("test.support" in text[:200] for text in documents)


# ------------------------------------------------------------------ what cannot be read

WET = wet_of(["good"], "")
PARQUET = io.BytesIO()
pq.write_table(pa.table({"text": ["good"] * 99}), PARQUET)
# A frame with a window of 2 GB, as of zstd --long=31: magic number, no sizes, window, one block of raw bytes.
LONG_WINDOW = b"\x28\xb5\x2f\xfd\x00\xa8\x19\x00\x00abc"
BAD_FILES = {  # name -> content, the texts that can be read, how much is skipped
    "latin.txt": ("good<sep>Stra\xdfe<sep>last".encode("latin-1"), ["good", "last"], 1),
    "latin.jsonl": (GOOD + GOOD.replace(b"oo", b"\xf6") + LAST, ["good", "last"], 1),
    "latin.csv": (b"text\n" + b"good\n" * 99_999 + b"\xdf\nlast\n", ["good", "last"], 1),
    "utf16.txt": ("good\n".encode("utf-16"), [], 2),
    "utf16.csv": ("text\ngood\n".encode("utf-16"), [], 1),
    "program.txt": (b"good<sep>\x7fELF\x02\x01\x01\x00", ["good"], 1),
    "utf16.jsonl": (GOOD + GOOD.decode().encode("utf-16-le"), ["good"], 2),  # the line end has a zero byte after it
    "broken.jsonl": (GOOD + b'{"text": \n' + LAST, ["good", "last"], 1),
    "deep.jsonl": (GOOD + b'{"n": ' + b"[" * 10**5 + b"\n" + LAST, ["good", "last"], 1),
    "list.jsonl": (GOOD + b"[1]\n" + LAST, ["good", "last"], 1),
    "long.txt.zst": (LONG_WINDOW, [], 1),
    "number.jsonl": (GOOD + b'{"text": 3}\n' + LAST, ["good", "last"], 1),
    "nested.jsonl": (GOOD + b'{"text": [[1], [2]]}\n' + LAST, ["good", "last"], 1),
    "uneven.jsonl": (GOOD + b'{"text": [[1, 2], [3]]}\n' + LAST, ["good", "last"], 1),
    "words.jsonl": (GOOD + b'{"text": ["a"]}\n' + LAST, ["good", "last"], 1),
    "cut.jsonl.gz": (gzip.compress(GOOD * 99_999)[:-20], ["good"], 1),
    "cut.jsonl.xz": (lzma.compress(GOOD * 99_999)[:-20], ["good"], 1),
    "none.jsonl.bz2": (GOOD, [], 1),
    "half.parquet": (PARQUET.getvalue()[:99], [], 1),
    "cut.wet": (WET[:-9], [], 1),
    "none.wet": (WET + GOOD, ["good"], 1),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_what_cannot_be_read_is_an_error_or_skipped(tmp_path, name):
    """The error names the file; skip_bad_files counts what cannot be read, and keeps what is before and after it."""
    content, expected, num_skipped = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    write_jsonl(tmp_path / "zz.jsonl", ["other"])
    source, report = TextSource((str(tmp_path),), document_separator="<sep>"), ReadReport()
    with pytest.raises(UserError, match=name) as caught:
        read(source)
    remedy = "--long=31" if content == LONG_WINDOW else "--skip_bad_files"
    assert remedy in str(caught.value) and "\n" not in str(caught.value)
    assert set(texts_of(dataclasses.replace(source, skip_bad_files=True), report=report)) == {*expected, "other"}
    assert report.num_skipped == num_skipped and name in report.errors[0]


@pytest.mark.parametrize("kind", ["txt", "md.gz", "separated.txt", "separated.md.gz", "warc.wet", "csv", "parquet"])
def test_bytes_that_are_not_utf8_cost_their_line(tmp_path, small_units, kind):
    """Texts, pages and fields lose only the damaged line, and its size is counted."""
    lines, bad = "".join(make_documents(30)).encode().splitlines(keepends=True), b"Stra\xdfe\n"
    pages = [b"".join([*lines[:15], bad, *lines[15:]]), bad + bad + b"the end\n"]
    separator = "<sep>" if kind.startswith("separated") else None
    path, content = tmp_path / f"a.{kind}", (separator or "").encode().join(pages)
    if kind == "csv":
        rows = b"".join(pages).replace(b'"', b'""').splitlines()
        content = b"text\n" + b"".join(b'"%s\n"\n' % row for row in rows)
    elif kind == "warc.wet":
        content = b"".join(wet_record("conversion", page) for page in pages)
    elif kind.endswith("gz"):
        content = gzip.compress(content)
    path.write_bytes(content)
    if kind == "parquet":
        pq.write_table(pa.table({"text": pa.array(pages, pa.binary()).view(pa.string())}), path)
    source, report = TextSource((str(path),), document_separator=separator, skip_bad_files=True), ReadReport()
    assert "".join(texts_of(source, report=report)) == b"".join([*lines, b"the end\n"]).decode()
    assert report.num_skipped == 3
    assert report.skipped_bytes == 3 * len(b'"Stra\xdfe\n"\n' if kind == "csv" else bad)
    with pytest.raises(UserError, match=path.name):
        read(dataclasses.replace(source, skip_bad_files=False))


CSV_TABLES = {  # content -> the texts, and the number of lines that are skipped
    "commas": ("text\none, two\nthree\n", ["three"], 1),
    "missing field": ("id,text\n1,one\n2\n3,three\n", ["one", "three"], 1),
    "open quote": ('text\none\n"two\n' + "more\n" * 90, ["one", *["more"] * 90], 1),
    "two open quotes": ('text\n"one\ntwo\n"three\nfour\n', ["two", "four"], 2),
    "text after a quote": ('text\n"one" two\nthree\n', ["three"], 1),
    "header padded by a program": ("text,,\none, two,three\nfour,,\n", ["four"], 1),
    "index of pandas": (",text\n0,one\n1,two\n", ["one", "two"], 0),
    "quoted": ('text\n"one, ""two""\nthree"\n\nfour\n', ['one, "two"\nthree', "four"], 0),
    "one line": ("text\n", [], 0),
}


@pytest.mark.parametrize("name", CSV_TABLES)
def test_a_row_of_csv_has_the_fields_of_its_header(tmp_path, name):
    """Any other row is an error that names its line; skip_bad_files loses one line for it."""
    content, expected, num_skipped = CSV_TABLES[name]
    path = write_text(tmp_path / "a.csv", content)
    source, report = TextSource((path,), skip_bad_files=True), ReadReport()
    assert texts_of(source, report=report) == expected
    assert report.num_skipped == num_skipped
    assert (report.skipped_bytes > 0) == (num_skipped > 0)
    if num_skipped:
        with pytest.raises(UserError, match=r"a\.csv: line \d"):
            read(dataclasses.replace(source, skip_bad_files=False))


# ------------------------------------------------------------------ rows of token ids


@pytest.mark.parametrize("has_mask", [True, False])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "parquet of lists of one length", "save_to_disk"])
def test_the_padding_of_tokenized_rows_is_not_read(tmp_path, kind, has_mask):
    """A column attention_mask marks it; without one, the ids that look like padding are counted."""
    rows = {"input_ids": [[5, 6, 7, *[9] * 20], [8, 9, *[9] * 21]]}
    if has_mask:
        rows["attention_mask"] = [[1] * 3 + [0] * 20, [1] * 2 + [0] * 21]
    table, path = datasets.Dataset.from_dict(rows), str(tmp_path / f"a.{kind.split()[0]}")
    if kind.endswith("of one length"):
        ids = datasets.List(datasets.Value("int32"), length=23)
        table = table.cast(datasets.Features(dict.fromkeys(rows, ids)))
    if kind == "save_to_disk":
        table.save_to_disk(path)
        source = TextSource(dataset_name=path, text_column_name="input_ids")
    else:
        {"jsonl": table.to_json, "parquet": table.to_parquet}[kind.split()[0]](path)
        source = TextSource((path,), text_column_name="input_ids")
    report = ReadReport()
    found = [ids.tolist() for ids in texts_of(source, report=report)]
    assert found == ([[5, 6, 7], [8, 9]] if has_mask else rows["input_ids"])
    assert (report.num_row_ids, report.num_padding) == ((0, 0) if has_mask else (46, 42))
