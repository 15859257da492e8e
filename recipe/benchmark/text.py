"""Synthetic text for measurements of data preparation, the same on every machine with the same Python."""

import json
import random
from pathlib import Path

from recipe.data.files import read_standard_library

LINES_PER_DOCUMENT = 100  # about 4 kB


def write_text(path: Path, megabytes: float) -> None:
    """Write lines of Python's standard library in random order, as distinct JSON lines or as one text."""
    lines = [line for text in read_standard_library() for line in text.splitlines() if line.strip()]
    rng, size = random.Random(0), 0
    with open(path, "w", encoding="utf-8") as file:
        while size < megabytes * 1e6:
            text = "\n".join(rng.choices(lines, k=LINES_PER_DOCUMENT))
            size += len(text.encode())
            file.write(json.dumps({"text": text}) + "\n" if path.suffix == ".jsonl" else text + "\n")
