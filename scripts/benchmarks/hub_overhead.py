"""Measure what uploading costs a run: a long demo that publishes every second one of its checkpoints.

python scripts/benchmarks/hub_overhead.py --output_file scripts/benchmarks/hub_overhead_cpu.json

The checkpoints, with their training state, go to the tests' stand-in for the Hub, a process on the same cores. The
steps from one checkpoint to the next are a window. Windows with and without an upload alternate, and each is compared
with the mean of its two neighbors.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from recipe.arguments import CommandLine
from recipe.benchmark.measure import TRAIN, compare_windows, finish_results
from recipe.errors import run_main

STAND_IN = TRAIN.parent.parent / "tests" / "hub_stand_in.py"
WINDOW = 400  # steps between checkpoints, as in the demo
# recipe/train.py with every second checkpoint kept from the uploads
TRAINING = """
import runpy, sys
import recipe.publish.uploads as uploads
add, window = uploads.HubUploads.add, int(sys.argv[1])
uploads.HubUploads.add = lambda self, path, step: add(self, path, step) if step // window % 2 else None
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
OPTIONS = "--push_to_hub --hub_model_id someone/demo --hub_strategy all_checkpoints --eval_steps 0 --output_dir run"


def main() -> None:
    parser = CommandLine(description="Measure what uploading checkpoints costs a run.")
    parser.add_argument("--num_windows", type=int, default=16, help="windows to measure (default: 16)")
    parser.add_argument("--output_file", type=Path, help="JSON to write")
    args = parser.parse_args()
    steps = [TRAIN, *OPTIONS.split(), "--max_steps", (args.num_windows + 1) * WINDOW, "--save_steps", WINDOW]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen([sys.executable, STAND_IN], stdout=subprocess.PIPE, text=True) as stand_in,
    ):
        environment = {**os.environ, **json.loads(stand_in.stdout.readline()), "HF_HOME": folder}
        command = [sys.executable, "-c", TRAINING, WINDOW, *steps]
        subprocess.run([*map(str, command)], cwd=folder, env=environment, check=True)
        stand_in.terminate()
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    events = [event for event in map(json.loads, lines) if event["event"] == "train"]
    finish_results(compare_windows(events, WINDOW), args.output_file)  # the first has an upload


if __name__ == "__main__":
    run_main(main)
