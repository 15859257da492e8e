"""Measure speed and resident memory of a CPU run under several settings of its allocator.

python scripts/benchmarks/cpu_memory.py --output_file scripts/benchmarks/cpu_memory.json

Two programs: an artificial loop that frees large tensors and keeps small ones, which fragments the memory of glibc
before 2.38 (glibc bug 14581), and recipe/train.py with a long evaluation. Settings: torch's default, mallopt (glibc
keeps what is freed), huge pages, and huge pages with `FreedMemory`, which recipe/train.py uses. The settings take
turns; each measurement is a fresh process.
"""

import json
import platform
import tempfile
from pathlib import Path

from recipe.arguments import CommandLine
from recipe.benchmark.measure import TRAIN, finish_results, run_python
from recipe.errors import run_main

NO_HUGE_PAGES, HUGE_PAGES = (f"import os; os.environ['THP_MEM_ALLOC_ENABLE'] = '{on}'\n" for on in "01")
KEEP_FREED = "import recipe.hardware.host_memory as m; m.FreedMemory.give_back = lambda self: False\n"
MALLOPT = """
import ctypes
libc = ctypes.CDLL(None)
assert libc.mallopt(-3, 2**30) == 1 and libc.mallopt(-1, 2**31 - 1) == 1
"""
SETTINGS = {  # what runs before torch is imported
    "default": NO_HUGE_PAGES + KEEP_FREED,
    "mallopt": NO_HUGE_PAGES + MALLOPT + KEEP_FREED,
    "huge pages": HUGE_PAGES + KEEP_FREED,
    "huge pages, freed memory given back": HUGE_PAGES,
}
LOOP = """
import random, sys, torch
from recipe.hardware.host_memory import FreedMemory
freed_memory, kept, rng = FreedMemory(), [], random.Random(0)
for _ in range(int(sys.argv[1])):
    for sizes in ([300_000, 800_000, 1_600_000, 3_000_000, 6_000_000], [700_000, 1_500_000, 5_000_000]):
        large = torch.ones(rng.choice(sizes))
        kept.append(torch.ones(rng.choice([1, 16, 200, 3000])))
    freed_memory.give_back()
"""
TRAINING = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
OPTIONS = "--overwrite --eval_steps 100 --output_dir run --max_eval_samples all --save_steps 0 --dynamo_backend no"
ROUNDS, ITERATIONS, STEPS = 2, 600, 300  # runs of each setting; iterations of the artificial loop; training steps


def main() -> None:
    parser = CommandLine(description="Measure speed and memory of a CPU run under several allocator settings.")
    parser.add_argument("--output_file", type=Path, help="JSON to write")
    output_file = parser.parse_args().output_file
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for setting in [*SETTINGS] * ROUNDS:
            loop_seconds, loop_mb = run_python("-c", SETTINGS[setting] + LOOP, ITERATIONS, directory=folder)
            training = [TRAIN, *OPTIONS.split(), "--max_steps", STEPS]
            _, run_mb = run_python("-c", SETTINGS[setting] + TRAINING, *training, directory=folder)
            summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
            loop = {"loop_seconds": round(loop_seconds, 1), "loop_gb": round(loop_mb / 1024, 2)}
            run = {"tokens_per_second": round(summary["tokens_per_second"]), "run_gb": round(run_mb / 1024, 2)}
            results.append({"setting": setting, **loop, **run})
            print(json.dumps(results[-1]), flush=True)
    finish_results({"glibc": platform.libc_ver()[1], "results": results}, output_file)


if __name__ == "__main__":
    run_main(main)
