"""How the run uses the machine: precision, TF32, compile, threads, seeds, batch arithmetic.

In: the config, the launcher's environment and the hardware. Out: a ready `Accelerator`, and for each automatic
choice the value taken and the reason, to be printed once.
"""

import ctypes
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    TorchDynamoPlugin,
    broadcast_object_list,
    parse_flag_from_env,
    set_seed,
)
from accelerate.utils.memory import should_reduce_batch_size
from torch import nn

from recipe.config import ProcessError, TrainConfig, UserError
from recipe.environment import count_cpus
from recipe.preemption import die_with_the_launcher

# Below this a CPU run ends before compiling has paid. Measured on two cores with avx512_bf16, from an empty cache: the
# demo's graphs take 26 s to compile and its steps are then 1.10 times as fast; a 16 M-parameter model with GPT-2's
# vocabulary, 1.12 times as fast, was even after 8e13 FLOPs.
COMPILE_PAYS_FLOPS_ON_CPU = 1e14
# More tokens per forward bring no speed: GPUs are full long before 64 rows of 1024; a CPU's caches fill earlier, and
# no out-of-memory error would stop a search there.
LARGEST_MICRO_BATCH_TOKENS = {"cpu": 4096, "accelerator": 65536}


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h

T = TypeVar("T")


@dataclass(frozen=True)
class Choice:
    """A value that was resolved, and why."""

    value: str
    reason: str


def start_processes() -> None:
    """Find the device and the other processes; comes before everything that asks which process this is.

    Raises `UserError` if the launcher started several processes and Accelerate sees one, as accelerate 1.15 does
    for several CPU processes unless they are launched as below: each would train the whole run by itself.
    """
    die_with_the_launcher()
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if state.num_processes != world_size:
        raise UserError(
            f"the launcher started {world_size} processes but Accelerate sees {state.num_processes}"
            f"{'' if torch.cuda.is_available() else ' (no GPU was found)'}; on CPU launch "
            "with ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes N"
        )


def build_accelerator(config: TrainConfig, output_dir: Path) -> tuple[Accelerator, Choice]:
    """The Accelerator with precision resolved and all CPU cores in use; compile is applied by `compile_module`.

    Raises `UserError` for a tracker that is not installed, which Accelerate would drop silently (1.15).
    """
    state = PartialState()
    installed = [tracker.value for tracker in get_available_trackers()]
    for tracker in config.report_to or []:
        if tracker not in installed:
            raise UserError(
                f"report_to: '{tracker}' is not a tracker that is installed here "
                f"({', '.join(installed) or 'none is'}); pip install it, or leave it out"
            )
    use_all_cores(state)
    if config.keep_freed_memory:
        keep_freed_memory(state.device)
    precision = choose_mixed_precision(config, state.device)
    if state.device.type == "cuda":
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
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


def on_main_process(function: Callable[[], T]) -> T:
    """Run `function` on the main process while the others wait; its result, or its `UserError`, reaches all."""
    result, message = None, None
    if PartialState().is_main_process:
        try:
            result = function()
        except UserError as error:
            message = str(error)
        except OSError as error:  # a full disk, a folder without permission
            message = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    result, message = broadcast_object_list([result, message])
    if message is not None:
        raise UserError(message)
    return result


