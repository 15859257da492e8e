"""Documents come out of files as they are in them, and split so that none is on both sides."""

import json
from pathlib import Path

import pytest
from conftest import make_documents

from recipe.config import UserError
from recipe.data.text import TextSource, cut_at_line, read_files, read_standard_library, split_documents


def write_all_kinds(folder: Path, documents: list[str]) -> dict[str, Path]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t, "n": 1}) + "\n" for t in documents))
    (folder / "a.json").write_text(json.dumps([{"text": t} for t in documents]))
    pq.write_table(pa.table({"text": documents}), folder / "a.parquet")
    return {kind: folder / f"a.{kind}" for kind in ("jsonl", "json", "parquet")}


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_rows_are_documents(tmp_path, kind):
    documents = make_documents(20)
    path = write_all_kinds(tmp_path, documents)[kind]
    assert list(read_files([str(path)], "text")) == documents


def test_a_text_file_is_one_document(tmp_path):
    """With its line ends and blank lines as they are."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"file {name}\r\n\n\nend", newline="")
    paths = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    assert list(read_files(paths, "text")) == ["file a\r\n\n\nend", "file b\r\n\n\nend"]


def test_split_is_by_document_exact_and_reproducible():
    """5% of 200 documents is 10; equal documents fall on the same side."""
    documents = make_documents(200) + make_documents(200)[:30]
    split = list(split_documents(documents, 5.0))
    assert [text for _, text in split] == documents
    train = {text for name, text in split if name == "train"}
    validation = {text for name, text in split if name == "validation"}
    assert len(validation) == 10 and not train & validation
    assert split == list(split_documents(iter(documents), 5.0))


def test_split_of_a_large_corpus_is_streamed(monkeypatch):
    """Beyond the documents that are held back the share is met on average, and documents are read one by one."""
    import recipe.data.text as text_module

    monkeypatch.setattr(text_module, "SMALL_CORPUS_DOCUMENTS", 10)
    drawn = []

    def read():
        for i in range(5000):
            drawn.append(i)
            yield f"text {i}"

    stream = split_documents(read(), 20.0)
    next(stream)
    assert len(drawn) <= 11
    share = sum(name == "validation" for name, _ in stream) / 5000
    assert 0.17 < share < 0.23


@pytest.mark.parametrize("count", [2, 3, 7])
def test_a_few_documents_still_give_both_splits(count):
    names = {name for name, _ in split_documents(make_documents(count), 5.0)}
    assert names == {"train", "validation"}


def test_one_text_gives_its_tail_for_validation(tmp_path):
    """A single text is cut after a line; both parts together are the text."""
    text = "".join(f"line {i}\n" for i in range(1000))
    (tmp_path / "a.txt").write_text(text)
    (_, head), (_, tail) = list(TextSource(train_files=(str(tmp_path / "a.txt"),)).splits())
    assert head + tail == text and head.endswith("\n") and 0.94 < len(head) / len(text) < 0.95
    assert cut_at_line("no line break", 0.5) == ("no lin", "e break")


def test_validation_file(tmp_path):
    (tmp_path / "a.txt").write_text("train text")
    (tmp_path / "b.txt").write_text("validation text")
    source = TextSource(train_files=(str(tmp_path / "a.txt"),), validation_files=(str(tmp_path / "b.txt"),))
    assert list(source.splits()) == [("train", "train text"), ("validation", "validation text")]


@pytest.mark.parametrize("on_disk", [True, False])
def test_local_datasets(tmp_path, on_disk):
    """`dataset_name` takes a folder written by save_to_disk and a folder of data files; their splits are kept."""
    import datasets

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
    found = list(TextSource(dataset_name=str(tmp_path / "data")).splits())
    assert found == [("train", t) for t in train] + [("validation", t) for t in validation]


def test_fingerprint_follows_the_content(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    source = TextSource(train_files=(str(path),))
    assert source.fingerprint == TextSource(train_files=(str(path),)).fingerprint
    assert source.fingerprint != TextSource(train_files=(str(path),), validation_split_percentage=6).fingerprint
    path.write_text("two")
    assert source.fingerprint != TextSource(train_files=(str(path),)).fingerprint


def test_the_standard_library_is_a_corpus():
    """Prose and sources of the running interpreter, megabytes of it, without tests."""
    documents = list(read_standard_library())
    assert sum(map(len, documents)) > 2_000_000
    assert any("def dataclass(" in text for text in documents)
    assert not any("test.support" in text[:200] for text in documents)


def test_an_interpreter_without_sources(tmp_path, monkeypatch):
    import sysconfig

    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match="pass --train_file"):
        list(read_standard_library())


def bad_sources(folder: Path) -> dict[str, tuple[TextSource, str]]:
    files = {
        "latin.txt": "Stra\xdfe".encode("latin-1"),
        "empty.txt": b"",
        "blank.txt": b" \n\t\n",
        "a.pdf": b"x",
        "broken.jsonl": b'{"text": "a"}\n{"text": \n',
        "column.jsonl": b'{"body": "a", "id": 1}\n',
        "number.jsonl": b'{"text": 3}\n',
        "broken.parquet": b"PAR1 not really",
        "ok.txt": b"fine",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)

    def files_of(*names):
        return lambda: TextSource(train_files=tuple(str(folder / n) for n in names))

    return {
        "missing": (files_of("gone.txt"), "there is no file"),
        "kind": (files_of("a.pdf"), "use .txt, .jsonl, .json, .parquet files"),
        "bytes": (files_of("latin.txt"), "is not UTF-8 text: .* at byte 4"),
        "empty": (files_of("empty.txt"), "empty.txt is empty"),
        "blank": (files_of("blank.txt"), "blank.txt is empty"),
        "json": (files_of("broken.jsonl"), "cannot read .*broken.jsonl as json"),
        "parquet": (files_of("broken.parquet"), "cannot read .*broken.parquet as parquet"),
        "column": (files_of("column.jsonl"), "no column 'text'; pass --text_column_name with one of body, id"),
        "type": (files_of("number.jsonl"), "column 'text' holds int, not text"),
        "none": (TextSource, "one of them"),
        "both": (lambda: TextSource(train_files=(str(folder / "ok.txt"),), dataset_name="x"), "one of them"),
        "share": (
            lambda: TextSource(train_files=(str(folder / "ok.txt"),), validation_split_percentage=100),
            "between 0 and 100",
        ),
        "dataset": (lambda: TextSource(dataset_name=str(folder / "nowhere")), "cannot open dataset"),
    }


@pytest.mark.parametrize(
    "case",
    [
        "missing",
        "kind",
        "bytes",
        "empty",
        "blank",
        "json",
        "parquet",
        "column",
        "type",
        "none",
        "both",
        "share",
        "dataset",
    ],
)
def test_bad_text(tmp_path, case):
    """Bad input names the file and what is wrong with it."""
    make_source, expected = bad_sources(tmp_path)[case]
    with pytest.raises(UserError, match=expected):
        list(make_source().splits())
