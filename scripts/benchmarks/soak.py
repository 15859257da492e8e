"""Kill a run with SIGKILL again and again, and compare its result with an uninterrupted run.

python scripts/benchmarks/soak.py --kills 50 --output_file scripts/benchmarks/soak_cpu.json

The run is recipe/train.py on the demo's corpus, with dropout and a checkpoint every few steps, always started by the
same command with `--resume_from_checkpoint auto`. Weights, optimizer state and every logged loss must be equal, bit
for bit.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from recipe.arguments import CommandLine
from recipe.benchmark.measure import TRAIN, end_program, end_programs, finish_results, start_program
from recipe.checkpoint.load import find_checkpoint, list_checkpoints
from recipe.checkpoint.manifest import why_damaged
from recipe.errors import UserError, run_main

STEPS_PER_KILL = 150  # more than run between two kills, so that the last kill comes before the end
STARTUP_SHARE = 0.2  # share of the kills while the process loads, prepares and resumes
TRAINING_SECONDS = 1.5  # a run lives up to this long after its first step
OPTIONS = (
    "--cache_dir data --resume_from_checkpoint auto --config_overrides n_layer=2,n_head=2,n_embd=64,resid_pdrop=0.1 "
    "--block_size 64 --global_batch_size 4 --warmup_steps 20 --logging_steps 1 --eval_steps 0 --save_steps 5 "
    "--save_total_limit 3 --validation_split_percentage 0.5"
)


def main() -> None:
    parser = CommandLine(description="Kill and resume a run, and compare it with an uninterrupted one.")
    parser.add_argument("--kills", type=int, default=50, help="SIGKILLs at random moments (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments (default: 0)")
    parser.add_argument("--output_file", type=Path, help="JSON to write")
    args = parser.parse_args()
    started_at = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        try:
            finish(work, "through", args.kills)
            results = kill_and_resume(work, args.kills, random.Random(args.seed))
        finally:
            end_programs()
        differences = compare(work / "through", work / "killed")
    results |= {"identical": not differences, "differences": differences}
    finish_results({**results, "seconds": round(time.perf_counter() - started_at)}, args.output_file)
    if differences:
        raise UserError("the killed run differs from the uninterrupted one: " + "; ".join(differences))


def start(work: Path, name: str, kills: int) -> subprocess.Popen:
    """Start or resume the run `name`; its output is appended to NAME.log."""
    options = [*OPTIONS.split(), "--output_dir", name, "--max_steps", str(kills * STEPS_PER_KILL)]
    with open(work / f"{name}.log", "ab") as log:
        return start_program([sys.executable, str(TRAIN), *options], log, work, OMP_NUM_THREADS="2")


def finish(work: Path, name: str, kills: int) -> None:
    """Start or resume the run `name` and wait for its end."""
    if start(work, name, kills).wait() != 0:
        raise UserError(f"the run failed: {(work / f'{name}.log').read_text()[-500:]}")


def kill_and_resume(work: Path, kills: int, rng: random.Random) -> dict:
    """Kill the run this many times, then let it end. Returns what the kills interrupted."""
    killed = work / "killed"
    met = {"kills": kills, "during_start": 0, "during_a_save": 0, "steps_at_kills": []}
    for number in range(1, kills + 1):
        step, half_written = last_step(killed), partial_folders(killed)
        process = start(work, "killed", kills)
        if rng.random() < STARTUP_SHARE:
            time.sleep(rng.uniform(0, 4))
            met["during_start"] += last_step(killed) <= step
        else:
            while last_step(killed) <= step and process.poll() is None:
                time.sleep(0.005)
            time.sleep(rng.uniform(0, TRAINING_SECONDS))
        if process.poll() is not None:
            raise UserError(f"the run ended before kill {number}: {(work / 'killed.log').read_text()[-500:]}")
        end_program(process)
        met["during_a_save"] += bool(partial_folders(killed) - half_written)
        met["steps_at_kills"].append(last_step(killed))
        print(f"kill {number} at step {met['steps_at_kills'][-1]}", file=sys.stderr, flush=True)
        if damage := [reason for checkpoint in list_checkpoints(killed) if (reason := why_damaged(checkpoint))]:
            raise UserError(f"a checkpoint is damaged: {damage}")
    finish(work, "killed", kills)
    return met


def partial_folders(run: Path) -> set[Path]:
    """Return the checkpoints that were being written or removed when the process was killed."""
    return set(run.glob(".checkpoint-*.partial"))


def log_lines(run: Path) -> list[bytes]:
    """Return the lines of the run's log; a kill may have cut the last one short."""
    path = run / "metrics.jsonl"
    return path.read_bytes().rpartition(b"\n")[0].splitlines() if path.is_file() else []


def last_step(run: Path) -> int:
    return max((json.loads(line)["step"] for line in log_lines(run)[-3:]), default=0)


def compare(through: Path, killed: Path) -> list[str]:
    """Return what differs between the two runs."""
    newest = find_checkpoint(through, "latest").name
    names = ["model.safetensors", f"{newest}/model.safetensors", f"{newest}/optimizer.pt"]
    differences = [
        f"{name} differs" for name in names if (through / name).read_bytes() != (killed / name).read_bytes()
    ]
    keys = ("step", "loss", "grad_norm", "learning_rate")
    events = ([json.loads(line) for line in log_lines(run)] for run in (through, killed))
    logs = [[[event[key] for key in keys] for event in run if event["event"] == "train"] for run in events]
    return differences + (["the logged losses differ"] if logs[0] != logs[1] else [])


if __name__ == "__main__":
    run_main(main)
