"""The first results on a GPU: the most important ones first, each in its own file as soon as it exists.

python scripts/benchmarks/first_gpu.py --dataset_dir DIR --nanogpt DIR --output_dir runs/first_gpu

It downloads nothing. It needs the package, installed or on PYTHONPATH, and a packed dataset of a few thousand rows. A
failed stage does not stop the next one, and a stage that no longer fits into the time is recorded as not run. At most
two programs share the GPU, and only while they fill the compile cache: with 64 rows each takes 31 GB. The seconds are
an H200's, and add up to more than ten minutes; run what is left with --stages and TORCHINDUCTOR_CACHE_DIR set.

The speed to beat: 490,000 tokens/s on one H200, 448,000 on each of eight H100, with the same matrix products
(modded-nanogpt, records/track_3_optimization, torch 2.11).
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer

from recipe.arguments import CommandLine, as_path
from recipe.environment import describe_environment
from recipe.errors import UserError, run_main
from recipe.run.stop import EXIT_STOPPED

ROOT = Path(__file__).resolve().parents[2]
TRAIN = str(ROOT / "recipe" / "train.py")
SHORT = "--eval_steps 0 --max_eval_samples 64 --save_steps 0"
TIMED = f"--max_steps 24 --warmup_steps 4 --logging_steps 4 {SHORT}"
WARM = f"--max_steps 2 --warmup_steps 0 {SHORT}"
LEVERS = {  # each against `ours`
    "bf16_residual": "--bf16_residual",
    "muon": "--optim muon --learning_rate 2e-3",
    "chunks": "--loss_chunks 8",
    "checkpointing": "--activation_checkpointing",
}
REAL = "--max_steps 40 --save_steps 5 --eval_steps 20 --logging_steps 1 --save_total_limit 2 --profile"


def main() -> None:
    args = parse()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)  # shared by all programs
        run_stages(args)


def run_stages(args: argparse.Namespace) -> None:
    """Run the stages in their order, and write the result of each at once."""
    ends_at, table = time.monotonic() + 60 * args.minutes, []
    for number, (name, seconds, command) in enumerate(list_parts(args), 1):
        if args.stages and name not in args.stages:
            continue
        left, started_at = ends_at - time.monotonic(), time.monotonic()
        if left < seconds / 2:
            result: dict[str, Any] = {"status": f"not run: {left:.0f} s left of {seconds}"}
        else:
            print(f"{name} ...", flush=True)
            deadline = min(ends_at, started_at + 2 * seconds)
            result = run_real(command, deadline) if name == "real" else run_stage(command, deadline)
        result |= {"name": name, "seconds": round(time.monotonic() - started_at, 1), "command": shown(command)}
        result["environment"] = describe_environment(torch.device(args.device))
        text = json.dumps(result, indent=2).replace(f"{ROOT}/", "")
        (args.output_dir / f"{number:02}_{name}.json").write_text(text + "\n")
        entries = result.get("entries") or [result.get("summary", {})]  # of two programs, the last is nanoGPT
        speed, peak = (entries[-1].get(key) or 0 for key in ("tokens_per_second", "peak_memory_bytes"))
        numbers = f"{speed:12,.0f} tokens/s {peak / 1e9:6.1f} GB"
        table.append(f"{name:16} {result['seconds']:6.1f} s {numbers}  {result['status']}")
        print(table[-1], flush=True)
        (args.output_dir / "table.txt").write_text("\n".join(table) + "\n")


def list_parts(args: argparse.Namespace) -> list[tuple[str, int, list]]:
    """Return (name, seconds that it should take, command) of each stage; two commands run side by side."""
    rows = args.rows

    def ours(num_rows: int, options: str) -> list[str]:
        batch = ["--per_device_train_batch_size", num_rows, "--global_batch_size", 2 * rows]
        return python(TRAIN, *args.run, *batch, *options.split())

    def peers(num_rows: int, steps: int, name: str) -> list[str]:
        batch = ["--micro_batch", num_rows, "--grad_accum", max(1, 2 * rows // num_rows), "--steps", steps]
        output = ["--rounds", 1, "--output_file", args.output_dir / f"{name}.json"]
        return python(ROOT / "scripts" / "run_ladder.py", *args.run, *batch, *output, "--peers", args.nanogpt)

    return [
        ("machine", 15, python(__file__, "--machine")),
        (
            "gpu_tests",
            150,
            python("-m", "pytest", "-m", "gpu", "-v", "--tb=short", ROOT / "tests/machine/test_gpu.py"),
        ),
        ("warm", 70, [ours(rows // 2, WARM), ours(rows, WARM)]),
        ("warm_nanogpt", 120, [peers(rows, 4, "warm"), peers(rows // 2, 4, "warm_half")]),
        ("ours_half", 35, ours(rows // 2, TIMED)),
        ("ours", 35, ours(rows, TIMED)),
        ("nanogpt_half", 70, peers(rows // 2, 12, "nanogpt_half")),
        ("nanogpt", 70, peers(rows, 12, "nanogpt")),
        ("real", 120, python(TRAIN, *args.run, *REAL.split())),
        ("ours_again", 35, ours(rows, TIMED)),  # the noise, and whether the losses repeat
        # Inductor fuses 24 more casts per micro-batch: 1.2% of a step, computed (LOG.md).
        ("fused_casts", 80, ["env", "TORCHINDUCTOR_LOOP_ORDERING_AFTER_FUSION=0", *ours(rows, TIMED)]),
        *((name, 80, ours(rows, f"{TIMED} {options}")) for name, options in LEVERS.items()),
    ]


def python(*words: object) -> list[str]:
    return [sys.executable, *map(str, words)]


def run_stage(command: list, deadline: float) -> dict:
    """Run one command, or two side by side. Returns the status, the output and what the runs recorded."""
    if isinstance(command[0], list):
        with ThreadPoolExecutor() as pool:
            parts = list(pool.map(lambda part: run_stage(part, deadline), command))
        return {"status": "; ".join(part["status"] for part in parts), "parts": parts}
    with tempfile.TemporaryDirectory() as folder:
        output_dir = ["--output_dir", f"{folder}/run"] if TRAIN in command else []
        result = wait(start([*command, *output_dir]), deadline) | read_results(Path(folder, "run"))
    if "--output_file" in command and (path := Path(command[command.index("--output_file") + 1])).is_file():
        result["entries"] = json.loads(path.read_text())["entries"]
    return result


def run_real(command: list[str], deadline: float) -> dict:
    """Train as a user does, stop the run with SIGTERM after its first checkpoint, and resume it to its end."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        process = start([*command, "--output_dir", str(run)])
        while process.poll() is None and time.monotonic() < deadline and not list(run.glob("checkpoint-*")):
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        stopped = wait(process, deadline, EXIT_STOPPED)
        if stopped["status"] != "done":
            return stopped
        resumed = wait(start([*command, "--output_dir", str(run), "--resume_from_checkpoint", "auto"]), deadline)
        return {**resumed, "stopped": stopped, **read_results(run)}


def start(command: list[str]) -> subprocess.Popen:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, **pipes, start_new_session=True)


def wait(process: subprocess.Popen, deadline: float, expected: int = 0) -> dict:
    """Wait for a program; kill it, with the programs that it has started, at the deadline and after Ctrl-C."""
    try:
        output, status = process.communicate(timeout=max(1, deadline - time.monotonic()))[0], "done"
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        output, status = process.communicate()[0], "not finished in time"
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
    if status == "done" and process.returncode != expected:
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


def shown(command: list) -> str:
    if isinstance(command[0], list):
        return " & ".join(map(shown, command))
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
    parser.add_argument("--config", type=as_path, default="gpt2_124m", help="recipe (default: gpt2_124m)")
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
    if not (args.dataset_dir and args.nanogpt):
        raise UserError("pass --dataset_dir and --nanogpt")
    args.run = ["--config", args.config, "--dataset_dir", str(args.dataset_dir)]
    return args


if __name__ == "__main__":
    run_main(main, "interrupted; the results so far are in the output folder", is_alone=True)
