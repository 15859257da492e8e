"""What `auto` means on this hardware, and why."""

import os
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from recipe.config import TrainConfig
from recipe.errors import UserError
from recipe.hardware.devices import native_bf16, why_no_inductor

# Below this a CPU run ends before compiling has paid. Measured on two cores with avx512_bf16, from an empty cache: the
# demo's graphs take 26 s to compile and its steps are then 1.10 times as fast; a 16 M-parameter model with GPT-2's
# vocabulary (the README's under "Evaluate"), 1.22 times as fast and in 0.4 of the memory, was even after 6e13 FLOPs.
COMPILE_PAYS_FLOPS_ON_CPU = 6e13

# Up to here plain attention beats sdpa's flash kernel on a CPU (30 M parameters, two cores with avx512_bf16, bf16):
# at 256, 512 and 1,024 tokens it is 1.10, 1.15 and 1.06 times as fast compiled; not compiled, 1.30 times at 512 and
# 0.65 times at 1,024, where its memory, which grows with the square of the tokens, no longer fits the caches.
LONGEST_EAGER_ATTENTION_ON_CPU = 512


@dataclass(frozen=True)
class Choice:
    """A value that was resolved, and why."""

    value: str
    reason: str

    @property
    def on(self) -> bool:
        """Of a switch, whose value is "true" or "false"."""
        return self.value == "true"


def choose_mixed_precision(config: TrainConfig, device: torch.device) -> Choice:
    """The script's option, else the launcher's, else the best the hardware really has."""
    launcher = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if config.mixed_precision != "auto":
        choice = Choice(config.mixed_precision, "as asked for by --mixed_precision")
    elif launcher != "no":
        choice = Choice(launcher, "as set by the launcher")
    elif device.type == "cuda":
        if native_bf16(device):
            choice = Choice("bf16", "the GPU has bf16 matrix units")
        else:
            choice = Choice("fp16", "the GPU has no bf16 matrix units; gradients are scaled")
    elif device.type == "cpu":
        native = native_bf16(device)
        choice = Choice("bf16", f"the CPU has {native}") if native else Choice("no", "the CPU has no bf16 units")
    else:
        choice = Choice("no", f"not measured to help on {device.type}")
    if choice.value not in ("no", "bf16", "fp16"):
        raise UserError(
            f"mixed_precision {choice.value} is not supported: its converters skip GPT-2's Conv1D layers; use bf16"
        )
    if choice.value == "fp16" and device.type != "cuda":
        raise UserError(f"fp16 needs a CUDA device, this is {device.type}; use bf16 or no")
    return choice


def choose_dynamo_backend(config: TrainConfig, device: torch.device, total_flops: float) -> Choice:
    """The script's option, else the launcher's, else inductor where compile time is won back within the run.

    Raises `UserError` where inductor is asked for and cannot compile: it would fail in the middle of the first step.
    """
    launcher = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    why_not = why_no_inductor(device)
    if config.dynamo_backend != "auto":
        choice = Choice(config.dynamo_backend.lower(), "as asked for by --dynamo_backend")
    elif launcher != "no":
        if launcher not in ("inductor", "aot_eager", "eager"):
            raise UserError(f"the launcher's dynamo_backend {launcher} is not one that works here; use inductor or no")
        choice = Choice(launcher, "as set by the launcher")
    elif device.type not in ("cuda", "cpu"):
        choice = Choice("no", f"not measured to help on {device.type}")
    elif device.type == "cpu" and total_flops < COMPILE_PAYS_FLOPS_ON_CPU:
        choice = Choice("no", "compiling would take longer than it saves in so short a CPU run")
    elif why_not is not None:
        choice = Choice("no", why_not)
    elif device.type == "cuda":
        choice = Choice("inductor", "pays on every GPU")
    else:
        choice = Choice("inductor", "the run is long enough to win compile time back")
    if choice.value == "inductor" and why_not is not None:
        raise UserError(f"dynamo_backend inductor, {choice.reason}, cannot compile here: {why_not}; use no")
    return choice


def choose_attention(config: TrainConfig, device: torch.device) -> Choice:
    """The script's option, else sdpa, but on a CPU plain matmuls for short rows."""
    if config.attn_implementation != "auto":
        return Choice(config.attn_implementation, "as asked for by --attn_implementation")
    if device.type == "cpu" and config.block_size <= LONGEST_EAGER_ATTENTION_ON_CPU:
        return Choice("eager", f"faster on a CPU up to {LONGEST_EAGER_ATTENTION_ON_CPU} tokens")
    return Choice("sdpa", "flash kernels, no mask")


def choose_residual(config: TrainConfig, device: torch.device, precision: Choice) -> Choice:
    """Whether the residual stream is bf16: the script's option, else on CUDA, if the matmuls are bf16.

    There, every LayerNorm saves and reads half the bytes. Raises `UserError` where it cannot be.
    """
    if config.bf16_residual == "true" and precision.value != "bf16":
        raise UserError(
            f"--bf16_residual needs bf16 mixed precision; here it is {precision.value}: {precision.reason}"
        )
    if config.bf16_residual != "auto":
        return Choice(config.bf16_residual, "as asked for by --bf16_residual")
    if precision.value != "bf16":
        return Choice("false", "needs bf16 mixed precision")
    if device.type != "cuda":
        return Choice("false", f"not the default on {device.type}")
    return Choice("true", "halves the memory traffic of every LayerNorm")


def choose_sigmoid_gelu(
    config: TrainConfig, model_config: PreTrainedConfig, device: torch.device, precision: Choice, dynamo: Choice
) -> Choice:
    """Whether GELU is computed by a sigmoid: the script's option, else where inductor compiles for CUDA.

    There tanh is a call into libdevice with a branch, and a sigmoid is one exponential. Its gradients in fp32 differ
    from tanh's by up to 2.1e-6, so that with fp32 matmuls it is not the default.
    """
    activation = model_config.activation_function
    if config.sigmoid_gelu == "true" and activation != "gelu_new":
        raise UserError(f"--sigmoid_gelu computes activation_function gelu_new, and this model has {activation}")
    if activation != "gelu_new":
        return Choice("false", f"the model has {activation}")
    if config.sigmoid_gelu == "auto" and precision.value == "no":
        return Choice("false", "the most exact gradients with fp32 matmuls")
    return _where_inductor_compiles_for_cuda(config.sigmoid_gelu, "--sigmoid_gelu", device, dynamo)


def choose_index_mask(config: TrainConfig, device: torch.device, dynamo: Choice) -> Choice:
    """Whether the vocabulary's padding is masked by its index: the script's option, else as for GELU.

    Fused there, an index costs nothing and a bias reads 4 bytes for each logit of 2. On a CPU, and where the loss is
    not compiled, the bias is faster: the loss takes 1.2 times as long with an index (avx512_bf16, one core).
    """
    if config.index_mask == "auto" and not config.loss_in_graph:
        return Choice("false", "pays only with the loss in the graph")
    return _where_inductor_compiles_for_cuda(config.index_mask, "--index_mask", device, dynamo)


def _where_inductor_compiles_for_cuda(value: str, option: str, device: torch.device, dynamo: Choice) -> Choice:
    if value != "auto":
        return Choice(value, f"as asked for by {option}")
    if device.type == "cuda" and dynamo.value == "inductor":
        return Choice("true", "inductor compiles for CUDA")
    return Choice("false", "pays only where inductor compiles for CUDA")
