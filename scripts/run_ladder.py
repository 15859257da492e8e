"""Measure what each optimisation gives on this machine, with the real training program in a fresh process each time.

python scripts/run_ladder.py                                     the ladder
python scripts/run_ladder.py --config gpt2_124m --all            and every switch taken back, memory, largest batches
python scripts/run_ladder.py --rungs compile,flash --seconds 300

Writes a JSON file after every rung, and a table (.md) and a chart (.png) beside it.
"""

import argparse
import dataclasses
import json
import shlex
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import torch

from recipe import ladder
from recipe.config import CommandLine, UserError, run_main
from recipe.environment import describe_environment
from recipe.ladder_report import SECTIONS, TEXT_HEADER, notes, save_chart, speedups, text_row, to_markdown
from recipe.machine import Machine, find_machine
from recipe.measure import LAP, Goal, Setting, loss_delta, measure

LONGEST_RUN_SECONDS = 1800
LARGEST_FIT = 1024  # rows a forward


class Ladder:
    """Runs rungs and keeps their results, on disk too."""

    def __init__(self, args: argparse.Namespace, machine: Machine, setting: Setting, work: Path) -> None:
        self.args, self.machine, self.setting, self.work = args, machine, setting, work
        self.ends_at = time.monotonic() + args.minutes * 60 if args.minutes else float("inf")
        self.goal = Goal(steps=-(-args.steps // LAP) * LAP, seconds=args.seconds)
        self.reference: dict[int, float] = {}
        self.results: dict[str, Any] = {
            "what": "recipe/train.py in a fresh process for each entry; step times are medians over laps",
            "setting": setting.says,
            "command": shlex.join(["python", *sys.argv]),
            "machine": dataclasses.asdict(machine),
            "environment": describe_environment(torch.device(machine.device)),
            "flops_per_token": setting.flops_per_token,
            "goal": dataclasses.asdict(self.goal),
        }

    def run(self, section: str, rung: ladder.Rung, options: dict[str, Any]) -> dict[str, Any]:
        """Measure one rung, show it and record it."""
        entry: dict[str, Any] = {"name": rung.name, "what": rung.what, "options": options}
        if rung.why_not is not None:
            entry["not_run"] = rung.why_not
        else:
            deadline = min(self.ends_at, time.monotonic() + LONGEST_RUN_SECONDS)
            numbers = measure(options, self.setting, self.goal, self.work, deadline)
            entry |= {"not_run": numbers["failed"]} if "failed" in numbers else numbers
        if "step_ms" in entry:
            if rung.name == ladder.REFERENCE:
                self.reference = entry["losses"]
            flops = entry["tokens_per_second"] * self.setting.flops_per_token
            entry["mfu"] = flops / self.machine.best_matmul_flops
            if self.machine.data_sheet_tflops:
                entry["mfu_data_sheet"] = flops / self.machine.data_sheet_tflops / 1e12
            if self.args.fit:
                entry["largest_micro_batch"] = self.fit(options)
        entries = self.results.setdefault(section, [])
        entries.append(entry)
        for other in (e for name in SECTIONS for e in self.results.get(name, [])):
            if "losses" in other:
                other["loss_delta"] = loss_delta(other["losses"], self.reference)
        if len(entries) == 1:
            print(f"\n{SECTIONS[section]}")
        print(text_row(entry, speedups(self.results, section).get(rung.name)), flush=True)
        self.save()
        return entry

    def fit(self, options: dict[str, Any]) -> int | str:
        """The largest micro-batch, by doubling, that trains; the model and the options stay as they are."""
        if self.machine.device != "cuda":
            return "not tried: a CPU swaps instead of raising an error"
        fits, size = 0, self.setting.micro_batch
        while size <= LARGEST_FIT:
            sizes = {"per_device_train_batch_size": size, "global_batch_size": size, "logging_steps": 1}
            numbers = measure({**options, **sizes}, self.setting, Goal(steps=1), self.work, self.ends_at)
            if "failed" in numbers:
                return fits if numbers["failed"] == "out of memory" else f"at least {fits}: {numbers['failed']}"
            fits, size = size, size * 2
        return f"at least {fits}"

    def save(self) -> None:
        self.results["finished_at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        path = self.args.output_file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.results, indent=2) + "\n")
        path.with_suffix(".md").write_text(to_markdown(self.results) + "\n")


def main() -> None:
    args = parse()
    machine = find_machine()
    setting = ladder.choose_setting(args.config, args.dataset_dir, machine, args.micro_batch)
    rungs = ladder.build_rungs(machine)
    extras = ladder.build_extras(machine, setting.micro_batch, setting.global_batch)
    memory = ladder.build_memory_rungs(machine)
    names = [rung.name for rung in (*rungs, *extras, *memory)]
    for name in args.rungs or []:
        if name not in names:
            raise UserError(f"there is no rung '{name}'; the rungs are {', '.join(names)}")
    wanted = {*(args.rungs or names), ladder.REFERENCE}
    args.output_file = args.output_file or Path("runs") / f"ladder_{machine.device}.json"
    with tempfile.TemporaryDirectory() as folder:
        runner = Ladder(args, machine, setting, Path(folder))
        print(f"{setting.says}\non {machine.name}; the results go to {args.output_file}\n", flush=True)
        print(TEXT_HEADER)
        if args.ladder:
            climb(runner, rungs, extras, memory, wanted)
        if args.ablate:
            for rung, options in ladder.ablations(rungs):
                runner.run("ablation", rung, options)
    print("\n" + "\n".join(textwrap.fill(note, 80) for note in notes(runner.results)))
    try:
        save_chart(runner.results, args.output_file.with_suffix(".png"))
    except ImportError:
        print('no chart: it needs matplotlib (pip install -e ".[plot]")')


def climb(runner: Ladder, rungs: list, extras: list, memory: list, wanted: set[str]) -> None:
    """The ladder, then what pays above it, then what saves memory."""
    for rung, options in ladder.climb(rungs):
        if rung.name in wanted:
            runner.run("ladder", rung, options)
    defaults = best = ladder.options_of(rungs)
    fastest = next((e["step_ms"] for e in reversed(runner.results["ladder"]) if "step_ms" in e), float("inf"))
    for rung in extras:
        if rung.name not in wanted:
            continue
        entry = runner.run("extras", rung, {**best, **rung.on})
        entry["kept"] = fastest / entry.get("step_ms", float("inf")) >= ladder.PAYS
        if entry["kept"]:
            best, fastest = {**best, **rung.on}, entry["step_ms"]
    for rung in memory:
        if rung.name in wanted:
            runner.run("memory", rung, {**defaults, **rung.on})


def parse() -> argparse.Namespace:
    parser = CommandLine(description="Measure each optimisation on this machine.")
    parser.add_argument("--config", help="recipe (default: gpt2_124m; on a CPU a smaller model)")
    parser.add_argument("--dataset_dir", help="packed dataset (default: the Python standard library's text)")
    parser.add_argument("--rungs", type=lambda text: text.split(","), help="only these, by name, with commas")
    parser.add_argument("--steps", type=int, default=12, help="timed steps a rung (default: 12)")
    parser.add_argument("--seconds", type=float, help="time every rung for so long instead")
    parser.add_argument("--micro_batch", type=int, help="rows a forward, of which four make a step")
    parser.add_argument("--ablate", action="store_true", help="only: everything on, one switch off at a time")
    parser.add_argument("--fit", action="store_true", help="find each rung's largest micro-batch, too (GPU)")
    parser.add_argument("--all", action="store_true", help="the ladder and --ablate")
    parser.add_argument("--minutes", type=float, help="stop after so long, with what has been measured")
    parser.add_argument("--output_file", type=Path, help="JSON to write (default: runs/ladder_DEVICE.json)")
    args = parser.parse_args()
    for name in ("steps", "seconds", "minutes", "micro_batch"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"{name} must be greater than 0, got {value}")
    args.ladder = args.all or not args.ablate
    args.ablate = args.ablate or args.all
    return args


if __name__ == "__main__":
    run_main(main)
