"""The next results on a GPU: the most important ones first, each in its own file as soon as it exists.

python scripts/benchmarks/first_gpu.py --dataset_dir DIR --nanogpt DIR --heads DIR --before DIR

--heads and --before are checkouts of this project: one with the other size of heads in gpt2_124m_fast.yaml, and commit
0cead81, whose logits were not in pieces. It downloads nothing. It needs the package, installed or on PYTHONPATH, and a
packed dataset of a few thousand rows. A failed stage does not stop the next one, and a stage that no longer fits into
the time is recorded as not run. Two programs share the GPU, one of them stopped; with 64 rows each takes 31 GB. The
seconds are an H200's, and add up to more than ten minutes; run what is left with --stages and TORCHINDUCTOR_CACHE_DIR
set.

The speed to beat: 490,000 tokens/s on one H200, 448,000 on each of eight H100, with the same matrix products
(modded-nanogpt, records/track_3_optimization, torch 2.11).
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer

from recipe.arguments import CommandLine
from recipe.environment import describe_environment
from recipe.errors import UserError, run_main

ROOT = Path(__file__).resolve().parents[2]
TRAIN = str(ROOT / "recipe" / "train.py")
SHORT = "--eval_steps 0 --max_eval_samples 64 --save_steps 0"
TIMED = f"--max_steps 24 --warmup_steps 4 --logging_steps 4 {SHORT}"


def main() -> None:
    args = parse()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)  # shared by all programs
        run_stages(args)


def run_stages(args: argparse.Namespace) -> None:
    """Run the stages in their order, and write the result of each at once."""
    ends_at = time.monotonic() + 60 * args.minutes
    table = []
    for number, (name, seconds, command) in enumerate(list_parts(args), 1):
        if args.stages and name not in args.stages:
            continue
        started_at = time.monotonic()
        left = ends_at - started_at
        if left < seconds / 2:
            result: dict[str, Any] = {"status": f"not run: {left:.0f} s left of {seconds}"}
        else:
            print(f"{name} ...", flush=True)
            deadline = min(ends_at, started_at + 2 * seconds)
            result = run_stage(command, deadline)
        result |= {"name": name, "seconds": round(time.monotonic() - started_at, 1), "command": shown(command)}
        result["environment"] = describe_environment(torch.device(args.device))
        text = json.dumps(result, indent=2).replace(f"{ROOT}/", "")
        (args.output_dir / f"{number:02}_{name}.json").write_text(text + "\n")
        table.append(f"{name:16} {result['seconds']:6.1f} s  {result['status']}")
        print(table[-1], flush=True)
        (args.output_dir / "table.txt").write_text("\n".join(table) + "\n")


def list_parts(args: argparse.Namespace) -> list[tuple[str, int, list[str]]]:
    """Return (name, seconds that it should take, command) of each stage."""
    batch = ["--per_device_train_batch_size", args.rows, "--global_batch_size", 2 * args.rows]
    data = ["--dataset_dir", args.dataset_dir]

    def ours(options: str) -> list[str]:
        return python(TRAIN, "--config", "gpt2_124m", *data, *batch, *options.split())

    def peers(name: str, program: Path, *options: str) -> list[str]:
        output = ["--output_file", args.output_dir / f"{name}.json"]
        return python(ROOT / "scripts" / "benchmarks" / "peers.py", program, *data, *batch, *output, *options)

    rungs = ["--rungs", "half", "compile", "flash", "loss_in_graph", "--output_file", args.output_dir / "rungs.json"]
    tests = ["-m", "pytest", "-m", "gpu", "-v", "--tb=short", ROOT / "tests/machine/test_gpu.py"]
    return [
        ("machine", 15, python(__file__, "--machine")),
        ("gpu_tests", 150, python(*tests)),
        ("heads", 120, peers("heads", args.heads, "--config", "gpt2_124m_fast")),
        ("before", 120, peers("before", args.before)),
        ("nanogpt", 120, peers("nanogpt", args.nanogpt)),
        ("adamw", 35, ours(TIMED)),
        ("muon", 80, ours(f"{TIMED} --optim muon --learning_rate 2e-3")),
        ("rungs", 200, python(ROOT / "scripts" / "run_ladder.py", *data, *rungs)),
    ]


def python(*words: object) -> list[str]:
    return [sys.executable, *map(str, words)]


def run_stage(command: list[str], deadline: float) -> dict:
    """Run a command. Returns the status, the output and what the run recorded."""
    with tempfile.TemporaryDirectory() as folder:
        output_dir = ["--output_dir", f"{folder}/run"] if TRAIN in command else []
        result = wait(start([*command, *output_dir]), deadline) | read_results(Path(folder, "run"))
    if "--output_file" in command:
        path = Path(command[command.index("--output_file") + 1])
        if path.is_file():
            result["result"] = json.loads(path.read_text())
    return result


def start(command: list[str]) -> subprocess.Popen:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait(process: subprocess.Popen, deadline: float) -> dict:
    """Wait for a program; kill it, with the programs that it has started, at the deadline and after Ctrl-C."""
    try:
        output = process.communicate(timeout=max(1, deadline - time.monotonic()))[0]
        status = "done"
    except BaseException as error:
        process.send_signal(signal.SIGINT)  # peers.py then ends the programs that it has stopped
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0]
        status = "not finished in time"
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
    if status == "done" and process.returncode != 0:
        status = f"failed with {process.returncode}: {(output.strip().splitlines() or [''])[-1][:200]}"
    return {"status": status, "output": output.splitlines()[-200:]}


def read_results(run: Path) -> dict:
    """Return the summary and the log of a run of recipe/train.py, if there is one."""
    results = {}
    if (run / "summary.json").is_file():
        results["summary"] = json.loads((run / "summary.json").read_text())
    if (run / "metrics.jsonl").is_file():
        complete = (run / "metrics.jsonl").read_text().rpartition("\n")[0]  # a kill may have cut the last line
        results["events"] = [json.loads(line) for line in complete.splitlines()]
    return results


def shown(command: list[str]) -> str:
    return " ".join("python" if word == sys.executable else word for word in command)


def print_machine(device: torch.device) -> None:
    """Print the GPU, and the rate of its matrix products with random numbers; zeros would be faster."""
    print(subprocess.getoutput("timeout 20 nvidia-smi"), describe_environment(device), sep="\n")
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    print(f"bf16 matmul of {size}: {2 * size**3 / measure_seconds(lambda: a @ b) / 1e12:.1f} TFLOP/s", flush=True)


def measure_seconds(function: object) -> float:
    return Timer("f()", globals={"f": function}).blocked_autorange(min_run_time=0.5).median


def parse() -> argparse.Namespace:
    parser = CommandLine(description="The first results on a GPU, the most important ones first.")
    parser.add_argument("--dataset_dir", type=Path, help="packed dataset from prepare_data.py")
    parser.add_argument("--nanogpt", type=Path, help="a clone of https://github.com/karpathy/nanoGPT")
    parser.add_argument("--heads", type=Path, help="a checkout with the other size of heads in gpt2_124m_fast.yaml")
    parser.add_argument("--before", type=Path, help="a checkout of commit 0cead81")
    parser.add_argument("--rows", type=int, default=64, help="rows per forward pass, half of a step (default: 64)")
    parser.add_argument("--minutes", type=float, default=10, help="time limit of all stages (default: 10)")
    parser.add_argument("--stages", nargs="+", help="run only these, as in machine ours")
    parser.add_argument("--output_dir", type=Path, default=Path("runs") / "first_gpu", help="folder of the results")
    parser.add_argument("--machine", action="store_true", help="only show the GPU and the rate of its products")
    args = parser.parse_args()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    args.device = device.type
    if args.machine:
        print_machine(device)
        sys.exit(0)
    if not (args.dataset_dir and args.nanogpt and args.heads and args.before):
        raise UserError("pass --dataset_dir, --nanogpt, --heads and --before")
    return args


if __name__ == "__main__":
    run_main(main, "interrupted; the results so far are in the output folder", is_alone=True)
