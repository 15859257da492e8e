"""Progress bars: redrawn in a terminal, occasional lines in a log file."""

import sys
from typing import Any, TextIO

from tqdm import tqdm


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


class PreparationProgress(tqdm):
    """Bytes of text read, with MB/s and ETA, and the documents and tokens in them."""

    num_documents = num_tokens = 0

    def __init__(self, num_bytes: int | None, num_bytes_done: int) -> None:
        options = {"unit": "B", "unit_scale": True, "dynamic_ncols": True, **progress_target()}
        super().__init__(desc="prepare", total=num_bytes, initial=num_bytes_done, **options)

    def add(self, num_documents: int, num_bytes: int, num_tokens: int) -> None:
        self.num_documents += num_documents
        self.num_tokens += num_tokens
        seconds = self.format_dict["elapsed"]
        rate = f", {self.num_tokens / seconds / 1e6:.1f}M tokens/s" if seconds else ""
        self.set_postfix_str(f"{self.format_sizeof(self.num_documents)} docs{rate}", refresh=False)
        self.update(num_bytes)
