"""Configure the hardware: what `auto` means on this device, the `Accelerator`, and compilation."""

import dataclasses
import math
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    LoggerType,
    TorchDynamoPlugin,
    set_seed,
)
from torch import nn

from recipe.config import TrainConfig
from recipe.errors import UserError
from recipe.hardware.devices import native_bf16, why_no_inductor
from recipe.hardware.processes import use_all_cores
from recipe.hardware.sharding import Sharding, list_blocks, shard
from recipe.model.loss import LanguageModelingLoss

# FLOPs of a CPU run above which compilation pays. Two cores with avx512_bf16, empty cache: the demo compiles for 26 s
# and its steps become 1.10 times as fast; a 16 M-parameter model with GPT-2's vocabulary becomes 1.22 times as fast in
# 0.4 of the memory and breaks even after 6e13 FLOPs.
COMPILE_PAYS_FLOPS_ON_CPU = 6e13
# FLOPs per second assumed for a run with max_minutes, as an upper bound. The same cores reach 1e11 in the demo and
# 5e11 with 30 M parameters. With 26 s for compiling and 1.10 times the speed, the demo breaks even after five minutes.
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


def build_accelerator(config: TrainConfig, output_dir: Path) -> Accelerator:
    """Build the Accelerator. Raises `UserError` for options that cannot work on this device."""
    state = PartialState()
    check_trackers(config)
    use_all_cores(state)
    # Results repeat bit for bit. On a CPU this is free and matters only to inductor (torch 2.13), whose threads
    # otherwise add up the embeddings' gradient in any order. On CUDA, operators without a deterministic version raise
    # an error, sdpa avoids cuDNN, and cuBLAS reads its setting at the first matrix product.
    is_deterministic = config.deterministic or (state.device.type == "cpu" and "autotune" not in dynamo_mode())
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs time, and nothing here reads such memory
    if state.device.type == "cuda":
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    # Accelerate 1.15 uses the name that torch 2.13 deprecates and does not know its successor `forward_sync_buffers`.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    accelerator = Accelerator(
        mixed_precision=choose_mixed_precision(config, state.device).value,
        dynamo_plugin=TorchDynamoPlugin(backend="no"),  # `parallelize` compiles
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False),
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
            # The cache would keep the cast weights of every block until forward ends, also under checkpointing.
            AutocastKwargs(cache_enabled=False),
        ],
        log_with=config.report_to,
        project_dir=output_dir,
    )
    set_seed(config.seed, deterministic=is_deterministic)
    return accelerator


def check_trackers(config: TrainConfig) -> None:
    """Raise `UserError` for a tracker that is not installed, which Accelerate would ignore silently (1.15)."""
    known = [tracker.value for tracker in LoggerType if tracker != LoggerType.ALL]
    installed = [tracker.value for tracker in get_available_trackers()]
    for tracker in config.report_to or []:
        if tracker not in known:
            raise UserError(f"report_to: unknown tracker '{tracker}'; choose from {', '.join(known)}")
        if tracker not in installed:
            raise UserError(f"{tracker} is not installed; run pip install {tracker}, or drop it from --report_to")


def resolve_hardware(
    config: TrainConfig, device: torch.device, total_flops: float, sharding: Sharding | None = None
) -> tuple[TrainConfig, dict[str, Choice]]:
    """Replace the `auto` of precision, compilation and attention. Returns the config and each choice by its label.

    total_flops: of the run; infinite if only its time is limited.
    """
    choices = {
        "precision": choose_mixed_precision(config, device),
        "dynamo": choose_dynamo_backend(config, device, total_flops),
        "attention": choose_attention(config, device),
    }
    if choices["dynamo"].value == "inductor" and dynamo_mode() != "default":
        choices["mode"] = Choice(dynamo_mode(), "set by the launcher")
    if config.bf16_residual:
        if choices["precision"].value != "bf16":
            found = f"{choices['precision'].value}: {choices['precision'].reason}"
            raise UserError(f"--bf16_residual requires bf16 mixed precision, but this run uses {found}")
        choices["residual"] = Choice("bf16", "requested by --bf16_residual")
    resolved = dataclasses.replace(
        config,
        mixed_precision=choices["precision"].value,
        dynamo_backend=choices["dynamo"].value,
        attn_implementation=choices["attention"].value,
    )
    if sharding is not None:
        choices = {"layout": Choice("FSDP", sharding.describe()), **choices}
        if sharding.activation_checkpointing and config.activation_checkpointing == "auto":
            resolved = dataclasses.replace(resolved, activation_checkpointing="true")
    return resolved, choices


