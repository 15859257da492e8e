"""How a run ends early: signals, the launcher's death or impatience, too little memory."""

import contextlib
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from recipe.arguments import shell_command
from recipe.checkpoint import list_checkpoints, mark_resumable
from recipe.config import TrainConfig
from recipe.disk import flush
from recipe.errors import LostProcessError, ProcessError, UserError
from recipe.hardware.choices import Facts
from recipe.hardware.memory import MemoryPlan, smaller_micro_batches
from recipe.hardware.processes import LAUNCHER_DIED, largest_of_processes
from recipe.hardware.trial import REMEDY, is_out_of_memory, record_micro_batch
from recipe.launcher import is_main_process

EXIT_STOPPED = 75  # EX_TEMPFAIL in sysexits.h: the run was saved, and the same command resumes it
NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))  # Windows has two of them
SAME_SIGNAL_SECONDS = 1.0  # two Ctrl-C within this time are one: the launcher forwards what the process also gets

SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
SLOWEST_DISK = 10e6  # bytes per second; if a disk this slow saves a state in time, the real one is not measured


class StopSignals:
    """Within a `with` block, signals are only counted; the loop looks at them. A second Ctrl-C ends the process."""

    def __init__(self, reaction: str = "finishing this step and saving") -> None:
        """reaction: what the first signal makes the program do, for the user."""
        self.reaction = reaction
        self.count, self.newest = 0, 0  # number of signals, number of the signal
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
        self.count, self.newest = self.count + 1, number


def find_kill_warning(output_dir: Path, state_bytes: float) -> str | None:
    """Return `kill_warning` for the run's disk. The disk's speed is measured only if it matters."""
    if kill_warning(os.environ, state_bytes, SLOWEST_DISK) is None:
        return None
    return kill_warning(os.environ, state_bytes, measure_disk(output_dir))


def kill_warning(environment: Mapping[str, str], state_bytes: float, bytes_per_second: float) -> str | None:
    """Return why a signal may lose what has not been saved, and the remedy; None if a checkpoint is written in time.

    torchrun's agent, which `accelerate launch` becomes for several processes, kills them 30 seconds after a signal to
    it, unless a variable in its environment says otherwise (torch 2.13, distributed/launcher/api.py).
    """
    typed = environment.get(SHUTDOWN_TIMEOUT, "")
    limit, seconds = int(typed) if typed.isdigit() else 30, state_bytes / bytes_per_second
    if "TORCHELASTIC_RUN_ID" not in environment or 1.5 * seconds <= limit:  # half again: a step comes first
        return None
    return (
        f"after Ctrl-C or SIGTERM, the launcher kills this run in {limit} seconds, but a checkpoint takes "
        f"{seconds:,.0f} ({state_bytes / 1e9:.1f} GB at {bytes_per_second / 1e6:,.0f} MB/s); put "
        f"{SHUTDOWN_TIMEOUT}={600 * math.ceil(1.5 * seconds / 600)} before your command"
    )


def measure_disk(directory: Path) -> float:
    """Return the bytes per second at which 64 MB reach the disk; infinity if it is full, as a save will say."""
    folder, block = directory / ".checkpoint-speed.partial", os.urandom(10**6)
    started_at = time.perf_counter()
    try:
        folder.mkdir(exist_ok=True)
        with open(folder / "data", "wb") as file:
            for _ in range(64):
                file.write(block)
        flush(folder / "data")
        return 64e6 / (time.perf_counter() - started_at)
    except OSError:
        return math.inf
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # after a kill, `clean_checkpoints` does it


def describe_signal(number: int) -> str:
    return "the end of its launcher" if number == LAUNCHER_DIED else signal.Signals(number).name


@contextlib.contextmanager
def resumable(output_dir: Path, config: TrainConfig, plan: MemoryPlan, facts: Facts) -> Iterator[None]:
    """Let the same command continue a run that ran out of memory, with half of the micro-batch if its size is `auto`.

    The micro-batch does not change the examples of a step. A `UserError` is final: the same command would fail again.
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
        smaller = smaller_micro_batches(config, plan.micro_batch_size, facts)
        mark_resumable(bool(smaller))
        if not smaller:
            raise ProcessError(f"out of memory; {REMEDY}") from error
        record_micro_batch(output_dir, plan, smaller[0])
        how = "continues from the newest checkpoint" if list_checkpoints(output_dir) else "starts again"
        again = shell_command(output_dir=output_dir, resume_from_checkpoint="auto")
        message = f"out of memory; the same command with {again} {how}, with micro-batches of {smaller[0]}"
        raise ProcessError(message) from error
