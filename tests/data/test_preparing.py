"""A dataset is prepared once, whoever prepares it, and no kill, full disk or second command changes it."""

import dataclasses
import errno
import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import numpy as np
import psutil
import pytest
from corpora import all_rows, start_program, texts_of, write_jsonl, write_parquet, write_text
from helpers import ROOT, make_documents
from transformers import PreTrainedTokenizerFast

from recipe.data import prepare
from recipe.data.pack import Packer
from recipe.data.packed import open_packed_dataset, read_metadata
from recipe.data.prepare import prepare_dataset
from recipe.data.read import BLANK, list_units
from recipe.data.source import TextSource
from recipe.data.tokenizer import load_tokenizer, tokenizer_sha256, train_tokenizer
from recipe.errors import UserError

SCRIPT = "scripts/prepare_data.py"


@pytest.fixture
def medium_units(small_units, monkeypatch):
    """Let a unit hold about 12,000 bytes of text."""
    monkeypatch.setattr("recipe.data.cut.SMALLEST_UNIT", 12_000)


@pytest.fixture
def source(jsonl_file, medium_units):
    """A source of several units."""
    source = TextSource((str(jsonl_file),))
    assert 4 < len(list_units(source)) < 12
    return source


@pytest.fixture
def expected(tmp_path_factory, source, tokenizer):
    """The metadata of that source, prepared by one process."""
    return prepare_dataset(source, tmp_path_factory.mktemp("expected") / "d", tokenizer, num_workers=1)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def names_of(metadata: dict) -> list[str]:
    """Return what is in the folder of a dataset, and nothing else."""
    return sorted([*metadata["files"], "tokenizer", "metadata.json"])


# ------------------------------------------------------------------ once


@pytest.fixture
def prepared(tmp_path, jsonl_file, tokenizer):
    """A dataset prepared from all of its text: its source and metadata. It is in tmp_path / "d"."""
    source = TextSource((str(jsonl_file),))
    (tmp_path / "d").mkdir()  # an empty folder may become one
    return source, prepare_dataset(source, tmp_path / "d", tokenizer)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_prepared_dataset_is_opened(tmp_path, prepared, jsonl_file, tokenizer, overwrite):
    """A copy of the text in another folder, with another time, opens the same dataset."""
    copy = Path(shutil.copy(jsonl_file, tmp_path))
    os.utime(copy, (1e9, 1e9))
    written_at = (tmp_path / "d" / "metadata.json").stat().st_mtime_ns
    assert prepare_dataset(TextSource((str(copy),)), tmp_path / "d", tokenizer, overwrite=overwrite) == prepared[1]
    assert (tmp_path / "d" / "metadata.json").stat().st_mtime_ns == written_at


def test_a_run_keeps_the_rows_of_a_dataset_that_is_replaced(tmp_path, prepared, tokenizer):
    """Which happens on request only."""
    opened = open_packed_dataset(tmp_path / "d", 16)
    rows = all_rows(opened.train)
    other = TextSource((write_jsonl(tmp_path / "a.jsonl", make_documents(300, seed=7)),))
    with pytest.raises(UserError, match="--overwrite"):
        prepare_dataset(other, tmp_path / "d", tokenizer)
    prepare_dataset(other, tmp_path / "d", tokenizer, overwrite=True)
    np.testing.assert_array_equal(all_rows(opened.train), rows)
    assert not np.array_equal(all_rows(open_packed_dataset(tmp_path / "d", 16).train)[:50], rows[:50])


def test_another_preparation_in_the_same_folder_loses_nothing(tmp_path, source, expected, tokenizer, capsys):
    """An unfinished one, of an array for example, keeps its units, and the command that ends first names them."""
    other = dataclasses.replace(source, validation_split_percentage=7.0)
    assert prepare_dataset(source, tmp_path / "d", tokenizer, share=slice(2)) is None
    units = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*-0000[01].bin")}
    prepare_dataset(other, tmp_path / "d", tokenizer)
    (partial,) = tmp_path.glob("d/.*.partial")
    assert partial.name in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in partial.glob("*.bin")} == units
    with pytest.raises(UserError, match="--overwrite"):
        prepare_dataset(source, tmp_path / "d", tokenizer)
    assert prepare_dataset(source, tmp_path / "d", tokenizer, overwrite=True) == expected
    assert names_in(tmp_path / "d") == names_of(expected)


