"""Fit a step into the memory of a device, by an estimate. recipe/hardware/trial.py tries it.

The estimate is arithmetic on the shape of the model, so that scripts/plan_run.py can plan for devices that are not
there. The global batch never changes: gradient accumulation makes up for a smaller micro-batch (sequences per forward
pass).
"""

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedConfig

from recipe.config import TrainConfig
from recipe.errors import UserError, plural
from recipe.hardware.choices import CUDA_GRAPH_MODES, Machine
from recipe.hardware.host_memory import available_bytes, total_bytes
from recipe.hardware.sharding import Sharding
from recipe.model.size import count_block_matrices, count_head, count_inner, count_parameters
from recipe.optim.muon import STACK_COPIES, STACK_VALUES

USABLE_SHARE = 0.92  # of a device's memory; the rest covers fragmentation and errors of the estimate
PROCESS_BYTES = 0.5e9  # the CUDA context with cuBLAS and cuDNN, or Python with torch and Transformers
# Tokens per forward pass whose matmuls take as long as one pass over weights and gradients. Per parameter, a
# micro-batch moves 20 bytes (fp32 weight read and cast, bf16 copy read, gradient written and accumulated) and computes
# 6 FLOPs per token; a GPU computes about 150 FLOPs in the time that it moves a byte (H100: 450 TFLOP/s, 3.35 TB/s).
TOKENS_TO_HIDE_WEIGHTS = 20 / 6 * 150
# The same with shards: a micro-batch exchanges 12 bytes per parameter, to gather it for forward and backward and to
# reduce its gradient. A GPU computes about 1,500 FLOPs in the time that it exchanges a byte over NVLink (H100: 450
# TFLOP/s, 300 GB/s), and 4,000 over PCIe (RTX 4090: 80 TFLOP/s, 20 GB/s). Not measured.
TOKENS_TO_HIDE_SHARDS = 12 / 6 * 3000
# More tokens per forward pass should not increase throughput: 64 rows of 1,024 already saturate a GPU, and a CPU's
# caches fill earlier.
LARGEST_MICRO_BATCH_TOKENS = {"cpu": 4096, "accelerator": 65536}
LOSS_CHUNKS = 8


@dataclass(frozen=True)
class MemoryPlan:
    """The options that decide how much memory a step takes, and its estimated peak in bytes per device."""

    micro_batch_size: int
    activation_checkpointing: bool
    loss_chunks: int
    parts: Mapping[str, float] = field(default_factory=dict)  # bytes of weights, gradients, ...: see `estimate_parts`
    usable_bytes: int = 0
    num_shards: int = 1

    @property
    def total_bytes(self) -> int:
        return int(sum(self.parts.values()))

    @property
    def options(self) -> dict[str, int]:
        """The options that must match for a bit-exact resume on the same number of processes."""
        names = ("micro_batch_size", "activation_checkpointing", "loss_chunks")
        shards = {"num_shards": self.num_shards} if self.num_shards > 1 else {}
        return {name: int(getattr(self, name)) for name in names} | shards

    def apply(self, config: TrainConfig, num_processes: int) -> TrainConfig:
        """Return the config with these options in place of `auto`; accumulation makes up the global batch."""
        return dataclasses.replace(
            config,
            per_device_train_batch_size=self.micro_batch_size,
            gradient_accumulation_steps=config.global_batch_size // (self.micro_batch_size * num_processes),
            activation_checkpointing=str(self.activation_checkpointing).lower(),
            loss_chunks=self.loss_chunks,
        )

    def describe(self) -> str:
        savings = []
        if self.activation_checkpointing:
            savings.append("activation checkpointing")
        if self.loss_chunks > 1:
            savings.append(f"the loss in {self.loss_chunks} chunks")
        options = " and ".join(savings) or "no recomputation"
        return f"{self.total_bytes / 1e9:.1f} of {self.usable_bytes / 1e9:.1f} GB, estimated, with {options}"


