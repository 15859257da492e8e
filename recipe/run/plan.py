"""The length of a run: steps, epochs or minutes, and the rows that its evaluations use."""

import dataclasses
import functools
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import PreTrainedConfig

from recipe.arguments import typed_names
from recipe.checkpoint.load import check_identity, read_state, run_identity, with_schedule_of
from recipe.config import SCHEDULE_OPTIONS, TrainConfig
from recipe.data.packed import PackedDataset
from recipe.data.task_files import read_examples
from recipe.errors import UserError
from recipe.hardware.choices import Choice
from recipe.hardware.memory import MemoryPlan, plan_device
from recipe.hardware.micro_batch import micro_batch_candidates
from recipe.hardware.processes import on_main_process
from recipe.model.build import build_model_config
from recipe.optim.optimizers import check_optimizer
from recipe.optim.schedule import LONGEST_WARMUP, compute_learning_rates, count_warmup_steps, resolve_schedule
from recipe.rules import parse_tasks

# An evaluated row costs a third (estimated, GPU) to 0.40 (measured, two CPU cores) of a trained one: forward only.
EVALUATED_ROW_COST = 0.4
EVALUATION_SHARE = 0.02  # of the run's time, for all evaluations together, with `max_eval_samples auto`
FIRST_TIMED_STEP, LAST_TIMED_STEP = 3, 10  # the steps that `max_minutes` times; compilation is over by then
GUESSED_STEPS = 1000  # of a run with `max_minutes`, for the evaluation before its first step
CLOSING_SECONDS = 10.0  # for the last checkpoint, the export and the sample


def check_before_preparing(
    config: TrainConfig, num_processes: int, device: torch.device, source: str | Path | None
) -> None:
    """Raise `UserError` for options that cannot work, before text is prepared for hours."""
    micro_batch_candidates(config, num_processes, device)
    check_optimizer(config, device)
    compute_learning_rates(config)
    build_model_config(config, 1, 0, source)
    for task, path in parse_tasks(config.eval_tasks).items():
        on_main_process(functools.partial(read_examples, task, path))


def plan_run(
    config: TrainConfig,
    dataset: PackedDataset,
    model_config: PreTrainedConfig,
    resume_dir: Path | None,
    output_dir: Path,
    accelerator: Accelerator,
    precision: Choice,
) -> tuple[TrainConfig, dict, dict[str, tuple], MemoryPlan]:
    """Resolve the number of steps and the optimizer, and plan the memory.

    Returns the config, the run's identity, {option: (old, new)} of a new schedule, and the plan.

    Raises `UserError` if the checkpoint belongs to another run.
    """
    config, changes, typed = resolve_max_steps(config, len(dataset.splits["train"])), {}, typed_names(sys.argv[1:])
    if resume_dir is not None:
        config = keep_warmup(keep_chosen_steps(config, resume_dir, typed), resume_dir)
    elif config.eval_only and config.model_name_or_path is None:
        raise UserError(f"--eval_only: there is no checkpoint in {output_dir}; pass --model_name_or_path")
    resolve_schedule(config)
    earlier = None
    if resume_dir is not None:
        content = read_state(resume_dir)
        if content.get("num_processes") == accelerator.num_processes:  # older checkpoints lack it
            earlier = content["memory_choices"]
        if config.optim == "auto":  # an optimizer's state cannot change its type
            config = dataclasses.replace(config, optim=content["identity"]["optim"])
        # Whether compiling pays on a CPU was decided before the number of steps.
        if content["steps_chosen"] and earlier and earlier["compiled"] and config.dynamo_backend == "auto":
            config = dataclasses.replace(config, dynamo_backend="inductor")
    plan = plan_device(config, model_config, accelerator, precision, earlier)
    config = dataclasses.replace(config, optim=plan.optim)
    check_optimizer(config, accelerator.device)
    identity = run_identity(config, dataset.metadata, model_config)
    if resume_dir is not None:
        may_change = set(SCHEDULE_OPTIONS) if config.eval_only else find_consent(typed)
        changes = check_identity(resume_dir, identity, may_change, output_dir)
        if config.is_open_ended:
            changes.pop("max_steps", None)  # not chosen yet
    return config, identity, changes, plan


def find_consent(typed: set[str]) -> set[str]:
    """Return the options of the schedule that a resumed run may change: what was typed, and what follows from it.

    A recipe that has changed is no consent.
    """
    consent = typed & set(SCHEDULE_OPTIONS)
    if typed & {"max_steps", "num_train_epochs", "max_minutes"}:
        consent |= {"max_steps", "warmup_steps"}
    if "lr_scheduler_type" in typed:
        consent |= {"lr_scheduler_kwargs"}
    return consent


