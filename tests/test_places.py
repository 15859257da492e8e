"""A source resumes after any piece, without reading what lies before."""

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import make_documents, wet_record

from recipe.data import documents as documents_module
from recipe.data import files
from recipe.data.documents import Piece
from recipe.data.files import ReadReport
from recipe.data.text import TextSource
from recipe.errors import UserError

END = 0  # the end-of-text id of tokenized sources


def write_jsonl(path: Path, texts: list) -> None:
    path.write_text("".join(json.dumps({"text": text, "n": 1}) + "\n\n" for text in texts))


def write_json(path: Path, texts: list[str]) -> None:
    path.write_text(json.dumps([{"text": text} for text in texts]))


def write_csv(path: Path, texts: list[str]) -> None:
    table = io.StringIO()
    csv.writer(table).writerows([["n", "text"], *([1, text] for text in texts)])
    path.write_text(table.getvalue(), newline="")


def write_parquet(path: Path, texts: list[str]) -> None:
    pq.write_table(pa.table({"text": texts, "n": range(len(texts))}), path, row_group_size=7)


def write_txt(path: Path, texts: list[str]) -> None:
    path.write_text("\ufeff" + "\r\n\n".join(["\n", *texts]), newline="")


def compressed(write: Callable) -> Callable:
    def write_gzip(path: Path, texts: list[str]) -> None:
        write(path, texts)
        path.write_bytes(gzip.compress(path.read_bytes()))

    return write_gzip


def write_wet(path: Path, texts: list[str]) -> None:
    path.write_bytes(b"".join(wet_record("conversion", text.encode()) for text in texts))


