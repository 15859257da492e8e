"""Kill a run with SIGKILL again and again: its weights must match an uninterrupted run's, bit for bit.

python scripts/benchmarks/soak.py --kills 50 --output_file scripts/benchmarks/soak_cpu.json

The run is recipe/train.py on the demo's text with dropout, a checkpoint every five steps, and always the same command
with --resume_from_checkpoint auto, except that its schedule is changed once, at its end, to twice the length. A fifth
of the kills meet its start, the others come up to 1.5 s after a new step. Other options are those of recipe/train.py.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from recipe.arguments import CommandLine
from recipe.checkpoint import list_checkpoints, why_damaged
from recipe.errors import UserError, run_main

TRAIN = Path(__file__).resolve().parents[2] / "recipe" / "train.py"
STEPS_PER_KILL = 150  # by default, more than fit between two kills, so that the last one comes before the end
OPTIONS = (
    "--cache_dir data --resume_from_checkpoint auto --config_overrides n_layer=2,n_head=2,n_embd=64,resid_pdrop=0.1 "
    "--block_size 64 --global_batch_size 4 --warmup_steps 20 --logging_steps 1 --eval_steps 0 --save_steps 5 "
    "--save_total_limit 3 --validation_split_percentage 0.5"
)


def main() -> None:
    parser = CommandLine(description="Kill and resume a run, and compare it with an uninterrupted one.")
    parser.add_argument("--kills", type=int, default=50, help="SIGKILLs at random moments (default: 50)")
    parser.add_argument("--steps", type=int, help=f"steps in all (default: {STEPS_PER_KILL} per kill)")
    parser.add_argument("--moments", type=int, default=0, help="seed of the random moments (default: 0)")
    parser.add_argument("--output_file", type=Path, help="JSON to write")
    args, options = parser.parse_with_run_options()
    num_steps = args.steps or args.kills * STEPS_PER_KILL
    met = {"during_a_save": 0, "steps_at_kills": []}
    with tempfile.TemporaryDirectory() as folder:
        work, rng = Path(folder), random.Random(args.moments)
        for max_steps, num_kills in ((num_steps // 2, args.kills // 2), (num_steps, args.kills - args.kills // 2)):
            length = [*options, "--max_steps", str(max_steps)]
            finish(start(work, "through", length), work / "through.log")
            kill_and_resume(work, length, num_kills, rng, met)
        differences = compare(work / "through", work / "killed")
        environment = json.loads((work / "through" / "summary.json").read_text())["environment"]
    result = {"kills": args.kills, "steps": num_steps, "options": options, "moments": args.moments, **met}
    result |= {"differences": differences, "environment": environment}
    result["finished_at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if args.output_file:
        args.output_file.write_text(json.dumps(result, indent=2) + "\n")
    if differences:
        raise UserError("the killed run differs from the uninterrupted one: " + "; ".join(differences))
    print(f"{args.kills} kills, {met['during_a_save']} of them during a save: identical weights, optimizer and losses")


def start(work: Path, name: str, options: list[str]) -> subprocess.Popen:
    """Start or resume the run `name`; its output is appended to NAME.log."""
    command = [sys.executable, str(TRAIN), *OPTIONS.split(), "--output_dir", name, *options]
    with open(work / f"{name}.log", "ab") as log:
        return subprocess.Popen(command, cwd=work, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen, log: Path) -> None:
    if process.wait() != 0:
        raise UserError(f"the run failed: {log.read_text()[-500:]}")


def kill_and_resume(work: Path, options: list[str], num_kills: int, rng: random.Random, met: dict) -> None:
    """Kill the run this many times, then let it end. met: gets what the kills met."""
    run, log = work / "killed", work / "killed.log"
    for number in range(1, num_kills + 1):
        step, partial = last_step(run), set(run.glob(".checkpoint-*.partial"))
        process = start(work, "killed", options)
        if rng.random() < 0.2:
            time.sleep(rng.uniform(0, 4))
        else:
            while last_step(run) <= step and process.poll() is None:
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 1.5))
        if process.poll() is not None:
            raise UserError(f"the run ended before kill {number}: {log.read_text()[-500:]}")
        process.kill()
        process.wait()
        met["during_a_save"] += bool(set(run.glob(".checkpoint-*.partial")) - partial)
        met["steps_at_kills"].append(last_step(run))
        print(f"kill {number} at step {met['steps_at_kills'][-1]}", file=sys.stderr, flush=True)
        if damage := [reason for checkpoint in list_checkpoints(run) if (reason := why_damaged(checkpoint))]:
            raise UserError(f"a checkpoint is damaged: {damage}")
    finish(start(work, "killed", options), log)


def read_events(run: Path) -> list[dict]:
    """Return the lines of the run's log; a kill may have cut the last one short."""
    path = run / "metrics.jsonl"
    lines = path.read_bytes().rpartition(b"\n")[0].splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines]


def last_step(run: Path) -> int:
    return max((event["step"] for event in read_events(run)[-3:]), default=0)


def compare(through: Path, killed: Path) -> list[str]:
    """Return what differs between the two runs."""
    newest = list_checkpoints(through)[-1].name  # pyright: ignore[reportOptionalMemberAccess]  # the run ended
    names = ["model.safetensors", f"{newest}/model.safetensors", f"{newest}/optimizer.pt"]
    found = [f"{name} differs" for name in names if (through / name).read_bytes() != (killed / name).read_bytes()]
    keys = ("step", "loss", "grad_norm", "learning_rate")
    logs = [[[e[key] for key in keys] for e in read_events(run) if e["event"] == "train"] for run in (through, killed)]
    return found + (["the logged losses differ"] if logs[0] != logs[1] else [])


if __name__ == "__main__":
    run_main(main, is_alone=True)
