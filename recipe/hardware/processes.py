"""The processes of a run: the launcher, the host-side groups, and work that only the main process does.

Hosts wait for each other in gloo groups of their own, because NCCL's watchdog ends processes that wait long in a
device's collective.
"""

import ctypes
import functools
import os
import platform
import signal
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType, is_torch_xla_available

from recipe.environment import count_cores, count_cpus
from recipe.errors import UserError, one_line
from recipe.hardware.devices import device_of
from recipe.hardware.sharding import Sharding, take_sharding
from recipe.launcher import (
    LAUNCHED,
    asks_for_cpu,
    count_local_processes,
    drop_unset,
    is_true,
    why_alone,
    why_incomplete,
)

# A step's collectives, on devices and hosts: a process that hangs or vanishes ends the others after this long.
STEP_WAIT = timedelta(minutes=10)
PREPARATION_WAIT = timedelta(days=30)  # tokenizing a corpus or downloading a model
LAUNCHERS = ("accelerate", "accelerate-launch", "accelerate.commands.launch", "accelerate.commands.accelerate_cli")
LAUNCHERS += ("torchrun", "torch.distributed.run", "torch.distributed.launch")  # words of a command line
LAUNCHER_DIED = getattr(signal, "SIGUSR2", None)  # Windows has none
PR_SET_PDEATHSIG = 1  # linux/prctl.h

OTHERS = "use accelerate_configs/multi_gpu.yaml, or fsdp.yaml for a model that one GPU cannot hold"

T = TypeVar("T")


def start_processes() -> Sharding | None:
    """Find the device and the other processes. Call it before anything that depends on the rank.

    Returns how the processes divide the state of the run; None if each holds all of it. Raises `UserError` for a
    launcher's answer that is not supported, for incomplete launcher variables, and if there are several processes but
    Accelerate sees one (1.15, without a GPU), because each would train the whole run by itself.
    """
    die_with_the_launcher()
    drop_unset(os.environ)
    if reason := why_incomplete(os.environ):
        raise UserError(reason)
    if is_torch_xla_available():
        raise UserError("TPUs are not supported; run pip uninstall torch_xla, and use a file in accelerate_configs/")
    for name in ("DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"):  # on a CPU, Accelerate ignores some
        if is_true(os.environ, f"ACCELERATE_USE_{name}"):
            raise UserError(f"{name} is not supported; {OTHERS}")
    sharding = take_sharding(os.environ)
    state = PartialState(cpu=asks_for_cpu(os.environ), timeout=STEP_WAIT)
    known = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
    if state.distributed_type not in known:
        raise UserError(f"{state.distributed_type.value} is not supported; {OTHERS}")
    if reason := why_alone(os.environ, state.num_processes, torch.cuda.is_available()):
        raise UserError(reason)
    host_group()  # now, while a broken network costs nothing yet
    return sharding


@functools.cache
def host_group(wait: timedelta = STEP_WAIT) -> dist.ProcessGroup | None:
    """Return a gloo group of all processes; None for a single process.

    Raises `UserError` if the hosts cannot reach each other, e.g. because a host name resolves to 127.0.0.1.
    """
    if PartialState().num_processes == 1:
        return None
    try:
        group = dist.new_group(backend="gloo", timeout=wait)
        return group if isinstance(group, dist.ProcessGroup) else None
    except RuntimeError as error:
        raise UserError(
            f"the processes cannot reach each other over the network ({one_line(error)}); set "
            "GLOO_SOCKET_IFNAME to the network interface that connects the hosts, e.g. eth0"
        ) from error


def gather(part: object) -> list:
    """Return the parts of all processes, in the order of their ranks. The devices do not wait."""
    group = host_group()
    if group is None:
        return [part]
    parts = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, part, group=group)
    return parts


def wait_on_host() -> None:
    """Wait until all processes are here, however long it takes."""
    if (group := host_group(PREPARATION_WAIT)) is not None:
        dist.barrier(group)


