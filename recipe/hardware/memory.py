"""Estimate the memory of a training step on one device, and choose the options with which it fits.

Everything here is arithmetic on the shape of the model, so that scripts/plan_run.py can plan for devices that are not
there. recipe/hardware/micro_batch.py tries the result on the device.
"""

import copy
import dataclasses
import importlib.util
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedConfig

from recipe.config import TrainConfig
from recipe.environment import count_local_processes
from recipe.errors import UserError
from recipe.hardware.choices import Choice, choose_attention, choose_dynamo_backend
from recipe.hardware.host_memory import available_bytes
from recipe.hardware.micro_batch import micro_batch_candidates
from recipe.hardware.processes import largest_of_processes
from recipe.model.size import (
    count_block_matrices,
    count_head,
    count_inner,
    count_parameters,
    count_training_flops,
    padded_vocab_size,
)
from recipe.optim.muon import STACK_COPIES, STACK_VALUES

USABLE_SHARE = 0.92  # of a device: the rest is for fragmentation and for the error of the estimate
# Bytes outside the model: the CUDA context with cuBLAS and cuDNN, or Python with torch and Transformers.
PROCESS_BYTES = {"cuda": 0.5e9, "cpu": 0.5e9, "mps": 0.5e9}
CPU_COMPILER_BYTES = 0.1e9  # dynamo's and inductor's code and graphs, in the process's own memory
# Tokens per forward pass whose matmuls take as long as one pass over weights and gradients. Per parameter, a
# micro-batch moves 20 bytes (fp32 weight read and cast, bf16 copy read, gradient written and accumulated) and computes
# 6 FLOPs per token; a GPU computes about 150 FLOPs in the time that it moves a byte (H100: 450 TFLOP/s, 3.35 TB/s).
TOKENS_TO_HIDE_WEIGHTS = 20 / 6 * 150
EIGHT_BIT = "adamw_bnb_8bit"
LOSS_CHUNKS = 8


@dataclass(frozen=True)
class Setting:
    """What the memory of a step depends on besides the model, the row length and the options of a `MemoryPlan`."""

    device_type: str  # "cuda", "cpu" or "mps"
    mixed_precision: str  # "no", "bf16" or "fp16"
    compiled: bool  # by inductor
    num_processes: int = 1


@dataclass(frozen=True)
class MemoryPlan:
    """The options that decide how much memory a step takes, and its estimate by part, in bytes per device."""

    micro_batch_size: int
    activation_checkpointing: bool
    loss_chunks: int
    optim: str
    parts: dict[str, int]
    compiled: bool = True
    usable_bytes: float = 0.0  # of this run's device
    reason: str = ""

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def choices(self) -> dict[str, Any]:
        """The options without which a resumed run on the same processes may differ in the last bits."""
        names = ("micro_batch_size", "activation_checkpointing", "loss_chunks", "compiled")
        return {name: getattr(self, name) for name in names}

    def apply(self, config: TrainConfig) -> TrainConfig:
        """Return the config with these options in place of `auto`; the micro-batch is for a trial to confirm."""
        return dataclasses.replace(
            config,
            activation_checkpointing=str(self.activation_checkpointing).lower(),
            loss_chunks=self.loss_chunks,
            optim=self.optim,
        )


def plan_memory(
    config: TrainConfig, model_config: PreTrainedConfig, setting: Setting, usable_bytes: float
) -> MemoryPlan | None:
    """Return the fastest options that fit into `usable_bytes`, by estimate, or None if none do.

    model_config: with the padded vocabulary. usable_bytes: of the device, without what other programs use; a margin is
    left. Options that are not auto are kept. 8-bit AdamW is chosen only if no other compiled step fits, and a step
    that is not compiled, which frees each gradient once it is accumulated, only if no compiled one does.
    """
    plans = list_plans(config, model_config, setting)
    fitting = [plan for plan in plans if plan.total_bytes <= USABLE_SHARE * usable_bytes]

    def preference(plan: MemoryPlan) -> tuple[bool, bool, float]:
        return not plan.compiled, plan.optim == EIGHT_BIT, step_cost(plan, config, model_config)

    return min(fitting, key=preference, default=None)


