"""What a program prints while it works: bars, redrawn in a terminal or as lines in a log file; lines that may fail."""

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
    """Stands for sys.stdout or sys.stderr. What cannot be written there is lost."""

    def __init__(self, stream: TextIO | None) -> None:
        # None: it was closed, as by `>&-`. The next file that is opened would get its number.
        self.stream = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w") if stream is None else stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        self._try(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, act: Callable[..., object], *arguments: str) -> None:
        try:
            act(*arguments)
        except OSError as error:
            self.error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def unfailing_output() -> Iterator[None]:
    """Let no line end a program: the log is full, its reader has ended, the terminal is gone. Stderr says so."""
    before = sys.stdout, sys.stderr
    output, errors = sys.stdout, sys.stderr = [*map(UnfailingStream, before)]
    try:
        yield
    finally:
        if output.error is not None:
            print(f"warning: not all lines could be printed: {output.error.strerror}", file=errors, flush=True)
        sys.stdout, sys.stderr = before
