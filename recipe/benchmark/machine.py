"""Find out what this machine is and how fast it multiplies matrices.

The ladder's rungs depend on the machine, and their speed is compared with its matrix products.
"""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import torch
from torch.utils.benchmark import Timer

from recipe.environment import count_cpus, describe_device, describe_environment
from recipe.hardware.devices import has_huge_pages, native_bf16, peak_flops_per_second, why_no_inductor

MATMUL_SIZE = {"cuda": 8192, "cpu": 2048}
MATMUL_SECONDS = 1.0  # per type


@dataclass(frozen=True)
class Machine:
    """device: "cuda", "cpu", ...; bf16, tf32: the hardware has such units and does not emulate them."""

    device: str
    name: str
    bf16: bool
    tf32: bool = False
    compiler: bool = True
    huge_pages: bool = True  # Linux provides transparent huge pages on request
    memory_bytes: int | None = None  # of the GPU
    matmul_tflops: dict[str, float] = field(default_factory=dict)
    data_sheet_tflops: float | None = None
    environment: dict[str, Any] = field(default_factory=dict)

    def utilization(self, flops_per_second: float) -> dict[str, float]:
        """Return the share of the fastest measured matrix product and, if known, of the data sheet's rate."""
        found = {"mfu": flops_per_second / max(self.matmul_tflops.values()) / 1e12}
        if self.data_sheet_tflops:
            found["mfu_data_sheet"] = flops_per_second / self.data_sheet_tflops / 1e12
        return found


def find_machine() -> Machine:
    """Describe this machine, from a separate process so that this one holds no GPU memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_find_machine).result()


def current_device() -> torch.device:
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _find_machine() -> Machine:
    device = current_device()
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
        environment=describe_environment(device),
    )


def measure_matmul(device: torch.device, dtype: torch.dtype) -> float:
    """Return the best FLOP/s of square matrix products in a second. Random numbers: zeros are faster on a GPU."""
    size = MATMUL_SIZE.get(device.type, 4096)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    timer = Timer("torch.mm(a, b)", globals={"torch": torch, "a": a, "b": b}, num_threads=torch.get_num_threads())
    return 2 * size**3 / min(timer.blocked_autorange(min_run_time=MATMUL_SECONDS).times)
