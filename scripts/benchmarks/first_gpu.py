"""Ten minutes on a GPU: the most important results first, each in its own file as soon as it exists.

python scripts/benchmarks/first_gpu.py --dataset_dir DIR --nanogpt DIR --output_dir runs/first_gpu

It downloads nothing and needs PyTorch, Transformers, Accelerate, the checkout on PYTHONPATH (and `datasets` and
`evaluate` for some GPU tests and the last run), and a packed dataset of a few thousand rows. A failed stage does not
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
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from recipe.benchmark.ladder import CPU_SIZE, choose_setting
from recipe.benchmark.machine import Machine, find_machine
from recipe.benchmark.measure import (
    LAP,
    TRAIN,
    Goal,
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
from recipe.command_line import CommandLine
from recipe.data.packed import open_packed_dataset
from recipe.errors import UserError, run_main
from recipe.run.stop import EXIT_STOPPED

ROOT = TRAIN.parent.parent
KERNEL_TIMES = Path(__file__).parent / "kernel_times.py"
LEVERS = ("bf16_residual", "sigmoid_gelu", "index_mask")  # on by default on CUDA
WITHOUT_LEVERS = dict.fromkeys(LEVERS, False)
RESIDUAL_ONLY = {**WITHOUT_LEVERS, "bf16_residual": True}
PYTEST = ["-m", "gpu", "-k", "not 8_gb", "-v", "--tb=short", "--durations=0", "-p", "no:cacheprovider"]
Result = dict[str, Any]  # "failed", if present, is the reason


@dataclass(frozen=True)
class Stage:
    """One result. seconds: at most this long on a GPU; it is ended after 1.5 times that."""

    name: str
    what: str
    seconds: float
    run: Callable[[float], Result]  # takes the deadline of time.monotonic()
    why_not: str | None = None


class FirstRun:
    """Runs the stages and writes their results."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args, self.work = args, work
        self.programs: dict[str, Callable[[int, float], Result]] = {  # take the number of steps and the deadline
            "ours": partial(self.measure, {}, args.rows),
            "ours_without_levers": partial(self.measure, WITHOUT_LEVERS, args.rows),
            "ours_residual": partial(self.measure, RESIDUAL_ONLY, args.rows),
            "ours_small": partial(self.measure, {}, args.small_rows),
        }
        if args.nanogpt:
            self.programs["nanogpt"] = partial(self.measure_nanogpt, False)
            self.programs["nanogpt_default"] = partial(self.measure_nanogpt, True)
        self.chosen = self.stages()
        self.ends_at = time.monotonic() + args.minutes * 60
        self.machine: Machine | None = None
        self.tests: subprocess.Popen | None = None
        self.entries: list[dict[str, Any]] = []
        args.output_dir.mkdir(parents=True, exist_ok=True)

    def stages(self) -> list[Stage]:
        def timed(name: str, what: str) -> Stage:
            why_not = None if name in self.programs else "--nanogpt is missing"
            return Stage(name, what, 25, lambda end: self.programs[name](self.args.steps, end), why_not)

        rows = self.args.rows
        tuned = "ours with coordinate descent tuning, from a cold cache"
        found = [
            Stage("machine", "the machine, its software and its measured matmul rate", 25, self.find_machine),
            Stage("warm", "fill the compile caches in parallel", 120, self.warm),
            Stage("gpu_tests", "pytest -m gpu, started in the stage before", 20, self.end_tests),
            timed("ours", f"ours, {rows} rows per forward pass"),
            timed("ours_without_levers", f"without {', '.join(LEVERS)}"),
            timed("nanogpt", f"nanoGPT, {rows} rows per forward pass"),
            timed("ours_residual", "only with the bf16 residual stream"),
            timed("ours_small", f"ours, {self.args.small_rows} rows per forward pass"),
            timed("nanogpt_default", "nanoGPT at its default micro-batch"),
            Stage("ours_again", "ours again: the noise, and whether losses repeat", 25, self.measure_again),
            Stage("kernels", "the parts of a step alone", 70, self.run_kernels),
            Stage("real", "a run with auto, evaluation, SIGTERM and resume", 80, self.run_for_real),
            Stage("coordinate_descent", tuned, 110, self.measure_coordinate_descent),
        ]
        names = [stage.name for stage in found]
        for name in self.args.stages or []:
            if name not in names:
                raise UserError(f"there is no stage '{name}'; the stages are {', '.join(names)}")
        return [stage for stage in found if self.args.stages is None or stage.name in self.args.stages]

    def run(self) -> None:
        """Run all stages, even if some fail; after SIGTERM the rest is recorded as not run."""
        stopped: BaseException | None = None
        for number, stage in enumerate(self.chosen, 1):
            started_at = time.monotonic()
            left = self.ends_at - started_at
            entry = {"name": stage.name, "what": stage.what, "status": "not run", "started_at": utc_now()}
            if stopped is not None:
                entry["reason"] = "stopped earlier"
            elif stage.why_not is not None:
                entry["reason"] = stage.why_not
            elif left < stage.seconds:
                entry["reason"] = f"{left:.0f} s left, needs up to {stage.seconds:.0f}"
            else:
                print(f"{stage.name}: {stage.what} ...", flush=True)
                try:
                    result = attempt(stage.run, min(self.ends_at, started_at + 1.5 * stage.seconds))
                    entry |= {"status": "failed" if "failed" in result else "done", "result": result}
                    entry |= {"reason": result["failed"]} if "failed" in result else {}
                except BaseException as error:
                    stopped = error
                    entry |= {"status": "failed", "reason": f"stopped: {error!r}"}
            entry["seconds"] = round(time.monotonic() - started_at, 1)
            self.entries.append(entry)
            details = {"command": shlex.join(["python", *sys.argv])}
            details["environment"] = self.machine.environment if self.machine else "unknown"
            self.write(f"{number:02}_{stage.name}.json", json.dumps({**entry, **details}, indent=2))
            print(row(entry), flush=True)
        end_programs()
        kernels = [
            f"  {name:22}" + " ".join(f"{value:>12,.4f} {unit}" for unit, value in numbers.items())
            for name, numbers in self.result_of("kernels").items()
            if "ms" in numbers
        ]
        table = "\n".join([HEADER, *map(row, self.entries), *kernels])
        self.write("table.txt", table)
        print(f"\n{table}\nResults: {self.args.output_dir}", flush=True)
        if stopped is not None:
            raise stopped

    def write(self, name: str, text: str) -> None:
        replace_file(self.args.output_dir / name, lambda path: path.write_text(text + "\n"))

    def result_of(self, name: str) -> Result:
        return next((entry.get("result", {}) for entry in self.entries if entry["name"] == name), {})

    # ------------------------------------------------------------------ stages

    def find_machine(self, deadline: float) -> Result:
        self.machine = find_machine()
        try:
            done = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False, timeout=20)
            nvidia_smi = done.stdout.splitlines()
        except (OSError, subprocess.TimeoutExpired) as error:
            nvidia_smi = str(error)
        return {"machine": asdict(self.machine), "nvidia_smi": nvidia_smi}

    def setting(self, rows: int) -> Setting:
        if self.machine is None:
            raise UserError("the machine is unknown because its stage failed")
        args = self.args
        return choose_setting(args.config, str(args.dataset_dir), self.machine, rows, args.global_batch)

    def measure(self, options: dict[str, Any], rows: int, num_steps: int, deadline: float) -> Result:
        setting, options = self.setting(rows), {"logging_steps": LAP, **options}
        command = ["python", "recipe/train.py", *to_arguments(combine(setting.run_options, options))]
        numbers = measure(options, setting, Goal(num_steps), Path(tempfile.mkdtemp(dir=self.work)), deadline)
        if "step_ms" in numbers:
            numbers |= self.machine.utilization(numbers["tokens_per_second"] * setting.flops_per_token)
        return {"setting": setting.says, "run": shlex.join(command), **numbers}

    def measure_again(self, deadline: float) -> Result:
        numbers, first = self.programs["ours"](self.args.steps, deadline), self.result_of("ours")
        if "losses" in first and "losses" in numbers:
            steps = first["losses"].keys() & numbers["losses"]
            differences = [abs(first["losses"][step] - numbers["losses"][step]) for step in steps]
            numbers["losses_repeat_bit_for_bit"] = not any(differences)
            numbers["largest_loss_difference"] = max(differences)
            numbers["times_the_first"] = round(numbers["tokens_per_second"] / first["tokens_per_second"], 4)
        return numbers

    def measure_nanogpt(self, default_batch: bool, num_steps: int, deadline: float) -> Result:
        setting, dataset = self.setting(self.args.rows), open_packed_dataset(self.args.dataset_dir)
        folder = Path(tempfile.mkdtemp(dir=self.work)) / "nanogpt"
        peer = build_nanogpt(self.args.nanogpt, self.machine, setting, dataset, folder, default_batch=default_batch)
        numbers, ours = measure_peer(peer, num_steps, deadline), self.result_of("ours")
        if "tokens_per_second" in numbers and "tokens_per_second" in ours:
            numbers["times_of_ours"] = round(ours["tokens_per_second"] / numbers["tokens_per_second"], 4)
        return {"run": shlex.join(peer.command), "sha256": peer.sha256, **numbers}

    def measure_coordinate_descent(self, deadline: float) -> Result:
        name = "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING"
        with patch.dict(os.environ, {name: "1"}):
            return {"environment_variable": f"{name}=1", **self.programs["ours"](self.args.steps, deadline)}

    def warm(self, deadline: float) -> Result:
        """Start the tests; beside them, every program that is timed later compiles and trains for a moment."""
        self.tests = self.start("pytest", [sys.executable, "-m", "pytest", *PYTEST, str(self.args.tests)])

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

    def end_tests(self, deadline: float) -> Result:
        if self.tests is None:
            return {"failed": "the stage that starts them did not run"}
        while self.tests.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        status = self.tests.poll()
        if status is None:  # pytest then reports the failures so far
            self.tests.send_signal(signal.SIGINT)
            self.wait(self.tests, "pytest", time.monotonic() + 5)
        lines = self.log_of("pytest").read_text(errors="replace").splitlines()
        failed = {None: "not done in time", 0: None}.get(status, (lines or ["no output"])[-1])
        return {"exit_status": status, "output": lines[-400:], **({"failed": failed} if failed else {})}

    def run_kernels(self, deadline: float) -> Result:
        setting, results = self.setting(self.args.rows), self.work / "kernels.json"
        shape = {"rows": self.args.rows, "block_size": setting.block_size, "vocab_size": setting.vocab_size}
        shape |= {key: setting.model_size[key] for key in ("n_embd", "n_head")}
        no_compile = [] if self.machine.device == "cuda" else ["--no_compile"]
        command = [sys.executable, str(KERNEL_TIMES), *to_arguments({**shape, "output_file": results}), *no_compile]
        status, failed = self.wait(self.start("kernels", command), "kernels", deadline)
        found = json.loads(results.read_text()) if results.is_file() else {}
        return {**found, **failed}

    def run_for_real(self, deadline: float) -> Result:
        """Run the recipe as a user does, stop it by SIGTERM after its first checkpoint, and resume it to its end."""
        output_dir, steps = self.work / "real", self.args.real_steps
        options = {key: value for key, value in self.setting(1).options.items() if key in CPU_SIZE}
        options |= {"config": self.args.config, "dataset_dir": self.args.dataset_dir, "output_dir": output_dir}
        options |= {"max_steps": steps, "save_steps": max(1, steps // 8), "eval_steps": steps // 2}
        options |= {"warmup_steps": 0.1, "logging_steps": 1, "save_total_limit": 2}
        command = [sys.executable, str(TRAIN), *to_arguments(options)]
        found: Result = {"run": shlex.join(command[1:])}
        process = self.start("real", command)
        while process.poll() is None and time.monotonic() < deadline and not list(output_dir.glob("checkpoint-*")):
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        found["exit_status_after_sigterm"], failed = self.wait(process, "real", deadline, EXIT_STOPPED)
        if failed:
            return {**found, **failed}
        found["checkpoints"] = sorted(path.name for path in output_dir.glob("checkpoint-*"))
        resumed = self.start("resumed", [*command, "--resume_from_checkpoint", "auto"])
        found["exit_status"], failed = self.wait(resumed, "resumed", deadline)
        metrics, summary = output_dir / "metrics.jsonl", output_dir / "summary.json"
        events = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
        found["events"] = [event for event in events if event["event"] in ("train", "eval")]
        return {**found, **failed} if failed else {**found, "summary": json.loads(summary.read_text())}

    # ------------------------------------------------------------------ processes

    def log_of(self, name: str) -> Path:
        return self.work / f"{name}.log"

    def start(self, name: str, command: list[str]) -> subprocess.Popen:
        with open(self.log_of(name), "w") as log:
            return start_program(command, log, ROOT, PYTHONUNBUFFERED="1")

    def wait(
        self, process: subprocess.Popen, name: str, deadline: float, expected: int = 0
    ) -> tuple[int | None, Result]:
        """The exit status, None if the process was ended at the deadline, and why it is not the expected one."""
        try:
            status = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            end_program(process)
            return None, {"failed": "not done in time"}
        log = self.log_of(name).read_text(errors="replace")
        return status, {} if status == expected else {"failed": why_it_ended(log)}


def attempt(function: Callable[..., Result], *arguments: float) -> Result:
    try:
        return function(*arguments)
    except Exception as error:  # the other results are still worth having
        return {"failed": f"{type(error).__name__}: {error}"[:300]}


HEADER = f"{'stage':20} {'status':8} {'seconds':>7} {'tokens/s':>10} {'step ms':>9} {'GB':>6}  attention, or reason"


def row(entry: dict[str, Any]) -> str:
    """A line of the table."""
    result = entry.get("result", {})
    rate, step, memory = (result.get(key) for key in ("tokens_per_second", "step_ms", "peak_memory_bytes"))
    numbers = [f"{rate:,}" if rate else "", f"{step:,.1f}" if step else "", f"{memory / 1e9:.1f}" if memory else ""]
    cells = f"{numbers[0]:>10} {numbers[1]:>9} {numbers[2]:>6}"
    reason = entry.get("reason") or result.get("attention_kernel", "")
    return f"{entry['name']:20} {entry['status']:8} {entry['seconds']:>7.1f} {cells}  {reason}".rstrip()


def main() -> None:
    parser = CommandLine(description="The first results on a GPU, the most important ones first.")
    parser.add_argument("--dataset_dir", type=Path, required=True, help="packed dataset from prepare_data.py")
    parser.add_argument("--nanogpt", type=Path, help="a clone of https://github.com/karpathy/nanoGPT")
    parser.add_argument("--config", default="gpt2_124m", help="recipe (default: gpt2_124m)")
    parser.add_argument("--rows", type=int, default=64, help="sequences per forward pass (default: 64)")
    parser.add_argument("--small_rows", type=int, default=16, help="the second size (default: 16)")
    parser.add_argument("--global_batch", type=int, default=128, help="sequences per step of the timed runs")
    parser.add_argument("--steps", type=int, default=12, help="timed steps per run, a multiple of 4 (default: 12)")
    parser.add_argument("--real_steps", type=int, default=40, help="steps of the run that is stopped and resumed")
    parser.add_argument("--minutes", type=float, default=10, help="for everything (default: 10)")
    parser.add_argument("--stages", type=lambda text: text.split(","), help="run only these, as in machine,ours")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="what pytest -m gpu runs")
    parser.add_argument("--output_dir", type=Path, default=Path("runs") / "first_gpu", help="folder of the results")
    args = parser.parse_args()
    args.dataset_dir, args.tests = args.dataset_dir.resolve(), args.tests.resolve()
    if args.config.endswith((".yaml", ".yml")):  # the programs run in other folders
        args.config = str(Path(args.config).resolve())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"  # all programs share compiled code
        FirstRun(args, Path(folder)).run()


if __name__ == "__main__":
    run_main(main, "interrupted; the results so far are in the output folder")
