"""The micro-batch (sequences per forward pass): sizes that divide the batch, and trials on the device.

The global batch never changes; gradient accumulation makes up for a smaller micro-batch.
"""

import json
import os

import torch
from accelerate import Accelerator
from accelerate.utils.memory import should_reduce_batch_size
from torch import nn

from recipe.config import TrainConfig
from recipe.environment import cache_dir
from recipe.errors import UserError
from recipe.hardware.choices import CUDA_GRAPH_MODES, choose_dynamo_mode, uses_cuda_graphs
from recipe.hardware.processes import largest_of_processes
from recipe.optim.muon import find_matrices

# More tokens per forward pass should not increase throughput: 64 rows of 1,024 already saturate a GPU. A CPU's caches
# fill earlier, and no out-of-memory error would end a search there.
LARGEST_MICRO_BATCH_TOKENS = {"cpu": 4096, "accelerator": 65536}
ANSWERS = "micro_batch.json"  # in the cache folder


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
            f"use a global batch of {f'{below} or ' if below else ''}{below + num_processes}"
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


def find_micro_batch(accelerator: Accelerator, module: nn.Module, candidates: list[int], config: TrainConfig) -> int:
    """Return the first candidate whose forward, backward and optimizer state fit on all processes.

    candidates: descending, from the planned size. A trial costs a compilation. A single candidate is returned untried,
    and so is the first on a CPU, which swaps instead of raising an error.
    """
    if len(candidates) == 1 or accelerator.device.type == "cpu":
        return candidates[0]
    parameters = list(module.parameters())
    # The optimizer allocates AdamW's two moments, or Muon's one, at the first step: reserve them during the trial.
    is_8bit = config.optim == "adamw_bnb_8bit"
    wide = {m.weight for m in module.modules() if isinstance(m, nn.Embedding)} if is_8bit else set(parameters)
    single = find_matrices(module) if config.optim == "muon" else ()
    moment_types = [(p, p.dtype if p in wide else torch.uint8) for p in parameters]
    moments = [torch.empty_like(p, dtype=dtype) for p, dtype in moment_types for _ in range(1 if p in single else 2)]
    for size in candidates:
        fits = True
        accumulates = size * accelerator.num_processes < config.global_batch_size
        try:
            accumulated = [torch.empty_like(p) for p in parameters] if accumulates else []
            rows = torch.zeros(size, config.block_size + 1, dtype=torch.int64, device=accelerator.device)
            with accelerator.no_sync(module):
                accelerator.backward(module(rows[:, :-1], rows[:, 1:]))
            torch.accelerator.synchronize()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            fits = False
        accumulated = []
        module.zero_grad(set_to_none=True)
        if not largest_of_processes(not fits):
            del moments, accumulated
            free_memory()  # the peak of a trial is not the run's
            return size
        torch.compiler.reset()  # discard the graphs of the shape that did not fit
        free_memory()
    raise UserError(
        "the model does not fit with one sequence per forward pass; try --activation_checkpointing or a smaller recipe"
    )


def recall_micro_batch(key: str) -> int | None:
    """Return the size that fitted in an earlier run with the same key, or None."""
    try:
        size = json.loads((cache_dir() / ANSWERS).read_text())[key]
        return size if isinstance(size, int) and size > 0 else None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):  # missing, unreadable, or not what was written
        return None


def remember_micro_batch(key: str, size: int | None) -> None:
    """Store the size for `recall_micro_batch`, or forget it. A read-only home only costs the next run its trials."""
    try:
        path = cache_dir() / ANSWERS
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            answers = dict(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            answers = {}
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(answers | {key: size}, indent=1) + "\n")
        os.replace(partial, path)
    except (OSError, RuntimeError):
        return


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
            "out of memory with one sequence per forward pass; try --activation_checkpointing or a smaller recipe"
        )
    if len(candidates) == 1:
        size = f"--per_device_train_batch_size {smaller[0]}"
        if choose_dynamo_mode(config).value in CUDA_GRAPH_MODES:
            size = f"--dynamo_mode default {size}"  # a smaller micro-batch accumulates gradients
        raise UserError(
            f"out of memory with micro-batches of {micro_batch_size}; resume with --resume_from_checkpoint auto and "
            f"{size}, or --activation_checkpointing"
        )
    return smaller[0]


def free_memory() -> None:
    """Return the memory that PyTorch keeps for reuse to the device, and forget the peak of what did not fit."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
