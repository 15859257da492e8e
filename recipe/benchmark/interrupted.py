"""Programs that train, are killed, and resume: their commands, and how to read their steps while they run.

Ours resumes by itself. The harness passes the others their newest checkpoint, as a wrapper script would.
"""

import abc
import json
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from recipe.benchmark.faults import UNSETTLED_STEPS, Life, count_examples, surviving_steps
from recipe.benchmark.machine import Machine
from recipe.benchmark.measure import TRAIN, Setting, end_program, start_program, to_arguments, why_it_ended
from recipe.benchmark.peers import build_nanogpt, build_run_clm
from recipe.checkpoint.load import OPTIMIZER_NAME, list_checkpoints
from recipe.data.packed import PackedDataset
from recipe.errors import UserError
from recipe.model.weights import WEIGHTS_NAME
from recipe.publish.public import METRICS_NAME

POLL_SECONDS = 0.01
SILENT_SECONDS = 300  # a program that logs no step for this long counts as failed
MAX_STEPS = 1_000_000
NO_DROPOUT = "resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0"


class Program(abc.ABC):
    """A program, its commands, and how to read its log."""

    name: str
    what: str
    settings: str
    loaded: str  # pattern of a line that it logs when it has loaded its checkpoint
    directory: Path
    command: list[str]
    verifies = False  # compares a checkpoint with its checksums before it loads it

    @abc.abstractmethod
    def resume(self, output: Path, save_steps: int) -> list[str]:
        """Return the command that starts or resumes the run in `output`."""

    @abc.abstractmethod
    def read(self, life: Life, lines: list[str], at: float) -> None:
        """Add what the program has logged in these lines to a life. at: when."""

    @abc.abstractmethod
    def examples(self, lives: list[Life], output: Path, batch_size: int, steps_differing: int) -> str:
        """Return how many examples were repeated and skipped. steps_differing: with another loss than without kills"""

    def checkpoints(self, output: Path) -> list[Path]:
        """Return the checkpoints, oldest first."""
        return list_checkpoints(output)

    def step_of(self, checkpoint: Path) -> int:
        return int(checkpoint.name.rpartition("-")[2])

    def load(self, checkpoint: Path) -> list[Any]:
        """Return the tensors of the model and of the optimizer."""
        return [load_file(checkpoint / WEIGHTS_NAME), torch.load(checkpoint / OPTIMIZER_NAME, weights_only=True)]


class Ours(Program):
    """recipe/train.py."""

    name, what, settings = "ours", "this recipe", "bf16 if the CPU has it, compiled; saves in the background"
    verifies = True
    loaded = r"(^|\r)recipe  "  # the table that follows loading; the progress bar precedes it

    def __init__(self, setting: Setting) -> None:
        self.directory = Path.cwd()
        options = {**setting.run_options, "max_steps": MAX_STEPS, "warmup_steps": 100, "logging_steps": 1}
        options |= {"eval_on_start": False, "eval_steps": 0, "resume_from_checkpoint": "auto", "save_total_limit": 2}
        self.command = [sys.executable, str(TRAIN), *to_arguments(options)]

    def resume(self, output: Path, save_steps: int) -> list[str]:
        return [*self.command, *to_arguments({"output_dir": output, "save_steps": save_steps})]

    def read(self, life: Life, lines: list[str], at: float) -> None:
        """Read new lines of metrics.jsonl."""
        for event in map(json.loads, lines):
            if event["event"] == "train":
                life.steps.append((at, event["step"]))
                life.losses[event["step"]] = str(event["loss"])

    def examples(self, lives: list[Life], output: Path, batch_size: int, steps_differing: int) -> str:
        """The run's own log names the steps; step s takes examples [(s-1)*G, s*G)."""
        events = map(json.loads, (output / METRICS_NAME).read_text().rpartition("\n")[0].splitlines())
        return said(count_examples([event["step"] for event in events if event["event"] == "train"], batch_size))


