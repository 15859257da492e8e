"""The processes of a run: the launcher, the host-side group, and work that only the main process does."""

import contextlib
import ctypes
import functools
import os
import platform
import signal
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recipe.environment import count_cpus, count_local_processes
from recipe.errors import ProcessError, UserError, one_line
from recipe.hardware.launcher import check_launcher, wants_cpu

# NCCL's watchdog kills processes that wait in a device collective for 600 s. On the host they may wait for days of
# tokenization, or for a checkpoint on a slow disk.
HOST_WAIT = timedelta(days=30)
LAUNCHERS = {  # as they appear in a process's command line, and as users type them
    "accelerate": "accelerate",
    "accelerate-launch": "accelerate launch",
    "accelerate.commands.launch": "accelerate launch",
    "accelerate.commands.accelerate_cli": "accelerate",
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
}
LAUNCHER_DIED = signal.SIGUSR2
PR_SET_PDEATHSIG = 1  # linux/prctl.h

T = TypeVar("T")


def start_processes() -> None:
    """Find the device and the other processes. Call it before anything that depends on the rank.

    Raises `UserError` for a launcher's setting that is not supported, and if the launcher started several processes
    but Accelerate sees one (accelerate 1.15, without a GPU): each would train the whole run by itself.
    """
    die_with_the_launcher()
    check_launcher(os.environ)
    state = PartialState(cpu=wants_cpu(os.environ))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if state.num_processes != world_size:
        raise UserError(
            f"the launcher started {world_size} processes but Accelerate sees {state.num_processes}"
            f"{'' if torch.cuda.is_available() else ' (no GPU was found)'}; on a CPU, use "
            "accelerate_configs/multi_cpu.yaml"
        )
    if state.device.type == "cuda":
        check_kernels(state.device)
    host_group()  # now, while a broken network costs nothing yet


@functools.cache
def host_group() -> dist.ProcessGroup | None:
    """Return a gloo group of all processes, for waits that must not block the devices; None for a single process.

    Raises `UserError` if the hosts cannot reach each other, e.g. because a host name resolves to 127.0.0.1.
    """
    if PartialState().num_processes == 1:
        return None
    try:
        return dist.new_group(backend="gloo", timeout=HOST_WAIT)
    except RuntimeError as error:
        raise ProcessError(
            f"the processes cannot reach each other over the network ({one_line(error)}); set "
            "GLOO_SOCKET_IFNAME to the network interface that connects the hosts, e.g. eth0"
        ) from error


def check_kernels(device: torch.device) -> None:
    """Raise `UserError` if this PyTorch build has no kernels for the GPU, such as a V100 since 2.11."""
    try:
        torch.ones(1, device=device)
    except torch.AcceleratorError as error:
        reason = f"PyTorch {torch.__version__} cannot run on {torch.cuda.get_device_name(device)}: {one_line(error)}"
        if "no kernel image" in str(error):
            reason += "; install a build for this GPU from https://pytorch.org/get-started/locally"
        raise ProcessError(reason) from error


def gather(part: object) -> list:
    """Return the parts of all processes, in the order of their ranks. The devices do not wait."""
    if (group := host_group()) is None:
        return [part]
    parts = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, part, group=group)
    return parts


def wait_on_host() -> None:
    """Wait until all processes are here, however long it takes: a device collective may wait for ten minutes only."""
    if (group := host_group()) is not None:
        dist.barrier(group)


def on_main_process(function: Callable[[], T]) -> T:
    """Run `function` on the main process. All processes wait for each other, and for its result or `UserError`."""
    wait_on_host()
    outcome = _attempt(function) if PartialState().is_main_process else (None, None)
    if (group := host_group()) is not None:
        outcomes = [outcome]
        dist.broadcast_object_list(outcomes, src=0, group=group)
        (outcome,) = outcomes
    result, message = outcome
    if message is not None:
        raise UserError(message)
    return result


def largest_of_processes(value: int) -> int:
    """Return the largest value of all processes. Their hosts wait for each other; the devices keep working."""
    if (group := host_group()) is None:
        return value
    number = torch.tensor(value)
    dist.all_reduce(number, dist.ReduceOp.MAX, group=group)
    return int(number)


def complete_synchronization(module: nn.Module) -> None:
    """Take part in the step's reduction of gradients after this process failed somewhere in the step.

    Without it, the others would wait for this process until their timeout. The gradients become meaningless on all
    processes: discard them. module: as prepared by Accelerate. torch 2.13 has no way to abort a reduction, but accepts
    gradients from several backward passes.
    """
    if not isinstance(module, DistributedDataParallel):
        return
    try:
        module.reducer._check_reducer_finalized()
    except RuntimeError:  # some gradients are on their way already
        reduction = contextlib.nullcontext()
    else:
        module.reducer._rebuild_buckets()  # a broadcast in the first forward pass after the first reduction
        reduction = Accelerator.trigger_sync_in_backward(module)
    with reduction:
        for parameter in module.parameters():
            try:
                (0 * parameter.sum()).backward()
            except RuntimeError as error:
                if "ready only once" not in str(error):  # its bucket is complete
                    raise


def on_all_processes(function: Callable[[], T]) -> T:
    """Run `function` on every process. If it raises a `UserError` on one of them, all raise it."""
    result, message = _attempt(function)
    found = gather((message, socket.gethostname()))
    for rank, (message, host) in enumerate(found):
        if message is not None:
            where = f" (on process {rank} on {host}, but not on process 0: do the machines share the folder?)"
            raise UserError(message if rank == 0 else message + where)
    return result


def _attempt(function: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return the function's result, or the message of its error."""
    try:
        return function(), None
    except UserError as error:
        return None, str(error)
    except OSError as error:  # a full disk, a folder without permission
        return None, f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")


def use_all_cores(state: PartialState) -> None:
    """Divide the CPUs between the local processes, unless OMP_NUM_THREADS is set to more than 1.

    `accelerate launch` without a config sets OMP_NUM_THREADS=1 (accelerate 1.15), so a 1 says nothing about the
    user's intention.
    """
    if state.device.type == "cpu" and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(max(1, count_cpus() // count_local_processes(state.num_processes)))


def die_with_the_launcher() -> None:
    """Ask Linux to send `LAUNCHER_DIED` when the launcher ends; `accelerate launch` leaves an orphan (1.15).

    Runs started without a launcher may outlive their shell. Raises `UserError` if the launcher ended during the
    seconds that importing torch takes.
    """
    parent = Path(f"/proc/{os.getppid()}/cmdline")
    if platform.system() == "Linux" and parent.is_file():
        if any(Path(word).name in LAUNCHERS for word in parent.read_text(errors="replace").split("\0")):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, LAUNCHER_DIED)
        elif os.getppid() == 1 and {"ACCELERATE_DYNAMO_BACKEND", "TORCHELASTIC_RUN_ID"} & set(os.environ):
            raise UserError("the launcher ended before the run began")
