"""Each document is in one unit and in one split, however a source is cut into units."""

import dataclasses
import gzip
import pickle
import re
from pathlib import Path

import datasets
import pytest
from corpora import KINDS, read, texts_of, write_jsonl, write_parquet, write_text
from helpers import make_documents

from recipe.data.read import Report, list_units, read_unit
from recipe.data.source import TextSource
from recipe.errors import UserError

DOCUMENTS = make_documents(120)
BLANK_END = "".join(DOCUMENTS) + "\n" * 5000
STRIPPED = [text.strip() for text in DOCUMENTS]
# How to write a corpus, the separator, and the documents or, where it is one text, the text.
CORPORA = {
    "jsonl": (lambda folder: write_jsonl(folder / "a.jsonl", DOCUMENTS), None, DOCUMENTS),
    "separated text": (lambda folder: write_text(folder / "a.txt", "<sep>".join(DOCUMENTS)), "<sep>", DOCUMENTS),
    "blank lines": (lambda folder: write_text(folder / "a.txt", "\r\n\r\n\r\n".join(STRIPPED)), "\n\n\n", STRIPPED),
    "row groups": (lambda folder: write_parquet(folder / "a.parquet", DOCUMENTS, row_group_size=3), None, DOCUMENTS),
    "lines": (lambda folder: write_text(folder / "a.md", "".join(DOCUMENTS)), None, "".join(DOCUMENTS)),
    "one line": (lambda folder: write_text(folder / "a.txt", " ".join(STRIPPED)), None, " ".join(STRIPPED)),
    "no spaces": (lambda folder: write_text(folder / "a.txt", "猫ü" * 9000), None, "猫ü" * 9000),
    "blank end": (lambda folder: write_text(folder / "a.txt", BLANK_END), None, BLANK_END),
}


@pytest.mark.parametrize("name", CORPORA)
def test_units_hold_each_document_once_in_order(tmp_path, small_units, name):
    """A text that is one document is cut into one for each unit. Another process can read a unit alone."""
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
        alone = [*read_unit(*pickle.loads(pickle.dumps((source, unit))), Report()), *alone]
    assert alone == documents


def test_small_files_share_units_in_the_order_of_their_names(tmp_path, small_units):
    for number, text in enumerate(DOCUMENTS):
        kind = list(KINDS)[number % len(KINDS)]
        (tmp_path / f"{number:03}.{kind}.gz").write_bytes(gzip.compress(KINDS[kind]([text], "text")))
    source = TextSource((str(tmp_path),), document_separator="<sep>")
    assert 3 < len(list_units(source)) < 60
    assert texts_of(source) == DOCUMENTS


# ------------------------------------------------------------------ which documents are for validation


@pytest.mark.parametrize(("count", "percentage", "expected"), [(200, 5, 10), (200, 20, 40), (7, 5, 1), (2, 50, 1)])
def test_a_small_source_holds_out_exactly_its_percentage(tmp_path, count, percentage, expected):
    """The percentage of different documents is held out: at least one, and never all."""
    texts = make_documents(count)
    path = write_jsonl(tmp_path / "a.jsonl", [*texts, *texts[: count // 2]])
    source = TextSource((path,), validation_split_percentage=percentage)
    assert texts_of(source) == [*texts, *texts[: count // 2]]
    assert len(set(texts_of(source, "validation"))) == expected
    assert len(set(texts_of(source, "train"))) == count - expected


@pytest.mark.parametrize("count", [2, 3, 20])
@pytest.mark.parametrize(("percentage", "rare_split"), [(0.1, "validation"), (5, None), (99.9, "train")])
def test_few_large_documents_are_in_both_splits(tmp_path, small_units, count, percentage, rare_split):
    """In any units: where the hash would hold out none or all of them, it holds out one, or all but one."""
    for seed in range(8):
        path = write_jsonl(tmp_path / f"{seed}.jsonl", [text * 60 for text in make_documents(count, seed)])
        source = TextSource((path,), validation_split_percentage=percentage)
        assert len(list_units(source)) > 1
        splits = [split for split, _ in read(source)]
        assert set(splits) == {"train", "validation"} and len(splits) == count
        if rare_split:
            assert splits.count(rare_split) == 1


def test_duplicates_are_in_one_split(tmp_path, small_units):
    """In any units and kinds of files, also long documents. More text leaves each document in its split."""
    texts = [*make_documents(300), "".join(make_documents(90, seed=1))]
    write_jsonl(tmp_path / "a.jsonl", [*texts, *texts[::-1]])
    write_parquet(tmp_path / "b.parquet", texts, row_group_size=20)
    source = TextSource((str(tmp_path),), validation_split_percentage=20.0)
    train, validation = (texts_of(source, split) for split in ("train", "validation"))
    assert len(list_units(source)) > 10 and not set(train) & set(validation)
    assert len(train) + len(validation) == 3 * len(texts)
    assert 0.13 < len(set(validation)) / len(texts) < 0.27
    write_jsonl(tmp_path / "c.jsonl", make_documents(500, seed=2))
    assert set(train) <= set(texts_of(dataclasses.replace(source), "train"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("".join(f"line {i} über\n" for i in range(1000)), r"line \d+ über\n(?s:.*)"),
        ("title\n" + " ".join(f"wörd-{i}" for i in range(1000)), r"wörd-\d+ .*"),  # the only line is too far away
        ("猫ü" * 1000, "(猫ü|ü).*"),
    ],
)
@pytest.mark.parametrize("kind", ["a.txt", "a.md.gz", "units"])
def test_the_end_of_a_text_is_held_out(tmp_path, text, expected, kind, request):
    """The last 5% of the bytes of each text are held out, from the start of a line, else a word, else a character."""
    path = tmp_path / kind.replace("units", "a.txt")
    if kind == "units":
        request.getfixturevalue("small_units")
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


# ------------------------------------------------------------------ datasets on disk


def write_dataset(folder: Path, kind: str, splits: dict[str, list[str]]) -> str:
    """Write a folder that `datasets` opens, with three files for each split."""
    if kind == "save_to_disk":
        whole = {split: datasets.Dataset.from_dict({"text": texts}) for split, texts in splits.items()}
        datasets.DatasetDict(whole).save_to_disk(folder)
        return str(folder)
    folder.mkdir()
    write = write_jsonl if kind == "jsonl" else write_parquet
    for split, texts in splits.items():
        for number in range(3):
            write(folder / f"{split}-{number}.{kind}", texts[number * len(texts) // 3 :][: len(texts) // 3])
    return str(folder)


@pytest.mark.parametrize("kind", ["save_to_disk", "parquet", "jsonl"])
def test_a_local_dataset_keeps_its_splits(tmp_path, small_units, kind):
    """Each row comes once, in order, from shards or row groups, with and without a validation split."""
    train, validation = make_documents(60), make_documents(9, seed=1)
    folder = write_dataset(tmp_path / "data", kind, {"train": train, "validation": validation})
    source = TextSource(dataset_name=folder)
    assert read(source) == [("validation", text) for text in validation] + [("train", text) for text in train]
    assert len(list_units(source)) > 3
    other = dataclasses.replace(source, dataset_split="validation", validation_split_percentage=40)
    assert texts_of(other) == validation
    with pytest.raises(UserError, match="--dataset_split"):
        list_units(dataclasses.replace(source, dataset_split="test"))
    source = TextSource(dataset_name=write_dataset(tmp_path / "one", kind, {"train": train}))
    assert texts_of(source) == train and len(list_units(source)) > 2