def micro_batch_sizes(config: TrainConfig, machine: Machine) -> list[int]:
    """Return the possible micro-batch sizes, largest first. Each divides the sequences of one process.

    Raises `UserError`, naming the sizes that would work, if the configured sizes do not divide the batch, or if CUDA
    graphs would accumulate gradients.
    """
    num_processes = machine.num_processes
    share, rest = divmod(config.global_batch_size, num_processes)
    if rest:
        below = config.global_batch_size - rest
        above = below + num_processes
        raise UserError(
            f"global_batch_size {config.global_batch_size} is not divisible by {num_processes} processes; "
            "pass --global_batch_size " + (f"{below} or {above}" if below else f"{above}")
        )
    divisors = [size for size in range(share, 0, -1) if share % size == 0]
    accumulation = config.gradient_accumulation_steps
    wanted = config.per_device_train_batch_size
    if accumulation is not None and wanted not in ("auto", share / accumulation):
        raise UserError(
            f"{plural(num_processes, 'process', 'es')} x per_device_train_batch_size {wanted} x "
            f"gradient_accumulation_steps {accumulation} is not global_batch_size {config.global_batch_size}; remove "
            "one of them"
        )
    for name, value in (("gradient_accumulation_steps", accumulation), ("per_device_train_batch_size", wanted)):
        if isinstance(value, int) and value not in divisors:
            raise UserError(
                f"{name} {value} does not divide the {share} sequences of each process (global_batch_size "
                f"{config.global_batch_size} / {num_processes}); use one of {', '.join(map(str, sorted(divisors)))}, "
                f"or --global_batch_size {value * num_processes}"
            )
    if accumulation is not None:
        wanted = share // accumulation
    limit = LARGEST_MICRO_BATCH_TOKENS["cpu" if machine.device_type == "cpu" else "accelerator"]
    sizes = [n for n in divisors if n * config.block_size <= limit] or [1]
    if isinstance(wanted, int):
        sizes = [wanted]
    if not uses_cuda_graphs(config, machine):
        return sizes
    if sizes[0] != share:
        raise UserError(
            f"dynamo_mode {machine.launcher_mode} uses CUDA graphs, which accumulate gradients incorrectly "
            f"(pytorch#96693): a step must be one micro-batch of {share} sequences per process, not of {sizes[0]}; "
            f"launch with --dynamo_mode default, or, if they fit, pass --per_device_train_batch_size {share}"
        )
    return [share]


