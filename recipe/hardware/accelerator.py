"""How the run uses the machine: precision, TF32, compile, attention, threads, seeds.

In: the config, the launcher's environment and the hardware. Out: a ready `Accelerator`, and for each automatic
choice the value taken and the reason, to be printed once.
"""

import functools
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    LoggerType,
    TorchDynamoPlugin,
    parse_flag_from_env,
    set_seed,
)
from torch import nn
from transformers import PreTrainedConfig

from recipe.benchmark.machine import native_bf16, runs_on, why_no_inductor
from recipe.config import ProcessError, TrainConfig, UserError
from recipe.environment import count_cpus, count_local_processes
from recipe.run.stop import die_with_the_launcher

# Below this a CPU run ends before compiling has paid. Measured on two cores with avx512_bf16, from an empty cache: the
# demo's graphs take 26 s to compile and its steps are then 1.10 times as fast; a 16 M-parameter model with GPT-2's
# vocabulary (the README's under "Evaluate"), 1.22 times as fast and in 0.4 of the memory, was even after 6e13 FLOPs.
COMPILE_PAYS_FLOPS_ON_CPU = 6e13
# Up to here plain attention beats sdpa's flash kernel on a CPU (30 M parameters, two cores with avx512_bf16, bf16):
# at 256, 512 and 1,024 tokens it is 1.10, 1.15 and 1.06 times as fast compiled; not compiled, 1.30 times at 512 and
# 0.65 times at 1,024, where its memory, which grows with the square of the tokens, no longer fits the caches.
LONGEST_EAGER_ATTENTION_ON_CPU = 512
# NCCL's watchdog ends processes that wait in a device collective for 600 s; on the hosts they may wait for days of
# tokenizing, or for a checkpoint on a slow disk.
HOST_WAIT = timedelta(days=30)

T = TypeVar("T")


@dataclass(frozen=True)
class Choice:
    """A value that was resolved, and why."""

    value: str
    reason: str

    @property
    def on(self) -> bool:
        """Of a switch, whose value is "true" or "false"."""
        return self.value == "true"


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
    if state.device.type == "cuda" and torch.version.cuda is not None:  # ROCm names its architectures otherwise
        name, capability = torch.cuda.get_device_name(state.device), torch.cuda.get_device_capability(state.device)
        check_architecture(name, capability, torch.cuda.get_arch_list())
    host_group()  # now, where a network that does not work costs nothing yet


@functools.cache
def host_group() -> dist.ProcessGroup | None:
    """A gloo group over all processes, for waits that must not block the devices; None for a single process.

    Raises `UserError` if the hosts cannot reach one another, e.g. because a host name resolves to 127.0.0.1.
    """
    if PartialState().num_processes == 1:
        return None
    try:
        return dist.new_group(backend="gloo", timeout=HOST_WAIT)
    except RuntimeError as error:
        raise ProcessError(
            f"the processes cannot reach one another over the network ({' '.join(str(error).split())[:150]}); set "
            "GLOO_SOCKET_IFNAME to the network interface that connects the hosts, e.g. eth0"
        ) from error


def check_architecture(name: str, capability: tuple[int, int], architectures: list[str]) -> None:
    """Raise `UserError` for a GPU that this build of PyTorch has no kernels for, such as a V100 since 2.11.

    Without it the run fails at its first kernel. architectures: empty where PyTorch does not say.
    """
    if architectures and not runs_on(architectures, capability):
        raise UserError(
            f"this build of PyTorch ({torch.__version__}) has no kernels for {name} (compute capability "
            f"{capability[0]}.{capability[1]}; it has {', '.join(architectures)}); install one that does, "
            "from https://pytorch.org/get-started/locally"
        )


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


def on_main_process(function: Callable[[], T]) -> T:
    """Run `function` on the main process; the others wait, for as long as it takes, for its result or `UserError`."""
    result, message = None, None
    if PartialState().is_main_process:
        try:
            result = function()
        except UserError as error:
            message = str(error)
        except OSError as error:  # a full disk, a folder without permission
            message = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    if (group := host_group()) is not None:
        outcome = [result, message]
        dist.broadcast_object_list(outcome, src=0, group=group)
        result, message = outcome
    if message is not None:
        raise UserError(message)
    return result


