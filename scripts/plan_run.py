"""Plan a run before you rent a machine: batch, memory, FLOPs, hours and cost.

python scripts/plan_run.py --config gpt2_774m --gpu a100-80gb --num_gpus 16 --price_per_hour 1.5
python scripts/plan_run.py --table                            what fits: every recipe size on every class of memory

All other options are options of recipe/train.py. It needs no dataset. Hours and cost assume the given MFU: GPT-2 124M
reached 42% on one H200 (modded-nanogpt, 490,000 tokens/s) and 40% on one H100 (llm.c, 468,000).
"""

import argparse
import dataclasses
import math

from transformers import PreTrainedConfig

from recipe.arguments import CommandLine
from recipe.command_line import load_config, names_data
from recipe.config import TrainConfig
from recipe.errors import UserError, run_main
from recipe.hardware.gpus import load_gpu
from recipe.hardware.memory import MemoryPlan, plan_memory
from recipe.model.build import build_model_config
from recipe.model.size import count_flops_per_token, count_parameters, padded_vocab_size

GPT2_VOCAB_SIZE = 50257
SIZES = {"124M": "gpt2_124m", "355M": "gpt2_355m", "774M": "gpt2_774m", "1558M": "gpt2_1558m"}
# A card that stands for each class of memory. An L4, A10 and A10G have less than other cards of 24 GB.
CLASSES = {"8 GB": "rtx3070", "12 GB": "rtx3060", "16 GB": "t4", "24 GB": "rtx4090"}
CLASSES |= {"40 GB": "a100-40gb", "80 GB": "a100-80gb", "141 GB": "h200"}
# Metal recommends a process to use two thirds of 16 GB of unified memory, and three quarters of larger ones.
OTHER_DEVICES = {
    "Apple, 16 GB": ("mps", "no", "no", 16 * 2**30 * 2 / 3),
    "Apple, 64 GB": ("mps", "no", "no", 64 * 2**30 * 3 / 4),
    "CPU, 32 GB": ("cpu", "bf16", "inductor", 32 * 2**30),
}


def main() -> None:
    args, options = parse()
    if args.table:
        print(make_table(options))
        return
    config, model_config = load_run(args.config, options)
    gpu, num_parameters = load_gpu(args.gpu), count_parameters(model_config)
    plan = plan_gpu(config, model_config, args.gpu, args.num_gpus)
    if plan is None:
        remedy = "leave the memory options at auto, or use --optim adamw_bnb_8bit, more memory or a smaller recipe"
        raise UserError(f"the model does not fit into {gpu.memory_bytes / 1e9:.1f} GB ({gpu.name}); {remedy}")
    tokens_per_step = config.global_batch_size * config.block_size
    flops = count_flops_per_token(model_config, num_parameters, config.block_size)
    num_tokens = config.max_steps * tokens_per_step
    gpu_hours = num_tokens * flops / (args.mfu * gpu.flops_per_second) / 3600
    accumulation = config.global_batch_size // (plan.micro_batch_size * args.num_gpus)
    lines = [
        ("parameters", f"{num_parameters:,} with the padded vocabulary", "exact"),
        ("tokens per step", f"{tokens_per_step:,} in {config.global_batch_size:,} rows", "exact"),
        ("tokens", f"{num_tokens:,} in {config.max_steps:,} steps", "exact"),
        ("FLOPs", f"{flops / 1e6:,.0f} M per token, {num_tokens * flops:.2e} in all", "exact"),
        ("micro-batch", f"{plan.micro_batch_size} rows x {accumulation} per step and GPU", "estimated"),
        ("memory options", letters_of(plan) or "none needed", "estimated"),
        ("memory per GPU", f"{plan.total_bytes / 1e9:.1f} of {gpu.memory_bytes / 1e9:.1f} GB", "estimated"),
        ("time", f"{gpu_hours / args.num_gpus:,.1f} hours on {args.num_gpus} x {gpu.name}", "estimated"),
    ]
    if args.price_per_hour:
        cost = f"${gpu_hours * args.price_per_hour:,.0f} for {gpu_hours:,.1f} GPU-hours"
        lines.append(("cost", f"{cost} at ${args.price_per_hour:.2f}", "estimated"))
    print(*(f"{label:17}{value:52}{source}" for label, value, source in lines), sep="\n")
    print(f"\nTime and cost assume {args.mfu:.0%} MFU and perfect scaling, without evaluation and checkpoints.")


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = CommandLine(description="Plan a run. All other options are options of recipe/train.py.")
    parser.add_argument("--config", default="gpt2_124m", help="recipe (default: gpt2_124m)")
    parser.add_argument("--gpu", help="a100-80gb, h100, rtx4090, t4, ... (an unknown name lists all)")
    parser.add_argument("--num_gpus", type=int, default=1, help="GPUs of the run (default: 1)")
    parser.add_argument("--mfu", type=float, default=0.4, help="share of the peak FLOP/s (default: 0.4)")
    parser.add_argument("--price_per_hour", type=float, help="dollars per GPU and hour")
    parser.add_argument("--table", action="store_true", help="print what fits on every class of memory, as Markdown")
    args, options = parser.parse_with_run_options()
    for name in ("num_gpus", "mfu", "price_per_hour"):
        if (value := getattr(args, name)) is not None and not 0 < value < math.inf:
            raise UserError(f"{name} must be greater than 0, got {value}")
    if not args.gpu and not args.table:
        raise UserError("pass --gpu, for example --gpu a100-80gb, or --table for every class of memory")
    return args, options


