"""Ten minutes on a GPU: the most important results first, each in its own file as soon as it exists.

python scripts/benchmarks/first_gpu.py --dataset_dir DIR --nanogpt DIR --output_dir runs/first_gpu

It downloads nothing. It needs the recipe's dependencies (without `datasets` and `evaluate`, some GPU tests and the
stage `real` fail), the checkout on PYTHONPATH, and a packed dataset of a few thousand rows. A failed stage does not
stop the next one; a stage that no longer fits is recorded as not run. SIGTERM ends the stage and writes the table.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from recipe.arguments import CommandLine
from recipe.benchmark.ladder import choose_setting
from recipe.benchmark.machine import Machine, find_machine
from recipe.benchmark.measure import (
    LAP,
    TRAIN,
    Setting,
    combine,
    end_program,
    end_programs,
    measure,
    replace_file,
    start_program,
    to_arguments,
    utc_now,
    why_it_ended,
)
from recipe.benchmark.peers import build_nanogpt, measure_peer
from recipe.data.packed import open_packed_dataset
from recipe.errors import UserError, run_main
from recipe.run.stop import EXIT_STOPPED

ROOT = TRAIN.parent.parent
KERNEL_TIMES = Path(__file__).parent / "kernel_times.py"
LEVERS = ("bf16_residual", "sigmoid_gelu", "index_mask")  # on by default on CUDA
WITHOUT_LEVERS = dict.fromkeys(LEVERS, False)
RESIDUAL_ONLY = {**WITHOUT_LEVERS, "bf16_residual": True}
PYTEST = "-m pytest -m gpu -v --tb=short --durations=0 -p no:cacheprovider tests/test_gpu.py -k"
REAL_RUN = "--max_steps 40 --save_steps 5 --eval_steps 20 --warmup_steps 0.1 --logging_steps 1 --save_total_limit 2"
Result = dict[str, Any]  # "failed", if present, is the reason


# Name, description, the seconds it takes at most on a GPU, and a function of the deadline (of time.monotonic()).
Stage = tuple[str, str, float, Callable[[float], Result]]


class FirstRun:
    """Runs the stages and writes their results."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args, self.work = args, work
        rows, fewer_rows = args.rows, args.rows // 4
        timed: dict[str, tuple[str, Callable[[int, float], Result]]] = {  # programs take steps and the deadline
            "ours": (f"ours, {rows} rows per forward pass", partial(self.measure, {}, rows)),
            "ours_without_levers": (f"without {', '.join(LEVERS)}", partial(self.measure, WITHOUT_LEVERS, rows)),
            "nanogpt": (f"nanoGPT, {rows} rows per forward pass", partial(self.measure_nanogpt, False)),
            "ours_residual": ("only with the bf16 residual stream", partial(self.measure, RESIDUAL_ONLY, rows)),
            "ours_small": (f"ours, {fewer_rows} rows per forward pass", partial(self.measure, {}, fewer_rows)),
            "nanogpt_default": ("nanoGPT at its default micro-batch", partial(self.measure_nanogpt, True)),
        }
        self.programs = {name: program for name, (_, program) in timed.items()}
        tuned = "ours with coordinate descent tuning, from a cold cache"
        stages: list[Stage] = [
            ("machine", "the machine, its software and its measured matmul rate", 25, self.find_machine),
            ("warm", "fill the compile caches in parallel", 120, self.warm),
            ("gpu_tests", "pytest -m gpu, started in the stage before", 20, partial(self.wait, "pytest")),
            *((name, what, 25, partial(program, args.steps)) for name, (what, program) in timed.items()),
            ("ours_again", "ours again: the noise, and whether losses repeat", 25, self.measure_again),
            ("kernels", "the parts of a step alone", 70, self.run_kernels),
            ("real", "a run with auto, evaluation, SIGTERM and resume", 80, self.run_for_real),
            ("coordinate_descent", tuned, 110, self.measure_coordinate_descent),
        ]
        names = [name for name, *_ in stages]
        for name in args.stages or []:
            if name not in names:
                raise UserError(f"there is no stage '{name}'; the stages are {', '.join(names)}")
        self.stages = [stage for stage in stages if args.stages is None or stage[0] in args.stages]
        self.ends_at = time.monotonic() + args.minutes * 60
        self.machine: Machine | None = None
        self.started: dict[str, subprocess.Popen] = {}
        self.results: dict[str, Result] = {}
        args.output_dir.mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        """Run all stages, even if some fail; after SIGTERM the rest is recorded as not run."""
        stopped: BaseException | None = None
        table = [f"{'stage':20} {'status':8} {'seconds':>7} {'tokens/s':>10}  attention, or reason"]
        for number, (name, what, seconds, run_stage) in enumerate(self.stages, 1):
            start, started_at = time.monotonic(), utc_now()
            left = self.ends_at - start
            status, reason, result = "not run", "", {}
            if stopped is not None:
                reason = "stopped earlier"
            elif left < seconds:
                reason = f"{left:.0f} s left, needs up to {seconds:.0f}"
            else:
                print(f"{name}: {what} ...", flush=True)
                try:
                    result = self.results[name] = attempt(run_stage, min(self.ends_at, start + 1.5 * seconds))
                    status, reason = "failed" if "failed" in result else "done", result.get("failed", "")
                except BaseException as error:
                    stopped, status, reason = error, "failed", f"stopped: {error!r}"
            took = round(time.monotonic() - start, 1)
            entry = {"name": name, "what": what, "status": status, "reason": reason, "result": result}
            entry |= {"started_at": started_at, "seconds": took, "command": shlex.join(["python", *sys.argv])}
            entry["environment"] = self.machine.environment if self.machine else "unknown"
            self.write(f"{number:02}_{name}.json", json.dumps(entry, indent=2))
            rate = f"{result['tokens_per_second']:,}" if "tokens_per_second" in result else ""
            note = reason or result.get("attention_kernel", "")
            table.append(f"{name:20} {status:8} {took:>7.1f} {rate:>10}  {note}".rstrip())
            print(table[-1], flush=True)
        end_programs()
        self.write("table.txt", "\n".join(table))
        print("", *table, f"Results: {self.args.output_dir}", sep="\n", flush=True)
        if stopped is not None:
            raise stopped

    def write(self, name: str, text: str) -> None:
        replace_file(self.args.output_dir / name, lambda path: path.write_text(text + "\n"))

    # ------------------------------------------------------------------ stages

    def find_machine(self, deadline: float) -> Result:
        self.machine = find_machine()
        nvidia_smi = subprocess.getoutput("timeout 20 nvidia-smi").splitlines()
        return {"machine": asdict(self.machine), "nvidia_smi": nvidia_smi}

    def setting(self, rows: int) -> Setting:
        if self.machine is None:
            raise UserError("the machine is unknown because its stage failed")
        args = self.args
        return choose_setting(args.config, str(args.dataset_dir), self.machine, rows, global_batch=2 * args.rows)

    def measure(self, options: dict[str, Any], rows: int, num_steps: int, deadline: float) -> Result:
        setting, options = self.setting(rows), {"logging_steps": LAP, **options}
        numbers = measure(options, setting, num_steps, Path(tempfile.mkdtemp(dir=self.work)), deadline)
        if "step_ms" in numbers:
            numbers |= self.machine.utilization(numbers["tokens_per_second"] * setting.flops_per_token)
        return {"setting": setting.says, "options": combine(setting.run_options, options), **numbers}

    def measure_again(self, deadline: float) -> Result:
        numbers, first = self.programs["ours"](self.args.steps, deadline), self.results.get("ours", {})
        if "losses" in first and "losses" in numbers:
            steps = first["losses"].keys() & numbers["losses"]
            numbers["largest_loss_difference"] = max(abs(first["losses"][i] - numbers["losses"][i]) for i in steps)
            numbers["times_the_first"] = round(numbers["tokens_per_second"] / first["tokens_per_second"], 4)
        return numbers

    def measure_nanogpt(self, default_batch: bool, num_steps: int, deadline: float) -> Result:
        setting, dataset = self.setting(self.args.rows), open_packed_dataset(self.args.dataset_dir)
        folder = Path(tempfile.mkdtemp(dir=self.work)) / "nanogpt"
        peer = build_nanogpt(self.args.nanogpt, self.machine, setting, dataset, folder, default_batch=default_batch)
        numbers, ours = measure_peer(peer, num_steps, deadline), self.results.get("ours", {})
        if "tokens_per_second" in numbers and "tokens_per_second" in ours:
            numbers["times_of_ours"] = round(ours["tokens_per_second"] / numbers["tokens_per_second"], 4)
        return {"run": shlex.join(peer.command), "sha256": peer.sha256, **numbers}

    def measure_coordinate_descent(self, deadline: float) -> Result:
        name = "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING"
        with patch.dict(os.environ, {name: "1"}):
            return {"environment_variable": f"{name}=1", **self.programs["ours"](self.args.steps, deadline)}

    def warm(self, deadline: float) -> Result:
        """Start the tests; beside them, every program that is timed later compiles and trains for a moment."""
        self.start("pytest", [*PYTEST.split(), "not 8_gb"])

        def warm_up(name: str) -> Result:
            return attempt(self.programs[name], LAP, deadline)

        few_threads = patch.dict(os.environ, TORCHINDUCTOR_COMPILE_THREADS="4")  # which does not change what is cached
        with few_threads, ThreadPoolExecutor(len(self.programs)) as pool:
            try:
                found = dict(zip(self.programs, pool.map(warm_up, self.programs), strict=True))
            except BaseException:
                end_programs()  # then the threads end, too
                raise
        found |= {name: warm_up(name) for name in found if found[name].get("failed") == "out of memory"}  # alone
        cold = [name for name in found if "failed" in found[name]]
        return {**found, **({"failed": f"not warm: {', '.join(cold)}"} if cold else {})}

    def run_kernels(self, deadline: float) -> Result:
        setting, results = self.setting(self.args.rows), self.work / "kernels.json"
        shape = {"rows": self.args.rows, "block_size": setting.block_size, "vocab_size": setting.vocab_size}
        shape |= {key: setting.model_size[key] for key in ("n_embd", "n_head")}
        self.start("kernels", [str(KERNEL_TIMES), *to_arguments({**shape, "output_file": results})])
        ended = self.wait("kernels", deadline)
        return {**ended, **(json.loads(results.read_text()) if results.is_file() else {})}

    def run_for_real(self, deadline: float) -> Result:
        """Run the recipe as a user does, stop it by SIGTERM after its first checkpoint, and resume it to its end."""
        output_dir = self.work / "real"
        options = {"config": self.args.config, "dataset_dir": self.args.dataset_dir, "output_dir": output_dir}
        command = [str(TRAIN), *to_arguments(options), *REAL_RUN.split()]
        process = self.start("real", command)
        while process.poll() is None and time.monotonic() < deadline and not list(output_dir.glob("checkpoint-*")):
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        stopped = self.wait("real", deadline, EXIT_STOPPED)
        if "failed" in stopped:
            return stopped
        checkpoints = sorted(path.name for path in output_dir.glob("checkpoint-*"))
        self.start("resumed", [*command, "--resume_from_checkpoint", "auto"])
        resumed = self.wait("resumed", deadline)
        if "failed" not in resumed:
            resumed["summary"] = json.loads((output_dir / "summary.json").read_text())
        events = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
        return {
            "run": shlex.join(command),
            "stopped": stopped,
            "checkpoints": checkpoints,
            "events": events,
            **resumed,
        }

    # ------------------------------------------------------------------ processes

    def start(self, name: str, command: list[str]) -> subprocess.Popen:
        """Start a Python program whose output goes to NAME.log."""
        with open(self.work / f"{name}.log", "w") as log:
            process = self.started[name] = start_program([sys.executable, *command], log, ROOT, PYTHONUNBUFFERED="1")
        return process

    def wait(self, name: str, deadline: float, expected: int = 0) -> Result:
        """Wait for a started program. Returns its exit status and output, and "failed" if it was late or failed."""
        if name not in self.started:
            return {"failed": "the stage that starts it did not run"}
        process, failed = self.started[name], {}
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        if process.poll() is None:
            failed = {"failed": "not finished in time"}
            process.send_signal(signal.SIGINT)  # pytest reports the failures so far
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
            end_program(process)
        log = (self.work / f"{name}.log").read_text(errors="replace")
        if not failed and process.returncode != expected:
            failed = {"failed": why_it_ended(log)}
        return {"exit_status": process.returncode, "output": log.splitlines()[-400:], **failed}


