"""Measure what each optimisation gives on this machine, with the real training program in a fresh process each time.

python scripts/run_ladder.py                                     the ladder
python scripts/run_ladder.py --rungs compile,flash --seconds 300
python scripts/run_ladder.py --ablate                            everything on, one switch off at a time
git clone https://github.com/karpathy/nanoGPT runs/nanoGPT
python scripts/run_ladder.py --peers --nanogpt runs/nanoGPT      beside nanoGPT, and a loop with nothing around it
python scripts/run_ladder.py --config gpt2_124m --all --nanogpt runs/nanoGPT --minutes 10

Writes a JSON file, after every run, with a table (.md) beside it, and a chart (.png) of the ladder.
"""

import argparse
import itertools
import shlex
import signal
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from recipe.benchmark.ladder import SMALL_CARD, build_memory_rungs, build_rungs, choose_setting
from recipe.benchmark.machine import Machine, find_machine
from recipe.benchmark.measure import LAP, Goal
from recipe.benchmark.peers import build_peers
from recipe.benchmark.runner import CAN_DRAW, LadderRunner
from recipe.command_line import CommandLine
from recipe.errors import UserError, run_main


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which ends the run that is measured
    started_at = time.monotonic()
    args = parse()
    machine = find_machine()
    setting = choose_setting(args.config, args.dataset_dir, machine, args.micro_batch, args.global_batch)
    goal = Goal(steps=-(-args.steps // LAP) * LAP, seconds=args.seconds)  # whole laps
    with tempfile.TemporaryDirectory() as folder:
        peers = []
        if args.all or args.peers:  # what is wrong with them is said before anything is measured
            sources = (args.nanogpt, args.run_clm)
            peers = build_peers(machine, setting, build_rungs(machine), Path(folder), *sources, goal.steps)
        mode = "ladder" if args.all else "peers" if args.peers else "ablation" if args.ablate else "ladder"
        runner = LadderRunner(
            machine,
            setting,
            goal,
            work=Path(folder),
            output_file=args.output_file or first_free(Path("runs") / f"{mode}_{machine.device}.json"),
            command=shlex.join(["python", *sys.argv]),
            seconds=args.minutes * 60 - (time.monotonic() - started_at) if args.minutes else float("inf"),
            fit=args.fit,
        )
        wanted = runner.wanted(args.rungs)
        says = f"{setting.says}, on {machine.name}. Results after every run: {runner.output_file}"
        print(textwrap.fill(says, 80, break_on_hyphens=False), flush=True)
        if not CAN_DRAW:
            print('No chart will be drawn: that needs matplotlib (pip install -e ".[plot]")', flush=True)
        if args.all:
            runner.run_ladder(wanted & runner.ends)
        if args.all or args.peers:
            runner.run_peers(peers, args.rounds or (1 if args.all and args.minutes else 3))
        if args.all:
            runner.run_ladder(wanted & runner.paying)
            runner.run_ladder(wanted - {SMALL_CARD})
        if args.all or args.ablate:
            runner.run_ablation()
        if args.all or not (args.ablate or args.peers):
            runner.run_ladder(wanted)
    runner.finish()


def first_free(path: Path) -> Path:
    """runs/NAME.json, runs/NAME-2.json, ...: no results are written over."""
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([path], numbered) if not candidate.exists())


def parse() -> argparse.Namespace:
    no_machine = Machine("cuda", "", bf16=True)
    names = [rung.name for rung in (*build_rungs(no_machine), *build_memory_rungs(no_machine))]
    parser = CommandLine(description="Measure each optimisation on this machine.")
    parser.add_argument("--config", help="recipe (default: gpt2_124m, on a CPU a smaller model; demo is quick)")
    parser.add_argument("--dataset_dir", help="packed dataset (default: the Python standard library's text)")
    parser.add_argument(
        "--rungs",
        type=lambda text: text.split(","),
        help=f"only these, with commas and no spaces, and what they are compared with: {', '.join(names)}; of what "
        "may pay above the defaults micro_batch_N, bf16_residual, tuned",
    )
    parser.add_argument("--ablate", action="store_true", help="the defaults, with one switch off at a time")
    parser.add_argument("--peers", action="store_true", help="beside a bare loop, and the programs that are given")
    parser.add_argument("--nanogpt", type=Path, help="a clone of https://github.com/karpathy/nanoGPT")
    parser.add_argument("--run_clm", type=Path, help="Transformers' examples/pytorch/language-modeling/run_clm.py")
    parser.add_argument("--all", action="store_true", help="the ladder, --peers and --ablate")
    parser.add_argument("--fit", action="store_true", help="find each rung's largest micro-batch, too (GPU)")
    parser.add_argument("--steps", type=int, default=12, help="timed steps a run, in laps of 4 (default: 12)")
    parser.add_argument("--seconds", type=float, help="time every rung for so long instead")
    parser.add_argument("--rounds", type=int, help="how often each peer runs (default: 3)")
    parser.add_argument(
        "--micro_batch", type=int, help="rows a forward (default: what the bottom rung has memory for)"
    )
    parser.add_argument("--global_batch", type=int, help="rows a step (default: four times as many)")
    parser.add_argument("--minutes", type=float, help="stop after so long, with what has been measured")
    parser.add_argument(
        "--output_file", type=Path, help="JSON to write (default: the first free runs/ladder_DEVICE.json)"
    )
    args = parser.parse_args()
    for name in ("steps", "seconds", "rounds", "minutes", "micro_batch", "global_batch"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"{name} must be greater than 0, got {value}")
    if (args.nanogpt or args.run_clm or args.rounds) and not (args.peers or args.all):
        raise UserError("--nanogpt, --run_clm and --rounds are for --peers, or --all")
    if (args.peers or args.ablate) and args.rungs and not args.all:
        raise UserError("--rungs chooses from the ladder; --ablate and --peers are about all of its switches")
    if args.output_file and args.output_file.suffix != ".json":
        raise UserError(f"output_file must end in .json, got {args.output_file}; .md and .png are written beside it")
    return args


if __name__ == "__main__":
    run_main(main, "interrupted; what had been measured is in the file of results")
