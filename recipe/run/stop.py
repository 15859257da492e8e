"""Turn signals and the launcher's death into a stop after a step on which all processes agree."""

import os
import signal
import socket
import threading
import time
from types import FrameType

from recipe.hardware.processes import LAUNCHER_DIED, largest_of_processes

EXIT_STOPPED = 75  # EX_TEMPFAIL in sysexits.h: the run was saved, and the same command resumes it
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
SAME_SIGNAL_SECONDS = 1.0  # two signals within this time are one: the launcher forwards what the process also gets


class StopRequest:
    """Turns the first signal into a stop after the current step. A second one of the same kind exits at once."""

    def __init__(self) -> None:
        self.signal: int | None = None  # the first one received
        # Under nohup, SIGHUP stays ignored.
        self.numbers = [n for n in (*SIGNALS, LAUNCHER_DIED) if signal.getsignal(n) != signal.SIG_IGN]
        for number in self.numbers:
            signal.signal(number, self._receive)
        # Python runs a handler only when the main thread returns from a device or another process, and that wait is
        # when users send a second signal. A thread reads the numbers as they arrive.
        self.wakeup = socket.socketpair()
        self.wakeup[1].setblocking(False)
        signal.set_wakeup_fd(self.wakeup[1].fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True).start()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.signal = self.signal or number

    def _watch(self) -> None:
        received_at: dict[int, float] = {}
        while number := self.wakeup[0].recv(1):
            if number[0] in SIGNALS:
                now = time.monotonic()
                if not received_at and os.environ.get("RANK", "0") == "0":
                    name = "Ctrl-C" if number[0] == signal.SIGINT else signal.Signals(number[0]).name
                    again = "Press it" if number[0] == signal.SIGINT else "Send it"
                    message = f"\n{name}: finishing this step and saving. {again} again to quit without saving.\n"
                    os.write(2, message.encode())
                if now - received_at.setdefault(number[0], now) > SAME_SIGNAL_SECONDS:
                    os._exit(128 + number[0])

    def agreed(self) -> int | None:
        """Return the signal to stop for, on all processes after the same step. Each calls it once per step."""
        self.signal = largest_of_processes(self.signal or 0) or None
        return self.signal

    def close(self) -> None:
        """Let signals end the process again, except the launcher's death, which may follow any of them."""
        signal.set_wakeup_fd(-1)
        self.wakeup[1].close()
        for number in self.numbers:
            default = signal.SIG_IGN if number == LAUNCHER_DIED else signal.SIG_DFL
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else default)

    def why(self) -> str:
        """Return what stopped the run."""
        return "the end of its launcher" if self.signal == LAUNCHER_DIED else signal.Signals(self.signal).name
