"""Documents come out of files of every kind unchanged; what cannot be read is an error, or skipped and counted."""

import bz2
import codecs
import dataclasses
import gzip
import io
import json
import lzma
from pathlib import Path

import datasets
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import KINDS, csv_of, read, texts_of, write_jsonl, write_parquet, write_text
from helpers import make_documents

from recipe.config import STANDARD_LIBRARY
from recipe.data.cut import cut
from recipe.data.read import (
    REPLACED,
    SKIPPED,
    Report,
    list_units,
    read_sample,
    read_texts,
    read_unit,
)
from recipe.data.source import TextSource
from recipe.errors import UserError

GOOD, LAST = b'{"text": "good"}\n', b'{"text": "last"}\n'
BOM = codecs.BOM_UTF8
COMPRESSIONS = {
    "": bytes,
    ".gz": lambda data: gzip.compress(data[:999]) + gzip.compress(data[999:]),  # as Common Crawl compresses its files
    ".GZ": gzip.compress,
    ".zst": lambda data: pa.compress(data, "zstd", asbytes=True),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_documents_come_out_of_each_kind_of_file_unchanged(tmp_path, kind, compression):
    pages = ['a "quoted", text\nof two lines\r\n', "text\r\n\r\n", "line\n\n"]
    documents = [*make_documents(20), *pages]
    path = tmp_path / f"a.{kind}{compression}"
    path.write_bytes(COMPRESSIONS[compression](KINDS[kind](documents, "body")))
    assert list(read_texts([str(path)], ("body",), "<sep>")) == documents


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
    assert list(read_texts([str(tmp_path / name)], ("text",), None)) == expected


@pytest.mark.parametrize(
    ("separator", "expected"), [(r"\n\n", ["one", "two\tthree"]), (r"\t", ["one\n\ntwo", "three"])]
)
def test_a_separator_may_be_written_as_a_shell_passes_it(tmp_path, separator, expected):
    path = write_text(tmp_path / "a.txt", "one\n\ntwo\tthree")
    assert list(read_texts([path], ("text",), separator)) == expected


@pytest.mark.parametrize("block", [3, 2**20])
def test_a_separator_matches_windows_line_ends(tmp_path, monkeypatch, block):
    """Blank documents between separators are dropped, also if a separator is longer than the blocks read."""
    monkeypatch.setattr("recipe.data.read.BLOCK", block)
    path = write_text(tmp_path / "a.txt", "\n\none\r\nline\r\n\r\ntwo\n\n\n\n \n\n\nthree\n\n")
    assert list(read_texts([path], ("text",), "\n\n")) == ["one\r\nline", "two", "\nthree"]


def test_the_text_of_a_row_is_in_the_first_column_that_it_has(tmp_path):
    """Of those that are named: the files of a folder may differ."""
    (tmp_path / "a.csv").write_bytes(csv_of(["csv"], "body"))
    write_jsonl(tmp_path / "b.jsonl", ["jsonl"], "content")
    write_jsonl(tmp_path / "c.json", ["json"])
    write_parquet(tmp_path / "d.parquet", ["parquet"], "my text")
    write_text(tmp_path / "e.txt", "txt")
    (tmp_path / "f.jsonl").write_text('{"body": null, "content": "filled"}')
    names = ("my text", "body", "content", "text")
    assert list(read_texts([str(tmp_path)], names, None)) == ["csv", "jsonl", "json", "parquet", "txt", "filled"]
    assert list(read_texts([str(tmp_path)], ("content", "body"), None)) == ["csv", "jsonl", "txt", "filled"]
    report, source = Report(), TextSource((str(tmp_path / "a.csv"),), text_column_name=("body", "n"))
    assert texts_of(source, report=report) == ["csv"] and any("several columns" in finding for finding in report)


def test_the_standard_library_is_a_corpus_for_the_demo():
    """The corpus has megabytes of the interpreter's documentation and sources, without tests."""
    documents = texts_of(TextSource(dataset_name=STANDARD_LIBRARY))
    assert all(text.strip() for text in documents)  # some modules are empty
    assert sum(map(len, documents)) > 2_000_000
    assert any("def dataclass(" in text for text in documents)
    assert not any("test.support" in text[:200] for text in documents)


# ------------------------------------------------------------------ what cannot be read

PARQUET = io.BytesIO()
pq.write_table(pa.table({"text": ["good"] * 99}), PARQUET)
BAD_FILES = {  # name -> content, the texts that can be read, how much is skipped
    "utf16.txt": ("good\n".encode("utf-16") * 9, [], 1),
    "program.txt": (b"good<sep>\x7fELF\x02\x01\x01" + bytes(19), ["good"], 1),
    "utf16.jsonl": (GOOD + GOOD.decode().encode("utf-16-le"), ["good"], 2),  # the line end has a zero byte after it
    "broken.jsonl": (GOOD + b'{"text": \n' + LAST, ["good", "last"], 1),
    "deep.jsonl": (GOOD + b'{"n": ' + b"[" * 10**5 + b"\n" + LAST, ["good", "last"], 1),
    "list.jsonl": (GOOD + b"[1]\n" + LAST, ["good", "last"], 1),
    "number.jsonl": (GOOD + b'{"text": 3}\n' + LAST, ["good", "last"], 1),
    "nested.jsonl": (GOOD + b'{"text": [[1], [2]]}\n' + LAST, ["good", "last"], 1),
    "uneven.jsonl": (GOOD + b'{"text": [[1, 2], [3]]}\n' + LAST, ["good", "last"], 1),
    "words.jsonl": (GOOD + b'{"text": ["a"]}\n' + LAST, ["good", "last"], 1),
    "cut.jsonl.gz": (gzip.compress(GOOD * 99_999)[:-20], ["good"], 1),
    "cut.jsonl.xz": (lzma.compress(GOOD * 99_999)[:-20], ["good"], 1),
    "none.jsonl.bz2": (GOOD, [], 1),
    "half.parquet": (PARQUET.getvalue()[:99], [], 1),
    "commas.csv": (b"text\none, two\nlast\n", ["last"], 1),
    "missing.csv": (b"id,text\n1,good\n2\n3,last\n", ["good", "last"], 1),
    "open.csv": (b'text\ngood\n"two\n' + b"more\n" * 90, ["good"], 1),  # nobody knows where the next row begins
    "after.csv": (b'text\ngood\n"one" two\nthree\n', ["good"], 1),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_what_cannot_be_read_is_an_error_or_skipped(tmp_path, name):
    """The error names the file; skip_bad_files counts what cannot be read, and keeps what is before and after it."""
    content, expected, num_skipped = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    write_jsonl(tmp_path / "zz.jsonl", ["other"])
    source, report = TextSource((str(tmp_path),), document_separator="<sep>"), Report()
    with pytest.raises(UserError, match=name) as caught:
        read(source)
    remedy = "join" if name == "words.jsonl" else "--skip_bad_files"
    assert remedy in str(caught.value) and "\n" not in str(caught.value)
    assert ("--skip_bad_files" in str(caught.value)) == (remedy == "--skip_bad_files")
    assert ("iconv" in str(caught.value)) == name.startswith(("utf16", "program"))
    assert set(texts_of(dataclasses.replace(source, skip_bad_files=True), report=report)) == {*expected, "other"}
    assert report[SKIPPED] == num_skipped and name in next(finding for finding in report if "skipped: " in finding)


def test_what_precedes_the_end_of_a_cut_text_is_kept(tmp_path):
    text = "".join(make_documents(9000))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode())[:-100])
    report = Report()
    (kept,) = texts_of(TextSource((str(tmp_path),), skip_bad_files=True), "train", report)
    assert text.startswith(kept[:-1]) and len(kept) > 0.8 * len(text) and report[SKIPPED] == 1


