"""A packed dataset holds the rows of its units, and no kill, array or second command changes one of them."""

import contextlib
import dataclasses
import errno
import json
import os
import pickle
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import BLOCK_SIZE, PLAIN, ROOT, TINY, VOCAB_SIZE, make_documents, read_events, run_script
from hub_repository import File, Repository
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from recipe.command_line import load_config
from recipe.config import SPLITS
from recipe.data import prepare
from recipe.data.cache import open_dataset_for
from recipe.data.packed import PackedSplit, TokenWriter, open_packed_dataset, read_metadata
from recipe.data.prepare import prepare_dataset
from recipe.data.read import ReadReport, list_units, read_unit
from recipe.data.source import TextSource
from recipe.data.tokenizer import (
    count_token_bytes,
    load_tokenizer,
    read_tokenizer,
    tokenizer_sha256,
    train_tokenizer,
)
from recipe.errors import UserError


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    return read_tokenizer(str(tokenizer_dir))


@pytest.fixture
def source(jsonl_file, small_units, monkeypatch):
    """A source of several units."""
    monkeypatch.setattr("recipe.data.cut.SMALLEST_UNIT", 12_000)
    source = TextSource((str(jsonl_file),))
    assert 4 < len(list_units(source)) < 12
    return source


@pytest.fixture(scope="module")
def expected(tmp_path_factory, jsonl_file, tokenizer):
    """The metadata of that source, prepared by one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recipe.data.cut.SMALL_SOURCE", 1000)
        patch.setattr("recipe.data.cut.SMALLEST_UNIT", 12_000)
        directory = tmp_path_factory.mktemp("expected") / "d"
        return prepare_dataset(TextSource((str(jsonl_file),)), directory, tokenizer, num_workers=1)


DATASET = ["dataset_dict.json", "metadata.json", "tokenizer", "train", "validation"]


def write_jsonl(path: Path, texts: list, column: str = "text") -> str:
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def all_rows(split: PackedSplit) -> np.ndarray:
    return split[np.arange(len(split))] if len(split) else np.empty((0, split.block_size + 1), np.int64)


# ------------------------------------------------------------------ rows


def encode_plainly(tokenizer_dir: Path, texts: list[str]) -> list[int]:
    """Return the ids that tokenizers has for documents, each with an end-of-text id after it."""
    backend = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    backend.encode_special_tokens = True
    end = backend.token_to_id("<|endoftext|>")
    return [i for text in texts for i in [*backend.encode(text).ids, end]]


CORPORA = {
    "documents": lambda folder: TextSource((write_jsonl(folder / "a.jsonl", make_documents(300)),)),
    "one text": lambda folder: TextSource((write_text(folder / "a.txt"),)),
    "validation file": lambda folder: TextSource((write_text(folder / "a.txt"),), (write_text(folder / "b.txt"),)),
}


def write_text(path: Path) -> str:
    path.write_text("".join(make_documents(200)) + " <|endoftext|> is text\n")
    return str(path)


@pytest.mark.parametrize("name", CORPORA)
def test_rows_and_counts_are_those_of_a_plain_encoding(tmp_path, small_units, tokenizer_dir, tokenizer, name):
    """Row i holds tokens [i*T, i*T + T + 1) of the stream, whatever T is. `datasets` opens it and reads the stream."""
    source = CORPORA[name](tmp_path)
    metadata = prepare_dataset(source, tmp_path / "d", tokenizer)
    loaded = datasets.load_from_disk(str(tmp_path / "d"))
    documents = [document for unit in list_units(source) for document in read_unit(source, unit, ReadReport())]
    assert len(list_units(source)) > 9
    for split in SPLITS:
        texts = [text for of, text in documents if of == split]
        stream = encode_plainly(tokenizer_dir, texts)
        assert loaded[split].with_format("numpy")["input_ids"][:].tolist() == stream
        for size in (1, 8, BLOCK_SIZE, len(stream) - 1):
            rows = [stream[i : i + size + 1] for i in range(0, len(stream) - size, size)]
            opened = PackedSplit(tmp_path / "d" / split, metadata["splits"][split]["chunks"], size, VOCAB_SIZE)
            np.testing.assert_array_equal(all_rows(opened), rows)
        counts = metadata["splits"][split]
        assert counts["documents"] == len(texts) and counts["tokens"] == len(stream)
        assert counts["bytes"] == len("".join(texts).encode())
        assert counts["used_ids"] == len(set(stream))
    assert loaded["train"].features["input_ids"].dtype == "uint16"


@pytest.mark.parametrize("batch_tokens", [1, 100, 10**6])
@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "uint16"), (65_537, "int32")])
def test_every_token_is_a_target_exactly_once(tmp_path, monkeypatch, batch_tokens, vocab_size, dtype):
    """In one chunk or many. Ids take two bytes if the vocabulary allows it."""
    monkeypatch.setattr("recipe.data.packed.BATCH_TOKENS", batch_tokens)
    writer = TokenWriter(tmp_path / "a.arrow", vocab_size)
    stream = np.arange(vocab_size - 1000, vocab_size)
    for piece in np.split(stream, [3, 4, 90, 500, 501]):
        writer.write(piece)
    writer.close()
    split = PackedSplit(tmp_path, [["a.arrow", *chunk] for chunk in writer.chunks], 8, vocab_size)
    assert len(split) == 999 // 8 and split.chunks[0].dtype == dtype
    assert (len(split.chunks) > 1) == (batch_tokens < 1000)
    np.testing.assert_array_equal(all_rows(split)[:, 1:].reshape(-1), stream[1 : 1 + 124 * 8])
    np.testing.assert_array_equal(all_rows(split)[:, :-1].reshape(-1), stream[: 124 * 8])
    np.testing.assert_array_equal(split.in_memory()[np.arange(124)], all_rows(split))
    with pa.OSFile(str(tmp_path / "a.arrow")) as file:
        np.testing.assert_array_equal(pa.ipc.open_stream(file).read_all().column(0), stream)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_token_ids_are_packed_like_their_text(tmp_path, documents, tokenizer_dir, tokenizer, kind):
    """A column of ids has the rows and counts of its text."""
    backend = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    for name, texts in (("a", documents[20:]), ("b", documents[:20])):
        rows = {"text": texts, "ids": [encoding.ids for encoding in backend.encode_batch(texts)]}
        pq.write_table(pa.table(rows), tmp_path / f"{name}.parquet")
        datasets.Dataset.from_dict(rows).to_json(tmp_path / f"{name}.jsonl")
    files = {
        f"{key}_files": (str(tmp_path / f"{name}.{kind}"),) for key, name in (("train", "a"), ("validation", "b"))
    }
    text, ids = (
        prepare_dataset(TextSource(**files, text_column_name=c), tmp_path / c, tokenizer) for c in ("text", "ids")
    )
    assert text["content_sha256"] == ids["content_sha256"] and text["splits"] == ids["splits"]
    with pytest.raises(UserError, match="is already tokenized; pass its --tokenizer_name"):
        prepare_dataset(TextSource(**files, text_column_name="ids"), tmp_path / "d", None, 300)


def test_a_document_ends_once(tmp_path, tokenizer):
    """Also one whose ids already end with the end-of-text id."""
    end = tokenizer.eos_token_id
    rows = [[5, 6], [7, 8, end], [9, end, end], []]
    source = TextSource((write_jsonl(tmp_path / "a.jsonl", rows),), (write_jsonl(tmp_path / "b.jsonl", [[1, 2]]),))
    prepare_dataset(source, tmp_path / "d", tokenizer)
    loaded = datasets.load_from_disk(str(tmp_path / "d"))["train"]
    assert loaded["input_ids"][:] == [5, 6, end, 7, 8, end, 9, end, end, end]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[7], [7, VOCAB_SIZE]], f"contains token id {VOCAB_SIZE}, but the tokenizer has {VOCAB_SIZE} tokens"),
        ([[7], [7, 70_000]], "contains token id 70000, "),  # as uint16 it would be 4464
        ([[7], [7, -5]], "token id"),
        ([[7], [8], [9], "a", "b", "c"], "some documents are text and some are token ids"),
    ],
)
def test_bad_token_ids_are_errors(tmp_path, tokenizer, rows, expected):
    source = TextSource((write_jsonl(tmp_path / "a.jsonl", 20 * rows),), validation_split_percentage=50)
    with pytest.raises(UserError, match=expected):
        prepare_dataset(source, tmp_path / "d", tokenizer)


# ------------------------------------------------------------------ once


def test_a_prepared_dataset_is_opened(tmp_path, jsonl_file, tokenizer, capsys):
    """Also from a copy of the text, elsewhere and from another time. Any other text or option is an error.

    A strict run is one: it does not accept what a lenient run may have skipped.
    """
    lenient = TextSource((str(jsonl_file),), skip_bad_files=True)
    prepare_dataset(lenient, tmp_path / "d", tokenizer)
    with pytest.raises(UserError, match="was prepared from different text or options, .*; pass --overwrite"):
        prepare_dataset(TextSource((str(jsonl_file),)), tmp_path / "d", tokenizer)
    made = prepare_dataset(TextSource((str(jsonl_file),)), tmp_path / "d", tokenizer, overwrite=True)
    written_at = (tmp_path / "d" / "metadata.json").stat().st_mtime_ns
    (tmp_path / "copy").mkdir()
    copy = Path(shutil.copy(jsonl_file, tmp_path / "copy"))
    os.utime(copy, (1e9, 1e9))
    source = TextSource((str(copy),))
    capsys.readouterr()
    for overwrite in (False, True):
        assert prepare_dataset(source, tmp_path / "d", tokenizer, overwrite=overwrite) == made
    assert capsys.readouterr().out == 2 * f"{tmp_path / 'd'} is already prepared\n"
    assert (tmp_path / "d" / "metadata.json").stat().st_mtime_ns == written_at
    content = copy.read_bytes()
    copy.write_bytes(content.replace(b"mat", b"hat", 1))
    for other in (TextSource((str(copy),)), lenient):
        with pytest.raises(UserError, match="was prepared from different text or options, .*; pass --overwrite"):
            prepare_dataset(other, tmp_path / "d", tokenizer)


@pytest.fixture
def hub_dataset(hub, tmp_path, monkeypatch):
    """Write commits to a dataset with two configurations on a stand-in for the Hub."""
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.endpoint)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    repository = hub.repositories["datasets/org/data"] = Repository(False)
    card = "---\nconfigs:\n- config_name: a\n  data_files: a/*.jsonl\n- config_name: b\n  data_files: b/*.jsonl\n---\n"

    def commit(**texts: list[str]) -> str:
        files = {f"{name}/1.jsonl": "".join(json.dumps({"text": t}) + "\n" for t in of) for name, of in texts.items()}
        files["README.md"] = card + secrets.token_hex(4)
        return repository.write_commit("main", None, "", {n: File(t.encode(), False) for n, t in files.items()})

    return commit


def test_a_hub_dataset_is_one_commit_and_the_files_of_its_configuration(tmp_path, tokenizer_dir, hub, hub_dataset):
    """A push of other files is the same dataset; without the Hub, what is prepared is used."""
    documents = make_documents(200)
    first = hub_dataset(a=documents, b=["other"])
    argv = ["--dataset_name", "org/data", "--dataset_config_name", "a", "--tokenizer_name", str(tokenizer_dir)]
    argv += ["--cache_dir", str(tmp_path / "cache"), "--block_size", "16"]

    def open_with(*options: str):
        return open_dataset_for(load_config([*argv, *options])[0])

    made, source = open_with(), TextSource(dataset_name="org/data", dataset_config_name="a")
    assert made.metadata["source"]["dataset_revision"] == source.commit == first
    assert made.metadata["splits"]["train"]["documents"] + made.metadata["splits"]["validation"]["documents"] == 200
    second = hub_dataset(a=documents, b=["new", "files"])
    assert open_with().directory == made.directory
    third = hub_dataset(a=documents[:150], b=["new", "files"])
    newest = open_with()
    assert newest.metadata["source"]["dataset_revision"] == third and newest.directory != made.directory
    assert open_with("--dataset_revision", second).directory == made.directory
    sent = pickle.loads(pickle.dumps(source))  # to a process that tokenizes, after the pushes
    assert sent.commit == first and len(list(read_unit(sent, list_units(sent)[0], ReadReport()))) == 200
    hub.fail("api/datasets", 503, None)
    assert open_with().directory == newest.directory
    assert open_with("--dataset_revision", first).directory == made.directory
    with pytest.raises(UserError, match="cannot open dataset org/data"):
        open_with("--dataset_revision", "0" * 40)


def test_a_resumed_run_reads_the_commit_that_it_began_with(tmp_path, tokenizer_dir, train, hub_dataset, monkeypatch):
    """Also when the Hub has a newer one, and the prepared text is gone."""
    monkeypatch.chdir(tmp_path)
    first = hub_dataset(a=make_documents(200), b=["other"])
    data = ["--dataset_name", "org/data", "--dataset_config_name", "a", "--tokenizer_name", tokenizer_dir]
    run = [*data, *TINY, *PLAIN, "--global_batch_size", 4, "--output_dir", "run", "--resume_from_checkpoint", "auto"]
    train(*run, "--max_steps", 1, alone=True)
    hub_dataset(a=make_documents(200, seed=1), b=["other"])
    shutil.rmtree("runs")
    train(*run, "--max_steps", 2, alone=True)
    assert [event["step"] for event in read_events(tmp_path / "run", "train")] == [1, 2]
    assert f"dataset_revision: {first}\n" in (tmp_path / "run" / "training_config.yaml").read_text()


def test_a_run_keeps_the_dataset_that_is_replaced(tmp_path, jsonl_file, tokenizer):
    """Its rows stay what they were."""
    prepare_dataset(TextSource((str(jsonl_file),)), tmp_path / "d", tokenizer)
    opened = open_packed_dataset(tmp_path / "d", 16)
    rows = all_rows(opened.train)
    other = TextSource((write_jsonl(tmp_path / "a.jsonl", make_documents(300, seed=7)),))
    prepare_dataset(other, tmp_path / "d", tokenizer, overwrite=True)
    np.testing.assert_array_equal(all_rows(opened.train), rows)
    assert not np.array_equal(all_rows(open_packed_dataset(tmp_path / "d", 16).train)[:50], rows[:50])


def damage(directory: Path, how: str) -> None:
    rows, metadata = directory / "train" / "00000.arrow", json.loads((directory / "metadata.json").read_text())
    changes = {"other format": {"format_version": 99}, "fewer ids": {"vocab_size": 100}}
    if how == "truncated":
        rows.write_bytes(rows.read_bytes()[:-100])
    elif how == "no rows":
        rows.unlink()
    elif how == "no metadata":
        (directory / "metadata.json").unlink()
    elif how == "broken metadata":
        (directory / "metadata.json").write_text("{")
    elif how == "other tokenizer":
        train_tokenizer(make_documents(50, seed=9), 300).save_pretrained(directory / "tokenizer")
    else:
        (directory / "metadata.json").write_text(json.dumps(metadata | changes[how]))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("truncated", "train/00000.arrow has [0-9]+ bytes instead of [0-9]+"),
        ("no rows", "is not a complete packed dataset .*00000.arrow"),
        ("no metadata", "is not a complete packed dataset .*metadata.json"),
        ("broken metadata", "is not a complete packed dataset"),
        ("other format", "has format 99"),
        ("fewer ids", "beyond its vocabulary of 100"),
        ("other tokenizer", "is not the tokenizer that made this dataset"),
    ],
)
def test_damaged_datasets_do_not_open(tmp_path, dataset_dir, how, expected):
    """The error names the damage."""
    shutil.copytree(dataset_dir, tmp_path / "copy")
    damage(tmp_path / "copy", how)
    with pytest.raises(UserError, match=expected):
        opened = open_packed_dataset(tmp_path / "copy", BLOCK_SIZE)
        assert opened.tokenizer
        all_rows(opened.train)


@pytest.mark.parametrize("how", ["truncated", "broken metadata", "other format"])
def test_a_damaged_dataset_is_prepared_again(tmp_path, jsonl_file, tokenizer_dir, tokenizer, how):
    """The script does it on request, and recipe/train.py automatically in its cache."""
    source = TextSource((str(jsonl_file),))
    made = prepare_dataset(source, tmp_path / "d", tokenizer)
    damage(tmp_path / "d", how)
    with pytest.raises(UserError, match="--overwrite"):
        prepare_dataset(source, tmp_path / "d", tokenizer)
    assert prepare_dataset(source, tmp_path / "d", tokenizer, overwrite=True) == made
    argv = ["--train_file", str(jsonl_file), "--tokenizer_name", str(tokenizer_dir), "--block_size", "16"]
    config = load_config([*argv, "--cache_dir", str(tmp_path / "cache")])[0]
    cached = open_dataset_for(config)
    damage(cached.directory, how)
    assert open_dataset_for(config).metadata == cached.metadata


def test_overwrite_replaces_packed_datasets_only(tmp_path, jsonl_file, tokenizer):
    """Other folders are never removed, and an old dataset is removed only when the new one is complete."""
    source = TextSource((str(jsonl_file),))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(UserError, match="is not a packed dataset; choose another folder"):
        prepare_dataset(source, tmp_path / "home", tokenizer, overwrite=True)
    assert (tmp_path / "home" / "thesis.txt").exists()
    (tmp_path / "d").mkdir()
    prepare_dataset(source, tmp_path / "d", tokenizer)  # an empty folder is fine
    (tmp_path / "one.jsonl").write_text('{"text": "a"}')
    with pytest.raises(UserError, match="no two different documents"):
        prepare_dataset(TextSource((str(tmp_path / "one.jsonl"),)), tmp_path / "d", tokenizer, overwrite=True)
    assert open_packed_dataset(tmp_path / "d", 16)


@pytest.mark.parametrize("number", range(6))
def test_an_interruption_at_the_end_loses_nothing(tmp_path, jsonl_file, tokenizer, monkeypatch, number):
    """Whatever it precedes: the folder holds the older dataset or none, and the next run completes the newer one."""
    source, directory = TextSource((str(jsonl_file),)), tmp_path / "d"
    old = prepare_dataset(dataclasses.replace(source, skip_bad_files=True), directory, tokenizer)
    rename, replace, renamed = os.rename, prepare.replace_dataset, []

    def rename_until(a, b):
        if len(renamed) == number:
            raise KeyboardInterrupt
        renamed.append(b)
        rename(a, b)

    def replace_until(*arguments):
        monkeypatch.setattr(os, "rename", rename_until)
        replace(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare, "replace_dataset", replace_until)
        prepare_dataset(source, directory, tokenizer, overwrite=True)
    monkeypatch.setattr(os, "rename", rename)
    if number == 0:
        assert read_metadata(directory) == old
    else:
        with pytest.raises(UserError, match="it has no metadata.json"):
            read_metadata(directory)
    monkeypatch.setattr(prepare, "tokenize_units", lambda *_: 1 / 0)  # all units are done
    made = prepare_dataset(source, directory, tokenizer, overwrite=number == 0)
    assert made["fingerprint"] != old["fingerprint"] and len(all_rows(open_packed_dataset(directory, 16).train))
    assert sorted(path.name for path in directory.iterdir()) == DATASET
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


# ------------------------------------------------------------------ several processes, kills and arrays


def write_parquet(path: Path, texts: list[str]) -> str:
    pq.write_table(pa.table({"text": texts}), path, row_group_size=20)
    return str(path)


def write_separated(path: Path, texts: list[str]) -> str:
    path.write_bytes("<sep>".join(texts).encode())
    return str(path)


FORMATS = {
    "jsonl": lambda folder: write_jsonl(folder / "a.jsonl", make_documents(300)),
    "parquet": lambda folder: write_parquet(folder / "a.parquet", make_documents(300)),
    "separated text": lambda folder: write_separated(folder / "a.txt", make_documents(300)),
    "files": lambda folder: [write_jsonl(folder / f"{n}.jsonl", make_documents(99, seed=n)) for n in range(3)],
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_way_to_prepare_gives_the_same_dataset(tmp_path, small_units, monkeypatch, tokenizer, name):
    """By one process, by several, by the jobs of an array in any order, and after a power cut shortened a unit."""
    monkeypatch.setattr("recipe.data.cut.SMALLEST_UNIT", 12_000)
    (tmp_path / "text").mkdir()
    files = FORMATS[name](tmp_path / "text")
    source = TextSource(tuple(files if isinstance(files, list) else [files]), document_separator="<sep>")
    assert len(list_units(source)) > 3
    expected = prepare_dataset(source, tmp_path / "one", tokenizer, num_workers=1)
    assert prepare_dataset(source, tmp_path / "several", tokenizer, num_workers=2) == expected
    for index in (2, 0):
        assert prepare_dataset(source, tmp_path / "array", tokenizer, share=slice(index, None, 3)) is None
        assert not (tmp_path / "array" / "metadata.json").exists()
    assert prepare_dataset(source, tmp_path / "array", tokenizer, share=slice(0)) is None  # --finish is too early
    made = prepare_dataset(source, tmp_path / "array", tokenizer, share=slice(1, None, 3))
    assert made == expected
    assert prepare_dataset(source, tmp_path / "cut", tokenizer, share=slice(2)) is None
    (file,) = tmp_path.glob("cut/.*.partial/train/00001.arrow")
    file.write_bytes(file.read_bytes()[:1000])
    assert prepare_dataset(source, tmp_path / "cut", tokenizer) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["array", "cut", "one", "several", "text"]


def start_script(unit_bytes: int, **options: object) -> subprocess.Popen:
    """Run scripts/prepare_data.py with small units."""
    code = (
        "import runpy, sys; from recipe.data import cut; cut.SMALL_SOURCE = cut.SMALLEST_UNIT = "
        f"{unit_bytes}; runpy.run_path('{ROOT}/scripts/prepare_data.py', run_name='__main__')"
    )
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_killed_preparation_repeats_no_finished_unit(tmp_path, small_units, monkeypatch, tokenizer_dir, tokenizer):
    """Its processes end with it, and the same command gives the dataset of an uninterrupted one."""
    monkeypatch.setattr("recipe.data.cut.SMALLEST_UNIT", 1_500_000)
    documents = make_documents(1000)
    file = write_jsonl(tmp_path / "a.jsonl", [f"{number} {text}" for number in range(30) for text in documents])
    source, options = TextSource((file,)), {"train_file": file, "tokenizer_name": tokenizer_dir}
    owner = start_script(1_500_000, **options, output_dir=tmp_path / "d", preprocessing_num_workers=2)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("d/.*.partial/units/*.json")) and time.monotonic() < deadline:
        time.sleep(0.005)
    workers = psutil.Process(owner.pid).children()
    owner.send_signal(signal.SIGKILL)
    _, err = owner.communicate()  # and its processes
    assert len(workers) == 2 and not psutil.wait_procs(workers, timeout=20)[1] and "Traceback" not in err
    (partial,) = (tmp_path / "d").iterdir()
    done = [f"{path.stem}.arrow" for path in (partial / "units").glob("*.json")]
    written_at = {name: (partial / "train" / name).stat().st_mtime_ns for name in done}
    assert 0 < len(done) < len(list_units(source))
    made = prepare_dataset(source, tmp_path / "d", tokenizer)
    assert {name: (tmp_path / "d" / "train" / name).stat().st_mtime_ns for name in done} == written_at
    assert made == prepare_dataset(source, tmp_path / "e", tokenizer)
    left = {path.name for split in SPLITS for path in (tmp_path / "d" / split).glob(".*")}
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == DATASET and not left


def test_jobs_and_commands_run_at_once(tmp_path, jsonl_file, expected, tokenizer_dir):
    """Two jobs of an array give one dataset, and so does a command that runs twice."""
    options = {"train_file": jsonl_file, "tokenizer_name": tokenizer_dir}
    options["preprocessing_num_workers"] = 1
    jobs = [
        start_script(12_000, **options, output_dir=tmp_path / "a", num_shards=2, shard_index=index)
        for index in range(2)
    ]
    jobs += [start_script(12_000, **options, output_dir=tmp_path / "b") for _ in range(2)]
    for job in jobs:
        out, err = job.communicate(timeout=120)
        assert job.returncode == 0, out + err
    for name in "ab":
        assert read_metadata(tmp_path / name) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize(("overwrite", "num_done"), [(False, 0), (True, 0), (True, 2)])
def test_another_command_finishes_first(tmp_path, source, tokenizer, expected, monkeypatch, overwrite, num_done):
    """The dataset that it has made is used, and nothing remains beside it. Some units may be done before."""
    choose, others = prepare.choose_encoder, []
    for index in range(num_done):
        assert prepare_dataset(source, tmp_path / "d", tokenizer, share=slice(index, index + 1)) is None

    def choose_later(*arguments):
        if not others:
            others.append(1)
            prepare_dataset(source, tmp_path / "d", tokenizer, num_workers=1)
        return choose(*arguments)

    monkeypatch.setattr(prepare, "choose_encoder", choose_later)
    made = prepare_dataset(source, tmp_path / "d", tokenizer, num_workers=1, overwrite=overwrite)
    assert made == expected and [path.name for path in tmp_path.iterdir()] == ["d"]


def test_two_commands_replace_a_dataset_at_once(tmp_path, source, tokenizer, expected, monkeypatch):
    """With all units done, both would move what has the name; the new dataset stays."""
    rename, num_units = os.rename, len(list_units(source))

    def rename_slowly(a, b):
        time.sleep(0.02)
        rename(a, b)
        time.sleep(0.02)

    monkeypatch.setattr(os, "rename", rename_slowly)
    for folder in (tmp_path / "a", tmp_path / "b"):
        prepare_dataset(dataclasses.replace(source, skip_bad_files=True), folder / "d", tokenizer)
        for index in range(num_units):
            with monkeypatch.context() as patch, contextlib.suppress(ZeroDivisionError):
                patch.setattr(prepare, "summarize", lambda *_: 1 / 0)
                share = slice(index, index + 1)
                prepare_dataset(source, folder / "d", tokenizer, overwrite=True, share=share, num_workers=1)
        with ThreadPoolExecutor() as threads:
            jobs = [threads.submit(prepare_dataset, source, folder / "d", tokenizer, overwrite=True) for _ in range(2)]
            assert [job.result() for job in jobs] == [expected, expected]
        assert read_metadata(folder / "d") == expected and [path.name for path in folder.iterdir()] == ["d"]


def test_a_full_disk_is_one_sentence(tmp_path, source, tokenizer, expected, monkeypatch):
    """Nothing appears under the final name, and the same command resumes when there is space."""
    num_units, write, written = len(list_units(source)), TokenWriter.write, []
    for index in range(num_units - 1):
        assert prepare_dataset(source, tmp_path / "d", tokenizer, share=slice(index, index + 1)) is None

    def write_until_full(self, ids):
        written.append(self)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(TokenWriter, "write", write_until_full)
        with pytest.raises(UserError, match="No space left on device; the finished units are kept, .* resumes"):
            prepare_dataset(source, tmp_path / "d", tokenizer)
    assert written and not list((tmp_path / "d").glob("[!.]*")) and not list(tmp_path.glob("d/.*/train/.*"))
    patched = []
    monkeypatch.setattr(TokenWriter, "write", lambda self, ids: patched.append(self.path) or write(self, ids))
    assert prepare_dataset(source, tmp_path / "d", tokenizer) == expected
    assert {path.parent.parent for path in patched} and len(set(patched)) <= 2  # one unit, two splits


# ------------------------------------------------------------------ too little text, and what is said


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("blank.txt", " \n\t\r\n", "there is no text in .*blank.txt"),
        ("rows.jsonl", '{"text": ""}\n{"text": null}\n', "there is no text in .*rows.jsonl"),
        ("none.csv", "text\n", "there is no text in .*none.csv"),
        ("a.jsonl", '{"body": "x", "id": 1}\n', "has no column 'text'; pass --text_column_name with one of body"),
        ("b.jsonl", '{"messages": [{"role": "user"}], "id": 1}\n', "no column 'text', and no other column holds text"),
        ("c.csv", f"{'a sentence ' * 10},2\n1,2\n", "; if that is text, insert a first line that names the columns"),
        ("d.csv", "a,b\nhello,2\n", "pass --text_column_name with one of a, b; if that is text, insert"),
        ("a.jsonl", "{", "what cannot be read: 1; the first: cannot read .*a.jsonl"),
        (
            "one.jsonl",
            json.dumps({"text": "word " * 900}),
            "no two different documents, .* pass a --validation_file, or a --document_sep",
        ),
    ],
)
def test_text_that_makes_no_dataset_is_an_error(tmp_path, tokenizer, name, content, expected):
    """The sentence names the file, the columns, or what to pass instead."""
    (tmp_path / name).write_text(content)
    source = TextSource((str(tmp_path / name),), skip_bad_files=True)
    with pytest.raises(UserError, match=expected):
        prepare_dataset(source, tmp_path / "d", tokenizer)


@pytest.mark.parametrize("kind", ["a.txt", "a.jsonl"])
def test_the_options_advised_for_a_short_text_work(tmp_path, kind):
    """Each option that the error names prepares a text of 3 kB."""
    documents = make_documents(12)
    (tmp_path / kind).write_text("".join(documents))
    if kind == "a.jsonl":
        write_jsonl(tmp_path / kind, documents)
    (tmp_path / "validation.txt").write_text("".join(make_documents(20, seed=4)))
    source = TextSource((str(tmp_path / kind),))

    def prepare_and_open(source, name, block_size=256):
        prepare_dataset(source, tmp_path / name, None, 2048)
        return open_packed_dataset(tmp_path / name, block_size)

    with pytest.raises(UserError, match=r"the validation text has .* of block_size \+ 1 = 257.*; pass more") as caught:
        prepare_and_open(source, "d")
    block_size = re.search(r"--block_size (\d+)", str(caught.value))[1]
    assert "--validation_file" in str(caught.value) and "--validation_split_percentage" in str(caught.value)
    given = dataclasses.replace(source, validation_files=(str(tmp_path / "validation.txt"),))
    more = dataclasses.replace(source, validation_split_percentage=45.0)
    assert prepare_and_open(source, "d", int(block_size))
    assert prepare_and_open(given, "v")
    assert prepare_and_open(more, "p")
    too_much = dataclasses.replace(source, validation_split_percentage=90.0)
    with pytest.raises(UserError, match="the train text has [0-9,]+ tokens, fewer than one row"):
        prepare_and_open(too_much, "t")


def test_what_is_not_in_the_dataset_is_said(tmp_path, jsonl_file, tokenizer, capsys):
    """Files of other kinds, rows without text, those of other columns, and a separator that never occurs."""
    (tmp_path / "text").mkdir()
    shutil.copy(jsonl_file, tmp_path / "text")
    (tmp_path / "text" / "paper.pdf").write_text("x")
    write_jsonl(tmp_path / "text" / "others.jsonl", ["x"] * 7, "body")
    write_jsonl(tmp_path / "text" / "zblank.jsonl", [None, " "])
    source = TextSource((str(tmp_path / "text"),), document_separator="<sep>")
    made = prepare_dataset(source, tmp_path / "d", tokenizer)
    out = capsys.readouterr().out
    for part in ("ignored: .pdf (1)", "null, empty or blank): 2\n", "column 'text': 7 (they have body)", "'<sep>'"):
        assert part in out
    assert made["source"]["blank_rows"] == 2
    (tmp_path / "text" / "c.txt").write_text("the end<sep>")
    prepare_dataset(dataclasses.replace(source), tmp_path / "e", tokenizer)
    assert "<sep>" not in capsys.readouterr().out


# ------------------------------------------------------------------ tokenizers


def test_a_small_text_gets_a_smaller_vocabulary(tmp_path, source, monkeypatch, capsys):
    """A message says so, and an interrupted preparation resumes with the same tokenizer."""
    made = prepare_dataset(source, tmp_path / "d", None, 2048, num_workers=1)
    vocab_size = made["vocab_size"]
    assert 257 < vocab_size < 2048 and vocab_size == len(load_tokenizer(str(tmp_path / "d" / "tokenizer")))
    assert f"trained a byte-level BPE of {vocab_size:,} tokens (the text is too small" in capsys.readouterr().out
    prepare_dataset(source, tmp_path / "d", None, 2048)
    assert capsys.readouterr().out == f"{tmp_path / 'd'} is already prepared\n"
    assert prepare_dataset(source, tmp_path / "e", None, 2048, share=slice(0, 1)) is None
    monkeypatch.setattr(prepare, "train_tokenizer", lambda *_: 1 / 0)
    assert prepare_dataset(source, tmp_path / "e", None, 2048, num_workers=1) == made


CONFIGS = {
    "GPT-2's on the Hub": {"model_max_length": 1024},
    "another class": {"eos_token": "<|endoftext|>", "tokenizer_class": "Qwen2Tokenizer"},
    "a dictionary": {"eos_token": {"content": "<|endoftext|>", "__type": "AddedToken"}, "add_bos_token": False},
    "a token to add": {"eos_token": "<|endoftext|>", "pad_token": "<pad>", "tokenizer_class": "GPT2Tokenizer"},
    "several to add": {"eos_token": "<|endoftext|>", "additional_special_tokens": ["<a>", "<b>"]},
    "another end": {"eos_token": "e", "tokenizer_class": "GPT2Tokenizer"},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_training_accepts_the_tokenizer_of_every_dataset(tmp_path, jsonl_file, tokenizer_dir, name):
    """Its ids are those of tokenizer.json, or of what transformers makes of the files if that adds tokens."""
    folder = tmp_path / "tokenizer"
    shutil.copytree(tokenizer_dir, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIGS[name]))
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = read_tokenizer(str(folder))
    is_read = list(CONFIGS).index(name) < 3
    prepare_dataset(TextSource((str(jsonl_file),)), tmp_path / "d", tokenizer)
    made = open_packed_dataset(tmp_path / "d", BLOCK_SIZE)
    loaded, expected = made.tokenizer, AutoTokenizer.from_pretrained(folder)
    assert loaded.eos_token_id == expected.eos_token_id == made.metadata["eos_token_id"]
    backend = Tokenizer.from_file(str(folder / "tokenizer.json")) if is_read else expected.backend_tokenizer
    assert loaded("the cat, it's 12")["input_ids"] == backend.encode("the cat, it's 12").ids


def test_a_dataset_must_match_the_run(tmp_path, dataset_dir, tokenizer_dir):
    """A different tokenizer is an error. It has rows of any length up to that of its validation text."""

    def open_for(*argv):
        return open_dataset_for(load_config(["--dataset_dir", str(dataset_dir), *argv])[0])

    assert open_for("--block_size", "64").train.block_size == 64
    with pytest.raises(UserError, match="the train text has .* fewer than one row"):
        open_for("--block_size", "65536")
    train_tokenizer(make_documents(50, seed=9), 300).save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="was made with another tokenizer"):
        open_for("--block_size", "32", "--tokenizer_name", str(tmp_path / "other"))
    assert open_for("--block_size", "32", "--tokenizer_name", str(tokenizer_dir)).vocab_size == VOCAB_SIZE
    with pytest.raises(UserError, match="there is no dataset"):
        open_packed_dataset(tmp_path / "gone", 32)


def test_unusable_tokenizers_are_errors(tmp_path, tokenizer_dir):
    """A tokenizer may be missing or lack an end-of-text token."""
    with pytest.raises(UserError, match="no tokenizer at 'nowhere'"):
        load_tokenizer("nowhere")
    with pytest.raises(UserError, match="there is no folder .*gone"):
        load_tokenizer(str(tmp_path / "gone"))
    (tmp_path / "old").mkdir()
    for name in ("vocab.json", "merges.txt"):  # what remains of a GPT-2 tokenizer of old
        (tmp_path / "old" / name).write_text("{}")
    with pytest.raises(UserError, match="no tokenizer_config.json in .*old; .*create it with .*GPT2Tokenizer"):
        load_tokenizer(str(tmp_path / "old"))
    load_tokenizer(str(tokenizer_dir)).save_pretrained(tmp_path / "no_eos")
    config = json.loads((tmp_path / "no_eos" / "tokenizer_config.json").read_text())
    config |= {"eos_token": None, "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "no_eos" / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="has no end-of-text token"):
        load_tokenizer(str(tmp_path / "no_eos"))


def test_identity_of_a_tokenizer_survives_saving(tmp_path, tokenizer_dir):
    """The hash changes only with the tokenizer."""
    tokenizer = load_tokenizer(str(tokenizer_dir))
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_sha256(load_tokenizer(str(tmp_path))) == tokenizer_sha256(tokenizer)
    assert tokenizer_sha256(train_tokenizer(make_documents(50, seed=9), 300)) != tokenizer_sha256(tokenizer)


def test_the_bytes_of_the_ids_of_a_text_are_its_bytes(tokenizer, tokenizer_dir):
    """Special tokens have none."""
    text = "".join(make_documents(50)) + "Ünï \U0001d518 猫\x00\r\n<|endoftext|>"
    counts = count_token_bytes(tokenizer)
    assert counts[encode_plainly(tokenizer_dir, [text])].sum() == len(text.encode())
    assert len(counts) == VOCAB_SIZE and counts[tokenizer.eos_token_id] == 0
    np.testing.assert_array_equal(counts, count_token_bytes(load_tokenizer(str(tokenizer_dir))))


# ------------------------------------------------------------------ the summary and the script


def test_the_script_prepares_finishes_and_inspects(tmp_path, source, jsonl_file, tokenizer_dir, capsys, monkeypatch):
    """--finish fails while units are missing, and completes a dataset whose last job was killed."""
    common = ["--train_file", jsonl_file, "--tokenizer_name", tokenizer_dir]
    common += ["--output_dir", tmp_path / "d", "--num_shards", 2]
    assert not run_script("scripts/prepare_data.py", *common, "--shard_index", 1)
    error = run_script("scripts/prepare_data.py", *common, "--finish")
    assert error.startswith("error: ") and not (tmp_path / "d" / "metadata.json").exists()
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(prepare, "summarize", lambda *_: 1 / 0)
        run_script("scripts/prepare_data.py", *common, "--shard_index", 0)
    capsys.readouterr()
    assert not run_script("scripts/prepare_data.py", *common, "--finish")
    printed = capsys.readouterr().out
    assert not run_script("scripts/prepare_data.py", "--inspect", tmp_path / "d")
    assert capsys.readouterr().out in printed and "share of the vocabulary in use" in printed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--inspect gone", "there is no dataset gone; create it with"),
        ("--inspect .", ". is not a complete packed dataset"),
        ("--inspect d --num_shards 8", "--inspect only reads a packed dataset, so --num_shards has no effect"),
        ("--train_file a.txt --tokenizer_name t", "pass --output_dir, the folder to create, or --inspect"),
        ("--train_file a.txt --output_dir d", "pass --tokenizer_name"),
        ("--train_file a.txt --output_dir d --num_shards 0", "num_shards must be at least 1, got 0"),
        ("--train_file a.txt --output_dir d --num_shards 2", "--shard_index 0 to N - 1"),
        ("--train_file a.txt --output_dir d --num_shards 2 --shard_index 2", "--shard_index 0 to N - 1"),
        ("--output_dir d --tokenizer_name t", "exactly one of --train_file and --dataset_name"),
        ("--train_file a.txt --output_dir d --validation_split_percentage 100", "between 0 and 100"),
    ],
)
def test_mistakes_on_the_command_line(tmp_path, monkeypatch, tokenizer_dir, arguments, expected):
    """Each is one sentence."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    if "percentage" in arguments:
        arguments += f" --tokenizer_name {tokenizer_dir}"
    error = run_script("scripts/prepare_data.py", *arguments.split())
    assert error.startswith("error: ") and expected in error and "\n" not in error


def test_preparing_and_inspecting_start_fast(tmp_path, jsonl_file, tokenizer_dir):
    """They import neither torch nor transformers nor datasets."""
    code = (
        "import runpy, sys; runpy.run_path('scripts/prepare_data.py', run_name='__main__'); "
        "print({'torch', 'transformers', 'datasets'} & set(sys.modules))"
    )
    arguments = ["--train_file", jsonl_file, "--tokenizer_name", tokenizer_dir, "--output_dir", tmp_path / "d"]
    for options in (arguments, ["--inspect", tmp_path / "d"]):
        command = [sys.executable, "-c", code, *map(str, options)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert result.stdout.endswith("\nset()\n"), result.stderr
