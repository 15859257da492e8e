"""What every `auto` of precision, compilation, attention and threads becomes: pure functions of facts.

The option decides first, then the launcher, the checkpoint that the run continues, and the kind of device. The rest is
measured (recipe/hardware/probe.py). Noise in a measurement must not change the numbers of a run, so a resumed run
keeps what was measured for it.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recipe.config import TrainConfig
from recipe.errors import UserError
from recipe.hardware.probe import Measured
from recipe.hardware.sharding import Sharding

# bf16 has to be faster by this factor, because fp32 is more exact. So has plain attention, because it takes more
# memory.
MARGIN = 1.1
REGIONAL = "inductor_regional"
# Compiling the blocks pays on a CPU in runs whose products take longer at the measured rate; in seconds, not FLOPs,
# because a faster machine also compiles faster. In bf16 on two EPYC cores (Zen 4), the demo breaks even with 66 s.
COMPILE_PAYS_SECONDS = 70.0
PRODUCTS_SHARE = 0.4  # of the time of an uncompiled step there, for a run that is limited by its minutes only
ONE_PER_CPU = "one per CPU"  # nothing to choose
SAME_REASON = "as in the checkpoint"
DYNAMO_MODES = ("default", "lite", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
OF_A_MACHINE = {"has_bf16", "why_no_inductor", "typed_threads", "thread_counts"}  # may differ between machines
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


@dataclass(frozen=True)
class Choice:
    """A resolved value and the reason for it."""

    value: str
    reason: str


def in_words(label: str, value: str) -> str:
    """Return a choice as people say it; Accelerate's word for fp32, and for what is not compiled, is "no"."""
    if value != "no":
        return value
    return {"precision": "fp32", "dynamo": "not compiled"}.get(label, value)


@dataclass(frozen=True)
class Machine:
    """What the choices depend on besides the options and the measurement."""

    device_type: str
    num_processes: int = 1
    sharding: Sharding | None = None  # None: every process has the whole model
    launcher_precision: str = "no"
    launcher_backend: str = "no"
    launcher_mode: str = "default"
    has_bf16: bool = True  # whether the matrix units of a CUDA device have it
    why_no_inductor: str | None = None
    typed_threads: int | None = None  # of a process on a CPU
    thread_counts: tuple[int, ...] = (1,)  # that make sense for a process: one per core, one per CPU
    total_flops: float = math.inf  # of the run; infinite if only its time is limited
    kept: Mapping[str, Any] = field(default_factory=dict)  # the choices that the checkpoint recorded


def combine(parts: Sequence[Machine]) -> Machine:
    """Return what all processes have in common: the abilities that each has, and the smallest numbers."""
    return dataclasses.replace(
        parts[0],
        has_bf16=all(part.has_bf16 for part in parts),
        why_no_inductor=next(filter(None, (part.why_no_inductor for part in parts)), None),
        typed_threads=min(filter(None, (part.typed_threads for part in parts)), default=None),
        thread_counts=min(part.thread_counts for part in parts),
    )


def list_kept(machine: Machine) -> Mapping[str, Any]:
    """Return the checkpoint's choices; {} if it is of another kind of device."""
    return machine.kept if machine.kept.get("device_type") == machine.device_type else {}


