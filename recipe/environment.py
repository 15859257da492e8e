"""The versions and hardware that every measurement records."""

import functools
import math
import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import recipe
from recipe.errors import plural

if TYPE_CHECKING:
    import torch  # the functions that need it import it: preparing data does not

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "evaluate", "tokenizers", "gigatoken")


def list_cpus() -> list[int]:
    """Return the numbers of the CPUs on which the system lets this process run."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def count_cpus() -> int:
    """Count the CPUs that this process may use: of a container with a quota of 1.5 CPUs, two."""
    return max(1, min([len(list_cpus()), *map(math.ceil, read_cpu_quotas())]))


def count_cores() -> int:
    """Count the cores behind these CPUs: two hyper-threads share one."""
    siblings = [Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in list_cpus()]
    if not all(path.is_file() for path in siblings):  # no Linux, or a system that does not tell
        return count_cpus()
    return min(count_cpus(), len({path.read_text() for path in siblings}))


def read_cpu_quotas(root: Path = CGROUPS, own: Path = OWN_CGROUPS) -> list[float]:
    """Return the limits of CPU time of this process's control groups, in CPUs."""
    quotas = []
    for text in read_cgroups("cpu", "cpu.max", root, own):  # v2: "200000 100000", or "max 100000"
        quota, _, period = text.partition(" ")
        if quota.isdigit():
            quotas.append(float(quota) / float(period))
    periods = read_cgroups("cpu", "cpu.cfs_period_us", root, own)
    for quota, period in zip(read_cgroups("cpu", "cpu.cfs_quota_us", root, own), periods, strict=True):  # v1; -1: none
        if quota.isdigit():
            quotas.append(float(quota) / float(period))
    return quotas


def read_cgroups(controller: str, name: str, root: Path = CGROUPS, own: Path = OWN_CGROUPS) -> list[str]:
    """Return a file's content in each control group (v1, v2) of this process, innermost first: container, job, ..."""
    texts = []
    lines = own.read_text().splitlines() if own.is_file() else []
    for line in lines:
        number, controllers, group = line.split(":", 2)  # "4:cpu,cpuacct:/docker/1f", or "0::/user.slice/x.scope" (v2)
        if number == "0" or controller in controllers.split(","):
            top = root if number == "0" else root / controllers
            top = top if top.is_dir() else root / controller
            # In a container, `group` may be the name outside, and `top` the container's own group.
            innermost = top / group.lstrip("/")
            folders = [innermost, *innermost.parents]
            files = [folder / name for folder in folders[: folders.index(top) + 1]]
            texts += [file.read_text().strip() for file in files if file.is_file()]
    return texts


def cache_dir() -> Path:
    """Return the folder for what later runs reuse; without a home folder, a path where nothing can be created."""
    cache = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.devnull if cache.startswith("~") else cache, "gpt2_recipe")


@functools.cache
def only_cached(repo_id: str) -> bool:
    """Return whether the Hub does not answer, so a repository can only come from the cache.

    Asks once per repository, because the Hub's client retries every file for more than ten seconds (2.4).
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


def describe_environment(device: "torch.device") -> dict[str, str | int | None]:
    """Return versions and hardware for summary.json."""
    import torch

    versions: dict[str, str | int | None] = {"gpt2_recipe": recipe.__version__, "python": platform.python_version()}
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
    if version := _find(r"(\d+\.\d+(?:\.\d+)?)", Path("/proc/driver/nvidia/version")):
        return version
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        version = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):  # no driver, or a broken one
        return None
    return version.split()[0] if version.strip() else None


def describe_machine(environment: dict[str, Any]) -> str:
    """Return the hardware in a few words: `2 AMD EPYC cores`, `NVIDIA H200`."""
    if "cuda" in environment:
        return environment["device"]
    name = re.sub(r"[(](R|TM)[)]| Processor| CPU.*", "", environment["device"])
    return plural(environment["num_cpus"], f"{name} core")


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
        changes = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changes else "")
    except (OSError, subprocess.SubprocessError):  # no git, or no checkout
        return None


def _find(pattern: str, path: Path) -> str | None:
    """Return the first group of a pattern in a file, if the file exists and the pattern occurs."""
    match = re.search(pattern, path.read_text(errors="replace")) if path.is_file() else None
    return match[1].strip() if match else None
