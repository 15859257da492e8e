"""How many sequences go into one forward: what divides, what fits, and what to do when it no longer does.

In: the config, the number of processes and the device. Out: the micro-batch; accumulation makes up the global batch.
"""

import math

import torch
from accelerate import Accelerator
from accelerate.utils.memory import should_reduce_batch_size
from torch import nn
from transformers import PreTrainedConfig

from recipe.config import TrainConfig
from recipe.errors import ProcessError, UserError

# More tokens per forward bring no speed: GPUs are full long before 64 rows of 1024; a CPU's caches fill earlier, and
# no out-of-memory error would stop a search there.
LARGEST_MICRO_BATCH_TOKENS = {"cpu": 4096, "accelerator": 65536}


def micro_batch_candidates(config: TrainConfig, num_processes: int, device: torch.device) -> list[int]:
    """Micro-batch sizes to try, largest first; the first is what runs if memory allows.

    The global batch never changes: a candidate divides the share of one process. Raises `UserError` with the
    sizes that would work where the configured ones do not divide.
    """
    share, rest = divmod(config.global_batch_size, num_processes)
    if rest:
        below = config.global_batch_size - rest
        raise UserError(
            f"global_batch_size {config.global_batch_size} does not divide by {num_processes} processes; "
            f"{f'{below} or ' if below else ''}{below + num_processes} would"
        )
    divisors = [size for size in range(share, 0, -1) if share % size == 0]
    accumulation = config.gradient_accumulation_steps
    if accumulation is not None and share % accumulation:
        raise UserError(
            f"gradient_accumulation_steps {accumulation} does not divide the {share} sequences of a process "
            f"(global_batch_size {config.global_batch_size} / {num_processes}); these would: {_list(divisors)}"
        )
    wanted = config.per_device_train_batch_size
    if accumulation is not None:
        if wanted not in ("auto", None, share // accumulation):
            raise UserError(
                f"{num_processes} processes x per_device_train_batch_size {wanted} x gradient_accumulation_steps "
                f"{accumulation} is not global_batch_size {config.global_batch_size}; leave one of them out"
            )
        return [share // accumulation]
    if wanted not in ("auto", None):
        if wanted not in divisors:
            raise UserError(
                f"per_device_train_batch_size {wanted} does not divide the {share} sequences of a process "
                f"(global_batch_size {config.global_batch_size} / {num_processes}); these would: {_list(divisors)}"
            )
        return [wanted]
    limit = LARGEST_MICRO_BATCH_TOKENS["cpu" if device.type == "cpu" else "accelerator"]
    return [size for size in divisors if size * config.block_size <= limit] or [1]


def estimate_row_bytes(
    config: TrainConfig, model_config: PreTrainedConfig, mixed_precision: str, bf16_residual: bool
) -> int:
    """Bytes of activations that one sequence leaves for backward when the model is compiled.

    Each layer keeps LayerNorm's input twice (the residual stream), its two outputs, q, k and v, attention's output,
    and the MLP's values before and after GELU: with bf16 matmuls 2 x 4 + 14 x 2 = 36 bytes times n_embd. Each logit
    and its gradient take 4. A run that is not compiled keeps more, so this is a lower bound.
    """
    operand = 4 if mixed_precision == "no" else 2
    residual = 2 if bf16_residual else 4
    inner = model_config.n_inner or 4 * model_config.n_embd
    block = model_config.n_embd * (2 * residual + 6 * operand) + 2 * inner * operand
    if config.activation_checkpointing:  # one block at a time, and what went into the others
        blocks = block + model_config.n_layer * model_config.n_embd * residual
    else:
        blocks = block * model_config.n_layer
    logits = 2 * operand * model_config.vocab_size // config.loss_chunks
    return config.block_size * (blocks + logits)


def estimate_bytes(num_parameters: int, rows: int, row_bytes: int, accumulates: bool) -> int:
    """Bytes of training on `rows` sequences a forward: weights, gradients and AdamW's two moments, and activations.

    accumulates: gradients of earlier micro-batches are held while backward makes those of the next.
    """
    return num_parameters * (20 if accumulates else 16) + rows * row_bytes


def find_micro_batch(
    accelerator: Accelerator, module: nn.Module, candidates: list[int], config: TrainConfig, row_bytes: int
) -> int:
    """The largest candidate whose forward, backward and optimizer state fit, agreed on by all processes.

    row_bytes: from `estimate_row_bytes`. A size whose estimate exceeds the free memory is not tried, since a trial
    costs a compilation, unless it is the smallest. Nothing is tried where nothing can be learned: a single candidate,
    or a CPU, which swaps instead of raising.
    """
    if len(candidates) == 1 or accelerator.device.type == "cpu":
        return candidates[0]
    parameters = list(module.parameters())
    num_parameters = sum(p.numel() for p in parameters)
    usable = _usable_bytes(accelerator.device, config.gpu_memory_limit_gb)
    # AdamW's two moments exist only after the first step: hold their room during the trial.
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
                if not should_reduce_batch_size(error):
                    raise
                fits.zero_()
        accumulated = []
        module.zero_grad(set_to_none=True)
        if accelerator.reduce(fits, reduction="sum").item() == accelerator.num_processes:
            del moments, accumulated
            if accelerator.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()  # which is to be the run's, not that of what did not fit
            return size
        torch.compiler.reset()  # forget the graphs of the shape that did not fit
        torch.accelerator.empty_cache()
    raise UserError(
        "the model does not fit with one sequence per forward; try --activation_checkpointing "
        "--loss_chunks 8, or a smaller recipe"
    )


def _usable_bytes(device: torch.device, limit_gb: float | None) -> float:
    """What this process may use of the device's memory: what is free, and what it holds already."""
    if device.type != "cuda":
        return math.inf
    usable = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return usable if limit_gb is None else min(usable, limit_gb * 1e9)


def smaller_micro_batch(
    error: RuntimeError, config: TrainConfig, candidates: list[int], micro_batch_size: int, num_processes: int
) -> int:
    """The next smaller micro-batch after an out-of-memory error; the global batch, and so the run, stays the same.

    Raises what is no out-of-memory error again, and `UserError` with the numbers to pass where nothing can be changed:
    by a user's choice of the micro-batch (no other candidate), or because other processes are in the same step.
    """
    if not (isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)):
        raise error
    share = config.global_batch_size // num_processes
    smaller = [size for size in range(micro_batch_size - 1, 0, -1) if share % size == 0]
    if not smaller:
        raise ProcessError(
            "out of memory with one sequence per forward; try --activation_checkpointing --loss_chunks 8, or a "
            "smaller recipe"
        ) from error
    if len(candidates) == 1 or num_processes > 1:
        raise ProcessError(
            f"out of memory with micro-batches of {micro_batch_size}; go on with --resume_from_checkpoint auto "
            f"--per_device_train_batch_size {smaller[0]}, or --loss_chunks 8, or --activation_checkpointing"
        ) from error
    torch.compiler.reset()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    return smaller[0]


def _list(sizes: list[int]) -> str:
    return ", ".join(map(str, sorted(sizes)))
