"""Does a run work here, or on another machine: does it fit, how long does it take, and what does it cost?

python scripts/plan_run.py --config gpt2_124m                 check this machine, and plan the run for it
python scripts/plan_run.py --config gpt2_124m --measure       the same, with the speed of ten training steps
python scripts/plan_run.py --config gpt2_774m --gpu a100-80gb --num_gpus 16 --price_per_hour 1.5
python scripts/plan_run.py --config gpt2_1558m --gpu rtx4090 --num_gpus 8 --sharded     with FSDP
python scripts/plan_run.py --lengths                          memory and FLOPs of attention, by row length
python scripts/plan_run.py --table                            what fits: every recipe size on every class of memory

All other options are options of recipe/train.py. No dataset is needed. Exits with 1 if a check fails. Hours and cost
on a GPU that is not there assume the given MFU: GPT-2 124M reached 45% on one H200 (scripts/benchmarks/first_gpu.json,
525,000 tokens/s), and others 42% on one H200 (modded-nanogpt, 490,000) and 40% on one H100 (llm.c, 468,000).
"""

import argparse
import copy
import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from importlib.metadata import requires, version
from pathlib import Path

# First: recipe sets up OpenMP's threads, before torch is loaded.
from recipe.arguments import CommandLine, as_path, typed_names

# isort: split
import numpy as np
import psutil
import torch
from huggingface_hub import get_token, whoami
from packaging.requirements import Requirement
from transformers import PreTrainedConfig

from recipe.command_line import load_config, load_yaml
from recipe.config import DATA_SOURCES, STANDARD_LIBRARY, TrainConfig, is_missing, write_config
from recipe.data.tokens import id_type_of
from recipe.environment import count_cpus, describe_device
from recipe.errors import UserError, plural, run_main, short_reason
from recipe.hardware.accelerator import find_machine, measure_open
from recipe.hardware.choices import Choice, Machine, apply_choices, check_sharded, choose, in_words
from recipe.hardware.devices import why_no_inductor
from recipe.hardware.gpus import find_gpu, load_gpu
from recipe.hardware.memory import MemoryPlan, estimate_bytes, measure_usable_bytes, plan_memory
from recipe.hardware.sharding import Sharding
from recipe.launcher import asks_for_cpu, dynamo_mode
from recipe.model.build import build_model_config
from recipe.model.size import count_flops_per_token, count_parameters, count_training_flops, padded_vocab_size

TRAIN = str(Path(__file__).resolve().parents[1] / "recipe" / "train.py")
GPT2_VOCAB_SIZE = 50257
MEASURED_STEPS = 10
MOST_CPU_FLOPS = 2e13  # of the measured steps: two minutes on two cores; a large batch is reduced
SIZES = {"124M": "gpt2_124m", "355M": "gpt2_355m", "774M": "gpt2_774m", "1558M": "gpt2_1558m"}
# A card that stands for each class of memory. An L4, A10 and A10G have less than other cards of 24 GB.
CLASSES = {"8 GB": "rtx3070", "12 GB": "rtx3060", "16 GB": "t4", "24 GB": "rtx4090"}
CLASSES |= {"40 GB": "a100-40gb", "80 GB": "a100-80gb", "141 GB": "h200"}
SHARDED_CLASSES, NUM_SHARDS = ("24 GB", "40 GB"), 8  # the rows with FSDP
# A model for each class of card: the smallest card of the class, layers, heads, width, tokens per row.
SHAPES = {"24 GB": ("rtx4090", 24, 16, 1024, 512), "10 to 16 GB": ("rtx3080", 12, 12, 768, 256)}
SHAPES |= {"8 to 12 GB": ("rtx3070", 8, 8, 512, 256)}
LETTERS = {"C": "--activation_checkpointing", "L": "--loss_chunks 8"}
LENGTHS = (512, 1024, 2048, 4096, 8192)
# Metal recommends that a process use two thirds of 16 GB of unified memory, and three quarters of larger ones.
OTHER_DEVICES = {
    "Apple, 16 GB": ("mps", "no", "no", "sdpa", 16 * 2**30 * 2 / 3),
    "Apple, 64 GB": ("mps", "no", "no", "sdpa", 64 * 2**30 * 3 / 4),
    "CPU, 32 GB": ("cpu", "bf16", "inductor", "sdpa", 32 * 2**30),
}


