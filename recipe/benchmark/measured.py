"""Read measured throughput and memory from the result files of run_ladder.py and first_gpu.py."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.errors import UserError, one_line
from recipe.hardware.gpus import Gpu, find_gpu

# How recipe/benchmark/ladder.py describes a setting.
SETTING = re.compile(r"([\d,.]+) M parameters, \d+ rows of (\d+) tokens per step, (\d+) rows per forward pass")


@dataclass(frozen=True)
class Measurement:
    """A run of the recipe's defaults on one GPU, and the file that has it."""

    gpu: str
    millions_of_parameters: float
    block_size: int
    micro_batch_size: int
    tokens_per_second: float
    peak_memory_bytes: int
    file: str


def read_measurements(folder: Path) -> list[Measurement]:
    """Read the result files of run_ladder.py (its top rung) and first_gpu.py (its stage `ours`) below a folder.

    Raises `UserError` for a file that is not JSON.
    """
    found = []
    for path in sorted(folder.rglob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path} is not valid JSON: {one_line(error)}; delete or repair it") from error
        if not isinstance(content, dict) or not isinstance(content.get("environment"), dict):
            continue
        gpu = find_gpu(str(content["environment"].get("device")))
        entry, setting = _default_run(content)
        shape = SETTING.search(setting)
        if gpu is None or shape is None or "tokens_per_second" not in entry:
            continue
        millions, block_size, rows = shape.groups()
        numbers = entry["tokens_per_second"], entry["peak_memory_bytes"]
        size = float(millions.replace(",", "")), int(block_size), int(rows)
        found.append(Measurement(gpu.name, *size, *numbers, path.name))
    return found


def _default_run(content: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return a result file's run of the recipe's defaults, and the description of its setting."""
    if content.get("name") == "ours":
        return content["result"], str(content["result"].get("setting"))
    timed = [entry for entry in content.get("ladder", []) if "tokens_per_second" in entry]
    return (timed[-1] if timed else {}), str(content.get("setting"))


def find_measurement(
    measurements: Sequence[Measurement], gpu: Gpu, num_parameters: int, block_size: int
) -> Measurement | None:
    """Return the fastest measurement of a model on a GPU. Models are told apart by their size.

    num_parameters: with the padded vocabulary; result files do not count the padding and round to 0.1 M.
    """
    millions = num_parameters / 1e6
    same = [
        found
        for found in measurements
        if (found.gpu, found.block_size) == (gpu.name, block_size)
        and abs(found.millions_of_parameters - millions) < 0.05 + 0.005 * millions
    ]
    return max(same, key=lambda found: found.tokens_per_second, default=None)
