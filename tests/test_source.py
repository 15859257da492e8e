"""Documents come out of every source unchanged, once, and in one split, however the source is cut into units."""

import bz2
import codecs
import csv
import dataclasses
import gzip
import io
import json
import lzma
import os
import pickle
import re
import shutil
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import PLAIN, ROOT, TINY, make_documents, wet_record

import recipe.environment
from recipe.config import STANDARD_LIBRARY
from recipe.data import files
from recipe.data.files import describe_files
from recipe.data.prepare import rules_of
from recipe.data.read import ReadReport, list_units, read_texts, read_unit
from recipe.data.source import TextSource
from recipe.errors import UserError

GOOD = b'{"text": "good"}\n'


def read(source: TextSource, report: ReadReport | None = None) -> list[tuple[str, str]]:
    """Return the split and the text of each document of all units, in order."""
    report = report or ReadReport()
    return [tuple(document) for unit in list_units(source) for document in read_unit(source, unit, report)]


def texts_of(source: TextSource, split: str | None = None) -> list[str]:
    return [text for name, text in read(source) if split in (None, name)]


def write_jsonl(path: Path, texts: list, column: str = "text") -> str:
    path.write_text("".join(json.dumps({column: text, "n": 1}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def write_parquet(path: Path, texts: list, column: str = "text", row_group_size: int = 7) -> str:
    table = pa.table({column: texts, "n": range(len(texts))})
    pq.write_table(table, path, row_group_size=row_group_size)
    return str(path)


def as_csv(texts: list[str], column: str) -> bytes:
    table = io.StringIO()
    csv.writer(table).writerows([["n", column], *([str(i), text] for i, text in enumerate(texts))])
    return table.getvalue().encode()


def as_wet(texts: list[str], column: str) -> bytes:
    others = wet_record("warcinfo", b"software: x\r\n"), wet_record("conversion", b" \n")
    return b"".join([*others, *(wet_record("conversion", text.encode()) for text in texts)])


# ------------------------------------------------------------------ reading

KINDS = {
    "txt": lambda texts, column: "<sep>".join(texts).encode(),
    "md": lambda texts, column: "<sep>".join(texts).encode(),
    "jsonl": lambda texts, column: "".join(json.dumps({column: t, "n": 1}) + "\n\n" for t in texts).encode(),
    "json": lambda texts, column: json.dumps([{column: t} for t in texts]).encode(),
    "lines.json": lambda texts, column: "".join(json.dumps({column: t}) + "\n" for t in texts).encode(),
    "csv": as_csv,
    "warc.wet": as_wet,
}
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
def test_documents_come_out_unchanged(tmp_path, kind, compression):
    """This includes texts with line breaks, commas, quotes and what looks like a WARC record."""
    pages = ['a "quoted", text\nof two lines\r\n', "text\r\n\r\nWARC/1.0\r\nContent-Length: 3\r\n\r\n", "line\n\n"]
    documents = [*make_documents(20), *pages]
    path = tmp_path / f"a.{kind}{compression}"
    path.write_bytes(COMPRESSIONS[compression](KINDS[kind](documents, "body")))
    assert list(read_texts([str(path)], "body", "<sep>")) == documents


BOM = codecs.BOM_UTF8
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
def test_marks_blanks_and_odd_json(tmp_path, name):
    """Byte order marks and blank rows are not text; half a surrogate pair becomes the replacement character."""
    content, expected = ODD_FILES[name]
    (tmp_path / name).write_bytes(content)
    assert list(read_texts([str(tmp_path / name)], "text", None)) == expected


def test_a_separator_as_a_shell_passes_it(tmp_path):
    """Wherever it is given: also when a saved model is evaluated."""
    (tmp_path / "a.txt").write_text("one\n\ntwo\tthree")
    assert list(read_texts([str(tmp_path / "a.txt")], "text", r"\n\n")) == ["one", "two\tthree"]
    assert list(read_texts([str(tmp_path / "a.txt")], "text", r"\t")) == ["one\n\ntwo", "three"]


@pytest.mark.parametrize("block", [3, 2**20])
def test_a_separator_matches_windows_line_ends(tmp_path, monkeypatch, block):
    """Blank documents between separators are dropped, also if a separator is longer than the blocks read."""
    monkeypatch.setattr("recipe.data.read.BLOCK", block)
    (tmp_path / "a.txt").write_bytes(b"\n\none\r\nline\r\n\r\ntwo\n\n\n\n \n\n\nthree\n\n")
    assert list(read_texts([str(tmp_path / "a.txt")], "text", "\n\n")) == ["one\r\nline", "two", "\nthree"]


WET = as_wet(["good"], "")
PARQUET = io.BytesIO()
pq.write_table(pa.table({"text": ["good"] * 99}), PARQUET)
BAD_FILES = {
    "latin.txt": ("good<sep>Stra\xdfe".encode("latin-1"), "latin.txt is not UTF-8 text; .* iconv -f LATIN1"),
    "latin.jsonl": (GOOD + GOOD.replace(b"oo", b"\xf6"), "latin.jsonl is not UTF-8 text"),
    "latin.csv": (b"text\n" + b"good\n" * 99_999 + b"\xdf", "latin.csv, line 100,001, is not UTF-8 text"),
    "utf16.txt": ("good\n".encode("utf-16"), "cannot read .*utf16.txt: it contains NUL bytes, so it is .* in UTF-16"),
    "utf16.csv": ("text\ngood\n".encode("utf-16"), "cannot read .*utf16.csv: it contains NUL bytes"),
    "program.txt": (b"good<sep>\x7fELF\x02\x01\x01\x00", "cannot read .*program.txt: it contains NUL bytes"),
    "utf16.jsonl": (GOOD + GOOD.decode().encode("utf-16-le"), "cannot read .*utf16.jsonl: it contains NUL bytes"),
    "broken.jsonl": (GOOD + b'{"text": \n', "broken.jsonl: the line that ends at byte 27 is not JSON"),
    "deep.jsonl": (GOOD + b'{"n": ' + b"[" * 10**5 + b"\n", "deep.jsonl: the line that ends .* is not JSON"),
    "list.jsonl": (GOOD + b"[1]\n", "list.jsonl, row 2 is a list, not an object"),
    # A frame with a window of 2 GB, as of zstd --long=31: magic number, no sizes, window, one block of raw bytes.
    "long.txt.zst": (
        b"\x28\xb5\x2f\xfd\x00\xa8\x19\x00\x00abc",
        "with a long window; unpack it: zstd -d --rm --long=31 ",
    ),
    "number.jsonl": (GOOD + b'{"text": 3}\n', "row 2: column 'text' holds int, neither text nor a list of token ids"),
    "nested.jsonl": (GOOD + b'{"text": [[1], [2]]}\n', "row 2: column 'text' holds list, neither"),
    "words.jsonl": (GOOD + b'{"text": ["a"]}\n', "row 2: column 'text' holds list, neither"),
    "cut.jsonl.gz": (gzip.compress(GOOD * 99_999)[:-20], "cannot read .*cut.jsonl.gz"),
    "cut.jsonl.xz": (lzma.compress(GOOD * 9999)[:-20], "cannot read .*cut.jsonl.xz"),
    "none.jsonl.bz2": (GOOD, "cannot read .*none.jsonl.bz2"),
    "half.parquet": (PARQUET.getvalue()[:99], "cannot read .*half.parquet"),
    "cut.wet": (WET[:-9], "cut.wet: a WARC record is incomplete"),
    "none.wet": (WET + GOOD, "none.wet: expected a WARC record, found"),
}
WITHOUT_BEGINNING = ("utf16.txt", "utf16.csv", "long.txt.zst", "none.jsonl.bz2", "half.parquet", "cut.wet")


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_named_or_skipped(tmp_path, name):
    """The error names the file; skip_bad_files counts it, keeps what can be read, and reads the others."""
    content, expected = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    write_jsonl(tmp_path / "zz.jsonl", ["other"])
    source = TextSource((str(tmp_path),), document_separator="<sep>")
    with pytest.raises(UserError, match=expected) as caught:
        read(source)
    advises_to_skip = str(caught.value).endswith("--skip_bad_files skips what cannot be read")
    assert "\n" not in str(caught.value) and advises_to_skip == (name != "long.txt.zst")  # which can be unpacked
    report = ReadReport()
    texts = [text for _, text in read(dataclasses.replace(source, skip_bad_files=True), report)]
    assert report.num_skipped == 1 + name.startswith("utf16.") * (
        name != "utf16.csv"
    )  # whose line end has a zero byte after it
    assert name in report.errors[0]
    assert set(texts) == ({"other"} if name in WITHOUT_BEGINNING else {"good", "other"})


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_a_column_of_token_ids_is_read_as_ids(tmp_path, small_units, write):
    """One document per row, as int64, in several units."""
    rows = [[5, 6, 0], [], [7], *(list(range(number, number + 50)) for number in range(100))]
    source = TextSource((write(tmp_path / f"a.{write.__name__[6:]}", rows, "ids"),), text_column_name="ids")
    found = [document.text for unit in list_units(source) for document in read_unit(source, unit, ReadReport())]
    assert [ids.tolist() for ids in found] == rows and {ids.dtype for ids in found} == {np.dtype("int64")}
    assert len(list_units(source)) > 5
    with pytest.raises(UserError, match="holds token ids, not text"):
        list(read_texts(source.train_files, "ids", None))


def test_a_bad_document_does_not_end_its_unit(tmp_path, small_units):
    """Of each file and unit, skip_bad_files keeps what can be read, also after the first error."""
    documents = make_documents(90)
    rows = [json.dumps({"text": text}).encode() for text in documents]
    rows[5], rows[50], rows[60] = b'{"text": ', b'{"text": 3}', b'{"text": [[1, 2], [3]]}'
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(rows))
    texts = [text.encode() for text in documents]
    texts[7] = b"Stra\xdfe"
    (tmp_path / "b.txt").write_bytes(b"<sep>".join(texts))
    source, report = TextSource((str(tmp_path),), document_separator="<sep>", skip_bad_files=True), ReadReport()
    found = [text for _, text in read(source, report)]
    left = [[text for number, text in enumerate(documents) if number not in bad] for bad in ((5, 50, 60), (7,))]
    assert len(list_units(source)) > 10 and found == left[0] + left[1] and report.num_skipped == 4


@pytest.mark.parametrize("kind", ["a.txt", "a.md.gz", "a.warc.wet", "a.csv", "a.parquet"])
@pytest.mark.parametrize("separator", [None, "<sep>"])
def test_bytes_that_are_no_text_cost_their_line(tmp_path, kind, separator):
    """Of a text, a page or a field; the size of what is skipped is counted."""
    good, bad = "".join(make_documents(30)).encode(), b"Stra\xdfe\n"
    half = good.index(b"\n", len(good) // 2) + 1
    content = good[:half] + bad + good[half:] + b"<sep>" + bad * 2 + b"the end\n"
    path, expected = tmp_path / kind, [good.decode(), "the end\n"]
    if kind == "a.csv":
        rows = [b'"' + text.replace(b'"', b'""') + b'"\n' for text in good.splitlines(keepends=True)]
        path.write_bytes(b"text\n" + b"".join([*rows, bad, *rows[:2]]))
        expected = [text.decode() for text in [*good.splitlines(keepends=True), *good.splitlines(keepends=True)[:2]]]
    elif kind == "a.warc.wet":
        path.write_bytes(b"".join(wet_record("conversion", page) for page in content.split(b"<sep>")))
    elif kind == "a.parquet":
        pages = pa.array(content.split(b"<sep>"), pa.binary()).view(pa.string())
        pq.write_table(pa.table({"text": pages}), path)
    else:
        path.write_bytes(gzip.compress(content) if kind.endswith("gz") else content)
    source = TextSource((str(path),), document_separator=separator, skip_bad_files=True)
    report = ReadReport()
    found = [text for _, text in read(source, report)]
    if separator is None and kind in ("a.txt", "a.md.gz"):
        found, expected = ["".join(found)], ["<sep>".join(expected[:1]) + "<sep>the end\n"]
        expected = [good.decode() + "the end\n"]  # the separator is in a line that is lost
        found = [found[0].replace("<sep>", "")]
    assert found == [text for text in expected if text]
    assert 0 < report.num_skipped <= 3 and len(bad) <= report.skipped_bytes <= 3 * len(bad) + 5
    with pytest.raises(UserError, match="is not UTF-8 text; convert it"):
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
    """Another row is an error that names its line; skip_bad_files loses one line for it."""
    content, expected, num_skipped = CSV_TABLES[name]
    (tmp_path / "a.csv").write_text(content)
    source, report = TextSource((str(tmp_path / "a.csv"),), skip_bad_files=True), ReadReport()
    assert [text for _, text in read(source, report)] == expected
    assert report.num_skipped == num_skipped and (report.skipped_bytes > 0) == (num_skipped > 0)
    if num_skipped:
        with pytest.raises(UserError, match=r"a\.csv: line \d "):
            read(dataclasses.replace(source, skip_bad_files=False))


def test_the_text_column_by_kind_of_file(tmp_path):
    """Files of other kinds have the one without a kind, or `text`."""
    for name, column in (("a.csv", "body"), ("b.jsonl", "content"), ("c.json", "text"), ("d.parquet", "my text")):
        texts = [f"{name} {number}" for number in range(3)]
        if name == "a.csv":
            (tmp_path / name).write_bytes(as_csv(texts, column))
        elif name == "d.parquet":
            write_parquet(tmp_path / name, texts, column)
        else:
            write_jsonl(tmp_path / name, texts, column)
    (tmp_path / "e.txt").write_text("e.txt")
    given = ("csv=body", "jsonl=content", "parquet=my text")
    assert len(list(read_texts([str(tmp_path)], given, None))) == 13
    assert len(list(read_texts([str(tmp_path)], ("content", *given[:1]), None))) == 7
    assert len(list(read_texts([str(tmp_path / "b.jsonl")], "content", None))) == 3


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "parquet of lists of one length", "save_to_disk"])
def test_the_padding_of_tokenized_rows_is_not_read(tmp_path, kind):
    """Where a mask marks it; otherwise its ids are counted."""
    rows = {
        "input_ids": [[5, 6, 7, *[9] * 20], [8, 9, *[9] * 21]],
        "attention_mask": [[1] * 3 + [0] * 20, [1] * 2 + [0] * 21],
    }
    table = datasets.Dataset.from_dict(rows)
    if kind.endswith("length"):
        ids = datasets.List(datasets.Value("int32"), length=23)
        table, kind = table.cast(datasets.Features({name: ids for name in rows})), "parquet"
    for has_mask in (True, False):
        table, name = (
            (table if has_mask else table.remove_columns("attention_mask")),
            str(tmp_path / f"{has_mask}.{kind}"),
        )
        {"jsonl": table.to_json, "parquet": table.to_parquet, "save_to_disk": table.save_to_disk}[kind](name)
        source = TextSource(dataset_name=name, text_column_name="input_ids")
        if kind != "save_to_disk":
            source = TextSource((name,), text_column_name="input_ids")
        report = ReadReport()
        found = [ids.tolist() for _, ids in read(source, report)]
        assert found == ([[5, 6, 7], [8, 9]] if has_mask else rows["input_ids"])
        assert (report.num_row_ids, report.num_padding) == ((0, 0) if has_mask else (46, 42))
        assert rules_of(source) == (["mask"] if has_mask else [])


# ------------------------------------------------------------------ units


def lines(folder: Path, texts: list[str], separator: str = "", suffix: str = "txt") -> str:
    (folder / f"a.{suffix}").write_text(separator.join(texts), newline="", encoding="utf-8")
    return str(folder / f"a.{suffix}")


DOCUMENTS = make_documents(120)
STRIPPED = [text.strip() for text in DOCUMENTS]
# How to write a corpus, the separator, and the documents or, where it is one text, the text.
CORPORA = {
    "jsonl": (lambda folder: write_jsonl(folder / "a.jsonl", DOCUMENTS), None, DOCUMENTS),
    "separated text": (lambda folder: lines(folder, DOCUMENTS, "<sep>"), "<sep>", DOCUMENTS),
    "blank lines": (lambda folder: lines(folder, STRIPPED, "\r\n\r\n\r\n"), "\n\n\n", STRIPPED),
    "row groups": (lambda folder: write_parquet(folder / "a.parquet", DOCUMENTS, row_group_size=3), None, DOCUMENTS),
    "lines": (lambda folder: lines(folder, DOCUMENTS, suffix="md"), None, "".join(DOCUMENTS)),
    "one line": (lambda folder: lines(folder, STRIPPED, " "), None, " ".join(STRIPPED)),
    "no spaces": (lambda folder: lines(folder, ["猫ü" * 9000]), None, "猫ü" * 9000),
    "blank end": (lambda folder: lines(folder, [*DOCUMENTS, "\n" * 5000]), None, "".join(DOCUMENTS) + "\n" * 5000),
}


@pytest.mark.parametrize("name", CORPORA)
def test_units_hold_each_document_once_in_order(tmp_path, small_units, name):
    """Each unit can be read alone, in another process. A text that is one document is cut into one for each unit."""
    write, separator, expected = CORPORA[name]
    source = TextSource((write(tmp_path),), document_separator=separator)
    assert len(list_units(source)) > 10
    documents = read(source)
    if isinstance(expected, str):
        splits = [split for split, _ in documents]
        assert splits == sorted(splits) and set(splits) == {"train", "validation"}
        assert "".join(text for _, text in documents) == expected
    else:
        assert [text for _, text in documents] == expected
    alone = []
    for unit in reversed(list_units(source)):
        alone = [*read_unit(*pickle.loads(pickle.dumps((source, unit))), ReadReport()), *alone]
    assert alone == documents


def test_small_files_share_units(tmp_path, small_units):
    """Files of all kinds, in the order of their names."""
    for number, text in enumerate(DOCUMENTS):
        kind = list(KINDS)[number % len(KINDS)]
        (tmp_path / f"{number:03}.{kind}.gz").write_bytes(gzip.compress(KINDS[kind]([text], "text")))
    source = TextSource((str(tmp_path),), document_separator="<sep>")
    assert 3 < len(list_units(source)) < 60
    assert texts_of(source) == DOCUMENTS


# ------------------------------------------------------------------ splits


@pytest.mark.parametrize(("count", "percentage", "expected"), [(200, 5, 10), (200, 20, 40), (7, 5, 1), (2, 50, 1)])
def test_a_small_source_holds_out_exactly_its_percentage(tmp_path, count, percentage, expected):
    """Of the different documents; at least one, and never all."""
    texts = make_documents(count)
    path = write_jsonl(tmp_path / "a.jsonl", [*texts, *texts[: count // 2]])
    source = TextSource((path,), validation_split_percentage=percentage)
    assert texts_of(source) == [*texts, *texts[: count // 2]]
    assert len(set(texts_of(source, "validation"))) == expected
    assert len(set(texts_of(source, "train"))) == count - expected


@pytest.mark.parametrize("count", [2, 3, 20])
def test_few_large_documents_are_in_both_splits(tmp_path, small_units, count):
    """In any units: where the hash would hold out none or all of them, it holds out one, or all but one."""
    for seed in range(8):
        path = write_jsonl(tmp_path / f"{seed}.jsonl", [text * 60 for text in make_documents(count, seed)])
        for percentage in (0.1, 5, 99.9):
            source = TextSource((path,), validation_split_percentage=percentage)
            assert len(list_units(source)) > 1
            splits = [split for split, _ in read(source)]
            assert set(splits) == {"train", "validation"} and len(splits) == count
            if percentage != 5:
                assert splits.count("validation") in (1, count - 1)


def test_duplicates_are_in_one_split(tmp_path, small_units):
    """In any units and kinds of files, also in long documents, and wherever else they occur."""
    texts = [*make_documents(300), "".join(make_documents(90, seed=1))]
    write_jsonl(tmp_path / "a.jsonl", [*texts, *texts[::-1]])
    write_parquet(tmp_path / "b.parquet", texts, row_group_size=20)
    source = TextSource((str(tmp_path),), validation_split_percentage=20.0)
    train, validation = (texts_of(source, split) for split in ("train", "validation"))
    assert len(list_units(source)) > 10 and not set(train) & set(validation)
    assert len(train) + len(validation) == 3 * len(texts)
    assert 0.13 < len(set(validation)) / len(texts) < 0.27
    write_jsonl(tmp_path / "c.jsonl", make_documents(500, seed=2))
    assert set(train) <= set(texts_of(source, "train"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("".join(f"line {i} über\n" for i in range(1000)), r"line \d+ über\n(?s:.*)"),
        ("title\n" + " ".join(f"wörd-{i}" for i in range(1000)), r"wörd-\d+ .*"),  # the only line is too far away
        ("猫ü" * 1000, "(猫ü|ü).*"),
    ],
)
@pytest.mark.parametrize("kind", ["a.txt", "a.md.gz", "units"])
def test_the_end_of_a_text_is_held_out(tmp_path, monkeypatch, text, expected, kind, request):
    """Of each of a few texts: the last 5% of its bytes, from a line, else from a word, else from a character."""
    if kind == "units":
        request.getfixturevalue("small_units")
    path = tmp_path / kind.replace("units", "a.txt")
    path.write_bytes(gzip.compress(text.encode()) if kind.endswith("gz") else text.encode())
    source = TextSource((str(path),))
    head, tail = ("".join(texts_of(source, split)) for split in ("train", "validation"))
    assert head + tail == text
    assert 0.045 < len(tail.encode()) / len(text.encode()) < 0.08

    assert re.fullmatch(expected, tail)


def test_many_texts_are_split_by_file(tmp_path):
    """With 40 files, whole files are held out; with 39, the end of each file."""
    for number, text in enumerate(make_documents(39)):
        (tmp_path / f"{number:02}.txt").write_text(text * 5)
    source = TextSource((str(tmp_path),))
    assert [split for split, _ in read(source)] == ["train", "validation"] * 39
    (tmp_path / "39.txt").write_text("one more\n")
    source = TextSource((str(tmp_path),))
    assert len(texts_of(source, "train")) == 38 and len(texts_of(source, "validation")) == 2


def test_a_validation_file_replaces_the_held_out_documents(tmp_path, small_units):
    for name, seed in (("a", 0), ("b", 1)):
        write_jsonl(tmp_path / f"{name}.jsonl", make_documents(40, seed))
    source = TextSource((str(tmp_path / "a.jsonl"),), (str(tmp_path / "b.jsonl"),))
    assert texts_of(source, "train") == make_documents(40)
    assert texts_of(source, "validation") == make_documents(40, seed=1)


def write_dataset(folder: Path, kind: str, splits: dict[str, list[str]]) -> str:
    """Write a folder that `datasets` opens."""
    if kind == "save_to_disk":
        whole = {split: datasets.Dataset.from_dict({"text": texts}) for split, texts in splits.items()}
        datasets.DatasetDict(whole).save_to_disk(folder)
        return str(folder)
    folder.mkdir()
    for split, texts in splits.items():
        for number in range(3):
            third = texts[number * len(texts) // 3 : (number + 1) * len(texts) // 3]
            write = write_jsonl if kind == "jsonl" else write_parquet
            write(folder / f"{split}-{number}.{kind}", third)
    return str(folder)


@pytest.mark.parametrize("kind", ["save_to_disk", "parquet", "jsonl"])
def test_local_datasets_keep_their_splits(tmp_path, small_units, kind):
    """With and without a validation split, in units that are shards or row groups; each row once, in order."""
    train, validation = make_documents(60), make_documents(9, seed=1)
    folder = write_dataset(tmp_path / "data", kind, {"train": train, "validation": validation})
    source = TextSource(dataset_name=folder)
    assert read(source) == [("validation", text) for text in validation] + [("train", text) for text in train]
    assert len(list_units(source)) > 3
    other = dataclasses.replace(source, dataset_split="validation", validation_split_percentage=40)
    assert texts_of(other) == validation
    with pytest.raises(UserError, match="has no split 'test' .it has"):
        list_units(dataclasses.replace(source, dataset_split="test"))
    source = TextSource(dataset_name=write_dataset(tmp_path / "one", kind, {"train": train}))
    assert texts_of(source) == train and len(list_units(source)) > 2


def test_a_dataset_written_without_splits_is_read(tmp_path):
    """Its few documents are held out exactly."""
    datasets.Dataset.from_dict({"text": make_documents(40), "n": range(40)}).save_to_disk(tmp_path / "data")
    source = TextSource(dataset_name=str(tmp_path / "data"))
    assert texts_of(source) == make_documents(40) and len(texts_of(source, "validation")) == 2


# ------------------------------------------------------------------ folders


def test_folders_and_patterns_stand_for_their_files(tmp_path):
    """Sorted. Files of other kinds and empty files are counted by kind, and the counts are said."""
    names = ("b.md", "a.txt", "deep/c.txt", "deep/d.jsonl.gz", "p.pdf", "q.pdf", "t.tsv", "z.zip", "deep/n.json")
    for name in (*names, "LICENSE", "empty.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"" if name == "empty.txt" else b"x")
    found = TextSource((str(tmp_path),)).files
    assert [os.path.relpath(path, tmp_path) for path in found.paths] == sorted([*names[:4], "deep/n.json"])
    assert sum(found.ignored.values()) == 6 and found.ignored["empty"] == 1
    assert "files read: 5;" in describe_files(found) and ".pdf (2)" in describe_files(found)
    for pattern, expected in (("*.txt", ["a.txt"]), ("**/c*", ["c.txt"])):
        assert [Path(p).name for p in TextSource((str(tmp_path / pattern),)).files.paths] == expected
    with pytest.raises(UserError, match=r"no file of a supported kind in .*z\.\*.* \.zip .1."):
        list_units(TextSource((str(tmp_path / "z.*"),)))


def names_in(*given: str, **options) -> list[str]:
    return TextSource(given, **options).files.paths


def test_validation_files_are_not_trained_on(tmp_path, monkeypatch):
    """However they are named. Each file is read once, and one line counts those that are ignored, each once."""
    monkeypatch.chdir(tmp_path)
    Path("corpus").mkdir()
    for name, seed in (("a", 0), ("b", 1), ("val", 2)):
        write_jsonl(Path("corpus", f"{name}.jsonl"), make_documents(20, seed))
    Path("link.jsonl").symlink_to("corpus/val.jsonl")
    for validation in ("corpus/val.jsonl", str(tmp_path / "corpus/../corpus/val.jsonl"), "link.jsonl", "corpus/v*"):
        source = TextSource(("corpus", "corpus/a.jsonl", "corpus/*.jsonl"), (validation,))
        assert source.files.paths == ["corpus/a.jsonl", "corpus/b.jsonl"]
        assert describe_files(source.files) == "files read: 2; ignored: named as validation text (1), named twice (2)"
    assert texts_of(source, "train") == [*make_documents(20), *make_documents(20, seed=1)]
    assert texts_of(source, "validation") == make_documents(20, seed=2)
    with pytest.raises(UserError, match="all files of --train_file are named as --validation_file, too"):
        _ = TextSource(("corpus/val.jsonl",), ("corpus",)).files


def test_a_folder_that_holds_its_own_results_is_the_same_text(tmp_path, train, tokenizer_dir, monkeypatch):
    """Runs and datasets in it, also with other names, a virtual environment, hidden files, and a clone of this."""
    monkeypatch.chdir(tmp_path)
    Path("books").mkdir()
    write_jsonl(Path("books", "a.jsonl"), make_documents(200))
    Path("runs").mkdir()
    Path("runs", "ladder.json").write_text("{\n}")
    run = ["--train_file", ".", "--tokenizer_name", tokenizer_dir, *TINY, *PLAIN, "--global_batch_size", 4]
    train(*run, "--max_steps", 1, "--output_dir", "out", "--cache_dir", "cache", alone=True)
    for name in ("env/pyvenv.cfg", "env/lib/top_level.txt", ".git/description.txt", "cache/notes.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("text")
    for name in ("README.md", "recipe/train.py", "recipe/data/README.md", "scripts/benchmarks/data_cpu.json"):
        Path("clone", name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, Path("clone", name))
    assert names_in(".") == ["./books/a.jsonl", "./cache/notes.txt"]
    Path("cache/notes.txt").unlink()
    assert "of runs, models or datasets" in describe_files(TextSource((".",)).files)
    resume = ["--output_dir", "out", "--cache_dir", "cache", "--resume_from_checkpoint", "auto"]
    train(*run, "--max_steps", 2, *resume, alone=True)
    assert names_in("clone/README.md") == ["clone/README.md"]
    Path("clone", "corpus.txt").write_text("text")
    monkeypatch.chdir("clone")
    assert names_in(".") == ["./corpus.txt"] and names_in("recipe/data") == ["recipe/data/README.md"]
    Path("corpus.txt").unlink()
    with pytest.raises(UserError, match="there is no text in the folder ."):
        names_in(".")


def test_a_pattern_reads_no_results_and_links_do_no_harm(tmp_path, monkeypatch):
    """Only of the folders that it leaves open: one that is named is read."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "books/b.jsonl", "out/metrics.jsonl"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(GOOD)
    Path("out/training_config.yaml").touch()
    Path("books/gone.jsonl").symlink_to("nowhere")
    Path("books/loop").symlink_to("..")
    assert names_in("*/*.jsonl") == ["books/b.jsonl"] and names_in("out/*.jsonl") == ["out/metrics.jsonl"]
    assert names_in(".") == ["./a.jsonl", "./books/b.jsonl"]
    assert dict(TextSource((".",)).files.ignored) == {"broken link": 1, "folders of runs, models or datasets": 1}


BAD_SOURCES = [
    ({"train_files": ("gone.txt",)}, "gone.txt"),
    ({"train_files": ("gone/*.txt",)}, "gone/"),
    ({"train_files": ("a.pdf",)}, "cannot read a.pdf: use .txt, .md, .jsonl, .json, .csv, .parquet, .wet files"),
    ({"train_files": ("folder",)}, "folder"),
    ({}, "exactly one of"),
    ({"train_files": ("a.txt",), "dataset_name": "x"}, "exactly one of"),
    ({"dataset_name": "x", "validation_files": ("a.txt",)}, "--validation_file needs --train_file"),
    ({"train_files": ("a.txt",), "document_separator": ""}, "must not be empty"),
    ({"dataset_name": "./nowhere"}, "there is no folder ./nowhere"),
    ({"dataset_name": "folder"}, "cannot open dataset folder"),
]


@pytest.mark.parametrize(("options", "expected"), BAD_SOURCES)
def test_bad_sources_are_errors(tmp_path, monkeypatch, options, expected):
    """The error names the option or path."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "a.pdf"):
        Path(name).write_text("text")
    Path("folder").mkdir()
    with pytest.raises(UserError, match=expected):
        list_units(TextSource(**options))


# ------------------------------------------------------------------ the demo's corpus


def test_the_standard_library_is_a_corpus():
    """It holds megabytes of prose and sources of the running interpreter, without tests."""
    documents = texts_of(TextSource(dataset_name=STANDARD_LIBRARY))
    assert all(text.strip() for text in documents)  # some modules are empty
    assert sum(map(len, documents)) > 2_000_000
    assert any("def dataclass(" in text for text in documents)
    assert not any("test.support" in text[:200] for text in documents)


# ------------------------------------------------------------------ identity


def content_of(*files: Path) -> str:
    return TextSource(tuple(map(str, files))).inputs["content"]


def test_a_copy_has_the_identity_of_the_original(tmp_path):
    """Elsewhere and at another time; a folder of files as well as a local dataset."""
    (tmp_path / "a").mkdir()
    for name in ("one.jsonl", "two.jsonl"):
        write_jsonl(tmp_path / "a" / name, make_documents(9))
    write_dataset(tmp_path / "a" / "data", "save_to_disk", {"train": make_documents(9)})
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for path in (tmp_path / "b").rglob("*"):
        os.utime(path, (1e9, 1e9))
    a, b = ([content_of(tmp_path / name), TextSource(dataset_name=str(tmp_path / name / "data"))] for name in "ab")
    assert (a[0], a[1].inputs) == (b[0], b[1].inputs)


def test_a_file_that_could_not_be_read_is_read_again(tmp_path, monkeypatch):
    """An error is not remembered as the content of a file that has not changed since."""
    path = Path(write_jsonl(tmp_path / "a.jsonl", ["x"]))
    os.utime(path, (1e9, 1e9))
    with monkeypatch.context() as patch:
        patch.setattr(files, "digest_file", lambda _: "unreadable: Permission denied")
        failed = content_of(path)
    assert content_of(path) != failed


def test_without_a_home_folder_nothing_is_remembered(tmp_path, monkeypatch):
    """As for a numeric user of a container, who has neither an account nor HOME."""
    path, working = Path(write_jsonl(tmp_path / "a.jsonl", ["x"])), tmp_path / "working"
    os.utime(path, (1e9, 1e9))
    expected = content_of(path)
    working.mkdir()
    monkeypatch.chdir(working)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(files, "cache_dir", recipe.environment.cache_dir)
    with monkeypatch.context() as patch:
        patch.setattr("os.path.expanduser", lambda text: text)
        assert content_of(path) == expected and not list(working.iterdir())
    monkeypatch.setenv("HOME", str(working))
    monkeypatch.setenv("XDG_CACHE_HOME", "~/cache")
    assert content_of(path) == expected and (working / "cache" / "gpt2_recipe" / "file_digests.json").is_file()


@pytest.mark.parametrize("size", [1_000_000, 10_000_000])
@pytest.mark.parametrize("share", [0, 0.25, 0.51, 1])
def test_an_edit_of_one_byte_is_another_text(tmp_path, size, share):
    """Anywhere in a file, whose size stays the same."""
    path, position = tmp_path / "a.txt", int(share * (size - 1))
    path.write_bytes(b"x" * size)
    before = content_of(path)
    assert content_of(path) == before
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(b"y")
    assert content_of(path) != before


def test_the_identity_covers_every_option_and_file(tmp_path):
    """Everything that changes the documents changes it, and nothing else does."""
    a, b = write_jsonl(tmp_path / "a.jsonl", ["x"]), write_jsonl(tmp_path / "b.jsonl", ["y"])
    shutil.copy(a, tmp_path / "a.txt")  # the same bytes, read differently
    base = TextSource((a,))
    sources = [
        base,
        *(TextSource(files) for files in ((b,), (a, b), (str(tmp_path / "a.txt"),))),
        TextSource((a,), (b,)),
        dataclasses.replace(base, text_column_name="body"),
        dataclasses.replace(base, document_separator="x"),
        dataclasses.replace(base, validation_split_percentage=7.0),
        dataclasses.replace(base, parse_special_tokens=True),
        dataclasses.replace(base, skip_bad_files=True),  # a strict run does not accept what a lenient one has made
    ]
    base = TextSource(dataset_name="org/data")
    options = [{}, {"dataset_name": "org/other"}, {"dataset_config_name": "c"}, {"dataset_split": "test"}]
    sources += [dataclasses.replace(base, **changed) for changed in options]
    assert len({json.dumps(source.inputs) for source in sources}) == len(sources)
