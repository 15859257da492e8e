"""What `auto` means on this hardware: each choice comes with its reason, which is printed once."""

import math
import os
from dataclasses import dataclass

import torch

from recipe.config import TrainConfig
from recipe.errors import UserError
from recipe.hardware.devices import native_bf16, why_no_inductor

# FLOPs of a CPU run above which compilation pays. Two cores with avx512_bf16, empty cache: the demo compiles for 26 s
# and its steps become 1.10 times as fast; a 16 M-parameter model with GPT-2's vocabulary becomes 1.22 times as fast in
# 0.4 of the memory and breaks even after 6e13 FLOPs.
COMPILE_PAYS_FLOPS_ON_CPU = 6e13
# FLOPs per second that bound those of a run with max_minutes. The same cores reach 1e11 in the demo and 5e11 with
# 30 M parameters. With 26 s for compiling and 1.10 times the speed, the demo breaks even after five minutes.
CPU_FLOPS_PER_SECOND = 2e11
# Row length up to which plain attention beats sdpa's flash kernel on a CPU (30 M parameters, two cores with
# avx512_bf16, bf16). Compiled, it is 1.10, 1.15 and 1.06 times as fast at 256, 512 and 1,024 tokens; not compiled,
# 1.30 times at 512 and 0.65 times at 1,024, where its quadratic memory no longer fits the caches.
LONGEST_EAGER_ATTENTION_ON_CPU = 512
DYNAMO_MODES = ("default", "lite", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


@dataclass(frozen=True)
class Choice:
    """A resolved value and the reason for it."""

    value: str
    reason: str


def choose_mixed_precision(config: TrainConfig, device: torch.device) -> Choice:
    """Take the option, else the launcher's setting, else the fastest type that the hardware supports natively."""
    launcher = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if config.mixed_precision != "auto":
        choice = Choice(config.mixed_precision, "requested by --mixed_precision")
    elif launcher != "no":
        choice = Choice(launcher, "set by the launcher")
    elif device.type == "cuda" and native_bf16(device):
        choice = Choice("bf16", "the GPU has bf16 matrix units")
    elif device.type == "cuda":
        choice = Choice("fp16", "the GPU has no bf16 matrix units; gradients are scaled")
    elif device.type == "cpu":
        native = native_bf16(device)
        choice = Choice("bf16", f"the CPU has {native}") if native else Choice("no", "the CPU has no bf16 units")
    else:
        choice = Choice("no", f"not measured on {device.type}")
    if choice.value not in ("no", "bf16", "fp16"):
        raise UserError(
            f"mixed_precision {choice.value} is not supported: its converters skip GPT-2's Conv1D layers; use bf16, "
            "as accelerate_configs/single_gpu.yaml does"
        )
    if choice.value == "fp16" and device.type != "cuda":
        raise UserError(
            f"fp16 requires a CUDA device, but this run uses {device.type}; use bf16 or no, or "
            "accelerate_configs/cpu.yaml, which lets the script choose"
        )
    return choice


def choose_dynamo_backend(config: TrainConfig, device: torch.device, total_flops: float) -> Choice:
    """Take the option, else the launcher's setting, else inductor where the run is long enough to pay for compiling.

    Raises `UserError` if inductor is requested and cannot compile here, instead of failing within the first step.
    """
    launcher = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    why_not = why_no_inductor(device)
    limit = math.inf if config.max_minutes is None else config.max_minutes * 60 * CPU_FLOPS_PER_SECOND
    if config.dynamo_backend != "auto":
        choice = Choice(config.dynamo_backend, "requested by --dynamo_backend")
    elif launcher != "no":
        if launcher not in ("inductor", "aot_eager", "eager"):
            raise UserError(f"the launcher's dynamo_backend {launcher} does not work here; use inductor or no")
        choice = Choice(launcher, "set by the launcher")
    elif device.type not in ("cuda", "cpu"):
        choice = Choice("no", f"not measured on {device.type}")
    elif device.type == "cpu" and min(total_flops, limit) < COMPILE_PAYS_FLOPS_ON_CPU:
        choice = Choice("no", "this CPU run is too short to pay for compiling")
    elif why_not is not None:
        choice = Choice("no", why_not)
    elif device.type == "cuda":
        choice = Choice("inductor", "the default on CUDA")
    else:
        choice = Choice("inductor", "this run is long enough to pay for compiling")
    if choice.value == "inductor" and why_not is not None:
        raise UserError(f"dynamo_backend inductor ({choice.reason}) cannot compile: {why_not}; use no")
    return choice


def choose_dynamo_mode(config: TrainConfig) -> Choice:
    """Take the option, else the launcher's setting, which is `default` where it is unset."""
    if config.dynamo_mode != "auto":
        return Choice(config.dynamo_mode, "requested by --dynamo_mode")
    launcher = os.environ.get("ACCELERATE_DYNAMO_MODE", "default").lower()
    if launcher not in DYNAMO_MODES:
        raise UserError(f"the launcher's dynamo_mode is '{launcher}'; use one of {', '.join(DYNAMO_MODES)}")
    return Choice(launcher, "set by the launcher")


def uses_cuda_graphs(config: TrainConfig, device: torch.device) -> bool:
    """Return whether inductor records CUDA graphs, which are correct only with one micro-batch per step.

    Every replay of a graph writes gradients to the same memory, so those of earlier micro-batches are lost, with an
    error (pytorch#169545) or without one (pytorch#96693; both issues are open).
    """
    if device.type != "cuda" or choose_dynamo_mode(config).value not in CUDA_GRAPH_MODES:
        return False
    if not torch.cuda.is_available():  # a plan for another machine, which has what inductor requires
        return config.dynamo_backend in ("auto", "inductor")
    return choose_dynamo_backend(config, device, math.inf).value == "inductor"


def choose_attention(config: TrainConfig, device: torch.device) -> Choice:
    """Take the option, else sdpa, except for short rows on a CPU."""
    if config.attn_implementation != "auto":
        return Choice(config.attn_implementation, "requested by --attn_implementation")
    if device.type == "cpu" and config.block_size <= LONGEST_EAGER_ATTENTION_ON_CPU:
        return Choice("eager", f"fastest on a CPU up to {LONGEST_EAGER_ATTENTION_ON_CPU} tokens")
    return Choice("sdpa", "flash kernels, no mask")
