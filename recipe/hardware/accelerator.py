"""Configure the hardware: the facts that decide what `auto` means, the `Accelerator`, and compilation."""

import os
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    DynamoBackend,
    GradientAccumulationPlugin,
    LoggerType,
    TorchDynamoPlugin,
    set_seed,
)
from torch import nn
from transformers import PreTrainedConfig

from recipe.config import TrainConfig
from recipe.errors import UserError
from recipe.hardware.choices import REGIONAL, Choice, Machine, settle, to_measure
from recipe.hardware.devices import device_of, has_bf16_units, why_no_inductor
from recipe.hardware.probe import Measured, measure_rates
from recipe.hardware.processes import find_typed_threads, list_thread_counts
from recipe.hardware.sharding import Sharding, list_blocks, shard
from recipe.launcher import TRUE, answer, dynamo_mode
from recipe.model.loss import LanguageModelingLoss


def find_machine(device: torch.device, num_processes: int = 1, **known: Any) -> Machine:
    """Return what this machine and its launcher say about a run. known: what only the run knows."""
    backend = answer("DYNAMO_BACKEND", "no")
    if backend == "inductor" and answer("DYNAMO_USE_REGIONAL_COMPILATION", "false") in TRUE:
        backend = REGIONAL
    return Machine(
        device_type=device.type,
        num_processes=num_processes,
        launcher_precision=answer("MIXED_PRECISION", "no"),
        launcher_backend=backend,
        launcher_mode=dynamo_mode(),
        has_bf16=has_bf16_units(device),
        why_no_inductor=why_no_inductor(device),
        typed_threads=find_typed_threads(),
        thread_counts=list_thread_counts(num_processes),
        **known,
    )


def measure_open(
    config: TrainConfig, machine: Machine, device: torch.device, model_config: PreTrainedConfig
) -> Measured | None:
    """Time what decides the choices that are still open; None if none is. model_config: padded."""
    settled = settle(config, machine)
    precisions = to_measure(settled, machine)
    if not precisions:
        return None
    counts = [int(settled["threads"].value)] if "threads" in settled else machine.thread_counts
    return measure_rates(device, model_config, config.block_size, precisions, counts if device.type == "cpu" else ())


def build_accelerator(config: TrainConfig, output_dir: Path, choices: Mapping[str, Choice]) -> Accelerator:
    """Build the Accelerator. config: with the choices in place of `auto`."""
    device = device_of(PartialState())
    if "threads" in choices:
        torch.set_num_threads(int(choices["threads"].value))
    # Results repeat bit for bit. On a CPU this is free and matters only to inductor (torch 2.13), whose threads
    # otherwise add up the embeddings' gradient in any order. On CUDA, operators without a deterministic version raise
    # an error, sdpa avoids cuDNN, and cuBLAS reads its setting at the first matrix product.
    is_deterministic = config.deterministic or (device.type == "cpu" and "autotune" not in dynamo_mode())
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Filling costs time, and nothing here reads uninitialized memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    if device.type == "cuda":
        torch.set_float32_matmul_precision(config.matmul_precision)
    # Accelerate 1.15 uses the name that torch 2.13 deprecates and does not know its successor `forward_sync_buffers`.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision,
        dynamo_plugin=TorchDynamoPlugin(backend=DynamoBackend.NO),  # the module is compiled before Accelerate wraps it
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False),
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
            # The cache would keep the cast weights of every block until forward ends, also under checkpointing.
            AutocastKwargs(cache_enabled=False),
        ],
        log_with=[*config.report_to] if config.report_to else None,
        project_dir=output_dir,
    )
    set_seed(config.seed, deterministic=is_deterministic)
    return accelerator


def list_trackers() -> list[str]:
    """Return the trackers that are installed."""
    return [tracker.value for tracker in get_available_trackers()]


def check_trackers(config: TrainConfig, installed: Collection[str]) -> None:
    """Raise `UserError` for a tracker that is not installed, which Accelerate would ignore silently (1.15)."""
    known = [tracker.value for tracker in LoggerType if tracker != LoggerType.ALL]
    for tracker in config.report_to or []:
        if tracker not in known:
            raise UserError(f"report_to: unknown tracker '{tracker}'; choose from {', '.join(known)}")
        if tracker not in installed:
            raise UserError(f"{tracker} is not installed; run pip install {tracker}, or drop it from --report_to")


def parallelize(
    module: LanguageModelingLoss, config: TrainConfig, accelerator: Accelerator, sharding: Sharding | None
) -> nn.Module:
    """Compile the module in place and let all processes train it: with DistributedDataParallel, or sharded.

    Compilation comes first, because Accelerate compiles outside DistributedDataParallel, where fullgraph fails
    (accelerate 1.15, torch 2.13). It is in place, because a wrapper would prefix every weight's name. Shapes are
    fixed, and no graph breaks. Only inductor has modes.
    """
    backend = config.dynamo_backend
    if backend != "no":
        blocks = list_blocks(module) if sharding or backend == REGIONAL else ()
        backend = backend.removesuffix("_regional")
        mode = dynamo_mode() if backend == "inductor" else None
        module.compile(blocks, backend=backend, mode=mode, fullgraph=True, dynamic=False)
    if sharding is None:
        return accelerator.prepare(module)
    shard(module, sharding, accelerator.device.type)
    return accelerator.prepare_model(module, evaluation_mode=True)  # autocast, without DistributedDataParallel