def test_overwrite_never_removes_a_folder_that_is_not_a_dataset(tmp_path, jsonl_file, tokenizer):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(UserError, match="home"):
        prepare_dataset(TextSource((str(jsonl_file),)), tmp_path / "home", tokenizer, overwrite=True)
    assert names_in(tmp_path / "home") == ["thesis.txt"]


# ------------------------------------------------------------------ interruptions


@pytest.mark.parametrize("number", range(5))
def test_an_interruption_at_the_end_loses_nothing(tmp_path, prepared, tokenizer, monkeypatch, number):
    """Whatever it precedes: the folder holds the older dataset or none, and the next run completes the newer one."""
    source, old = prepared
    directory = tmp_path / "d"
    rename = os.rename
    renamed = []

    def rename_until(a, b):
        if prepare.COMPLETE_NAME in f"{a} {b}":
            if len(renamed) == number:
                raise KeyboardInterrupt
            renamed.append(b)
        rename(a, b)

    source = dataclasses.replace(source, validation_split_percentage=7.0)
    with patch("os.rename", rename_until), pytest.raises(KeyboardInterrupt):
        prepare_dataset(source, directory, tokenizer, overwrite=True)
    if number == 0:
        assert read_metadata(directory) == old
    else:
        assert not (directory / "metadata.json").exists()
    monkeypatch.setattr(prepare, "Job", lambda *_: 1 / 0)  # all units are done
    made = prepare_dataset(source, directory, tokenizer, overwrite=number == 0)
    assert made["fingerprint"] != old["fingerprint"]
    assert len(all_rows(open_packed_dataset(directory, 16).train))
    assert names_in(directory) == names_of(made) and names_in(tmp_path) == ["d"]


def test_a_killed_preparation_repeats_no_finished_unit(tmp_path, small_units, monkeypatch, tokenizer_dir, tokenizer):
    """The worker processes end, and the same command completes the dataset of an uninterrupted preparation."""
    monkeypatch.setattr("recipe.data.cut.SMALLEST_UNIT", 1_500_000)
    documents = make_documents(1000)
    file = write_jsonl(tmp_path / "a.jsonl", [f"{number} {text}" for number in range(30) for text in documents])
    options = ["--train_file", file, "--tokenizer_name", tokenizer_dir, "--output_dir", tmp_path / "d"]
    options += ["--preprocessing_num_workers", 2]
    owner = start_program("with_small_units.py", 1_500_000, ROOT / SCRIPT, *options)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("d/.*.partial/units/*.json")) and time.monotonic() < deadline:
        time.sleep(0.005)
    workers = psutil.Process(owner.pid).children()
    owner.kill()
    _, err = owner.communicate()  # and its processes
    assert len(workers) == 2 and not psutil.wait_procs(workers, timeout=20)[1] and "Traceback" not in err
    (partial,) = (tmp_path / "d").iterdir()
    done = [f"train-{path.stem}.bin" for path in (partial / "units").glob("*.json")]
    written_at = {name: (partial / name).stat().st_mtime_ns for name in done}
    source = TextSource((file,))
    assert 0 < len(done) < len(list_units(source))
    made = prepare_dataset(source, tmp_path / "d", tokenizer)
    assert {name: (tmp_path / "d" / name).stat().st_mtime_ns for name in done} == written_at
    assert made == prepare_dataset(source, tmp_path / "e", tokenizer)
    assert names_in(tmp_path / "d") == names_of(made)


def test_a_full_disk_costs_no_finished_unit(tmp_path, source, tokenizer, expected):
    """Nothing appears under the final name, and the same command resumes when there is space."""
    assert prepare_dataset(source, tmp_path / "d", tokenizer, share=slice(-1)) is None  # one unit is left
    units = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("units/*")}
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with patch.object(Packer, "write", side_effect=full), pytest.raises(UserError, match=full.strerror):
        prepare_dataset(source, tmp_path / "d", tokenizer)
    assert not list((tmp_path / "d").glob("[!.]*")) and not list(tmp_path.glob("d/.*/.train*"))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("units/*")} == units
    assert prepare_dataset(source, tmp_path / "d", tokenizer) == expected


def test_a_full_disk_leaves_no_part_of_a_tokenizer(tmp_path, source, tokenizer):
    """tokenizers raises no OSError, which has one sentence."""
    full = Exception(os.strerror(errno.ENOSPC))
    saving = patch.object(PreTrainedTokenizerFast, "save_pretrained", side_effect=full)
    with saving, pytest.raises(UserError, match=str(full)):
        prepare_dataset(source, tmp_path / "d", tokenizer)
    assert not list(tmp_path.rglob("tokenizer*"))