def settle(config: TrainConfig, machine: Machine) -> dict[str, Choice]:
    """Return the choices that take no measurement, by label. Raises `UserError` for those that cannot work."""
    is_cpu = machine.device_type == "cpu"
    is_cuda = machine.device_type == "cuda"
    kept = list_kept(machine)
    precision = kept.get("mixed_precision")
    backend = kept.get("dynamo_backend")
    attention = kept.get("attn_implementation")
    num_threads = kept.get("num_threads")
    can_be_kept = precision in ("no", "fp16") or (precision == "bf16" and machine.has_bf16)
    bf16_reason = "the GPU has bf16 matrix units"
    if not machine.has_bf16:
        bf16_reason = "the GPU has no bf16 units; gradients are scaled"
    first_that_holds = {
        "precision": (
            (config.mixed_precision != "auto", config.mixed_precision, "requested by --mixed_precision"),
            (machine.launcher_precision != "no", machine.launcher_precision, "set by the launcher"),
            (is_cuda and can_be_kept, precision, SAME_REASON),
            (is_cuda, "bf16" if machine.has_bf16 else "fp16", bf16_reason),
        ),
        "dynamo": (
            (config.dynamo_backend != "auto", config.dynamo_backend, "requested by --dynamo_backend"),
            (machine.launcher_backend != "no", machine.launcher_backend, "set by the launcher"),
            (machine.why_no_inductor, "no", machine.why_no_inductor),
            (backend, backend, SAME_REASON),
            (is_cuda, "inductor", "the default on CUDA"),
            (not is_cpu, "no", f"not tried on {machine.device_type}"),
        ),
        "attention": (
            (config.attn_implementation != "auto", config.attn_implementation, "requested by --attn_implementation"),
            (attention, attention, SAME_REASON),
            (not is_cpu, "sdpa", f"the default on {machine.device_type}"),
        ),
        "threads": (
            (is_cpu and machine.typed_threads, str(machine.typed_threads), "set by OMP_NUM_THREADS"),
            (is_cpu and num_threads in machine.thread_counts, str(num_threads), SAME_REASON),
            (is_cpu and len(machine.thread_counts) == 1, str(machine.thread_counts[0]), ONE_PER_CPU),
        ),
    }
    settled = {}
    for label, rules in first_that_holds.items():
        candidates = [Choice(value, reason) for holds, value, reason in rules if holds]
        if candidates:
            settled[label] = candidates[0]
    _check(settled, machine)
    return settled


def choose(config: TrainConfig, machine: Machine, measured: Measured | None) -> dict[str, Choice]:
    """Return all choices by label. measured: decides what `settle` leaves open; None if it leaves nothing open."""
    choices = settle(config, machine)
    assert measured is not None or not to_measure(choices, machine)
    measured = measured or Measured({}, {}, 1)
    if "precision" not in choices:
        ratio = measured.flops_per_second["bf16"] / measured.flops_per_second["no"]
        where = "here" if machine.device_type == "cpu" else "on this device"
        fastest = "bf16" if ratio >= MARGIN else "no"
        if ratio >= MARGIN:
            reason = f"bf16 products are {ratio:.1f} times as fast as fp32 {where}"
        elif ratio >= 1:
            reason = f"bf16 products are only {ratio:.2f} times as fast as fp32 {where}"
        else:
            reason = f"fp32 products are {1 / ratio:.1f} times as fast as bf16 {where}"
        choices["precision"] = Choice(fastest, reason)
        kept = list_kept(machine).get("mixed_precision")
        if kept in ("no", "bf16"):
            remedy = f"; {reason}: --mixed_precision {fastest} would use that" if kept != fastest else ""
            choices["precision"] = Choice(kept, SAME_REASON + remedy)
    if "dynamo" not in choices:
        seconds = machine.total_flops / measured.flops_per_second[choices["precision"].value]
        if config.max_minutes is not None:
            seconds = min(seconds, PRODUCTS_SHARE * 60 * config.max_minutes)
        if seconds < COMPILE_PAYS_SECONDS:
            length = f"{seconds:.0f} s of matrix products, and {COMPILE_PAYS_SECONDS:.0f} would pay for compiling"
            choices["dynamo"] = Choice("no", f"this run is short: {length}")
        else:
            choices["dynamo"] = Choice(REGIONAL, "this run is long enough to pay for compiling")
    if "attention" not in choices:
        seconds = measured.attention_seconds
        rows = f"rows of {config.block_size:,} tokens"
        ratio = seconds["sdpa"] / seconds["eager"] if seconds else 0.0
        if ratio >= MARGIN:
            choices["attention"] = Choice("eager", f"{ratio:.1f} times as fast as sdpa here, for {rows}")
        elif ratio >= 1:
            choices["attention"] = Choice("sdpa", f"eager is only {ratio:.2f} times as fast here, for {rows}")
        elif seconds:
            choices["attention"] = Choice("sdpa", f"{1 / ratio:.1f} times as fast as eager here, for {rows}")
        else:
            choices["attention"] = Choice("sdpa", f"eager takes too much memory for {rows}")
    if machine.device_type == "cpu" and "threads" not in choices:
        which = "core" if measured.num_threads == min(machine.thread_counts) else "CPU"
        choices["threads"] = Choice(str(measured.num_threads), f"one per {which} is fastest here")
    if choices["dynamo"].value.startswith("inductor") and machine.launcher_mode != "default":
        choices["mode"] = Choice(machine.launcher_mode, "set by the launcher")
    if config.bf16_residual:
        if choices["precision"].value != "bf16":
            precision = f"{in_words('precision', choices['precision'].value)}: {choices['precision'].reason}"
            raise UserError(f"--bf16_residual requires bf16 mixed precision, but this run uses {precision}")
        choices["residual"] = Choice("bf16", "requested by --bf16_residual")
    return choices


