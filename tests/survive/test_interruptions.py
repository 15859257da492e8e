"""A run that a signal or a kill interrupts, wherever it is, ends like an uninterrupted one by the same command."""

import errno
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from unittest import mock

import psutil
import pytest
from faults import AUTO, RESULTS, at_call, die, fail_with, last_step, name_checkpoints, send
from helpers import (
    BLOCK_SIZE,
    ROOT,
    TINY,
    default_arguments,
    list_steps,
    read_events,
    read_summary,
    read_weights,
    read_words,
    run_training,
)

import recipe.checkpoint
import recipe.evaluation.validation
import recipe.model.weights
import recipe.run.end
import recipe.run.stop
import recipe.train
from recipe.checkpoint import list_checkpoints, why_damaged
from recipe.errors import UserError
from recipe.evaluation.validation import Validation
from recipe.model.loss import LanguageModelingLoss
from recipe.optim.guard import UpdateGuard
from recipe.run.stop import EXIT_STOPPED, StopSignals, kill_warning

DROPOUT = ["--config_overrides", f"{TINY[1]},resid_pdrop=0.1"]  # so that random state counts
SHORT = [*DROPOUT, "--max_steps", 30, "--eval_steps", 10, "--save_steps", 10, *AUTO]
SHORT += ["--per_device_train_batch_size", 2]
OF_THE_MACHINE = {"tokens_per_second", "mfu", "memory_bytes", "peak_memory_bytes", "train_seconds", "step_ms"}
OF_THE_MACHINE |= {"seconds", "warm_seconds", "share_waiting_for_data"}


def check_equal(run, expected):
    """Assert that two runs have the same weights, and the same steps, evaluations and samples in their logs."""
    assert read_weights(run) == read_weights(expected)
    for event in ("train", "eval", "sample"):
        numbers = [
            [{key: line[key] for key in line.keys() - OF_THE_MACHINE} for line in read_events(some_run, event)]
            for some_run in (run, expected)
        ]
        assert numbers[0] == numbers[1]


@pytest.fixture(scope="module")
def uninterrupted(train_shared):
    """A run of SHORT, which evaluates one row after the other."""
    with mock.patch.object(recipe.evaluation.validation, "CPU_TOKENS", BLOCK_SIZE):
        return train_shared(*SHORT)


@pytest.fixture
def stop(train, uninterrupted, monkeypatch):
    """Train as that run does until a signal comes before the nth call of a function. Returns its calls."""
    monkeypatch.setattr(recipe.evaluation.validation, "CPU_TOKENS", BLOCK_SIZE)

    def stop(owner, name, number, act=send, options=()):
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
            calls = at_call(patch, owner, name, number, act)
            train(*SHORT, *options)
        assert stopped.value.code == EXIT_STOPPED
        return calls

    return stop


# ------------------------------------------------------------------ signals


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_a_signal_saves_the_run_and_ends_it(stop, tmp_path, job_file, capfd, name):
    """The job is to be queued again. The user reads of the signal at once, and at the end how to resume.

    The steps since the last log line have a line of their own.
    """
    assert len(stop(UpdateGuard, "allows", 19, lambda: send(name), ["--logging_steps", 7])) == 19
    printed = capfd.readouterr()
    sentences = " ".join(printed.out.split())
    run = tmp_path / "run"
    assert name_checkpoints(run) == ["checkpoint-10", "checkpoint-19"]
    assert list_steps(run) == [1, 7, 10, 14, 19]
    assert job_file.exists()
    assert ("Ctrl-C" if name == "SIGINT" else name) in printed.err
    for text in (name, f"saved in {run}/checkpoint-19;", f"--output_dir {run} --resume_from_checkpoint auto"):
        assert text in sentences