def load_run(recipe: str, options: list[str]) -> tuple[TrainConfig, PreTrainedConfig]:
    """Return the run's config and its model's, with the padded vocabulary."""
    no_data = [] if names_data(recipe, options) else ["--dataset_dir", "DIR"]
    config = load_config(["--config", recipe, *options, *no_data])[0]
    if config.max_steps is None:
        raise UserError("the number of steps depends on the dataset or the device; pass --max_steps")
    vocab_size = config.tokenizer_vocab_size or GPT2_VOCAB_SIZE
    model_config = build_model_config(config, vocab_size, 0, config.model_name_or_path)
    model_config.vocab_size = padded_vocab_size(vocab_size, config.pad_vocab_to_multiple_of)
    return config, model_config


def plan_gpu(config: TrainConfig, model_config: PreTrainedConfig, name: str, num_gpus: int = 1) -> MemoryPlan | None:
    """Return what `auto` resolves to on a GPU that is not there, or None if nothing fits."""
    gpu = load_gpu(name)
    precision = "bf16" if gpu.bf16 else "fp16"
    return plan_device(config, model_config, "cuda", precision, "inductor", gpu.memory_bytes, num_gpus)


def plan_device(
    config: TrainConfig,
    model_config: PreTrainedConfig,
    device_type: str,
    precision: str,
    backend: str,
    memory_bytes: float,
    num_devices: int = 1,
) -> MemoryPlan | None:
    """precision, backend: what `auto` resolves to on the device."""
    usual = {"mixed_precision": precision, "dynamo_backend": backend}
    auto = {name: value for name, value in usual.items() if getattr(config, name) == "auto"}
    return plan_memory(dataclasses.replace(config, **auto), model_config, device_type, memory_bytes, num_devices)


def letters_of(plan: MemoryPlan) -> str:
    """Return the options that save memory, a letter each."""
    used = {"C": plan.activation_checkpointing, "L": plan.loss_chunks > 1}
    return "".join(letter for letter, is_used in used.items() if is_used)


def make_table(options: list[str]) -> str:
    """Return the README's table: a row per class of memory, a column per size of GPT-2."""
    runs = [load_run(recipe, options) for recipe in SIZES.values()]
    plans = {memory: [plan_gpu(*run, name) for run in runs] for memory, name in CLASSES.items()}
    plans |= {memory: [plan_device(*run, *device) for run in runs] for memory, device in OTHER_DEVICES.items()}
    rows = [["memory", *SIZES], ["---"] * (1 + len(SIZES))]
    rows += [[memory, *map(make_cell, of_memory)] for memory, of_memory in plans.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def make_cell(plan: MemoryPlan | None) -> str:
    if plan is None:
        return "-"
    return f"{' '.join(filter(None, (str(plan.micro_batch_size), letters_of(plan))))}: {plan.total_bytes / 1e9:.1f} GB"


if __name__ == "__main__":
    run_main(main)