def resolve_max_steps(config: TrainConfig, num_train_rows: int) -> TrainConfig:
    """Turn `num_train_epochs` into steps; a last, partial step counts as one."""
    if config.num_train_epochs is None:
        return config
    max_steps = max(1, -int(-config.num_train_epochs * num_train_rows // config.global_batch_size))
    return dataclasses.replace(config, max_steps=max_steps, num_train_epochs=None)


def keep_chosen_steps(config: TrainConfig, directory: Path, typed: set[str]) -> TrainConfig:
    """Keep the number of steps that `max_minutes` chose before the checkpoint."""
    content = read_state(directory)
    if config.max_minutes is None:
        return config
    if content.get("steps_chosen"):
        chosen = {key: content["identity"][key] for key in ("max_steps", "warmup_steps")}
        return dataclasses.replace(config, **chosen, max_minutes=None)
    if content["step"] >= LAST_TIMED_STEP and content["max_minutes"] is None and "max_minutes" not in typed:
        steps = content["identity"]["max_steps"]
        raise UserError(
            f"the recipe's max_minutes would change the schedule of {directory}, a run of {steps} steps; add "
            f"--max_steps {steps} to keep it"
        )
    return config


def keep_warmup(config: TrainConfig, directory: Path) -> TrainConfig:
    """Keep the warm-up of a run whose length changes after it: a fraction of the new length would repeat it."""
    content = read_state(directory)
    earlier = with_schedule_of(config, content["identity"])
    num_steps = count_warmup_steps(earlier)
    is_changed = (config.max_steps, config.warmup_steps) != (earlier.max_steps, earlier.warmup_steps)
    if is_changed and config.warmup_steps < 1 and num_steps <= content["step"]:
        return dataclasses.replace(config, warmup_steps=num_steps)
    return config


def count_evaluations(config: TrainConfig, max_steps: int) -> int:
    """Count the evaluations after the first step: every `eval_steps`, and after the last step."""
    return max_steps // config.eval_steps + (max_steps % config.eval_steps > 0) if config.eval_steps else 1


def count_eval_rows(config: TrainConfig, num_validation_rows: int, rows_per_forward: int) -> int:
    """Return how many validation rows an evaluation uses.

    `max_eval_samples auto` keeps all evaluations together within `EVALUATION_SHARE` of the run, in whole forward
    passes over all processes, but uses at least one. A run that only evaluates uses all rows.
    """
    if config.max_eval_samples in ("all", None) or (config.max_eval_samples == "auto" and config.eval_only):
        return num_validation_rows
    num_rows = config.max_eval_samples
    if num_rows == "auto":
        num_steps = config.max_steps if config.max_minutes is None else min(config.max_steps, GUESSED_STEPS)
        num_evaluations = 1 + count_evaluations(config, num_steps)  # one before the first step
        trained_rows = num_steps * config.global_batch_size
        budget = EVALUATION_SHARE * trained_rows / EVALUATED_ROW_COST / num_evaluations
        num_rows = max(1, int(budget) // rows_per_forward) * rows_per_forward
    return min(num_rows, num_validation_rows)


def shorten(config: TrainConfig, max_steps: int) -> TrainConfig:
    """Return the config of a run with the number of steps that `max_minutes` chose.

    A warm-up given in steps stays as it is, so the run equals the one that is given this number of steps, unless it
    exceeds a fifth of them. Then it becomes a fifth, and is steeper after the timed steps than before. A share of
    max_steps becomes one of the chosen steps. A shorter warm-up than the timed steps is followed by the schedule of
    the provisional number of steps until they are over.
    """
    warmup = config.warmup_steps
    if warmup >= 1 and max_steps < config.max_steps:
        warmup = min(warmup, int(LONGEST_WARMUP * max_steps))
    return dataclasses.replace(config, max_steps=max_steps, warmup_steps=warmup, max_minutes=None)


def fit_max_steps(
    config: TrainConfig,
    step: int,
    seconds_left: float,
    step_seconds: float,
    eval_seconds: float,
) -> int:
    """Return the last step that fits into the time left: after `step`, and at most `max_steps`.

    step_seconds, eval_seconds: per step and per evaluation.
    """
    share = EVALUATION_SHARE if config.max_eval_samples == "auto" else 0.0
    evaluating = count_evaluations(config, config.max_steps) * eval_seconds / config.max_steps
    step_seconds += max(share * step_seconds, evaluating)
    seconds = max(0.0, seconds_left - CLOSING_SECONDS - eval_seconds)  # for the last evaluation
    return min(config.max_steps, step + max(1, int(seconds / step_seconds)))


class StepBudget:
    """Chooses once, from the time of the first steps, how many steps fit into `max_minutes`."""

    def __init__(self, config: TrainConfig, started_at: float, first_step: int, eval_rows: int) -> None:
        """started_at: of the program, from `time.perf_counter`. eval_rows: rows per evaluation."""
        self.config, self.started_at, self.first_step = config, started_at, first_step
        self.eval_rows = eval_rows
        self.timed_from = 0.0

    def choose(self, step: int) -> int | None:
        """Return the number of steps when it has just been decided, else None. Call it after each step.

        The host waits for the device before and after the timed steps. All processes get the main one's answer.
        """
        num_steps = step - self.first_step
        if self.config.max_minutes is None or step == self.config.max_steps:
            return None
        if num_steps not in (FIRST_TIMED_STEP, LAST_TIMED_STEP):
            return None
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        now = time.perf_counter()
        if num_steps == FIRST_TIMED_STEP:
            self.timed_from = now
            return None
        step_seconds = (now - self.timed_from) / (LAST_TIMED_STEP - FIRST_TIMED_STEP)
        row_seconds = EVALUATED_ROW_COST * step_seconds / self.config.global_batch_size
        seconds_left = self.config.max_minutes * 60 - (now - self.started_at)
        task_seconds = len(parse_tasks(self.config.eval_tasks)) * self.config.max_eval_task_seconds  # at most
        eval_seconds = self.eval_rows * row_seconds + task_seconds
        return on_main_process(lambda: fit_max_steps(self.config, step, seconds_left, step_seconds, eval_seconds))
