"""Faults do not lose a run: damaged checkpoints, full disks, bad numbers, no memory, signals, locks, secrets."""

import contextlib
import errno
import functools
import hashlib
import json
import math
import multiprocessing
import os
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
from accelerate import Accelerator
from conftest import BLOCK_SIZE, CPU_ONLY, ROOT, TINY, default_arguments, read_events

import recipe.checkpoint
import recipe.evaluation.validation
import recipe.run.end
import recipe.run.export
import recipe.run.folder
import recipe.run.log
import recipe.run.stop
import recipe.train
from recipe.checkpoint import (
    CheckpointSaver,
    HashingFile,
    clean_checkpoints,
    list_checkpoints,
    seal_checkpoint,
    why_damaged,
)
from recipe.command_line import load_config
from recipe.errors import LostProcessError, ProcessError, UserError, run_main
from recipe.hardware import processes
from recipe.model.loss import LanguageModelingLoss
from recipe.model.weights import WEIGHTS_NAME
from recipe.optim.guard import MOST_BAD_STEPS
from recipe.run.folder import lock_output_dir
from recipe.run.log import RunLog
from recipe.run.look import find_folder, look_at_checkpoints, look_at_folder, look_at_named
from recipe.run.stop import EXIT_STOPPED, SIGNALS, StopSignals, kill_warning, measure_disk

TRAIN = str(ROOT / "recipe" / "train.py")
CHECKPOINT_FILES = ["config.json", "generation_config.json", "model.safetensors", "optimizer.pt", "rng.pt",
                    "tokenizer.json", "tokenizer_config.json", "training_state.json"]  # fmt: skip
MACHINE_NUMBERS = ("tokens_per_second", "mfu", "peak_memory_bytes", "seconds")
MACHINE_NUMBERS += ("train_seconds", "share_waiting_for_data")
AUTO = ["--resume_from_checkpoint", "auto"]
DROPOUT = ["--config_overrides", f"{TINY[1]},resid_pdrop=0.1"]  # so that random state counts


@pytest.fixture(autouse=True)
def no_ignored_signals():
    """In the background or under nohup, pytest inherits ignored signals; the runs must not."""
    handlers = {number: signal.getsignal(number) for number in (*SIGNALS, processes.LAUNCHER_DIED)}
    for number in [number for number, handler in handlers.items() if handler == signal.SIG_IGN]:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def two_checkpoints(train_shared):
    """The folder of a run of four steps, with checkpoint-2 and checkpoint-4."""
    return train_shared("--save_steps", 2)


@pytest.fixture
def job_file(tmp_path, monkeypatch):
    """The file by which a job script is told that its command would continue the run."""
    monkeypatch.setenv("RESUMABLE_FILE", str(tmp_path / "resumable"))
    return tmp_path / "resumable"


@pytest.fixture
def run_dir(tmp_path, two_checkpoints):
    return Path(shutil.copytree(two_checkpoints, tmp_path / "run"))


# ------------------------------------------------------------------ damaged checkpoints


def test_a_manifest_covers_the_whole_checkpoint(run_dir):
    """The manifest lists every file, and the versions that wrote them. Others may read the files."""
    checkpoint = run_dir / "checkpoint-4"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert sorted([*manifest["files"], "manifest.json"]) == sorted(p.name for p in checkpoint.iterdir())
    assert set(CHECKPOINT_FILES) <= set(manifest["files"]) and manifest["environment"]["torch"] == torch.__version__
    assert why_damaged(checkpoint) is None
    readable = [path for folder in (checkpoint, run_dir) for path in folder.iterdir() if path.is_file()]
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in readable)


def found_in(run_dir, requested="auto"):
    """Return the checkpoints to resume from, newest first; the last one is intact."""
    config = load_config(["--dataset_dir", "d", "--output_dir", str(run_dir), "--resume_from_checkpoint", requested])[
        0
    ]
    folder = look_at_folder(run_dir)
    return list(look_at_checkpoints(config, folder, look_at_named(config, folder)))


