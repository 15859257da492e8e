"""Estimate the memory of a training step on one device, and choose the options with which it fits.

Everything here is arithmetic on the shape of the model, so that scripts/plan_run.py can plan for devices that are not
there. recipe/hardware/micro_batch.py tries the result on the device.
"""

from dataclasses import dataclass

from transformers import PreTrainedConfig

from recipe.config import TrainConfig


@dataclass(frozen=True)
class Setting:
    """What the memory of a step depends on besides the model, the row length and the options of a `MemoryPlan`."""

    device_type: str  # "cuda", "cpu" or "mps"
    mixed_precision: str  # "no", "bf16" or "fp16"
    compiled: bool  # by inductor
    bf16_residual: bool
    num_processes: int = 1


@dataclass(frozen=True)
class MemoryPlan:
    """The options that decide how much memory a step takes, and its estimate by part, in bytes per device."""

    micro_batch_size: int
    activation_checkpointing: bool
    loss_chunks: int
    optim: str
    parts: dict[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())


def plan_memory(
    config: TrainConfig, model_config: PreTrainedConfig, setting: Setting, usable_bytes: float
) -> MemoryPlan | None:
    """Return the fastest options that fit into `usable_bytes`, by estimate, or None if none do.

    model_config: with the padded vocabulary. Options that are not auto are kept.
    """
    raise NotImplementedError


def estimate_row_bytes(
    config: TrainConfig, model_config: PreTrainedConfig, mixed_precision: str, bf16_residual: bool
) -> int:
    """Estimate the bytes of activations that a compiled model keeps for backward per sequence.

    Each layer keeps LayerNorm's input twice (the residual stream), its two outputs, q, k and v, attention's output,
    and the MLP's values before and after GELU: with bf16 matmuls 2 x 4 + 14 x 2 = 36 bytes times the hidden size. Each
    logit and its gradient take 4 bytes. Without compilation the model keeps more, so this is a lower bound.
    """
    operand = 4 if mixed_precision == "no" else 2
    residual = 2 if bf16_residual else 4
    width, num_layers = model_config.hidden_size, model_config.num_hidden_layers
    inner = model_config.n_inner or 4 * width
    block = width * (2 * residual + 6 * operand) + 2 * inner * operand
    checkpointed = block + num_layers * width * residual  # one block at a time, and the inputs of the others
    blocks = checkpointed if config.activation_checkpointing else block * num_layers
    logits = 2 * operand * model_config.vocab_size // config.loss_chunks
    return config.block_size * (blocks + logits)


def estimate_bytes(num_parameters: int, rows: int, row_bytes: int, accumulates: bool) -> int:
    """Estimate the bytes of a training step: weights, gradients, AdamW's two moments, and activations of `rows`.

    accumulates: earlier micro-batches' gradients are kept while backward computes the next ones.
    """
    return num_parameters * (20 if accumulates else 16) + rows * row_bytes
