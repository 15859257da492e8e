"""How the run uses the machine: precision, TF32, compile, attention, threads, seeds.

In: the config, the launcher's environment and the hardware. Out: a ready `Accelerator`, and for each automatic
choice the value taken and the reason, to be printed once.
"""

import os
import warnings
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    LoggerType,
    TorchDynamoPlugin,
    set_seed,
)
from torch import nn

from recipe.config import TrainConfig
from recipe.errors import UserError
from recipe.hardware.choices import Choice, choose_mixed_precision
from recipe.hardware.processes import use_all_cores

T = TypeVar("T")


def build_accelerator(config: TrainConfig, output_dir: Path) -> tuple[Accelerator, Choice]:
    """The Accelerator with precision resolved and all CPU cores in use; compile is applied by `compile_module`.

    Raises `UserError` for a tracker that is not installed, which Accelerate would drop silently (1.15).
    """
    state = PartialState()
    known = [tracker.value for tracker in LoggerType if tracker != LoggerType.ALL]
    installed = [tracker.value for tracker in get_available_trackers()]
    for tracker in config.report_to or []:
        if tracker not in known:
            raise UserError(f"report_to: there is no tracker '{tracker}'; known are {', '.join(known)}")
        if tracker not in installed:
            raise UserError(f"report_to: {tracker} is not installed; pip install {tracker}, or leave it out")
    use_all_cores(state)
    if config.gpu_memory_limit_gb is not None:
        limit_gpu_memory(state.device, config.gpu_memory_limit_gb)
    if config.deterministic:
        use_deterministic_algorithms()
    precision = choose_mixed_precision(config, state.device)
    if state.device.type == "cuda":
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    # Accelerate 1.15 passes it under the name that torch 2.13 has deprecated; `forward_sync_buffers` it does not know.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    accelerator = Accelerator(
        mixed_precision=precision.value,
        # The module is compiled before it is prepared (see compile_module), so Accelerate must not do it again.
        dynamo_plugin=TorchDynamoPlugin(backend="no"),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False),
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
        log_with=config.report_to,
        project_dir=output_dir,
    )
    set_seed(config.seed)
    return accelerator, precision


def use_deterministic_algorithms() -> None:
    """Make CUDA repeat its results bit for bit, as a CPU does; operators that cannot raise an error.

    This keeps sdpa off cuDNN, which PyTorch does not hold to be deterministic, and inductor from choosing kernels by
    benchmarks (torch >= 2.10). Call it before the first matrix product, when cuBLAS reads its setting.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def limit_gpu_memory(device: torch.device, limit_gb: float) -> None:
    """Let PyTorch's allocator use no more than that, as on a smaller card; its context (0.5 GB) comes on top."""
    if device.type != "cuda":
        raise UserError(f"--gpu_memory_limit_gb needs a CUDA device, this is {device.type}")
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gb * 1e9 / total))  # of the current device: Accelerate's


def compile_module(module: nn.Module, backend: str, mode: str = "default") -> None:
    """Compile in place, as one graph, for fixed shapes.

    Done before `accelerator.prepare` because Accelerate compiles outside DistributedDataParallel, where fullgraph
    fails (accelerate 1.15, torch 2.13); in place because a wrapper would prefix every weight's name. CUDA graphs
    (reduce-overhead, max-autotune) are left out: with accumulation they give wrong gradients (pytorch#96693).
    """
    if backend != "no":
        persist_compile_cache()
        module.compile(backend=backend, mode=mode if backend == "inductor" else None, fullgraph=True, dynamic=False)


def persist_compile_cache() -> None:
    """Keep what inductor compiles where a reboot leaves it (its own default is below /tmp), for the next run."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or cache_home / "gpt2_recipe" / "inductor")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        return
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
