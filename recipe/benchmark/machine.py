"""What this machine is and how fast it multiplies matrices: what the rungs of the ladder depend on and compare with.

In: nothing. Out: a `Machine`, found in a process of its own, so that the caller holds no memory of the GPU.
"""

import importlib.util
import os
import re
import shutil
import sysconfig
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import torch

from recipe.environment import count_cpus, describe_device
from recipe.run.meter import peak_flops_per_second

MATMUL_SIZE = {"cuda": 8192, "cpu": 2048}
MATMUL_SECONDS = 1.0  # for each type


@dataclass(frozen=True)
class Machine:
    """device: "cuda", "cpu", ...; bf16, tf32: units of the hardware, not emulated."""

    device: str
    name: str
    bf16: bool
    tf32: bool = False
    compiler: bool = True
    huge_pages: bool = True  # Linux provides them to programs that ask
    memory_bytes: int | None = None  # of the GPU
    matmul_tflops: dict[str, float] = field(default_factory=dict)
    data_sheet_tflops: float | None = None

    @property
    def best_matmul_flops(self) -> float:
        """The rate in FLOP/s that a training step could reach at most."""
        return max(self.matmul_tflops.values()) * 1e12


def find_machine() -> Machine:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_look).result()


def has_compiler() -> bool:
    """Whether inductor finds a C++ compiler, which it needs for a CPU."""
    return any(shutil.which(compiler) for compiler in (os.environ.get("CXX", "g++"), "g++", "clang++"))


def has_huge_pages() -> bool:
    """Whether Linux provides transparent huge pages, to every program or to those that ask, as torch does."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.is_file() and "[never]" not in setting.read_text()


def why_no_inductor(device: torch.device) -> str | None:
    """What inductor lacks on this machine, as a clause, or None if it can compile.

    On CUDA it needs Triton, which builds a C extension against Python's headers when it first runs a kernel (3.6).
    """
    if device.type != "cuda":
        return None if has_compiler() else "inductor needs a C++ compiler, and none was found"
    if importlib.util.find_spec("triton") is None:
        return "inductor needs Triton for CUDA, and it is not installed"
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CC", "gcc"), "gcc", "clang")):
        return "Triton needs a C compiler, and neither gcc nor clang was found"
    scheme = sysconfig.get_default_scheme()
    folders = [
        sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"],  # as Triton does
        *(folder for name in ("CPATH", "C_INCLUDE_PATH") for folder in os.environ.get(name, "").split(os.pathsep)),
    ]
    if not any((Path(folder) / "Python.h").is_file() for folder in folders if folder):
        return f"Triton needs Python's headers, and there is no Python.h in {folders[0]} (install python3-dev)"
    return None


def runs_on(architectures: list[str], capability: tuple[int, int]) -> bool:
    """Whether code built for these architectures runs on a GPU of this compute capability.

    architectures: from `torch.cuda.get_arch_list()`. A binary (sm_80) runs on its own minor version and later ones of
    the same major version, PTX (compute_80) on any later GPU. sm_90a runs on 9.0 alone, sm_100f within its family.
    """
    for architecture in architectures:
        parsed = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
        if parsed is None:  # a notation that is not known here proves nothing
            return True
        kind, major, minor, suffix = parsed.groups()
        built_for = (int(major), int(minor))
        if suffix == "a":
            fits = built_for == capability
        elif kind == "sm" or suffix == "f":
            fits = built_for[0] == capability[0] and built_for <= capability
        else:
            fits = built_for <= capability
        if fits:
            return True
    return False


def native_bf16(device: torch.device) -> str | None:
    """The name of the device's bf16 matrix units, if it has any."""
    if device.type == "cuda":
        return "bf16 matrix units" if torch.cuda.is_bf16_supported(including_emulation=False) else None
    capabilities = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return next((name for name in ("amx_bf16", "avx512_bf16", "sve_bf16") if capabilities.get(name, False)), None)


def _look() -> Machine:
    device = torch.device(torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(count_cpus())
    peak = peak_flops_per_second(device)
    tf32 = device.type == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
    bf16 = native_bf16(device) is not None
    torch.set_float32_matmul_precision("highest")
    rates = {"fp32": measure_matmul(device, torch.float32)}
    if tf32:
        torch.set_float32_matmul_precision("high")
        rates["tf32"] = measure_matmul(device, torch.float32)
    if bf16:
        rates["bf16"] = measure_matmul(device, torch.bfloat16)
    elif device.type == "cuda":
        rates["fp16"] = measure_matmul(device, torch.float16)
    return Machine(
        device=device.type,
        name=describe_device(device),
        bf16=bf16,
        tf32=tf32,
        compiler=why_no_inductor(device) is None,
        huge_pages=has_huge_pages(),
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        matmul_tflops={name: round(rate / 1e12, 3) for name, rate in rates.items()},
        data_sheet_tflops=peak and peak / 1e12,
    )


def measure_matmul(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of square matrix products of random numbers (a GPU is faster with zeros): the best of a second."""
    size = MATMUL_SIZE.get(device.type, 4096)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best, ends_at = 0.0, time.perf_counter() + MATMUL_SECONDS
    while time.perf_counter() < ends_at or not best:
        repeats = 10 if device.type == "cuda" else 1
        started_at = time.perf_counter()
        for _ in range(repeats):
            torch.mm(a, b)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        best = max(best, 2 * size**3 * repeats / (time.perf_counter() - started_at))
    return best
