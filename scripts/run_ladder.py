"""What is each optimization worth on this machine? One plain training loop; every optimization is one `if` in it.

python scripts/run_ladder.py                            add one optimization after another
python scripts/run_ladder.py --max_minutes 5            train for five minutes on each rung and compare the losses
python scripts/run_ladder.py --fill_memory              on a GPU, the largest batch that fits on each rung

Every rung trains stock GPT-2 on the same rows, in a fresh process. The last rung is recipe/train.py itself; its
minutes include evaluations and export. Options of recipe/train.py choose model, data, batch and length. Results: a
JSON file, and the ladder's chart (.png) beside it. scripts/benchmarks/peers.py compares with other programs.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from recipe.arguments import CommandLine, as_path, shell_command, typed_names
from recipe.charts import COLORS, label_point, open_chart
from recipe.command_line import load_config, load_yaml
from recipe.config import DATA_SOURCES, DEFAULTS, TEXT_OPTIONS, TrainConfig
from recipe.data.batches import example_rows, iterate_validation
from recipe.data.cache import open_dataset_for, prepare_text
from recipe.data.packed import PackedDataset
from recipe.environment import count_cpus, describe_environment, describe_machine
from recipe.errors import UserError, run_main, short_reason
from recipe.hardware.accelerator import find_machine, measure_open
from recipe.hardware.choices import Machine, choose, in_words
from recipe.hardware.devices import DTYPES, peak_memory_bytes, why_no_inductor
from recipe.hardware.memory import USABLE_SHARE, MemoryPlan, estimate_bytes, measure_usable_bytes
from recipe.metrics import read_events
from recipe.model.build import build_model_config
from recipe.model.size import count_parameters, padded_vocab_size

# Rungs start in the environment that the user had, without what recipe/__init__.py adds to it on Linux.
if __name__ in ("__main__", "__mp_main__") and sys.platform == "linux":  # the second is the process of a rung
    for name in os.environ.keys() - psutil.Process().environ().keys():
        del os.environ[name]

TRAIN = Path(__file__).resolve().parents[1] / "recipe" / "train.py"
RUNGS = {  # in the order in which they are added
    "fp32": "fp32, as a first program",
    "tf32": "TF32",
    "half": "bf16 (else fp16, scaled)",
    "compile": "torch.compile",
    "flash": "flash attention, no mask",
    "padding": "padded vocabulary",
    "tied": "tied embeddings",
    "fused": "fused AdamW",
    "packed": "packed rows, read at once",
    "no_sync": "no synchronization",
    "loss_in_graph": "loss in the graph",
    "huge_pages": "huge pages",
}
RECIPE = "recipe/train.py"
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
LAP = 4  # steps; the first lap warms up, and the median of the others counts
MOST_TOKENS = 2**17  # per forward pass with --fill_memory
# Of recipe/train.py: GPT-2 as OpenAI built it, without dropout. Typed options come after them.
OPTIONS = "--attn_implementation auto --optim adamw_torch_fused --learning_rate 3e-4 --weight_decay 0.01"
OPTIONS += f" --lr_scheduler_type constant --warmup_steps 0 --logging_steps {LAP} --save_steps 0 --eval_steps 0"
OPTIONS += " --max_eval_samples 64"
ON_A_GPU = "--per_device_train_batch_size 16 --global_batch_size 64"
# 30 M parameters with tied embeddings, because GPT-2 124M takes minutes for a step.
ON_A_CPU = "--per_device_train_batch_size 4 --global_batch_size 16 --block_size 256"
ON_A_CPU += " --config_overrides n_layer=6,n_head=6,n_embd=384"
TEXT = "--dataset_name python_standard_library --tokenizer_vocab_size 50257"  # the demo's, and GPT-2's size
LENGTH = f"--max_steps {4 * LAP}"


def train(on: set[str], config: TrainConfig) -> dict[str, Any]:
    """Train GPT-2 with the optimizations in `on`, a subset of `RUNGS`. Call it in a fresh process."""
    if "huge_pages" in on:  # of 2 MB instead of 4 KB; torch's allocator reads this once, at its first tensor
        os.environ[HUGE_PAGES] = "1"
    ends_at = psutil.Process().create_time() + 60 * (config.max_minutes or 0)
    device = find_device()
    dataset = open_dataset_for(config)
    rows = dataset.train
    num_steps = config.max_steps or 0
    micro_batch = int(config.per_device_train_batch_size)
    grad_accum = config.global_batch_size // micro_batch
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(count_cpus())
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("high" if "tf32" in on else "highest")

    attention = "eager"  # matmul, softmax, matmul: [batch, heads, tokens, tokens] in memory
    if "flash" in on:  # a name without a mask function: stock "sdpa" builds a mask, which rules out flash kernels
        AttentionInterface.register("sdpa_without_mask", sdpa_attention_forward)
        attention = "sdpa_without_mask"
    model_config = describe_model(on, config, dataset)
    model = AutoModelForCausalLM.from_config(model_config, attn_implementation=attention)
    if "padding" in on:  # 50257 -> 50304 = 393 * 128; after the random weights, which stay the same
        model.resize_token_embeddings(pad_to_multiple_of=128, mean_resizing=False)
    model.to(device)

    precision = config.mixed_precision if "half" in on else "no"
    autocast = torch.autocast(device.type, DTYPES[precision], enabled=precision != "no")
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")  # small gradients would be zero in fp16

    def compute_logits(input_ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids, use_cache=False).logits

    if "compile" in on and "loss_in_graph" not in on:
        compute_logits = torch.compile(compute_logits, dynamic=False)

    def compute_loss(input_ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(compute_logits(input_ids).flatten(0, 1).float(), targets.flatten())

    if "compile" in on and "loss_in_graph" in on:  # fp32 logits, gigabytes of them, are never stored
        compute_loss = torch.compile(compute_loss, dynamic=False)

    # True: one kernel. None, torch's default: a chain of kernels, and each of them reads and writes every parameter.
    fused = True if "fused" in on else None
    optimizer = torch.optim.AdamW(
        model.parameters(), config.learning_rate, (0.9, 0.95), weight_decay=config.weight_decay, fused=fused
    )

    def read_batch(number: int) -> torch.Tensor:
        examples = np.arange(number * micro_batch, (number + 1) * micro_batch)
        indices = example_rows(examples, len(rows), config.seed)
        if "packed" not in on:  # as from a list of documents: Python integers, row by row
            return torch.tensor([rows[index][0].tolist() for index in indices[:, None]]).to(device)
        batch = torch.from_numpy(rows[indices])
        if device.type == "cuda":
            batch = batch.pin_memory()
        return batch.to(device, non_blocking=True)

    laps = []
    step = 0
    lap_started_at = time.perf_counter()
    while time.time() < ends_at if config.max_minutes else step < num_steps:
        step_loss = torch.zeros((), device=device)
        for micro_step in range(grad_accum):
            batch = read_batch(step * grad_accum + micro_step)
            with autocast:
                loss = compute_loss(batch[:, :-1], batch[:, 1:]) / grad_accum
            scaler.scale(loss).backward()
            step_loss += loss.detach()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        step += 1
        if "no_sync" not in on:  # a log line in every step: the device idles until the host has read it
            step_loss.item()
        if step % LAP == 0:
            step_loss.item()  # waits for the device
            laps.append((time.perf_counter() - lap_started_at) / LAP)
            lap_started_at = time.perf_counter()

    peak = peak_memory_bytes(device)
    losses = []
    with autocast:  # with gradients, so that the compiled graph is used again
        for eval_rows, _ in iterate_validation(dataset.validation, int(config.max_eval_samples), micro_batch, 0, 1):
            batch = torch.from_numpy(eval_rows).to(device)
            losses.append(compute_loss(batch[:, :-1], batch[:, 1:]).item())
    if len(laps) < 2:
        raise UserError(f"{step} steps fit into the time; {2 * LAP} are needed")
    tokens_per_second = config.global_batch_size * dataset.block_size / statistics.median(laps[1:])
    return {
        "steps": step,
        "step_ms": 1000 * statistics.median(laps[1:]),
        "tokens_per_second": tokens_per_second,
        "peak_memory_bytes": peak,
        "loss": statistics.fmean(losses),
        "precision": in_words("precision", precision),
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def train_recipe(options: list[str]) -> dict[str, Any]:
    """Train the same with recipe/train.py."""
    with tempfile.TemporaryDirectory() as folder:
        run_program([str(TRAIN), *options, "--output_dir", f"{folder}/run"])
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
        laps = [event for event in read_events(Path(folder, "run")) if event["event"] == "train"]
    median = {key: statistics.median(lap[key] for lap in laps[1:] or laps) for key in ("step_ms", "tokens_per_second")}
    return {
        "steps": summary["step"],
        **median,
        "peak_memory_bytes": summary["peak_memory_bytes"],
        "loss": summary["eval_loss"],
        "precision": in_words("precision", summary["mixed_precision"]),
        "attention": summary["attn_implementation"],
        "num_parameters": summary["num_parameters"],
    }


def run_program(command: list[str]) -> None:
    """Run a Python program. Raises `UserError` with its last line if it fails."""
    result = subprocess.run(
        [sys.executable, *command],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if result.returncode != 0:
        raise UserError((result.stdout.strip() or "it printed nothing").splitlines()[-1])


def find_device() -> torch.device:
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def describe_model(on: set[str], config: TrainConfig, dataset: PackedDataset) -> PreTrainedConfig:
    """Return the config of a rung's model, without padding."""
    model_config = build_model_config(config, dataset.vocab_size, dataset.metadata["eos_token_id"])
    model_config.tie_word_embeddings = "tied" in on
    return model_config


