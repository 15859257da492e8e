"""Plan a run before the machine is there: batch, memory, communication, time, energy and cost.

python scripts/plan_run.py --config gpt2_774m --gpu a100-80gb --num_gpus 16 --price_per_hour 1.5
python scripts/plan_run.py --config gpt2_124m --gpu rtx4090 --block_size 512 --global_batch_size 256
python scripts/plan_run.py --table                               every recipe size on every class of memory

Other options are those of recipe/train.py. No dataset is needed: the vocabulary is GPT-2's unless one is given.
"""

import argparse
import dataclasses
import json
import math
import shlex
from pathlib import Path
from typing import Any

from recipe.arguments import CommandLine
from recipe.benchmark.expect import RESULTS
from recipe.benchmark.forecast import NO_DATASET, NODE_GPUS, Cluster, Forecast, forecast, load_run, scaling
from recipe.benchmark.measured import read_measurements
from recipe.benchmark.presets import plan_presets, presets_table
from recipe.command_line import names_data
from recipe.errors import UserError, run_main
from recipe.hardware.gpus import load_gpu
from recipe.hardware.memory import EIGHT_BIT
from recipe.model.size import count_parameters

EXTRA = ' (pip install -e ".[adamw_8bit]")'


def main() -> None:
    args, options = parse()
    measurements = [found for folder in args.results for found in read_measurements(folder)]
    if args.table:
        presets = plan_presets(options, measurements)
        print(json.dumps(presets, indent=2) if args.json else presets_table(presets, args.markdown))
        return
    config, model_config = load_run(args.config, options)
    fewest = math.ceil(args.num_gpus / NODE_GPUS)
    num_nodes = args.num_nodes or next(n for n in range(fewest, args.num_gpus + 1) if args.num_gpus % n == 0)
    cluster = Cluster(load_gpu(args.gpu), args.num_gpus, num_nodes, args.node_bandwidth_gbps)
    found = forecast(config, model_config, cluster, measurements)
    strong, weak = (scaling(config, model_config, cluster, weak, measurements) for weak in (False, True))
    command = launch_command(args.config, options, cluster)
    if args.json:
        plan = as_json(found, args.price_per_hour)
        tables = {"strong": strong, "weak": weak}
        tables = {name: [as_json(run, args.price_per_hour) for run in runs.values()] for name, runs in tables.items()}
        content = {"gpu": dataclasses.asdict(cluster.gpu), "plan": plan, **tables, "command": command}
        print(json.dumps(content, indent=2))
        return
    nodes = f" in {num_nodes} nodes" if num_nodes > 1 else ""
    print(f"{args.config}, {count_parameters(model_config) / 1e6:,.0f} M parameters with the padded vocabulary")
    print(f"{args.num_gpus} x {args.gpu}{nodes}\n")
    for label, value, source in describe(found, cluster, args.price_per_hour, config.gpu_memory_limit_gb):
        print(f"{label:17}{value:53}{source}".rstrip())
    print("", command, "", sep="\n")
    print(*scaling_table("Strong scaling, the same global batch (estimated)", strong), "", sep="\n")
    share = config.global_batch_size // args.num_gpus
    print(*scaling_table(f"Weak scaling, {share} rows per GPU, the same tokens (estimated)", weak), sep="\n")


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Return the options of this script, and those of recipe/train.py as typed."""
    parser = CommandLine(description="Plan a run. Other options are those of recipe/train.py.")
    parser.add_argument("--config", default="gpt2_124m", help="recipe (default: gpt2_124m)")
    parser.add_argument("--gpu", help="a100-80gb, h100, rtx4090, t4, ... (an unknown name lists all)")
    parser.add_argument("--num_gpus", type=int, default=1, help="GPUs of the run (default: 1)")
    parser.add_argument("--num_nodes", type=int, help=f"machines (default: {NODE_GPUS} GPUs each, or fewer)")
    parser.add_argument(
        "--node_bandwidth_gbps", type=float, default=100.0, help="network of a machine, in Gbit/s (default: 100)"
    )
    parser.add_argument("--price_per_hour", type=float, help="dollars per GPU and hour")
    parser.add_argument(
        "--results", type=Path, nargs="+", default=[RESULTS], help="folders of result files with measured throughput"
    )
    parser.add_argument("--table", action="store_true", help="plan every recipe size on every class of memory")
    parser.add_argument("--markdown", action="store_true", help="print --table in Markdown")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args, options = parser.parse_with_run_options()
    for name in ("num_gpus", "num_nodes", "node_bandwidth_gbps", "price_per_hour"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{name} must be greater than 0, got {value}")
    if args.num_nodes and args.num_gpus % args.num_nodes:
        found = f"num_gpus {args.num_gpus} is not divisible by num_nodes {args.num_nodes}"
        raise UserError(f"{found}; each node has as many GPUs as the others")
    if not args.gpu and not args.table:
        raise UserError("pass --gpu, for example --gpu a100-80gb, or --table for every class of memory")
    for folder in args.results:
        if args.results != [RESULTS] and not folder.is_dir():
            raise UserError(f"--results: there is no folder {folder}")
    return args, options


def describe(
    run: Forecast, cluster: Cluster, price_per_hour: float | None, memory_limit_gb: float | None
) -> list[tuple[str, str, str]]:
    """Return the lines of a plan: a label, the value, and whether it is exact, measured or estimated."""
    plan = run.plan
    savings = {
        "checkpointing": plan.activation_checkpointing,
        f"{plan.loss_chunks} loss chunks": plan.loss_chunks > 1,
        "not compiled": not plan.compiled,
    }
    available = min(cluster.gpu.memory_bytes / 1e9, memory_limit_gb or math.inf)
    lines = [
        ("tokens per step", f"{run.tokens_per_step:,} in {run.num_rows:,} rows", "exact"),
        ("tokens", f"{run.num_steps * run.tokens_per_step:,} in {run.num_steps:,} steps", "exact"),
        ("micro-batch", f"{plan.micro_batch_size} rows x {run.num_micro_batches} per step and GPU", "estimated"),
        ("optimizer", plan.optim + EXTRA * (plan.optim == EIGHT_BIT), "estimated"),
        ("memory options", ", ".join(text for text, is_on in savings.items() if is_on) or "none needed", "estimated"),
        ("memory per GPU", f"{plan.total_bytes / 1e9:.1f} of {available:.1f} GB", "estimated"),
    ]
    if run.num_gpus > 1:
        rate, hidden = cluster.ring_bytes_per_second / 1e9, run.allreduce_seconds - run.exposed_seconds
        overlap = f"{1e3 * hidden:,.0f} ms of it during backward" if hidden else "none of it during backward"
        lines += [
            ("all-reduce", f"{run.allreduce_bytes / 1e9:.2f} GB per step and GPU, in a ring", "exact"),
            ("", f"{1e3 * run.allreduce_seconds:,.0f} ms at {rate:,.0f} GB/s, {overlap}", "estimated"),
        ]
    source = "measured" if run.is_measured else "estimated"
    hours = 24 * run.days
    time = (
        f"{run.days:,.1f} days" if hours >= 48 else f"{hours:,.1f} hours" if hours >= 1 else f"{hours * 60:,.1f} min"
    )
    lines += [
        ("step", f"{1e3 * run.step_seconds:,.0f} ms", source),
        ("tokens/s", f"{run.tokens_per_second:,.0f} ({run.mfu:.0%} MFU)", source),
        ("time", f"{time} without evaluation and checkpoints", source),
        ("GPU-hours", f"{run.gpu_hours:,.1f}", source),
    ]
    if price_per_hour:
        lines.append(("cost", f"${run.gpu_hours * price_per_hour:,.0f} at ${price_per_hour:.2f} per GPU-hour", source))
    energy = f"{run.energy_kwh:,.1f} kWh at {cluster.gpu.watts:,.0f} W per GPU, without hosts"
    lines.append(("energy", energy, "estimated"))
    if run.measurement:
        lines.append(
            ("one GPU", f"{run.measurement.tokens_per_second:,} tokens/s in {run.measurement.file}", "measured")
        )
    return lines


def launch_command(recipe: str, options: list[str], cluster: Cluster) -> str:
    """Return the command that starts the run, with a line for each part."""
    file = "multi_node" if cluster.num_nodes > 1 else "multi_gpu" if cluster.num_gpus > 1 else "single_gpu"
    parts = [f"accelerate launch --config_file accelerate_configs/{file}.yaml"]
    if cluster.num_gpus > 1:
        parts.append(f"--num_processes {cluster.num_gpus}")
    if cluster.num_nodes > 1:
        parts.append(f"--num_machines {cluster.num_nodes} --machine_rank RANK --main_process_ip HOST")
    if not cluster.gpu.bf16:
        parts.append("--mixed_precision fp16")
    typed = [recipe, *options] + ([] if names_data(recipe, options) else ["--dataset_dir", NO_DATASET])
    return " \\\n    ".join([*parts, f"recipe/train.py --config {shlex.join(typed)}"])


def scaling_table(title: str, runs: dict[int, Forecast | str]) -> list[str]:
    """Return the lines of a table. Efficiency: tokens/s per GPU, relative to the first line."""
    lines = [title, "  GPUs nodes     rows  micro-batch   tokens/s efficiency   MFU    hours      kWh"]
    planned = [run for run in runs.values() if isinstance(run, Forecast)]
    for num_gpus, run in runs.items():
        if isinstance(run, str):
            lines.append(f"{num_gpus:6}  {run}"[:80])
            continue
        efficiency = run.tokens_per_second / run.num_gpus * planned[0].num_gpus / planned[0].tokens_per_second
        micro_batch = f"{run.plan.micro_batch_size} x {run.num_micro_batches}"
        lines.append(
            f"{num_gpus:6}{run.num_nodes:6}{run.num_rows:9,}{micro_batch:>11}{run.tokens_per_second:13,.0f}"
            f"{efficiency:11.0%}{run.mfu:6.0%}{24 * run.days:9,.1f}{run.energy_kwh:9,.0f}"
        )
    return lines


def as_json(run: Forecast | str, price_per_hour: float | None) -> dict[str, Any]:
    """Return a forecast and its derived numbers as JSON values."""
    if isinstance(run, str):
        return {"not_planned": run}
    more = {"memory_bytes": run.plan.total_bytes, "days": run.days}
    more["source"] = "measured" if run.is_measured else "estimated"
    more["cost"] = price_per_hour and run.gpu_hours * price_per_hour
    return {**dataclasses.asdict(run), **more}


if __name__ == "__main__":
    run_main(main)