def test_a_tokenizer_is_trained_once_on_the_training_text_only(tmp_path, source, monkeypatch, capsys):
    """On all of it. The vocabulary is smaller than requested, and a message says so."""
    made = prepare_dataset(source, tmp_path / "d", None, 2048, num_workers=1)
    tokenizer = load_tokenizer(str(tmp_path / "d" / "tokenizer"))
    train, both = (train_tokenizer(texts_of(source, split), 2048) for split in ("train", None))
    assert tokenizer_sha256(tokenizer) == tokenizer_sha256(train) != tokenizer_sha256(both)
    assert 257 < made["vocab_size"] == len(tokenizer) < 2048
    assert f"{made['vocab_size']:,} of up to 2,048 tokens" in capsys.readouterr().out
    assert prepare_dataset(source, tmp_path / "e", None, 2048, share=slice(1)) is None
    monkeypatch.setattr(prepare, "train_tokenizer", lambda *_: 1 / 0)
    assert prepare_dataset(source, tmp_path / "e", None, 2048, num_workers=1) == made


# ------------------------------------------------------------------ several processes and commands


def test_every_way_to_prepare_gives_the_same_dataset(tmp_path, medium_units, tokenizer):
    """By one process, by several, by the jobs of an array in any order, and after a power cut shortened a unit."""
    (tmp_path / "text").mkdir()
    write_jsonl(tmp_path / "text" / "a.jsonl", make_documents(200))
    write_parquet(tmp_path / "text" / "b.parquet", make_documents(200, seed=1), row_group_size=20)
    write_text(tmp_path / "text" / "c.txt", "<sep>".join(make_documents(200, seed=2)))
    source = TextSource((str(tmp_path / "text"),), document_separator="<sep>")
    assert len(list_units(source)) > 9
    expected = prepare_dataset(source, tmp_path / "one", tokenizer, num_workers=1)
    assert prepare_dataset(source, tmp_path / "several", tokenizer, num_workers=2) == expected
    for index in (2, 0):
        assert prepare_dataset(source, tmp_path / "array", tokenizer, share=slice(index, None, 3)) is None
        assert not (tmp_path / "array" / "metadata.json").exists()
    assert prepare_dataset(source, tmp_path / "array", tokenizer, share=slice(1, None, 3)) == expected
    assert prepare_dataset(source, tmp_path / "cut", tokenizer, share=slice(2)) is None
    (file,) = tmp_path.glob("cut/.*.partial/train-00001.bin")
    file.write_bytes(file.read_bytes()[:1000])
    assert prepare_dataset(source, tmp_path / "cut", tokenizer) == expected
    assert names_in(tmp_path) == ["array", "cut", "one", "several", "text"]


def test_jobs_of_an_array_may_run_at_once(tmp_path, jsonl_file, source, expected, tokenizer_dir):
    """Each tokenizes its units, and all give one dataset."""
    options = ["--train_file", jsonl_file, "--tokenizer_name", tokenizer_dir, "--preprocessing_num_workers", 1]
    command = ["with_small_units.py", 12_000, ROOT / SCRIPT, *options, "--output_dir", tmp_path / "d"]
    jobs = [start_program(*command, "--num_shards", 2, "--shard_index", index) for index in range(2)]
    counts = []
    for job in jobs:
        out, err = job.communicate(timeout=120)
        assert job.returncode == 0, out + err
        counts.append(int(re.search(r"units: (\d+)", out)[1]))
    assert sum(counts) == len(list_units(source))
    assert read_metadata(tmp_path / "d") == expected
    assert names_in(tmp_path) == ["d"]


def test_a_dataset_that_another_command_finishes_first_is_used(tmp_path, source, tokenizer, expected, monkeypatch):
    """Nothing else remains in its folder. Some units are done before."""
    assert prepare_dataset(source, tmp_path / "d", tokenizer, share=slice(2)) is None
    choose = prepare.choose_encoder

    def choose_later(*arguments):
        monkeypatch.setattr(prepare, "choose_encoder", choose)
        prepare_dataset(source, tmp_path / "d", tokenizer, num_workers=1)
        return choose(*arguments)

    monkeypatch.setattr(prepare, "choose_encoder", choose_later)
    assert prepare_dataset(source, tmp_path / "d", tokenizer, num_workers=1, overwrite=True) == expected
    assert names_in(tmp_path / "d") == names_of(expected)