def why_skipped(rung: str, precision: str) -> str | None:
    """Return why this machine cannot show a rung, or None. precision: that recipe/train.py takes here."""
    device = find_device()
    if rung == "tf32" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
        return "this device has no TF32"
    if rung == "half" and precision == "no":
        return "fp32 is faster than bf16 here"
    if rung == "no_sync" and device.type == "cpu":
        return "on a CPU nothing runs ahead of the host"
    if rung == "huge_pages" and (device.type != "cpu" or sys.platform != "linux"):
        return "for CPUs with Linux only"
    if rung == "huge_pages" and HUGE_PAGES in os.environ:
        return f"your environment sets {HUGE_PAGES}"
    return why_no_inductor(device) if rung in ("compile", "loss_in_graph") else None


# What to measure: a label, and either a function to call in a fresh process or the reason why it is not run.
Plan = list[tuple[str, Callable[[], dict] | str]]


def fill_memory(on: set[str], config: TrainConfig, memory_bytes: float) -> TrainConfig:
    """Return the config with the largest micro-batch, a multiple of 4 rows, that fits by the rung's estimate."""
    rung = dataclasses.replace(
        config,
        attn_implementation="sdpa" if "flash" in on else "eager",
        mixed_precision=config.mixed_precision if "half" in on else "no",
        optim="adamw_torch_fused" if "fused" in on else "adamw_torch",
        # The compiled step's estimate has the loss in its graph; earlier rungs use the uncompiled step's.
        dynamo_backend="inductor" if "loss_in_graph" in on else "no",
    )
    model_config = describe_model(on, config, open_dataset_for(config))
    model_config.vocab_size = padded_vocab_size(model_config.vocab_size, 128 if "padding" in on else 1)
    sizes = range(8, MOST_TOKENS // config.block_size + 1, 4)
    plans = (MemoryPlan(size, False, 1) for size in sizes)
    machine = Machine("cuda")
    room = USABLE_SHARE * memory_bytes
    fit = itertools.takewhile(lambda plan: estimate_bytes(plan, rung, model_config, machine) < room, plans)
    size = max((plan.micro_batch_size for plan in fit), default=4)
    grad_accum = config.global_batch_size // int(config.per_device_train_batch_size)
    return dataclasses.replace(config, per_device_train_batch_size=size, global_batch_size=size * grad_accum)


def plan_ladder(config: TrainConfig, options: list[str], names: list[str], memory_bytes: float | None = None) -> Plan:
    """Add one optimization after another, then train with the recipe itself.

    names: of the rungs to run, besides the first. memory_bytes: let each rung fill this much.
    """
    plan: Plan = []
    on: set[str] = set()
    for rung, what in RUNGS.items():
        if reason := why_skipped(rung, config.mixed_precision):
            if rung in names:
                plan.append((what, reason))
            continue
        on = on | {rung}
        if memory_bytes:
            config = fill_memory(on, config, memory_bytes)
        label = f"{what}, {config.per_device_train_batch_size} rows" if memory_bytes else what
        if rung in ("fp32", *names):
            plan.append((label, partial(train, on, config)))
    for name in ("per_device_train_batch_size", "global_batch_size", "max_eval_samples"):
        options = [*options, f"--{name}", str(getattr(config, name))]
    return [*plan, (RECIPE, partial(train_recipe, options))]


def measure_rung(job: Callable[[], dict] | str) -> dict:
    """Return the numbers of a rung, or why it did not run."""
    if isinstance(job, str):
        return {"not_run": job}
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(attempt, job).result()
    except BrokenProcessPool:
        return {"not_run": "the process was killed, perhaps for lack of memory"}


def attempt(job: Callable[[], dict]) -> dict:
    """Return the numbers of a rung, or why it failed: out of memory, or a compiler that does not work."""
    try:
        return job()
    except Exception as error:
        return {"not_run": str(error) if isinstance(error, UserError) else short_reason(error)}


HEADER = f"| {'':25} |    ms |   tok/s | ratio |    GB |  loss | change |\n|---|---:|---:|---:|---:|---:|---:|"


def make_row(entry: dict, entries: list[dict]) -> str:
    """Return a row of the table, in 80 columns. Speedup and change of the loss compare with the first that ran."""
    if "not_run" in entry:
        return f"| {entry['what']:25} | not run: {entry['not_run']} | | | | | |"
    first = next(other for other in entries if "not_run" not in other)
    speed = entry["tokens_per_second"]
    cells = [f"{entry['what']:25}", f"{entry['step_ms']:5,.0f}", f"{speed:7,.0f}"]
    cells.append(f"{speed / first['tokens_per_second']:5.2f}")
    cells.append(f"{entry['peak_memory_bytes'] / 1e9:5.2f}")
    cells += [f"{entry['loss']:5.2f}", f"{entry['loss'] - first['loss']:+6.3f}"]
    return f"| {' | '.join(cells)} |"


def draw(path: Path, machine: str, entries: list[dict]) -> None:
    """Draw a bar per rung: its tokens per second, its speedup over the first one, and its loss."""
    timed = [entry for entry in entries if "not_run" not in entry]
    title = "Tokens per second, and final loss"
    with open_chart(path, title, machine, 0.42 * len(timed) + 0.6) as axes:
        for row, entry in enumerate(timed):
            speed = entry["tokens_per_second"]
            axes.barh(row, speed, height=0.7, color=COLORS["blue"])
            label_point(axes, f"{speed / timed[0]['tokens_per_second']:.2f}×, {entry['loss']:.2f}", speed, row)
        axes.set_yticks(range(len(timed)), [entry["what"] for entry in timed], color=COLORS["text"])
        axes.set_ylim(len(timed) - 0.4, -0.6)
        axes.set_xlim(0, 1.6 * max(entry["tokens_per_second"] for entry in timed))  # room for the labels
        axes.grid(axis="x")


def resolve(options: list[str]) -> TrainConfig:
    """Return the options with what this machine and the data decide."""
    config = load_config(options).config
    if config.model_type not in (None, "gpt2"):
        raise UserError(f"the ladder measures GPT-2, but {config.model_type} was chosen")
    if len(config.dataset_dir or ()) > 1:
        raise UserError("the ladder trains on one dataset, but the recipe mixes several; pass one as --dataset_dir")
    if not config.max_minutes and (config.max_steps or 0) < 2 * LAP:
        raise UserError(f"--max_steps must be at least {2 * LAP}: the first {LAP} steps do not count")
    micro_batch = config.per_device_train_batch_size
    if micro_batch == "auto" or config.global_batch_size % micro_batch:
        raise UserError("--per_device_train_batch_size must be a number that divides --global_batch_size")
    prepared = {name: DEFAULTS[name] for name in (*DATA_SOURCES, *TEXT_OPTIONS)}
    prepared["dataset_dir"] = list(map(str, prepare_text(config)))  # once for all rungs
    config = dataclasses.replace(config, **prepared)
    dataset = open_dataset_for(config)
    device = find_device()
    num_rows = config.max_eval_samples if isinstance(config.max_eval_samples, int) else len(dataset.validation)
    num_rows = min(len(dataset.validation), num_rows) // micro_batch * micro_batch
    if num_rows == 0:
        raise UserError(
            f"the validation split has fewer rows than a micro-batch of {micro_batch}; choose a smaller one"
        )
    model_config = build_model_config(config, padded_vocab_size(dataset.vocab_size, 128), 0)
    machine = find_machine(device)
    precision = choose(config, machine, measure_open(config, machine, device, model_config))["precision"].value
    return dataclasses.replace(config, mixed_precision=precision, max_eval_samples=num_rows)


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = CommandLine(description="What is each optimization worth here? Other options go to recipe/train.py.")
    rungs = f"show only these, after fp32; those before them stay on: {', '.join(RUNGS)}"
    parser.add_argument("--rungs", nargs="+", choices=RUNGS, default=list(RUNGS), metavar="RUNG", help=rungs)
    parser.add_argument("--config", type=as_path, help="recipe (default: gpt2_124m; on a CPU, 30 M parameters)")
    parser.add_argument("--fill_memory", action="store_true", help="give each rung the largest micro-batch (GPU)")
    parser.add_argument("--output_file", type=Path, help="JSON to write (default: a new file in runs/)")
    args, typed = parser.parse_with_run_options()
    if args.fill_memory and not torch.cuda.is_available():
        raise UserError("--fill_memory needs a GPU; without one, memory is not what limits the batch")
    recipe = args.config or "gpt2_124m"
    names = typed_names(typed)
    device = find_device()
    options = ["--config", recipe, *OPTIONS.split()]
    options += ["--dynamo_backend", "no" if why_no_inductor(device) else "inductor"]
    options += (ON_A_CPU if device.type == "cpu" and not args.config else ON_A_GPU).split()
    if not {*DATA_SOURCES} & (names | load_yaml(recipe).keys()):
        options += TEXT.split()
    if not {"max_steps", "max_minutes"} & names:
        options += LENGTH.split()
    return args, [*options, *typed]


def main() -> None:
    args, options = parse()
    config = resolve(options)
    device = find_device()
    memory_bytes = measure_usable_bytes(device, 1) if args.fill_memory else None
    plan = plan_ladder(config, options, args.rungs, memory_bytes)
    path = args.output_file or Path("runs") / time.strftime(f"ladder_{device.type}_%Y%m%d-%H%M%S.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    environment = describe_environment(device)
    entries = []
    num_parameters = count_parameters(describe_model({"tied"}, config, open_dataset_for(config)))
    limit = f"{config.max_minutes:g} minutes" if config.max_minutes else f"{config.max_steps} steps"
    about = {
        "what": f"{describe_machine(environment)}; GPT-2 with {num_parameters / 1e6:.1f} M parameters; "
        f"{config.global_batch_size} rows of {config.block_size} tokens per step, "
        f"{config.per_device_train_batch_size} at a time; {limit} per row",
        "command": shell_command("python", *sys.argv),
        "environment": environment,
    }
    print(f"{textwrap.fill(about['what'], 80)}\n\n{HEADER}", flush=True)
    for what, job in plan:
        entries.append({"what": what, **measure_rung(job)})
        print(make_row(entries[-1], entries), flush=True)
        about["finished_at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        path.write_text(json.dumps({**about, "entries": entries}, indent=2) + "\n")
    if all("not_run" in entry for entry in entries):
        raise UserError(f"nothing could be measured: {entries[0]['not_run']}")
    draw(path.with_suffix(".png"), describe_machine(environment), entries)
    print(f"\nResults: {path}")


if __name__ == "__main__":
    run_main(main, "interrupted; the results so far are in the output file", is_alone=True)