@pytest.mark.parametrize("name", [*CHECKPOINT_FILES, "manifest.json"])
def test_an_older_checkpoint_replaces_a_damaged_one(run_dir, name):
    """A truncated, changed, empty or missing file is found; the fault names the file. test_decide.py: what follows."""
    path = run_dir / "checkpoint-4" / name
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[0 if name == "manifest.json" else len(content) // 2] ^= 1
    for damaged in (content[:-2], bytes(flipped), b"", None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        for requested in ("auto", "latest", str(run_dir)):
            newest, older = found_in(run_dir, requested)
            assert newest.path.name == "checkpoint-4" and newest.fault.startswith(f"{name} ")
            assert older.path == run_dir / "checkpoint-2" and older.saved.state.step == 2


def test_a_run_without_valid_checkpoints_does_not_start_over(train, run_dir):
    """It fails with the reason for each checkpoint and changes no file."""
    for checkpoint in list_checkpoints(run_dir):
        (checkpoint / "optimizer.pt").write_bytes(b"junk")
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    for requested in ("auto", "latest"):
        with pytest.raises(UserError, match=r"checkpoint-4: optimizer.pt has 4 bytes.*checkpoint-2"):
            train("--resume_from_checkpoint", requested)
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["optimizer.pt", "rng.pt", "training_state.json", "model.safetensors"])
def test_a_valid_manifest_with_unknown_content_is_refused(train, run_dir, name):
    """A checkpoint of another version, say, is refused in one sentence."""
    (run_dir / "checkpoint-4" / name).write_bytes(b'{"step": 4}')
    (run_dir / "checkpoint-4" / "manifest.json").unlink()
    seal_checkpoint(run_dir / "checkpoint-4")
    with pytest.raises(UserError, match=r"checkpoint-4 is damaged \(.*resume from another checkpoint"):
        train("--resume_from_checkpoint", "latest")


def test_a_kill_during_a_save_leaves_nothing_that_counts(train, run_dir):
    """A partial checkpoint and a torn log line are ignored, and the next process removes them."""
    shutil.copytree(run_dir / "checkpoint-4", run_dir / ".checkpoint-4.partial")
    (run_dir / ".checkpoint-4.partial" / "optimizer.pt").write_bytes(b"half")
    shutil.rmtree(run_dir / "checkpoint-4")
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"event": "train", "step": 4, "lo{"event": "train", "step": 9}\n{"event"')
    train(*AUTO)
    assert not list(run_dir.glob(".checkpoint*"))
    assert [event["step"] for event in read_events(run_dir, "train")] == [1, 2, 3, 4]


def test_a_checkpoint_is_on_disk_before_it_counts(train, monkeypatch):
    """After a power cut, what has its name is whole: its files are flushed before they get it, and the folder after.

    So are those of the final model.
    """
    flushed, at_rename, sync, rename = set(), {}, os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda file: (flushed.add(os.fstat(file).st_ino), sync(file)))
    monkeypatch.setattr(os, "rename", lambda a, b: (at_rename.update({Path(b).name: {*flushed}}), rename(a, b)))
    run = train("--save_steps", 4)
    assert {path.stat().st_ino for path in (run / "checkpoint-4").iterdir()} <= at_rename["checkpoint-4"]
    assert {path.stat().st_ino for path in (run, run / "config.json", run / "model.safetensors")} <= flushed


def test_what_is_written_is_not_read_again(train, monkeypatch):
    """The optimizer's state, two thirds of a checkpoint, is hashed on its way to the disk, as a reader hashes it."""
    opened, read = [], recipe.checkpoint._sha256
    monkeypatch.setattr(recipe.checkpoint, "_sha256", lambda path: opened.append(path.name) or read(path))
    run = train("--save_steps", 4)
    assert "model.safetensors" in opened and "optimizer.pt" not in opened
    known = json.loads((run / "checkpoint-4" / "manifest.json").read_text())["files"]["optimizer.pt"]["sha256"]
    assert known == hashlib.sha256((run / "checkpoint-4" / "optimizer.pt").read_bytes()).hexdigest()


def test_a_failed_flush_in_the_background_fails_the_save(tmp_path, monkeypatch):
    """Linux reports a failed write to one flush only, so a later one would succeed."""
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=[OSError(errno.EIO, "Input/output error"), None]))
    with ThreadPoolExecutor(1) as helper:
        (earlier := helper.submit(int)).result()
        with pytest.raises(OSError, match="Input/output error"):
            with HashingFile(tmp_path / "optimizer.pt", helper, earlier) as file:
                file.write(b"state")
            file.hash()


# ------------------------------------------------------------------ failing to save


def fill_the_disk(monkeypatch, limits: dict[int, int], after_failure=lambda: None):
    """Let no file exceed a number of bytes while a checkpoint is written. limits: {step: bytes}."""
    write = CheckpointSaver._write

    def limited(self, final, content, *args):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if content["step"] in limits:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limits[content["step"]], before[1]))
        try:
            return write(self, final, content, *args)
        except BaseException:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            after_failure()
            raise
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(CheckpointSaver, "_write", limited)


