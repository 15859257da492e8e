"""Numbers that are not finite, too little memory and a lost process: what ends a run, and what it leaves."""

import contextlib
import errno
import itertools
import json
import math
import os
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


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])  # a fused kernel skips a step by itself
def test_a_loss_that_is_not_finite_skips_its_update_and_ten_in_a_row_end_the_run(
    train, monkeypatch, tmp_path, saves_at_once, optim
):
    """Even if the gradients themselves are finite. Step 11 is made. The log stays JSON."""
    added = dict.fromkeys(range(2, 11), math.nan) | dict.fromkeys(range(12, 100), math.inf)
    loss_sum = LanguageModelingLoss._loss_sum
    steps = itertools.count(1)
    monkeypatch.setattr(
        LanguageModelingLoss, "_loss_sum", lambda *arguments: loss_sum(*arguments) + added.get(next(steps), 0.0)
    )
    with pytest.raises(UserError, match="step 21: 10 .*--learning_rate"):
        train("--max_steps", 50, "--logging_steps", 7, "--save_steps", 5, "--optim", optim)
    run = tmp_path / "run"
    events = read_events(run, "train")
    assert [(event["step"], event["skipped_steps"]) for event in events] == [(1, 0), (7, 6), (14, 12), (21, 19)]
    assert [event["loss"] is None for event in events] == [False, True, True, True]
    weights = [read_weights(run / f"checkpoint-{step}") for step in (5, 10, 15, 20)]
    assert [a != b for a, b in itertools.pairwise(weights)] == [False, True, False]
    for line in (run / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


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


def test_a_mistake_that_only_one_process_finds_is_printed(monkeypatch):
    """It waits its turn, as the first one of its machine may be about to say the same and to end them all."""
    for name, value in {"RANK": "5", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    with pytest.raises(SystemExit, match="^error: a mistake$"):
        run_main(mock.Mock(side_effect=UserError("a mistake")))
    assert waits == [1.5]


class DistBackendError(RuntimeError):
    """Stands for torch.distributed's, which has the same name."""


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (DistBackendError("NCCL error: remote process exited or there was a network error"), " ".join(AUTO)),
        (DistBackendError("[third_party/gloo/pair.cc:534] Connection closed by peer [10.0.0.2]:1234"), " ".join(AUTO)),
        (DistBackendError("NCCL error: invalid usage. Duplicate GPU detected : rank 0 and rank 1"), None),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), os.strerror(errno.ENOSPC)),
        (FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)), None),
    ],
)
def test_a_lost_process_and_a_full_disk_are_one_sentence_and_mistakes_keep_their_traceback(error, sentence):
    """Of a lost process, the sentence names the way to resume."""
    expected = type(error) if sentence is None else SystemExit
    with pytest.raises(expected, match=None if sentence is None else f"^error: .*{sentence}"):
        run_main(mock.Mock(side_effect=error))


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
    RunLog.say(mock.Mock(enabled=True, bar=None), "\x1b[2J\ta\n\x9b1mb\r")
    assert capsys.readouterr().out == " [2J\ta\n 1mb \n"