def use_all_cores(state: PartialState) -> None:
    """Share the CPUs between the local processes, unless OMP_NUM_THREADS says otherwise.

    `accelerate launch` without a config sets OMP_NUM_THREADS=1 (accelerate 1.15), which cannot be told from a
    user's 1; any larger number is respected.
    """
    if state.device.type == "cpu" and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(max(1, count_cpus() // count_local_processes(state.num_processes)))


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


def choose_mixed_precision(config: TrainConfig, device: torch.device) -> Choice:
    """The script's option, else the launcher's, else the best the hardware really has."""
    launcher = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if config.mixed_precision != "auto":
        choice = Choice(config.mixed_precision, "as asked for by --mixed_precision")
    elif launcher != "no":
        choice = Choice(launcher, "as set by the launcher")
    elif device.type == "cuda":
        if native_bf16(device):
            choice = Choice("bf16", "the GPU has bf16 matrix units")
        else:
            choice = Choice("fp16", "the GPU has no bf16 matrix units; gradients are scaled")
    elif device.type == "cpu":
        native = native_bf16(device)
        choice = Choice("bf16", f"the CPU has {native}") if native else Choice("no", "the CPU has no bf16 units")
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
    """The script's option, else the launcher's, else inductor where compile time is won back within the run.

    Raises `UserError` where inductor is asked for and cannot compile: it would fail in the middle of the first step.
    """
    launcher = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    why_not = why_no_inductor(device)
    if config.dynamo_backend != "auto":
        choice = Choice(config.dynamo_backend.lower(), "as asked for by --dynamo_backend")
    elif launcher != "no":
        if launcher not in ("inductor", "aot_eager", "eager"):
            raise UserError(f"the launcher's dynamo_backend {launcher} is not one that works here; use inductor or no")
        choice = Choice(launcher, "as set by the launcher")
    elif device.type not in ("cuda", "cpu"):
        choice = Choice("no", f"not measured to help on {device.type}")
    elif device.type == "cpu" and total_flops < COMPILE_PAYS_FLOPS_ON_CPU:
        choice = Choice("no", "compiling would take longer than it saves in so short a CPU run")
    elif why_not is not None:
        choice = Choice("no", why_not)
    elif device.type == "cuda":
        choice = Choice("inductor", "pays on every GPU")
    else:
        choice = Choice("inductor", "the run is long enough to win compile time back")
    if choice.value == "inductor" and why_not is not None:
        raise UserError(f"dynamo_backend inductor, {choice.reason}, cannot compile here: {why_not}; use no")
    return choice


def choose_attention(config: TrainConfig, device: torch.device) -> Choice:
    """The script's option, else sdpa, but on a CPU plain matmuls for short rows."""
    if config.attn_implementation != "auto":
        return Choice(config.attn_implementation, "as asked for by --attn_implementation")
    if device.type == "cpu" and config.block_size <= LONGEST_EAGER_ATTENTION_ON_CPU:
        return Choice("eager", f"faster on a CPU up to {LONGEST_EAGER_ATTENTION_ON_CPU} tokens")
    return Choice("sdpa", "flash kernels, no mask")


def choose_residual(config: TrainConfig, device: torch.device, precision: Choice) -> Choice:
    """Whether the residual stream is bf16: the script's option, else on CUDA, if the matmuls are bf16.

    There, every LayerNorm saves and reads half the bytes. Raises `UserError` where it cannot be.
    """
    if config.bf16_residual == "true" and precision.value != "bf16":
        raise UserError(
            f"--bf16_residual needs bf16 mixed precision; here it is {precision.value}: {precision.reason}"
        )
    if config.bf16_residual != "auto":
        return Choice(config.bf16_residual, "as asked for by --bf16_residual")
    if precision.value != "bf16":
        return Choice("false", "needs bf16 mixed precision")
    if device.type != "cuda":
        return Choice("false", f"not the default on {device.type}")
    return Choice("true", "halves the memory traffic of every LayerNorm")


def choose_sigmoid_gelu(
    config: TrainConfig, model_config: PreTrainedConfig, device: torch.device, precision: Choice, dynamo: Choice
) -> Choice:
    """Whether GELU is computed by a sigmoid: the script's option, else where inductor compiles for CUDA.

    There tanh is a call into libdevice with a branch, and a sigmoid is one exponential. Its gradients in fp32 differ
    from tanh's by up to 2.1e-6, so that with fp32 matmuls it is not the default.
    """
    activation = model_config.activation_function
    if config.sigmoid_gelu == "true" and activation != "gelu_new":
        raise UserError(f"--sigmoid_gelu computes activation_function gelu_new, and this model has {activation}")
    if activation != "gelu_new":
        return Choice("false", f"the model has {activation}")
    if config.sigmoid_gelu == "auto" and precision.value == "no":
        return Choice("false", "the most exact gradients with fp32 matmuls")
    return _where_inductor_compiles_for_cuda(config.sigmoid_gelu, "--sigmoid_gelu", device, dynamo)


def choose_index_mask(config: TrainConfig, device: torch.device, dynamo: Choice) -> Choice:
    """Whether the vocabulary's padding is masked by its index: the script's option, else as for GELU.

    Fused there, an index costs nothing and a bias reads 4 bytes for each logit of 2. On a CPU, and where the loss is
    not compiled, the bias is faster: the loss takes 1.2 times as long with an index (avx512_bf16, one core).
    """
    if config.index_mask == "auto" and not config.loss_in_graph:
        return Choice("false", "pays only with the loss in the graph")
    return _where_inductor_compiles_for_cuda(config.index_mask, "--index_mask", device, dynamo)


def _where_inductor_compiles_for_cuda(value: str, option: str, device: torch.device, dynamo: Choice) -> Choice:
    if value != "auto":
        return Choice(value, f"as asked for by {option}")
    if device.type == "cuda" and dynamo.value == "inductor":
        return Choice("true", "inductor compiles for CUDA")
    return Choice("false", "pays only where inductor compiles for CUDA")


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
