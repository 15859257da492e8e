"""What a measurement must say about where it was made: versions and hardware."""

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import recipe

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "evaluate", "tokenizers")


def count_cpus() -> int:
    """CPUs this process may run on (a container or scheduler may allow fewer than the machine has)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def count_local_processes(num_processes: int) -> int:
    """Processes of this run that share this machine's CPUs; all num_processes, unless the launcher says otherwise."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))


def describe_device(device: torch.device) -> str:
    """The device's marketing name; for a CPU the model line of the operating system."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        cpuinfo = Path("/proc/cpuinfo")
        if cpuinfo.is_file():
            for line in cpuinfo.read_text(errors="replace").splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        return platform.processor() or platform.machine()
    return device.type


def _nvidia_driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\d+\.\d+(\.\d+)?", path.read_text()) if path.is_file() else None
    return found[0] if found else "unknown"


def describe_environment(device: torch.device) -> dict[str, str | int]:
    """Versions and hardware, as they go into summary.json."""
    versions: dict[str, str | int] = {"gpt2_recipe": recipe.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    versions["torch"] = torch.__version__  # with its build, which the package's version may lack
    if device.type == "cuda":
        versions |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "driver": _nvidia_driver()}
    system = f"{platform.system()} {platform.machine()}"
    return {**versions, "device": describe_device(device), "num_cpus": count_cpus(), "platform": system}
