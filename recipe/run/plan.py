"""How long a run is and how much of it goes into evaluation.

In: the config, the number of rows, the speed of the first steps. Out: the number of steps, the rows of an evaluation.
"""

import dataclasses
import time
from dataclasses import replace
from pathlib import Path

import torch

from recipe.checkpoint.load import read_state
from recipe.config import TrainConfig
from recipe.errors import UserError
from recipe.hardware.processes import on_main_process

# An evaluated row costs 0.33 (a GPU) to 0.40 (two CPU cores) of a trained one: forward alone, without the optimizer.
EVALUATED_ROW_COST = 0.4
EVALUATION_SHARE = 0.02  # of the run's time, at most, over all evaluations with `max_eval_samples auto`
FIRST_TIMED_STEP, LAST_TIMED_STEP = 3, 10  # by which `max_minutes` knows the speed; compiling is over by then
CLOSING_SECONDS = 10.0  # for the last checkpoint, the export and the sample


def resolve_max_steps(config: TrainConfig, num_train_rows: int) -> TrainConfig:
    """The config with `num_train_epochs` turned into steps (a last, partial step counts as one)."""
    if config.num_train_epochs is None:
        return config
    max_steps = max(1, -int(-config.num_train_epochs * num_train_rows // config.global_batch_size))
    return dataclasses.replace(config, max_steps=max_steps, num_train_epochs=None)


def count_evaluations(config: TrainConfig, max_steps: int) -> int:
    """Evaluations after the first step: every `eval_steps` and after the last one."""
    return max_steps // config.eval_steps + (max_steps % config.eval_steps > 0) if config.eval_steps else 1


def count_eval_rows(config: TrainConfig, num_validation_rows: int, rows_per_forward: int) -> int:
    """How many validation rows an evaluation uses: `max_eval_samples`, in whole forwards over all processes.

    `auto` keeps all evaluations together within `EVALUATION_SHARE` of the run, but uses at least one forward.
    """
    if config.max_eval_samples in ("all", None):
        return num_validation_rows
    num_rows = config.max_eval_samples
    if num_rows == "auto":
        num_evaluations = config.eval_on_start + count_evaluations(config, config.max_steps)
        trained_rows = config.max_steps * config.global_batch_size
        budget = EVALUATION_SHARE * trained_rows / EVALUATED_ROW_COST / num_evaluations
        num_rows = max(1, int(budget) // rows_per_forward) * rows_per_forward
    return min(num_rows, num_validation_rows)


def shorten(config: TrainConfig, max_steps: int) -> TrainConfig:
    """The config of a run of fewer steps; a warm-up that was given in steps keeps its share."""
    warmup = config.warmup_steps
    if 1 <= warmup < config.max_steps:
        warmup = warmup / config.max_steps
    return dataclasses.replace(config, max_steps=max_steps, warmup_steps=warmup, max_minutes=None)


def fit_max_steps(
    config: TrainConfig,
    step: int,
    seconds_left: float,
    step_seconds: float,
    eval_seconds: float,
    final_eval_seconds: float,
) -> int:
    """The step, at most `max_steps` and after `step`, at which a run ends that has so many seconds left.

    step_seconds: of one step. eval_seconds: of an evaluation on the way. final_eval_seconds: of the last one.
    """
    seconds_a_step = step_seconds + count_evaluations(config, config.max_steps) * eval_seconds / config.max_steps
    seconds = max(0.0, seconds_left - CLOSING_SECONDS - final_eval_seconds)
    return min(config.max_steps, step + max(1, int(seconds / seconds_a_step)))


class StepBudget:
    """Chooses the number of steps that fit into `max_minutes`, once, from the time of the first steps."""

    def __init__(
        self, config: TrainConfig, started_at: float, first_step: int, eval_rows: int, final_eval_rows: int
    ) -> None:
        """started_at: of the program, by `time.perf_counter`. eval_rows: in an evaluation, and in the last one."""
        self.config, self.started_at, self.first_step = config, started_at, first_step
        self.eval_rows, self.final_eval_rows = eval_rows, final_eval_rows
        self.timed_from, self.chosen = 0.0, False

    def choose(self, step: int) -> int | None:
        """To be called before each step. step: steps done. Returns the number of steps once, when it is chosen.

        The host waits for the device twice, once before and once after the steps that are timed. All processes get
        the main one's answer.
        """
        num_steps = step - self.first_step
        if self.config.max_minutes is None or self.chosen or num_steps not in (FIRST_TIMED_STEP, LAST_TIMED_STEP):
            return None
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        now = time.perf_counter()
        if num_steps == FIRST_TIMED_STEP:
            self.timed_from = now
            return None
        self.chosen = True
        step_seconds = (now - self.timed_from) / (LAST_TIMED_STEP - FIRST_TIMED_STEP)
        row_seconds = EVALUATED_ROW_COST * step_seconds / self.config.global_batch_size
        seconds_left = self.config.max_minutes * 60 - (now - self.started_at)
        return on_main_process(
            lambda: fit_max_steps(
                self.config,
                step,
                seconds_left,
                step_seconds,
                self.eval_rows * row_seconds,
                self.final_eval_rows * row_seconds,
            )
        )


def keep_chosen_steps(config: TrainConfig, directory: Path) -> TrainConfig:
    """The config with the number of steps that `max_minutes` chose before the checkpoint, if it did."""
    content = read_state(directory)
    if config.max_minutes is None or config.change_schedule:
        return config
    if content.get("steps_chosen"):
        chosen = {key: content["identity"][key] for key in ("max_steps", "warmup_steps")}
        return replace(config, **chosen, max_minutes=None)
    if content["step"] >= LAST_TIMED_STEP:
        raise UserError(
            f"--max_minutes would change the schedule of {directory}, a run of {content['identity']['max_steps']} "
            "steps; leave it out, or add --change_schedule"
        )
    return config