def main() -> None:
    args, options = parse()
    if args.table or args.lengths:
        print(make_table(options) if args.table else compare_lengths(*load_run(args.config, options, False)))
        return
    config, model_config = load_run(args.config, options, needs_steps=bool(args.gpu))
    if args.gpu:
        gpu, plan = load_gpu(args.gpu), plan_gpu(config, model_config, args.gpu, args.num_gpus, args.sharded)
        show(args, config, model_config, plan, gpu.memory_bytes, gpu.name, gpu.flops_per_second)
        return
    choices = choose_here(config, model_config)
    failed = 0 if args.json else check_machine(config, choices)
    config = apply_choices(config, choices, find_machine(find_device()))
    plan_machine(args, config, model_config)
    if args.measure:
        measured = measure_steps(args.config_file, config, choices["dynamo"].value)
        print(f"\n{textwrap.fill(f'measured: {measured}', 80, subsequent_indent='  ')}")
    if failed:
        raise UserError(f"failed checks: {failed}")


# ------------------------------------------------------------------ this machine


def choose_here(config: TrainConfig, model_config: PreTrainedConfig) -> dict[str, Choice]:
    """Return what `auto` becomes for the whole run on this machine; ten steps alone would not pay for compiling."""
    device, flops = find_device(), count_training_flops(config, model_config, count_parameters(model_config))
    machine = find_machine(device, total_flops=flops)
    return choose(config, machine, measure_open(config, machine, device, model_config))


def check_machine(config: TrainConfig, choices: dict[str, Choice]) -> int:
    """Print a line for each check of this machine. Returns how many failed."""
    checks: dict[str, Callable[[], str]] = {
        "packages": check_packages,
        "device": check_device,
        "precision": lambda: f"{in_words('precision', choices['precision'].value)}: {choices['precision'].reason}",
        "compiler": check_compiler,
        "disk": lambda: check_disk(config),
        "Hub": lambda: check_hub(config),
    }
    failed = 0
    for name, check in checks.items():
        try:
            print(f"ok      {name:10} {check()}", flush=True)
        except Exception as error:  # a broken installation fails in any way; the other checks still help
            failed += 1
            print(f"FAILED  {name:10} {error if isinstance(error, UserError) else short_reason(error)}", flush=True)
    return failed


def check_packages() -> str:
    """Compare the versions of the required packages with the ranges in pyproject.toml."""
    required = [need for need in map(Requirement, requires("gpt2-recipe") or ()) if need.marker is None]
    wrong = [f"{need.name} {version(need.name)} is not {need.specifier}" for need in required
             if not need.specifier.contains(version(need.name), prereleases=True)]  # fmt: skip
    if wrong:
        raise UserError(f"{'; '.join(wrong)}; run pip install -e . in the folder that holds pyproject.toml")
    return ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate", "datasets"))


def find_device() -> torch.device:
    device = None if asks_for_cpu(os.environ) else torch.accelerator.current_accelerator(check_available=True)
    return device or torch.device("cpu")


def check_device() -> str:
    """Name the device and run a kernel on it: a build of PyTorch may lack those for an old or a new GPU."""
    device = find_device()
    if device.type != "cuda":
        return f"{describe_device(device)}, {count_cpus()} cores, {psutil.virtual_memory().total / 1e9:.0f} GB"
    torch.ones(1, device=device)
    memory, cudnn = torch.cuda.get_device_properties(device).total_memory, torch.backends.cudnn.version()
    return f"{describe_device(device)}, {memory / 1e9:.0f} GB, CUDA {torch.version.cuda}, cuDNN {cudnn}"