def use_all_cores(state: PartialState) -> None:
    """Share the CPUs between the local processes, unless OMP_NUM_THREADS says otherwise.

    `accelerate launch` without a config sets OMP_NUM_THREADS=1 (accelerate 1.15), which cannot be told from a
    user's 1; any larger number is respected.
    """
    if state.device.type == "cpu" and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", state.num_processes))
        torch.set_num_threads(max(1, count_cpus() // local_world_size))


def keep_freed_memory(device: torch.device) -> None:
    """On a CPU, let glibc keep freed memory instead of giving large buffers back and faulting them in every step."""
    if device.type == "cpu" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 2**30)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def choose_mixed_precision(config: TrainConfig, device: torch.device) -> Choice:
    """The script's option, else the launcher's, else the best the hardware really has."""
    launcher = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if config.mixed_precision != "auto":
        choice = Choice(config.mixed_precision, "as asked for by --mixed_precision")
    elif launcher != "no":
        choice = Choice(launcher, "as set by the launcher")
    elif device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            choice = Choice("bf16", "the GPU has bf16 matrix units")
        else:
            choice = Choice("fp16", "the GPU has no bf16 matrix units; gradients are scaled")
    elif device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        native = [name for name in ("amx_bf16", "avx512_bf16", "sve_bf16") if capabilities.get(name, False)]
        choice = Choice("bf16", f"the CPU has {native[0]}") if native else Choice("no", "the CPU has no bf16 units")
    else:
        choice = Choice("no", f"not measured to help on {device.type}")
    if choice.value not in ("no", "bf16", "fp16"):
        raise UserError(
            f"mixed_precision {choice.value} is not supported: its converters skip GPT-2's Conv1D layers; use bf16"
        )
    if choice.value == "fp16" and device.type != "cuda":
        raise UserError(f"fp16 needs a CUDA device, this is {device.type}; use bf16 or no")
    return choice


def choose_dynamo_backend(config: TrainConfig, device: torch.device, total_flops: float) -> Choice:
    """The script's option, else the launcher's, else inductor where compile time is won back within the run."""
    launcher = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if config.dynamo_backend != "auto":
        choice = Choice(config.dynamo_backend.lower(), "as asked for by --dynamo_backend")
    elif launcher != "no":
        if launcher not in ("inductor", "aot_eager", "eager"):
            raise UserError(f"the launcher's dynamo_backend {launcher} is not one that works here; use inductor or no")
        choice = Choice(launcher, "as set by the launcher")
    elif device.type == "cuda":
        choice = Choice("inductor", "pays on every GPU")
    elif device.type != "cpu":
        choice = Choice("no", f"not measured to help on {device.type}")
    elif total_flops < COMPILE_PAYS_FLOPS_ON_CPU:
        choice = Choice("no", "compiling would take longer than it saves in so short a CPU run")
    elif not any(shutil.which(compiler) for compiler in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        choice = Choice("no", "inductor needs a C++ compiler on the CPU, and none was found")
    else:
        choice = Choice("inductor", "the run is long enough to win compile time back")
    return choice


def compile_module(module: nn.Module, backend: str) -> None:
    """Compile in place, as one graph, for fixed shapes.

    Done before `accelerator.prepare` because Accelerate compiles outside DistributedDataParallel, where fullgraph
    fails (accelerate 1.15, torch 2.13); in place because a wrapper would prefix every weight's name. CUDA graphs
    (reduce-overhead, max-autotune) are left out: with accumulation they give wrong gradients (pytorch#96693).
    """
    if backend != "no":
        module.compile(backend=backend, fullgraph=True, dynamic=False)


def micro_batch_candidates(config: TrainConfig, num_processes: int, device: torch.device) -> list[int]:
    """Micro-batch sizes to try, largest first; the first is what runs if memory allows.

    The global batch never changes: a candidate divides the share of one process. Raises `UserError` with the
    sizes that would work where the configured ones do not divide.
    """
    share, rest = divmod(config.global_batch_size, num_processes)
    if rest:
        below = config.global_batch_size - rest
        raise UserError(
            f"global_batch_size {config.global_batch_size} does not divide by {num_processes} processes; "
            f"{f'{below} or ' if below else ''}{below + num_processes} would"
        )
    divisors = [size for size in range(share, 0, -1) if share % size == 0]
    accumulation = config.gradient_accumulation_steps
    if accumulation is not None and share % accumulation:
        raise UserError(
            f"gradient_accumulation_steps {accumulation} does not divide the {share} sequences of a process "
            f"(global_batch_size {config.global_batch_size} / {num_processes}); these would: {_list(divisors)}"
        )
    wanted = config.per_device_train_batch_size
    if accumulation is not None:
        if wanted not in ("auto", None, share // accumulation):
            raise UserError(
                f"{num_processes} processes x per_device_train_batch_size {wanted} x gradient_accumulation_steps "
                f"{accumulation} is not global_batch_size {config.global_batch_size}; leave one of them out"
            )
        return [share // accumulation]
    if wanted not in ("auto", None):
        if wanted not in divisors:
            raise UserError(
                f"per_device_train_batch_size {wanted} does not divide the {share} sequences of a process "
                f"(global_batch_size {config.global_batch_size} / {num_processes}); these would: {_list(divisors)}"
            )
        return [wanted]
    limit = LARGEST_MICRO_BATCH_TOKENS["cpu" if device.type == "cpu" else "accelerator"]
    return [size for size in divisors if size * config.block_size <= limit] or [1]


def find_micro_batch(accelerator: Accelerator, module: nn.Module, candidates: list[int], block_size: int) -> int:
    """The largest candidate whose forward, backward and optimizer state fit, agreed on by all processes.

    Nothing is tried where nothing can be learned: a single candidate, or a CPU, which swaps instead of raising.
    """
    if len(candidates) == 1 or accelerator.device.type == "cpu":
        return candidates[0]
    # AdamW's two moments exist only after the first step: hold their room during the trial.
    moments = [torch.empty_like(p) for p in module.parameters() for _ in range(2)]
    for size in candidates:
        fits = torch.ones((), device=accelerator.device)
        try:
            rows = torch.zeros(size, block_size + 1, dtype=torch.int64, device=accelerator.device)
            with accelerator.no_sync(module):
                accelerator.backward(module(rows[:, :-1], rows[:, 1:]))
            torch.accelerator.synchronize()
        except Exception as error:
            if not should_reduce_batch_size(error):
                raise
            fits.zero_()
        module.zero_grad(set_to_none=True)
        if accelerator.reduce(fits, reduction="sum").item() == accelerator.num_processes:
            del moments
            return size
        torch.compiler.reset()  # forget the graphs of the shape that did not fit
        torch.accelerator.empty_cache()
    raise UserError(
        "the model does not fit with one sequence per forward; try --activation_checkpointing "
        "--loss_chunks 8, or a smaller recipe"
    )


def smaller_micro_batch(
    error: RuntimeError, config: TrainConfig, candidates: list[int], micro_batch_size: int, num_processes: int
) -> int:
    """The next smaller micro-batch after an out-of-memory error; the global batch, and so the run, stays the same.

    Raises what is no out-of-memory error again, and `UserError` with the numbers to pass where nothing can be changed:
    by a user's choice of the micro-batch (no other candidate), or because other processes are in the same step.
    """
    if not (isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)):
        raise error
    share = config.global_batch_size // num_processes
    smaller = [size for size in range(micro_batch_size - 1, 0, -1) if share % size == 0]
    if not smaller:
        raise ProcessError(
            "out of memory with one sequence per forward; try --activation_checkpointing --loss_chunks 8, or a "
            "smaller recipe"
        ) from error
    if len(candidates) == 1 or num_processes > 1:
        raise ProcessError(
            f"out of memory with micro-batches of {micro_batch_size}; go on with --resume_from_checkpoint auto "
            f"--per_device_train_batch_size {smaller[0]}, or --loss_chunks 8, or --activation_checkpointing"
        ) from error
    torch.compiler.reset()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    return smaller[0]


def _list(sizes: list[int]) -> str:
    return ", ".join(map(str, sorted(sizes)))