WRITERS = {
    "warc.wet": write_wet,
    "wet.gz": compressed(write_wet),
    "jsonl": write_jsonl,
    "json": write_json,
    "csv": write_csv,
    "parquet": write_parquet,
    "txt": write_txt,
    "jsonl.gz": compressed(write_jsonl),
    "txt.gz": compressed(write_txt),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Let blocks and pieces end inside documents, characters and separators."""
    for module in (files, documents_module):
        monkeypatch.setattr(module, "HASHED_CHARACTERS", 1)
    monkeypatch.setattr(files, "PIECE_CHARACTERS", 60)
    monkeypatch.setattr(files, "BLOCK_BYTES", 23)


def content(pieces: Iterable[Piece]) -> list[tuple]:
    return [(piece.split, np.asarray(piece.text).tolist(), piece.ends) for piece in pieces]


def check_places(source: TextSource, every: int = 1, eos_token_id: int | None = None) -> list[Piece]:
    """Compare what follows each place, and a place after it, with the rest of all pieces. Returns these."""

    def after(place: dict | None) -> list[Piece]:
        return list(source.pieces(eos_token_id=eos_token_id, start=json.loads(json.dumps(place))))

    pieces = after(None)
    for number, piece in list(enumerate(pieces, start=1))[::every]:
        if piece.place is not None:
            rest = after(piece.place)
            assert content(rest) == content(pieces[number:])
            middle = len(rest) // 2
            if rest and rest[middle].place is not None:
                assert content(after(rest[middle].place)) == content(rest[middle + 1 :])
    return pieces


def damage_head(path: Path, share: float) -> None:
    """Overwrite the first rows or lines of a file."""
    size = path.stat().st_size
    if path.suffix == ".parquet":
        metadata = pq.ParquetFile(path).metadata
        size = metadata.row_group(metadata.num_row_groups - 1).column(0).file_offset
        size = size or metadata.row_group(metadata.num_row_groups - 1).column(0).data_page_offset
    with open(path, "r+b") as file:
        file.seek(4)
        file.write(b"\xff" * (int(share * size) - 4))


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("options", [{}, {"num_shards": 3, "shard_index": 1}, {"validation": True}])
def test_files_resume_after_each_piece(tmp_path, kind, options):
    """The same pieces follow, with the same splits and places, in files of each kind."""
    options = dict(options)
    for number in range(2):
        WRITERS[kind](tmp_path / f"{number}.{kind}", make_documents(40, seed=number))
    if options.pop("validation", False):
        write_jsonl(tmp_path / "validation.jsonl", make_documents(5, seed=9))
        options["validation_files"] = (str(tmp_path / "validation.jsonl"),)
    paths = (str(tmp_path / f"0.{kind}"), str(tmp_path / f"1.{kind}"))
    source = TextSource(paths, document_separator="\n\n", validation_split_percentage=30.0, **options)
    pieces = check_places(source, every=5)
    assert sum(piece.ends for piece in pieces) == {0: 80, 1: 85, 2: 28 if kind == "parquet" else 27}[len(options)]
    assert all((piece.place is None) == (len(options) == 1 and piece.split == "validation") for piece in pieces)


@pytest.mark.parametrize("kind", ["txt", "txt.gz"])
def test_a_single_text_resumes_in_its_middle(tmp_path, kind):
    """Its end is held out wherever reading resumes; only the piece in which it is cut has no place."""
    for number in range(2):
        WRITERS[kind](tmp_path / f"{number}.{kind}", make_documents(20, seed=number))
    pieces = check_places(TextSource((str(tmp_path),), validation_split_percentage=20.0), every=3)
    assert len(pieces) > 50 and [piece.ends for piece in pieces if piece.place is None] == [True, True]


def test_a_large_corpus_resumes_with_its_splits(tmp_path, monkeypatch):
    """Also where the documents are beyond those that are held in memory."""
    monkeypatch.setattr(documents_module, "HELD_BACK_DOCUMENTS", 10)
    write_jsonl(tmp_path / "a.jsonl", make_documents(60))
    pieces = check_places(TextSource((str(tmp_path / "a.jsonl"),), validation_split_percentage=40.0))
    assert len({piece.place["threshold"] for piece in pieces}) == 1


@pytest.mark.parametrize("kind", ["jsonl", "txt", "parquet", "wet"])
def test_what_lies_before_a_place_is_not_read(tmp_path, kind):
    """Earlier files and the earlier bytes of the file itself may be damaged."""
    for number in range(2):
        WRITERS[kind.replace("wet", "warc.wet")](tmp_path / f"{number}.{kind}", make_documents(100, seed=number))
    source = TextSource((str(tmp_path),), document_separator="\n\n", num_shards=1, validation_split_percentage=20.0)
    pieces = list(source.pieces())
    index = next(i for i, piece in enumerate(pieces) if "Document 1-90:" in piece.text) - 1
    (tmp_path / f"0.{kind}").write_bytes(b"\xff")
    damage_head(tmp_path / f"1.{kind}", 0.8)
    with pytest.raises(UserError):
        list(source.pieces())
    assert list(source.pieces(start=pieces[index].place)) == pieces[index + 1 :]


def test_bad_files_are_skipped_after_a_start(tmp_path, monkeypatch):
    """A bad file ends where it did, also in the middle of a document."""
    write_txt(tmp_path / "a.txt", make_documents(5))
    with open(tmp_path / "a.txt", "ab") as file:
        file.write(b"some words on a line\n" * 9 + b"\xff")
    write_jsonl(tmp_path / "b.jsonl", make_documents(10, seed=1))
    source = TextSource((str(tmp_path),), skip_bad_files=True, document_separator="\n\n")
    pieces = check_places(source)
    assert any(piece.text == "" and piece.ends for piece in pieces)
    report = ReadReport()
    list(source.pieces(report, start=pieces[0].place))
    assert len(report.skipped) == 1 and "a.txt is not UTF-8" in report.skipped[0]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize(("ends_with", "row_length"), [(END, 7), (99, 7), (99, 10)])
def test_token_ids_resume_after_each_document(tmp_path, kind, num_shards, ends_with, row_length):
    """Also if the rows are parts of a stream, where documents end inside them, and before the first ends."""
    rng = np.random.default_rng(0)
    stream = rng.integers(1, 9, 3000)
    stream[rng.integers(0, 3000, 300)] = ends_with
    WRITERS[kind](tmp_path / f"a.{kind}", stream[: 3000 // row_length * row_length].reshape(-1, row_length).tolist())
    source = TextSource((str(tmp_path / f"a.{kind}"),), num_shards=num_shards, validation_split_percentage=20.0)
    pieces = check_places(source, every=31, eos_token_id=END)
    assert len(pieces) > 80 and all(piece.place is not None for piece in pieces)


@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_datasets_resume_after_each_row(tmp_path, on_disk, num_shards):
    """Streamed, or written by save_to_disk; sharded by file, or by document if there are fewer files."""
    texts = make_documents(700)
    if on_disk:
        datasets.Dataset.from_dict({"text": texts, "n": range(700)}).save_to_disk(tmp_path / "data")
    else:
        (tmp_path / "data").mkdir()
        for number in range(3):
            write_parquet(tmp_path / "data" / f"train-{number}.parquet", texts[number::3])
    found = []
    for index in range(num_shards):
        source = TextSource(dataset_name=str(tmp_path / "data"), num_shards=num_shards, shard_index=index)
        pieces = check_places(source, every=97)
        found += [piece.text for piece in pieces]
    assert sorted(found) == sorted(texts)


def test_a_dataset_skips_the_files_before_a_place(tmp_path):
    """They may be damaged. (Its state lags behind by a batch, so the place is within the last file.)"""
    (tmp_path / "data").mkdir()
    for number in range(3):
        write_parquet(tmp_path / "data" / f"train-{number}.parquet", make_documents(300, seed=number))
    pieces = list(TextSource(dataset_name=str(tmp_path / "data")).pieces())
    for number in range(2):
        damage_head(tmp_path / "data" / f"train-{number}.parquet", 0.9)
    source = TextSource(dataset_name=str(tmp_path / "data"))
    with pytest.raises(UserError):
        list(source.pieces())
    assert content(source.pieces(start=pieces[849].place)) == content(pieces[850:])


def test_the_head_of_a_text_has_no_places(tmp_path):
    """What was taken before them would be unknown."""
    write_jsonl(tmp_path / "a.jsonl", make_documents(60))
    pieces = list(TextSource((str(tmp_path / "a.jsonl"),), head_characters=500).pieces())
    assert pieces and not any(piece.place for piece in pieces)


def test_shards_of_few_parquet_files_share_their_row_groups(tmp_path, monkeypatch):
    """Every document is in one shard, in its order, and a shard decodes no row group of another."""
    texts = [f"document {number}" for number in range(70)]
    for number, some in enumerate((texts[:45], texts[45:])):
        pq.write_table(pa.table({"text": some}), tmp_path / f"{number}.parquet", row_group_size=5)
    decoded, real = [], pq.ParquetFile.iter_batches

    def recorded(self, size, groups, columns):
        decoded.extend(groups)
        return real(self, size, groups, columns)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", recorded)
    shards = []
    for index in range(4):
        source = TextSource((str(tmp_path),), num_shards=4, shard_index=index)
        pieces = list(source.pieces())
        assert list(source.pieces(start=pieces[9].place)) == pieces[10:]
        shards.append([piece.text for piece in pieces])
    assert shards[1] == [texts[start + i] for start in (5, 25, 45, 65) for i in range(5)]
    assert sorted(text for shard in shards for text in shard) == sorted(texts)
    assert len(decoded) < 2 * 14  # twice all of them
    source = TextSource((str(tmp_path),), num_shards=15)  # more than there are row groups: by document
    assert [piece.text for piece in source.pieces()] == texts[::15]
