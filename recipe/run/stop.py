"""How a run ends early: signals, the launcher's death, a lost machine, too little memory."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

from recipe.checkpoint import CheckpointSaver
from recipe.errors import ProcessError, lost_a_process
from recipe.hardware.memory import REMEDY, SMALLER_NAME, is_out_of_memory, smaller_micro_batches
from recipe.hardware.processes import LAUNCHER_DIED, largest_of_processes
from recipe.run.folder import RESUMABLE_NAME
from recipe.run.start import Run

EXIT_STOPPED = 75  # EX_TEMPFAIL in sysexits.h: the run was saved, and the same command resumes it
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
SAME_SIGNAL_SECONDS = 1.0  # two Ctrl-C within this time are one: the launcher forwards what the process also gets


class StopSignals:
    """Within a `with` block, signals only set `received`; the loop looks at it. A second Ctrl-C ends the process."""

    def __init__(self) -> None:
        self.received = 0  # the number of the first signal
        self.received_at = 0.0
        self.handlers: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        for number in (*SIGNALS, LAUNCHER_DIED):
            if signal.getsignal(number) != signal.SIG_IGN:  # under nohup, SIGHUP stays ignored
                self.handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.handlers.items():
            # The launcher's death may follow any other signal.
            signal.signal(number, signal.SIG_IGN if number == LAUNCHER_DIED else handler)

    def agree(self, seconds: float = 0.0) -> tuple[int, float]:
        """Return the signal to stop for, or 0, and the time, the same on all processes, which call it together."""
        number, seconds = largest_of_processes(self.received, seconds)
        return int(number), seconds

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if not self.received:
            self.received, self.received_at = number, time.monotonic()
            if os.environ.get("RANK", "0") == "0" and number != LAUNCHER_DIED:
                again = " Press it again to quit without saving." if number == signal.SIGINT else ""
                name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
                os.write(2, f"\n{name}: finishing this step and saving.{again}\n".encode())
        elif number == signal.SIGINT and time.monotonic() - self.received_at > SAME_SIGNAL_SECONDS:
            os._exit(128 + number)


def describe_signal(number: int) -> str:
    return "the end of its launcher" if number == LAUNCHER_DIED else signal.Signals(number).name


@contextlib.contextmanager
def resumable(run: Run, saver: CheckpointSaver) -> Iterator[None]:
    """Leave a file for the job script if the same command can continue the run after an error.

    That is so after a machine is lost, if this process had saved, and after running out of memory, with half of the
    micro-batch: the examples of a step do not depend on it.
    """
    output_dir, size, accelerator = run.output_dir, run.plan.micro_batch_size, run.accelerator
    smaller = smaller_micro_batches(run.hardware, size, accelerator.num_processes, accelerator.device.type)
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            if not smaller:
                raise ProcessError(f"out of memory; {REMEDY}") from error
            (output_dir / SMALLER_NAME).write_text(f"{smaller[0]}\n")
            (output_dir / RESUMABLE_NAME).touch()
            raise ProcessError(
                "out of memory; the same command with --resume_from_checkpoint auto continues from the newest "
                f"checkpoint with micro-batches of {smaller[0]}"
            ) from error
        if lost_a_process(error) and saver.has_saved:  # otherwise the job would be queued again forever
            (output_dir / RESUMABLE_NAME).touch()
        raise
