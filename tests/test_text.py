"""Documents come out of files unchanged, and equal documents are never in both splits."""

import csv
import dataclasses
import gzip
import io
import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import make_documents, wet_record

from recipe.config import STANDARD_LIBRARY
from recipe.data import documents as documents_module
from recipe.data import files
from recipe.data.documents import Piece, cut_at_line, cut_ids_into_documents
from recipe.data.documents import split_documents as split_parts
from recipe.data.files import ReadReport, find_cut, name_of_text, read_file, read_standard_library, read_text
from recipe.data.rows import Part
from recipe.data.text import TextSource
from recipe.errors import UserError


def joined(pieces: Iterable[Piece]) -> list[tuple[str, str]]:
    """Join the pieces of each document: (split, document)."""
    documents, parts = [], []
    for piece in pieces:
        parts.append(piece.text)
        if piece.ends:
            documents.append((piece.split, "".join(parts)))
            parts = []
    assert not parts
    return documents


def documents_of(path) -> list[str]:
    return [
        text for _, text in joined(Piece("train", *part) for part in read_file(str(path), "text", None, ReadReport()))
    ]


def split_documents(documents, percentage):
    return joined(split_parts((Part(text, True) for text in documents), percentage))


def write_all_kinds(folder: Path, documents: list[str]) -> dict[str, Path]:
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t, "n": 1}) + "\n\n" for t in documents))
    (folder / "lines.json").write_text("".join(json.dumps({"text": t}) + "\n" for t in documents))
    (folder / "array.json").write_text(json.dumps([{"text": t} for t in documents]))
    pq.write_table(pa.table({"text": documents, "n": range(len(documents))}), folder / "a.parquet", row_group_size=7)
    table = io.StringIO()
    csv.writer(table).writerows([["n", "text"], *([str(i), t] for i, t in enumerate(documents))])
    (folder / "a.csv").write_text(table.getvalue(), newline="")
    (folder / "B.JSONL.GZ").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes()))
    with pa.CompressedOutputStream(str(folder / "c.jsonl.zst"), "zstd") as file:
        file.write((folder / "a.jsonl").read_bytes())
    return {p.name: p for p in folder.iterdir()}


@pytest.mark.parametrize(
    "name", ["a.jsonl", "lines.json", "array.json", "a.parquet", "a.csv", "B.JSONL.GZ", "c.jsonl.zst"]
)
def test_rows_are_documents(tmp_path, name):
    """In every kind of file, plain or compressed, including texts with line breaks, commas and quotes."""
    documents = [*make_documents(20), 'a "quoted", text\nof two lines\r\n']
    assert documents_of(write_all_kinds(tmp_path, documents)[name]) == documents