def test_a_bad_row_is_named_by_its_place_in_the_file(tmp_path, small_units):
    """Not in its unit; in a Parquet file, the row of another type."""
    documents = [{"text": text} for text in make_documents(60)]
    lines = [json.dumps(row) for row in documents]
    lines[50] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"a\.jsonl, the line that ends at byte 15,458 "):
        read(TextSource((str(tmp_path / "a.jsonl"),)))
    rows = [{"text": [[1.5]]}] * 60
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet", row_group_size=7)
    source = TextSource((str(tmp_path / "b.parquet"),))
    *_, last = cut(source)
    with pytest.raises(UserError, match=rf"b\.parquet, row {last.parts[0].start * 7 + 1}: "):
        list(read_unit(source, last, Report()))


KINDS_OF_TEXT = [
    "txt",
    "md.gz",
    "separated.txt",
    "separated.md.gz",
    "csv",
    "jsonl",
    "json",
    "parquet",
    "binary.parquet",
]


def write_pages(path: Path, pages: list[bytes], separator: str | None) -> None:
    """Write pages that may not be UTF-8."""
    kind, content = path.name.removeprefix("a."), (separator or "").encode().join(pages)
    quoted = [
        page.replace(b'"', b'""' if kind == "csv" else b'\\"').replace(b"\n", b"\n" if kind == "csv" else b"\\n")
        for page in pages
    ]
    if kind == "csv":
        content = b"text\n" + b"".join(b'"%s"\n' % page for page in quoted)
    elif kind.startswith("json"):
        content = b"".join(b'{"text": "%s"}\n' % page for page in quoted)
        content = b"[%s]" % content.strip().replace(b"}\n{", b"},{") if kind == "json" else content
    path.write_bytes(gzip.compress(content) if kind.endswith("gz") else content)
    if kind.endswith("parquet"):
        column = pa.array(pages, pa.binary())
        pq.write_table(pa.table({"text": column if kind.startswith("binary") else column.view(pa.string())}), path)


