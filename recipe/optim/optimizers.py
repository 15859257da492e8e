"""Build the optimizer."""

import logging

import torch
from torch import nn

from recipe.config import TrainConfig
from recipe.errors import UserError, short_reason
from recipe.optim.muon import Muon, find_matrices


def build_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer of a model. The schedule multiplies each group's own learning rate.

    AdamW decays matrices and embeddings, not biases and LayerNorm (GPT-3, nanoGPT). With Muon, only its matrices decay
    (modded-nanogpt, nanochat); its matrix products have the type of the run's mixed precision. To use an optimizer of
    your own, return it here. Without `fused` in its `defaults`, the host waits for the device once per step.
    """
    matrices = find_matrices(model) if config.optim == "muon" else {}
    parameters = [p for p in model.parameters() if p.requires_grad and p not in matrices]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.0 if matrices else config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    options = {"lr": config.learning_rate, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}
    if config.optim == "muon":
        hidden = {
            "params": list(matrices),
            "matrices": list(matrices.values()),
            "weight_decay": config.weight_decay,
        }
        dtype = torch.bfloat16 if config.mixed_precision == "bf16" else torch.float32
        return Muon([hidden, *groups], **options, dtype=dtype)
    if config.optim == "adamw_bnb_8bit":
        return _build_8bit_adamw(groups, options, model)
    fused = None if config.optim == "adamw_torch" else True  # None: torch decides (foreach on a GPU)
    return torch.optim.AdamW(groups, **options, fused=fused)


def _build_8bit_adamw(groups: list[dict], options: dict, model: nn.Module) -> torch.optim.Optimizer:
    """Build AdamW whose two moments take 8 bits, with an fp32 scale per 256 values (arXiv 2110.02861).

    The moments of embeddings, which the paper finds unstable in 8 bits, and of tensors with fewer than 4,096 values
    stay in fp32, as in Transformers' Trainer.
    """
    from bitsandbytes.optim import AdamW8bit, GlobalOptimManager  # pyright: ignore[reportPrivateImportUsage]  # public

    manager = GlobalOptimManager.get_instance()
    manager.initialize()  # or it confuses new parameters with those of an earlier run in this process (0.50)
    for layer in model.modules():
        if isinstance(layer, nn.Embedding):
            manager.override_config(layer.weight, "optim_bits", 32)
    return AdamW8bit(groups, **options)


def check_optimizer(config: TrainConfig, device: torch.device) -> None:
    """Raise `UserError` if 8-bit AdamW is requested and not installed, or has no kernels for the device (MPS)."""
    if config.optim != "adamw_bnb_8bit":
        return
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # 0.50 warns about a 4-bit kernel on CPUs
    try:
        from bitsandbytes.optim import AdamW8bit  # pyright: ignore[reportPrivateImportUsage]  # public

        weight = nn.Parameter(torch.zeros(4096, device=device))
        weight.grad = torch.zeros_like(weight)
        AdamW8bit([weight]).step()
    except (ImportError, RuntimeError) as error:  # RuntimeError: no kernels for this device or version of CUDA
        raise UserError(
            f"--optim adamw_bnb_8bit does not run on {device.type} ({short_reason(error)}); if bitsandbytes is not "
            'installed, run pip install -e ".[adamw_8bit]", else use adamw_torch_fused'
        ) from error
