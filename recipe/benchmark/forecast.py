"""Forecast a run on GPUs that need not be there: memory, communication, throughput, time, energy and cost.

Throughput is measured if a result file has this model on this GPU. Otherwise it is estimated: matrix products at a
share of the peak, then everything else at a share of the memory bandwidth. On an H100 this gives 455,000 tokens/s for
124M and 44,000 for 1558M. Published, for each of eight: 463,000 with llm.c's PyTorch trainer (10 B tokens in 45
minutes, modded-nanogpt's README) and 48,500 with llm.c (32,000 steps of 1,048,576 tokens in 24 hours, discussion 677).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from recipe.benchmark.ladder import GPT2_VOCAB_SIZE
from recipe.benchmark.measured import Measurement, find_measurement
from recipe.command_line import load_config, names_data
from recipe.config import TrainConfig
from recipe.data.packed import open_packed_dataset
from recipe.errors import UserError
from recipe.hardware.choices import Choice, choose_residual
from recipe.hardware.gpus import Gpu
from recipe.hardware.memory import MemoryPlan, Setting, count_block_bytes, plan_memory
from recipe.model.build import build_model_config
from recipe.model.size import (
    count_block_matrices,
    count_flops_per_token,
    count_head,
    count_inner,
    count_parameters,
    padded_vocab_size,
)
from recipe.optim.muon import NUM_ITERATIONS
from recipe.run.plan import resolve_max_steps

# Shares of the data sheet's rates. Large matrix products reach 0.6 to 0.8 of the peak, GPT-2's smaller ones less. A
# board of up to 75 W lowers its clock within seconds (T4: Jia et al., arXiv:1903.07486).
MATMUL_SHARE, THROTTLED_MATMUL_SHARE, THROTTLED_WATTS = 0.6, 0.35, 75
BANDWIDTH_SHARE = 0.8
LINK_SHARE = 0.8  # of NVLink, PCIe or the network, in large all-reduces
# Each saved activation is written and read in forward, read in backward, and its gradient is written and read.
# Recomputing it repeats forward. Without inductor nothing is fused: nanoGPT reports 250 ms a step, and 135 with it.
PASSES, RECOMPUTED_PASSES, EAGER_TIMES = 5, 2, 5
MICRO_BATCH_BYTES = 20  # per parameter: read the fp32 weight and write it as bf16, write a gradient and accumulate it
STEP_BYTES = 40  # per parameter: AdamW reads four fp32 tensors and writes three; clipping takes three more passes
# Per value of a matrix, and more than AdamW's: Muon's stacks are read or written 38 times in fp32, AdamW's tensors 7.
MUON_STEP_BYTES = (38 - 7) * 4
BACKWARD_SHARE = 2 / 3  # of a micro-batch's time
NODE_GPUS = 8
NO_DATASET = "DIR"  # stands for a packed dataset that is not there


@dataclass(frozen=True)
class Cluster:
    """node_bandwidth_gbps: of the network of a node, in Gbit/s and one direction, shared by its GPUs."""

    gpu: Gpu
    num_gpus: int = 1
    num_nodes: int = 1
    node_bandwidth_gbps: float = 100.0

    @property
    def ring_bytes_per_second(self) -> float:
        """A ring passes through every link, so its slowest link bounds it."""
        network = self.node_bandwidth_gbps * 1e9 / 8
        link = self.gpu.link_bytes_per_second
        return LINK_SHARE * (min(link, network) if self.num_nodes > 1 else link)


@dataclass(frozen=True)
class Forecast:
    """What a run takes. Bytes and seconds of the all-reduce are per GPU and step; energy is at the boards' limit."""

    num_gpus: int
    num_nodes: int
    plan: MemoryPlan
    num_micro_batches: int
    num_rows: int  # the global batch
    tokens_per_step: int
    num_steps: int
    allreduce_bytes: float
    allreduce_seconds: float
    exposed_seconds: float  # of the all-reduce, not hidden behind backward
    step_seconds: float
    tokens_per_second: float
    mfu: float
    gpu_hours: float
    energy_kwh: float
    measurement: Measurement | None

    @property
    def is_measured(self) -> bool:
        """Whether throughput is measured; several GPUs add an estimate of their communication, Muon of its step."""
        return self.measurement is not None and self.num_gpus == 1 and self.plan.optim != "muon"

    @property
    def days(self) -> float:
        return self.gpu_hours / self.num_gpus / 24


