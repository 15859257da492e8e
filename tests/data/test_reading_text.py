"""Documents come out of files of every kind unchanged; what cannot be read is an error, or skipped and counted."""

import bz2
import codecs
import gzip
import io
import json
import lzma

import datasets
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import KINDS, read, texts_of, write_jsonl, write_text
from helpers import make_documents

from recipe.config import STANDARD_LIBRARY
from recipe.data.cut import cut
from recipe.data.read import REPLACED, SKIPPED, Report, list_units, read_sample, read_texts, read_unit
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
    assert list(read_texts([str(path)], "body", "<sep>")) == documents


def parquet_of(table: pa.Table) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


PARQUET = parquet_of(pa.table({"text": ["good"] * 99}))
ODD_FILES = {
    "bom.txt": (BOM + b"file a\r\n\n\nend", ["file a\r\n\n\nend"]),
    "bom.jsonl": (BOM + GOOD + b"\r\n \r\n" + GOOD, ["good", "good"]),
    "bom.json": (BOM + b' [{"text": "one"}, {"text": "two"}]', ["one", "two"]),
    "bom.csv": (BOM + b"text\none\n", ["one"]),
    "constants.jsonl": (b'{"text": "one", "n": NaN}', ["one"]),
    "surrogates.jsonl": (b'{"text": "a\\ud800b \\ud83d\\ude00"}', ["a\ufffdb \U0001f600"]),
    # Valid JSON, so no other encoding would help.
    "zeros.jsonl": (b'{"text": "%s"}' % (b"\\u0000" * 50), ["\ufffd" * 50]),
    "blank.jsonl": (b'{"text": null}\n{"text": ""}\n{"text": " \\n"}\n' + GOOD, ["good"]),
    "quoted.csv": (b'text\n"one, ""two""\nthree"\n\nfour\n', ['one, "two"\nthree', "four"]),
    "empty.parquet": (parquet_of(pa.table({"x": pa.array([], pa.string())})), []),  # as Spark writes it
    "zeros.txt.gz": (gzip.compress(b"text") + bytes(99), ["text"]),  # as on a tape
    "\udce9.jsonl.zst": (pa.compress(GOOD, "zstd", asbytes=True), ["good"]),  # a name that is not UTF-8
    "\udce9.parquet": (PARQUET, ["good"] * 99),
}


@pytest.mark.parametrize(("name", "found"), ODD_FILES.items())
def test_odd_files_are_read(tmp_path, name, found):
    """Byte order marks, blank rows and half surrogates are not text."""
    content, expected = found
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


def test_the_standard_library_is_a_corpus_for_the_demo():
    """The corpus has megabytes of the interpreter's documentation and sources, without tests."""
    documents = texts_of(TextSource(dataset_name=STANDARD_LIBRARY))
    assert all(text.strip() for text in documents)  # some modules are empty
    assert sum(map(len, documents)) > 2_000_000
    assert any("def dataclass(" in text for text in documents)
    assert not any("test.support" in text[:200] for text in documents)


# ------------------------------------------------------------------ what cannot be read

