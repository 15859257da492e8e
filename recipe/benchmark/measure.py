"""Run recipe/train.py in a process of its own for a few steps, and read from its log what they took.

In: options. Out: step time, memory, attention kernel and losses, or why it failed. The run is killed when it has
shown enough, so that no evaluation, export or sample is waited for.
"""

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.config import PROFILED_STEPS

TRAIN = Path(__file__).parent.parent / "train.py"
LAP = 4  # steps between two log lines, where the host waits for the device
POLL_SECONDS = 0.1
PROFILE_EVENT = b'{"event": "profile"'


@dataclass(frozen=True)
class Goal:
    """How long a rung runs: so many steps after the warm-up, or so many seconds after the first step."""

    steps: int  # at least LAP
    seconds: float | None = None

    @property
    def most_steps(self) -> int:
        """More than will be done: the run is killed before."""
        return LAP + self.steps + 2 * PROFILED_STEPS if self.seconds is None else 100_000


@dataclass(frozen=True)
class Setting:
    """What runs that are compared have in common. options: of recipe/train.py, without the batch sizes."""

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
    """`{"tf32": False}` -> `["--tf32", "False"]`."""
    return [text for key, value in options.items() for text in (f"--{key}", str(value))]


def combine(*layers: dict[str, Any]) -> dict[str, Any]:
    """Later options replace earlier ones, but overrides of the model's config add up."""
    combined: dict[str, Any] = {}
    for layer in layers:
        texts = [options["config_overrides"] for options in (combined, layer) if "config_overrides" in options]
        combined = {**combined, **layer}
        if texts:
            overrides = dict(pair.split("=") for text in texts for pair in text.split(","))
            combined["config_overrides"] = ",".join(f"{key}={value}" for key, value in overrides.items())
    return combined


def compile_cache(work: Path) -> dict[str, str]:
    """The environment of programs that share what they compile, below `work`."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(work / "inductor")}


def measure(options: dict[str, Any], setting: Setting, goal: Goal, work: Path, deadline: float) -> dict[str, Any]:
    """Run recipe/train.py with these options in a process of its own, until it has done what it is to do.

    deadline: of `time.monotonic()`. Returns the numbers of the run, or `{"failed": reason}`.
    """
    shutil.rmtree(work / "run", ignore_errors=True)
    profile_after = LAP + goal.steps if goal.seconds is None else LAP
    run = {"output_dir": str(work / "run"), "profile": profile_after, "max_steps": goal.most_steps}
    options = combine(setting.run_options, options, run)
    metrics = work / "run" / "metrics.jsonl"
    started_at = time.monotonic()
    seconds_to_first_step = None
    with open(work / "run.log", "w+b") as log:
        process = subprocess.Popen(
            [sys.executable, str(TRAIN), *to_arguments(options)],
            # What earlier runs below `work` have compiled is there; what this user's other runs have is not.
            env={**os.environ, **compile_cache(work)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while True:
                ended = process.poll() is not None
                logged = metrics.read_bytes().rpartition(b"\n")[0] if metrics.is_file() else b""  # whole lines
                now = time.monotonic()
                if logged and seconds_to_first_step is None:
                    first_at, seconds_to_first_step = now, now - started_at
                if PROFILE_EVENT in logged and (
                    ended or now > deadline or goal.seconds is None or now - first_at >= goal.seconds
                ):
                    numbers = summarize_events(
                        [json.loads(line) for line in logged.splitlines()], setting, profile_after
                    )
                    if numbers is not None:
                        return {"seconds_to_first_step": round(seconds_to_first_step, 1), **numbers}
                if ended:
                    return {"failed": why_it_ended((work / "run.log").read_text(errors="replace"))}
                if now > deadline:
                    return {"failed": f"not done in {deadline - started_at:.0f} s"}
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def summarize_events(events: list[dict[str, Any]], setting: Setting, profile_after: int) -> dict[str, Any] | None:
    """Step time over laps of `LAP` steps that hold neither compiling nor profiling, memory, attention kernel, losses.

    None if there is no such lap yet.
    """
    train = [event for event in events if event["event"] == "train"]
    profile = next(event for event in events if event["event"] == "profile")
    profiled = range(profile_after + 1, profile_after + PROFILED_STEPS + 1)
    laps, milliseconds, num_steps, before = [], 0.0, 0, 0
    for event in train:
        steps = range(before + 1, event["step"] + 1)
        if before >= LAP and not set(steps) & set(profiled):
            milliseconds += len(steps) * setting.tokens_per_step / event["tokens_per_second"] * 1e3
            num_steps += len(steps)
        if num_steps >= LAP:
            laps.append(milliseconds / num_steps)
            milliseconds, num_steps = 0.0, 0
        before = event["step"]
    if not laps:
        return None
    median = statistics.median(laps)
    return {
        "step_ms": round(median, 2),
        "step_ms_lowest": round(min(laps), 2),
        "step_ms_highest": round(max(laps), 2),
        "num_laps": len(laps),
        "tokens_per_second": round(setting.tokens_per_step / median * 1e3),
        "peak_memory_bytes": train[-1]["peak_memory_bytes"],
        "attention_kernel": profile["attention_kernel"],
        "profile_ms": {key[:-3]: round(value, 2) for key, value in profile.items() if key.endswith("_ms")},
        "losses": {event["step"]: event["loss"] for event in train},  # None: not finite
    }


def loss_delta(losses: dict[int, float | None], reference: dict[int, float | None]) -> float | None:
    """How far the last logged loss is from the reference's mean over the same steps; None if there are none.

    reference: one loss a step. None is also the answer if a loss in question is not finite.
    """
    steps = sorted(losses)
    for before, step in reversed(list(zip([0, *steps], steps, strict=False))):
        same = [reference[s] for s in range(before + 1, step + 1) if s in reference]
        if len(same) == step - before:
            return None if None in (losses[step], *same) else losses[step] - statistics.fmean(same)
    return None


def why_it_ended(log: str) -> str:
    """The error of a run, in one line."""
    if re.search(r"out of memory", log, re.IGNORECASE):
        return "out of memory"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(error:|\w*(Error|Exception)\b)", line)]
    return (errors or lines or ["no output"])[-1][:200]
