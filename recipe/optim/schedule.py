"""The learning rate of each update, as a multiple of its peak: warm-up(examples) x shape(progress).

The schedules and their names are Transformers'. Progress is the larger of the share of the run's examples and the
share of max_minutes that has passed, so a time-limited run ends with its decay complete. In a run of max_steps the
multiples match Transformers': the first update of a warm-up has a rate of 0. Lengths are in examples, so a run that
continues with another batch follows the same curve.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipe.config import SCHEDULE_OPTIONS, TrainConfig

WSD = "warmup_stable_decay"
DECAY = {"num_decay_steps": 0.2, "decay_type": "linear", "min_lr_ratio": 0.0}  # to zero (modded-nanogpt's records)
MIN_LR_RATE = 0.1  # GPT-3
LONGEST_WARMUP = 0.2  # share of a run that is shorter than its recipe's warm-up, or limited by its time
SCHEDULED = ("global_batch_size", *SCHEDULE_OPTIONS)


@dataclass(frozen=True)
class Schedule:
    """The schedule of a run, from its first step: the options, and what they mean in training examples."""

    global_batch_size: int
    max_steps: int | None
    max_minutes: float | None
    learning_rate: float  # the peak
    lr_scheduler_type: str
    lr_scheduler_kwargs: dict[str, Any] | None
    warmup_steps: float
    num_examples: int | None = None  # of the whole run; None: only its time is limited
    warmup_examples: int | None = None  # None: `warmup_steps` is a share of the progress

    @property
    def decay_share(self) -> float:
        """The share of the run in which `warmup_stable_decay` decays. Below 1, `num_decay_steps` is a share."""
        decay = (DECAY | (self.lr_scheduler_kwargs or {}))["num_decay_steps"]
        if decay >= 1 and self.num_examples is not None:
            decay = min(1.0, decay * self.global_batch_size / self.num_examples)
        return max(1e-9, decay)

    @property
    def num_warmup_steps(self) -> int:
        """The warm-up in steps of the current batch."""
        return round((self.warmup_examples or 0) / self.global_batch_size)

    def is_decaying(self, progress: float) -> bool:
        """Return whether the stable phase of `warmup_stable_decay` is over.

        A run whose length changes at the last checkpoint before the decay is the same as one planned that way.
        """
        return self.lr_scheduler_type == WSD and 1 - progress <= self.decay_share


def plan_schedule(
    config: TrainConfig,
    num_train_rows: int,
    step: int = 0,
    examples: int = 0,
    before: Schedule | None = None,
    progress: float = 0.0,
    first_example: int = 0,
) -> Schedule:
    """Return the schedule of a run that has made `step` steps on `examples` examples so far.

    `num_train_epochs` becomes steps, counted from the first example of the data; a last, partial step counts as one.
    before, progress: the checkpoint's. A finished warm-up is not repeated, although a fraction of a new length may be
    longer. A warm-up in typed steps keeps its number of examples when the batch changes.
    """
    options = {name: getattr(config, name) for name in SCHEDULED}
    if config.num_train_epochs is not None:
        num_examples = config.num_train_epochs * num_train_rows + first_example
        num_examples += step * config.global_batch_size - examples  # made with another batch
        options["max_steps"] = max(1, math.ceil(num_examples / config.global_batch_size))
    schedule = resolve(options, step, examples)
    if before is None or schedule == before:
        return schedule
    if before.warmup_examples is None:  # a share of the progress
        kept = 0
        is_over = progress >= before.warmup_steps
    else:
        kept = before.warmup_examples
        is_over = examples >= before.warmup_examples
    if schedule.warmup_steps < 1 and is_over and schedule.warmup_examples != kept:
        schedule = dataclasses.replace(schedule, warmup_examples=kept)
        return dataclasses.replace(schedule, warmup_steps=schedule.num_warmup_steps)
    if schedule.warmup_steps >= 1 and schedule.warmup_steps == before.warmup_steps:
        return dataclasses.replace(schedule, warmup_examples=kept)
    return schedule


def resolve(options: Mapping[str, Any], step: int, examples: int) -> Schedule:
    """Return the schedule of options whose steps count from the run's first one."""
    schedule = Schedule(**{name: options[name] for name in SCHEDULED})
    batch = schedule.global_batch_size
    warmup = schedule.warmup_steps
    num_examples = None
    if schedule.max_steps is not None:
        num_examples = examples + max(0, schedule.max_steps - step) * batch
    if warmup < 1 and (num_examples is None or schedule.max_minutes is not None):  # a share of what ends first
        return dataclasses.replace(schedule, num_examples=num_examples)
    num_steps = round(warmup if num_examples is None or warmup >= 1 else warmup * (num_examples / batch))
    return dataclasses.replace(schedule, num_examples=num_examples, warmup_examples=num_steps * batch)


