"""Where progress bars go: redrawn in a terminal, a line now and then in a log file."""

import sys
from typing import Any, TextIO

from tqdm import tqdm


def progress_target() -> dict[str, Any]:
    """A terminal gets a bar that redraws itself; a log file gets a plain line every ten seconds."""
    if sys.stderr.isatty():
        return {"file": sys.stderr, "mininterval": 0.2}
    return {"file": LineStream(sys.stderr), "mininterval": 10, "maxinterval": 60, "ascii": True, "ncols": 100}


class LineStream:
    """Turns the carriage returns of a progress bar into line ends."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> None:
        line = text.strip("\r\n ")
        if line:
            self.stream.write(line + "\n")

    def flush(self) -> None:
        self.stream.flush()


class PreparationProgress:
    """Bytes of text read, with MB/s and ETA, and the documents and tokens they gave."""

    def __init__(self, num_bytes: int | None, num_bytes_done: int = 0) -> None:
        """num_bytes: of all the text, or None where that is not known; num_bytes_done: by an interrupted run."""
        self.num_documents = self.num_tokens = 0
        self.bar = tqdm(
            total=num_bytes,
            initial=num_bytes_done,
            unit="B",
            unit_scale=True,
            desc="prepare",
            dynamic_ncols=True,
            **progress_target(),
        )

    def __enter__(self) -> "PreparationProgress":
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.close()

    def add(self, num_documents: int, num_bytes: int, num_tokens: int) -> None:
        self.num_documents += num_documents
        self.num_tokens += num_tokens
        seconds = self.bar.format_dict["elapsed"]
        rate = f", {self.num_tokens / seconds / 1e6:.1f}M tokens/s" if seconds else ""
        self.bar.set_postfix_str(f"{tqdm.format_sizeof(self.num_documents)} docs{rate}", refresh=False)
        self.bar.update(num_bytes)
