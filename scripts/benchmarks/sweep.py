"""Train with each value of an option and several seeds, and compare the final losses.

python scripts/benchmarks/sweep.py learning_rate 1e-3 2e-3 4e-3 --max_steps 1200 \
    --optim adamw_torch_fused --output_file scripts/benchmarks/sweep_adamw_demo_cpu.json

Further options are those of recipe/train.py and apply to every run. Each run is a fresh process and evaluates all
validation rows at its end. Results are saved after each run; the same command continues an interrupted sweep.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from recipe.arguments import CommandLine, unknown_option
from recipe.config import OPTIONS
from recipe.errors import UserError, run_main

TRAIN = Path(__file__).resolve().parents[2] / "recipe" / "train.py"
EVALUATION = ["--max_eval_samples", "all", "--eval_steps", "0", "--save_steps", "0", "--logging_steps", "100"]
KEPT = ("eval_loss", "tokens_seen", "tokens_per_second", "wall_seconds", "finished_at", "environment")


def main() -> None:
    args, options = parse()
    sweep = {"option": args.option, "options": ["--config", args.config, *options]}
    runs: list[dict] = []
    if args.output_file and args.output_file.exists():
        found = json.loads(args.output_file.read_text())
        runs = [run for run in found.pop("runs") if "failed" not in run]  # those are tried again
        if found != sweep:
            raise UserError(f"{args.output_file} holds another sweep ({found}); choose another --output_file")
    for seed in args.seeds:
        for value in args.values:
            if any((run["value"], run["seed"]) == (value, seed) for run in runs):
                continue
            runs.append(train(sweep["options"], args.option, value, seed))
            if args.output_file:
                args.output_file.write_text(json.dumps({**sweep, "runs": runs}, indent=2) + "\n")
            print(f"{args.option} {value}, seed {seed}: {runs[-1].get('eval_loss', 'failed')}", flush=True)
    print(make_table(args.option, runs))


def train(options: list[str], option: str, value: str, seed: int) -> dict:
    """Train once. Returns the run's numbers, or why it failed: a learning rate may be too high."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = [f"--{option}", value, "--seed", str(seed), "--output_dir", f"{folder}/run"]
        command = [sys.executable, str(TRAIN), *EVALUATION, *options, *chosen]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            return {"value": value, "seed": seed, "failed": (result.stderr.strip().splitlines() or ["no output"])[-1]}
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
    return {"value": value, "seed": seed, **{key: summary[key] for key in KEPT}}


def make_table(option: str, runs: list[dict]) -> str:
    """Return a Markdown table with a row per value: n runs, mean and standard deviation of their final losses."""
    lines = [f"| {option} | tokens | n | loss | sd | perplexity | tokens/s |", "|---|---:|---:|---:|---:|---:|---:|"]
    for value in dict.fromkeys(run["value"] for run in runs):
        done = [run for run in runs if run["value"] == value and "failed" not in run]
        if not done:
            lines.append(f"| {value} | | 0 | failed | | | |")
            continue
        losses = [run["eval_loss"] for run in done]
        mean, sd = statistics.fmean(losses), f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        speed = statistics.median(run["tokens_per_second"] for run in done)
        tokens = f"{done[0]['tokens_seen'] / 1e6:,.2f} M"
        lines.append(f"| {value} | {tokens} | {len(done)} | {mean:.4f} | {sd} | {math.exp(mean):.2f} | {speed:,.0f} |")
    return "\n".join(lines)


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = CommandLine(description="Compare the values of an option. Further options are those of recipe/train.py.")
    parser.add_argument("option", help="option of recipe/train.py, for example learning_rate")
    parser.add_argument("values", nargs="+", help="its values")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337, 1338, 1339], help="default: 1337 1338 1339")
    parser.add_argument("--config", default="demo", help="recipe of all runs (default: demo)")
    parser.add_argument("--output_file", type=Path, help="JSON to write, or to continue")
    args, options = parser.parse_with_run_options()
    if args.option not in OPTIONS:
        raise UserError(unknown_option(f"--{args.option}", list(OPTIONS)))
    return args, options


if __name__ == "__main__":
    run_main(main, "interrupted; with --output_file, the same command continues the sweep")
