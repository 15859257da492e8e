"""What a run takes on this machine: micro-batch, memory, tokens per second and time, estimated or measured."""

import dataclasses
import time
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from recipe.benchmark.forecast import Cluster, forecast
from recipe.benchmark.ladder import GPT2_VOCAB_SIZE
from recipe.benchmark.machine import measure_matmul
from recipe.benchmark.measure import LAP, Setting, measure
from recipe.benchmark.measured import read_measurements
from recipe.config import STANDARD_LIBRARY, TrainConfig, save_config
from recipe.errors import UserError
from recipe.hardware.check_device import DTYPES
from recipe.hardware.choices import choose_mixed_precision, choose_residual
from recipe.hardware.gpus import find_gpu
from recipe.hardware.memory import MemoryPlan, list_plans, measure_usable_bytes, plan_memory
from recipe.hardware.memory import Setting as MemorySetting
from recipe.model.size import count_flops_per_token, count_parameters
from recipe.optim.optimizers import check_optimizer

# Of the rate of large matrix products, by whether the run is compiled: 0.5 for 30 M parameters
# (scripts/benchmarks/ladder_cpu.json), 0.2 for the demo's 1 M, which is not compiled.
MATMUL_SHARES = {True: 0.5, False: 0.2}
MEASURED_SECONDS = 900.0  # at most, for --measure
RESULTS = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks"


@dataclasses.dataclass(frozen=True)
class Expectation:
    """Numbers of a run. memory_bytes: per device. None where nothing is known."""

    source: str  # "estimated" or "measured"
    plan: MemoryPlan
    memory_bytes: int
    usable_bytes: int
    tokens_per_second: float | None
    seconds_to_first_step: float | None = None

    def length(self, config: TrainConfig, num_steps: int) -> tuple[int, float] | None:
        """Return the steps of the run and their seconds, within `max_minutes`, or None if the speed is unknown."""
        if not self.tokens_per_second:
            return None
        step_seconds = config.global_batch_size * config.block_size / self.tokens_per_second
        if config.max_minutes is not None:
            num_steps = min(num_steps, max(1, int(config.max_minutes * 60 / step_seconds)))
        return num_steps, num_steps * step_seconds


def estimate_run(
    config: TrainConfig,
    model_config: PreTrainedConfig,
    device: torch.device,
    compiled: bool,
    num_processes: int,
    num_machines: int,
) -> Expectation:
    """Estimate a run. model_config: with the padded vocabulary.

    Raises `UserError` if the batch does not divide, the model does not fit, or 8-bit AdamW is not installed.
    """
    precision = choose_mixed_precision(config, device)
    residual = choose_residual(config, device, precision)
    setting = MemorySetting(device.type, precision.value, compiled, residual.on, num_processes)
    usable = measure_usable_bytes(config, device, num_processes // num_machines)
    plan = plan_memory(config, model_config, setting, usable)
    if plan is None:  # nothing leaves the margin
        plan = min(list_plans(config, model_config, setting), key=lambda plan: plan.total_bytes)
    if plan.total_bytes > usable:
        needed = f"the model needs {plan.total_bytes / 1e9:.1f} of {usable / 1e9:.1f} GB (estimated)"
        raise UserError(f"{needed}; leave the batch and memory options at auto, or use a smaller recipe")
    check_optimizer(plan.apply(config), device)
    gpu = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if gpu is not None and precision.value != "no":
        cluster = Cluster(gpu, num_processes, num_machines)
        rate = forecast(config, model_config, cluster, read_measurements(RESULTS)).tokens_per_second
    elif device.type == "mps":  # its matrix products are not timed
        rate = None
    else:
        flops_per_token = count_flops_per_token(model_config, count_parameters(model_config), config.block_size)
        share = MATMUL_SHARES[plan.compiled] * count_devices(device, num_processes, num_machines)
        rate = share * measure_matmul(device, DTYPES[precision.value]) / flops_per_token
    return Expectation("estimated", plan, plan.total_bytes, usable, rate)


def count_devices(device: torch.device, num_processes: int, num_machines: int) -> int:
    """Return how many times as fast as one device the run is: the processes of a CPU share its cores."""
    return num_machines if device.type == "cpu" else num_processes


def measure_run(
    config: TrainConfig, estimate: Expectation, num_devices: int, has_data: bool, work: Path
) -> Expectation:
    """Train a few steps of one or two micro-batches in a fresh process, and return their numbers.

    Without data the standard library's text stands in. Several devices are expected to be as many times as fast.
    Raises `UserError` if the run fails.
    """
    options = {"max_minutes": None, "num_train_epochs": None, "max_steps": 10**6, "warmup_steps": 0}
    options |= {"eval_on_start": False, "eval_steps": 0, "save_steps": 0, "logging_steps": LAP, "eval_tasks": None}
    options |= {"push_to_hub": False, "report_to": None, "resume_from_checkpoint": None, "profile": None}
    if not has_data:
        text = {"dataset_name": STANDARD_LIBRARY, "tokenizer_vocab_size": GPT2_VOCAB_SIZE}
        options |= {"dataset_dir": None, "validation_split_percentage": 0.5, **text}
    rows = estimate.plan.micro_batch_size
    steps = min(2 * rows, config.global_batch_size)
    path = work / "recipe.yaml"
    save_config(dataclasses.replace(config, **options), path)
    setting = Setting("", {"config": path}, {}, 0, config.block_size, 0, rows, steps)
    numbers = measure({}, setting, LAP, work, time.monotonic() + MEASURED_SECONDS)
    if "failed" in numbers:
        raise UserError(f"training a few steps failed: {numbers['failed']}")
    return dataclasses.replace(
        estimate,
        source="measured",
        memory_bytes=numbers["peak_memory_bytes"],
        tokens_per_second=numbers["tokens_per_second"] * num_devices,
        seconds_to_first_step=numbers["seconds_to_first_step"],
    )
