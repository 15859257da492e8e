"""A checkpoint is whole, or it does not count."""

import errno
import json
import multiprocessing
import os
import shutil
import threading
from pathlib import Path
from unittest import mock

import pytest
from faults import AUTO, at_call, change_json
from helpers import list_steps, read_weights

import recipe.checkpoint
from recipe.checkpoint import CheckpointSaver, clean_checkpoints, read_state, seal_checkpoint, why_damaged
from recipe.command_line import load_config
from recipe.disk import replaced
from recipe.errors import UserError
from recipe.optim.guard import UpdateGuard
from recipe.run.look import look_at_checkpoints, look_at_folder, look_at_named

STATE_FILES = ["optimizer.pt", "rng.pt", "training_state.json", "model.safetensors"]
MODEL_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


def find_checkpoints(run, requested="auto"):
    """Return the checkpoints to resume from, newest first; the last one is intact."""
    options = ["--dataset_dir", "d", "--output_dir", str(run), "--resume_from_checkpoint", requested]
    config = load_config(options)[0]
    folder = look_at_folder(run)
    return list(look_at_checkpoints(config, folder, look_at_named(config, folder)))


def test_a_run_writes_its_files_as_the_umask_says(train):
    """Other users may read them by default."""
    before = os.umask(0o027)
    try:
        run = train("--save_steps", 2)
    finally:
        os.umask(before)
    files = [path for path in run.rglob("*") if path.is_file() and path.name != ".lock"]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o640}


def test_training_continues_while_a_checkpoint_is_written_which_has_the_state_of_its_own_step(
    train, monkeypatch, tmp_path
):
    write = CheckpointSaver._write
    step_4 = threading.Event()

    def write_after_step_3(self, *parts):
        assert step_4.wait(60)
        write(self, *parts)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointSaver, "_write", write_after_step_3)
        at_call(patch, UpdateGuard, "allows", 4, step_4.set)
        run = train("--max_steps", 5, "--save_steps", 2)
    branch = train("--max_steps", 5, "--resume_from_checkpoint", run / "checkpoint-2", output_dir=tmp_path / "branch")
    assert list_steps(branch) == [3, 4, 5]
    assert read_weights(branch) == read_weights(run)


