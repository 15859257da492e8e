"""Check the machine around the device: cores, memory, disks, and how fast rows can be read."""

import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from recipe.config import TrainConfig
from recipe.data.packed import PackedDataset
from recipe.environment import count_cpus
from recipe.hardware.check import Finding
from recipe.hardware.host_memory import available_bytes, own_cgroups
from recipe.optim.schedule import find_branch_step

CHECKPOINT_BYTES = 12  # per parameter: the weight and AdamW's two moments, in fp32
MODEL_BYTES = 4  # per parameter, of the exported model
TOKEN_BYTES = 2  # in a packed dataset
# The time that a container may use per period, in control groups of version 2 (both numbers in one file) and 1.
CPU_QUOTA_V1 = "/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"
TRIAL_BYTES, TRIAL_SECONDS = 64 * 2**20, 0.5  # a file to read where there is no dataset yet, and how long to read


def check_cpu(num_local_processes: int) -> Finding:
    """Count the cores that the run may use, and the threads that each of its processes starts."""
    allowed, quota = count_cpus(), cpu_quota()
    requested = int(os.environ.get("OMP_NUM_THREADS", "1"))
    threads = requested if requested > 1 else max(1, allowed // num_local_processes)
    found = f"{allowed} of {os.cpu_count()} cores allowed; threads per process: {threads}"
    limit = min(allowed, quota or allowed)
    if threads * num_local_processes > limit:
        remedy = f"set OMP_NUM_THREADS={int(limit // num_local_processes)}; more threads than cores wait"
        if limit < num_local_processes:
            remedy = f"start at most {max(1, int(limit))} with --num_processes"
        share = f"{num_local_processes} x {threads} threads share {limit:g} core{'s' * (limit != 1)}"
        return Finding("warning", f"{found}; {share}", remedy)
    return Finding("ok", found)


def check_memory() -> Finding:
    """Read how much memory the run can get."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    return Finding("ok", f"{available_bytes() / 1e9:.1f} of {total / 1e9:.1f} GB available")


def cpu_quota() -> float | None:
    """Return how many cores' time a container may use, or None without a limit."""
    quotas = []
    for files in (CPU_QUOTA_V1, *([folder / "cpu.max"] for folder in own_cgroups())):
        if all(Path(path).is_file() for path in files):
            quota, period = " ".join(Path(path).read_text() for path in files).split()
            quotas += [] if quota in ("max", "-1") else [int(quota) / int(period)]
    return min(quotas, default=None)


def check_disk(folder: Path, needed_bytes: float, purpose: str, otherwise: str = "error") -> Finding:
    """Compare the free space of the disk that holds a folder, which need not exist yet, with what is written there.

    otherwise: the status if it does not fit.
    """
    free = shutil.disk_usage(_existing(folder)).free
    found = f"{free / 1e9:.1f} GB free for {folder}; {purpose}: {needed_bytes / 1e9:.1f} GB"
    if needed_bytes > free:
        return Finding(
            otherwise, found, "free space, choose another folder, or keep fewer checkpoints with --save_total_limit"
        )
    return Finding("ok", found)


def checkpoint_bytes(config: TrainConfig, num_parameters: int) -> int:
    """Return the largest size of a run's folder. The oldest checkpoint is deleted after the newest is complete."""
    if config.save_steps == 0:
        return MODEL_BYTES * num_parameters
    written = 2 if config.is_open_ended else -(-config.max_steps // config.save_steps)  # at least two
    kept = min(written, (config.save_total_limit or written) + 1) + (find_branch_step(config) is not None)
    return (kept * CHECKPOINT_BYTES + MODEL_BYTES) * num_parameters


def check_read_rate(config: TrainConfig, dataset: PackedDataset | None, tokens_per_second: float | None) -> Finding:
    """Read random rows as training does, from the dataset or a new file, and compare with what the run needs."""
    row_bytes = TOKEN_BYTES * (config.block_size + 1)
    if dataset is not None:
        files = [path for path in dataset.splits["train"].directory.iterdir() if path.is_file()]
        rows_per_second = measure_row_rate(max(files, key=lambda path: path.stat().st_size), row_bytes)
    else:
        with tempfile.NamedTemporaryFile(dir=_existing(Path(config.cache_dir))) as file:
            file.write(os.urandom(TRIAL_BYTES))
            os.fsync(file.fileno())
            rows_per_second = measure_row_rate(Path(file.name), row_bytes)
    found = f"{rows_per_second:,.0f} random rows/s ({rows_per_second * row_bytes / 1e6:,.0f} MB/s)"
    found += "" if dataset is not None else " from a temporary file"
    if tokens_per_second is None:
        return Finding("ok", found)
    needed = tokens_per_second / config.block_size
    found += f"; the run needs {needed:,.3g}"
    if rows_per_second < needed:
        return Finding("warning", found, "pass --data_placement ram, or move the dataset to a local SSD")
    return Finding("ok", found)


def measure_row_rate(path: Path, row_bytes: int) -> float:
    """Return how many rows per second can be read at random positions, after dropping the file from Linux's cache."""
    positions = random.Random(0)
    with open(path, "rb", buffering=0) as file:
        if sys.platform == "linux":
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        last, num_rows, started_at = max(0, path.stat().st_size - row_bytes), 0, time.perf_counter()
        while (seconds := time.perf_counter() - started_at) < TRIAL_SECONDS:
            file.seek(positions.randint(0, last))
            file.read(row_bytes)
            num_rows += 1
    return num_rows / seconds


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