def load_run(recipe: str, options: list[str]) -> tuple[TrainConfig, PreTrainedConfig]:
    """Return the run's config and its model's, with the padded vocabulary. A recipe needs no data to be planned."""
    arguments = ["--config", recipe, *options]
    if not names_data(recipe, options):
        arguments += ["--dataset_dir", NO_DATASET]
    config = load_config(arguments)[0]
    vocab_size = config.tokenizer_vocab_size or GPT2_VOCAB_SIZE
    if config.dataset_dir not in (None, NO_DATASET):
        dataset = open_packed_dataset(Path(config.dataset_dir), config.block_size)
        vocab_size, config = dataset.vocab_size, resolve_max_steps(config, len(dataset.splits["train"]))
    elif config.num_train_epochs is not None:
        raise UserError("num_train_epochs needs the size of the dataset; pass --dataset_dir or --max_steps")
    model_config = build_model_config(config, vocab_size, 0, config.model_name_or_path)
    model_config.vocab_size = padded_vocab_size(model_config.vocab_size, config.pad_vocab_to_multiple_of)
    return config, model_config


def forecast(
    config: TrainConfig,
    model_config: PreTrainedConfig,
    cluster: Cluster,
    measurements: Sequence[Measurement] = (),
) -> Forecast:
    """Forecast the training steps of a run, without evaluation (about 2%) and checkpoints.

    model_config: with the padded vocabulary. Raises `UserError` if the batch does not divide or nothing fits.
    """
    gpu, num_gpus = cluster.gpu, cluster.num_gpus
    setting = resolve_setting(config, gpu, num_gpus)
    usable = min(gpu.memory_bytes, (config.gpu_memory_limit_gb or math.inf) * 1e9)
    plan = plan_memory(config, model_config, setting, usable)
    if plan is None:
        remedy = "use a GPU with more memory or a smaller recipe, and leave the batch and memory options at auto"
        raise UserError(f"the model does not fit into {usable / 1e9:.1f} GB ({gpu.name}); {remedy}")
    setting = replace(setting, compiled=plan.compiled)
    num_micro_batches = config.global_batch_size // (num_gpus * plan.micro_batch_size)
    tokens_per_step = config.global_batch_size * config.block_size
    num_parameters = count_parameters(model_config)
    # Measurements have the recipe's defaults, which recompute nothing.
    is_default = setting.compiled and not plan.activation_checkpointing and plan.loss_chunks == 1
    measurement = find_measurement(measurements if is_default else (), gpu, num_parameters, config.block_size)
    if measurement is None:
        compute_seconds = estimate_compute_seconds(
            model_config, config.block_size, plan, setting, gpu, num_micro_batches
        )
    else:
        compute_seconds = tokens_per_step / num_gpus / measurement.tokens_per_second
    num_bytes = ring_bytes(num_parameters * (2 if config.ddp_comm_hook == "bf16" else 4), num_gpus)
    allreduce_seconds = num_bytes / cluster.ring_bytes_per_second
    # A compiled backward returns all gradients at its end, so nothing hides their all-reduce: in twelve linear layers
    # the first gradient is ready after 97% of backward, and after 10% if not compiled (torch 2.13, CPU).
    hidden = 0 if setting.compiled else BACKWARD_SHARE * compute_seconds / num_micro_batches
    exposed_seconds = max(0.0, allreduce_seconds - hidden)
    step_seconds = compute_seconds + exposed_seconds
    if plan.optim == "muon":
        step_seconds += estimate_muon_seconds(model_config, cluster)
    tokens_per_second = tokens_per_step / step_seconds
    flops_per_token = count_flops_per_token(model_config, num_parameters, config.block_size)
    num_steps = config.max_steps
    if config.max_minutes is not None:
        num_steps = min(num_steps, max(1, int(config.max_minutes * 60 / step_seconds)))
    gpu_hours = num_gpus * num_steps * step_seconds / 3600
    return Forecast(
        num_gpus=num_gpus,
        num_nodes=cluster.num_nodes,
        plan=plan,
        num_micro_batches=num_micro_batches,
        num_rows=config.global_batch_size,
        tokens_per_step=tokens_per_step,
        num_steps=num_steps,
        allreduce_bytes=num_bytes,
        allreduce_seconds=allreduce_seconds,
        exposed_seconds=exposed_seconds,
        step_seconds=step_seconds,
        tokens_per_second=tokens_per_second,
        mfu=tokens_per_second * flops_per_token / (num_gpus * gpu.flops_per_second),
        gpu_hours=gpu_hours,
        energy_kwh=gpu_hours * gpu.watts / 1e3,
        measurement=measurement,
    )


def resolve_setting(config: TrainConfig, gpu: Gpu, num_gpus: int) -> Setting:
    """Return what `auto` resolves to on a GPU that is not there."""
    precision = config.mixed_precision
    if precision == "auto":
        precision = "bf16" if gpu.bf16 else "fp16"
    elif precision == "no":
        raise UserError("the table of GPUs has no fp32 rates; remove --mixed_precision no to plan the run")
    elif precision == "bf16" and not gpu.bf16:
        raise UserError(f"{gpu.name} has no bf16 matrix units; use --mixed_precision fp16 or auto")
    residual = choose_residual(config, torch.device("cuda"), Choice(precision, f"planned for {gpu.name}"))
    compiled = config.dynamo_backend in ("auto", "inductor")
    return Setting("cuda", precision, compiled, residual.on, num_gpus)