def test_folders_and_patterns_expand_to_sorted_files(tmp_path):
    """A folder stands for the supported files in it, a pattern for its matches."""
    for name in ("b.txt", "a.txt", "deep/c.txt", "ignored.bin", "deep/d.jsonl.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    names = [Path(p).name for p in TextSource(train_files=(str(tmp_path),)).files]
    assert names == ["a.txt", "b.txt", "c.txt", "d.jsonl.gz"]
    assert [Path(p).name for p in TextSource(train_files=(str(tmp_path / "*.txt"),)).files] == ["a.txt", "b.txt"]
    assert [Path(p).name for p in TextSource(train_files=(str(tmp_path / "**/c*"),)).files] == ["c.txt"]


def test_a_text_file_is_one_document(tmp_path):
    """Line ends and blank lines are kept, and a byte order mark is dropped."""
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffile a\r\n\n\nend")
    assert documents_of(tmp_path / "a.txt") == ["file a\r\n\n\nend"]


@pytest.mark.parametrize("piece_characters", [1, 10, 100, 10**9])
@pytest.mark.parametrize("separator", [None, "\n\n", "<|sep|>"])
def test_long_documents_come_in_pieces(monkeypatch, piece_characters, separator):
    """Pieces of any length join to the documents that str.split returns."""
    monkeypatch.setattr(files, "PIECE_CHARACTERS", piece_characters)
    monkeypatch.setattr(files, "HASHED_CHARACTERS", 1)
    monkeypatch.setattr(files, "BLOCK_BYTES", 7)  # block ends fall inside characters and separators
    text = "<|sep|>".join(make_documents(5)) + "\n\nüber\n\n\n end "
    parts = list(read_text(io.BytesIO(text.encode()), separator, ReadReport()))
    found = [document for _, document in joined(Piece("train", *part) for part in parts)]
    assert found == (text.split(separator) if separator else [text])
    if piece_characters == 10 and separator is None:
        assert len(parts) > 20


def test_text_is_cut_at_single_line_breaks_or_spaces():
    """After a line break, else before a space."""
    assert find_cut("one two\nthree  \n\n four", 22) == 8
    assert find_cut("one two  three ", 15) == 3
    assert find_cut("one  two\n\nthree", 15) == find_cut("unbroken", 8) == 0


def test_split_is_by_document_exact_and_reproducible():
    """5% of 200 documents is 10; equal documents are in the same split."""
    documents = make_documents(200) + make_documents(200)[:30]
    split = split_documents(documents, 5.0)
    assert [text for _, text in split] == documents
    train = {text for name, text in split if name == "train"}
    validation = {text for name, text in split if name == "validation"}
    assert len(validation) == 10 and not train & validation
    assert split == split_documents(iter(documents), 5.0)


@pytest.mark.parametrize("limit", ["HELD_BACK_DOCUMENTS", "HELD_BACK_CHARACTERS"])
def test_split_of_a_large_corpus_is_streamed(monkeypatch, limit):
    """Beyond the documents held in memory, documents are read one at a time, and the share is met on average."""
    monkeypatch.setattr(documents_module, limit, 50)
    drawn = []

    def read():
        for i in range(5000):
            drawn.append(i)
            yield Part(f"text {i}", True)

    stream = split_parts(read(), 20.0)
    next(stream)
    assert len(drawn) <= 51
    share = sum(piece.split == "validation" for piece in stream) / 5000
    assert 0.17 < share < 0.23


def test_the_pieces_of_a_document_stay_together():
    """All pieces of a document are in the same split."""
    parts = [Part(f"{i} {part}", part == 2) for i in range(100) for part in range(3)]
    pieces = list(split_parts(parts, 30.0))
    assert [Part(p.text, p.ends) for p in pieces] == parts
    assert all(len({p.split for p in pieces[3 * i : 3 * i + 3]}) == 1 for i in range(100))
    assert sum(p.split == "validation" for p in pieces) == 90


@pytest.mark.parametrize("count", [2, 3, 7])
def test_a_few_documents_fill_both_splits(count):
    """Two documents are enough."""
    assert {name for name, _ in split_documents(make_documents(count), 5.0)} == {"train", "validation"}


@pytest.mark.parametrize("piece_characters", [50, 10**9])
@pytest.mark.parametrize("compressed", [False, True])
def test_the_tail_of_a_single_text_is_held_out(tmp_path, monkeypatch, piece_characters, compressed):
    """The text is cut after a line, in pieces or not, and both parts join to the text."""
    monkeypatch.setattr(files, "PIECE_CHARACTERS", piece_characters)
    text = "".join(f"line {i} über\n" for i in range(1000))
    path = tmp_path / ("a.txt.gz" if compressed else "a.txt")
    path.write_bytes(gzip.compress(text.encode()) if compressed else text.encode())
    source = TextSource(train_files=(str(path),))
    (first, head), (second, tail) = joined(source.pieces())
    assert (first, second) == ("train", "validation")
    assert head + tail == text and head.endswith("\n") and 0.94 < len(head) / len(text) < 0.951
    assert cut_at_line("no line break", 6, 9) == ("no lin", "e break")
    assert cut_at_line("a\nb\nc d", 6, 3) == ("a\nb\n", "c d")
    assert cut_at_line("title\n" + "x" * 94, 95, 2) == ("title\n" + "x" * 89, "x" * 5)  # not at the only line break


def test_a_validation_file_is_read_first(tmp_path):
    """Its documents are the validation split."""
    (tmp_path / "a.txt").write_text("train text")
    (tmp_path / "b.txt").write_text("validation text")
    source = TextSource(train_files=(str(tmp_path / "a.txt"),), validation_files=(str(tmp_path / "b.txt"),))
    assert joined(source.pieces()) == [("validation", "validation text"), ("train", "train text")]


@pytest.mark.parametrize("on_disk", [True, False])
def test_local_datasets_keep_their_splits(tmp_path, on_disk):
    """`dataset_name` accepts a folder written by save_to_disk and a folder of data files."""
    train, validation = make_documents(20), make_documents(5, seed=1)
    if on_disk:
        parts = {"train": train, "validation": validation}
        datasets.DatasetDict(
            {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in parts.items()}
        ).save_to_disk(tmp_path / "data")
    else:
        (tmp_path / "data").mkdir()
        for name, texts in (("train", train), ("validation", validation)):
            lines = "".join(json.dumps({"text": t}) + "\n" for t in texts)
            (tmp_path / "data" / f"{name}.jsonl").write_text(lines)
    found = joined(TextSource(dataset_name=str(tmp_path / "data")).pieces())
    assert found == [("validation", t) for t in validation] + [("train", t) for t in train]
    named = TextSource(dataset_name=str(tmp_path / "data"), dataset_split="validation", validation_split_percentage=40)
    assert sorted(text for _, text in joined(named.pieces())) == sorted(validation)
    with pytest.raises(UserError, match="has no split 'test' .it has"):
        list(TextSource(dataset_name=str(tmp_path / "data"), dataset_split="test").pieces())


def test_the_fingerprint_depends_on_content_and_options(tmp_path):
    """A new object with the same content has the same fingerprint."""
    path = tmp_path / "a.txt"
    path.write_text("one")
    source = TextSource(train_files=(str(path),))
    assert source.fingerprint == TextSource(train_files=(str(path),)).fingerprint
    assert source.fingerprint != TextSource(train_files=(str(path),), validation_split_percentage=6).fingerprint
    path.write_text("two")
    assert source.fingerprint != TextSource(train_files=(str(path),)).fingerprint


def test_the_standard_library_is_a_corpus():
    """It holds megabytes of prose and sources of the running interpreter, without tests."""
    documents = list(read_standard_library())
    assert sum(map(len, documents)) > 2_000_000
    assert any("def dataclass(" in text for text in documents)
    assert not any("test.support" in text[:200] for text in documents)


def test_an_interpreter_without_sources_is_an_error(tmp_path, monkeypatch):
    """The error names --train_file."""
    import sysconfig

    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match="pass --train_file"):
        list(read_standard_library())


