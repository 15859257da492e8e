"""Train with each value of an option and several seeds, and compare the losses.

python scripts/benchmarks/sweep.py learning_rate 1e-3 2e-3 4e-3 --max_steps 1200 --optim adamw_torch_fused
python scripts/benchmarks/sweep.py optim,learning_rate adamw_torch_fused,3e-3 muon,1e-2 --max_steps 1200 \
    --eval_steps 100 --output_file FILE.json --chart_file FILE.png

The first command varies one option, the second two together. All other options go to recipe/train.py and apply
to every run. Each run is a fresh process and evaluates all validation rows. With --output_file, results are saved
after each run, and the same command continues an interrupted sweep and tries failed runs again. The chart shows the
mean loss over tokens and over seconds of training.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from recipe.arguments import CommandLine, as_path, typed_names, unknown_option
from recipe.charts import COLORS, label_point, open_chart
from recipe.config import OPTIONS
from recipe.environment import describe_machine
from recipe.errors import UserError, run_main

TRAIN = Path(__file__).resolve().parents[2] / "recipe" / "train.py"
EVALUATION = ["--max_eval_samples", "all", "--eval_steps", "0", "--save_steps", "0", "--logging_steps", "10"]
KEPT = (
    "eval_loss",
    "bits_per_byte",
    "tokens_seen",
    "tokens_per_second",
    "train_seconds",
    "finished_at",
    "environment",
)
LINE_COLORS = ("orange", "blue", "muted", "text")  # of the chart, in order
DRAWN_FROM = 0.1  # share of a run to skip: the losses before it would take most of the chart's height


def main() -> None:
    args, options = parse()
    sweep = {"option": args.option, "options": ["--config", args.config, *options]}
    runs: list[dict] = []
    if args.output_file and args.output_file.exists():
        earlier = json.loads(args.output_file.read_text())
        runs = [run for run in earlier.pop("runs") if "failed" not in run]  # those are tried again
        if earlier != sweep:
            raise UserError(f"{args.output_file} holds another sweep ({earlier}); choose another --output_file")
    for seed in args.seeds:
        for value in args.values:
            if any((run["value"], run["seed"]) == (value, seed) for run in runs):
                continue
            runs.append(train(sweep["options"], args.option, value, seed))
            if args.output_file:
                args.output_file.write_text(json.dumps({**sweep, "runs": runs}, indent=2) + "\n")
            loss = runs[-1].get("eval_loss", f"failed: {runs[-1].get('failed')}")
            print(f"{args.option} {value}, seed {seed}: {loss}", flush=True)
    print(make_table(args.option, runs))
    if all("failed" in run for run in runs):
        raise UserError("every run failed")
    if args.chart_file:
        draw(args.chart_file, runs)


def train(options: list[str], option: str, value: str, seed: int) -> dict:
    """Train once. Returns the run's numbers, or why it failed: a learning rate may be too high."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = [text for name, part in pairs(option, value) for text in (f"--{name}", part)]
        chosen += ["--seed", str(seed), "--output_dir", f"{folder}/run"]
        command = [sys.executable, str(TRAIN), *EVALUATION, *options, *chosen]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            return {"value": value, "seed": seed, "failed": (result.stderr.strip().splitlines() or ["no output"])[-1]}
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
        curve = read_curve(Path(folder, "run", "metrics.jsonl"))
    return {"value": value, "seed": seed, **{key: summary[key] for key in KEPT}, "curve": curve}


def pairs(option: str, value: str) -> list[tuple[str, str]]:
    """Return the options that a value sets: one, or as many as there are names between commas."""
    names = option.split(",")
    return list(zip(names, value.split(",") if len(names) > 1 else [value], strict=True))