def test_a_signal_writes_into_no_file_that_has_the_number_of_a_closed_stderr(tmp_path, monkeypatch):
    """It may be a checkpoint's."""
    monkeypatch.setattr(sys, "stderr", None)
    before = os.dup(2)
    number = os.open(tmp_path / "optimizer.pt", os.O_CREAT | os.O_WRONLY)
    os.dup2(number, 2)
    try:
        with StopSignals() as signals:
            send("SIGTERM")
    finally:
        os.dup2(before, 2)
    assert signals.count == 1
    assert (tmp_path / "optimizer.pt").read_bytes() == b""


@pytest.mark.parametrize("step", [0, 10, 30])
def test_a_signal_in_an_evaluation_is_served_at_once(train, stop, uninterrupted, tmp_path, job_file, step):
    """The evaluation is given up, the checkpoint is saved, and the resumed run makes the evaluation."""
    third_row = 8 * step // 10 + 3  # of eight rows each
    assert len(stop(LanguageModelingLoss, "_losses", third_row)) == third_row
    assert job_file.exists()
    assert name_checkpoints(tmp_path / "run") == [f"checkpoint-{number}" for number in (10, 20, 30) if number <= step]
    assert list_steps(tmp_path / "run", "eval") == list(range(0, step, 10))
    check_equal(train(*SHORT), uninterrupted)


def test_a_signal_in_the_export_lets_the_run_end_with_its_results(train, monkeypatch, job_file):
    """The file that would have a job resume it is gone."""
    at_call(monkeypatch, recipe.checkpoint, "write_model", 1, send)
    run = train()
    assert all((run / name).is_file() for name in RESULTS)
    assert not job_file.exists()


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


@pytest.mark.parametrize("size", [1000, 20_000])
def test_a_finished_run_that_is_repeated_mends_its_model_and_keeps_the_page_of_its_owner(train, finished, size):
    before = read_weights(finished)
    os.truncate(finished / "model.safetensors", size)
    (finished / "README.md").write_text("my words")
    train(*AUTO)
    assert read_weights(finished) == before
    assert (finished / "README.md").read_text() == "my words"


@pytest.mark.parametrize(
    ("owner", "name", "number", "act"),
    [
        (Validation, "run", 1, die),  # the last checkpoint is saved
        (Validation, "run", 1, send),
        (recipe.checkpoint, "write_model", 3, fail_with(errno.ENOSPC)),  # after those of two checkpoints
        (recipe.model.weights, "write_file", 11, die),  # after eight files of these, and two of the model
        (recipe.run.end, "build_summary", 1, die),
        (recipe.run.end, "write_model_card", 1, die),
    ],
)
@pytest.mark.usefixtures("saves_at_once")
def test_an_extended_run_that_is_interrupted_at_its_end_gets_its_own_results(
    train, finished, monkeypatch, capsys, owner, name, number, act
):
    """The same command exports the new model, though the folder has the results of the shorter run."""
    longer = ["--save_steps", 2, "--max_steps", 8, *AUTO]
    before = read_weights(finished)
    summary = finished / "summary.json"
    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, UserError, SystemExit)):
        at_call(patch, owner, name, number, act)
        train(*longer)
    if summary.exists() and json.loads(summary.read_text())["step"] == 4:  # what it describes is still there
        assert read_weights(finished) == before
    capsys.readouterr()
    train(*longer)
    assert re.search(r"^steps: +8$", capsys.readouterr().out, re.MULTILINE)
    assert read_weights(finished) == read_weights(finished / "checkpoint-8") != before
    assert read_summary(finished)["step"] == 8 and "8 steps" in (finished / "README.md").read_text()


# ------------------------------------------------------------------ kills from outside

KILLS = int(os.environ.get("KILLS", "8"))
STEPS = 40 * KILLS  # more than are made before the last kill
SOAK = [*DROPOUT, "--max_steps", STEPS, "--save_steps", 5, "--per_device_train_batch_size", 2]
SOAK += ["--save_total_limit", 2, "--eval_steps", 20, "--load_best_model_at_end", "true", *AUTO]


