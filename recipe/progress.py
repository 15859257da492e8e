"""What a program prints while it works: bars, redrawn in a terminal or as lines in a log file, and lost lines."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO


def progress_target() -> dict[str, Any]:
    """Return tqdm's options for a bar that redraws itself in a terminal, or adds a line every ten seconds to a log."""
    if sys.stderr.isatty():
        return {"file": sys.stderr, "mininterval": 0.2}
    return {"file": LineStream(sys.stderr), "mininterval": 10, "maxinterval": 60, "ascii": True, "ncols": 100}


class LineStream:
    """Turns the carriage returns of a progress bar into line breaks, and drops its cursor movements."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> None:
        line = text.replace("\x1b[A", "").strip("\r\n ")
        if line:
            self.stream.write(line + "\n")

    def flush(self) -> None:
        self.stream.flush()


class UnfailingStream:
    """Stands for sys.stdout or sys.stderr, and drops what cannot be written there."""

    def __init__(self, stream: TextIO | None) -> None:
        # None: it was closed, as by `>&-`. The next file that is opened would get its number.
        self.stream = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w") if stream is None else stream
        self.error: OSError | None = None  # the first one

    def write(self, text: str) -> int:
        self._try(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            self.error = self.error or error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def unfailing_output() -> Iterator[None]:
    """Let no line that cannot be printed end a program: a full log, a reader that has ended, a terminal that is gone.

    At the end, what is left of the output says so.
    """
    before = sys.stdout, sys.stderr
    output, errors = sys.stdout, sys.stderr = [*map(UnfailingStream, before)]
    try:
        yield
    finally:
        for failed, other in ((output, errors), (errors, output)):
            if failed.error is not None:
                print(f"warning: not all lines could be printed: {failed.error.strerror}", file=other, flush=True)
        sys.stdout, sys.stderr = before
