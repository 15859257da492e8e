"""Progress bars: redrawn in a terminal, occasional lines in a log file."""

import sys
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
