"""Measure which share of a step the optimizer takes: fused AdamW and Muon, at three sizes, on this device.

python scripts/benchmarks/optimizer_times.py --sizes demo,30m,124m --output_file optimizer_times.json

In one process, a micro-batch's forward and backward pass, AdamW's step and Muon's step alternate, on the same weights
and gradients and with the precision and compilation of a run. A step has as many micro-batches as the recipe needs on
this device; one is timed.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed

from recipe.arguments import CommandLine
from recipe.benchmark.ladder import GPT2_VOCAB_SIZE
from recipe.benchmark.measure import finish_results
from recipe.command_line import load_config
from recipe.errors import UserError, did_you_mean, run_main
from recipe.hardware.accelerator import build_accelerator, build_module
from recipe.hardware.memory import plan_device
from recipe.model.build import build_model_config
from recipe.optim.optimizers import build_optimizer

SIZES = {  # options and vocabulary
    "demo": ("--config demo", 2048),
    "30m": ("--config demo --config_overrides n_layer=6,n_head=6,n_embd=384 --global_batch_size 32", GPT2_VOCAB_SIZE),
    "124m": ("--config gpt2_124m --dataset_dir none", GPT2_VOCAB_SIZE),
}
OPTIMIZERS = {"adamw": "adamw_torch_fused", "muon": "muon"}
NUM_WARMUP_ROUNDS = 2


def main() -> None:
    parser = CommandLine(description="Measure which share of a step the optimizer takes.")
    parser.add_argument("--sizes", default=",".join(SIZES), help=f"sizes to measure (default: {','.join(SIZES)})")
    parser.add_argument("--num_rounds", type=int, default=20, help="repetitions, of which the median counts")
    parser.add_argument("--output_file", type=Path, help="JSON to write")
    args = parser.parse_args()
    names = args.sizes.split(",")
    for name in names:
        if name not in SIZES:
            raise UserError(f"unknown size '{name}'; {did_you_mean(name, SIZES)} (sizes: {', '.join(SIZES)})")
    if args.num_rounds < 1:
        raise UserError(f"--num_rounds must be at least 1, got {args.num_rounds}")
    results, device = {}, torch.device("cpu")
    for name in names:
        options, vocab_size = SIZES[name]
        results[name], device = measure_size(options.split(), vocab_size, args.num_rounds)
        shares = ", ".join(f"{optim} {results[name][optim]['share_of_step']:.1%}" for optim in OPTIMIZERS)
        print(f"{name}: {shares} of a step of {results[name]['adamw']['step_ms']:,.0f} ms with adamw", flush=True)
    finish_results({"num_rounds": args.num_rounds, "sizes": results}, args.output_file, device)


def measure_size(options: list[str], vocab_size: int, num_rounds: int) -> tuple[dict[str, Any], torch.device]:
    """Return the median times in milliseconds, what they are the times of, and the device."""
    config = load_config(options)[0]
    accelerator, precision = build_accelerator(config, Path("."))
    device, model_config = accelerator.device, build_model_config(config, vocab_size, 0)
    plan = plan_device(config, model_config, accelerator, precision)
    module, choices = build_module(config, model_config, vocab_size, device, precision, plan=plan)
    module = accelerator.prepare(module)
    optimizers = {
        name: build_optimizer(load_config([*options, "--optim", optim])[0], module, precision.value)
        for name, optim in OPTIMIZERS.items()
    }
    for optimizer in optimizers.values():  # as recipe/optim/guard.py leaves it
        optimizer.found_inf = torch.zeros((), device=device)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(1e-5, device=device)
    set_seed(config.seed)
    shape = plan.micro_batch_size, config.block_size + 1
    rows = torch.randint(vocab_size, shape, device=device)

    def forward_backward() -> None:
        module.zero_grad()
        accelerator.backward(module(rows[:, :-1], rows[:, 1:]))

    works = {"forward_backward": forward_backward, **{name: each.step for name, each in optimizers.items()}}
    rounds = [
        {name: milliseconds(work) for name, work in works.items()} for _ in range(NUM_WARMUP_ROUNDS + num_rounds)
    ]
    times = {name: [each[name] for each in rounds[NUM_WARMUP_ROUNDS:]] for name in works}
    medians = {name: statistics.median(values) for name, values in times.items()}
    num_micro_batches = config.global_batch_size // plan.micro_batch_size
    result = {
        "parameters": sum(p.numel() for p in module.parameters()),
        "tokens_per_step": config.global_batch_size * config.block_size,
        "micro_batch": [plan.micro_batch_size, config.block_size],
        "num_micro_batches": num_micro_batches,
        "mixed_precision": precision.value,
        "dynamo_backend": choices["dynamo"].value,
        "forward_backward_ms": round(medians["forward_backward"], 3),
    }
    for name in OPTIMIZERS:
        step_ms = num_micro_batches * medians["forward_backward"] + medians[name]
        result[name] = {
            "optimizer_ms": round(medians[name], 3),
            "optimizer_ms_lowest_and_highest": [round(min(times[name]), 3), round(max(times[name]), 3)],
            "step_ms": round(step_ms, 3),
            "share_of_step": round(medians[name] / step_ms, 5),
        }
    return result, device


def milliseconds(work: Callable[[], object]) -> float:
    """Return the time of a function, until the device has finished."""
    started_at = time.perf_counter()
    work()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return 1e3 * (time.perf_counter() - started_at)


if __name__ == "__main__":
    run_main(main)
