"""Memory of the process on a CPU: what it may use, and freed memory returned to the system."""

import ctypes
import gc
import platform

import psutil

from recipe.environment import read_cgroups

# How far resident memory may grow before freed memory is returned.
_GROWTH = 1.25
_SLACK_BYTES = 256e6


def resident_bytes() -> int:
    """Return the physical memory of the process."""
    return psutil.Process().memory_info().rss


def total_bytes() -> int:
    """Return the physical memory of the machine, or of its container."""
    limits = [*read_cgroups("memory", "memory.max"), *read_cgroups("memory", "memory.limit_in_bytes")]
    return min([psutil.virtual_memory().total, *(int(limit) for limit in limits if limit.isdigit())])  # else "max"


def available_bytes() -> int:
    """Return the physical memory that this process holds or could get without swapping, within its container."""
    return min(psutil.virtual_memory().available + resident_bytes(), total_bytes())


def freeze_garbage() -> None:
    """Exempt all live objects from garbage collection, and turn it off: it stalls steps for up to 0.5 s (nanochat).

    What has accumulated since is collected when a checkpoint is saved.
    """
    gc.collect()
    gc.freeze()
    gc.disable()


class FreedMemory:
    """Keeps the resident memory of a CPU process flat while tensors are allocated and freed.

    Before glibc 2.38, which Debian 12 and Ubuntu 22.04 do not have yet, malloc does not reuse a freed, aligned block
    between two live small blocks (glibc bug 14581). torch aligns every tensor, so a loop that keeps a small tensor per
    iteration can lose a large one each time: on a Skylake Xeon with two cores, a run of 3.3 M parameters grew to 24 GB
    during an evaluation and was killed, in two of eight runs (scripts/benchmarks/LOG.md, 2026-11-21).
    `malloc_trim` returns the pages of all freed blocks.
    """

    def __init__(self) -> None:
        self.libc = ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
        self.in_use: int | None = None  # what a step needs, including what malloc reuses

    def give_back(self) -> bool:
        """Return freed memory if much has accumulated, and say whether it did. Call it once per step."""
        if self.libc is None:
            return False
        if self.in_use is None:
            self.in_use = resident_bytes()
        if resident_bytes() < _GROWTH * self.in_use + _SLACK_BYTES:
            return False
        self.libc.malloc_trim(0)
        self.in_use = None
        return True


class HostMemory:
    """Keeps the steps of a run even, and its memory flat."""

    def __init__(self) -> None:
        self.freed = FreedMemory()
        self.is_first = True

    def after_step(self) -> None:
        if self.is_first:
            self.is_first = False
            freeze_garbage()  # what set-up and compilation have left
        self.freed.give_back()