def test_training_continues_after_a_full_disk(train, monkeypatch, tmp_path, capsys):
    """Whichever file does not fit, the previous checkpoint stays, nothing partial stays, and the next one is saved."""
    run, kept = tmp_path / "run", []
    fill_the_disk(monkeypatch, {4: 10, 6: 2_000, 8: 200_000}, lambda: kept.append([p.name for p in run.glob("*-*")]))
    train("--max_steps", 10, "--save_steps", 2, "--save_total_limit", 1)
    assert kept == [["checkpoint-2"]] * 3
    out = capsys.readouterr().out
    assert all(f"warning: checkpoint-{step} could not be written: " in out for step in (4, 6, 8))
    assert [p.name for p in list_checkpoints(run)] == ["checkpoint-10"]
    assert not list(run.glob(".checkpoint*")) and why_damaged(run / "checkpoint-10") is None


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_save_that_failed_is_tried_again_when_a_signal_comes(train, monkeypatch, tmp_path, capsys, num_failures):
    """In the evaluation of the same step. If it fails again, the run says so, and no checkpoint is claimed."""
    write, evaluate, attempts = CheckpointSaver._write, recipe.train.Validation.run, []

    def fail(self, final, *args):
        attempts.append(final.name)
        if len(attempts) <= num_failures:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, final, *args)

    def signaled(self, must_stop):
        if attempts:
            send()
        return evaluate(self, must_stop)

    monkeypatch.setattr(CheckpointSaver, "_write", fail)
    monkeypatch.setattr(recipe.train.Validation, "run", signaled)
    with pytest.raises(SystemExit) as stopped:
        train("--save_steps", 2, "--eval_steps", 2)
    printed, checkpoint = capsys.readouterr().out, tmp_path / "run" / "checkpoint-2"
    assert attempts == ["checkpoint-2"] * 2 and printed.count("could not be written") == 1
    assert checkpoint.is_dir() is (num_failures == 1)
    assert stopped.value.code == (EXIT_STOPPED if checkpoint.is_dir() else 1)
    assert (f"saved in {checkpoint}" in printed) is checkpoint.is_dir()
    assert ("not written: checkpoint-2 (2 times): No space left on device" in printed) is not checkpoint.is_dir()


def test_a_full_disk_is_named_and_listed_at_the_end(train, monkeypatch, tmp_path, capsys):
    """Not torch's complaint about the file that it cannot end. Each failure is said once, and all at the end."""
    full, append = OSError(errno.ENOSPC, "No space left on device"), RunLog._append
    monkeypatch.setattr(HashingFile, "write", mock.Mock(side_effect=full))
    monkeypatch.setattr(RunLog, "_append", lambda log, values: 1 / 0 if values["step"] > 2 else append(log, values))
    run = train("--save_steps", 2, "--max_steps", 5)
    printed = capsys.readouterr().out
    for name in ("checkpoint-2", "checkpoint-4", "checkpoint-5"):
        assert printed.count(f"{name} could not be written: No space left on device\n") == 1
    assert printed.count("metrics.jsonl could not be written") == 1
    assert "not written: checkpoint-2, checkpoint-4, checkpoint-5: No space left on device\n" in printed
    assert re.search(r"^not written: metrics.jsonl \(\d+ times\): ZeroDivisionError", printed, re.MULTILINE)
    monkeypatch.setattr(recipe.run.export, "write_model", mock.Mock(side_effect=full))
    with pytest.raises(UserError, match="No space left on device; .* starts at step 0: there is no checkpoint"):
        train("--max_steps", 1, "--save_steps", 1, output_dir=tmp_path / "other")
    assert "not written: checkpoint-1: No space" in capsys.readouterr().out and (run / "model.safetensors").is_file()


def test_a_line_that_a_full_disk_cut_off_does_not_take_the_next_one(train, monkeypatch):
    """Once there is space again, the log continues on a new line."""
    append = RunLog._append

    def cut(log, values):
        if values["event"] == "train" and values["step"] == 2:
            log.is_torn = True
            (log.output_dir / "metrics.jsonl").open("a").write('{"event": "train", "st')
            raise OSError(errno.ENOSPC, "No space left on device")
        append(log, values)

    monkeypatch.setattr(RunLog, "_append", cut)
    lines = (train() / "metrics.jsonl").read_text().splitlines()
    assert sum(line.endswith("}") for line in lines) == len(lines) - 1
    assert [json.loads(line)["step"] for line in lines if '"event": "train"' in line and line.endswith("}")] == [
        1,
        3,
        4,
    ]


def test_a_full_disk_anywhere_is_one_sentence():
    """Other errors of the system are bugs, so they keep their traceback."""
    with pytest.raises(SystemExit, match="^error: No space left on device$"):
        run_main(lambda: Path("/dev/full").write_text("x"))
    with pytest.raises(FileNotFoundError):
        run_main(lambda: Path("/nowhere").read_text())


