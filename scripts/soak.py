"""Kill a run with SIGKILL again and again, and compare what it comes to with a run that nothing happened to.

python scripts/soak.py --kills 50 --output_file scripts/benchmarks/soak_cpu.json

The run is recipe/train.py on the demo's corpus, with dropout, a checkpoint every few steps, and always the same
command: `--resume_from_checkpoint auto`. Weights, optimizer state and every logged loss must be equal, bit for bit.
"""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from recipe.checkpoint.load import find_checkpoint, list_checkpoints
from recipe.checkpoint.manifest import why_damaged
from recipe.command_line import CommandLine
from recipe.environment import describe_environment
from recipe.errors import UserError, run_main

STEPS_PER_KILL = 150  # more than are done between two kills, so that the run does not end before the last one
STARTUP_SHARE = 0.2  # of the kills come while the process loads, prepares and resumes
TRAINING_SECONDS = 1.5  # after its first step a run lives for up to this long


def main() -> None:
    parser = CommandLine(description="Kill and resume a run, and compare it with an uninterrupted one.")
    parser.add_argument("--kills", type=int, default=50, help="SIGKILLs at random moments (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--output_file", type=Path, help="JSON to write")
    args = parser.parse_args()
    if args.kills < 1:
        raise UserError(f"kills must be at least 1, got {args.kills}")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        started_at = time.perf_counter()
        through = start(work, "through", args.kills)
        if through.wait() != 0:
            raise UserError(f"the uninterrupted run failed: {(work / 'through.log').read_text()[-500:]}")
        results = kill_and_resume(work, args.kills, random.Random(args.seed))
        differences = compare(work / "through", work / "killed")
    results |= {
        "identical": not differences,
        "differences": differences,
        "seconds": round(time.perf_counter() - started_at),
        "command": shlex.join(["scripts/soak.py", *sys.argv[1:]]),
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "environment": describe_environment(torch.device("cpu")),
    }
    print(json.dumps(results, indent=2))
    if args.output_file:
        args.output_file.write_text(json.dumps(results, indent=2) + "\n")
    if differences:
        raise UserError("the run that was killed is not the run that went through: " + "; ".join(differences))


def start(work: Path, name: str, kills: int) -> subprocess.Popen:
    """Start, or go on with, the run `name`; its output is appended to a log beside it."""
    options = {
        "output_dir": name,
        "cache_dir": "data",
        "resume_from_checkpoint": "auto",
        "config_overrides": "n_layer=2,n_head=2,n_embd=64,resid_pdrop=0.1",
        "block_size": 64,
        "global_batch_size": 4,
        "max_steps": kills * STEPS_PER_KILL,
        "warmup_steps": 20,
        "logging_steps": 1,
        "eval_steps": 0,
        "save_steps": 5,
        "save_total_limit": 3,
        "validation_split_percentage": 0.5,
    }
    arguments = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    with open(work / f"{name}.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, str(Path(__file__).parent.parent / "recipe" / "train.py"), *arguments],
            cwd=work,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "2"},
        )


def kill_and_resume(work: Path, kills: int, rng: random.Random) -> dict:
    """Kill the run so many times, then let it end. Returns what the kills met."""
    met = {"kills": 0, "during_start": 0, "during_a_save": 0, "steps_at_kills": []}
    while met["kills"] < kills:
        step, half_written = last_step(work), partial_folders(work)
        process = start(work, "killed", kills)
        if rng.random() < STARTUP_SHARE:
            time.sleep(rng.uniform(0, 4))
            met["during_start"] += last_step(work) <= step
        else:
            while last_step(work) <= step and process.poll() is None:
                time.sleep(0.005)
            time.sleep(rng.uniform(0, TRAINING_SECONDS))
        if process.poll() is not None:
            raise UserError(
                f"the run ended before kill {met['kills'] + 1}: {(work / 'killed.log').read_text()[-500:]}"
            )
        process.send_signal(signal.SIGKILL)
        process.wait()
        met["kills"] += 1
        met["during_a_save"] += bool(partial_folders(work) - half_written)
        met["steps_at_kills"].append(last_step(work))
        print(f"kill {met['kills']} at step {met['steps_at_kills'][-1]}", file=sys.stderr, flush=True)
        checkpoints = list_checkpoints(work / "killed")
        if any(why_damaged(checkpoint) for checkpoint in checkpoints):
            raise UserError(f"a checkpoint is damaged: {[why_damaged(checkpoint) for checkpoint in checkpoints]}")
    if start(work, "killed", kills).wait() != 0:
        raise UserError(f"the last sitting failed: {(work / 'killed.log').read_text()[-500:]}")
    return met


def partial_folders(work: Path) -> set[Path]:
    """Checkpoints that were being written, or removed, when the process was killed."""
    return set((work / "killed").glob(".checkpoint-*.partial"))


def last_step(work: Path) -> int:
    """The newest step in the log of the run that is killed."""
    path = work / "killed" / "metrics.jsonl"
    lines = path.read_bytes().splitlines()[-3:] if path.is_file() else []
    steps = [0]
    for line in lines:
        try:
            steps.append(json.loads(line)["step"])
        except ValueError:  # cut short
            continue
    return max(steps)


def compare(through: Path, killed: Path) -> list[str]:
    """What differs between the two runs."""
    differences = []
    newest = [find_checkpoint(run, "latest").relative_to(run) for run in (through, killed)]
    for name in ["model.safetensors", newest[0] / "model.safetensors", newest[0] / "optimizer.pt"]:
        if (through / name).read_bytes() != (killed / name).read_bytes():
            differences.append(f"{name} differs")
    logs = []
    for run in (through, killed):
        events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        keys = ("step", "loss", "grad_norm", "learning_rate")
        logs.append([tuple(event[key] for key in keys) for event in events if event["event"] == "train"])
    if logs[0] != logs[1]:
        differences.append("the logged losses differ")
    return differences


if __name__ == "__main__":
    run_main(main)
