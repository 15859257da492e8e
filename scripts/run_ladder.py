"""Measure what each optimization is worth on this machine; each run is recipe/train.py in a fresh process.

python scripts/run_ladder.py                                     the ladder
python scripts/run_ladder.py --rungs compile,flash --steps 100
python scripts/run_ladder.py --ablate                            everything on, one switch off at a time
git clone https://github.com/karpathy/nanoGPT runs/nanoGPT
python scripts/run_ladder.py --peers --nanogpt runs/nanoGPT      compare with nanoGPT and with a bare loop
python scripts/run_ladder.py --config gpt2_124m --all --nanogpt runs/nanoGPT --minutes 10

After every run it writes a JSON file, a table (.md) beside it, and a chart (.png) of the ladder.
"""

import argparse
import itertools
import math
import os
import signal
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from recipe.arguments import CommandLine
from recipe.benchmark.ladder import build_rungs, choose_setting
from recipe.benchmark.machine import find_machine
from recipe.benchmark.measure import LAP
from recipe.benchmark.peers import build_peers
from recipe.benchmark.runner import LadderRunner
from recipe.errors import UserError, run_main


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the measured run, too
    started_at = time.monotonic()
    args = parse()
    machine = find_machine()
    setting = choose_setting(args.config, args.dataset_dir, machine, args.micro_batch, args.global_batch)
    num_steps = math.ceil(args.steps / LAP) * LAP
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"  # runs share compiled code only with each other
        peers = []
        if args.all or args.peers:  # their mistakes show before anything runs
            sources = (args.nanogpt, args.run_clm)
            peers = build_peers(machine, setting, build_rungs(machine), Path(folder), *sources, num_steps)
        mode = "ladder" if args.all else "peers" if args.peers else "ablation" if args.ablate else "ladder"
        runner = LadderRunner(
            machine,
            setting,
            num_steps,
            work=Path(folder),
            output_file=args.output_file or first_free(Path("runs") / f"{mode}_{machine.device}.json"),
            seconds=args.minutes * 60 - (time.monotonic() - started_at) if args.minutes else float("inf"),
            fit=args.fit,
        )
        wanted, rounds = runner.wanted(args.rungs), args.rounds or (1 if args.all and args.minutes else 3)
        for line in (f"Model: {setting.says}", f"Machine: {machine.name}", f"Results: {runner.output_file}"):
            print(textwrap.fill(line, 80, break_on_hyphens=False), flush=True)
        if args.all:
            runner.run_all(wanted, peers, rounds)
        elif args.peers or args.ablate:
            if args.peers:
                runner.run_peers(peers, rounds)
            if args.ablate:
                runner.run_ablation()
        else:
            runner.run_ladder(wanted)
    runner.finish()


def first_free(path: Path) -> Path:
    """runs/NAME.json, runs/NAME-2.json, ...: older results are never overwritten."""
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([path], numbered) if not candidate.exists())


def parse() -> argparse.Namespace:
    parser = CommandLine(description="Measure what each optimization is worth on this machine.")
    parser.add_argument(
        "--config", help="recipe (default: gpt2_124m, or a smaller model without a GPU; demo is quick)"
    )
    parser.add_argument("--dataset_dir", help="packed dataset (default: the Python standard library's text)")
    parser.add_argument(
        "--rungs",
        type=lambda text: text.split(","),
        help="run these rungs and the ones they are compared with, as in compile,flash (an unknown name lists all)",
    )
    parser.add_argument("--ablate", action="store_true", help="turn one switch of the defaults off at a time")
    parser.add_argument("--peers", action="store_true", help="compare with a bare loop and with the given programs")
    parser.add_argument("--nanogpt", type=Path, help="a clone of https://github.com/karpathy/nanoGPT")
    parser.add_argument("--run_clm", type=Path, help="Transformers' examples/pytorch/language-modeling/run_clm.py")
    parser.add_argument("--all", action="store_true", help="the ladder, --peers and --ablate")
    parser.add_argument("--fit", action="store_true", help="also find each rung's largest micro-batch (GPU)")
    parser.add_argument("--steps", type=int, default=12, help="timed steps per run, rounded up to a multiple of 4")
    parser.add_argument("--rounds", type=int, help="runs of each program (default: 3; 1 with --all --minutes)")
    parser.add_argument(
        "--micro_batch", type=int, help="rows per forward pass (default: what fits at the bottom rung)"
    )
    parser.add_argument("--global_batch", type=int, help="rows per step (default: four times --micro_batch)")
    parser.add_argument("--minutes", type=float, help="stop after this long and keep what was measured")
    parser.add_argument("--output_file", type=Path, help="JSON to write (default: a new file in runs/)")
    args = parser.parse_args()
    for name in ("steps", "rounds", "minutes", "micro_batch", "global_batch"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"{name} must be greater than 0, got {value}")
    if (args.nanogpt or args.run_clm or args.rounds) and not (args.peers or args.all):
        raise UserError("--nanogpt, --run_clm and --rounds require --peers or --all")
    if (args.peers or args.ablate) and args.rungs and not args.all:
        raise UserError("--rungs selects rungs of the ladder; --ablate and --peers always use all switches")
    if args.output_file and args.output_file.suffix != ".json":
        raise UserError(f"output_file must end in .json, got {args.output_file}; .md and .png are written beside it")
    return args


if __name__ == "__main__":
    run_main(main, "interrupted; the results so far are in the output file")
