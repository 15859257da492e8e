"""The micro-batch (sequences per forward pass): sizes that divide the batch, and trials on the device.

The global batch never changes; gradient accumulation makes up for a smaller micro-batch.
"""

import math

import torch
from accelerate import Accelerator
from accelerate.utils.memory import should_reduce_batch_size
from torch import nn

from recipe.config import TrainConfig
from recipe.errors import UserError
from recipe.hardware.choices import CUDA_GRAPH_MODES, choose_dynamo_mode, uses_cuda_graphs
from recipe.hardware.memory import estimate_bytes

# More tokens per forward pass should not increase throughput: 64 rows of 1,024 already saturate a GPU. A CPU's caches
# fill earlier, and no out-of-memory error would end a search there.
LARGEST_MICRO_BATCH_TOKENS = {"cpu": 4096, "accelerator": 65536}


def micro_batch_candidates(config: TrainConfig, num_processes: int, device: torch.device) -> list[int]:
    """Return the micro-batch sizes to try, largest first. Each divides the sequences of one process.

    Raises `UserError`, naming the sizes that would work, if the configured sizes do not divide the batch, or if CUDA
    graphs would accumulate gradients.
    """
    share, rest = divmod(config.global_batch_size, num_processes)
    if rest:
        below = config.global_batch_size - rest
        raise UserError(
            f"global_batch_size {config.global_batch_size} is not divisible by {num_processes} processes; "
            f"use {f'{below} or ' if below else ''}{below + num_processes}"
        )
    divisors = [size for size in range(share, 0, -1) if share % size == 0]
    accumulation, wanted = config.gradient_accumulation_steps, config.per_device_train_batch_size
    for name, value in (("gradient_accumulation_steps", accumulation), ("per_device_train_batch_size", wanted)):
        if isinstance(value, int) and value not in divisors:
            raise UserError(
                f"{name} {value} does not divide the {share} sequences of each process (global_batch_size "
                f"{config.global_batch_size} / {num_processes}); use one of {', '.join(map(str, sorted(divisors)))}"
            )
    if accumulation is not None:
        if wanted not in ("auto", None, share // accumulation):
            raise UserError(
                f"{num_processes} processes x per_device_train_batch_size {wanted} x gradient_accumulation_steps "
                f"{accumulation} is not global_batch_size {config.global_batch_size}; remove one of them"
            )
        wanted = share // accumulation
    limit = LARGEST_MICRO_BATCH_TOKENS["cpu" if device.type == "cpu" else "accelerator"]
    sizes = [size for size in divisors if size * config.block_size <= limit] or [1]
    if wanted not in ("auto", None):
        sizes = [wanted]
    if not uses_cuda_graphs(config, device):
        return sizes
    if sizes[0] != share:
        raise UserError(
            f"dynamo_mode {choose_dynamo_mode(config).value} uses CUDA graphs, which accumulate gradients incorrectly "
            f"(pytorch#96693): a step must be one micro-batch of {share} sequences per process, not of {sizes[0]}; "
            f"use --dynamo_mode max-autotune-no-cudagraphs or default, or, if they fit, "
            f"--per_device_train_batch_size {share}"
        )
    return [share]


def find_micro_batch(
    accelerator: Accelerator, module: nn.Module, candidates: list[int], config: TrainConfig, row_bytes: int
) -> int:
    """Return the largest candidate whose forward, backward and optimizer state fit on all processes.

    row_bytes: from `estimate_row_bytes`. A trial costs a compilation, so a size whose estimate exceeds the free memory
    is skipped unless it is the smallest. A single candidate is returned untried, and so is the largest on a CPU, which
    swaps instead of raising an error.
    """
    if len(candidates) == 1 or accelerator.device.type == "cpu":
        return candidates[0]
    parameters = list(module.parameters())
    num_parameters = sum(p.numel() for p in parameters)
    usable = _usable_bytes(accelerator.device, config.gpu_memory_limit_gb)
    # AdamW allocates its two moments at the first step: reserve their memory during the trial.
    moments = [torch.empty_like(p) for p in parameters for _ in range(2)]
    for size in candidates:
        fits = torch.ones((), device=accelerator.device)
        accumulates = size * accelerator.num_processes < config.global_batch_size
        if size != candidates[-1] and estimate_bytes(num_parameters, size, row_bytes, accumulates) > usable:
            fits.zero_()
        else:
            try:
                accumulated = [torch.empty_like(p) for p in parameters] if accumulates else []
                rows = torch.zeros(size, config.block_size + 1, dtype=torch.int64, device=accelerator.device)
                with accelerator.no_sync(module):
                    accelerator.backward(module(rows[:, :-1], rows[:, 1:]))
                torch.accelerator.synchronize()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                fits.zero_()
        accumulated = []
        module.zero_grad(set_to_none=True)
        if accelerator.reduce(fits, reduction="sum").item() == accelerator.num_processes:
            del moments, accumulated
            if accelerator.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()  # the peak of a failed trial is not the run's
            return size
        torch.compiler.reset()  # discard the graphs of the shape that did not fit
        torch.accelerator.empty_cache()
    raise UserError(
        "the model does not fit with one sequence per forward pass; try --activation_checkpointing --loss_chunks 8, "
        "or a smaller recipe"
    )


def _usable_bytes(device: torch.device, limit_gb: float | None) -> float:
    """Return the device memory that this process may use: free memory and what it already holds."""
    if device.type != "cuda":
        return math.inf
    usable = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return usable if limit_gb is None else min(usable, limit_gb * 1e9)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a smaller batch may avoid the error. Accelerate 1.15 matches messages, not the type."""
    return isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)


def smaller_micro_batch(config: TrainConfig, candidates: list[int], micro_batch_size: int, num_processes: int) -> int:
    """Return the next smaller micro-batch, for a step that ran out of memory.

    Raises `UserError` with the options to pass if there is none, or if the size is fixed (a single candidate).
    """
    share = config.global_batch_size // num_processes
    smaller = [size for size in range(micro_batch_size - 1, 0, -1) if share % size == 0]
    if not smaller:
        raise UserError(
            "out of memory with one sequence per forward pass; try --activation_checkpointing --loss_chunks 8, or a "
            "smaller recipe"
        )
    if len(candidates) == 1:
        size = f"--per_device_train_batch_size {smaller[0]}"
        if choose_dynamo_mode(config).value in CUDA_GRAPH_MODES:
            size = f"--dynamo_mode default {size}"  # a smaller micro-batch accumulates gradients
        raise UserError(
            f"out of memory with micro-batches of {micro_batch_size}; resume with --resume_from_checkpoint auto and "
            f"{size}, --loss_chunks 8 or --activation_checkpointing"
        )
    return smaller[0]


def free_memory() -> None:
    """Return the memory that PyTorch keeps for reuse to the device."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
