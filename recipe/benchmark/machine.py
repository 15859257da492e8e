"""What this machine is and how fast it multiplies matrices: what the rungs of the ladder depend on and compare with.

In: nothing. Out: a `Machine`, found in a process of its own, so that the caller holds no memory of the GPU.
"""

import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

import torch

from recipe.environment import count_cpus, describe_device
from recipe.hardware.devices import has_huge_pages, native_bf16, peak_flops_per_second, why_no_inductor

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