@pytest.mark.parametrize("name", [*STATE_FILES, *MODEL_FILES, "manifest.json"])
def test_an_older_checkpoint_replaces_a_damaged_one(finished, name):
    """A truncated, changed, empty or missing file is found and named."""
    path = finished / "checkpoint-4" / name
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[0 if name == "manifest.json" else len(content) // 2] ^= 1
    for damaged in (content[:-2], bytes(flipped), b"", None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        for requested in ("auto", str(finished)):
            newest, older = find_checkpoints(finished, requested)
            assert newest.path.name == "checkpoint-4" and name in newest.fault
            assert older.path == finished / "checkpoint-2" and older.saved.state.step == 2


def test_a_kill_during_a_save_leaves_nothing_that_counts(train, finished):
    """A partial checkpoint and a torn log line are ignored, and the next process removes them."""
    (finished / "checkpoint-4").rename(finished / ".checkpoint-4.partial")
    (finished / ".checkpoint-4.partial" / "optimizer.pt").write_bytes(b"half")
    with open(finished / "metrics.jsonl", "a") as file:
        file.write('{"event": "train", "step": 4, "lo{"event": "train", "step": 9}\n{"event"')
    train(*AUTO)
    assert not list(finished.glob(".checkpoint*"))
    assert list_steps(finished) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("module", "operation", "survivor"), [(os, "rename", "old"), (os, "replace", "old"), (shutil, "rmtree", "new")]
)
def test_a_kill_while_a_checkpoint_is_replaced_leaves_one_of_the_two(finished, module, operation, survivor):
    """The old or the new one of the same step is found again, whichever operation the kill precedes."""
    checkpoint = finished / "checkpoint-4"
    change_json(checkpoint / "training_state.json", run_id="old")
    seal_checkpoint(checkpoint)

    def replace_and_die():
        with replaced(checkpoint) as partial:
            shutil.copytree(checkpoint, partial)
            change_json(partial / "training_state.json", run_id="new")
            seal_checkpoint(partial)
            at_call(pytest.MonkeyPatch(), module, operation, 1, lambda: os._exit(9))

    process = multiprocessing.get_context("fork").Process(target=replace_and_die)
    process.start()
    process.join()
    assert process.exitcode == 9
    (found,) = find_checkpoints(finished)  # before anything is cleaned
    clean_checkpoints(finished)
    assert (found.path, found.saved.state.run_id) == (checkpoint, survivor)
    assert why_damaged(checkpoint) is None
    assert not list(finished.glob(".checkpoint*"))


def test_a_checkpoint_and_the_final_model_are_on_disk_before_they_count(train, monkeypatch):
    """After a power cut, what has its name is whole: its files are flushed before they get it, the folder after.

    And before a job script is told of it, or an older one is removed.
    """
    flushed, when_it_counts = set(), set()
    at_rename = {}
    sync, rename = os.fsync, os.replace

    def note_flush(file):
        flushed.add(os.fstat(file).st_ino)
        sync(file)

    def note_rename(source, target):
        at_rename[Path(target).name] = set(flushed)
        rename(source, target)
        flushed.discard(Path(target).parent.stat().st_ino)

    monkeypatch.setattr(os, "fsync", note_flush)
    monkeypatch.setattr(os, "replace", note_rename)
    at_call(monkeypatch, recipe.checkpoint, "mark_resumable", 1, lambda: when_it_counts.update(flushed))
    run = train("--save_steps", 4)
    assert {path.stat().st_ino for path in (run / "checkpoint-4").iterdir()} <= at_rename["checkpoint-4"]
    assert run.stat().st_ino in when_it_counts
    assert {path.stat().st_ino for path in (run, run / "config.json", run / "model.safetensors")} <= flushed


def test_a_failed_flush_fails_the_save(finished, monkeypatch):
    """Linux reports a failed write to one flush only, so a later one would succeed."""
    failures = [OSError(errno.EIO, "Input/output error"), *[None] * 20]
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=failures))
    with pytest.raises(OSError, match="Input/output error"):
        seal_checkpoint(finished / "checkpoint-4")


@pytest.mark.parametrize("files", [{}, {"../../secret": {"bytes": 0, "sha256": "0"}}], ids=["none", "elsewhere"])
def test_a_manifest_does_not_decide_which_files_count(finished, files):
    """A checkpoint may be a stranger's. The four that a resume needs are in it, and no file of another folder."""
    path = finished / "checkpoint-4" / "manifest.json"
    content = json.loads(path.read_text())
    (finished.parent / "secret").touch()
    path.write_text(json.dumps(content | {"files": files and content["files"] | files}))
    fault = why_damaged(finished / "checkpoint-4")
    assert fault and fault.split()[0] in ("training_state.json", "../../secret")


@pytest.mark.parametrize("change", [
    {"step": "9"}, {"step": -1}, {"step": 10**30}, {"losses": {"x": 1.0}}, {"losses": {"4": "1"}}, {"seconds": None},
    {"initial": {"num_rows": "all"}}, {"identity": [1]}, {"num_processes": "2"},
    {"mixed_precision": 1}, {"stages": [{"block_size": "a"}]}, {"memory": []}, {"schedule": {}},
    {"version": None},
])  # fmt: skip
def test_a_state_of_another_version_or_with_other_types_is_one_sentence(finished, change):
    change_json(finished / "checkpoint-4" / "training_state.json", **change)
    with pytest.raises(UserError, match="checkpoint-4 cannot be used"):
        read_state(finished / "checkpoint-4")
