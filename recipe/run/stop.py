"""Being stopped: signals become a request that all processes see after the same step.

In: SIGTERM, SIGINT, SIGUSR1, or the death of the launcher. Out: `StopRequest.agreed`, asked once a step.
"""

import os
import signal
import socket
import threading
import time
from types import FrameType

import torch
import torch.distributed

from recipe.hardware.processes import LAUNCHER_DIED

EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: saved, and the same command goes on
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
SAME_SIGNAL_SECONDS = 1.0  # within which a signal that comes twice is one: sent to the process, and by its launcher


class StopRequest:
    """Turns signals into a stop after a step that all processes agree on. A second signal of a kind exits at once."""

    def __init__(self, group: torch.distributed.ProcessGroup | None) -> None:
        """group: connects the hosts of all processes, so that the devices never wait; None for a single process."""
        self.signal: int | None = None  # the first one that came
        self.group = group
        self.asked: tuple[torch.distributed.Work, torch.Tensor] | None = None
        # nohup's SIGHUP stays ignored.
        self.numbers = [n for n in (*SIGNALS, LAUNCHER_DIED) if signal.getsignal(n) != signal.SIG_IGN]
        for number in self.numbers:
            signal.signal(number, self._receive)
        # Python runs a handler only when the main thread is back from a device or another process, which is just when
        # a user sends a second signal: a thread reads the numbers as they come.
        self.wakeup = socket.socketpair()
        self.wakeup[1].setblocking(False)
        signal.set_wakeup_fd(self.wakeup[1].fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True).start()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.signal = self.signal or number

    def _watch(self) -> None:
        came_at: dict[int, float] = {}
        while number := self.wakeup[0].recv(1):
            if number[0] in SIGNALS:
                now = time.monotonic()
                if not came_at and os.environ.get("RANK", "0") == "0":
                    say = f"\n{signal.Signals(number[0]).name}: stopping after this step; once more exits at once\n"
                    os.write(2, say.encode())
                if now - came_at.setdefault(number[0], now) > SAME_SIGNAL_SECONDS:
                    os._exit(128 + number[0])

    def agreed(self) -> int | None:
        """The signal to stop for, on all processes after the same step; each asks once a step.

        The answer is to the question of the step before, so that no process waits for the slowest one.
        """
        if self.group is None:
            return self.signal
        answer = None
        if self.asked is not None:
            work, flag = self.asked
            work.wait()
            answer = int(flag.item()) or None
            self.signal = self.signal or answer
        flag = torch.tensor(self.signal or 0)
        work = torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self.group, async_op=True)
        self.asked = work, flag
        return answer

    def close(self) -> None:
        """Let signals end the process again, but not the launcher's end, which may follow any of them."""
        if self.asked is not None:
            self.asked[0].wait()
        # Before the process groups are destroyed: a Work that outlives its group may hang the process as it ends.
        self.asked = self.group = None
        signal.set_wakeup_fd(-1)
        self.wakeup[1].close()
        for number in self.numbers:
            default = signal.SIG_IGN if number == LAUNCHER_DIED else signal.SIG_DFL
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else default)

    def why(self) -> str:
        """What the run was stopped by."""
        return "the end of its launcher" if self.signal == LAUNCHER_DIED else signal.Signals(self.signal).name