def check_compiler() -> str:
    """Compile one small function with inductor."""
    device = find_device()
    if reason := why_no_inductor(device):
        raise UserError(f"{reason} (Debian: apt-get install g++ python3-dev); or train with --dynamo_backend no")
    compiled = torch.compile(lambda x: (2 * x).sin() + 1)
    compiled(torch.ones(8, device=device))
    return f"inductor compiles for {device.type}"


def check_disk(config: TrainConfig) -> str:
    """Show the free space where the run writes; a folder that does not exist yet is on its parent's disk."""
    texts = []
    for folder in dict.fromkeys([config.output_dir or "runs", config.cache_dir]):
        existing = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.is_dir())
        texts.append(f"{shutil.disk_usage(existing).free / 1e9:,.0f} GB free for {folder}")
    return f"{', '.join(texts)}; a checkpoint takes 12 bytes per parameter, a packed token 2"


def check_hub(config: TrainConfig) -> str:
    if get_token() is None:
        if config.push_to_hub:
            raise UserError("--push_to_hub needs a token; run hf auth login, or set HF_TOKEN")
        return "not logged in; only --push_to_hub and gated datasets need that"
    try:
        return f"logged in as {whoami()['name']}"
    except Exception as error:  # of the HTTP client, which huggingface_hub chooses
        if config.push_to_hub:
            raise
        return f"a token is stored, but the Hub did not accept it: {short_reason(error)}"