class NanoGPT(Program):
    """nanoGPT's train.py, unchanged. It saves after an evaluation, which is kept as short as possible."""

    name, what = "nanogpt", "nanoGPT"
    settings = "fp32, its only precision on a CPU, compiled; --eval_iters=1, so that it evaluates two batches per save"
    loaded = r"compiling the model"

    def __init__(self, source: Path, setting: Setting, dataset: PackedDataset, work: Path) -> None:
        peer = build_nanogpt(source, Machine("cpu", "", False), setting, dataset, work / "nanogpt_source")
        self.directory, self.command, self.sha256 = peer.directory, peer.command, peer.sha256

    def resume(self, output: Path, save_steps: int) -> list[str]:
        start = "resume" if self.checkpoints(output) else "scratch"
        options = {"out_dir": output, "init_from": start, "eval_interval": save_steps, "log_interval": 1}
        options |= {"max_iters": MAX_STEPS}
        return [*self.command, *(f"--{key}={value}" for key, value in options.items())]

    def checkpoints(self, output: Path) -> list[Path]:
        return [path] if (path := output / "ckpt.pt").exists() else []

    def load(self, checkpoint: Path) -> list[Any]:
        content = torch.load(checkpoint, weights_only=True)
        return [content["model"], content["optimizer"]]

    def step_of(self, checkpoint: Path) -> int:
        return torch.load(checkpoint, weights_only=True)["iter_num"]

    def examples(self, lives: list[Life], output: Path, batch_size: int, steps_differing: int) -> str:
        """It draws random positions from a generator that each start seeds again, so each life repeats the longest."""
        kept = [len(steps) for steps in surviving_steps(lives)]
        return f"{(sum(kept) - max(kept)) * batch_size:,}, -"

    def read(self, life: Life, lines: list[str], at: float) -> None:
        for line in lines:
            if found := re.match(r"iter (\d+): loss ([\d.]+|nan|inf)", line):
                life.steps.append((at, int(found[1]) + 1))
                life.losses[int(found[1]) + 1] = found[2]


class RunClm(Program):
    """Transformers' run_clm.py with its checkpoint at SIGTERM, which waits for 3 s before it saves."""

    name, what = "run_clm", "run_clm.py"
    settings = "bf16, compiled; --enable_jit_checkpoint"
    loaded = r"\*\*\*\*\* Running training"

    def __init__(self, source: Path, setting: Setting, dataset: PackedDataset, work: Path) -> None:
        work = work / "run_clm_source"
        work.mkdir()
        peer = build_run_clm(source, Machine("cpu", "", True), setting, dataset, work, MAX_STEPS)
        self.directory, self.sha256 = peer.directory, peer.sha256
        place = peer.command.index("--config_overrides") + 1
        overrides = f"{peer.command[place]},{NO_DROPOUT}"
        self.command = [*peer.command[:place], overrides, *peer.command[place + 1 :]]

    def resume(self, output: Path, save_steps: int) -> list[str]:
        options = {"output_dir": output, "logging_steps": 1, "save_strategy": "steps", "save_steps": save_steps}
        options |= {"save_total_limit": 2, "enable_jit_checkpoint": True, "disable_tqdm": True}
        if found := self.checkpoints(output):
            options["resume_from_checkpoint"] = found[-1]
        return [*self.command, *to_arguments(options)]

    def read(self, life: Life, lines: list[str], at: float) -> None:
        for line in lines:
            if found := re.search(r"global step (\d+)", line):
                life.first_step = int(found[1]) + 1
            elif found := re.match(r"\{'loss': '?([\d.e+-]+|nan|inf)", line):
                step = life.steps[-1][1] + 1 if life.steps else life.first_step
                life.steps.append((at, step))
                life.losses[step] = found[1]

    def examples(self, lives: list[Life], output: Path, batch_size: int, steps_differing: int) -> str:
        """With the losses of an uninterrupted run it has seen the same examples; otherwise this is unknown."""
        steps = [step for kept in surviving_steps(lives) for step in kept]
        return "unknown" if steps_differing else said(count_examples(steps, batch_size))


def said(counts: tuple[int, int]) -> str:
    return f"{counts[0]:,}, {counts[1]:,}"


