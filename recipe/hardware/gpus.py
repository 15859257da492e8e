"""GPUs and their data sheets: what a run can be planned with before the machine is there."""

import re
from dataclasses import dataclass

from recipe.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Gpu:
    """One row of `GPUS`. tflops: the data sheet's peak."""

    name: str  # as typed: --gpu a100-80gb
    pattern: str  # finds it in torch.cuda.get_device_name()
    memory_gib: float
    tflops: float
    bf16: bool = True

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)

    @property
    def flops_per_second(self) -> float:
        return self.tflops * 1e12


# The first match counts, so longer names come first. Sources of the columns:
# GiB: what torch reports as the total capacity in out-of-memory errors, with ECC where the card has it.
# TFLOP/s: dense bf16 (fp16 on V100 and T4) with fp32 accumulation, from NVIDIA's data sheets and, for GeForce, its
#   architecture white papers; most quote twice as much, with sparsity.
GPUS = (
    # name, pattern, GiB, TFLOP/s
    Gpu("gb300", "GB300", 276.5, 2500),
    Gpu("gb200", "GB200", 184.3, 2500),
    Gpu("b300", "B300", 267.7, 2250),
    Gpu("b200", "B200", 178.4, 2250),
    Gpu("h200-nvl", "H200 NVL", 139.8, 835),
    Gpu("gh200", "GH200", 94.5, 989),
    Gpu("h200", "H200", 139.8, 989),
    Gpu("h100-pcie", "H100 PCIe", 79.2, 756),
    Gpu("h100-nvl", "H100 NVL", 93.1, 835),
    Gpu("h100", "H100", 79.2, 989),
    Gpu("h800-pcie", "H800 PCIe", 79.2, 756),
    Gpu("h800", "H800", 79.2, 989),
    Gpu("h20", "H20", 95.0, 148),
    Gpu("a100-80gb-pcie", "A100 80GB PCIe", 79.2, 312),
    Gpu("a100-40gb-pcie", "A100-PCIE-40GB", 39.4, 312),
    Gpu("a100-80gb", "A100.*80GB", 79.2, 312),
    Gpu("a100-40gb", "A100", 39.4, 312),
    Gpu("a800-40gb", "A800 40GB", 39.4, 312),
    Gpu("a800", "A800", 79.2, 312),
    Gpu("a40", "A40", 44.4, 150),
    Gpu("a30", "A30", 23.5, 165),
    Gpu("l40s", "L40S", 44.4, 362),
    Gpu("l40", "L40", 44.4, 181),
    Gpu("l4", "L4", 22.0, 121),
    Gpu("a10g", "A10G", 22.0, 70),
    Gpu("a10", "A10", 22.0, 125),
    Gpu("rtx6000ada", "RTX 6000 Ada", 47.5, 364),
    Gpu("rtxa6000", "RTX A6000", 47.5, 155),
    Gpu("rtx5090", "RTX 5090(?! D| Laptop)", 31.4, 209),
    Gpu("rtx4090", "RTX 4090(?! D| Laptop)", 23.6, 165),
    Gpu("rtx4080", "RTX 4080(?! SUPER| Laptop)", 15.6, 97.5),
    Gpu("rtx3090", "RTX 3090(?! Ti)", 23.6, 71),
    Gpu("rtx3080", "RTX 3080(?! Ti| Laptop)", 9.7, 59.5),
    Gpu("rtx3070", "RTX 3070(?! Ti| Laptop)", 7.7, 40.6),
    Gpu("rtx3060", "RTX 3060(?! Ti| Laptop)", 11.6, 25.5),
    Gpu("v100-32gb", "V100-SXM.*32GB", 31.7, 125, False),
    Gpu("v100-32gb-pcie", "V100-PCIE-32GB", 31.7, 112, False),
    Gpu("v100-pcie", "V100-PCIE", 15.8, 112, False),
    Gpu("v100", "V100", 15.8, 125, False),
    Gpu("t4", "T4", 14.6, 65, False),
)


def find_gpu(device_name: str) -> Gpu | None:
    """Return the GPU that torch calls `device_name`, or None if it is a part of one (MIG) or not in the table."""
    if "MIG" in device_name:
        return None
    return next((gpu for gpu in GPUS if re.search(rf"\b{gpu.pattern}\b", device_name)), None)


def load_gpu(name: str) -> Gpu:
    """Return the GPU called `name` on a command line: `A100-80GB` and `a100_80gb` are the same.

    Raises `UserError` for an unknown one.
    """
    known = {gpu.name: gpu for gpu in GPUS}
    typed = name.lower().replace("_", "-")
    if typed not in known:
        variants = [gpu for gpu in known if gpu.startswith(typed)]
        hint = did_you_mean(typed, known, otherwise=f"it has {', '.join(known)}")
        raise UserError(f"the table has no GPU '{name}'; " + (f"use {' or '.join(variants)}" if variants else hint))
    return known[typed]