def plan_device(
    config: TrainConfig,
    model_config: PreTrainedConfig,
    accelerator: Accelerator,
    precision: Choice,
    earlier: dict[str, Any] | None = None,
) -> MemoryPlan:
    """Return the plan for this run's device, the same on all processes, with its reason.

    model_config: with the real vocabulary. An estimate never refuses a run: if nothing fits, the options that take the
    least memory are tried. earlier: the choices of the run's checkpoint, which are kept as long as they fit, because
    the free memory differs from one start to the next.
    """
    model_config, device = copy.deepcopy(model_config), accelerator.device
    model_config.vocab_size = padded_vocab_size(model_config.vocab_size, config.pad_vocab_to_multiple_of)
    total_flops = count_training_flops(config, model_config, count_parameters(model_config))
    setting = Setting(
        device.type,
        precision.value,
        choose_dynamo_backend(config, device, total_flops).value == "inductor",
        accelerator.num_processes,
    )
    num_local_processes = count_local_processes(accelerator.num_processes)
    usable = -largest_of_processes(-measure_usable_bytes(device, num_local_processes))  # one plan for all
    for plan in list_plans(config, model_config, setting):
        if plan.choices == earlier and plan.total_bytes <= usable:
            return dataclasses.replace(plan, usable_bytes=usable, reason="the choices of the checkpoint")
    plan = plan_memory(config, model_config, setting, usable)
    has_8bit = config.optim == EIGHT_BIT or importlib.util.find_spec("bitsandbytes") is not None
    if plan is not None and plan.optim == EIGHT_BIT and not has_8bit:
        raise UserError(
            f"only 8-bit AdamW fits into the {usable / 1e9:.1f} GB of this device, and it requires bitsandbytes; "
            'run pip install -e ".[adamw_8bit]"'
        )
    if plan is not None:
        savings = {
            "activation checkpointing": plan.activation_checkpointing,
            f"the loss in {plan.loss_chunks} chunks": plan.loss_chunks > 1,
            "8-bit AdamW": plan.optim == EIGHT_BIT,
            "no compilation": setting.compiled and not plan.compiled,
        }
        options = " and ".join(text for text, is_on in savings.items() if is_on)
        reason = f"the fastest that fits has {options}" if options else "fits without recomputation"
        return dataclasses.replace(plan, usable_bytes=usable, reason=reason)
    plans = [plan for plan in list_plans(config, model_config, setting) if plan.optim != EIGHT_BIT or has_8bit]
    plan = min(plans, key=lambda plan: plan.total_bytes)
    return dataclasses.replace(plan, usable_bytes=usable, reason="does not fit, but is tried")


def measure_usable_bytes(device: torch.device, num_local_processes: int) -> int:
    """Return the memory that one process of the run may use on its device: what is free, and what it holds already."""
    if device.type == "cuda":
        usable = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        return usable + int(PROCESS_BYTES["cuda"])  # the context, which the estimate counts and this does not
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    return available_bytes() // num_local_processes


def list_plans(config: TrainConfig, model_config: PreTrainedConfig, setting: Setting) -> list[MemoryPlan]:
    """Return every combination of options that the config leaves open, with its estimate."""
    if setting.compiled and config.dynamo_backend == "auto":
        not_compiled = list_plans(config, model_config, dataclasses.replace(setting, compiled=False))
    else:
        not_compiled = []
    sizes = micro_batch_candidates(config, setting.num_processes, torch.device(setting.device_type))
    if config.activation_checkpointing == "auto":
        checkpointing = [False, True]
    else:
        checkpointing = [config.activation_checkpointing == "true"]
    # Compiled for CUDA, inductor fuses the chunks: all logits live together, and memory grows instead of shrinking
    # (39.1 GB instead of 35.0 at 64 rows of 1,024; torch 2.15).
    fuses_chunks = setting.compiled and setting.device_type == "cuda"
    chunks = [1] if fuses_chunks else [1, LOSS_CHUNKS]
    if config.loss_chunks != "auto":
        chunks = [config.loss_chunks]
    optims = [config.optim]
    if config.optim == "auto":  # a CPU can swap instead, and an evaluation has no moments
        optims = ["adamw_torch_fused"] + [EIGHT_BIT] * (setting.device_type == "cuda" and not config.eval_only)
    return not_compiled + [
        MemoryPlan(*options, estimate_parts(config, model_config, setting, *options), setting.compiled)
        for options in itertools.product(sizes, checkpointing, chunks, optims)
    ]


def step_cost(plan: MemoryPlan, config: TrainConfig, model_config: PreTrainedConfig) -> float:
    """Return the time of a step relative to one without recomputation and with very large micro-batches.

    Forward is a third of a step's FLOPs. Checkpointing repeats it for the blocks, chunks repeat it for the logits.
    """
    blocks, head = count_block_matrices(model_config) * model_config.num_hidden_layers, count_head(model_config)
    blocks += model_config.num_hidden_layers * model_config.hidden_size * config.block_size  # attention
    repeated = blocks * plan.activation_checkpointing + head * (plan.loss_chunks > 1)
    tokens = plan.micro_batch_size * config.block_size
    return (1 + repeated / (blocks + head) / 3) * (1 + TOKENS_TO_HIDE_WEIGHTS / tokens)


