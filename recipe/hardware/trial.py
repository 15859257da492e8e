"""On a GPU, a trial step confirms that the micro-batch fits, or finds a smaller one."""

import torch
from accelerate import Accelerator
from accelerate.utils.memory import should_reduce_batch_size
from torch import nn

from recipe.config import TrainConfig
from recipe.errors import UserError
from recipe.hardware.choices import Machine
from recipe.hardware.memory import smaller_micro_batches
from recipe.hardware.processes import largest_of_processes
from recipe.hardware.sharding import reset

REMEDY = (
    "try --activation_checkpointing, a smaller micro-batch, --optim adamw_bnb_8bit, several GPUs with "
    "accelerate_configs/fsdp.yaml, or a smaller recipe"
)


def try_micro_batch(
    accelerator: Accelerator,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    size: int,
    config: TrainConfig,
    machine: Machine,
) -> int:
    """Run one trial step, halve the micro-batch until it fits on all processes, and return its size.

    module: prepared, in train mode. Neither weights nor optimizer change; the run seeds its generators later. A CPU
    swaps instead of raising an error, so the estimate is trusted there. With shards, a process that runs out of memory
    makes the others wait, so it raises the error. config: as requested, whose micro-batch may be `auto`.
    """
    if accelerator.device.type == "cpu":
        return size
    share = config.global_batch_size // accelerator.num_processes
    try:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        try:
            for parameter in module.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()  # allocates its state, which a step of the run needs besides the activations
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise UserError("weights and optimizer alone do not fit into the memory; use a smaller recipe") from error
        optimizer.zero_grad()
        while not _fits(accelerator, module, size, share, config.block_size, machine.sharding is None):
            smaller = smaller_micro_batches(config, size, machine)
            if not smaller:
                raise UserError(f"one step does not fit into the memory; {REMEDY}")
            size = smaller[0]
            torch.compiler.reset()  # discard the graphs of the shape that did not fit
    finally:
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"]
        if accelerator.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # the peak of a trial is not the run's
    return size


def _fits(
    accelerator: Accelerator, module: nn.Module, size: int, share: int, block_size: int, can_agree: bool
) -> bool:
    """Return whether forward and backward fit on all processes, twice if a step accumulates.

    can_agree: no process needs another one for its step. If it does, running out of memory raises the error.
    """
    fits = True
    try:
        rows = torch.zeros(size, block_size + 1, dtype=torch.int64, device=accelerator.device)
        for _ in range(min(2, share // size)):
            with accelerator.no_sync(module):
                accelerator.backward(module(rows[:, :-1], rows[:, 1:])["loss"])
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
    except RuntimeError as error:
        if not (can_agree and is_out_of_memory(error)):
            raise
        fits = False
    module.zero_grad(set_to_none=True)
    reset(module)  # FSDP keeps what `no_sync` has not yet averaged between machines, apart from the gradients
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    return not largest_of_processes(not fits)[0]


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a smaller batch may avoid the error. Accelerate 1.15 matches messages, not the type."""
    return isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)