def read_curve(path: Path) -> list[list[float]]:
    """Return tokens seen, seconds of training and validation loss of each evaluation after a log line."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    trained = {event["step"]: event for event in events if event["event"] == "train"}
    evaluated = [event for event in events if event["event"] == "eval" and event["step"] in trained]
    return [[trained[e["step"]]["tokens_seen"], trained[e["step"]]["train_seconds"], e["loss"]] for e in evaluated]


def make_table(option: str, runs: list[dict]) -> str:
    """Return a Markdown table with a row per value: n runs, mean and standard deviation of their final losses."""
    lines = [f"| {option} | tokens | n | loss | sd | sigmas | tokens/s |", "|---|---:|---:|---:|---:|---:|---:|"]
    first = [run["eval_loss"] for run in next(iter(by_value(runs).values()))]
    for value, done in by_value(runs).items():
        if not done:
            lines.append(f"| {value} | | 0 | failed | | | |")
            continue
        losses = [run["eval_loss"] for run in done]
        mean = statistics.fmean(losses)
        sd = f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        speed = statistics.median(run["tokens_per_second"] for run in done)
        tokens = f"{done[0]['tokens_seen'] / 1e6:,.2f} M"
        sigmas = count_sigmas(first, losses)
        lines.append(f"| {value} | {tokens} | {len(done)} | {mean:.4f} | {sd} | {sigmas} | {speed:,.0f} |")
    return "\n".join(lines)


def count_sigmas(first: list[float], losses: list[float]) -> str:
    """Return how much lower the losses are than the first value's: difference of means * sqrt(n) / sigma.

    sigma is the standard deviation of a difference between two runs. README.md claims a difference from 2 on.
    """
    n = min(len(first), len(losses))
    if n < 2:
        return ""
    sigma = math.hypot(statistics.stdev(first), statistics.stdev(losses))
    return f"{(statistics.fmean(first) - statistics.fmean(losses)) * math.sqrt(n) / max(sigma, 1e-9):.1f}"


def draw(path: Path, runs: list[dict]) -> None:
    """Draw the mean loss of each value over tokens and, beside it, over seconds of training."""
    finished = {value: done for value, done in by_value(runs).items() if done}
    machine = describe_machine(next(run["environment"] for run in runs if "failed" not in run))
    title = "Validation loss in nats per token"
    with open_chart(path, title, f"mean over seeds, {machine}", 4.2, columns=2) as both:
        for (value, done), color in zip(finished.items(), LINE_COLORS, strict=False):
            curve = np.mean([run["curve"] for run in done], axis=0)  # [evaluations, 3]
            tokens, seconds, losses = curve[curve[:, 0] > DRAWN_FROM * curve[-1, 0]].T
            for axes, x in zip(both, (tokens, seconds), strict=True):
                axes.plot(x, losses, color=COLORS[color], linewidth=2.5, label=value)
                label_point(axes, f"{losses[-1]:.2f}", x[-1], losses[-1])
        for axes, name in zip(both, ("tokens", "seconds"), strict=True):
            axes.set_xlim(0, 1.3 * axes.dataLim.x1)  # room for the labels
            axes.set_xlabel(name, color=COLORS["muted"])
            axes.grid(axis="y")
        style = {"frameon": False, "labelcolor": "linecolor", "handlelength": 0.8}
        both[0].figure.legend(handles=both[0].get_lines(), loc="outside lower center", **style)


def by_value(runs: list[dict]) -> dict[str, list[dict]]:
    """Return the finished runs of each value."""
    values = dict.fromkeys(run["value"] for run in runs)
    return {value: [run for run in runs if run["value"] == value and "failed" not in run] for value in values}


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = CommandLine(description="Compare the values of an option. All other options go to recipe/train.py.")
    parser.add_argument("option", help="one of recipe/train.py: learning_rate, or several: optim,learning_rate")
    parser.add_argument("values", nargs="+", help="its values; of several options: muon,1e-2")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337, 1338, 1339], help="default: 1337 1338 1339")
    parser.add_argument("--config", type=as_path, default="demo", help="recipe of all runs (default: demo)")
    parser.add_argument("--output_file", type=Path, help="JSON to write, or to continue")
    parser.add_argument("--chart_file", type=Path, help="PNG to draw; up to four values")
    args, options = parser.parse_with_run_options()
    names = args.option.split(",")
    for name in names:
        if name not in OPTIONS:
            raise UserError(unknown_option(f"--{name}", list(OPTIONS)))
    for value in args.values:
        if len(names) > 1 and value.count(",") != len(names) - 1:
            raise UserError(f"{value} has another number of values than {args.option} has options")
    if args.chart_file and "eval_steps" not in typed_names(options):
        raise UserError("--chart_file draws the evaluations; add --eval_steps, a multiple of 10")
    if args.chart_file and len(args.values) > len(LINE_COLORS):
        raise UserError(f"--chart_file shows up to {len(LINE_COLORS)} values")
    return args, options


if __name__ == "__main__":
    run_main(main, "interrupted; with --output_file, the same command continues the sweep", is_alone=True)