def measure_steps(config_file: str | None, config: TrainConfig, backend: str) -> str:
    """Train ten steps of the run with the launcher, and extrapolate to all of its steps. Nothing is published.

    backend: what compiles the whole run here; ten steps alone would not pay for it.
    """
    model_config = build_model_config(config, GPT2_VOCAB_SIZE, 0, config.model_name_or_path)
    num_parameters = count_parameters(model_config)
    short = {"max_steps": MEASURED_STEPS, "num_train_epochs": None, "max_minutes": None, "profile": None}
    short |= {"eval_steps": 0, "max_eval_samples": 1, "eval_tasks": None, "save_steps": 0, "logging_steps": 2}
    short |= {"push_to_hub": False, "report_to": None, "resume_from_checkpoint": None, "expected_loss": None}
    short["dynamo_backend"] = backend
    short["warmup_steps"] = min(config.warmup_steps, 1)
    steps, most = dataclasses.replace(config, **short), MOST_CPU_FLOPS if find_device().type == "cpu" else math.inf
    while steps.global_batch_size % 2 == 0 and count_training_flops(steps, model_config, num_parameters) > most:
        steps = dataclasses.replace(steps, global_batch_size=steps.global_batch_size // 2)
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    launcher += ["--config_file", config_file] if config_file else []
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder, "recipe.yaml")
        write_config(steps, recipe)
        command = [*launcher, TRAIN, "--config", str(recipe), "--output_dir", f"{folder}/run"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
            raise UserError(f"training failed: {(lines or result.stderr.splitlines())[-1]}")
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
    speed, memory = summary["tokens_per_second"], summary["peak_memory_bytes"] / 1e9
    ms = 1000 * config.tokens_per_step / speed
    length = "the length of the run depends on its epochs or minutes"
    if config.max_steps:
        hours = config.max_steps * config.tokens_per_step / speed / 3600
        length = f"{hours:,.2f} hours for {config.max_steps:,} steps"
    launched = f"{plural(summary['num_processes'], 'process', 'es')}, "
    launched += f"{in_words('precision', summary['mixed_precision'])}, {in_words('dynamo', summary['dynamo_backend'])}"
    rows = summary["per_device_train_batch_size"]
    measured = f"{memory:.1f} GB, {rows} rows per forward pass, {ms:,.0f} ms per step, {speed:,.0f} tokens/s"
    return f"{launched}: {measured}: {length}"


# ------------------------------------------------------------------ the plan


def plan_machine(args: argparse.Namespace, config: TrainConfig, model_config: PreTrainedConfig) -> None:
    """Show the plan for this machine. A CPU's time cannot be estimated, only measured."""
    device = find_device()
    gpu = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    memory_bytes = measure_usable_bytes(device, 1)
    chosen = config.mixed_precision, config.dynamo_backend, config.attn_implementation
    plan = plan_device(config, model_config, device.type, *chosen, memory_bytes, args.num_gpus, args.sharded)
    name, speed = describe_device(device), gpu.flops_per_second if gpu else None
    show(args, config, model_config, plan, memory_bytes, name, speed)


def show(
    args: argparse.Namespace,
    config: TrainConfig,
    model_config: PreTrainedConfig,
    plan: MemoryPlan | None,
    memory_bytes: float,
    device: str,
    flops_per_second: float | None,
) -> None:
    """Print batch, memory, FLOPs, hours and cost. flops_per_second: of a device at its peak, if that is known."""
    if plan is None:
        remedy = "leave the memory options at auto, use more memory, several GPUs with --sharded, or a smaller recipe"
        raise UserError(f"the model does not fit into {memory_bytes / 1e9:.1f} GB ({device}); {remedy}")
    num_parameters = count_parameters(model_config)
    flops = count_flops_per_token(model_config, num_parameters, config.block_size)
    num_tokens = (config.max_steps or 0) * config.tokens_per_step
    accumulation = config.global_batch_size // (plan.micro_batch_size * args.num_gpus)
    step_seconds = config.tokens_per_step * flops / (args.mfu * flops_per_second) if flops_per_second else 0
    hours = step_seconds * (config.max_steps or 0) / 3600  # of GPUs
    ms = 1000 * step_seconds / args.num_gpus
    data_bytes = num_tokens * np.dtype(id_type_of(model_config.vocab_size)).itemsize
    if args.json:
        values = {
            **{"parameters": num_parameters, "tokens_per_step": config.tokens_per_step, "tokens": num_tokens},
            **{"flops_per_token": flops, "micro_batch": plan.micro_batch_size, "micro_batches": accumulation},
            **{"options": letters_of(plan), "device_bytes": int(memory_bytes), "memory_bytes": plan.total_bytes},
            **{"parts": plan.parts, "data_bytes": data_bytes, "step_ms": ms or None, "gpu_hours": hours or None},
        }
        print(json.dumps(values, indent=2))
        return
    in_all = f", {num_tokens * flops:.2e} in all" if num_tokens else ""
    parts = [f"{name} {part / 1e9:.1f}" for name, part in plan.parts.items()]
    lines = [
        ("parameters", f"{num_parameters:,} with the padded vocabulary", "exact"),
        ("tokens per step", f"{config.tokens_per_step:,} in {config.global_batch_size:,} rows", "exact"),
        ("FLOPs", f"{flops / 1e6:,.0f} M per token{in_all}", "exact"),
        ("micro-batch", f"{plan.micro_batch_size} rows x {accumulation} per step and device", "estimated"),
        ("memory options", " ".join(LETTERS[letter] for letter in letters_of(plan)) or "none needed", "estimated"),
        ("memory", f"{plan.total_bytes / 1e9:.1f} of {memory_bytes / 1e9:.1f} GB on each device", "estimated"),
        ("  at its peak", ", ".join(parts[:3]), "GB"),
        ("", ", ".join(parts[3:]), "GB"),
    ]
    if num_tokens:
        lines.insert(2, ("tokens", f"{num_tokens:,} in {config.max_steps:,} steps", "exact"))
        placed = f"{data_bytes / 1e9:,.1f} GB per process and epoch, --data_placement ram"
        lines.append(("data in RAM", placed, "exact"))
    if step_seconds:
        speed = f"{1000 * config.tokens_per_step / ms:,.0f} tokens/s"
        lines.append(("step", f"{ms:,.0f} ms, {speed}, at {args.mfu:.0%} MFU", "estimated"))
    if hours:
        lines.append(("time", f"{hours / args.num_gpus:,.1f} hours on {args.num_gpus} x {device}", "estimated"))
        if args.price_per_hour:
            cost = f"${hours * args.price_per_hour:,.0f} for {hours:,.1f} GPU-hours at ${args.price_per_hour:.2f}"
            lines.append(("cost", cost, "estimated"))
        lines.append(("", "without evaluation and checkpoints, with perfect scaling", ""))
    print("\n".join(f"{label:17}{value:53}{source}".rstrip() for label, value, source in lines))


def compare_lengths(config: TrainConfig, model_config: PreTrainedConfig) -> str:
    """Return a table of attention's share of memory and FLOPs by row length, with equal tokens per forward pass.

    Assumes a GPU in bf16, compiled. Plain attention keeps the scores, [heads, tokens, tokens] of each row; flash
    attention does not.
    """
    titles = ["tokens per row", "rows", "flash", "plain", "scores in it", "attention's FLOPs"]
    rows, shape, machine = [titles, ["---:"] * len(titles)], copy.deepcopy(model_config), Machine("cuda")
    for length in LENGTHS:
        shape.max_position_embeddings, plan = length, MemoryPlan(LENGTHS[-1] // length, False, 1)
        config = dataclasses.replace(config, block_size=length, mixed_precision="bf16", dynamo_backend="inductor")
        configs = [dataclasses.replace(config, attn_implementation=kind) for kind in ("sdpa", "eager")]
        flash, plain = (estimate_bytes(plan, of_kind, shape, machine) for of_kind in configs)
        flops, others = (count_flops_per_token(shape, count_parameters(shape), tokens) for tokens in (length, 0))
        cells = [f"{length:,}", str(plan.micro_batch_size), f"{flash / 1e9:.1f} GB", f"{plain / 1e9:.1f} GB"]
        rows.append([*cells, f"{1 - flash / plain:.0%}", f"{1 - others / flops:.0%}"])
    return as_markdown(rows)


def plan_gpu(
    config: TrainConfig, model_config: PreTrainedConfig, name: str, num_gpus: int = 1, sharded: bool = False
) -> MemoryPlan | None:
    """Return what `auto` resolves to on a GPU that is not there, or None if nothing fits."""
    gpu = load_gpu(name)
    precision = "bf16" if gpu.bf16 else "fp16"
    chosen = precision, "inductor", "sdpa"
    return plan_device(config, model_config, "cuda", *chosen, gpu.memory_bytes, num_gpus, sharded)


def plan_device(
    config: TrainConfig,
    model_config: PreTrainedConfig,
    device_type: str,
    precision: str,
    backend: str,
    attention: str,
    memory_bytes: float,
    num_devices: int = 1,
    sharded: bool = False,
) -> MemoryPlan | None:
    """precision, backend, attention: what `auto` resolves to on the device. sharded: over all devices."""
    usual = {"mixed_precision": precision, "dynamo_backend": backend, "attn_implementation": attention}
    auto = {name: value for name, value in usual.items() if getattr(config, name) == "auto"}
    config = dataclasses.replace(config, **auto)
    shards = Sharding(num_devices) if sharded else None
    machine = Machine(device_type, num_devices, shards, launcher_mode=dynamo_mode())
    check_sharded(config, machine)
    return plan_memory(config, model_config, machine, memory_bytes)


def letters_of(plan: MemoryPlan) -> str:
    """Return the options that save memory, a letter each."""
    used = {"C": plan.activation_checkpointing, "L": plan.loss_chunks > 1}
    return "".join(letter for letter, is_used in used.items() if is_used)


def make_table(options: list[str]) -> str:
    """Return the README's table: a row per class of memory, a column per size of GPT-2."""
    runs = [load_run(recipe, options) for recipe in SIZES.values()]
    plans = {memory: [plan_gpu(*run, name) for run in runs] for memory, name in CLASSES.items()}
    for memory in SHARDED_CLASSES:
        plans[f"{NUM_SHARDS} x {memory}, FSDP"] = [plan_gpu(*run, CLASSES[memory], NUM_SHARDS, True) for run in runs]
    plans |= {memory: [plan_device(*run, *device) for run in runs] for memory, device in OTHER_DEVICES.items()}
    rows = [["memory", *SIZES], ["---"] * (1 + len(SIZES))]
    rows += [[memory, *map(make_cell, of_memory)] for memory, of_memory in plans.items()]
    rows += [[]] + [["card", "layers x width, tokens per row", "micro-batch x accumulation", "memory"], ["---"] * 4]
    for memory, (card, layers, heads, width, length) in SHAPES.items():
        shape = ["--config_overrides", f"n_layer={layers},n_head={heads},n_embd={width}", "--block_size", str(length)]
        config, model_config = load_run("gpt2_124m", [*shape, *options])
        plan = plan_gpu(config, model_config, card)
        cells = [memory, f"{layers} x {width}, {length}"]
        cells += [f"{plan.micro_batch_size} x {config.global_batch_size // plan.micro_batch_size}"] if plan else ["-"]
        rows.append([*cells, make_cell(plan).partition(": ")[2]])
    return as_markdown(rows)


def as_markdown(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" if row else "" for row in rows)


def make_cell(plan: MemoryPlan | None) -> str:
    if plan is None:
        return "-"
    return f"{' '.join(filter(None, (str(plan.micro_batch_size), letters_of(plan))))}: {plan.total_bytes / 1e9:.1f} GB"


# ------------------------------------------------------------------ options


def load_run(recipe: str, options: list[str], needs_steps: bool = True) -> tuple[TrainConfig, PreTrainedConfig]:
    """Return the run's config, with the demo's text if it has none, and the model's config with padded vocabulary."""
    named = typed_names(options) | {name for name, value in load_yaml(recipe).items() if not is_missing(value)}
    text = [] if named & set(DATA_SOURCES) else ["--dataset_name", STANDARD_LIBRARY]
    if text and not named & {"tokenizer_name", "tokenizer_vocab_size"}:
        text += ["--tokenizer_vocab_size", str(GPT2_VOCAB_SIZE)]
    config = load_config(["--config", recipe, *options, *text])[0]
    if needs_steps and config.max_steps is None:
        raise UserError("the number of steps depends on the dataset or the device; pass --max_steps")
    vocab_size = config.tokenizer_vocab_size or GPT2_VOCAB_SIZE
    model_config = build_model_config(config, vocab_size, 0, config.model_name_or_path)
    model_config.vocab_size = padded_vocab_size(vocab_size, config.pad_vocab_to_multiple_of)
    return config, model_config


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = CommandLine(description="Plan a run. All other options are options of recipe/train.py.")
    parser.add_argument("--config", type=as_path, default="gpt2_124m", help="recipe (default: gpt2_124m)")
    parser.add_argument("--measure", action="store_true", help="train ten steps here: memory, speed, hours to finish")
    parser.add_argument(
        "--config_file", type=as_path, help="Accelerate config for --measure (default: what accelerate config wrote)"
    )
    parser.add_argument("--gpu", help="plan for a100-80gb, h100, rtx4090, t4, ... (an unknown name lists all)")
    parser.add_argument("--num_gpus", type=int, default=1, help="GPUs of the run (default: 1)")
    parser.add_argument("--sharded", action="store_true", help="divide the state of the run over the GPUs (FSDP)")
    parser.add_argument("--mfu", type=float, default=0.4, help="share of the peak FLOP/s (default: 0.4)")
    parser.add_argument("--price_per_hour", type=float, help="dollars per GPU and hour")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, in bytes, without the checks")
    parser.add_argument("--lengths", action="store_true", help="print what attention costs, by row length")
    parser.add_argument("--table", action="store_true", help="print what fits on every class of memory, as Markdown")
    args, options = parser.parse_with_run_options()
    for name in ("num_gpus", "mfu", "price_per_hour"):
        if (value := getattr(args, name)) is not None and not 0 < value < math.inf:
            raise UserError(f"{name} must be greater than 0, got {value}")
    if args.mfu > 1:
        raise UserError(f"mfu is a share, such as 0.4; got {args.mfu}")
    if args.sharded and args.num_gpus == 1:
        raise UserError("--sharded needs several GPUs; pass their number with --num_gpus")
    return args, options


if __name__ == "__main__":
    run_main(main, is_alone=True)