def check_sharded(config: TrainConfig, device: torch.device) -> None:
    """Raise `UserError` for what does not work with shards."""
    if choose_mixed_precision(config, device).value == "fp16":
        raise UserError("FSDP does not work with fp16 and its gradient scaler; use --mixed_precision bf16 or no")
    if config.optim == "adamw_bnb_8bit":
        raise UserError("FSDP does not work with --optim adamw_bnb_8bit; use adamw_torch_fused or muon")
    if config.dynamo_backend in ("auto", "inductor") and dynamo_mode() in CUDA_GRAPH_MODES:
        found = f"FSDP does not work with dynamo_mode {dynamo_mode()}, because gathered parameters move in memory"
        raise UserError(f"{found}; launch with --dynamo_mode default")


def choose_mixed_precision(config: TrainConfig, device: torch.device) -> Choice:
    """Take the option, else the launcher's setting, else the fastest type that the hardware supports natively."""
    launcher = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    native = native_bf16(device)
    if config.mixed_precision != "auto":
        choice = Choice(config.mixed_precision, "requested by --mixed_precision")
    elif launcher != "no":
        choice = Choice(launcher, "set by the launcher")
    elif native is not None:
        choice = Choice("bf16", f"the {'GPU' if device.type == 'cuda' else 'CPU'} has {native}")
    elif device.type == "cuda":
        choice = Choice("fp16", "the GPU has no bf16 matrix units; gradients are scaled")
    else:
        reason = "the CPU has no bf16 units" if device.type == "cpu" else f"not measured on {device.type}"
        choice = Choice("no", reason)
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


def dynamo_mode() -> str:
    """Return the launcher's mode for torch.compile."""
    mode = os.environ.get("ACCELERATE_DYNAMO_MODE", "default").lower()
    if mode not in DYNAMO_MODES:
        raise UserError(f"the launcher's dynamo_mode is '{mode}'; use one of {', '.join(DYNAMO_MODES)}")
    return mode


def choose_attention(config: TrainConfig, device: torch.device) -> Choice:
    """Take the option, else sdpa, except for short rows on a CPU."""
    if config.attn_implementation != "auto":
        return Choice(config.attn_implementation, "requested by --attn_implementation")
    if device.type == "cpu" and config.block_size <= LONGEST_EAGER_ATTENTION_ON_CPU:
        return Choice("eager", f"fastest on a CPU up to {LONGEST_EAGER_ATTENTION_ON_CPU} tokens")
    return Choice("sdpa", "flash kernels, no mask")


def parallelize(
    module: LanguageModelingLoss, config: TrainConfig, accelerator: Accelerator, sharding: Sharding | None
) -> nn.Module:
    """Compile the module in place and let all processes train it: with DistributedDataParallel, or sharded.

    It is compiled first because Accelerate compiles outside DistributedDataParallel, where fullgraph fails (accelerate
    1.15, torch 2.13), and in place because a wrapper would prefix every weight's name. Shapes are fixed, and no graph
    breaks. Only inductor has modes.
    """
    if (backend := config.dynamo_backend) != "no":
        mode = dynamo_mode() if backend == "inductor" else None
        blocks = list_blocks(module) if sharding else ()
        module.compile(blocks, backend=backend, mode=mode, fullgraph=True, dynamic=False)
    if sharding is None:
        return accelerator.prepare(module)
    shard(module, sharding, accelerator.device.type)
    return accelerator.prepare_model(module, evaluation_mode=True)  # autocast, without DistributedDataParallel
