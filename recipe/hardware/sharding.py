"""Fully sharded data parallelism with torch's FSDP2: each process keeps a part of parameters, gradients and optimizer.

The launcher's answers for FSDP 1 and 2 are followed. Accelerate's own FSDP is not used, because it ignores a CPU,
applies no autocast, and rounds the loss to bf16 (1.15).
"""

import contextlib
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import cast

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from recipe.errors import UserError
from recipe.launcher import count_local_processes, count_processes, is_true

USE_FSDP = "ACCELERATE_USE_FSDP"
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")  # of FSDP 1


@dataclass(frozen=True)
class Sharding:
    """How the state of a run is divided over its processes."""

    num_shards: int
    num_replicas: int = 1  # copies of all shards, one per machine
    reshard_after_forward: bool = True  # else, the gathered parameters of all blocks stay until backward
    activation_checkpointing: bool = False  # where the run's options leave it to `auto`

    def describe(self) -> str:
        where = f"on each of {self.num_replicas} machines" if self.num_replicas > 1 else "over all processes"
        kept = "" if self.reshard_after_forward else "; parameters are gathered once per micro-batch"
        return f"parameters, gradients and optimizer state in {self.num_shards} shards {where}{kept}"


def take_sharding(environment: MutableMapping[str, str]) -> Sharding | None:
    """Return the launcher's answer, and hide it from Accelerate and Transformers, which would act on it as well.

    None: every process keeps everything. Raises `UserError` for an answer that is not supported.
    """
    is_asked = is_true(environment, USE_FSDP)
    environment.pop(USE_FSDP, None)
    if not is_asked:
        return None
    if is_true(environment, "FSDP_OFFLOAD_PARAMS"):
        raise UserError("FSDP with offload to the CPU is not supported; use accelerate_configs/fsdp.yaml")
    strategy = environment.get("FSDP_RESHARD_AFTER_FORWARD", "true").upper()
    if strategy in ("TRUE", "FALSE"):  # FSDP 2's answer, and the launcher's default for FSDP 1
        strategy = "FULL_SHARD" if strategy == "TRUE" else "SHARD_GRAD_OP"
        if environment.get("FSDP_VERSION", "1") == "1":
            strategy = environment.get("FSDP_SHARDING_STRATEGY", strategy).upper()
    if strategy not in STRATEGIES:
        raise UserError(f"fsdp_reshard_after_forward is '{strategy}'; use true, false or {', '.join(STRATEGIES)}")
    num_processes = num_shards = count_processes(environment)
    if strategy.startswith("HYBRID"):
        num_shards = count_local_processes(num_processes, environment)
    if strategy == "NO_SHARD" or num_shards == 1:
        return None
    resharded = strategy in ("FULL_SHARD", "HYBRID_SHARD")
    checkpointing = is_true(environment, "FSDP_ACTIVATION_CHECKPOINTING")
    return Sharding(num_shards, num_processes // num_shards, resharded, checkpointing)


def list_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of a Transformers model of any type."""
    return [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]


def shard(module: nn.Module, sharding: Sharding, device_type: str) -> None:
    """Shard a module in place: each block of its model by itself, and the rest, with the tied embeddings, together.

    The parameters are replaced; on a GPU, the shards are moved there. Every backward averages the gradients over the
    processes of a machine, and each process accumulates its own shard. The average over machines is made outside
    `no_sync`, which Accelerate enters for all micro-batches of a step but the last.
    """
    shape = (sharding.num_replicas, sharding.num_shards)
    names = ("replicas", "shards")
    if sharding.num_replicas == 1:
        shape = (sharding.num_shards,)
        names = ("shards",)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    for block in list_blocks(module):
        fully_shard(block, mesh=mesh, reshard_after_forward=sharding.reshard_after_forward)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    module.sharding = sharding  # pyright: ignore[reportArgumentType]  # torch expects tensors and modules
    if sharding.num_replicas > 1:
        module.no_sync = partial(_keep_on_machine, module)  # pyright: ignore[reportArgumentType]


@contextlib.contextmanager
def _keep_on_machine(module: FSDPModule) -> Iterator[None]:
    module.set_requires_all_reduce(False)
    try:
        yield
    finally:
        module.set_requires_all_reduce(True)


def reset(module: nn.Module) -> None:
    """Make a sharded module usable after an exception in its forward or backward pass, or after a trial."""
    if isinstance(module, FSDPModule):
        module.reset_iter_state()


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Keep whole parameters on each process, so that it can call the module, or a part of it, without the others.

    For evaluation: nothing is trained. All processes enter and leave together. Does nothing without shards.
    """
    groups = [layer for layer in module.modules() if isinstance(layer, FSDPModule)]
    for layer in groups:
        layer.set_reshard_after_forward(False, recurse=False)
        layer.unshard()
    try:
        yield
    finally:
        reset(module)
        for layer in groups:
            layer.reshard()
            resharded = layer is not module and cast(Sharding, module.sharding).reshard_after_forward
            layer.set_reshard_after_forward(resharded, False)
