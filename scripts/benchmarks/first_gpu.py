"""Ten minutes on a GPU that may not come again: the results that matter most, in that order, each in its own file.

python scripts/benchmarks/first_gpu.py --dataset_dir DIR --nanogpt DIR --output_dir runs/first_gpu

Nothing is downloaded and nothing needs to be installed beside PyTorch, Transformers and Accelerate: put the checkout
on PYTHONPATH (and the packages `datasets` and `evaluate`, which some GPU tests and the last run need) and bring a
packed dataset of a few thousand rows. A stage that fails says why and the next one starts; one that no longer fits
into the time is recorded as not run. SIGTERM ends the present stage and writes the table.
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
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from recipe.benchmark.ladder import CPU_SIZE, choose_setting
from recipe.benchmark.machine import Machine, find_machine
from recipe.benchmark.measure import (
    LAP,
    TRAIN,
    Goal,
    Setting,
    combine,
    compile_cache,
    measure,
    to_arguments,
    why_it_ended,
)
from recipe.benchmark.peers import Peer, build_nanogpt, measure_peer
from recipe.command_line import CommandLine
from recipe.data.packed import open_packed_dataset
from recipe.environment import describe_environment
from recipe.errors import UserError, run_main
from recipe.run.stop import EXIT_STOPPED

ROOT = Path(__file__).parent.parent.parent
KERNEL_TIMES = Path(__file__).parent / "kernel_times.py"
MOST_WARM_UPS = 6  # at once: each compiles on the CPU, and trains for a moment on the GPU
LEVERS = ("bf16_residual", "sigmoid_gelu", "index_mask")  # on by default on CUDA
WITHOUT_LEVERS = dict.fromkeys(LEVERS, False)
MEASURED = {"logging_steps": LAP}  # beside a Setting's options


@dataclass(frozen=True)
class Stage:
    """One result. seconds: what it is expected to take at most on the GPU; it is ended after 1.5 times that."""

    name: str
    what: str
    seconds: float
    run: Callable[[float], dict[str, Any]]  # takes the deadline of time.monotonic(); "failed" in the result is why
    why_not: str | None = None


class FirstRun:
    """Runs the stages and writes what they give."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args, self.work = args, work
        self.chosen = self.stages()
        self.ends_at = time.monotonic() + args.minutes * 60
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:  # which keeps CUDA out of this process
            self.environment = pool.submit(_environment).result()
        self.machine: Machine | None = None
        self.processes: list[subprocess.Popen] = []
        self.tests: subprocess.Popen | None = None
        self.entries: list[dict[str, Any]] = []
        args.output_dir.mkdir(parents=True, exist_ok=True)

    def stages(self) -> list[Stage]:
        rows, small = self.args.rows, self.args.small_rows
        no_nanogpt = None if self.args.nanogpt else "no --nanogpt was given"
        found = [
            Stage("machine", "the machine, its software and its measured matmul rate", 25, self.find_machine),
            Stage("warm", "compile caches, filled in parallel", 120, self.warm),
            Stage("gpu_tests", "pytest -m gpu, which ran beside the stage before", 20, self.end_tests),
            Stage("ours", f"ours, {rows} rows a forward", 25, lambda end: self.measure({}, rows, end)),
            Stage("ours_without_levers", f"without {', '.join(LEVERS)}", 25,
                  lambda end: self.measure(WITHOUT_LEVERS, rows, end)),
            Stage("nanogpt", f"nanoGPT, {rows} rows a forward", 25, lambda end: self.measure_nanogpt(False, end),
                  no_nanogpt),
            Stage("ours_residual", "with the residual stream in bf16 alone", 25,
                  lambda end: self.measure({**WITHOUT_LEVERS, "bf16_residual": True}, rows, end)),
            Stage("ours_small", f"ours, {small} rows a forward", 25, lambda end: self.measure({}, small, end)),
            Stage("nanogpt_default", "nanoGPT at its default micro-batch", 25,
                  lambda end: self.measure_nanogpt(True, end), no_nanogpt),
            Stage("ours_again", "ours once more: the noise, and whether losses repeat", 25, self.measure_again),
            Stage("kernels", "the parts of a step alone", 70, self.run_kernels),
            Stage("real", "a run with auto, evaluation, SIGTERM and resume", 80, self.run_for_real),
            Stage("coordinate_descent", "ours, tuned by coordinate descent, from a cold cache", 110,
                  self.measure_coordinate_descent),
        ]  # fmt: skip
        names = [stage.name for stage in found]
        for name in self.args.stages or []:
            if name not in names:
                raise UserError(f"there is no stage '{name}'; the stages are {', '.join(names)}")
        return [stage for stage in found if self.args.stages is None or stage.name in self.args.stages]

    def run(self) -> None:
        """All stages, whatever becomes of each; on SIGTERM the rest is recorded as not run."""
        stopped: BaseException | None = None
        for number, stage in enumerate(self.chosen, 1):
            left = self.ends_at - time.monotonic()
            entry = {"name": stage.name, "what": stage.what, "status": "not run"}
            entry["started_at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            started_at = time.monotonic()
            if stopped is not None:
                entry["reason"] = "stopped before"
            elif stage.why_not is not None:
                entry["reason"] = stage.why_not
            elif left < stage.seconds:
                entry["reason"] = f"{left:.0f} s were left, and it takes up to {stage.seconds:.0f}"
            else:
                print(f"{stage.name}: {stage.what} ...", flush=True)
                try:
                    result = stage.run(min(self.ends_at, started_at + 1.5 * stage.seconds))
                    entry |= {"status": "failed" if "failed" in result else "done", "result": result}
                    entry |= {"reason": result["failed"]} if "failed" in result else {}
                except Exception as error:
                    entry |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:300]}
                except BaseException as error:
                    stopped = error
                    entry |= {"status": "failed", "reason": f"stopped: {error!r}"}
            entry["seconds"] = round(time.monotonic() - started_at, 1)
            self.entries.append(entry)
            self.write(f"{number:02}_{stage.name}.json", json.dumps({
                **entry, "command": shlex.join(["python", *sys.argv]), "environment": self.environment,
            }, indent=2) + "\n")  # fmt: skip
            print(row(entry), flush=True)
        self.end_processes()
        kernels = next((entry.get("result", {}) for entry in self.entries if entry["name"] == "kernels"), {})
        table = "\n".join([HEADER, *map(row, self.entries), *(
            f"  {name:22}" + " ".join(f"{value:>12,.4f} {unit}" for unit, value in numbers.items())
            for name, numbers in kernels.items() if "ms" in numbers
        )])  # fmt: skip
        self.write("table.txt", table + "\n")
        print(f"\n{table}\nResults: {self.args.output_dir}", flush=True)
        if stopped is not None:
            raise stopped

    def write(self, name: str, text: str) -> None:
        """Put a file in its place at once."""
        partial = self.args.output_dir / f".{name}.partial"
        partial.write_text(text)
        os.replace(partial, self.args.output_dir / name)

    # ------------------------------------------------------------------ stages

    def find_machine(self, deadline: float) -> dict[str, Any]:
        self.machine = find_machine()
        found = {"machine": asdict(self.machine)}
        try:
            done = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False, timeout=20)
            found["nvidia_smi"] = done.stdout.splitlines()
        except (OSError, subprocess.TimeoutExpired) as error:
            found["nvidia_smi"] = str(error)
        return found

    def setting(self, rows: int) -> Setting:
        if self.machine is None:
            raise UserError("the machine is not known: its stage has failed")
        args = self.args
        return choose_setting(args.config, str(args.dataset_dir), self.machine, rows, args.global_batch)

    def measure(self, options: dict[str, Any], rows: int, deadline: float) -> dict[str, Any]:
        setting, options = self.setting(rows), {**MEASURED, **options}
        command = ["python", "recipe/train.py", *to_arguments(combine(setting.run_options, options))]
        numbers = measure(options, setting, Goal(self.args.steps), self.work, deadline)
        if "step_ms" in numbers:
            flops = numbers["tokens_per_second"] * setting.flops_per_token
            numbers["mfu"] = flops / self.machine.best_matmul_flops
            if self.machine.data_sheet_tflops:
                numbers["mfu_data_sheet"] = flops / self.machine.data_sheet_tflops / 1e12
        return {"setting": setting.says, "run": shlex.join(command), **numbers}

    def measure_again(self, deadline: float) -> dict[str, Any]:
        numbers = self.measure({}, self.args.rows, deadline)
        first = next((e["result"] for e in self.entries if e["name"] == "ours" and e["status"] == "done"), None)
        if first is not None and "losses" in numbers:
            pairs = [(numbers["losses"][step], loss) for step, loss in first["losses"].items()
                     if step in numbers["losses"]]  # fmt: skip
            numbers["losses_repeat_bit_for_bit"] = all(a == b for a, b in pairs)
            numbers["largest_loss_difference"] = max(abs(a - b) for a, b in pairs)
            numbers["times_the_first"] = round(numbers["tokens_per_second"] / first["tokens_per_second"], 4)
        return numbers

    def nanogpt(self, default_batch: bool, folder: Path) -> Peer:
        setting = self.setting(self.args.rows)
        dataset = open_packed_dataset(self.args.dataset_dir)
        peer = build_nanogpt(self.args.nanogpt, self.machine, setting, dataset, folder, default_batch=default_batch)
        return replace(peer, environment=compile_cache(self.work))

    def measure_nanogpt(self, default_batch: bool, deadline: float) -> dict[str, Any]:
        peer = self.nanogpt(default_batch, Path(tempfile.mkdtemp(dir=self.work)) / "nanogpt")
        numbers = measure_peer(peer, self.args.steps, deadline)
        ours = next((e.get("result", {}) for e in self.entries if e["name"] == "ours"), {})
        if "tokens_per_second" in numbers and "tokens_per_second" in ours:
            numbers["times_of_ours"] = round(ours["tokens_per_second"] / numbers["tokens_per_second"], 4)
        return {"run": shlex.join(peer.command), "sha256": peer.sha256, **numbers}

    def measure_coordinate_descent(self, deadline: float) -> dict[str, Any]:
        name = "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING"
        os.environ[name] = "1"
        try:
            return {"environment_variable": f"{name}=1", **self.measure({}, self.args.rows, deadline)}
        finally:
            del os.environ[name]

    def warm(self, deadline: float) -> dict[str, Any]:
        """Let each program that is timed later compile and do its first steps, beside the tests."""
        self.start_tests()
        jobs = {name: self.warm_up_of_ours(name, options, rows) for name, options, rows in (
            ("ours", {}, self.args.rows),
            ("ours_without_levers", WITHOUT_LEVERS, self.args.rows),
            ("ours_residual", {**WITHOUT_LEVERS, "bf16_residual": True}, self.args.rows),
            ("ours_small", {}, self.args.small_rows),
        )}  # fmt: skip
        if self.args.nanogpt is not None:
            for name, default_batch in (("nanogpt", False), ("nanogpt_default", True)):
                peer = self.nanogpt(default_batch, self.work / f"warm_{name}")
                jobs[name] = (peer.command, peer.directory, self.log_of(name), b"iter 0:")
        waiting, running, ended = list(jobs), {}, {}
        retried: set[str] = set()
        try:
            while (waiting or running) and time.monotonic() < deadline:
                # What was out of memory beside the others is tried again alone.
                while waiting and len(running) < (1 if waiting[0] in retried else MOST_WARM_UPS):
                    name = waiting.pop(0)
                    command, directory, _, _ = jobs[name]
                    # Several compile at once, each with a few threads; how many does not change what is cached.
                    process = self.start(command, directory, self.log_of(name), TORCHINDUCTOR_COMPILE_THREADS="4")
                    running[name] = time.monotonic(), process
                for name, (started_at, process) in list(running.items()):
                    has_ended = process.poll() is not None
                    file, said_after_a_step = jobs[name][2:]
                    is_warm = file.is_file() and said_after_a_step in file.read_bytes()
                    if not is_warm and not has_ended:
                        continue
                    del running[name]
                    end(process)
                    reason = "warm" if is_warm else why_it_ended(self.log_of(name).read_text(errors="replace"))
                    if reason == "out of memory" and name not in retried:
                        retried.add(name)
                        waiting.append(name)
                    ended[name] = {"seconds": round(time.monotonic() - started_at, 1), "ended": reason}
                time.sleep(0.1)
        finally:
            for _, process in running.values():
                end(process)
        ended |= {name: {"ended": "not done in time"} for name in (*running, *waiting)}
        cold = [name for name in ended if ended[name]["ended"] != "warm"]
        return {**ended, **({"failed": f"not warm: {', '.join(cold)}"} if cold else {})}

    def warm_up_of_ours(self, name: str, options: dict[str, Any], rows: int) -> tuple[list[str], Path, Path, bytes]:
        """Command, where it runs, a file, and what the file holds after the first step."""
        run = {**MEASURED, **options, "output_dir": self.work / f"warm_{name}", "max_steps": 1000}
        command = [sys.executable, str(TRAIN), *to_arguments(combine(self.setting(rows).run_options, run))]
        return command, ROOT, self.work / f"warm_{name}" / "metrics.jsonl", b'"event": "train"'

    def start_tests(self) -> None:
        options = ["-m", "gpu", "-k", "not 8_gb", "-v", "--tb=short", "--durations=0", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *options]
        self.tests = self.start([*command, str(self.args.tests)], ROOT, self.log_of("pytest"))

    def end_tests(self, deadline: float) -> dict[str, Any]:
        if self.tests is None:
            return {"failed": "the stage that starts them did not run"}
        while self.tests.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        status = self.tests.poll()
        if status is None:  # which has it say why those that have failed did
            self.tests.send_signal(signal.SIGINT)
            self.wait(self.tests, time.monotonic() + 5)
        lines = self.log_of("pytest").read_text(errors="replace").splitlines()
        failed = {None: "not done in time", 0: None}.get(status, (lines or ["no output"])[-1])
        return {"exit_status": status, "output": lines[-400:], **({"failed": failed} if failed else {})}

    def run_kernels(self, deadline: float) -> dict[str, Any]:
        setting, results = self.setting(self.args.rows), self.work / "kernels.json"
        options = {"rows": self.args.rows, "block_size": setting.block_size, "vocab_size": setting.vocab_size,
                   "n_embd": setting.model_size["n_embd"], "n_head": setting.model_size["n_head"],
                   "output_file": results}  # fmt: skip
        no_compile = [] if self.machine.device == "cuda" else ["--no_compile"]
        process = self.start(
            [sys.executable, str(KERNEL_TIMES), *to_arguments(options), *no_compile], ROOT, self.log_of("kernels")
        )
        status = self.wait(process, deadline)
        found = json.loads(results.read_text()) if results.is_file() else {}
        if status != 0:
            log = self.log_of("kernels").read_text(errors="replace")
            found["failed"] = "not done in time" if status is None else why_it_ended(log)
        return found

    def run_for_real(self, deadline: float) -> dict[str, Any]:
        """The recipe as a user runs it, ended by SIGTERM after its first checkpoint and resumed to its end."""
        run, steps = self.work / "real", self.args.real_steps
        options = {"config": self.args.config, "dataset_dir": self.args.dataset_dir, "output_dir": run,
                   "max_steps": steps, "save_steps": max(1, steps // 8), "eval_steps": steps // 2,
                   "warmup_steps": 0.1, "logging_steps": 1, "save_total_limit": 2}  # fmt: skip
        shape = {key: value for key, value in self.setting(1).options.items() if key in CPU_SIZE}
        command = [sys.executable, str(TRAIN), *to_arguments({**shape, **options})]
        found: dict[str, Any] = {"run": shlex.join(command[1:])}
        process = self.start(command, ROOT, self.log_of("real"))
        while process.poll() is None and time.monotonic() < deadline and not list(run.glob("checkpoint-*")):
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        found["exit_status_after_sigterm"] = self.wait(process, deadline)
        if found["exit_status_after_sigterm"] != EXIT_STOPPED:
            return {**found, "failed": self.why("real", process)}
        found["checkpoints"] = sorted(path.name for path in run.glob("checkpoint-*"))
        resumed = self.start([*command, "--resume_from_checkpoint", "auto"], ROOT, self.log_of("resumed"))
        found["exit_status"] = self.wait(resumed, deadline)
        if (run / "metrics.jsonl").is_file():
            events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            found["events"] = [event for event in events if event["event"] in ("train", "eval")]
        if found["exit_status"] != 0:
            return {**found, "failed": self.why("resumed", resumed)}
        return {**found, "summary": json.loads((run / "summary.json").read_text())}

    # ------------------------------------------------------------------ processes

    def log_of(self, name: str) -> Path:
        return self.work / f"{name}.log"

    def why(self, name: str, process: subprocess.Popen) -> str:
        log = self.log_of(name).read_text(errors="replace")
        return "not done in time" if process.returncode == -signal.SIGKILL else why_it_ended(log)

    def start(self, command: list[str], directory: Path, log: Path, **environment: str) -> subprocess.Popen:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **compile_cache(self.work), **environment}
        with open(log, "w") as file:
            process = subprocess.Popen(
                command, cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def wait(self, process: subprocess.Popen, deadline: float) -> int | None:
        """Its exit status, or None if it was ended at the deadline."""
        try:
            return process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process)

    def end_processes(self) -> None:
        for process in self.processes:
            end(process)