def smaller_micro_batches(config: TrainConfig, size: int, machine: Machine) -> list[int]:
    """Return the sizes of at most half that divide the batch, largest first; none where the size is not `auto`."""
    share = config.global_batch_size // machine.num_processes
    is_fixed = config.per_device_train_batch_size != "auto" or config.gradient_accumulation_steps is not None
    if is_fixed or uses_cuda_graphs(config, machine):
        return []
    return [smaller for smaller in range(size // 2, 0, -1) if share % smaller == 0]


def uses_cuda_graphs(config: TrainConfig, machine: Machine) -> bool:
    """Return whether inductor records CUDA graphs, which are correct only with one micro-batch per step.

    Every replay of a graph writes gradients to the same memory, so the gradients of earlier micro-batches are lost,
    with an error (pytorch#169545) or without one (pytorch#96693; both issues are open).
    """
    compiles = machine.device_type == "cuda" and config.dynamo_backend.startswith(("auto", "inductor"))
    return compiles and machine.launcher_mode in CUDA_GRAPH_MODES


def plan_memory(
    config: TrainConfig, model_config: PreTrainedConfig, machine: Machine, usable_bytes: float
) -> MemoryPlan | None:
    """Return the fastest options that fit into `usable_bytes`, by estimate, or None if none do.

    config: with the choices for the device; what is not `auto` stays. model_config: with the padded vocabulary.
    usable_bytes: of the device, without what other programs use; a margin is left.
    """
    plans = list_plans(config, model_config, machine, usable_bytes)
    fitting = [plan for plan in plans if plan.total_bytes <= USABLE_SHARE * usable_bytes]
    return min(fitting, key=lambda plan: step_cost(plan, config, model_config, machine.sharding), default=None)


def choose_plan(
    config: TrainConfig,
    model_config: PreTrainedConfig,
    machine: Machine,
    usable_bytes: int,
    earlier: dict[str, int] | None = None,
) -> MemoryPlan:
    """Return the plan of a run.

    An estimate never refuses a run: if nothing fits, the options that take the least memory are tried. usable_bytes:
    by one process, the least of all. earlier: the checkpoint's `MemoryPlan.options`, kept if they fit, because free
    memory differs between starts.
    """
    plans = list_plans(config, model_config, machine, usable_bytes)
    kept = [plan for plan in plans if plan.options == earlier and plan.total_bytes <= usable_bytes]
    plan = kept[0] if kept else plan_memory(config, model_config, machine, usable_bytes)
    return plan or min(plans, key=lambda plan: plan.total_bytes)


def measure_usable_bytes(device: torch.device, num_local_processes: int) -> int:
    """Return the memory that one process of the run may use on its device: what is free, and what it holds already."""
    if device.type == "cuda":
        usable = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        return usable + int(PROCESS_BYTES)  # the context, which the estimate counts and this does not
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    return available_bytes() // num_local_processes


def measure_total_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return total_bytes()


def list_plans(
    config: TrainConfig, model_config: PreTrainedConfig, machine: Machine, usable_bytes: float
) -> list[MemoryPlan]:
    """Return every combination of options that the config leaves open, with its estimate."""
    checkpointing = [False, True]
    chunks = [1, LOSS_CHUNKS]
    if config.activation_checkpointing != "auto":
        checkpointing = [config.activation_checkpointing == "true"]
    if isinstance(config.loss_chunks, int):
        chunks = [config.loss_chunks]
    sizes = micro_batch_sizes(config, machine)
    num_shards = machine.sharding.num_shards if machine.sharding else 1
    plans = [
        MemoryPlan(*options, num_shards=num_shards) for options in itertools.product(sizes, checkpointing, chunks)
    ]
    return [
        dataclasses.replace(
            plan, parts=estimate_parts(plan, config, model_config, machine), usable_bytes=int(usable_bytes)
        )
        for plan in plans
    ]


def step_cost(
    plan: MemoryPlan, config: TrainConfig, model_config: PreTrainedConfig, sharding: Sharding | None = None
) -> float:
    """Return the time of a step relative to one without recomputation and with very large micro-batches.

    Forward is a third of a step's FLOPs. Checkpointing repeats it for the blocks, chunks repeat it for the logits.
    """
    head = count_head(model_config)
    blocks = count_block_matrices(model_config) * model_config.num_hidden_layers
    blocks += model_config.num_hidden_layers * model_config.hidden_size * config.block_size  # attention
    repeated = 0
    if plan.activation_checkpointing:
        repeated += blocks
    if plan.loss_chunks > 1:
        repeated += head
    hidden = TOKENS_TO_HIDE_SHARDS if sharding else TOKENS_TO_HIDE_WEIGHTS
    return (1 + repeated / (blocks + head) / 3) * (1 + hidden / (plan.micro_batch_size * config.block_size))


def estimate_bytes(plan: MemoryPlan, config: TrainConfig, model_config: PreTrainedConfig, machine: Machine) -> int:
    """Return the sum of `estimate_parts`."""
    return int(sum(estimate_parts(plan, config, model_config, machine).values()))


def estimate_parts(
    plan: MemoryPlan, config: TrainConfig, model_config: PreTrainedConfig, machine: Machine
) -> dict[str, float]:
    """Estimate the bytes of a step at its peak, by what they hold. The peak is the largest of a few moments.

    On CUDA, dry runs of whole runs agree within 5% if compiled and 1% if not (scripts/benchmarks/memory_gpu.json). A
    gated MLP counts as a plain one with as many parameters.
    """
    device_type = machine.device_type
    num_processes = machine.num_processes
    sharding = machine.sharding
    compiled = config.dynamo_backend.startswith("inductor")
    operand = 4 if config.mixed_precision == "no" else 2  # bytes of a matmul's operand
    residual = 2 if config.bf16_residual else 4
    width = model_config.hidden_size
    inner = count_inner(model_config)
    num_layers = model_config.num_hidden_layers
    num_parameters = count_parameters(model_config)
    matrices = count_block_matrices(model_config)
    head = count_head(model_config)
    tokens = plan.micro_batch_size * config.block_size
    chunks = plan.loss_chunks

    # Bytes that a block keeps for backward: inputs and outputs of its two LayerNorms, q, k, v, and the outputs of
    # attention, c_fc and GELU. A GELU of several operators keeps three more tensors, which CUDA's autocast makes fp32.
    fused = compiled or getattr(model_config, "activation_function", None) == "gelu_pytorch_tanh"
    if fused:
        gelu = 2 * operand
    elif device_type == "cuda" and operand == 2:
        gelu = 16
    else:
        gelu = 5 * operand
    block = width * (2 * residual + 6 * operand) + inner * gelu
    if config.attn_implementation == "eager":  # fp32 softmax, and its cast
        block += model_config.num_attention_heads * config.block_size * (4 if operand == 4 else 6)
    block *= tokens
    casts = 2 * matrices if operand == 2 else 0  # of weights
    temporary = tokens * (operand * (inner + 6 * width) if compiled else 10 * inner)  # gradients inside a block
    final = tokens * width * (residual + operand)
    if plan.activation_checkpointing:
        activations = num_layers * tokens * width * residual  # the inputs of the blocks
        copies = 0
    else:
        activations = num_layers * block
        copies = num_layers * casts

    # Compiled, the logits' gradient overwrites them. Otherwise backward holds three fp32 tensors of that size. Chunks
    # add up the gradient of the output matrix in fp32: the sums before and after, and the chunk's gradient.
    num_logits = tokens // chunks * model_config.vocab_size
    logits = num_logits * (operand if compiled else 12) + (operand + 2) * head
    if chunks > 1:
        logits = max(logits + 4 * head, 12 * head)
    again = temporary + (block + casts if plan.activation_checkpointing else 0)
    if sharding is None:
        num_shards = 1
        root = 0
        gathered = 0
        parts = 0
        kept = 0
        if plan.micro_batch_size * num_processes < config.global_batch_size:  # gradients of earlier micro-batches
            kept += 4 * num_parameters
        if num_processes > 1:  # DDP's buckets
            kept += 4 * num_parameters
        # A compiled backward returns all gradients at once, next to those that are kept.
        new = 4 * num_parameters if compiled or not kept else 0
    else:
        # Not sharded: the parameters outside the blocks, at the end twice their gradients, and in a block's backward
        # its and the next block's parameters, its gradients, and the previous block's, which are being reduced.
        num_shards = sharding.num_shards
        root = 4 * (num_parameters - num_layers * matrices)
        if sharding.reshard_after_forward:
            gathered = root
            parts = 16 * matrices
        else:
            gathered = 4 * num_parameters
            parts = 8 * matrices
        kept = 4 * num_parameters / num_shards
        new = 2 * root
    update = update_bytes(model_config, config.optim, device_type, num_shards)
    moments = [  # weights besides the fp32 ones, gradients, activations, logits, optimizer
        (gathered + copies, kept, activations + final, logits, 0),  # the start of backward
        (gathered + copies, kept + parts + 4 * head, activations + again, 0, 0),  # the last block
        (0, kept + root + new, block + casts + temporary, 0, 0),  # the end of backward
        (0, 4 * num_parameters / num_shards, 0, 0, update),  # the optimizer
    ]
    if sharding:  # evaluation, which gathers them
        moments.append((4 * num_parameters, 0, 0, num_logits * (operand if compiled else 8), 0))
    weights, gradients, activations, logits, update = max(moments, key=sum)
    return {
        "weights": weights + 4 * num_parameters / num_shards,
        "gradients": gradients,
        "optimizer": update + optimizer_bytes(model_config, config.optim) / num_shards,
        "activations": activations,
        "logits": logits,
        "context": PROCESS_BYTES,
    }


def update_bytes(model_config: PreTrainedConfig, optim: str, device_type: str, num_shards: int = 1) -> int:
    """Return the temporary memory of an optimizer's update."""
    if optim == "muon":
        blocks = model_config.num_hidden_layers * count_block_matrices(model_config)
        return STACK_COPIES * 4 * min(STACK_VALUES, blocks // num_shards)
    return 4 * count_parameters(model_config) // num_shards if optim == "adamw_torch" and device_type == "cuda" else 0


def optimizer_bytes(model_config: PreTrainedConfig, optim: str) -> int:
    """Return the bytes of AdamW's two moments: fp32, or 8 bits with an fp32 scale per 256 values for the blocks.

    With 8 bits, embeddings and tensors below 4,096 values, whose size does not matter, stay fp32. Muon has one fp32
    moment for the blocks.
    """
    num_parameters = count_parameters(model_config)
    bytes_per_value = {"adamw_bnb_8bit": 2 * (1 + 4 / 256), "muon": 4}.get(optim, 8)
    blocks = model_config.num_hidden_layers * count_block_matrices(model_config)
    return 8 * (num_parameters - blocks) + int(bytes_per_value * blocks)
