"""Run recipe/train.py for a few steps in a fresh process and read its numbers from its log.

The numbers are step time, memory, attention kernel and losses, or the reason why the run failed. A run that has logged
enough is killed, which saves waiting for its evaluation, export and sample.
"""

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recipe.environment import describe_environment
from recipe.errors import UserError
from recipe.rules import PROFILED_STEPS

TRAIN = Path(__file__).parent.parent / "train.py"
LAP = 4  # steps between two log lines; only there the host waits for the device
POLL_SECONDS = 0.1
PROFILE_EVENT = b'{"event": "profile"'
_started: list[subprocess.Popen] = []


@dataclass(frozen=True)
class Setting:
    """What compared runs share. options: of recipe/train.py, without the batch sizes."""

    says: str
    options: dict[str, Any]
    model_size: dict[str, int]  # n_layer, n_head, n_embd
    vocab_size: int
    block_size: int
    flops_per_token: int
    micro_batch: int
    global_batch: int

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.block_size

    @property
    def run_options(self) -> dict[str, Any]:
        batch = {"global_batch_size": self.global_batch, "per_device_train_batch_size": self.micro_batch}
        return {**self.options, **batch}


def to_arguments(options: dict[str, Any]) -> list[str]:
    """Turn `{"tf32": False}` into `["--tf32", "False"]`."""
    return [text for key, value in options.items() for text in (f"--{key}", str(value))]


def combine(*layers: dict[str, Any]) -> dict[str, Any]:
    """Combine options: later ones replace earlier ones, but `config_overrides` are merged."""
    combined = {key: value for layer in layers for key, value in layer.items()}
    texts = [layer["config_overrides"] for layer in layers if "config_overrides" in layer]
    if texts:
        overrides = dict(pair.split("=") for text in texts for pair in text.split(","))
        combined["config_overrides"] = ",".join(f"{key}={value}" for key, value in overrides.items())
    return combined


def start_program(
    command: list[str], stdout: Any, directory: Path | None = None, **environment: str
) -> subprocess.Popen:
    """Start a program in its own process group."""
    process = subprocess.Popen(
        command,
        cwd=directory,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    _started.append(process)
    return process


def end_program(process: subprocess.Popen) -> None:
    """Kill the program and its children if it still runs."""
    if process.poll() is None:
        with suppress(ProcessLookupError):  # another thread may have ended it by now
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_programs() -> None:
    """Kill every program that this process started."""
    for process in _started:
        end_program(process)


def measure(options: dict[str, Any], setting: Setting, num_steps: int, work: Path, deadline: float) -> dict[str, Any]:
    """Run recipe/train.py with these options in a fresh process and time `num_steps` after the first lap.

    deadline: of `time.monotonic()`. Returns the numbers of the run, or `{"failed": reason}`.
    """
    shutil.rmtree(work / "run", ignore_errors=True)
    last_step = LAP + num_steps  # it is profiled afterwards, and killed before its end
    run = {"output_dir": str(work / "run"), "profile": last_step, "max_steps": last_step + 2 * PROFILED_STEPS}
    command = [sys.executable, str(TRAIN), *to_arguments(combine(setting.run_options, options, run))]
    metrics, log = work / "run" / "metrics.jsonl", work / "run.log"
    started_at, first_at = time.monotonic(), None
    with open(log, "wb") as file:
        process = start_program(command, file)
    try:
        while True:
            ended, now = process.poll() is not None, time.monotonic()
            logged = metrics.read_bytes().rpartition(b"\n")[0] if metrics.is_file() else b""  # only complete lines
            first_at = first_at or (now if logged else None)
            if PROFILE_EVENT in logged:
                numbers = summarize_events([json.loads(line) for line in logged.splitlines()], setting, last_step)
                return {"seconds_to_first_step": round(first_at - started_at, 1), **numbers}
            if ended:
                return {"failed": why_it_ended(log.read_text(errors="replace"))}
            if now > deadline:
                return {"failed": f"not finished after {deadline - started_at:.0f} s"}
            time.sleep(POLL_SECONDS)
    finally:
        end_program(process)


def summarize_events(events: list[dict[str, Any]], setting: Setting, last_step: int) -> dict[str, Any]:
    """Return step time, memory, attention kernel and losses.

    Laps of `LAP` steps count if they are after the first one, which compiles, and not after `last_step`.
    """
    train = [event for event in events if event["event"] == "train"]
    profile = next(event for event in events if event["event"] == "profile")
    times, before = [], 0  # of each step in milliseconds
    for event in train:
        if before >= LAP and event["step"] <= last_step:
            step_ms = setting.tokens_per_step / event["tokens_per_second"] * 1e3
            times += [step_ms] * (event["step"] - before)
        before = event["step"]
    laps = [statistics.fmean(times[i : i + LAP]) for i in range(0, len(times) - LAP + 1, LAP)]
    median = statistics.median(laps)
    return {
        "step_ms": round(median, 2),
        "step_ms_lowest": round(min(laps), 2),
        "step_ms_highest": round(max(laps), 2),
        "tokens_per_second": round(setting.tokens_per_step / median * 1e3),
        "peak_memory_bytes": train[-1]["peak_memory_bytes"],
        "attention_kernel": profile["attention_kernel"],
        "profile_ms": {key[:-3]: round(value, 2) for key, value in profile.items() if key.endswith("_ms")},
        "losses": {event["step"]: event["loss"] for event in train},  # None if not finite
    }


def loss_delta(losses: dict[int, float | None], reference: dict[int, float | None]) -> float | None:
    """Return the last logged loss minus the reference's mean over the same steps.

    reference: one loss per step. None if the two share no steps or a loss is not finite.
    """
    steps = sorted(losses)
    for before, step in reversed(list(zip([0, *steps], steps, strict=False))):
        same = [reference[s] for s in range(before + 1, step + 1) if s in reference]
        if len(same) == step - before:
            return None if None in (losses[step], *same) else losses[step] - statistics.fmean(same)
    return None


def why_it_ended(log: str) -> str:
    """Find the error of a program in its output and return it in one line."""
    if "out of memory" in log.lower():
        return "out of memory"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(error:|\w*(Error|Exception)\b)", line)]
    return (errors or lines or ["no output"])[-1][:200]


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Replace `path` by a file that is complete. Raises `UserError` if that fails, and leaves `path` as it was."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        write(partial)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}; an existing file is unchanged") from error