def apply_choices(config: TrainConfig, choices: dict[str, Choice], machine: Machine) -> TrainConfig:
    """Return the config with the choices in place of `auto`."""
    if machine.sharding and machine.sharding.activation_checkpointing and config.activation_checkpointing == "auto":
        config = dataclasses.replace(config, activation_checkpointing="true")
    return dataclasses.replace(
        config,
        mixed_precision=choices["precision"].value,
        dynamo_backend=choices["dynamo"].value,
        attn_implementation=choices["attention"].value,
    )


def describe_choices(choices: dict[str, Choice], device_type: str) -> dict[str, Any]:
    """Return the choices that a resumed run keeps on the same type of device, because they change the bits."""
    return {
        "device_type": device_type,
        "mixed_precision": choices["precision"].value,
        "dynamo_backend": choices["dynamo"].value,
        "attn_implementation": choices["attention"].value,
        "num_threads": int(choices["threads"].value) if "threads" in choices else None,
    }


def to_measure(settled: dict[str, Choice], machine: Machine) -> list[str]:
    """Return the precisions to measure for what is still open; [] if nothing is."""
    labels = {"precision", "dynamo", "attention"}
    if machine.device_type == "cpu":
        labels.add("threads")
    if labels <= settled.keys():
        return []
    return [settled["precision"].value] if "precision" in settled else ["no", "bf16"]


def check_sharded(config: TrainConfig, machine: Machine) -> None:
    """Raise `UserError` for what does not work with shards, if there are any."""
    if machine.sharding is None:
        return
    precision = settle(config, machine).get("precision")
    if precision and precision.value == "fp16":
        raise UserError("FSDP does not work with fp16 and its gradient scaler; use --mixed_precision bf16 or no")
    if config.optim == "adamw_bnb_8bit":
        raise UserError("FSDP does not work with --optim adamw_bnb_8bit; use adamw_torch_fused or muon")
    if config.dynamo_backend.startswith(("auto", "inductor")) and machine.launcher_mode in CUDA_GRAPH_MODES:
        problem = (
            f"FSDP does not work with dynamo_mode {machine.launcher_mode}, because gathered weights move in memory"
        )
        raise UserError(f"{problem}; launch with --dynamo_mode default")


def _check(settled: dict[str, Choice], machine: Machine) -> None:
    """Raise `UserError` for a precision or backend that does not work here, before the first step fails."""
    precision = settled.get("precision")
    dynamo = settled.get("dynamo")
    if precision and precision.value not in ("no", "bf16", "fp16"):
        raise UserError(
            f"mixed_precision {precision.value} is not supported: its converters skip GPT-2's Conv1D layers; use "
            "bf16, as accelerate_configs/single_gpu.yaml does"
        )
    if precision and precision.value == "fp16" and machine.device_type != "cuda":
        raise UserError(
            f"fp16 requires a CUDA device, but this run uses {machine.device_type}; use bf16 or no, or "
            "accelerate_configs/cpu.yaml, which lets the script choose"
        )
    if dynamo and dynamo.value not in ("no", "inductor", REGIONAL, "aot_eager", "eager"):
        raise UserError(f"the launcher's dynamo_backend {dynamo.value} does not work here; use inductor or no")
    if dynamo and dynamo.value.startswith("inductor") and machine.why_no_inductor is not None:
        raise UserError(
            f"dynamo_backend {dynamo.value} ({dynamo.reason}) cannot compile: {machine.why_no_inductor}; use no"
        )
    if machine.launcher_mode not in DYNAMO_MODES:
        raise UserError(
            f"the launcher's dynamo_mode is '{machine.launcher_mode}'; use one of {', '.join(DYNAMO_MODES)}"
        )