def attempt(function: Callable[..., Result], *arguments: float) -> Result:
    try:
        return function(*arguments)
    except Exception as error:  # the other results are still worth having
        return {"failed": f"{type(error).__name__}: {error}"[:300]}


def main() -> None:
    parser = CommandLine(description="The first results on a GPU, the most important ones first.")
    parser.add_argument("--dataset_dir", type=Path, required=True, help="packed dataset from prepare_data.py")
    parser.add_argument("--nanogpt", type=Path, required=True, help="a clone of https://github.com/karpathy/nanoGPT")
    parser.add_argument("--config", default="gpt2_124m", help="recipe (default: gpt2_124m)")
    parser.add_argument("--rows", type=int, default=64, help="rows per forward pass, half of a step (default: 64)")
    parser.add_argument("--steps", type=int, default=12, help="timed steps per run; use a multiple of 4 (default: 12)")
    parser.add_argument("--minutes", type=float, default=10, help="time limit of all stages (default: 10)")
    parser.add_argument("--stages", type=lambda text: text.split(","), help="run only these, as in machine,ours")
    parser.add_argument("--output_dir", type=Path, default=Path("runs") / "first_gpu", help="folder of the results")
    args = parser.parse_args()
    args.dataset_dir = args.dataset_dir.resolve()
    if args.config.endswith((".yaml", ".yml")):  # the programs run in other folders
        args.config = str(Path(args.config).resolve())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"  # all programs share compiled code
        FirstRun(args, Path(folder)).run()


if __name__ == "__main__":
    run_main(main, "interrupted; the results so far are in the output folder")
