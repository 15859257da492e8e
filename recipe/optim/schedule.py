"""The learning rate of each update, from the Transformers schedule that the config names."""

import torch
from transformers import get_scheduler

from recipe.config import TrainConfig
from recipe.errors import UserError, short_reason

STABLE_SCHEDULE = "warmup_stable_decay"  # its learning rate between warm-up and decay does not depend on max_steps
DECAY = {"num_decay_steps": 0.2, "decay_type": "linear"}  # to zero (modded-nanogpt's records)
LONGEST_WARMUP = 0.2  # share of the steps that `max_minutes` chooses, for a warm-up given in steps


def compute_learning_rates(config: TrainConfig) -> list[float]:
    """Return the learning rate of each update.

    Raises `UserError` for unknown schedule arguments, and for phases that are longer than the run.
    """
    try:
        scheduler = get_scheduler(
            config.lr_scheduler_type,
            torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate),
            num_warmup_steps=count_warmup_steps(config),
            num_training_steps=config.max_steps,
            scheduler_specific_kwargs=resolve_schedule(config),
        )
        (multiplier,) = scheduler.lr_lambdas
        return [config.learning_rate * float(multiplier(step)) for step in range(config.max_steps)]
    except UserError:
        raise
    except Exception as error:  # each schedule fails in its own way on a bad argument
        arguments = f"{config.lr_scheduler_type} with lr_scheduler_kwargs {config.lr_scheduler_kwargs}"
        raise UserError(f"lr_scheduler_type {arguments}: {short_reason(error)}") from error


def resolve_schedule(config: TrainConfig) -> dict:
    """Return the arguments of the schedule.

    Those of `warmup_stable_decay` default to `DECAY`, because Transformers 5.23 requires num_decay_steps and decays
    along a cosine. `num_decay_steps` below 1 is a share of max_steps, as of `warmup_steps`, and at most what the
    warm-up leaves. Raises `UserError` if a number of decay steps does not fit into the run.
    """
    arguments = dict(config.lr_scheduler_kwargs or {})
    if config.lr_scheduler_type != STABLE_SCHEDULE:
        return arguments
    arguments = DECAY | arguments
    decay, stable = arguments["num_decay_steps"], arguments.get("num_stable_steps")
    if type(decay) not in (int, float) or decay < 0 or (decay > 1 and decay != int(decay)) or decay == 1.0:
        raise UserError(f"num_decay_steps must be a number of steps, or a share of max_steps below 1, got {decay}")
    if stable is not None and (type(stable) is not int or stable < 0):
        raise UserError(f"num_stable_steps must be a number of steps, got {stable}")
    if config.max_minutes is not None and (decay > 1 or stable is not None):
        raise UserError("with max_minutes, num_decay_steps must be a share of max_steps, and num_stable_steps unset")
    warmup, steps = count_warmup_steps(config), config.max_steps
    if 0 < decay < 1:
        decay = min(int(decay * steps), max(0, steps - warmup))
    elif config.num_train_epochs is None and stable is None and decay and warmup + decay > steps:
        raise UserError(
            f"{warmup:,} warm-up steps and {decay:,} decay steps exceed max_steps, {steps:,}; lower warmup_steps, or "
            "pass num_decay_steps below 1, a share of max_steps"
        )
    arguments["num_decay_steps"] = int(decay)
    return arguments


def count_warmup_steps(config: TrainConfig) -> int:
    """Return the number of warm-up steps; `warmup_steps` below 1 is a share of max_steps."""
    return round(config.warmup_steps if config.warmup_steps >= 1 else config.warmup_steps * config.max_steps)


def find_branch_step(config: TrainConfig) -> int | None:
    """Return the number of steps before the decay; None if the schedule has no stable phase.

    From a checkpoint at this step or, after the warm-up, before it, a run of another length continues as if it had
    been planned: the learning rates of the steps that are done do not depend on max_steps.
    """
    if config.lr_scheduler_type != STABLE_SCHEDULE:
        return None
    arguments = resolve_schedule(config)
    if arguments.get("num_stable_steps") is not None:
        return count_warmup_steps(config) + arguments["num_stable_steps"]
    return config.max_steps - arguments["num_decay_steps"]