def estimate_compute_seconds(
    model_config: PreTrainedConfig,
    block_size: int,
    plan: MemoryPlan,
    setting: Setting,
    gpu: Gpu,
    num_micro_batches: int,
) -> float:
    """Estimate the seconds of an optimizer step on one GPU, without communication."""
    num_parameters = count_parameters(model_config)
    residual, operand = (2 if setting.bf16_residual else 4), 2
    block_bytes = model_config.num_hidden_layers * count_block_bytes(model_config, residual, operand, 2 * operand)
    logit_bytes = operand * model_config.vocab_size
    traffic = PASSES * (block_bytes + logit_bytes)
    traffic += RECOMPUTED_PASSES * (plan.activation_checkpointing * block_bytes + (plan.loss_chunks > 1) * logit_bytes)
    traffic *= 1 if setting.compiled else EAGER_TIMES
    num_tokens = plan.micro_batch_size * num_micro_batches * block_size
    weights = num_parameters * (MICRO_BATCH_BYTES * num_micro_batches + STEP_BYTES)
    share = THROTTLED_MATMUL_SHARE if gpu.watts <= THROTTLED_WATTS else MATMUL_SHARE
    flops = num_tokens * count_executed_flops(model_config, block_size, plan)
    matmul_seconds = flops / (share * gpu.flops_per_second)
    return matmul_seconds + (num_tokens * traffic + weights) / (BANDWIDTH_SHARE * gpu.memory_bytes_per_second)


def estimate_muon_seconds(model_config: PreTrainedConfig, cluster: Cluster) -> float:
    """Estimate what Muon adds to AdamW's step: passes over its stacks, products, and the exchange of the updates.

    The matrices are taken to be GPT-2's: four for attention and two for the MLP.

    An iteration takes 4 m^2 n + 2 m^3 FLOPs for a matrix of m x n, m <= n. The GPUs share them, and each gathers the
    others' updates in bf16.
    """
    gpu, num_gpus = cluster.gpu, cluster.num_gpus
    width, inner = model_config.hidden_size, count_inner(model_config)
    m, n = sorted((width, inner))
    flops = model_config.num_hidden_layers * NUM_ITERATIONS * (4 * 6 * width**3 + 2 * (4 * m**2 * n + 2 * m**3))
    num_values = model_config.num_hidden_layers * count_block_matrices(model_config)
    return (
        num_values * MUON_STEP_BYTES / (BANDWIDTH_SHARE * gpu.memory_bytes_per_second)
        + flops / num_gpus / (MATMUL_SHARE * gpu.flops_per_second)
        + (num_gpus - 1) / num_gpus * 2 * num_values / cluster.ring_bytes_per_second
    )


def count_executed_flops(model_config: PreTrainedConfig, block_size: int, plan: MemoryPlan) -> float:
    """Return the FLOPs per trained token with those of recomputation, which MFU does not count.

    Activation checkpointing repeats the blocks' forward pass, without the MLP's second matrix, whose output backward
    does not need. Loss chunks repeat the forward pass of the output matrix.
    """
    flops = count_flops_per_token(model_config, count_parameters(model_config), block_size)
    width, inner = model_config.hidden_size, count_inner(model_config)
    head = 6 * count_head(model_config)
    blocks_again = (flops - head) / 3 - 2 * model_config.num_hidden_layers * width * inner
    return flops + plan.activation_checkpointing * blocks_again + (plan.loss_chunks > 1) * head / 3


def ring_bytes(num_bytes: float, num_gpus: int) -> float:
    """Return the bytes that each GPU sends when a ring of them sums `num_bytes`: to scatter, then to gather."""
    return 2 * (num_gpus - 1) / num_gpus * num_bytes


def scaling(
    config: TrainConfig,
    model_config: PreTrainedConfig,
    cluster: Cluster,
    weak: bool,
    measurements: Sequence[Measurement] = (),
) -> dict[int, Forecast | str]:
    """Forecast 1 to 64 GPUs, in nodes as large as the cluster's. Returns the forecast of each, or why there is none.

    weak: the global batch grows with the GPUs, and fewer steps train on the same number of tokens.
    """
    per_node = cluster.num_gpus // cluster.num_nodes if cluster.num_nodes > 1 else max(NODE_GPUS, cluster.num_gpus)
    share, runs = config.global_batch_size // cluster.num_gpus, {}
    for num_gpus in (1, 2, 4, 8, 16, 32, 64):
        size = replace(cluster, num_gpus=num_gpus, num_nodes=-(-num_gpus // per_node))
        run = config
        if weak:
            num_steps = max(1, round(config.max_steps * cluster.num_gpus / num_gpus))
            run = replace(config, global_batch_size=share * num_gpus, max_steps=num_steps)
        try:
            runs[num_gpus] = forecast(run, model_config, size, measurements)
        except UserError as error:  # the batch does not divide, or does not fit
            runs[num_gpus] = str(error)
    return runs