def run_python(*command: object, directory: Path | None = None) -> tuple[float, float]:
    """Run a Python command. Returns its seconds, and the peak resident megabytes of its largest process."""
    # In a small intermediate process, because a child starts with the peak memory of its parent.
    code = """import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=2)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"""
    started_at = time.perf_counter()
    between = [sys.executable, "-c", code, sys.executable, *map(str, command)]
    result = subprocess.run(between, cwd=directory, stdout=subprocess.PIPE, text=True, check=True)
    return time.perf_counter() - started_at, int(result.stdout) / 1024


def compare_windows(events: list[dict[str, Any]], steps_per_window: int) -> dict[str, Any]:
    """Return what something costs that is on in every second window of a run, as a share of the time without it.

    events: the log lines of the run's training. The steps before the first window, as many as in a window, warm up. It
    is on in the first. Each window but the first and the last is compared with its two neighbors.
    """
    seconds_at = {event["step"]: event["train_seconds"] for event in events}
    ends = range(steps_per_window, max(seconds_at) + 1, steps_per_window)
    windows = [seconds_at[end] - seconds_at[start] for start, end in itertools.pairwise(ends)]
    costs = []
    for index in range(1, len(windows) - 1):
        ratio = 2 * windows[index] / (windows[index - 1] + windows[index + 1]) - 1
        costs.append(ratio if index % 2 == 0 else -ratio)
    return {
        "steps_per_window": steps_per_window,
        "seconds_with": [round(value, 2) for value in windows[::2]],
        "seconds_without": [round(value, 2) for value in windows[1::2]],
        "median_cost": round(statistics.median(costs), 4),
        "costs": [round(value, 4) for value in costs],
    }


def utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def finish_results(results: dict[str, Any], output_file: Path | None, device: torch.device | None = None) -> None:
    """Print a measurement, or write it as JSON, with its command, time and environment. device: CPU by default."""
    environment = describe_environment(device or torch.device("cpu"))
    results |= {"command": shlex.join(["python", *sys.argv]), "finished_at": utc_now(), "environment": environment}
    text = json.dumps(results, indent=2) + "\n"
    output_file.write_text(text) if output_file else print(text)