def test_a_run_killed_at_random_times_ends_like_an_uninterrupted_one(tmp_path, dataset_dir):
    """Weights, optimizer, best model and log are the same, bit for bit, and each checkpoint was whole at any time.

    KILLS in the environment sets how often it is killed.
    """
    server = multiprocessing.get_context("forkserver")  # starts many processes that have imported torch
    server.set_forkserver_preload(["helpers", "recipe.train"])
    through = tmp_path / "through"
    killed = tmp_path / "killed"
    rng = random.Random(0)

    def start(run):
        process = server.Process(target=run_training, args=([*default_arguments(dataset_dir, run, TINY), *SOAK],))
        process.start()
        return process

    def finish(run):
        process = start(run)
        process.join()
        assert process.exitcode == 0

    finish(through)
    for _ in range(KILLS):
        goal = last_step(killed) + rng.randint(1, 20)
        latest = time.monotonic() + (rng.uniform(0, 0.4) if rng.random() < 0.3 else 120)  # the first: while it starts
        process = start(killed)
        while last_step(killed) < goal and time.monotonic() < latest:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.02))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert [fault for path in list_checkpoints(killed) if (fault := why_damaged(path))] == []
    assert not (killed / "summary.json").exists()
    finish(killed)
    check_equal(killed, through)
    for name in ("model.safetensors", f"checkpoint-{STEPS}/optimizer.pt"):  # with step and loss of the best model
        assert (killed / name).read_bytes() == (through / name).read_bytes()


def test_a_launcher_that_is_killed_leaves_no_orphan(tmp_path, dataset_dir):
    """The trainer saves and ends, too."""
    run = tmp_path / "run"
    arguments = map(str, [*default_arguments(dataset_dir, run, TINY), "--max_steps", 5000])
    launcher = subprocess.Popen(
        [sys.executable, "-m", "accelerate.commands.launch", ROOT / "recipe/train.py", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    while last_step(run) < 5:
        assert launcher.poll() is None, "the run ended before its launcher was killed"
        time.sleep(0.01)
    (worker,) = psutil.Process(launcher.pid).children()
    launcher.kill()
    output = launcher.communicate(timeout=120)[0]  # ends with the trainer's output, not just the launcher's
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
    (checkpoint,) = list_checkpoints(run)
    assert why_damaged(checkpoint) is None
    assert f"saved in {checkpoint};" in " ".join(output.split())
    assert list_steps(run)[-1] == int(checkpoint.name.removeprefix("checkpoint-"))


def test_a_launcher_that_kills_before_a_checkpoint_is_written():
    """The warning has the numbers, and its advice is enough to silence it. Without torchrun's agent, nobody kills."""
    launched = {"TORCHELASTIC_RUN_ID": "none"}
    assert kill_warning(launched, 19) is None
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600 " in kill_warning(launched, 21)
    warning = kill_warning(launched | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}, 468)
    for text in ("600 seconds", " 468;", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=1200 "):
        assert text in warning
    assert kill_warning(launched | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1200"}, 468) is None
    assert kill_warning({}, 468) is None


def test_a_run_that_its_launcher_would_kill_warns_after_its_first_checkpoint(train, monkeypatch, capsys):
    """A step of 0.7 s alone is too long for a launcher that waits a second. It is said once."""
    allows = UpdateGuard.allows
    monkeypatch.setattr(UpdateGuard, "allows", lambda *arguments: time.sleep(0.7) or allows(*arguments))
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    train("--save_steps", 2)
    said = "the launcher kills this run in 1 seconds, but a step and a checkpoint take 1;"
    assert read_words(capsys).count(said) == 1


def test_a_notice_while_text_is_prepared_queues_the_job_again(train, job_file, monkeypatch, capsys):
    """There is nothing to save yet, and prepared text is found again."""
    at_call(monkeypatch, recipe.train, "open_dataset", 1, lambda: send("SIGUSR1"))
    with pytest.raises(SystemExit) as stopped:
        train()
    assert stopped.value.code == EXIT_STOPPED and job_file.exists()
    assert "SIGUSR1" in capsys.readouterr().out