def end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment() -> dict[str, Any]:
    device = torch.device(torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu")
    return {**describe_environment(device), "cuda_architectures": torch.cuda.get_arch_list()}


HEADER = f"{'stage':20} {'status':8} {'seconds':>7} {'tokens/s':>10} {'step ms':>9} {'GB':>6}  attention, or reason"


def row(entry: dict[str, Any]) -> str:
    """A line of the table."""
    result = entry.get("result", {})
    rate, step, memory = (result.get(key) for key in ("tokens_per_second", "step_ms", "peak_memory_bytes"))
    numbers = (f"{rate:>10,}" if rate else " " * 10, f"{step:>9,.1f}" if step else " " * 9,
               f"{memory / 1e9:>6.1f}" if memory else " " * 6)  # fmt: skip
    says = entry.get("reason") or result.get("attention_kernel", "")
    return f"{entry['name']:20} {entry['status']:8} {entry['seconds']:>7.1f} {' '.join(numbers)}  {says}".rstrip()


def parse() -> argparse.Namespace:
    parser = CommandLine(description="The first results on a GPU, the most important ones first.")
    parser.add_argument("--dataset_dir", type=Path, required=True, help="packed dataset, as prepare_data.py writes it")
    parser.add_argument("--nanogpt", type=Path, help="a clone of https://github.com/karpathy/nanoGPT")
    parser.add_argument("--config", default="gpt2_124m", help="recipe (default: gpt2_124m)")
    parser.add_argument("--rows", type=int, default=64, help="sequences a forward (default: 64)")
    parser.add_argument("--small_rows", type=int, default=16, help="sequences a forward of the second size")
    parser.add_argument("--global_batch", type=int, default=128, help="sequences a step of the timed runs")
    parser.add_argument("--steps", type=int, default=12, help="timed steps a run, a multiple of 4 (default: 12)")
    parser.add_argument("--real_steps", type=int, default=40, help="steps of the run that is stopped and resumed")
    parser.add_argument("--minutes", type=float, default=10, help="for everything (default: 10)")
    parser.add_argument("--stages", type=lambda text: text.split(","), help="only these, with commas and no spaces")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="what pytest -m gpu runs")
    parser.add_argument("--output_dir", type=Path, default=Path("runs") / "first_gpu", help="folder of the results")
    return parser.parse_args()


def main() -> None:
    args = parse()
    args.dataset_dir, args.tests = args.dataset_dir.resolve(), args.tests.resolve()
    if args.config.endswith((".yaml", ".yml")):  # programs run in folders of their own
        args.config = str(Path(args.config).resolve())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder:
        FirstRun(args, Path(folder)).run()


if __name__ == "__main__":
    run_main(main, "interrupted; the results so far are in the output folder")
