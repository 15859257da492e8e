"""Build the optimizer, and compute the learning rate of each step."""

import torch
from torch import nn
from transformers import get_scheduler

from recipe.config import TrainConfig
from recipe.errors import UserError, short_reason


def build_optimizer(config: TrainConfig, module: nn.Module) -> torch.optim.Optimizer:
    """Build AdamW with weight decay on matrices and embeddings, but not on biases and LayerNorm (GPT-3, nanoGPT)."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True if config.optim == "adamw_torch_fused" else None,  # None: torch decides (foreach on a GPU)
    )


def compute_learning_rates(config: TrainConfig) -> list[float]:
    """Return the learning rate of each update, from the Transformers schedule that the config names.

    Raises `UserError` for unknown schedule arguments and for a schedule that needs more than the step number, such as
    reduce_lr_on_plateau.
    """
    try:
        scheduler = get_scheduler(
            config.lr_scheduler_type,
            torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate),
            num_warmup_steps=count_warmup_steps(config),
            num_training_steps=config.max_steps,
            scheduler_specific_kwargs=config.lr_scheduler_kwargs,
        )
        (multiplier,) = scheduler.lr_lambdas
        return [config.learning_rate * float(multiplier(step)) for step in range(config.max_steps)]
    except Exception as error:  # each schedule fails in its own way on a bad argument
        arguments = f"{config.lr_scheduler_type} with lr_scheduler_kwargs {config.lr_scheduler_kwargs}"
        raise UserError(f"lr_scheduler_type {arguments}: {short_reason(error)}") from error


def count_warmup_steps(config: TrainConfig) -> int:
    """Return the number of warm-up steps; `warmup_steps` below 1 is a share of max_steps."""
    return round(config.warmup_steps if config.warmup_steps >= 1 else config.warmup_steps * config.max_steps)
