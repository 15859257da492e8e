"""Speed and resident memory of a run on a CPU under several settings of its allocator, each in a process of its own.

python scripts/benchmarks/cpu_memory.py --output_file scripts/benchmarks/cpu_memory.json

Two programs: an artificial loop that frees large tensors and keeps small ones, which glibc before 2.38 fragments
(glibc bug 14581), and recipe/train.py with a long evaluation. Settings: torch's default, mallopt (glibc keeps what is
freed), huge pages, and huge pages with `FreedMemory`, which is what recipe/train.py does. Settings take turns.
"""

import json
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from recipe.command_line import CommandLine
from recipe.errors import run_main

ROOT = Path(__file__).parent.parent.parent
TRAIN = ROOT / "recipe" / "train.py"
SETTINGS = {  # what runs before torch is imported
    "default": "import os; os.environ['THP_MEM_ALLOC_ENABLE'] = '0'",
    "mallopt": "import ctypes, os; os.environ['THP_MEM_ALLOC_ENABLE'] = '0'; libc = ctypes.CDLL(None); "
    "assert libc.mallopt(-3, 2**30) == 1 and libc.mallopt(-1, 2**31 - 1) == 1",
    "huge pages": "import os; os.environ['THP_MEM_ALLOC_ENABLE'] = '1'",
    "huge pages, freed memory given back": "import os; os.environ['THP_MEM_ALLOC_ENABLE'] = '1'",
}
GIVES_BACK = "huge pages, freed memory given back"
NO_GIVING_BACK = (
    "import recipe.hardware.host_memory; recipe.hardware.host_memory.FreedMemory.give_back = lambda self: False"
)
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


def main() -> None:
    parser = CommandLine(description="Measure speed and memory of a CPU run under several allocator settings.")
    parser.add_argument("--output_file", type=Path, help="JSON to write")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each setting (default: 2)")
    parser.add_argument("--turns", type=int, default=600, help="turns of the artificial loop (default: 600)")
    parser.add_argument("--steps", type=int, default=300, help="training steps (default: 300)")
    args = parser.parse_args()
    results = {"command": shlex.join(["python", *sys.argv]), "glibc": platform.libc_ver()[1], "loop": {}, "run": {}}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            for setting in SETTINGS:
                loop = results["loop"].setdefault(setting, {"seconds": [], "resident_gb": []})
                started_at = time.perf_counter()
                curve = watch(setting, LOOP, [str(args.turns)], Path(folder))
                loop["seconds"].append(round(time.perf_counter() - started_at, 1))
                loop["resident_gb"].append(thinned(curve))
                run = results["run"].setdefault(setting, {"tokens_per_second": [], "resident_gb": []})
                options = ["--overwrite", "--max_steps", args.steps, "--eval_steps", "100", "--output_dir", "run"]
                options += ["--max_eval_samples", "all", "--save_steps", "0", "--dynamo_backend", "no"]
                curve = watch(setting, TRAINING, [str(TRAIN), *map(str, options)], Path(folder))
                summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
                run["tokens_per_second"].append(round(summary["tokens_per_second"]))
                run["resident_gb"].append(thinned(curve))
                print(f"{setting:37} loop {loop['seconds'][-1]:6.1f} s, {max(loop['resident_gb'][-1]):5.2f} GB; "
                      f"run {run['tokens_per_second'][-1]:7,} tokens/s, {max(run['resident_gb'][-1]):5.2f} GB",
                      flush=True)  # fmt: skip
        base = statistics.median(results["run"]["default"]["tokens_per_second"])
        for run in results["run"].values():
            run["times_default"] = round(statistics.median(run["tokens_per_second"]) / base, 2)
        results["environment"] = summary["environment"]
    results["finished_at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if args.output_file:
        args.output_file.write_text(json.dumps(results, indent=2) + "\n")


def watch(setting: str, program: str, arguments: list[str], folder: Path) -> list[float]:
    """Run a program under a setting; its resident gigabytes, sampled ten times a second."""
    code = "\n".join([SETTINGS[setting], "" if setting == GIVES_BACK else NO_GIVING_BACK, program])
    with open(folder / "log", "w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], cwd=folder, stdout=log, stderr=subprocess.STDOUT
        )
        curve: list[float] = []
        sampler = threading.Thread(target=sample, args=(process, curve))
        sampler.start()
        code = process.wait()
        sampler.join()
        if code:
            log.seek(0)
            raise RuntimeError(f"{setting}: exit status {code}\n{log.read()[-1000:]}")
    return curve


def sample(process: subprocess.Popen, curve: list[float]) -> None:
    while process.poll() is None:
        try:
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        except (OSError, IndexError, ValueError):  # it has just ended
            break
        curve.append(pages * 4096 / 1e9)
        time.sleep(0.1)


def thinned(curve: list[float]) -> list[float]:
    """Twenty maxima of equal stretches: a curve that fits a line of JSON."""
    size = max(1, len(curve) // 20)
    return [round(max(curve[i : i + size]), 2) for i in range(0, len(curve), size)]


if __name__ == "__main__":
    run_main(main)