BAD_FILES = {
    "utf16.txt": "good\n".encode("utf-16") * 9,
    "program.txt": b"good<sep>\x7fELF\x02\x01\x01" + bytes(19),
    "utf16.jsonl": GOOD + GOOD.decode().encode("utf-16-le"),
    "cut.jsonl.gz": gzip.compress(GOOD * 99_999)[:-20],
    "cut.jsonl.xz": lzma.compress(GOOD * 99_999)[:-20],
    "none.jsonl.bz2": GOOD,
    "half.parquet": PARQUET[:99],
    "repeated.csv": b"text,text\nx,y\n",
    "repeated.parquet": parquet_of(pa.Table.from_arrays([pa.array(["x"])] * 2, ["text", "text"])),
    "open.csv": b'text\ngood\n"two\n' + b"more\n" * 90,  # nobody knows where the next row begins
    "after.csv": b'text\ngood\n"one" two\nthree\n',
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_damaged_or_no_text_is_an_error(tmp_path, name):
    (tmp_path / name).write_bytes(BAD_FILES[name])
    write_jsonl(tmp_path / "zz.jsonl", ["other"])
    with pytest.raises(UserError, match=name) as caught:
        read(TextSource((str(tmp_path),), document_separator="<sep>"))
    assert ("iconv" in str(caught.value)) == name.startswith(("utf16", "program")) and "\n" not in str(caught.value)


BAD_ROWS = {
    "broken.jsonl": b'{"text": \n',
    "deep.jsonl": b'{"n": ' + b"[" * 10**5 + b"\n",
    "list.jsonl": b"[1]\n",
    "number.jsonl": b'{"text": 3}\n',
    "nested.jsonl": b'{"text": [[1], [2]]}\n',
    "uneven.jsonl": b'{"text": [[1, 2], [3]]}\n',
    "words.jsonl": b'{"text": ["a"]}\n',
    "commas.csv": b"one, two\n",
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_few_rows_that_cannot_be_read_are_counted_and_more_are_an_error(tmp_path, name):
    """Up to one in a hundred. The count and the error name the first one."""
    good, header = (b"good\n", b"text\n") if name.endswith("csv") else (GOOD, b"")
    source = TextSource((str(tmp_path / name),))
    report = Report()
    (tmp_path / name).write_bytes(header + good * 99 + BAD_ROWS[name] + good * 100)
    assert texts_of(source, report=report) == ["good"] * 199
    assert report[SKIPPED] == 1 and f"{name}, line 10" in next(found for found in report if "skipped: " in found)
    (tmp_path / name).write_bytes(header + good * 50 + BAD_ROWS[name] + good * 40)
    with pytest.raises(UserError, match=rf"{name}, line 5.* \(1 of 9. rows here cannot be read; up to 1% "):
        read(source)


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


# Suffix of a file -> its content, of pages that may not be UTF-8.
KINDS_OF_PAGES = {
    "txt": b"".join,
    "md.gz": lambda pages: gzip.compress(b"".join(pages)),
    "separated.txt": b"<sep>".join,
    "separated.md.gz": lambda pages: gzip.compress(b"<sep>".join(pages)),
    "csv": lambda pages: b"text\n" + b"".join(b'"%s"\n' % page for page in pages),
    "jsonl": lambda pages: b"".join(b'{"text": "%s"}\n' % page for page in pages),
    "json": lambda pages: b'[{"text": "%s"}]' % b'"}, {"text": "'.join(pages),
    "parquet": lambda pages: parquet_of(pa.table({"text": pa.array(pages, pa.binary()).view(pa.string())})),
    "binary.parquet": lambda pages: parquet_of(pa.table({"text": pa.array(pages, pa.binary())})),
}


@pytest.mark.parametrize("kind", KINDS_OF_PAGES)
def test_few_bytes_that_are_not_utf8_are_replaced_and_many_are_another_encoding(tmp_path, small_units, kind):
    """In every kind of file, without an option. NULs are such bytes."""
    path = tmp_path / f"a.{kind}"
    separator = "<sep>" if kind.startswith("separated") else None
    first, second = ("".join(make_documents(30, seed)).replace("\n", " ") for seed in range(2))
    pages = [first.encode().replace(b"cat", b"c\xe4t", 3), second.encode().replace(b"cat", b"c\0t", 2)]
    path.write_bytes(KINDS_OF_PAGES[kind](pages))
    source = TextSource((str(path),), document_separator=separator)
    report = Report()
    expected = first.replace("cat", "c\ufffdt", 3) + second.replace("cat", "c\ufffdt", 2)
    assert "".join(texts_of(source, report=report)) == expected
    assert (report[REPLACED], report[SKIPPED]) == (5, 0)
    short = [b"Stra\xdfe %d" % number for number in range(99)]  # each row has one
    for latin in ([first.encode(), "\xfcber Stra\xdfe ".encode("latin-1") * 99], short):
        path.write_bytes(KINDS_OF_PAGES[kind](latin))
        with pytest.raises(UserError, match=rf"a\.{kind}.* iconv"):
            read(TextSource((str(path),), document_separator=separator))


def test_bad_bytes_are_those_of_the_file_wherever_they_are(tmp_path):
    """Also in the few bytes that are held out."""
    text = "".join(make_documents(900)).encode()
    (tmp_path / "a.txt").write_bytes(text[:-40] + b"\xe9" * 20 + text[-20:])
    report = Report()
    assert "\ufffd" * 20 in texts_of(TextSource((str(tmp_path),)), "validation", report)[0]
    assert report[REPLACED] == 20


def test_a_separator_that_does_not_occur_costs_no_memory_and_little_reading(tmp_path, monkeypatch):
    """The file is read about twice, a unit at a time, and cut at line ends."""
    monkeypatch.setattr("recipe.data.cut.SMALL_SOURCE", 0)
    path = tmp_path / "a.txt"
    line = b"x" * 999 + b"\n"
    path.write_bytes(line * 40_000)
    source = TextSource((str(path),), document_separator="<sep>")
    before = psutil.Process().io_counters().read_chars
    texts = [text for unit in cut(source) for _, text in read_unit(source, unit, Report())]
    assert "".join(texts) == (line * 40_000).decode() and max(map(len, texts)) < 20e6
    assert all(text.endswith("\n") for text in texts)
    assert psutil.Process().io_counters().read_chars - before < 120e6


# ------------------------------------------------------------------ rows that are no text

COLUMNS = [
    ('{"data": {"text": "x"}, "id": 1}', r"data\.text .* column of its own"),
    ('{"text": [{"role": "user", "content": "x"}]}', "'text' holds dialogs; .*'Dialogs'"),
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


# ------------------------------------------------------------------ rows of token ids


@pytest.mark.parametrize("has_mask", [True, False])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "parquet of lists of one length", "save_to_disk"])
def test_the_padding_of_tokenized_rows_is_not_read(tmp_path, kind, has_mask):
    """A column attention_mask marks it."""
    rows = {"input_ids": [[5, 6, 7, *[9] * 20], [8, 9, *[9] * 21]]}
    if has_mask:
        rows["attention_mask"] = [[1] * 3 + [0] * 20, [1] * 2 + [0] * 21]
    table = datasets.Dataset.from_dict(rows)
    path = str(tmp_path / f"a.{kind.split()[0]}")
    if kind.endswith("of one length"):
        ids = datasets.List(datasets.Value("int32"), length=23)
        table = table.cast(datasets.Features(dict.fromkeys(rows, ids)))
    if kind == "save_to_disk":
        table.save_to_disk(path)
        source = TextSource(dataset_name=path, text_column_name="input_ids")
    else:
        {"jsonl": table.to_json, "parquet": table.to_parquet}[kind.split()[0]](path)
        source = TextSource((path,), text_column_name="input_ids")
    found = [ids.tolist() for ids in texts_of(source)]
    assert found == ([[5, 6, 7], [8, 9]] if has_mask else rows["input_ids"])
