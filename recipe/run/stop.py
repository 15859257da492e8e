"""How a run ends early: signals, the launcher's death or impatience, too little memory."""

import contextlib
import dataclasses
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from recipe.arguments import shell_command
from recipe.checkpoint import list_checkpoints, mark_resumable
from recipe.errors import LostProcessError, UserError
from recipe.hardware.memory import smaller_micro_batches
from recipe.hardware.processes import LAUNCHER_DIED, largest_of_processes
from recipe.hardware.trial import REMEDY, is_out_of_memory
from recipe.launcher import is_main_process
from recipe.run.decide import Run

EXIT_STOPPED = 75  # EX_TEMPFAIL in sysexits.h: the run was saved, and the same command resumes it
NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))  # Windows has two of them
SAME_SIGNAL_SECONDS = 1.0  # two Ctrl-C within this time are one: the launcher forwards what the process also gets

SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
NOTICE = getattr(signal, "SIGUSR1", None)  # of Slurm, before a time limit


class StopSignals:
    """Within a `with` block, signals are only counted; the loop looks at them. A second Ctrl-C ends the process."""

    def __init__(self, reaction: str = "finishing this step and saving") -> None:
        """reaction: what the first signal makes the program do, for the user."""
        self.reaction = reaction
        self.count = 0  # of signals
        self.newest = 0  # the number of the last one
        self.interrupted_at: float | None = None  # the first Ctrl-C
        self.agreed = 0  # the signal on which the processes have agreed
        self.handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # Python sets handlers nowhere else
            for number in filter(None, (*SIGNALS, LAUNCHER_DIED)):
                if signal.getsignal(number) != signal.SIG_IGN:  # under nohup, SIGHUP stays ignored
                    self.handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def agree(self, seconds: float = 0.0) -> tuple[bool, float]:
        """Return whether to stop, and the time: the same on all processes, which call this together."""
        number, seconds = largest_of_processes(self.newest, seconds)
        self.agreed = int(number)
        return self.agreed > 0, seconds

    def must_stop(self) -> bool:
        """Return whether to stop, as `agree` does."""
        return self.agree()[0]

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT:
            if self.interrupted_at is not None and now - self.interrupted_at > SAME_SIGNAL_SECONDS:
                os._exit(128 + number)
            self.interrupted_at = self.interrupted_at or now
        if not self.count and is_main_process() and number != LAUNCHER_DIED:
            again = " Press it again to quit at once." if number == signal.SIGINT else ""
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            with contextlib.suppress(Exception):  # a terminal that is gone; 2 may be another file by now
                os.write(sys.stderr.fileno(), f"\n{name}: {self.reaction}.{again}\n".encode())
        self.count += 1
        self.newest = number


@contextlib.contextmanager
def leave_preparation() -> Iterator[None]:
    """Before the loop handles signals, exit on Slurm's notice, so that the job is queued again. Nothing is lost."""

    def leave(number: int, _frame: FrameType | None) -> None:
        mark_resumable(True)
        if is_main_process():
            print(f"stopped by {describe_signal(number)} before its first step; repeat the command", flush=True)
        sys.exit(EXIT_STOPPED)

    if NOTICE is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(NOTICE, leave)
    try:
        yield
    finally:
        signal.signal(NOTICE, before)


def kill_warning(environment: Mapping[str, str], seconds: float) -> str | None:
    """Return why a signal may lose what has not been saved, and the remedy; None if there is time enough.

    seconds: of a step and a checkpoint. torchrun's agent, which `accelerate launch` becomes for several processes,
    kills them 30 seconds after a signal to it, unless a variable in its environment says otherwise (torch 2.13,
    distributed/launcher/api.py).
    """
    typed = environment.get(SHUTDOWN_TIMEOUT, "")
    limit = int(typed) if typed.isdigit() else 30
    needed = 1.5 * seconds
    if "TORCHELASTIC_RUN_ID" not in environment or needed <= limit:
        return None
    return (
        f"after Ctrl-C or SIGTERM, the launcher kills this run in {limit} seconds, but a step and a checkpoint take "
        f"{seconds:,.0f}; put {SHUTDOWN_TIMEOUT}={600 * math.ceil(needed / 600)} before your command"
    )


def describe_signal(number: int) -> str:
    return "the end of its launcher" if number == LAUNCHER_DIED else signal.Signals(number).name


@contextlib.contextmanager
def resumable(run: Run) -> Iterator[None]:
    """Tell a job script after an error whether the same command would continue the run. A mistake is final.

    So is a lack of memory, whose `UserError` says which micro-batch to try.
    """
    try:
        yield
    except LostProcessError:
        raise
    except UserError:
        mark_resumable(False)
        raise
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        mark_resumable(False)
        requested = dataclasses.replace(
            run.start.requested, per_device_train_batch_size="auto", gradient_accumulation_steps=None
        )
        smaller = smaller_micro_batches(requested, run.plan.micro_batch_size, run.start.machine)
        remedy = REMEDY
        if smaller:  # which does not change the examples of a step
            folder = run.start.output_dir
            how = "continues from the newest checkpoint" if list_checkpoints(folder) else "starts again"
            again = shell_command(
                per_device_train_batch_size=smaller[0], output_dir=folder, resume_from_checkpoint="auto"
            )
            remedy = f"the same command with {again} {how}"
        raise UserError(f"out of memory; {remedy}") from error
