"""Train the same model with recipe/train.py and with other programs, in turns, and compare tokens per second.

git clone https://github.com/karpathy/nanoGPT runs/peers/nanoGPT
python scripts/compare_peers.py --nanogpt runs/peers/nanoGPT
python scripts/compare_peers.py --bare_loop --config demo --rounds 8

Writes a JSON file. What is compared runs as its authors wrote it; what is changed for a CPU is in the command lines.
"""

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from recipe.config import CommandLine, UserError, run_main
from recipe.data.packed import open_packed_dataset
from recipe.environment import describe_environment
from recipe.ladder import build_rungs, choose_setting, options_of
from recipe.machine import Machine, find_machine
from recipe.measure import Goal, Setting, measure
from recipe.peers import NANOGPT_MICRO_BATCH, Peer, build_bare_loop, build_nanogpt, build_run_clm, measure_peer

LONGEST_RUN_SECONDS = 1800


def main() -> None:
    args = parse()
    machine = find_machine()
    setting = choose_setting(args.config, args.dataset_dir, machine, args.micro_batch)
    output_file = args.output_file or Path("runs") / f"peers_{machine.device}.json"
    print(f"{setting.says}\non {machine.name}; the results go to {output_file}\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        ours = {"ours": options_of(build_rungs(machine))}
        peers = [build_bare_loop(setting, ours["ours"])] if args.bare_loop else []
        peers += build_peers(args, machine, setting, work)
        if not peers:
            raise UserError("name what to compare with: --nanogpt DIR, --run_clm FILE or --bare_loop")
        if any(peer.ours == "ours_auto" for peer in peers):
            ours["ours_auto"] = {**ours["ours"], "per_device_train_batch_size": "auto"}
        rounds = [one_round(ours, peers, setting, args.steps, work) for _ in range(args.rounds)]
    results = {
        "what": "tokens per second, of runs that take turns; times: how often ours is as fast, median over rounds",
        "setting": setting.says,
        "command": shlex.join(["python", *sys.argv]),
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "environment": describe_environment(torch.device(machine.device)),
        "peers": [summarize(peer, rounds, str(work)) for peer in peers],
        "rounds": rounds,
    }
    output_file.parent.mkdir(parents=True, exist_ok=True)
    output_file.write_text(json.dumps(results, indent=2) + "\n")
    for peer in results["peers"]:
        print(f"{peer['what']:46} {peer.get('times', float('nan')):6.3f} times as fast {peer.get('failed', '')}")


def build_peers(args: argparse.Namespace, machine: Machine, setting: Setting, work: Path) -> list[Peer]:
    dataset = open_packed_dataset(Path(setting.options["dataset_dir"]), setting.block_size)
    peers = []
    if args.nanogpt:
        kinds = [(False, setting.micro_batch)]
        if machine.device != "cuda":
            kinds += [(True, setting.micro_batch)] if machine.bf16 else []
        elif setting.micro_batch != NANOGPT_MICRO_BATCH:
            kinds += [(False, NANOGPT_MICRO_BATCH)]
        peers += [build_nanogpt(args.nanogpt, machine, setting, dataset, work, *kind) for kind in kinds]
    if args.run_clm:
        peers.append(build_run_clm(args.run_clm, machine, setting, dataset, work))
    return peers


def one_round(
    ours: dict[str, dict[str, Any]], peers: list[Peer], setting: Setting, steps: int, work: Path
) -> dict[str, dict[str, Any]]:
    """Each program once."""
    found = {}
    for name, options in ours.items():
        numbers = measure(options, setting, Goal(steps), work, time.monotonic() + LONGEST_RUN_SECONDS)
        if "failed" in numbers:
            raise UserError(f"our own run failed: {numbers['failed']}")
        found[name] = {"tokens_per_second": numbers["tokens_per_second"]}
        print(f"  {name:40} {numbers['tokens_per_second']:>10,} tokens/s", flush=True)
    for peer in peers:
        numbers = measure_peer(peer, steps, work / "peer.log", time.monotonic() + LONGEST_RUN_SECONDS)
        found[peer.name] = numbers
        rate = f"{numbers['tokens_per_second']:>10,} tokens/s" if "failed" not in numbers else numbers["failed"]
        print(f"  {peer.what:40.40} {rate}", flush=True)
    return found


def summarize(peer: Peer, rounds: list[dict[str, dict[str, Any]]], work: str) -> dict[str, Any]:
    """How many times as fast ours is than this peer."""
    command = [Path(peer.command[0]).name, *peer.command[1:]]
    summary = {"name": peer.name, "what": peer.what, "command": shlex.join(command).replace(work, "WORK")}
    failed = [r[peer.name]["failed"] for r in rounds if "failed" in r[peer.name]]
    if failed:
        return {**summary, "failed": failed[0]}
    times = [r[peer.ours]["tokens_per_second"] / r[peer.name]["tokens_per_second"] for r in rounds]
    return {
        **summary,
        "times": round(statistics.median(times), 4),
        "times_of_each_round": [round(t, 4) for t in times],
    }


def parse() -> argparse.Namespace:
    parser = CommandLine(description="Compare recipe/train.py with other programs on this machine.")
    parser.add_argument("--nanogpt", type=Path, help="a clone of https://github.com/karpathy/nanoGPT")
    parser.add_argument("--run_clm", type=Path, help="Transformers' examples/pytorch/language-modeling/run_clm.py")
    parser.add_argument("--bare_loop", action="store_true", help="what the program adds to the step itself")
    parser.add_argument("--config", help="recipe (default: gpt2_124m; on a CPU a smaller model)")
    parser.add_argument("--dataset_dir", help="packed dataset (default: the Python standard library's text)")
    parser.add_argument("--micro_batch", type=int, help="rows a forward, of which four make a step")
    parser.add_argument("--steps", type=int, default=12, help="timed steps a run (default: 12)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each runs (default: 3)")
    parser.add_argument("--output_file", type=Path, help="JSON to write (default: runs/peers_DEVICE.json)")
    args = parser.parse_args()
    for name in ("steps", "rounds", "micro_batch"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    return args


if __name__ == "__main__":
    run_main(main)
