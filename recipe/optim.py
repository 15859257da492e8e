"""Optimizer and learning-rate schedule."""

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from recipe.config import TrainConfig, UserError


def build_optimizer(config: TrainConfig, module: nn.Module) -> torch.optim.Optimizer:
    """AdamW, fused or not; weight decay on matrices and embeddings, none on biases and LayerNorm (GPT-3, nanoGPT)."""
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
        fused=config.optim == "adamw_torch_fused",
    )


def build_scheduler(config: TrainConfig, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Transformers' schedule of that name; step it once per optimizer step and do not prepare it.

    (A prepared scheduler steps once per process: accelerate 1.15.)
    """
    return get_scheduler(
        config.lr_scheduler_type,
        optimizer,
        num_warmup_steps=count_warmup_steps(config),
        num_training_steps=config.max_steps,
        scheduler_specific_kwargs=config.lr_scheduler_kwargs,
    )


def count_warmup_steps(config: TrainConfig) -> int:
    """`warmup_steps`, which below 1 is a share of max_steps."""
    return round(config.warmup_steps if config.warmup_steps >= 1 else config.warmup_steps * config.max_steps)


def check_schedule(config: TrainConfig) -> None:
    """Try the schedule before there is a model. Raises `UserError` for one that does not go by steps alone, such as
    reduce_lr_on_plateau, and for arguments it does not know.
    """
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate)
    try:
        scheduler = build_scheduler(config, optimizer)
        optimizer.step()
        scheduler.step()
        for multiplier in getattr(scheduler, "lr_lambdas", []):
            for share in (0.0, 0.1, 0.5, 0.9, 1.0):
                float(multiplier(round(share * config.max_steps)))
    except Exception as error:  # each schedule has its own way to stumble over an argument
        raise UserError(
            f"lr_scheduler_type {config.lr_scheduler_type} with lr_scheduler_kwargs {config.lr_scheduler_kwargs}: "
            f"{' '.join(str(error).split())}"
        ) from error
