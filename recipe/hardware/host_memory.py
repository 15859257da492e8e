"""The memory of the process on a CPU: large tensors in huge pages, and freed memory given back when it piles up."""

import ctypes
import os
import platform
from pathlib import Path

_GROWTH, _SLACK_BYTES = 1.25, 256e6  # resident memory may grow by this before freed memory is given back


def use_huge_pages(wanted: bool) -> None:
    """Have torch ask Linux for huge pages for tensors of 2 MB and more. To be called before torch is imported.

    Its CPU allocator reads the variable once, at its first tensor (torch 2.11 to 2.15); a user's own value stays.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", str(int(wanted)))


def resident_bytes() -> int | None:
    """Physical memory that the process holds; None where the system does not tell (not Linux)."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") if statm.is_file() else None


class FreedMemory:
    """Keeps the resident memory of a process flat whose tensors come and go on a CPU.

    Before glibc 2.38, malloc does not reuse a freed, aligned block while small blocks live on both sides of it (glibc
    bug 14581), and torch aligns every tensor. A loop that keeps one small tensor a turn can so lose a large one a
    turn: 600 turns took 4.2 GB, and 0.4 GB with huge pages and this (scripts/benchmarks/cpu_memory.json).
    `malloc_trim` returns the pages of all freed blocks, wherever they lie.
    """

    def __init__(self) -> None:
        self.libc = ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" and resident_bytes() else None
        self.in_use: int | None = None  # after a turn of the loop that follows a return

    def give_back(self) -> bool:
        """To be called once a step: 10 microseconds, but for the rare calls that return memory, which say so."""
        if self.libc is None:
            return False
        if self.in_use is None:  # what a step needs, with what malloc reuses from one to the next
            self.in_use = resident_bytes()
        if resident_bytes() < _GROWTH * self.in_use + _SLACK_BYTES:
            return False
        self.libc.malloc_trim(0)
        self.in_use = None
        return True
