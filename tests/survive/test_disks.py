"""Disks: one that is full, or lacks an operation, costs what it cannot hold, and no step of a run."""

import errno
import fcntl
import json
import mmap
import os
import re
import resource
import shutil
import stat
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from faults import AUTO, RESULTS, at_call, fail_with, name_checkpoints, send
from helpers import BLOCK_SIZE, list_steps, make_documents, read_weights

import recipe.checkpoint
import recipe.model.weights
import recipe.train
from recipe import disk
from recipe.checkpoint import CheckpointSaver, remove_checkpoint, why_damaged
from recipe.command_line import load_config
from recipe.data.cache import open_dataset_for
from recipe.data.files import digest_files
from recipe.data.packed import open_packed_dataset
from recipe.data.prepare import prepare_dataset
from recipe.data.source import TextSource
from recipe.data.tokenizer import load_tokenizer
from recipe.errors import UserError, run_main
from recipe.publish.hub import link_files
from recipe.run.folder import release_output_dirs
from recipe.run.log import RunLog
from recipe.run.look import claim_folder
from recipe.run.stop import EXIT_STOPPED

FULL = fail_with(errno.ENOSPC)
NO_SPACE = os.strerror(errno.ENOSPC)


@contextmanager
def no_larger_files(num_bytes: int):
    """Let no file exceed a size within the block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_training_continues_after_a_full_disk(train, monkeypatch, tmp_path):
    """Whichever file does not fit, the previous checkpoint stays, nothing partial stays, and the next one is saved."""
    limits = {4: 10, 6: 2_000, 8: 200_000}
    run = tmp_path / "run"
    write = CheckpointSaver._write
    kept = []

    def write_limited(self, final, content, *parts):
        if content["step"] not in limits:
            write(self, final, content, *parts)
            return
        try:
            with no_larger_files(limits[content["step"]]):
                write(self, final, content, *parts)
        finally:
            kept.append([path.name for path in run.glob("*-*")])

    monkeypatch.setattr(CheckpointSaver, "_write", write_limited)
    train("--max_steps", 10, "--save_steps", 2, "--save_total_limit", 1)
    assert kept == [["checkpoint-2"]] * 3
    assert name_checkpoints(run) == ["checkpoint-10"]
    assert not list(run.glob(".checkpoint*"))
    assert why_damaged(run / "checkpoint-10") is None


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_save_that_failed_is_tried_again_when_a_signal_comes(train, monkeypatch, tmp_path, capsys, num_failures):
    """The signal comes in the evaluation of the same step. A run that fails again claims no checkpoint."""
    for _ in range(num_failures):
        attempts = at_call(monkeypatch, CheckpointSaver, "_write", 1, FULL)
    at_call(monkeypatch, recipe.train.Validation, "run", 2, send)
    with pytest.raises(SystemExit) as stopped:
        train("--save_steps", 2, "--eval_steps", 2)
    printed = capsys.readouterr().out
    checkpoint = tmp_path / "run" / "checkpoint-2"
    is_saved = num_failures == 1
    assert len(attempts) == 2
    assert checkpoint.is_dir() == is_saved
    assert stopped.value.code == (EXIT_STOPPED if is_saved else 1)
    assert (f"saved in {checkpoint}" in " ".join(printed.split())) == is_saved
    assert (f"not written: checkpoint-2 (2 times): {NO_SPACE}\n" in printed) != is_saved


def test_what_cannot_be_written_is_said_once_and_at_the_end_and_does_not_end_a_run(train, monkeypatch, capsys):
    """A full disk is called that, and not what torch says of the file that it cannot end.

    A line of the log that it has cut off does not take the next one.
    """
    append = RunLog._append

    def append_some(log, values):
        is_full = (values["event"], values["step"]) == ("train", 2)
        with no_larger_files((log.output_dir / "metrics.jsonl").stat().st_size + 20) if is_full else nullcontext():
            append(log, values)

    monkeypatch.setattr(RunLog, "_append", append_some)
    monkeypatch.setattr(CheckpointSaver, "_write", FULL)
    for name in ("log", "init_trackers", "end_training"):
        monkeypatch.setattr(Accelerator, name, mock.Mock(side_effect=RuntimeError("no route")))
    run = train("--save_steps", 2, "--report_to", "tensorboard")
    said, _, listed = capsys.readouterr().out.partition("not written: ")
    for name, reason in (
        ("checkpoint-2", NO_SPACE),
        ("checkpoint-4", NO_SPACE),
        ("metrics.jsonl", "OSError: .*File too large"),
        ("tracker events", "RuntimeError: no route"),
    ):
        assert len(re.findall(f"^warning: {name} .*: {reason}$", said, re.MULTILINE)) == 1
        assert re.search(rf"{name}\b.*: {reason}", listed)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    whole = [json.loads(line) for line in lines if line.endswith("}")]
    assert len(whole) == len(lines) - 1
    assert [line["step"] for line in whole if line["event"] == "train"] == [1, 3, 4]
    assert (run / "model.safetensors").is_file()


def unwritable(kind: str):
    """Return a stream as Python has it for a full log, after `| head` has ended, or for `>&-`."""
    if kind == "closed":
        return None
    reader, writer = os.pipe()
    os.close(reader)
    return open("/dev/full", "w") if kind == "full" else os.fdopen(writer, "w")  # noqa: SIM115


@pytest.mark.parametrize("kind", ["full", "pipe", "closed"])
@pytest.mark.parametrize("names", [("stdout",), ("stderr",), ("stdout", "stderr")])
def test_a_line_that_cannot_be_printed_ends_no_run(train, tmp_path, monkeypatch, capsys, kind, names):
    """The log file and the model are complete, and the interpreter can flush at its exit, so its status is 0.

    A full log is named in what is left of the output.
    """
    streams = {name: unwritable(kind) for name in names}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    run_main(lambda: train("--eval_steps", 2, "--save_steps", 2) and 0)
    for name, stream in streams.items():
        assert getattr(sys, name) is stream
        assert stream is None or stream.flush() is None
    assert list_steps(tmp_path / "run") == [1, 2, 3, 4]
    assert all((tmp_path / "run" / name).is_file() for name in RESULTS)
    said = f"not all lines could be printed: {NO_SPACE}" in capsys.readouterr().err
    assert said == (kind == "full" and names == ("stdout",))


def test_a_run_that_cannot_export_lists_what_is_missing_and_keeps_the_earlier_model(
    train, finished, monkeypatch, capsys
):
    before = read_weights(finished)
    monkeypatch.setattr(recipe.checkpoint, "write_model", FULL)
    with pytest.raises(UserError, match=f"{NO_SPACE}.*--resume_from_checkpoint auto"):
        train("--max_steps", 5, "--save_steps", 5, *AUTO)
    assert f"not written: checkpoint-5: {NO_SPACE}" in capsys.readouterr().out
    assert read_weights(finished) == before


# ------------------------------------------------------------------ operations that a disk lacks


@pytest.fixture
def prepare(jsonl_file, tokenizer_dir):
    """Pack text, by default the usual one, into a folder."""

    def run(directory, file=jsonl_file, overwrite=False, **options):
        source = TextSource((str(file),), **options)
        return prepare_dataset(source, directory, load_tokenizer(str(tokenizer_dir)), overwrite=overwrite)

    return run


def flush_files_only(descriptor, sync=os.fsync):
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        fail_with(errno.EINVAL)()
    sync(descriptor)


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        (fcntl, "flock", fail_with(errno.ENOSYS)),
        (fcntl, "flock", fail_with(errno.ENOLCK)),
        (fcntl, "flock", fail_with(errno.EOPNOTSUPP)),
        (os, "fsync", fail_with(errno.EINVAL)),
        (os, "fsync", flush_files_only),
        (os, "chmod", fail_with(errno.EPERM)),
    ],
)
def test_text_is_prepared_and_trained_on_whatever_the_disk_lacks(
    train, tmp_path, prepare, monkeypatch, capsys, module, name, call
):
    """A second run in the folder continues: nothing that the first one left, such as its lock, is in the way."""
    monkeypatch.setattr(disk, "WARNED", set())  # by an earlier test
    monkeypatch.setattr(module, name, call)
    prepare(tmp_path / "d")
    run = train("--save_steps", 2, dataset_dir=tmp_path / "d")
    train(*AUTO, dataset_dir=tmp_path / "d")
    assert why_damaged(run / "checkpoint-2") is why_damaged(run / "checkpoint-4") is None
    assert (run / "model.safetensors").is_file()
    assert not (tmp_path / "d" / ".lock").exists()
    assert capsys.readouterr().out.count("warning: the file system of ") == 1


def test_what_waits_for_its_upload_is_a_copy_where_there_are_no_links(tmp_path, monkeypatch):
    """exFAT has no modes either."""
    (tmp_path / "config.json").write_text("{}")
    for name in ("link", "chmod"):
        monkeypatch.setattr(os, name, fail_with(errno.EPERM))
    link_files(tmp_path, tmp_path / ".hub" / "step-000002", ("config.json", "absent.json"))
    assert [path.read_text() for path in (tmp_path / ".hub" / "step-000002").iterdir()] == ["{}"]


def test_rows_are_read_and_a_run_resumes_where_files_cannot_be_mapped(train, finished, dataset_dir, monkeypatch):
    expected = open_packed_dataset(dataset_dir, BLOCK_SIZE).train[np.arange(9)]
    weights = read_weights(finished)
    shutil.rmtree(finished / "checkpoint-4")
    (finished / "model.safetensors").unlink()
    unmapped = fail_with(errno.ENODEV)
    load = torch.load

    def load_unmapped(*arguments, mmap=False, **options):
        return unmapped() if mmap else load(*arguments, **options)

    for module, name in ((mmap, "mmap"), (torch, "from_file"), (recipe.model.weights, "load_file")):
        monkeypatch.setattr(module, name, unmapped)
    monkeypatch.setattr(torch, "load", load_unmapped)
    monkeypatch.setattr(recipe.checkpoint, "DTensor", torch.Tensor)  # shards are read through a map
    assert (open_packed_dataset(dataset_dir, BLOCK_SIZE).train[np.arange(9)] == expected).all()
    train(*AUTO)
    assert read_weights(finished) == weights


# ------------------------------------------------------------------ renames across mounts


def fail_renames(monkeypatch, number: int, fails) -> None:
    """Let os.rename fail for the pairs of paths for which `fails` returns true."""
    rename = os.rename

    def rename_some(source, target):
        call = fail_with(number) if fails(Path(source), Path(target)) else rename
        call(source, target)

    monkeypatch.setattr(os, "rename", rename_some)


def test_a_dataset_is_prepared_in_a_mount_point(tmp_path, prepare, monkeypatch):
    """A mount point cannot be renamed, holds a folder of its own, and nothing can be written beside it."""
    directory = tmp_path / "mounts" / "d"
    mkdir = os.mkdir
    (directory / "lost+found").mkdir(parents=True)

    def mkdir_inside(path, *arguments):
        is_beside = Path(path).parent == directory.parent and Path(path) != directory
        call = fail_with(errno.EROFS) if is_beside else mkdir
        call(path, *arguments)

    monkeypatch.setattr(os, "mkdir", mkdir_inside)
    fail_renames(monkeypatch, errno.EBUSY, lambda *paths: directory in paths)
    made = prepare(directory)
    assert prepare(directory, overwrite=True, validation_split_percentage=7.0)
    assert prepare(directory, overwrite=True) == made
    assert (directory / "lost+found").is_dir()


def test_a_checkpoint_in_the_image_of_a_container_is_removed(tmp_path, monkeypatch):
    """An overlay cannot rename its folder."""
    (tmp_path / "checkpoint-2").mkdir()
    fail_renames(monkeypatch, errno.EXDEV, lambda source, _: source.name == "checkpoint-2")
    remove_checkpoint(tmp_path / "checkpoint-2")
    assert not list(tmp_path.iterdir())


def test_the_longest_names_are_short_enough(tmp_path, tokenizer_dir, prepare):
    """A name may have 255 characters, and 143 on an encrypted disk."""
    text = tmp_path / f"{'a' * 249}.jsonl"
    text.write_text("".join(f'{{"text": "{words.strip()}"}}\n' for words in make_documents(60)))
    options = {"train_file": text, "tokenizer_name": tokenizer_dir, "cache_dir": tmp_path / "cache", "block_size": 16}
    config = load_config([f"--{name}={value}" for name, value in options.items()])[0]
    assert len(open_dataset_for(config).directory.name) <= 143 - len(".123456789abc.partial")
    assert prepare(tmp_path / ("b" * 255), text)


def test_a_folder_in_use_is_refused_and_does_not_change(train, tmp_path):
    """That it is in use comes first, not what its run has left so far."""
    (tmp_path / "run" / "checkpoint-4").mkdir(parents=True)
    with disk.lock(tmp_path / "run" / ".lock"), pytest.raises(UserError, match="in use .*--output_dir"):
        train()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", "checkpoint-4"}


def test_a_run_without_output_dir_takes_the_first_name_that_is_not_in_use(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs", "demo").mkdir(parents=True)
    config = load_config([])[0]
    try:
        with disk.lock(Path("runs", "demo", ".lock")):
            assert claim_folder(config, "demo") == Path("runs/demo-2")
        assert claim_folder(config, "demo") == Path("runs/demo")  # it ended and left nothing
    finally:
        release_output_dirs()


def test_a_file_that_changed_within_a_step_of_the_clock_is_read_again(tmp_path, monkeypatch):
    """Size and time stay the same. A file that is older is read once."""
    path = tmp_path / "a.txt"
    path.write_text("one")
    status = path.stat()
    first = digest_files([str(path)])
    path.write_text("two")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    second = digest_files([str(path)])
    assert second != first
    os.utime(path, (1e9, 1e9))
    assert digest_files([str(path)]) == second
    monkeypatch.setattr("recipe.data.files.digest_file", lambda _: pytest.fail("read again"))
    assert digest_files([str(path)]) == second