def estimate_parts(
    config: TrainConfig,
    model_config: PreTrainedConfig,
    setting: Setting,
    micro_batch_size: int,
    activation_checkpointing: bool,
    loss_chunks: int,
    optim: str,
) -> dict[str, int]:
    """Estimate the bytes of each part at the moment of a step when their sum is largest.

    That is the start of backward (all activations), its end (all gradients), the first block that checkpointing
    computes again, or the optimizer's update.
    """
    operand = 4 if setting.mixed_precision == "no" else 2  # bytes of a matmul's operand
    residual = 2 if config.bf16_residual else 4
    width, num_layers = model_config.hidden_size, model_config.num_hidden_layers
    vocab_size = model_config.vocab_size
    num_parameters = count_parameters(model_config)
    head = count_head(model_config)
    tokens = micro_batch_size * config.block_size

    # Autograd keeps c_fc's output and GELU's. Without a compiler, GELU keeps three more tensors; CUDA's autocast
    # computes x^3 and all that follows in fp32, which makes them 16 bytes per value with x. The weights are cast once
    # per micro-batch.
    gelu = 2 * operand if setting.compiled else 5 * operand
    if setting.device_type == "cuda" and not setting.compiled and operand == 2:
        gelu = 18
    block = count_block_bytes(model_config, residual, operand, gelu)
    if choose_attention(config, torch.device(setting.device_type)).value == "eager":  # fp32 softmax, and its cast
        block += model_config.num_attention_heads * config.block_size * (4 if operand == 4 else 6)
    block = tokens * block + (count_block_matrices(model_config) * 2 if operand == 2 else 0)
    inputs = num_layers * tokens * width * residual
    final = tokens * width * (residual + operand)  # of the final LayerNorm
    activations = inputs + final if activation_checkpointing else num_layers * block + final

    # Compiled, the logits' gradient overwrites them. Otherwise backward holds three fp32 tensors of that size: the
    # log-softmax, its gradient and the gradient of the logits.
    logits = tokens // loss_chunks * vocab_size * (operand if setting.compiled else 12)
    kept = setting.num_processes > 1 or micro_batch_size < config.global_batch_size  # from earlier micro-batches
    kept_gradients = 4 * num_parameters if kept else 0
    # A compiled backward returns all gradients at once, next to those of earlier micro-batches or DDP's buckets.
    new_gradients = 4 * num_parameters if setting.compiled or not kept else 0
    head_copies = 4 * head + (2 * head if operand == 2 else 0)  # its gradient, and its weights as an operand
    if setting.compiled and loss_chunks > 1:  # inductor adds the chunks' gradients of the head at the end
        head_copies += loss_chunks * operand * head  # with 30 M parameters, 1.64 GB were measured instead of 1.30
    temporary = 4 * num_parameters if optim == "adamw_torch" and setting.device_type == "cuda" else 4 * head
    if optim == "muon":
        temporary = STACK_COPIES * 4 * min(STACK_VALUES, num_layers * count_block_matrices(model_config))
    moments = [
        {"gradients": kept_gradients, "activations": activations, "logits": logits, "workspace": head_copies},
        {"gradients": kept_gradients, "activations": inputs + block, "workspace": 4 * head},  # with checkpointing
        {"gradients": kept_gradients + new_gradients, "activations": block, "workspace": 4 * head},
        {"gradients": 4 * num_parameters, "workspace": 0 if optim == "adamw_torch_fused" else temporary},
    ]
    largest = max(moments, key=lambda parts: sum(parts.values()))
    process = PROCESS_BYTES[setting.device_type]
    parts = {
        "weights": 4 * num_parameters,
        "optimizer": optimizer_bytes(model_config, optim),
        **{"gradients": 0, "activations": 0, "logits": 0} | largest,
        "process": process + (CPU_COMPILER_BYTES if setting.compiled and setting.device_type == "cpu" else 0),
    }
    return {name: int(value) for name, value in parts.items()}


def count_block_bytes(model_config: PreTrainedConfig, residual: int, operand: int, gelu: int) -> int:
    """Return the bytes per token that autograd keeps of one block, without attention scores.

    These are LayerNorm's input twice, its two outputs, q, k, v and attention's output, and the values around GELU. A
    gated MLP counts as one without a gate and with as many parameters, which keeps as many values.
    residual, operand, gelu: bytes per value of the residual stream, of a matmul's operand, and around GELU.
    """
    width = model_config.hidden_size
    return width * (2 * residual + 6 * operand) + count_inner(model_config) * gelu


def optimizer_bytes(model_config: PreTrainedConfig, optim: str) -> int:
    """Return the bytes of AdamW's two moments: fp32, or 8 bits with an fp32 scale per 256 values for the blocks.

    With 8 bits, embeddings and tensors below 4,096 values, whose size does not matter, stay fp32. Muon has one fp32
    moment for the blocks.
    """
    num_parameters = count_parameters(model_config)
    bytes_per_value = {EIGHT_BIT: 2 * (1 + 4 / 256), "muon": 4}.get(optim, 8)
    blocks = model_config.num_hidden_layers * count_block_matrices(model_config)
    return 8 * (num_parameters - blocks) + int(bytes_per_value * blocks)