def on_main_process(function: Callable[[], T]) -> T:
    """Run `function` on the main process. All wait for its result or `UserError`, however long it takes."""
    wait_on_host()
    outcomes: list[Any] = [_attempt(function) if PartialState().is_main_process else None]
    if (group := host_group(PREPARATION_WAIT)) is not None:
        dist.broadcast_object_list(outcomes, src=0, group=group)
    result, message = outcomes[0]
    if message is not None:
        raise UserError(message)
    return result


def on_all_processes(function: Callable[[], T]) -> T:
    """Run `function` on every process. If it raises a `UserError` on one of them, all raise it."""
    result, error = _attempt(function)
    for rank, (message, host) in enumerate(gather((error, socket.gethostname()))):
        if message is not None:
            where = f" (on process {rank} on {host}, but not on process 0: do the machines share the folder?)"
            raise UserError(message if rank == 0 else message + where)
    return result


def check_same_run(identity: dict) -> None:
    """Raise `UserError` if the processes were started with different options or data, which `identity` holds."""
    main, *others = gather(identity)
    for rank, other in enumerate(others, start=1):
        different = [key for key in main if other.get(key) != main[key]]
        if different:
            listed = "; ".join(f"{key} {main[key]!r} and {other.get(key)!r}" for key in different)
            remedy = "run the same command on the same data on each machine"
            raise UserError(f"process 0 and process {rank} differ in {listed}; {remedy}")


def largest_of_processes(*values: float) -> list[float]:
    """Return the largest of each value over all processes. Their hosts wait for each other; the devices do not."""
    numbers = torch.tensor(values, dtype=torch.float64)
    if (group := host_group()) is not None:
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
    return numbers.tolist()


def _attempt(function: Callable[[], object]) -> tuple[Any, str | None]:
    """Return the function's result, or the message of its error."""
    try:
        return function(), None
    except UserError as error:
        return None, str(error)
    except OSError as error:  # a full disk, a folder without permission
        return None, f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")


def list_thread_counts(num_processes: int) -> tuple[int, ...]:
    """Return how many threads a process may use on a CPU: one per core and, with hyper-threads, one per CPU."""
    local = count_local_processes(num_processes)
    return tuple(sorted({max(1, count // local) for count in (count_cores(), count_cpus())}))


def use_all_cores(state: PartialState) -> None:
    """Divide the CPUs between the local processes, unless the user has set OMP_NUM_THREADS."""
    if device_of(state).type == "cpu":
        torch.set_num_threads(find_typed_threads() or list_thread_counts(state.num_processes)[-1])


def find_typed_threads(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the user's OMP_NUM_THREADS, or None.

    Launchers set it to 1 themselves (accelerate 1.15, torch 2.13), so a launched process ignores a 1.
    """
    text = environment.get("OMP_NUM_THREADS", "").split(",")[0]  # OpenMP also takes a list, one per nested level
    by_launcher = text == "1" and LAUNCHED & set(environment)
    return int(text) if text.isdigit() and int(text) > 0 and not by_launcher else None


def is_launcher(pid: int) -> bool:
    """Return whether a process is a launcher, on Linux."""
    path = Path(f"/proc/{pid}/cmdline")
    words = path.read_text(errors="replace").split("\0") if path.is_file() else []
    return any(Path(word).name in LAUNCHERS for word in words)


def die_with_the_launcher() -> None:
    """Ask Linux to send `LAUNCHER_DIED` when the launcher ends.

    Without that, `accelerate launch` (1.15) leaves an orphan, which keeps the GPU (accelerate#929). Runs started
    without a launcher may outlive their shell. Raises `UserError` if the launcher ended during the seconds that
    importing torch takes.
    """
    if platform.system() == "Linux" and Path("/proc/self/cmdline").is_file():
        if is_launcher(os.getppid()):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, LAUNCHER_DIED)
        elif os.getppid() == 1 and LAUNCHED & set(os.environ):
            raise UserError("the launcher ended before the run began")