@pytest.mark.parametrize("kind", KINDS_OF_TEXT)
def test_few_bytes_that_are_not_utf8_are_replaced_and_many_are_another_encoding(tmp_path, small_units, kind):
    """In every kind of file, without an option. NULs are such bytes."""
    separator = "<sep>" if kind.startswith("separated") else None
    documents = ["".join(make_documents(30, seed)) for seed in range(2)]
    pages = [documents[0].encode().replace(b"cat", b"c\xe4t", 3), documents[1].encode().replace(b"cat", b"c\0t", 2)]
    expected = documents[0].replace("cat", "c\ufffdt", 3), documents[1].replace("cat", "c\ufffdt", 2)
    write_pages(tmp_path / f"a.{kind}", pages, separator)
    source, report = TextSource((str(tmp_path / f"a.{kind}"),), document_separator=separator), Report()
    assert "".join(texts_of(source, report=report)) == "".join(expected)
    assert (report[REPLACED], report[SKIPPED]) == (5, 0)
    few = [page.decode(errors="replace").replace("\ufffd", "").replace("\0", "").encode() for page in pages]
    short = [b"Stra\xdfe %d" % number for number in range(99)]  # each row has one
    for latin in ([few[0], "\xfcber Stra\xdfe ".encode("latin-1") * 99], short):
        write_pages(tmp_path / f"a.{kind}", latin, separator)
        with pytest.raises(UserError, match=rf"a\.{kind}.* iconv"):
            read(TextSource((str(tmp_path / f"a.{kind}"),), document_separator=separator))


def test_bad_bytes_are_those_of_the_file_wherever_they_are(tmp_path):
    """Also in the few bytes that are held out."""
    text = "".join(make_documents(900)).encode()
    (tmp_path / "a.txt").write_bytes(text[:-40] + b"\xe9" * 20 + text[-20:])
    report = Report()
    assert "\ufffd" * 20 in texts_of(TextSource((str(tmp_path),)), "validation", report)[0]
    assert report[REPLACED] == 20