def parquet_of(texts: list[str]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), file)
    return file.getvalue()


GOOD = b'{"text": "good"}\n'
WET = wet_record("warcinfo", b"a: b") + wet_record("conversion", "a page, über\r\n\r\nWARC/1.0\r\n".encode())
PARQUET = parquet_of(["text"] * 99)
BAD_FILES = {
    "latin.txt": ("Stra\xdfe".encode("latin-1"), "latin.txt is not UTF-8 text: .*; convert it, from Latin-1 .* iconv"),
    "latin.jsonl": (GOOD.replace(b"oo", b"\xf6"), "line 1 is not JSON: .utf-8. codec .* iconv -f LATIN1"),
    "broken.jsonl": (GOOD + b'{"text": \n', "broken.jsonl: line 2 is not JSON"),
    "list.jsonl": (GOOD + b"[1]\n", "row 2 is a list, not an object"),
    "row.jsonl": (GOOD + b'{"content": "x"}\n', r"row 2 has no column 'text' \(it has content\), unlike row 1"),
    "deep.jsonl": (GOOD + b'{"n": ' + b"[" * 10**5 + b"\n", "cannot read .*deep.jsonl: maximum recursion"),
    "column.jsonl": (b'{"body": "a", "id": 1}\n', "no column 'text'; pass --text_column_name with one of body, id"),
    "mixed.jsonl": (GOOD + b'{"text": 3}\n', "row 2: column 'text' holds int, not text"),
    "bytes.jsonl": (GOOD + b'{"text": "\xff"}\n', "line 2 is not JSON: .utf-8. codec"),
    "column.csv": (b"a,b\n1,2\n", "no column 'text'; pass --text_column_name with one of a, b"),
    "broken.parquet": (b"PAR1 not really", "cannot read .*broken.parquet"),
    "truncated.jsonl.gz": (gzip.compress(GOOD * 9999)[:-20], "cannot read .*truncated.jsonl.gz"),
    "none.jsonl.gz": (b"not compressed at all", "cannot read .*none.jsonl.gz: it is not compressed with gzip"),
    "none.txt.zst": (b"not compressed at all", "cannot read .*none.txt.zst: it is not compressed with zstd"),
    "gzip.jsonl": (gzip.compress(GOOD), "it is compressed with gzip; let its name end in .gz"),
    "zstd.txt": (pa.compress(GOOD, "zstd", asbytes=True), "it is compressed with zstd; let its name end in .zst"),
    "paper.txt": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "it is a PDF; extract its text first"),
    "letter.csv": (b"PK\x03\x04\x14\x00\x06\x00\xff", "a ZIP archive, or a document such as .docx"),
    "program.txt": (b"\x7fELF\x02\x01\x01\x00", "it contains NUL bytes, so it is binary"),
    "nul.csv": (b"text\na\x00b\n", "it contains NUL bytes"),
    "utf16.txt": ("text".encode("utf-16"), "it is text in UTF-16; convert it with iconv"),
    "utf16.jsonl": (GOOD.decode().encode("utf-16"), "it is text in UTF-16; convert it with iconv"),
    "ascii.txt": (b"%PDF-1.4\n1 0 obj\n", "it is a PDF; extract its text first"),
    "rich.txt": (b"{\\rtf1 text}", "it is an RTF document; extract its text first"),
    "unmarked.jsonl": (GOOD.decode().encode("utf-16-le"), "it contains NUL bytes, so it is binary, or text in UTF-16"),
    "huge.wet": (WET.replace(b"Content-Length: 4", b"Content-Length: 99999999999999999"), "there is no WARC record"),
    "unmarked.txt": ("text".encode("utf-16-le"), "it contains NUL bytes, so it is binary, or text in UTF-16"),
    "rows.jsonl": (PARQUET, "it is a Parquet file; let its name end in .parquet"),
    "half.parquet": (PARQUET[: len(PARQUET) // 2], "cannot read .*half.parquet"),
    "text.parquet": (GOOD * 9, "cannot read .*text.parquet"),
    "cut.wet": (WET[:-9], "the WARC record at byte 9[0-9] of its content is incomplete"),
    "broken.wet.gz": (gzip.compress(WET + GOOD), "there is no WARC record at byte [0-9]+ of its content"),
    "empty.wet": (b"\n\n", "there is no WARC record at byte 0"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_named_or_skipped(tmp_path, name):
    """The error gives the file and the place in it; skip_bad_files counts the file and reads the others."""
    content, expected = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "zz.jsonl").write_bytes(GOOD)
    options = {"train_files": (str(tmp_path),), "validation_split_percentage": 50.0}
    with pytest.raises(UserError, match=expected):
        list(TextSource(**options).pieces())
    report = ReadReport()
    pieces = list(TextSource(**options, skip_bad_files=True).pieces(report))
    assert len(report.skipped) == 1 and name in report.skipped[0] and "good" in [piece.text for piece in pieces]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"train_files": ("gone.txt",)}, "there is no file gone.txt"),
        ({"train_files": ("gone/*.txt",)}, "there is no file gone/"),
        (
            {"train_files": ("a.pdf",)},
            "cannot read a.pdf: use .txt, .jsonl, .json, .csv, .parquet, .wet files, plain or compressed as .gz",
        ),
        ({"train_files": ("folder",)}, "folder folder holds no file of a supported kind"),
        ({}, "exactly one of"),
        ({"train_files": ("a.txt",), "dataset_name": "x"}, "exactly one of"),
        ({"dataset_name": "x", "validation_files": ("a.txt",)}, "--validation_file needs --train_file"),
        ({"train_files": ("a.txt",), "validation_split_percentage": 100}, "between 0 and 100"),
        ({"train_files": ("a.txt",), "document_separator": ""}, "must not be empty"),
        ({"dataset_name": "./nowhere"}, "there is no folder ./nowhere"),
    ],
)
def test_bad_sources_are_errors(tmp_path, monkeypatch, options, expected):
    """The error names the option or path."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "a.pdf"):
        Path(name).write_text("text")
    Path("folder").mkdir()
    with pytest.raises(UserError, match=expected):
        list(TextSource(**options).pieces())


def test_a_damaged_text_does_not_continue_in_the_next_file(tmp_path, monkeypatch):
    """What was read of a bad file is a document; the documents of the next file stay complete."""
    monkeypatch.setattr(files, "PIECE_CHARACTERS", 20)
    monkeypatch.setattr(files, "BLOCK_BYTES", 10)
    (tmp_path / "a.txt").write_bytes(b"some words on a line\n" * 5 + b"\xff")
    (tmp_path / "b.jsonl").write_bytes(GOOD * 3)
    report = ReadReport()
    source = TextSource((str(tmp_path),), skip_bad_files=True)
    *_, first, second, third = [text for _, text in joined(source.pieces(report))]
    assert first == second == third == "good" and "a.txt is not UTF-8" in report.skipped[0]


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst"])
def test_a_damaged_archive_is_named_or_skipped(tmp_path, name):
    """This includes a single text, whose length is measured first."""
    (tmp_path / name).write_bytes(gzip.compress(b"text " * 9999)[:-20])
    (tmp_path / "b.txt").write_text("good\n" * 99)
    with pytest.raises(UserError, match=f"cannot read .*{name}"):
        list(TextSource((str(tmp_path / name),)).pieces())
    report = ReadReport()
    documents = joined(TextSource((str(tmp_path),), skip_bad_files=True).pieces(report))
    assert len(report.skipped) == 1 and "".join(text for _, text in documents) == "good\n" * 99


def test_rows_without_text_are_skipped(tmp_path):
    """Null, empty and blank rows are not documents; half a surrogate pair becomes the replacement character."""
    rows = [{"text": None}, {"text": ""}, {"text": " \n"}, {"text": "a\ud800b"}, {"text": "\U0001f600"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert documents_of(tmp_path / "a.jsonl") == ["a\ufffdb", "\U0001f600"]


@pytest.mark.parametrize("name", ["a.warc.wet", "a.warc.wet.gz", "a.wet.gz", "a.wet.zst"])
def test_each_page_of_a_wet_file_is_a_document(tmp_path, name):
    """Its text unchanged, if there is any; other records are skipped. Each record may be a member of the archive."""
    pages = [*make_documents(50), "text\r\n\r\nWARC/1.0\r\nContent-Length: 3\r\n\r\n", "line\n\n"]
    records = [wet_record("warcinfo", b"software: x\r\n"), wet_record("conversion", b" \n")]
    records += [wet_record("conversion", page.encode()) for page in pages] + [wet_record("metadata", b"not text")]
    if name.endswith(".gz"):
        records = [gzip.compress(record) for record in records]
    elif name.endswith(".zst"):
        records = [pa.compress(b"".join(records), "zstd", asbytes=True)]
    (tmp_path / name).write_bytes(b"".join(records))
    assert TextSource((str(tmp_path),)).files == TextSource((str(tmp_path / "*.w*"),)).files == [str(tmp_path / name)]
    assert documents_of(tmp_path / name) == pages


def test_blank_documents_are_skipped(tmp_path):
    """Empty files and blank parts between separators are not documents."""
    (tmp_path / "a.txt").write_text("\n\n".join(["", "one", "", "two", "", " \n ", "three", "", ""]))
    assert [part.text for part in read_file(str(tmp_path / "a.txt"), "text", "\n\n", ReadReport())] == [
        "one",
        "two",
        "three",
    ]
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "c.txt").write_text(" \n\t\n")
    assert documents_of(tmp_path / "b.txt") == documents_of(tmp_path / "c.txt") == []


def test_the_separator_matches_windows_line_breaks(tmp_path, monkeypatch):
    """Even if a block ends within the separator."""
    monkeypatch.setattr(files, "BLOCK_BYTES", 3)  # block ends fall inside the separator
    (tmp_path / "a.txt").write_bytes(b"one\r\nline\r\n\r\ntwo\n\nthree")
    assert [part.text for part in read_file(str(tmp_path / "a.txt"), "text", "\n\n", ReadReport())] == [
        "one\r\nline",
        "two",
        "three",
    ]


def test_a_json_array_may_start_with_a_byte_order_mark(tmp_path):
    """Its objects are rows."""
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + json.dumps([{"text": "one"}, {"text": "two"}]).encode())
    assert documents_of(tmp_path / "a.json") == ["one", "two"]


def test_equal_long_documents_are_in_one_split(tmp_path):
    """Wherever their pieces end, the same beginning of each is hashed."""
    long = "".join(make_documents(9000, seed=2))
    assert len(long) > 2 * files.PIECE_CHARACTERS
    texts = [make_documents(1, seed=100 + i)[0] * (7 * i + 1) + "<sep>" + long for i in range(6)]
    (tmp_path / "a.txt").write_text("<sep>".join(texts))
    pieces = TextSource((str(tmp_path / "a.txt"),), document_separator="<sep>", validation_split_percentage=40.0)
    sides = {split for split, document in joined(pieces.pieces()) if document == long}
    assert len(sides) == 1
    assert len({len(piece.text) for piece in pieces.pieces() if long.startswith(piece.text[:1000])}) > 1


def test_the_fingerprint_covers_every_option_and_file(tmp_path, monkeypatch):
    """Everything that changes the documents changes it, and nothing else does."""
    (tmp_path / "a.jsonl").write_bytes(GOOD * 3)
    (tmp_path / "b.jsonl").write_bytes(GOOD * 4)
    (tmp_path / "a.txt").write_bytes(GOOD * 3)
    datasets.Dataset.from_dict({"text": ["x"] * 9}).save_to_disk(tmp_path / "data")
    base = TextSource((str(tmp_path / "a.jsonl"),))
    dataset = TextSource(dataset_name=str(tmp_path / "data"))
    sources = [
        base,
        TextSource((str(tmp_path / "b.jsonl"),)),
        TextSource((str(tmp_path / "a.txt"),)),  # the same bytes, read differently
        TextSource((str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))),
        TextSource((str(tmp_path / "a.jsonl"),), (str(tmp_path / "b.jsonl"),)),
        *(
            dataclasses.replace(base, **options)
            for options in (
                {"text_column_name": "body"},
                {"document_separator": "x"},
                {"validation_split_percentage": 7.0},
                {"head_characters": 10},
                {"num_shards": 2},
                {"num_shards": 2, "shard_index": 1},
            )
        ),
        dataset,
        dataclasses.replace(dataset, dataset_split="test"),
        dataclasses.replace(dataset, dataset_config_name="c"),
        TextSource(dataset_name=STANDARD_LIBRARY),
    ]
    fingerprints = [source.fingerprint for source in sources]
    assert len(set(fingerprints)) == len(sources)
    assert dataclasses.replace(base, skip_bad_files=True).fingerprint == base.fingerprint
    (tmp_path / "data" / "more.arrow").write_bytes(b"x")
    assert TextSource(dataset_name=str(tmp_path / "data")).fingerprint != dataset.fingerprint
    monkeypatch.setattr(
        huggingface_hub, "HfApi", lambda: SimpleNamespace(dataset_info=lambda name: SimpleNamespace(sha="1"))
    )
    first = TextSource(dataset_name="some/dataset").fingerprint
    monkeypatch.setattr(
        huggingface_hub, "HfApi", lambda: SimpleNamespace(dataset_info=lambda name: SimpleNamespace(sha="2"))
    )
    assert TextSource(dataset_name="some/dataset").fingerprint != first


def test_rows_of_ids_are_cut_into_documents():
    """Rows with end-of-text ids are parts of a stream; without them, each row is a document."""
    rows = [([5, 6, 0, 7], True), ([8, 0, 0, 9], True), ([9, 9], True), ([0, 4], True)]
    parts = [Part(np.array(ids), ends) for ids, ends in rows]
    found = [(ids.tolist(), ends) for ids, ends, _ in cut_ids_into_documents(iter(parts), 0)]
    assert found == [([5, 6], True), ([7, 8], True), ([9, 9, 9], True), ([4], True)]
    found = [part.text.tolist() for part in cut_ids_into_documents(iter(parts), 1)]
    assert found == [ids for ids, _ in rows]
    late = [Part(np.array([3]), True)] * 300 + [Part(np.array([0]), True)]
    with pytest.raises(UserError, match="a row contains the end-of-text id 0, but the first 200 rows do not;"):
        list(cut_ids_into_documents(iter(late), 0))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a/b.jsonl", "b"),
        ("t/**/*.txt", "text"),
        ("x/my text.txt.gz", "my-text"),
        ("org/data", "data"),
        ("-r.txt", "r"),
    ],
)
def test_the_name_of_a_text_is_a_valid_folder_name(path, name):
    """It holds no pattern or blank, and does not look like an option."""
    assert name_of_text(path) == name