def test_two_commands_may_replace_a_dataset_at_once(tmp_path, source, tokenizer, expected, monkeypatch):
    """Both would move what has the name; the new dataset stays."""
    rename = os.rename

    def rename_slowly(a, b):
        time.sleep(0.02)
        rename(a, b)
        time.sleep(0.02)

    prepare_dataset(dataclasses.replace(source, validation_split_percentage=7.0), tmp_path / "d", tokenizer)
    assert prepare_dataset(source, tmp_path / "d", tokenizer, overwrite=True, share=slice(1, None)) is None
    monkeypatch.setattr(os, "rename", rename_slowly)
    with ThreadPoolExecutor() as threads:
        jobs = [threads.submit(prepare_dataset, source, tmp_path / "d", tokenizer, overwrite=True) for _ in range(2)]
        assert [job.result() for job in jobs] == [expected, expected]
    assert read_metadata(tmp_path / "d") == expected and names_in(tmp_path) == ["d"]


# ------------------------------------------------------------------ the script, and what is said


def test_the_processes_that_tokenize_import_nothing_slow(tmp_path):
    """Torch, transformers and datasets are not imported."""
    (tmp_path / "tokenize.py").write_text("import recipe.data.pack\nprint()")
    out, err = start_program("slow_imports.py", tmp_path / "tokenize.py").communicate()
    assert out.endswith("\nimported: []\n"), err


def test_the_options_advised_for_a_short_text_work(tmp_path, tokenizer):
    """The block size that the error names opens a text of 3 kB, and so does a larger share for validation."""
    source = TextSource((write_jsonl(tmp_path / "a.jsonl", make_documents(12)),))
    prepare_dataset(source, tmp_path / "d", tokenizer)
    with pytest.raises(UserError, match="--validation_split_percentage or a --validation_file") as caught:
        open_packed_dataset(tmp_path / "d", 256)
    block_size = re.search(r"--block_size (\d+)", str(caught.value))[1]
    assert open_packed_dataset(tmp_path / "d", int(block_size))
    prepare_dataset(dataclasses.replace(source, validation_split_percentage=45.0), tmp_path / "p", tokenizer)
    assert open_packed_dataset(tmp_path / "p", 256)


def test_what_is_not_in_the_dataset_is_said(tmp_path, documents, tokenizer, capsys):
    """Files of other kinds, rows without text, those of other columns, and a separator that never occurs."""
    (tmp_path / "text").mkdir()
    write_jsonl(tmp_path / "text" / "a.jsonl", documents)
    write_text(tmp_path / "text" / "paper.pdf", "x")
    write_jsonl(tmp_path / "text" / "others.jsonl", ["x"] * 7, "body")
    write_jsonl(tmp_path / "text" / "zblank.jsonl", [None, " "])
    source = TextSource((str(tmp_path / "text"),), document_separator="<sep>")
    made = prepare_dataset(source, tmp_path / "d", tokenizer)
    out = capsys.readouterr().out
    for part in (".pdf (1)", "blank): 2\n", "text in column body (pass --text_column_name 'body'): 7\n", "'<sep>'"):
        assert part in out
    assert made["report"][BLANK] == 2
    (tmp_path / "text" / "c.txt").write_bytes(b"the end\r\n<sep>caf\xe9")
    prepare_dataset(dataclasses.replace(source), tmp_path / "e", tokenizer)
    out = capsys.readouterr().out
    assert "<sep>" not in out and "take tokens: 1\n" in out and "became U+FFFD: 1\n" in out


def test_many_small_files_in_another_encoding_are_a_warning(tmp_path, tokenizer, capsys):
    """Each has too few bytes for an error."""
    for number in range(99):
        (tmp_path / f"{number}.txt").write_bytes(f"Stra\xdfe \xfcber {number}".encode("latin-1"))
    prepare_dataset(TextSource((str(tmp_path),)), tmp_path / "d", tokenizer)
    assert "warning: so many are another encoding" in capsys.readouterr().out


def test_much_text_for_validation_is_said(tmp_path, tokenizer, capsys):
    """A book among notes is one document."""
    for number, text in enumerate(make_documents(49)):
        write_text(tmp_path / f"{number:02}.txt", text)
    write_text(tmp_path / "book.txt", "".join(make_documents(2000)))
    for percentage in (1.0, 2.0, 4.0, 8.0, 16.0):
        source = TextSource((str(tmp_path),), validation_split_percentage=percentage)
        splits = prepare_dataset(source, tmp_path / f"d{percentage}", tokenizer)["splits"]
        share = 100 * splits["validation"]["tokens"] / sum(split["tokens"] for split in splits.values())
        assert ("held out for validation, not" in capsys.readouterr().out) == (share > 3 * percentage)