def list_changes(before: Schedule, now: Schedule, examples: int) -> dict[str, tuple]:
    """Return the options that differ: {name: (before, now)}. A warm-up that both have finished does not count."""
    changes = {name: (getattr(before, name), getattr(now, name)) for name in SCHEDULED}
    if now.warmup_examples is not None and max(before.warmup_examples or 0, now.warmup_examples) <= examples:
        del changes["warmup_steps"]
    return {name: (old, new) for name, (old, new) in sorted(changes.items()) if old != new}


def describe_jump(before: Schedule, now: Schedule, examples: int, earlier: float, progress: float) -> str | None:
    """Describe how a changed schedule changes the next learning rate, or return None. earlier: the progress before."""
    rates = [
        f"{schedule.learning_rate * learning_rate_scale(schedule, examples, share):.3g}"
        for schedule, share in ((before, earlier), (now, progress))
    ]
    return None if rates[0] == rates[1] else f"the learning rate goes from {rates[0]} to {rates[1]}"


def learning_rate_scale(schedule: Schedule, examples: int, progress: float) -> float:
    """Return the factor on the peak rate of every parameter group for the next update.

    examples: trained on so far. progress: from 0 to 1, of the whole run.
    """
    kind = schedule.lr_scheduler_type
    arguments = schedule.lr_scheduler_kwargs or {}
    if kind == "constant":
        return 1.0
    warmed_up = _warmup_share(schedule, examples, progress)
    if kind == WSD:
        arguments = DECAY | arguments
        left = min(1.0, max(0.0, 1 - progress) / schedule.decay_share)  # of the decay
        shapes = {"linear": left, "cosine": 0.5 * (1 - math.cos(math.pi * left)), "1-sqrt": 1 - math.sqrt(1 - left)}
        lowest = arguments["min_lr_ratio"]
        return lowest + (1 - lowest) * min(warmed_up, shapes[arguments["decay_type"]])
    if warmed_up < 1 or kind == "constant_with_warmup":
        return min(1.0, warmed_up)
    # The warm-up ended at progress / warmed_up. This is the progress since then, from 0 to 1.
    since = progress
    if warmed_up < math.inf:
        since = min(1.0, progress * (warmed_up - 1) / max(1e-12, warmed_up - progress))
    if kind == "linear":
        return 1 - since
    lowest = 0.0 if kind == "cosine" else MIN_LR_RATE
    if "min_lr" in arguments:
        lowest = arguments["min_lr"] / schedule.learning_rate
    lowest = arguments.get("min_lr_rate", lowest)
    return lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * since))


def _warmup_share(schedule: Schedule, examples: int, progress: float) -> float:
    """Return how much of the warm-up is done; it is over from 1 on."""
    num_examples = schedule.warmup_examples
    if num_examples is None:
        return progress / schedule.warmup_steps if schedule.warmup_steps else math.inf
    share = examples / num_examples if num_examples else math.inf
    return share if schedule.max_minutes is None else max(share, progress / LONGEST_WARMUP)
