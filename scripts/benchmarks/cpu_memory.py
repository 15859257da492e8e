"""Measure speed and resident memory of a CPU run under several settings of its allocator.

python scripts/benchmarks/cpu_memory.py --output_file scripts/benchmarks/cpu_memory.json

Two programs: an artificial loop that frees large tensors and keeps small ones, which fragments the memory of glibc
before 2.38 (glibc bug 14581), and recipe/train.py with a long evaluation. Settings: torch's default, mallopt (glibc
keeps what is freed), huge pages, and huge pages with `FreedMemory`, which recipe/train.py uses. The settings take
turns; each measurement is a fresh process.
"""

import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from recipe.benchmark.measure import TRAIN, finish_results
from recipe.command_line import CommandLine
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


def main() -> None:
    parser = CommandLine(description="Measure speed and memory of a CPU run under several allocator settings.")
    parser.add_argument("--output_file", type=Path, help="JSON to write")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each setting (default: 2)")
    parser.add_argument("--turns", type=int, default=600, help="turns of the artificial loop (default: 600)")
    parser.add_argument("--steps", type=int, default=300, help="training steps (default: 300)")
    args = parser.parse_args()
    loops = {setting: {"seconds": [], "resident_gb": []} for setting in SETTINGS}
    runs = {setting: {"tokens_per_second": [], "resident_gb": []} for setting in SETTINGS}
    with tempfile.TemporaryDirectory() as folder:
        for setting in [*SETTINGS] * args.rounds:
            loop, run = loops[setting], runs[setting]
            started_at = time.perf_counter()
            loop["resident_gb"].append(watch(setting, LOOP, [str(args.turns)], Path(folder)))
            loop["seconds"].append(round(time.perf_counter() - started_at, 1))
            command = [str(TRAIN), *OPTIONS.split(), "--max_steps", str(args.steps)]
            run["resident_gb"].append(watch(setting, TRAINING, command, Path(folder)))
            summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
            run["tokens_per_second"].append(round(summary["tokens_per_second"]))
            print(
                f"{setting:37} loop {loop['seconds'][-1]:6.1f} s, {max(loop['resident_gb'][-1]):5.2f} GB; "
                f"run {run['tokens_per_second'][-1]:7,} tokens/s, {max(run['resident_gb'][-1]):5.2f} GB",
                flush=True,
            )
    base = statistics.median(runs["default"]["tokens_per_second"])
    for run in runs.values():
        run["times_default"] = round(statistics.median(run["tokens_per_second"]) / base, 2)
    finish_results({"glibc": platform.libc_ver()[1], "loop": loops, "run": runs}, args.output_file)


def watch(setting: str, program: str, arguments: list[str], folder: Path) -> list[float]:
    """Run a program under a setting. Returns the maxima of its resident gigabytes over twenty equal stretches."""
    command = [sys.executable, "-c", SETTINGS[setting] + program, *arguments]
    curve: list[float] = []
    with open(folder / "log", "w+") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            pages = Path(f"/proc/{process.pid}/statm").read_text().split()[1]
            curve.append(int(pages) * 4096 / 1e9)
            time.sleep(0.1)
        if process.returncode:
            log.seek(0)
            raise RuntimeError(f"{setting}: exit status {process.returncode}\n{log.read()[-1000:]}")
    size = max(1, len(curve) // 20)
    return [round(max(curve[i : i + size]), 2) for i in range(0, len(curve), size)]


if __name__ == "__main__":
    run_main(main)
