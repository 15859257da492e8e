"""The learning rate of each update, as a multiple of its peak: warm-up(step) x shape(progress).

The schedules are those that Transformers has under the same names. Progress is the larger of step / max_steps and the
share of max_minutes that has passed, so a time-limited run ends with its decay complete. In a run of max_steps the
multiples match Transformers': the first update of a warm-up has a rate of 0.
"""

import math

from recipe.config import TrainConfig

WSD = "warmup_stable_decay"
DECAY = {"num_decay_steps": 0.2, "decay_type": "linear", "min_lr_ratio": 0.0}  # to zero (modded-nanogpt's records)
MIN_LR_RATE = 0.1  # GPT-3
LONGEST_WARMUP = 0.2  # share of a time-limited run: a slow machine may take few steps


def learning_rate_scale(config: TrainConfig, step: int, progress: float) -> float:
    """Return the factor on the peak rate of every parameter group for the next update.

    step: updates so far. progress: from 0 to 1, of the whole run.
    """
    kind, arguments = config.lr_scheduler_type, config.lr_scheduler_kwargs or {}
    if kind == "constant":
        return 1.0
    warmed_up = _warmup_share(config, step, progress)
    if kind == WSD:
        arguments = DECAY | arguments
        left = min(1.0, max(0.0, 1 - progress) / _decay_share(config))  # of the decay
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
        lowest = arguments["min_lr"] / config.learning_rate
    lowest = arguments.get("min_lr_rate", lowest)
    return lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * since))


def _warmup_share(config: TrainConfig, step: int, progress: float) -> float:
    """Return how much of the warm-up is done; it is over from 1 on."""
    if config.max_steps is None and config.warmup_steps < 1:
        return progress / config.warmup_steps if config.warmup_steps else math.inf
    num_steps = count_warmup_steps(config)
    share = step / num_steps if num_steps else math.inf
    return share if config.max_minutes is None else max(share, progress / LONGEST_WARMUP)


def count_warmup_steps(config: TrainConfig) -> int:
    """Return the number of warm-up steps; `warmup_steps` below 1 is a share of max_steps."""
    return round(config.warmup_steps if config.warmup_steps >= 1 else config.warmup_steps * (config.max_steps or 0))


def _decay_share(config: TrainConfig) -> float:
    """Return the share of the run in which `warmup_stable_decay` decays; `num_decay_steps` from 1 on are steps."""
    decay = (DECAY | (config.lr_scheduler_kwargs or {}))["num_decay_steps"]
    return max(1e-9, decay if decay < 1 else min(1.0, decay / config.max_steps))


def is_decaying(config: TrainConfig, progress: float) -> bool:
    """Return whether the stable phase of `warmup_stable_decay` is over.

    From the last checkpoint before, a run of another length continues as if it had been planned that way.
    """
    return config.lr_scheduler_type == WSD and 1 - progress <= _decay_share(config)
