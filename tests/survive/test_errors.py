"""Numbers that are not finite, too little memory and a lost process: what ends a run, and what it leaves."""

import contextlib
import itertools
import json
import math
import re
import shlex
import time
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from faults import AUTO, at_call
from helpers import read_events, read_summary, read_weights

from recipe.errors import LostProcessError, UserError, run_main
from recipe.model.loss import LanguageModelingLoss
from recipe.optim.guard import UpdateGuard
from recipe.run.log import RunLog

# ------------------------------------------------------------------ numbers that are not finite


def spoil(monkeypatch, values: dict[int, float]):
    """Add a number to the loss of some steps, without changing its gradients. values: {step: NaN or Inf}."""
    loss_sum, steps = LanguageModelingLoss._loss_sum, itertools.count(1)

    def spoiled(*arguments):
        return loss_sum(*arguments) + values.get(next(steps), 0.0)

    monkeypatch.setattr(LanguageModelingLoss, "_loss_sum", spoiled)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])  # a fused kernel skips a step by itself
def test_a_loss_that_is_not_finite_does_not_change_the_weights(train, monkeypatch, optim):
    """NaN and Inf skip the update, even if the gradients themselves are finite; the next good one is made."""
    spoil(monkeypatch, {2: math.nan, 3: math.inf, 4: math.nan})
    run = train("--max_steps", 6, "--save_steps", 1, "--lr_scheduler_type", "constant", "--optim", optim)
    weights = [read_weights(run / f"checkpoint-{step}") for step in range(1, 7)]
    assert [a != b for a, b in itertools.pairwise(weights)] == [False, False, False, True, True]
    events = read_events(run, "train")
    assert [event["loss"] is None for event in events] == [False, True, True, True, False, False]
    assert [event["skipped_steps"] for event in events] == [0, 1, 2, 3, 3, 3]


def test_a_run_stops_after_ten_updates_in_a_row_that_are_not_finite(train, monkeypatch, tmp_path):
    """Nine are only skipped and counted. Its log stays JSON."""
    spoil(monkeypatch, dict.fromkeys([*range(2, 11), *range(12, 100)], math.nan))
    with pytest.raises(UserError, match="step 21: 10 .*--learning_rate"):
        train("--max_steps", 50, "--logging_steps", 7, "--save_steps", 5)
    events = read_events(tmp_path / "run", "train")
    assert [(event["step"], event["skipped_steps"]) for event in events] == [(1, 0), (7, 6), (14, 12), (21, 19)]
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


# ------------------------------------------------------------------ out of memory


def run_out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def test_a_run_out_of_memory_names_the_micro_batch_with_which_it_continues(
    train, tmp_path, monkeypatch, job_file, saves_at_once
):
    """Whatever raised the error. The losses stay the same; a job is not queued again, as it would fail again."""
    options = ["--max_steps", 6, "--global_batch_size", 8, "--save_steps", 2, *AUTO]
    expected = read_events(train(*options, output_dir=tmp_path / "plain"), "train")
    smaller = []
    for owner, name, call, left in (
        (Accelerator, "accumulate", 2, 4),  # before the first checkpoint
        (Accelerator, "backward", 6, 2),  # in the second micro-batch of step 3
        (torch.optim.AdamW, "step", 2, 1),
    ):
        with monkeypatch.context() as patch, pytest.raises(UserError) as error:
            at_call(patch, owner, name, call, run_out_of_memory)
            train(*options, *smaller)
        smaller = shlex.split(re.search(r"--per_device_train_batch_size \d+", str(error.value))[0])
        assert smaller[1] == str(left) and "--resume_from_checkpoint auto" in str(error.value)
        assert not job_file.exists()
    run = train(*options, *smaller)
    assert read_summary(run)["per_device_train_batch_size"] == 1
    for key in ("loss", "grad_norm"):
        found = [event[key] for event in read_events(run, "train")]
        assert found == pytest.approx([event[key] for event in expected], abs=1e-5)


# ------------------------------------------------------------------ one of several processes


def test_a_mistake_that_only_one_process_finds_is_printed(monkeypatch):
    """It waits its turn, as the first one of its machine may be about to say the same and to end them all."""
    for name, value in {"RANK": "5", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    with pytest.raises(SystemExit, match="^error: a mistake$"):
        run_main(mock.Mock(side_effect=UserError("a mistake")))
    assert waits == [1.5]


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
def test_a_lost_process_is_one_sentence_and_a_mistake_keeps_its_traceback(message, is_lost):
    """The sentence names the way to resume."""
    main = mock.Mock(side_effect=DistBackendError(message))
    expected = SystemExit if is_lost else DistBackendError
    with pytest.raises(expected, match="^error: .*--resume_from_checkpoint auto" if is_lost else "Duplicate"):
        run_main(main)


LOST = [DistBackendError("gloo/transport: connection reset"), LostProcessError("a process that tokenizes has ended")]


@pytest.mark.parametrize("error", [*LOST, UserError("a mistake"), None])
@pytest.mark.parametrize("has_saved", [True, False])
def test_a_job_is_queued_again_if_that_helps(train, job_file, monkeypatch, saves_at_once, error, has_saved):
    """After a checkpoint, however the process ends, since even SIGKILL leaves the file; not after a deliberate end."""
    seen = []

    def fail():
        seen.append(job_file.exists())
        if error:
            raise error

    at_call(monkeypatch, UpdateGuard, "allows", 4, fail)
    with pytest.raises(type(error)) if error else contextlib.nullcontext():
        train("--save_steps", 2 if has_saved else 0)
    assert seen == [has_saved]
    assert job_file.exists() == (has_saved and error in LOST)


def test_no_line_of_a_run_controls_the_terminal(capsys):
    """Names of files and samples may hold anything."""
    text = "\x1b[2J\ta\n\x9b1mb\r"
    RunLog.say(mock.Mock(enabled=True, bar=None), text)
    with pytest.raises(SystemExit) as end:
        run_main(mock.Mock(side_effect=UserError(text)))
    assert capsys.readouterr().out == " [2J\ta\n 1mb \n" and end.value.code == "error:  [2J\ta\n 1mb "