def test_nuls_and_half_surrogates_that_json_escapes_are_replaced(tmp_path):
    """They are valid JSON, so no other encoding would help."""
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a%s\\ud800"}\n' % (b"\\u0000" * 50))
    report = Report()
    assert texts_of(TextSource((str(tmp_path),)), report=report) == ["a" + "\ufffd" * 51]
    assert report == {REPLACED: 51}


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("index.csv", b",text\n0,one\n1,two\n", ["one", "two"]),  # as pandas writes it
        ("quoted.csv", b'text\n"one, ""two""\nthree"\n\nfour\n', ['one, "two"\nthree', "four"]),
        ("empty.csv", b"text\n", []),
        ("zeros.txt.gz", gzip.compress(b"text") + bytes(99), ["text"]),  # as on a tape
        ("\udce9.jsonl.zst", pa.compress(GOOD, "zstd", asbytes=True), ["good"]),  # a name that is not UTF-8
        ("\udce9.parquet", PARQUET.getvalue(), ["good"] * 99),
    ],
)
def test_odd_files_are_read(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    assert list(read_texts([str(tmp_path / name)], ("text",), None)) == expected


def test_a_separator_that_does_not_occur_costs_no_memory_and_little_reading(tmp_path, monkeypatch):
    """The file is read about twice, a unit at a time, and cut at line ends."""
    monkeypatch.setattr("recipe.data.cut.SMALL_SOURCE", 0)
    path, line = tmp_path / "a.txt", b"x" * 999 + b"\n"
    path.write_bytes(line * 40_000)
    source, before = TextSource((str(path),), document_separator="<sep>"), psutil.Process().io_counters().read_chars
    texts = [text for unit in cut(source) for _, text in read_unit(source, unit, Report())]
    assert "".join(texts) == (line * 40_000).decode() and max(map(len, texts)) < 20e6
    assert all(text.endswith("\n") for text in texts)
    assert psutil.Process().io_counters().read_chars - before < 120e6


# ------------------------------------------------------------------ rows that are no text

COLUMNS = [
    ('{"messages": [{"role": "user", "content": "x"}], "id": "1"}', "messages .*'Dialogs' in recipe/data/README.md"),
    ('{"data": {"text": "x"}, "id": 1}', r"data\.text .* column of its own"),
    ('{"text": [{"role": "user", "content": "x"}]}', "'text' holds dialogs; .*'Dialogs'"),
    ('{"body": "x", "id": 1}', "--text_column_name 'body'"),
    ('{"id": 1}', "without any other text"),
]


@pytest.mark.parametrize(("row", "expected"), COLUMNS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_column_that_has_the_text_is_named(tmp_path, row, expected, kind):
    path = tmp_path / f"a.{kind}"
    path.write_text(row + "\n")
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([json.loads(row)]), path)
    source = TextSource((str(path),))
    with pytest.raises(UserError, match=expected):
        read_sample(source, list_units(source))


def test_a_repeated_column_is_refused(tmp_path):
    pq.write_table(pa.Table.from_arrays([pa.array(["x"])] * 2, ["text", "text"]), tmp_path / "a.parquet")
    write_text(tmp_path / "a.csv", "text,text\nx,y\n")
    for kind in ("parquet", "csv"):
        with pytest.raises(UserError, match=rf"a\.{kind} has 2 columns named 'text'"):
            read(TextSource((str(tmp_path / f"a.{kind}"),)))


def test_an_empty_part_of_parquet_holds_no_text(tmp_path):
    """As Spark writes it, without the column."""
    pq.write_table(pa.table({"x": pa.array([], pa.string())}), tmp_path / "a.parquet")
    write_parquet(tmp_path / "b.parquet", ["text"])
    assert texts_of(TextSource((str(tmp_path),))) == ["text"]


# ------------------------------------------------------------------ rows of token ids


@pytest.mark.parametrize("has_mask", [True, False])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "parquet of lists of one length", "save_to_disk"])
def test_the_padding_of_tokenized_rows_is_not_read(tmp_path, kind, has_mask):
    """A column attention_mask marks it."""
    rows = {"input_ids": [[5, 6, 7, *[9] * 20], [8, 9, *[9] * 21]]}
    if has_mask:
        rows["attention_mask"] = [[1] * 3 + [0] * 20, [1] * 2 + [0] * 21]
    table, path = datasets.Dataset.from_dict(rows), str(tmp_path / f"a.{kind.split()[0]}")
    if kind.endswith("of one length"):
        ids = datasets.List(datasets.Value("int32"), length=23)
        table = table.cast(datasets.Features(dict.fromkeys(rows, ids)))
    if kind == "save_to_disk":
        table.save_to_disk(path)
        source = TextSource(dataset_name=path, text_column_name=("input_ids",))
    else:
        {"jsonl": table.to_json, "parquet": table.to_parquet}[kind.split()[0]](path)
        source = TextSource((path,), text_column_name=("input_ids",))
    found = [ids.tolist() for ids in texts_of(source)]
    assert found == ([[5, 6, 7], [8, 9]] if has_mask else rows["input_ids"])
