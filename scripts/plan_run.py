"""Does a run work here, or on another machine: does it fit, how long does it take, and what does it cost?

python scripts/plan_run.py                                    check this machine, and plan the demo for it
python scripts/plan_run.py --config gpt2_124m --measure       another recipe, with the speed of ten training steps
python scripts/plan_run.py --config gpt2_774m --gpu a100-80gb --num_gpus 16 --price_per_hour 1.5
python scripts/plan_run.py --config gpt2_1558m --gpu rtx4090 --num_gpus 8 --sharded     with FSDP

All other options are those of training, and so is the default recipe. No text is needed. Exits with 1 if a check
fails. Hours and cost assume a share of the peak FLOP/s: GPT-2 124M reached 45% on one H200
(scripts/benchmarks/first_gpu.json); others 42% on one H200 (modded-nanogpt) and 40% on one H100 (llm.c).
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

# First: recipe sets up OpenMP's threads, before torch is loaded.
from recipe.arguments import CommandLine, as_path, typed_names

# isort: split
import numpy as np
import psutil
import torch
from transformers import AutoConfig, PreTrainedConfig

from recipe.command_line import load_config, load_yaml
from recipe.config import DATA_SOURCES, STANDARD_LIBRARY, TrainConfig, is_missing, write_config
from recipe.data.packed import read_metadata
from recipe.data.tokenizer import count_ids, load_tokenizer
from recipe.data.tokens import id_type_of
from recipe.environment import count_cpus, describe_device
from recipe.errors import UserError, plural, run_main, short_reason
from recipe.hardware.accelerator import find_machine, measure_open
from recipe.hardware.choices import Choice, Machine, apply_choices, check_sharded, choose, in_words
from recipe.hardware.devices import why_no_inductor
from recipe.hardware.gpus import Gpu, find_gpu, load_gpu
from recipe.hardware.memory import measure_usable_bytes, plan_memory
from recipe.hardware.sharding import Sharding
from recipe.launcher import asks_for_cpu, dynamo_mode
from recipe.metrics import read_events
from recipe.model.build import build_model_config
from recipe.model.size import count_flops_per_token, count_parameters, describe_output_share, padded_vocab_size
from recipe.model.weights import load_pretrained
from recipe.run.start_table import describe_attention

PACKAGES = ("torch", "transformers", "accelerate", "datasets")
TRAIN = str(Path(__file__).resolve().parents[1] / "recipe" / "train.py")
GPT2_VOCAB_SIZE = 50257
MEASURED_STEPS = 10
MOST_CPU_FLOPS = 2e13  # of the measured steps: two minutes on two cores; a large batch is reduced


class Planned(NamedTuple):
    """A run to plan."""

    config: TrainConfig
    model_config: PreTrainedConfig  # with the padded vocabulary
    is_exact: bool  # or the vocabulary is assumed to be GPT-2's
    num_parameters: int
    flops_per_token: int


def main() -> None:
    args, options = parse()
    planned = load_run(args.config, options)
    if args.price_per_hour and planned.config.max_steps is None:
        raise UserError("the number of steps depends on the dataset or the device; pass --max_steps")
    device = find_device()
    shards = Sharding(args.num_gpus) if args.sharded else None
    failed = 0
    if args.gpu:
        gpu = load_gpu(args.gpu)
        machine = Machine("cuda", args.num_gpus, shards, launcher_mode=dynamo_mode(), has_bf16=gpu.bf16)
        choices = choose(planned.config, machine, None)
        name = gpu.name
        memory_bytes = gpu.memory_bytes
    else:
        gpu = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        machine, choices = choose_here(planned, args.num_gpus, shards)
        name = describe_device(device)
        memory_bytes = measure_usable_bytes(device, 1)
        if not args.json:
            failed = check_machine(planned, choices)
    planned = planned._replace(config=apply_choices(planned.config, choices, machine))
    show(args, planned, machine, memory_bytes, name, gpu)
    if args.measure:
        measured = describe_measured(planned.config, measure_steps(args.launcher, planned))
        print(f"\n{textwrap.fill(f'measured: {measured}', 80, subsequent_indent='  ')}")
    if failed:
        raise UserError(f"failed checks: {failed}")


# ------------------------------------------------------------------ this machine


def choose_here(planned: Planned, num_devices: int, sharding: Sharding | None) -> tuple[Machine, Any]:
    """Return this machine, and what `auto` becomes on it for the whole run."""
    config = planned.config
    device = find_device()
    flops = (config.max_steps or math.inf) * config.tokens_per_step * planned.flops_per_token
    machine = find_machine(device, num_devices, sharding=sharding, total_flops=flops)
    return machine, choose(config, machine, measure_open(config, machine, device, planned.model_config))


def check_machine(planned: Planned, choices: dict[str, Choice]) -> int:
    """Print a line for each check of this machine. Returns how many failed."""
    checks: dict[str, Callable[[], str]] = {
        "packages": lambda: ", ".join(f"{name} {version(name)}" for name in PACKAGES),
        "device": check_device,
        "precision": lambda: f"{in_words('precision', choices['precision'].value)}: {choices['precision'].reason}",
        "attention": lambda: describe_attention(planned.config, planned.model_config, choices, find_device()),
        "compiler": check_compiler,
    }
    failed = 0
    for name, check in checks.items():
        try:
            print(f"ok      {name:10} {check()}", flush=True)
        except Exception as error:  # a broken installation fails in any way; the other checks still help
            failed += 1
            print(f"FAILED  {name:10} {error if isinstance(error, UserError) else short_reason(error)}", flush=True)
    return failed


def find_device() -> torch.device:
    device = None if asks_for_cpu(os.environ) else torch.accelerator.current_accelerator(check_available=True)
    return device or torch.device("cpu")


def check_device() -> str:
    """Name the device and run a kernel on it: a build of PyTorch may lack those for an old or a new GPU."""
    device = find_device()
    if device.type != "cuda":
        return f"{describe_device(device)}, {count_cpus()} cores, {psutil.virtual_memory().total / 1e9:.0f} GB"
    torch.ones(1, device=device)
    memory = f"{torch.cuda.get_device_properties(device).total_memory / 1e9:.0f} GB"
    cudnn = torch.backends.cudnn.version()
    return f"{describe_device(device)}, {memory}, CUDA {torch.version.cuda}, cuDNN {cudnn}"


def check_compiler() -> str:
    """Compile one small function with inductor."""
    device = find_device()
    if reason := why_no_inductor(device):
        raise UserError(f"{reason} (Debian: apt-get install g++ python3-dev); or train with --dynamo_backend no")
    compiled = torch.compile(lambda x: (2 * x).sin() + 1)
    compiled(torch.ones(8, device=device))
    return f"inductor compiles for {device.type}"


def measure_steps(launcher: list[str], planned: Planned) -> dict[str, Any]:
    """Train ten steps of a run, with what `auto` is for all of them. Returns the run's start event and summary."""
    config = planned.config
    steps = dataclasses.replace(
        config,
        max_steps=MEASURED_STEPS,
        num_train_epochs=None,
        max_minutes=None,
        warmup_steps=min(config.warmup_steps, 1),
        logging_steps=2,
        eval_steps=0,
        max_eval_samples=1,
        expected_loss=None,
        save_steps=0,
        resume_from_checkpoint=None,
        report_to=None,
        profile=None,
        push_to_hub=False,
    )
    most = MOST_CPU_FLOPS if find_device().type == "cpu" else math.inf
    flops_per_row = MEASURED_STEPS * config.block_size * planned.flops_per_token
    while steps.global_batch_size % 2 == 0 and steps.global_batch_size * flops_per_row > most:
        steps = dataclasses.replace(steps, global_batch_size=steps.global_batch_size // 2)
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder, "recipe.yaml")
        write_config(steps, recipe)
        command = [sys.executable, "-m", "accelerate.commands.launch", *launcher, TRAIN, "--config", str(recipe)]
        command += ["--output_dir", f"{folder}/run"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
            raise UserError(f"training failed: {(lines or result.stderr.splitlines())[-1]}")
        start = next(event for event in read_events(Path(folder, "run")) if event["event"] == "start")
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
        return start | summary | {"num_rows": steps.global_batch_size}


def describe_measured(config: TrainConfig, summary: dict[str, Any]) -> str:
    """Extrapolate ten measured steps to all steps of the run."""
    speed = summary["tokens_per_second"]
    num_rows = summary["num_rows"]
    ms = 1000 * config.tokens_per_step / speed
    text = f"{plural(summary['num_processes'], 'process', 'es')}, "
    text += f"{in_words('precision', summary['mixed_precision'])}, {in_words('dynamo', summary['dynamo_backend'])}: "
    text += f"{summary['peak_memory_bytes'] / 1e9:.1f} GB, {summary['per_device_train_batch_size']} rows per forward "
    text += f"pass, {ms:,.0f} ms per step, {speed:,.0f} tokens/s"
    if num_rows < config.global_batch_size:
        text += f" (in steps of {num_rows:,} instead of {config.global_batch_size:,} rows, which a CPU can measure)"
    hours = (config.max_steps or 0) * ms / 3.6e6
    return text + (f": {hours:,.2f} hours for {config.max_steps:,} steps" if hours else "")


# ------------------------------------------------------------------ the plan


def show(
    args: argparse.Namespace, planned: Planned, machine: Machine, memory_bytes: int, device: str, gpu: Gpu | None
) -> None:
    """Print batch, memory, FLOPs, hours and cost. gpu: its data sheet, if it is known; a CPU can only be measured."""
    config, model_config, is_exact, num_parameters, flops = planned
    check_sharded(config, machine)
    plan = plan_memory(config, model_config, machine, memory_bytes)
    if plan is None:
        remedy = "leave the memory options at auto, use more memory, several GPUs with --sharded, or a smaller recipe"
        raise UserError(f"the model does not fit into {memory_bytes / 1e9:.1f} GB ({device}); {remedy}")
    num_tokens = (config.max_steps or 0) * config.tokens_per_step
    accumulation = config.global_batch_size // (plan.micro_batch_size * args.num_gpus)
    peak = gpu.flops_per_second if gpu and config.mixed_precision != "no" else math.inf
    step_seconds = config.tokens_per_step * flops / (args.mfu * peak)
    hours = step_seconds * (config.max_steps or 0) / 3600  # of GPUs
    ms = 1000 * step_seconds / args.num_gpus
    data_bytes = num_tokens * np.dtype(id_type_of(model_config.vocab_size)).itemsize
    options = []
    if plan.activation_checkpointing:
        options.append("--activation_checkpointing")
    if plan.loss_chunks > 1:
        options.append(f"--loss_chunks {plan.loss_chunks}")
    if args.json:
        values = {
            "parameters": num_parameters,
            "tokens_per_step": config.tokens_per_step,
            "tokens": num_tokens or None,
            "flops_per_token": flops,
            "micro_batch": plan.micro_batch_size,
            "micro_batches": accumulation,
            "options": options,
            "device_bytes": int(memory_bytes),
            "memory_bytes": plan.total_bytes,
            "parts": plan.parts,
            "data_bytes": data_bytes,
            "step_ms": ms or None,
            "gpu_hours": hours or None,
        }
        print(json.dumps(values, indent=2))
        return
    parts = [f"{name} {part / 1e9:.1f}" for name, part in plan.parts.items()]
    of_vocabulary = "exact" if is_exact else "assumed"
    total = f", {num_tokens * flops:.2e} in all" if num_tokens else ""
    lines = [
        ("parameters", f"{num_parameters:,}, vocabulary of {model_config.vocab_size:,} with padding", of_vocabulary),
        ("tokens per step", f"{config.tokens_per_step:,} in {config.global_batch_size:,} rows", "exact"),
        ("FLOPs", f"{flops / 1e6:,.0f} M per token{total}", of_vocabulary),
        ("micro-batch", f"{plan.micro_batch_size} rows x {accumulation} per step and device", "estimated"),
        ("memory options", " ".join(options) or "none needed", "estimated"),
        ("memory", f"{plan.total_bytes / 1e9:.1f} of {memory_bytes / 1e9:.1f} GB on each device", "estimated"),
        ("  at its peak", ", ".join(parts[:3]), "GB"),
        ("", ", ".join(parts[3:]), "GB"),
    ]
    text = describe_output_share(model_config, flops)
    if text and not config.model_name_or_path:
        share, advice = text.split("; ")
        lines[3:3] = [("vocabulary", f"{share};", of_vocabulary), ("", advice, "")]
    if num_tokens:
        lines.insert(2, ("tokens", f"{num_tokens:,} in {config.max_steps:,} steps", "exact"))
        lines.append(("data", f"{data_bytes / 1e9:,.1f} GB of token ids on disk", of_vocabulary))
    if gpu and not step_seconds:
        lines.append(("step", "not known: the data sheets' rates are for bf16 and fp16", ""))
    if step_seconds:
        speed = f"{1000 * config.tokens_per_step / ms:,.0f} tokens/s"
        lines.append(("step", f"{ms:,.0f} ms, {speed}, at {args.mfu:.0%} MFU", "estimated"))
    if config.max_minutes:
        lines.append(("time", f"{config.max_minutes:g} minutes", "exact"))
    if hours:
        lines.append(("time", f"{hours / args.num_gpus:,.1f} hours on {args.num_gpus} x {device}", "estimated"))
        if args.price_per_hour:
            cost = f"${hours * args.price_per_hour:,.0f} for {hours:,.1f} GPU-hours at ${args.price_per_hour:.2f}"
            lines.append(("cost", cost, "estimated"))
        lines.append(("", "without evaluation and checkpoints, with perfect scaling", ""))
    print("\n".join(f"{label:17}{value:53}{source}".rstrip() for label, value, source in lines))


# ------------------------------------------------------------------ options


def load_run(recipe: str | None, options: list[str]) -> Planned:
    """Return the run, with the demo's text and GPT-2's vocabulary where neither recipe nor options name any."""
    values = load_yaml(recipe) if recipe else {}
    named = typed_names(options) | {name for name, value in values.items() if not is_missing(value)}
    text = [] if named & set(DATA_SOURCES) else ["--dataset_name", STANDARD_LIBRARY]
    is_assumed = bool(recipe and text and not named & {"tokenizer_name", "tokenizer_vocab_size", "model_name_or_path"})
    if is_assumed:
        text += ["--tokenizer_vocab_size", str(GPT2_VOCAB_SIZE)]
    return add_model(load_config([*options, *text]).config, is_assumed)


def add_model(config: TrainConfig, is_assumed: bool = False) -> Planned:
    """is_assumed: the vocabulary in the config stands for one that is not known."""
    known = None if is_assumed else find_vocab_size(config)
    vocab_size = known or GPT2_VOCAB_SIZE
    model_config = build_model_config(config, vocab_size, 0, config.model_name_or_path)
    model_config.vocab_size = padded_vocab_size(vocab_size, config.pad_vocab_to_multiple_of)
    num_parameters = count_parameters(model_config)
    flops = count_flops_per_token(model_config, num_parameters, config.block_size)
    return Planned(config, model_config, known is not None, num_parameters, flops)


def find_vocab_size(config: TrainConfig) -> int | None:
    """Return the vocabulary of the model, the dataset or the tokenizer; None if none of them is here."""
    if config.model_name_or_path:
        return getattr(load_pretrained(AutoConfig, config.model_name_or_path), "vocab_size", None)
    if config.dataset_dir and Path(config.dataset_dir[0], "metadata.json").is_file():
        return read_metadata(Path(config.dataset_dir[0]))["vocab_size"]
    if config.tokenizer_name:
        with contextlib.suppress(UserError):  # it may be on the Hub, and this machine offline
            return count_ids(load_tokenizer(config.tokenizer_name))
    return config.tokenizer_vocab_size


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = CommandLine(description="Plan a run. All other options are options of recipe/train.py.")
    parser.add_argument("--config", type=as_path, help="recipe (default: that of recipe/train.py)")
    parser.add_argument("--measure", action="store_true", help="train ten steps here: memory, speed, hours to finish")
    parser.add_argument("--config_file", type=as_path, help="Accelerate config of the measured steps (default: yours)")
    parser.add_argument("--gpu", help="plan for a100-80gb, h100, rtx4090, t4, ... (an unknown name lists all)")
    parser.add_argument("--num_gpus", type=int, help="GPUs of the run (default: all; with --gpu, 1)")
    parser.add_argument("--sharded", action="store_true", help="divide the state of the run over the GPUs (FSDP)")
    parser.add_argument("--mfu", type=float, default=0.4, help="share of the peak FLOP/s (default: 0.4)")
    parser.add_argument("--price_per_hour", type=float, help="dollars per GPU and hour")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, in bytes, without the checks")
    args, options = parser.parse_with_run_options()
    for name, most in {"num_gpus": 1e6, "mfu": 1, "price_per_hour": 1e6}.items():
        value = getattr(args, name)
        if value is not None and not 0 < value <= most:
            raise UserError(f"{name} must be above 0 and at most {most:,.0f}, got {value:g}")
    if args.gpu and args.measure:
        raise UserError("--gpu is a machine that is not here, where nothing can be measured; omit it")
    if args.num_gpus is None:
        args.num_gpus = 1 if args.gpu or find_device().type != "cuda" else torch.cuda.device_count()
    args.launcher = ["--config_file", args.config_file] if args.config_file else []
    if args.config:
        options = ["--config", args.config, *options]
    return args, options


if __name__ == "__main__":
    run_main(main, is_alone=True)
