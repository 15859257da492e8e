"""Configure the hardware: build the `Accelerator` (precision, TF32, threads) and the compiled module."""

import os
import warnings
from pathlib import Path

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
from transformers import PreTrainedConfig

from recipe.config import TrainConfig
from recipe.environment import cache_dir
from recipe.errors import UserError
from recipe.hardware.choices import (
    Choice,
    choose_attention,
    choose_dynamo_backend,
    choose_dynamo_mode,
    choose_mixed_precision,
)
from recipe.hardware.memory import MemoryPlan
from recipe.hardware.processes import use_all_cores
from recipe.model.build import build_model
from recipe.model.loss import LanguageModelingLoss
from recipe.model.size import count_training_flops


def build_accelerator(config: TrainConfig, output_dir: Path) -> tuple[Accelerator, Choice]:
    """Build the Accelerator and return it with the chosen precision.

    Raises `UserError` for options that cannot work on this device.
    """
    state = PartialState()
    check_options(config, state.device)
    use_all_cores(state)
    if config.deterministic or (state.device.type == "cpu" and "autotune" not in choose_dynamo_mode(config).value):
        use_deterministic_algorithms()
    precision = choose_mixed_precision(config, state.device)
    if state.device.type == "cuda":
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    # Accelerate 1.15 uses the name that torch 2.13 deprecates and does not know its successor `forward_sync_buffers`.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    accelerator = Accelerator(
        mixed_precision=precision.value,
        dynamo_plugin=TorchDynamoPlugin(backend="no"),  # compile_module compiles before prepare()
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False),
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
        log_with=config.report_to,
        project_dir=output_dir,
    )
    set_seed(config.seed)
    return accelerator, precision


def check_options(config: TrainConfig, device: torch.device) -> None:
    """Raise `UserError` for options that cannot work on the device, and for a tracker that is not installed.

    Accelerate would ignore the tracker silently (1.15).
    """
    known = [tracker.value for tracker in LoggerType if tracker != LoggerType.ALL]
    installed = [tracker.value for tracker in get_available_trackers()]
    for tracker in config.report_to or []:
        if tracker not in known:
            raise UserError(f"report_to: unknown tracker '{tracker}'; choose from {', '.join(known)}")
        if tracker not in installed:
            raise UserError(f"{tracker} is not installed; run pip install {tracker}, or drop it from --report_to")
    choose_dynamo_mode(config)
    precision = choose_mixed_precision(config, device)
    if config.bf16_residual and precision.value != "bf16":
        raise UserError(
            f"--bf16_residual requires bf16 mixed precision, but this run uses {precision.value}: {precision.reason}"
        )


def build_module(
    config: TrainConfig,
    model_config: PreTrainedConfig,
    vocab_size: int,
    device: torch.device,
    precision: Choice,
    source: str | Path | None = None,
    plan: MemoryPlan | None = None,
) -> tuple[LanguageModelingLoss, dict[str, Choice]]:
    """Build model and loss and mark them for compilation. Returns them with the choices made, by their label.

    source: a folder or Hub id whose weights to use; None initializes random weights.
    plan: the options that save memory; without it, those that are auto are off.
    """
    if plan is not None:
        config = plan.apply(config)
    attention = choose_attention(config, device)
    model = build_model(config, model_config, attention.value, source)
    total_flops = count_training_flops(config, model.config, model.num_parameters())
    dynamo = choose_dynamo_backend(config, device, total_flops)
    if plan is not None and dynamo.value == "inductor" and not plan.compiled:
        dynamo = Choice("no", "a compiled step, which holds all gradients twice, does not fit into the memory")
    num_chunks = 1 if config.loss_chunks == "auto" else config.loss_chunks
    module = LanguageModelingLoss(model, vocab_size, config.label_smoothing_factor, num_chunks)
    mode = choose_dynamo_mode(config)
    compile_module(module, dynamo.value, mode.value)
    choices = {"precision": precision, "dynamo": dynamo, "attention": attention}
    if plan is not None:
        usable = f"{plan.total_bytes / 1e9:.1f} of {plan.usable_bytes / 1e9:.1f} GB, estimated"
        choices["memory"] = Choice(usable, plan.reason)
    if config.bf16_residual:
        choices["residual"] = Choice("bf16", "requested by --bf16_residual")
    if dynamo.value == "inductor" and mode.value != "default":
        choices["mode"] = mode
    return module, choices


def use_deterministic_algorithms() -> None:
    """Make results repeat bit for bit; CUDA operators without a deterministic version raise an error.

    On a CPU it is free and matters only to inductor (torch 2.13), whose threads otherwise add up the embeddings'
    gradient in any order. On CUDA it keeps sdpa off cuDNN, which PyTorch does not consider deterministic. Inductor no
    longer chooses kernels by benchmark (torch >= 2.10). Call it before the first matrix product, when cuBLAS reads its
    setting.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs time, and nothing here reads such memory


def compile_module(module: nn.Module, backend: str, mode: str = "default") -> None:
    """Compile in place, as one graph with fixed shapes.

    This happens before `accelerator.prepare` because Accelerate compiles outside DistributedDataParallel, where
    fullgraph fails (accelerate 1.15, torch 2.13), and in place because a wrapper would prefix every weight's name.
    Only inductor has modes.
    """
    if backend != "no":
        persist_compile_cache()
        cache_autocast()
        module.compile(backend=backend, mode=mode if backend == "inductor" else None, fullgraph=True, dynamic=False)


def cache_autocast() -> None:
    """Let AOTAutograd cache graphs that enter autocast, so that a resumed run does not differentiate them again.

    The arguments of these functions are part of the cache's key. Torch 2.13 refuses them by name (pytorch#191106).
    """
    from torch._inductor import config  # takes time, so only runs that compile import it

    for name in ("_enter_autocast", "_exit_autocast"):
        config.unsafe_marked_cacheable_functions[f"torch.amp.autocast_mode.{name}"] = torch.__version__


def persist_compile_cache() -> None:
    """Move inductor's cache out of /tmp, so that it survives a reboot."""
    try:
        folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or cache_dir() / "inductor")
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # the home folder is missing or read-only
        return
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
