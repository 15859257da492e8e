"""Measure what watching a run costs: a long demo in which everything that watches is on in every second window.

python scripts/benchmarks/watch_overhead.py --output_file scripts/benchmarks/watch_overhead_cpu.json

A stand-in for NVML takes a few milliseconds for each of four queries per second. It does not compute, because a
machine with a GPU has a core to spare. Windows of steps with and without watching alternate, and each is compared
with the mean of its two neighbors.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from recipe.arguments import CommandLine
from recipe.benchmark.measure import TRAIN, compare_windows, finish_results
from recipe.errors import UserError, run_main

WINDOW = 50  # steps
QUERY_MS = 3
# recipe/train.py with a GPU to sample, and with nothing watched in every second window
TRAINING = """
import runpy, sys, time
from types import SimpleNamespace as Stub
import torch
import recipe.data.batches as batches, recipe.run.log as log, recipe.run.meter as meter, recipe.run.watch as watch

window, query_seconds, on = int(sys.argv[1]), float(sys.argv[2]) / 1e3, True
readings, train = watch.READINGS, log.RunReport.train

def query(*arguments):
    time.sleep(query_seconds)  # without Python's lock, like a call into the driver
    return Stub(gpu=97, used=60e9)

def only_if_on(module, name, otherwise):
    original = getattr(module, name)
    setattr(module, name, lambda *arguments: original(*arguments) if on else otherwise)

def train_and_switch(self, step, values):
    global on
    train(self, step, values)
    on = step // window % 2 == 1
    watch.READINGS = readings if on else {}

sys.modules["pynvml"] = Stub(
    NVMLError=OSError, NVML_TEMPERATURE_GPU=0, nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=str,
    nvmlDeviceGetUtilizationRates=query, nvmlDeviceGetMemoryInfo=query,
    nvmlDeviceGetPowerUsage=lambda gpu: query().used, nvmlDeviceGetTemperature=lambda *arguments: query().gpu,
)
torch.cuda.get_device_properties = lambda device: Stub(uuid="0")
log.GpuSampler = lambda device: watch.GpuSampler(torch.device("cuda"))
log.RunReport.train = train_and_switch
only_if_on(watch.Watch, "check", {})
only_if_on(meter, "share_of_memory", 0.0)
only_if_on(batches.TrainBatches, "_mark", 0.0)
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
OPTIONS = "--eval_steps 0 --save_steps 0 --output_dir run"


def main() -> None:
    parser = CommandLine(description="Measure what watching a run costs.")
    parser.add_argument("--num_windows", type=int, default=48, help="windows to measure (default: 48)")
    parser.add_argument("--output_file", type=Path, help="JSON to write")
    args = parser.parse_args()
    if args.num_windows < 3:
        raise UserError(
            f"--num_windows must be at least 3, for one window and its two neighbors; got {args.num_windows}"
        )
    steps = [TRAIN, *OPTIONS.split(), "--max_steps", (args.num_windows + 1) * WINDOW]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", TRAINING, WINDOW, QUERY_MS, *steps]
        subprocess.run([*map(str, command)], cwd=folder, check=True)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    events = [event for event in map(json.loads, lines) if event["event"] == "train"]
    results = {
        "query_ms": QUERY_MS,
        "log_lines_with_gpu_numbers": sum("gpu_utilization" in event for event in events),
        **compare_windows(events, WINDOW),
    }
    finish_results(results, args.output_file)


if __name__ == "__main__":
    run_main(main)