class InterruptedRun:
    """A run of one of these programs, over all its processes."""

    def __init__(self, program: Program, output: Path, save_steps: int, threads: int) -> None:
        self.program, self.output, self.save_steps, self.threads = program, output, save_steps, threads
        self.lives: list[Life] = []
        self.keep_step: int | None = None  # the step whose checkpoint is copied to `kept` when it is complete
        self.kept: Path | None = None

    @property
    def life(self) -> Life:
        return self.lives[-1]

    @property
    def step(self) -> int:
        return self.life.steps[-1][1] if self.life.steps else 0

    @property
    def seconds_since_first_step(self) -> float:
        return self.life.steps[-1][0] - self.life.steps[0][0] if self.life.steps else 0.0

    @property
    def log(self) -> Path:
        return self.output.with_name(f"{self.output.name}-{len(self.lives)}.log")

    def start(self) -> None:
        """Start the program, or resume it from its newest checkpoint."""
        self.metrics = self.output / METRICS_NAME
        self.inode = self.metrics.stat().st_ino if self.metrics.exists() else None
        self.earlier = Counter(self.metrics.read_text().splitlines() if self.inode else ())
        self.num_read: dict[Path, int] = {}
        self.lives.append(Life(time.monotonic()))
        environment = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(self.threads), "ACCELERATE_USE_CPU": "true"}
        command = self.program.resume(self.output, self.save_steps)
        with open(self.log, "wb") as file:
            self.process = start_program(command, file, self.program.directory, **environment)

    def poll(self) -> None:
        """Read what the program has logged since the last time."""
        at, lines = time.monotonic(), self._new_lines(self.log)
        if lines:
            self.life.marks.setdefault("first_output", at)
        if any(re.search(self.program.loaded, line) for line in lines):
            self.life.marks.setdefault("loaded", at)
        if isinstance(self.program, Ours):
            lines = self._new_metrics()
        self.program.read(self.life, lines, at)
        if self.keep_step and not self.kept and self.step >= self.keep_step + UNSETTLED_STEPS:
            newest = next(reversed(self.program.checkpoints(self.output)), None)
            if newest and self.program.step_of(newest) == self.keep_step:  # it may still be in progress
                self.kept = self.output.with_name(f"{self.output.name}-{newest.name}")
                shutil.copytree(newest, self.kept) if newest.is_dir() else shutil.copy(newest, self.kept)

    def follow(self, until: Callable[[], bool]) -> None:
        """Read the log until a condition is true. A program that ends by itself is started again.

        If it cannot use its newest checkpoint, that is removed first. Raises `UserError` if it fails without one.
        """
        while not until():
            ended = self.process.poll() is not None
            self.poll()
            newest = self.life.steps[-1][0] if self.life.steps else self.life.started_at
            if ended or time.monotonic() > newest + SILENT_SECONDS:
                end_program(self.process)
                self.life.ended_at = time.monotonic()
                self.life.failed = why_it_ended(self.log.read_text(errors="replace")) if ended else "it hangs"
                found = self.program.checkpoints(self.output)
                if not found or isinstance(self.program, Ours):
                    raise UserError(f"{self.program.what} failed: {self.life.failed}")
                shutil.rmtree(found[-1]) if found[-1].is_dir() else found[-1].unlink()
                self.start()
            time.sleep(POLL_SECONDS)

    def kill(self) -> None:
        self.life.ended_at = time.monotonic()
        end_program(self.process)
        self.poll()

    def _new_metrics(self) -> list[str]:
        """Return the lines that this process has added; it first replaces the file by the lines that it keeps."""
        if not self.metrics.exists() or self.metrics.stat().st_ino == self.inode:
            return []
        added = []
        for line in self._new_lines(self.metrics):
            if self.earlier[line]:
                self.earlier[line] -= 1
            else:
                added.append(line)
        return added

    def _new_lines(self, path: Path) -> list[str]:
        """Return the complete lines that were added to a file."""
        with open(path, "rb") as file:
            file.seek(self.num_read.get(path, 0))
            complete = file.read().rpartition(b"\n")[0]
        self.num_read[path] = self.num_read.get(path, 0) + (len(complete) + 1 if complete else 0)
        return complete.decode(errors="replace").splitlines()


def build_programs(
    setting: Setting, dataset: PackedDataset, work: Path, nanogpt: Path | None, run_clm: Path | None
) -> list[Program]:
    """Prepare our program and those whose code is given. Raises `UserError` if the code cannot be used."""
    programs: list[Program] = [Ours(setting)]
    if nanogpt is not None:
        programs.append(NanoGPT(nanogpt, setting, dataset, work))
    if run_clm is not None:
        programs.append(RunClm(run_clm, setting, dataset, work))
    return programs
