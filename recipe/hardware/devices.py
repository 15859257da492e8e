"""Capabilities of the devices: bf16 units of a GPU, inductor, peak rates, memory in use."""

import importlib.util
import itertools
import os
import re
import shutil
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, cast

import psutil
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from recipe.errors import short_reason
from recipe.hardware.gpus import find_gpu
from recipe.hardware.host_memory import resident_bytes

if TYPE_CHECKING:
    from accelerate import PartialState

FLASH_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # by the names of mixed_precision


def device_of(state: "PartialState") -> torch.device:
    """Return the device of this process; Accelerate's type allows None, too."""
    return cast(torch.device, state.device)


def has_compiler() -> bool:
    """Return whether inductor finds the C++ compiler that it requires on a CPU."""
    return any(shutil.which(compiler) for compiler in (os.environ.get("CXX", "g++"), "g++", "clang++"))


def why_no_inductor(device: torch.device) -> str | None:
    """Return what inductor lacks on this machine, or None if it can compile.

    On CUDA it requires Triton, which builds a C extension against Python's headers at its first kernel (3.6).
    """
    if device.type != "cuda":
        return None if has_compiler() else "inductor requires a C++ compiler, and none was found"
    if importlib.util.find_spec("triton") is None:
        return "inductor requires Triton for CUDA, which is not installed"
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CC", "gcc"), "gcc", "clang")):
        return "Triton requires a C compiler, and neither gcc nor clang was found"
    scheme = sysconfig.get_default_scheme()
    folders = [
        sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"],  # as Triton does
        *(folder for name in ("CPATH", "C_INCLUDE_PATH") for folder in os.environ.get(name, "").split(os.pathsep)),
    ]
    if not any((Path(folder) / "Python.h").is_file() for folder in folders if folder):
        return f"Triton requires Python's headers, but there is no Python.h in {folders[0]} (install python3-dev)"
    return None


def why_no_flash(device: torch.device, precision: str, num_heads: int, head_dim: int, num_tokens: int) -> str | None:
    """Try attention with flash kernels. Returns torch's reason if none runs, else None.

    cuDNN's kernel, which torch prefers on newer GPUs, counts as one, because it does not store the scores either.
    torch gives its reasons as warnings; those against flash kernels follow a heading.
    """
    shape = 1, num_heads, num_tokens, head_dim
    query = torch.empty(shape, dtype=DTYPES[precision], device=device, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught, sdpa_kernel(FLASH_KERNELS):
        warnings.simplefilter("always")
        try:
            F.scaled_dot_product_attention(query, query, query, is_causal=True)
        except RuntimeError as error:
            lines = [str(warning.message).partition(" (Triggered")[0] for warning in caught]
            pairs = itertools.pairwise(lines)
            return next((line for heading, line in pairs if heading.startswith("Flash")), short_reason(error))
    return None


def has_bf16_units(device: torch.device) -> bool:
    """Return whether a CUDA device multiplies bf16 natively. On other devices, this has to be measured."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def rounds_products(device: torch.device) -> bool:
    """Try whether products of fp32 matrices lose digits, as the matmul precision allows. A T4 has no TF32 units."""
    ones = torch.ones(256, 256, device=device)  # 1 + 2**-12 has more digits than TF32 and bf16
    return bool(((ones + 2**-12) @ ones == 256).any())


def peak_flops_per_second(device: torch.device) -> float | None:
    """Return the device's data-sheet rate for MFU, or None if it is unknown."""
    if device.type != "cuda":
        return None
    gpu = find_gpu(torch.cuda.get_device_name(device))
    return gpu and gpu.flops_per_second


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory: of PyTorch's tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.is_file():  # Linux, where ru_maxrss starts from the parent's value
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status.read_text())[0]) * 1024
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource  # Windows has none

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def memory_bytes(device: torch.device) -> int:
    """Return the memory in use now, counted as by `peak_memory_bytes`."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()


def get_rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the state of torch's generators of the CPU and the run's device; a run draws nothing from others.

    In a run on the CPU, asking for a GPU's state would create a CUDA context.
    """
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def set_rng_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type != "cpu" and device.type in state:  # the checkpoint may come from another kind of device
        torch.get_device_module(device).set_rng_state(state[device.type])