def test_a_run_that_could_not_export_does_so_later(train, run_dir, monkeypatch):
    """A full disk leaves the earlier model unchanged; the next run writes whatever the end of a run lacks."""
    before = (run_dir / "model.safetensors").read_bytes()
    (run_dir / "summary.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(recipe.run.export, "write_model", lambda *_: Path("/dev/full").write_text("x" * 10**6))
        with pytest.raises(UserError, match="final model could not be written to .*No space left .*_checkpoint auto"):
            train(*AUTO)
    assert (run_dir / "model.safetensors").read_bytes() == before and not list(run_dir.glob(".checkpoint*"))
    for name in ("model.safetensors", "README.md"):
        (run_dir / name).unlink()
    train(*AUTO)
    assert json.loads((run_dir / "summary.json").read_text())["step"] == 4 and (run_dir / "README.md").is_file()
    assert (run_dir / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_kill_while_a_checkpoint_is_replaced_leaves_it(run_dir, monkeypatch, number):
    """Of the same step, the old one or the new one is found again, whichever operation the kill precedes."""
    trained = types.SimpleNamespace(model=None, model_config=mock.Mock(), files={})
    config = load_config(["--dataset_dir", "d", "--save_total_limit", "1"])[0]
    monkeypatch.setattr(recipe.checkpoint, "write_model", lambda *args: (args[-1] / WEIGHTS_NAME).touch())
    saver = CheckpointSaver(run_dir, config, mock.Mock(), {}, trained, print, lambda *_: None)
    state = json.loads((run_dir / "checkpoint-4" / "training_state.json").read_text())

    def save_and_die():
        operations, rename, rmtree = [], os.rename, shutil.rmtree

        def counted(function, *args, **kwargs):
            operations.append(function)
            if len(operations) == number:
                os._exit(9)
            return function(*args, **kwargs)

        recipe.checkpoint.os.rename = functools.partial(counted, rename)
        recipe.checkpoint.shutil.rmtree = lambda path, **options: (
            counted(rmtree, path, **options) if Path(path).exists() else None
        )
        saver._write(run_dir / "checkpoint-4", {**state, "run_id": "new"}, {}, {}, {})

    process = multiprocessing.get_context("fork").Process(target=save_and_die)
    process.start()
    process.join()
    assert process.exitcode == 9
    (found,) = found_in(run_dir)  # before anything is cleaned
    clean_checkpoints(run_dir)
    assert found.path == run_dir / "checkpoint-4" and not list(run_dir.glob(".checkpoint*"))
    assert why_damaged(found.path) is None and (found.saved.state.run_id == "new") == (number > 2)


def test_pruning_waits_for_the_new_checkpoint(train, monkeypatch):
    """With a limit of one, the old checkpoint goes when the new one is sealed, and not before."""
    seen = []

    def sealed(directory, known):
        seen.append(sorted(p.name for p in directory.parent.glob("*checkpoint-*")))
        seal_checkpoint(directory, known)

    monkeypatch.setattr(recipe.checkpoint, "seal_checkpoint", sealed)
    train("--max_steps", 3, "--save_steps", 1, "--save_total_limit", 1)
    assert seen == [[".checkpoint-1.partial"], [".checkpoint-2.partial", "checkpoint-1"],
                    [".checkpoint-3.partial", "checkpoint-2"]]  # fmt: skip


def test_training_does_not_wait_for_the_disk(train, monkeypatch, tmp_path):
    """Steps continue while a checkpoint is written, and the checkpoint holds the state of its own step."""
    reference = train("--max_steps", 5, output_dir=tmp_path / "reference")
    write, log, log_step, step_4 = CheckpointSaver._write, [], RunLog.train, threading.Event()

    def slow(self, final, content, *args):
        log.append(f"begin {content['step']}")
        assert step_4.wait(60)
        write(self, final, content, *args)
        log.append(f"end {content['step']}")

    def train_event(self, state, *args):
        log.append(f"step {state.step}")
        if state.step == 4:
            step_4.set()
        log_step(self, state, *args)

    monkeypatch.setattr(CheckpointSaver, "_write", slow)
    monkeypatch.setattr(RunLog, "train", train_event)
    output_dir = train("--max_steps", 5, "--save_steps", 2)
    assert log.index("step 4") < log.index("end 2") < log.index("begin 4")
    weights = (reference / "model.safetensors").read_bytes()
    assert (output_dir / "checkpoint-5" / "model.safetensors").read_bytes() == weights
    assert (output_dir / "checkpoint-4" / "model.safetensors").read_bytes() != weights


def test_a_failing_tracker_does_not_end_a_run(train, monkeypatch, capsys):
    """It is said when it happens and at the end, and metrics.jsonl is complete."""

    def broken(*args, **kwargs):
        raise ConnectionError("no route to host")

    for name in ("log", "init_trackers", "end_training"):
        monkeypatch.setattr(Accelerator, name, broken)
    output_dir = train("--report_to", "tensorboard")
    printed = capsys.readouterr().out
    assert printed.count("ConnectionError: no route to host") == 2
    assert "warning: tracker events could not be written" in printed
    assert re.search(r"^not written: tracker events \(\d+ times\): ConnectionError", printed, re.MULTILINE)
    assert len(read_events(output_dir, "train")) == 4


# ------------------------------------------------------------------ bad numbers


def spoil(monkeypatch, values: dict[int, float]):
    """Add a number to the loss of some steps, without changing its gradients. values: {step: NaN or Inf}."""
    spoiled, forward, add, steps = torch.zeros(()), LanguageModelingLoss._loss_sum, RunLog.add, []

    def count(self, *args):
        add(self, *args)
        steps.append(1)
        spoiled.fill_(values.get(len(steps) + 1, 0.0))

    monkeypatch.setattr(LanguageModelingLoss, "_loss_sum", lambda *args: forward(*args) + spoiled)
    monkeypatch.setattr(RunLog, "add", count)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_a_bad_loss_does_not_change_the_weights(train, monkeypatch, optim):
    """NaN and Inf skip the update, even if the gradients themselves are finite; the next good one is made.

    A fused kernel skips it by itself, for others the loop does. test_nodes.py: compiled, too.
    """
    spoil(monkeypatch, {2: math.nan, 3: math.inf, 4: math.nan})
    add, weights = RunLog.add, []

    def recorded(self, *args):
        add(self, *args)
        weights.append([p.detach().clone() for group in self.optimizer.param_groups for p in group["params"]])

    monkeypatch.setattr(RunLog, "add", recorded)
    output_dir = train("--max_steps", 6, "--lr_scheduler_type", "constant", "--optim", optim)
    changed = [not all(map(torch.equal, a, b)) for a, b in zip(weights, weights[1:], strict=False)]
    assert changed == [False, False, False, True, True]
    events = read_events(output_dir, "train")
    assert [e["loss"] is None for e in events] == [False, True, True, True, False, False]
    assert [e["skipped_steps"] for e in events] == [0, 1, 2, 3, 3, 3]


def test_a_run_stops_if_its_numbers_stay_bad(train, monkeypatch, tmp_path):
    """Nine bad updates in a row are skipped and counted, ten end the run. Its log stays JSON."""
    assert MOST_BAD_STEPS == 10
    spoil(monkeypatch, dict.fromkeys([*range(2, 11), *range(12, 100)], math.nan))
    with pytest.raises(UserError, match=r"step 21: 10 .*\(loss nan, gradient norm nan\)"):
        train("--max_steps", 50, "--logging_steps", 7, "--save_steps", 5)
    events = read_events(tmp_path / "run", "train")
    assert [(e["step"], e["skipped_steps"]) for e in events] == [(1, 0), (7, 6), (14, 12), (21, 19)]
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


# ------------------------------------------------------------------ out of memory


def run_out_of_memory(monkeypatch, owner, name, call):
    """Raise the error in a call of a method during training."""
    original, calls = getattr(owner, name), []

    def fails(self, *args, **kwargs):
        if getattr(self, "training", True):
            calls.append(1)
        if len(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, fails)


def test_out_of_memory_leaves_a_smaller_micro_batch(train, tmp_path, monkeypatch, job_file, capsys):
    """The same command resumes with it, whatever raised the error, and the losses stay the same."""
    arguments = ["--max_steps", 6, "--global_batch_size", 8, "--save_steps", 2, *AUTO]
    expected = read_events(train(*arguments, output_dir=tmp_path / "plain"), "train")
    run = tmp_path / "run"
    for owner, name, call, left in (
        (LanguageModelingLoss, "forward", 2, "4"),  # before the first checkpoint
        (Accelerator, "backward", 6, "2"),  # in the second micro-batch of step 3
        (torch.optim.AdamW, "step", 2, "1"),
    ):
        with monkeypatch.context() as patch:
            run_out_of_memory(patch, owner, name, call)
            with pytest.raises(UserError, match=f"out of memory; the same command .*micro-batches of {left}"):
                train(*arguments)
        assert json.loads((run / ".micro_batch").read_text())["micro_batch_size"] == int(left) and job_file.exists()
        wait_until(lambda left=left: left == "4" or list_checkpoints(run))  # the checkpoint of a process that is gone
    capsys.readouterr()
    found = read_events(train(*arguments), "train")
    assert "micro-batch 1 after running out of memory" in " ".join(capsys.readouterr().out.split())
    assert json.loads((run / "summary.json").read_text())["per_device_train_batch_size"] == 1
    assert not job_file.exists()
    for key in ("loss", "grad_norm"):
        assert [event[key] for event in found] == pytest.approx([event[key] for event in expected], abs=1e-5)


def test_a_typed_micro_batch_stays_as_it_is(train, monkeypatch, job_file, tmp_path):
    """The same command would run out of memory again. test_decide.py: for which run a smaller one is."""
    job_file.touch()
    run_out_of_memory(monkeypatch, LanguageModelingLoss, "forward", 2)
    with pytest.raises(UserError, match="out of memory; try .* a smaller micro-batch"):
        train("--per_device_train_batch_size", 4)
    assert not job_file.exists() and not (tmp_path / "run" / ".micro_batch").exists()


# ------------------------------------------------------------------ a lost process


class DistBackendError(RuntimeError):
    """Stands for torch.distributed's, which has the same name."""


@pytest.mark.parametrize(
    ("message", "is_lost"),
    [
        ("NCCL error: remote process exited or there was a network error", True),
        ("[../third_party/gloo/pair.cc:534] Connection closed by peer [10.0.0.2]:1234", True),
        ("NCCL error: invalid usage. Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000", False),
    ],
)
def test_a_lost_process_is_told_from_a_mistake(message, is_lost):
    """The first is one sentence. The second keeps its traceback."""

    def fail():
        raise DistBackendError(message)

    expected = (SystemExit, "^error: the connection to another process") if is_lost else (DistBackendError, "Dup")
    with pytest.raises(expected[0], match=expected[1]):
        run_main(fail)


LOST = [DistBackendError("gloo/transport: connection reset"), LostProcessError("a process that tokenizes has ended")]


@pytest.mark.parametrize("error", [*LOST, UserError("a mistake"), ProcessError("a mistake"), None])
@pytest.mark.parametrize("has_saved", [True, False])
def test_a_job_is_queued_again_if_that_helps(train, job_file, monkeypatch, error, has_saved):
    """After a checkpoint, however the process ends, since even SIGKILL leaves the file; not after a deliberate end."""
    seen = []

    def fail(run, state, stop, decide=recipe.train.decide_turn):
        if state.step == 3:
            seen.append(job_file.exists())
            if error:
                raise error
        return decide(run, state, stop)

    save = CheckpointSaver.save
    monkeypatch.setattr(recipe.train, "decide_turn", fail)
    monkeypatch.setattr(CheckpointSaver, "save", lambda self, state: (save(self, state), self.wait()))
    with pytest.raises(type(error)) if error else contextlib.nullcontext():
        train("--save_steps", 2 if has_saved else 0)
    assert seen == [has_saved]
    assert job_file.exists() is (has_saved and error in LOST)


# ------------------------------------------------------------------ signals

SHORT = ["--max_steps", 30, *DROPOUT, "--logging_steps", 7, "--eval_steps", 10]


@pytest.fixture(scope="module")
def uninterrupted(train_shared):
    with mock.patch.object(recipe.evaluation.validation, "CPU_TOKENS", BLOCK_SIZE):
        return train_shared(*SHORT, "--logging_steps", 1)


@pytest.fixture
def short_run(uninterrupted, monkeypatch):
    """A run of SHORT, which is neither stopped nor saved. All evaluate one row after the other."""
    monkeypatch.setattr(recipe.evaluation.validation, "CPU_TOKENS", BLOCK_SIZE)
    return uninterrupted


def check_equal(run, expected, killed_at=0):
    """Assert that two runs have the same model, evaluations and samples, and that the log of the first lacks no step.

    expected: logs every step. A line of the other has the mean loss of the steps since the line before, or, after a
    kill, since the checkpoint; so has the line of an evaluation.
    """
    assert (run / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    for event in ("eval", "sample"):
        logged = [[{key: value for key, value in line.items() if key not in (*MACHINE_NUMBERS, "train_loss")}
                   for line in read_events(path, event)] for path in (run, expected)]  # fmt: skip
        assert logged[0] == logged[1]
    means = [[line["train_loss"] for line in read_events(path, "eval")[1:]] for path in (run, expected)]
    assert killed_at or means[0] == pytest.approx(means[1], abs=1e-6)
    each, before = read_events(expected, "train"), 0
    for line in read_events(run, "train"):
        before = killed_at if before < killed_at < line["step"] else before
        losses = [step["loss"] for step in each[before : line["step"]]]
        assert line["loss"] == pytest.approx(statistics.fmean(losses), abs=1e-6)
        assert all(line[key] == each[line["step"] - 1][key] for key in ("grad_norm", "learning_rate", "tokens_seen"))
        before = line["step"]
    assert before == len(each)


def send(name="SIGTERM"):
    os.kill(os.getpid(), signal.Signals[name])


def signal_this_process_after(last_step, name, monkeypatch):
    """Send a signal to this process within a training step."""
    add, steps = RunLog.add, []

    def signaled(self, *args):
        add(self, *args)
        steps.append(1)
        if len(steps) == last_step:
            send(name)

    monkeypatch.setattr(RunLog, "add", signaled)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_a_signal_saves_the_run_and_ends_it(train, short_run, monkeypatch, tmp_path, job_file, capfd, name):
    """The exit code is the documented one, and the same command resumes the run without a trace in its log."""
    signal_this_process_after(19, name, monkeypatch)  # between log lines
    with pytest.raises(SystemExit) as stopped:
        train(*SHORT, *AUTO)
    printed, run = capfd.readouterr(), tmp_path / "run"
    assert stopped.value.code == EXIT_STOPPED and job_file.exists()
    assert [path.name for path in list_checkpoints(run)] == ["checkpoint-19"]
    assert f"stopped by {name} after step 19, saved in {run}/checkpoint-19; to resume, repeat " in printed.out
    assert f"\n    --output_dir {run} --resume_from_checkpoint auto\n" in printed.out
    assert "finishing this step" in printed.err and ("again to quit" in printed.err) is (name == "SIGINT")
    if name == "SIGTERM":
        check_equal(train(*SHORT, *AUTO), short_run)


def test_a_second_ctrl_c_exits_at_once(monkeypatch):
    """Two within a second count as one, and another signal does not count."""
    exits = []
    monkeypatch.setattr(recipe.run.stop.os, "_exit", exits.append)
    with StopSignals():
        for name, seconds in (("SIGTERM", 1.1), ("SIGINT", 0.0), ("SIGINT", 1.1), ("SIGTERM", 0.0), ("SIGINT", 0.0)):
            assert exits == []
            send(name)
            time.sleep(seconds)
    assert exits == [128 + signal.SIGINT]


@pytest.mark.parametrize(
    ("typed", "gigabytes", "megabytes_per_second", "expected"),
    [
        (None, 1.5, 80, None),  # 19 of 30 seconds
        (None, 1.5, 70, ("30 seconds", " 21 ", "1.5 GB", "70 MB/s", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600")),
        ("60", 1.5, 15, ("60 seconds", " 100 ")),
        ("60", 1.5, 70, None),
        ("600", 18.7, 50, None),  # 374 of 600 seconds
        ("600", 18.7, 40, ("600 seconds", " 468 ", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=1200")),
        ("1200", 18.7, 40, None),
    ],
)
def test_a_launcher_that_kills_before_a_checkpoint_is_written(typed, gigabytes, megabytes_per_second, expected):
    """The warning has the numbers, and its advice is enough to silence it. Without torchrun's agent, nobody kills."""
    variable = {} if typed is None else {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": typed}
    facts = gigabytes * 1e9, megabytes_per_second * 1e6
    found = kill_warning({"TORCHELASTIC_RUN_ID": "none", **variable}, *facts)
    assert all(text in found for text in expected) if expected else found is None
    assert kill_warning(variable, *facts) is None


def test_a_run_that_its_launcher_would_kill_warns_at_its_start(train, tmp_path, monkeypatch, capsys):
    """It knows the size of its checkpoints. Without torchrun's agent, it does not measure the disk."""
    measured = []
    monkeypatch.setattr(recipe.run.stop, "measure_disk", lambda directory: measured.append(directory) or 1000)
    monkeypatch.setattr(recipe.run.stop, "SLOWEST_DISK", 1000)
    train("--max_steps", 1)
    assert "launcher kills" not in capsys.readouterr().out and measured == []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    run = train("--save_steps", 4, output_dir=tmp_path / "agent")
    (seconds,) = re.findall(r"launcher kills this run in 30 seconds, .* takes ([\d,]+)", capsys.readouterr().out)
    size = sum((run / "checkpoint-4" / name).stat().st_size for name in ("model.safetensors", "optimizer.pt"))
    assert 1000 * int(seconds.replace(",", "")) == pytest.approx(size, rel=0.1) and measured == [run]


def test_measuring_the_disk_leaves_nothing(tmp_path, monkeypatch):
    """A full disk is no reason to warn of a slow one."""
    assert 1e5 < measure_disk(tmp_path) < 1e11
    monkeypatch.setattr(recipe.run.stop, "flush", lambda _: Path("/dev/full").write_text("x"))
    assert measure_disk(tmp_path) == math.inf and not list(tmp_path.iterdir())


def test_a_launcher_that_is_killed_leaves_no_orphan(tmp_path, dataset_dir):
    """The trainer saves and ends, too."""
    arguments = [*default_arguments(dataset_dir, tmp_path / "run", TINY), "--max_steps", 5000]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "OMP_"))}
    launcher = subprocess.Popen(
        [sys.executable, "-m", "accelerate.commands.launch", TRAIN, *map(str, arguments)], stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True, env={**kept, **CPU_ONLY},
    )  # fmt: skip
    log = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: log.is_file() and log.read_text().count('"event": "train"') >= 5)
    (worker,) = psutil.Process(launcher.pid).children()
    launcher.kill()
    output = launcher.communicate(timeout=120)[0]  # ends with the trainer's output, not just the launcher's
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
    (checkpoint,) = list_checkpoints(tmp_path / "run")
    assert why_damaged(checkpoint) is None and f"saved in {checkpoint}; to resume, " in output


def wait_until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the run did not start in time"
        time.sleep(0.01)


@pytest.mark.parametrize("step", [0, 10, 30])
def test_a_signal_in_an_evaluation_is_served_at_once(train, short_run, monkeypatch, tmp_path, job_file, step):
    """The evaluation is given up, the checkpoint is saved, and the resumed run makes the evaluation."""
    iterate, batches = recipe.evaluation.validation.iterate_validation, []

    def signaled(*args):
        for batch in iterate(*args):
            batches.append(1)
            if len(batches) == 8 * step // 10 + 3:  # the third of eight rows
                send()
            yield batch

    options = [*SHORT, "--save_steps", 10]
    with monkeypatch.context() as patch:
        patch.setattr(recipe.evaluation.validation, "iterate_validation", signaled)
        with pytest.raises(SystemExit) as stopped:
            train(*options, *AUTO)
    run = tmp_path / "run"
    assert stopped.value.code == EXIT_STOPPED and len(batches) == 8 * step // 10 + 3 and job_file.exists()
    assert [path.name for path in list_checkpoints(run)] == [f"checkpoint-{n}" for n in (10, 20, 30) if n <= step]
    assert [event["step"] for event in read_events(run, "eval")] == list(range(0, step, 10))
    check_equal(train(*options, *AUTO), short_run)


def test_a_run_killed_before_an_evaluation_makes_it_when_it_resumes(train, short_run, monkeypatch, tmp_path):
    """Also if the checkpoint of the same step was saved."""
    evaluate = recipe.train.Validation.run

    def killed(self, *args):
        if list_checkpoints(tmp_path / "run"):
            raise KeyboardInterrupt
        return evaluate(self, *args)

    options = [*SHORT, "--save_steps", 10]
    save = CheckpointSaver.save
    with monkeypatch.context() as patch:
        patch.setattr(recipe.train.Validation, "run", killed)
        patch.setattr(CheckpointSaver, "save", lambda self, state: (save(self, state), self.wait()))
        with pytest.raises(KeyboardInterrupt):
            train(*options)
    assert [event["step"] for event in read_events(tmp_path / "run", "eval")] == [0]
    check_equal(train(*options, *AUTO), short_run, killed_at=10)


def test_a_signal_while_saving(train, short_run, monkeypatch, tmp_path):
    """That checkpoint is complete, though a second signal follows."""
    write = CheckpointSaver._write

    def signaled(self, *args):
        send()
        time.sleep(1.5)  # the first signal is more than a second ago, and the main thread waits for this one
        send()
        return write(self, *args)

    options = [*SHORT, "--save_steps", 10]
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointSaver, "_write", signaled)
        with pytest.raises(SystemExit) as stopped:
            train(*options)
    checkpoints = list_checkpoints(tmp_path / "run")
    assert stopped.value.code == EXIT_STOPPED and checkpoints[0].name == "checkpoint-10"
    assert not any(map(why_damaged, checkpoints))
    check_equal(train(*options, *AUTO), short_run)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_signal_in_the_export(train, monkeypatch, job_file, capfd, name):
    """The results are written all the same; the run has ended, so nothing resumes it."""
    export = recipe.run.end.export_model
    monkeypatch.setattr(recipe.run.end, "export_model", lambda *args: (send(name), export(*args)))
    run = train("--save_steps", 2)
    assert (run / "summary.json").is_file() and (run / "README.md").is_file() and not job_file.exists()
    assert f"{name}: writing the results" in capfd.readouterr().err


def test_a_kill_between_the_summary_and_the_card(train, monkeypatch, tmp_path):
    """The same command writes the card and the curve, and no other file."""
    with monkeypatch.context() as patch:
        patch.setattr(recipe.run.end, "write_model_card", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train("--save_steps", 2)
    run = tmp_path / "run"
    summary = (run / "summary.json").read_text()
    assert not (run / "README.md").exists()
    train("--save_steps", 2, *AUTO)
    assert (run / "README.md").is_file() and (run / "loss_curve.png").is_file()
    (run / "README.md").write_text("my words")
    train("--save_steps", 2, *AUTO)
    assert (run / "README.md").read_text() == "my words" and (run / "summary.json").read_text() == summary


# ------------------------------------------------------------------ one run per folder


def test_a_folder_in_use(train, tmp_path, monkeypatch):
    """A run in it is refused and changes nothing; without --output_dir, a run takes the next name."""
    fork = multiprocessing.get_context("fork")
    locked = fork.Event()
    monkeypatch.chdir(tmp_path)

    def hold_the_lock():
        for name in ("run", "runs/demo"):
            lock_output_dir(tmp_path / name)
        locked.set()
        time.sleep(60)

    other = fork.Process(target=hold_the_lock, daemon=True)
    other.start()
    assert locked.wait(30)
    (tmp_path / "run" / "checkpoint-4").mkdir()  # that run comes first in the message, not what it has left so far
    with pytest.raises(UserError, match=r"in use by another process.*another --output_dir"):
        train()
    assert find_folder(load_config([])[0], "demo").path == Path("runs/demo-2")
    other.kill()
    other.join()
    assert {p.name for p in (tmp_path / "run").iterdir()} == {".lock", "checkpoint-4"}
    assert find_folder(load_config([])[0], "demo").path == Path("runs/demo")  # it ended and left nothing


# ------------------------------------------------------------------ secrets


def test_no_secret_leaves_the_environment(train, monkeypatch, tmp_path, capfd):
    """Tokens appear neither in the files of a run, nor on the screen, nor in the traceback of a crash."""
    canary = "hf_CANARY0123456789abcdefghijklmnopqr"
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, canary)
    monkeypatch.setattr(RunLog, "end", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError) as crash:
        train("--save_steps", "2", "--report_to", "tensorboard", real=True)
    assert canary not in "".join(traceback.format_exception(crash.value)) + "".join(capfd.readouterr())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 20 and any("tfevents" in path.name for path in files)
    assert (tmp_path / "run" / "summary.json").is_file() and (tmp_path / "run" / "README.md").is_file()
    assert [path for path in files if canary.encode() in path.read_bytes()] == []
