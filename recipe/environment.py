"""The versions and hardware that every measurement records."""

import functools
import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import recipe

if TYPE_CHECKING:
    import torch  # the functions that need it import it: preparing data does not

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "evaluate", "tokenizers", "gigatoken")


def count_cpus() -> int:
    """Count the CPUs that this process may use; a container or scheduler may allow fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_local_processes(num_processes: int) -> int:
    """Count the run's processes on this machine: what the launcher says, else all num_processes."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))


def cache_dir() -> Path:
    """Return the folder for what later runs reuse. Raises `RuntimeError` if the home folder is unknown."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gpt2_recipe"


@functools.cache
def only_cached(repo_id: str) -> bool:
    """Return whether a repository is available from the cache only, because the Hub does not answer.

    Asked once, because the Hub's client repeats the request of every file for more than ten seconds (2.4).
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().model_info(repo_id, timeout=10)
    except HfHubHTTPError:  # it has answered
        return False
    except Exception:  # offline mode, or no connection: the HTTP client raises its own
        return True
    return False


def describe_device(device: "torch.device") -> str:
    """Return the product name of a GPU or CPU, else the type of the device."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        name = _find(r"model name\s*: *(.*)", Path("/proc/cpuinfo"))
        return name or platform.processor() or platform.machine()
    return device.type


def describe_environment(device: "torch.device") -> dict[str, str | int]:
    """Return versions and hardware for summary.json."""
    import torch

    versions: dict[str, str | int] = {"gpt2_recipe": recipe.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    versions["torch"] = torch.__version__  # includes the build, which the package's version may lack
    if device.type == "cuda":
        driver = find_nvidia_driver() or "unknown"
        versions |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "driver": driver}
    system = f"{platform.system()} {platform.machine()}"
    return {**versions, "device": describe_device(device), "num_cpus": count_cpus(), "platform": system}


def find_nvidia_driver() -> str | None:
    """Return the version of the loaded NVIDIA driver, or None. WSL shows it only through nvidia-smi."""
    if found := _find(r"(\d+\.\d+(?:\.\d+)?)", Path("/proc/driver/nvidia/version")):
        return found
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):  # no driver, or a broken one
        return None
    return found.split()[0] if found.strip() else None


def describe_machine(environment: dict[str, Any]) -> str:
    """Return the hardware in a few words: `2 AMD EPYC cores`, `NVIDIA H200`."""
    if "cuda" in environment:
        return environment["device"]
    name, num_cpus = re.sub(r"[(](R|TM)[)]| Processor| CPU.*", "", environment["device"]), environment["num_cpus"]
    return f"{num_cpus} {name} core{'s' * (num_cpus != 1)}"


def find_commit() -> str | None:
    """Return the commit of the checkout that this program runs from, or None if it was installed without one.

    `+` is appended if files that git tracks have been changed.
    """
    root = Path(recipe.__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", root, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != root:  # installed into a folder of another checkout
            return None
        return git("rev-parse", "HEAD") + "+" * bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):  # no git, or no checkout
        return None


def _find(pattern: str, path: Path) -> str | None:
    """Return the first group of a pattern in a file, if the file exists and the pattern occurs."""
    found = re.search(pattern, path.read_text(errors="replace")) if path.is_file() else None
    return found[1].strip() if found else None
