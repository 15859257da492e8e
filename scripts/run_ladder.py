"""What is each optimization worth on this machine? One plain training loop; every optimization is one `if` in it.

python scripts/run_ladder.py                            add one optimization after another
python scripts/run_ladder.py --minutes 5                train for five minutes on each rung and compare the losses
python scripts/run_ladder.py --fill_memory              on a GPU, each rung with the largest batch that then fits
python scripts/run_ladder.py --input                    where batches come from: text, packed ids, RAM, workers
git clone https://github.com/karpathy/nanoGPT runs/nanoGPT
python scripts/run_ladder.py --peers runs/nanoGPT runs/run_clm.py       recipe/train.py and other programs, in turn

Every rung trains stock GPT-2 on the same rows, in a fresh process. The last rung is recipe/train.py itself; its
minutes include evaluations and export. Known other programs are nanoGPT and examples/pytorch/language-modeling/
run_clm.py of Transformers' repository. Results: a JSON file, and the ladder's chart (.png) beside it.
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AutoModelForCausalLM, GPT2Config, PreTrainedTokenizerFast
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from recipe.arguments import CommandLine, as_path, shell_command
from recipe.charts import label_point, open_chart
from recipe.command_line import load_config, load_yaml
from recipe.config import DATA_SOURCES, STANDARD_LIBRARY
from recipe.data.batches import example_rows, iterate_validation
from recipe.data.cache import open_dataset_for
from recipe.data.packed import PackedSplit, open_packed_dataset
from recipe.environment import count_cpus, describe_environment, describe_machine
from recipe.errors import UserError, run_main, short_reason
from recipe.hardware.accelerator import find_machine, measure_open
from recipe.hardware.choices import Machine, choose, in_words
from recipe.hardware.devices import peak_memory_bytes, why_no_inductor
from recipe.hardware.memory import USABLE_SHARE, MemoryPlan, estimate_bytes, measure_usable_bytes
from recipe.metrics import read_events
from recipe.model.build import build_model_config
from recipe.model.size import count_parameters, padded_vocab_size

# Rungs and peers start in the environment that the user had, without what recipe/__init__.py adds to it on Linux.
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
INPUTS: dict[str, dict[str, Any]] = {  # options of recipe/train.py
    "packed ids, mapped": {},
    "packed ids in RAM": {"data_placement": "ram"},
    "packed ids on the device": {"data_placement": "device"},
    "mapped, 2 workers": {"dataloader_num_workers": 2},
    "mapped, 4 workers": {"dataloader_num_workers": 4},
}
SEED, LEARNING_RATE = 1337, 3e-4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOKENIZING = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
# This expression keeps nanoGPT from half precision on a CPU. The other replaces it where bf16 is faster.
NANOGPT_CONTEXT = (
    "nullcontext() if device_type == 'cpu' else torch.amp.autocast(device_type=device_type, dtype=ptdtype)"
)
NANOGPT_AUTOCAST = "torch.amp.autocast(device_type=torch.device(device).type, dtype=ptdtype)"
LAP = 4  # steps; the first lap warms up, and the median of the others counts
MOST_TOKENS = 2**17  # per forward pass with --fill_memory
EVAL_ROWS = 64  # validation rows for the final loss
ROWS_PER_TEXT = 8  # run_clm.py refuses a text of fewer tokens than a row has
GPT2_SHAPE = {"n_layer": 12, "n_head": 12, "n_embd": 768}
# Without a GPU: 30 M parameters with tied embeddings, because GPT-2 124M takes minutes per step.
CPU_SHAPE = ["--config_overrides", "n_layer=6,n_head=6,n_embd=384"]
CPU_ROWS = ["--block_size", "256"]


@dataclass(frozen=True)
class Setting:
    """What all rungs share. seconds: time limit of a rung, from the start of its process; None: num_steps decides."""

    device: str
    precision: str  # that recipe/train.py takes on this device: fp32, bf16 or fp16
    dataset_dir: Path
    vocab_size: int
    shape: dict[str, Any]  # n_layer, n_head, n_embd
    block_size: int
    micro_batch: int
    grad_accum: int
    num_steps: int
    seconds: float | None
    eval_rows: int  # validation rows for the final loss

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.grad_accum


def train(on: set[str], setting: Setting) -> dict[str, Any]:
    """Train GPT-2 with the optimizations in `on`, a subset of `RUNGS`. Call it in a fresh process."""
    if "huge_pages" in on:  # of 2 MB instead of 4 KB; torch's allocator reads this once, at its first tensor
        os.environ[HUGE_PAGES] = "1"
    ends_at = psutil.Process().create_time() + (setting.seconds or 0)
    device, dataset = torch.device(setting.device), open_packed_dataset(setting.dataset_dir, setting.block_size)
    rows, micro_batch, grad_accum = dataset.train, setting.micro_batch, setting.grad_accum
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(count_cpus())
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high" if "tf32" in on else "highest")

    attention = "eager"  # matmul, softmax, matmul: [batch, heads, tokens, tokens] in memory
    if "flash" in on:  # a name without a mask function: stock "sdpa" builds a mask, which rules out flash kernels
        AttentionInterface.register("sdpa_without_mask", sdpa_attention_forward)
        attention = "sdpa_without_mask"
    model_config = GPT2Config(
        vocab_size=dataset.vocab_size,
        n_positions=dataset.block_size,
        tie_word_embeddings="tied" in on,
        bos_token_id=dataset.metadata["eos_token_id"],
        eos_token_id=dataset.metadata["eos_token_id"],
        resid_pdrop=0.0,  # GPT2Config's default is 0.1
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **setting.shape,
    )
    model = AutoModelForCausalLM.from_config(model_config, attn_implementation=attention)
    if "padding" in on:  # 50257 -> 50304 = 393 * 128; after the random weights, which stay the same
        model.resize_token_embeddings(pad_to_multiple_of=128, mean_resizing=False)
    model.to(device)

    precision = setting.precision if "half" in on else "fp32"
    autocast = torch.autocast(device.type, DTYPES[precision], enabled=precision != "fp32")
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
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, (0.9, 0.95), fused=fused)

    def order(number: int) -> np.ndarray:
        return example_rows(np.arange(number * micro_batch, (number + 1) * micro_batch), len(rows), SEED)

    def read_batch(number: int) -> torch.Tensor:
        indices = order(number)
        if "tokenize" in on:  # the text of each batch, padded and cut, in the step that needs it
            ids = dataset.tokenizer(texts[number % len(texts)], **TOKENIZING, max_length=rows.block_size + 1)
            return ids.input_ids.to(device)
        if "packed" not in on:  # as from a list of documents: Python integers, row by row
            return torch.tensor([rows[index][0].tolist() for index in indices[:, None]]).to(device)
        batch = torch.from_numpy(rows[indices])
        return (batch.pin_memory() if device.type == "cuda" else batch).to(device, non_blocking=True)

    if "tokenize" in on:
        dataset.tokenizer.pad_token = dataset.tokenizer.eos_token
        numbers = range(setting.num_steps * grad_accum)
        texts = [dataset.tokenizer.batch_decode(rows[order(number)].tolist()) for number in numbers]

    laps, lap_started_at, step = [], time.perf_counter(), 0
    while step < setting.num_steps if setting.seconds is None else time.time() < ends_at:
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

    peak, losses = peak_memory_bytes(device), []
    with autocast:  # with gradients, so that the compiled graph is used again
        for eval_rows, _ in iterate_validation(dataset.validation, setting.eval_rows, micro_batch, 0, 1):
            batch = torch.from_numpy(eval_rows).to(device)
            losses.append(compute_loss(batch[:, :-1], batch[:, 1:]).item())
    if len(laps) < 2:
        raise UserError(f"{step} steps fit into the time; {2 * LAP} are needed")
    tokens_per_second = setting.global_batch * dataset.block_size / statistics.median(laps[1:])
    return {
        "steps": step,
        "step_ms": 1000 * statistics.median(laps[1:]),
        "tokens_per_second": tokens_per_second,
        "peak_memory_bytes": peak,
        "loss": statistics.fmean(losses),
        "precision": precision,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def train_recipe(setting: Setting, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train the same with recipe/train.py. more: options."""
    length = {"max_steps": setting.num_steps} if setting.seconds is None else {"max_minutes": setting.seconds / 60}
    options = {
        **{"config": "gpt2_124m", "attn_implementation": "auto"},  # GPT-2 as OpenAI built it, without dropout
        **{"dataset_dir": setting.dataset_dir, "block_size": setting.block_size},
        "config_overrides": ",".join(f"{key}={value}" for key, value in setting.shape.items()),
        **length,
        **{"global_batch_size": setting.global_batch, "per_device_train_batch_size": setting.micro_batch},
        **{"optim": "adamw_torch_fused", "learning_rate": LEARNING_RATE, "weight_decay": 0.01, "seed": SEED},
        **{"lr_scheduler_type": "constant", "warmup_steps": 0, "logging_steps": LAP},
        **{"eval_steps": 0, "max_eval_samples": max(1, setting.eval_rows), "save_steps": 0},
        "dynamo_backend": "no" if why_no_inductor(torch.device(setting.device)) else "inductor",
        **(more or {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        arguments = [text for key, value in options.items() for text in (f"--{key}", str(value))]
        run_program([str(TRAIN), *arguments, "--output_dir", f"{folder}/run"])
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
        laps = [event for event in read_events(Path(folder, "run")) if event["event"] == "train"]
    median = {
        key: statistics.median(lap[key] for lap in laps[1:] or laps)
        for key in ("step_ms", "tokens_per_second", "share_waiting_for_data")
    }
    return {
        "steps": summary["step"],
        **median,
        "peak_memory_bytes": summary["peak_memory_bytes"],
        "loss": summary["eval_loss"],
        "precision": in_words("precision", summary["mixed_precision"]),
        "attention": summary["attn_implementation"],
        "num_parameters": summary["num_parameters"],
    }


def train_nanogpt(source: Path, setting: Setting) -> dict[str, Any]:
    """Train the same with a copy of nanoGPT and our tokens. Raises `UserError` if that fails."""
    device, dataset = torch.device(setting.device), open_packed_dataset(setting.dataset_dir, setting.block_size)
    if dataset.vocab_size > 2**16:
        raise UserError(f"nanoGPT reads 16-bit token ids, but this vocabulary has {dataset.vocab_size:,} tokens")
    precision, program, change = setting.precision, source / "train.py", {}
    code = program.read_text(encoding="utf-8")
    if device.type != "cuda" and precision != "fp32":
        if NANOGPT_CONTEXT not in code:
            raise UserError(f"its train.py has no `{NANOGPT_CONTEXT}` to replace for {precision}")
        code = code.replace(NANOGPT_CONTEXT, NANOGPT_AUTOCAST)
        change = {"change": f"`{NANOGPT_AUTOCAST}` instead of `{NANOGPT_CONTEXT}`"}
    options = {
        **{"dataset": "ladder", "device": setting.device, "bias": True, "dropout": 0.0, **setting.shape},
        **{"block_size": dataset.block_size, "batch_size": setting.micro_batch},
        **{"gradient_accumulation_steps": setting.grad_accum, "max_iters": setting.num_steps, "log_interval": 1},
        **{"eval_interval": 10**6, "eval_iters": 1, "decay_lr": False, "learning_rate": LEARNING_RATE},
        **{"dtype": str(DTYPES[precision]).removeprefix("torch."), "compile": why_no_inductor(device) is None},
    }
    with tempfile.TemporaryDirectory() as folder:
        copy, data = Path(folder, "nanoGPT"), Path(folder, "nanoGPT", "data", "ladder")
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns(".git", "*.bin"))
        (copy / "train.py").write_text(code, encoding="utf-8")
        data.mkdir(parents=True)
        for split, name in (("train", "train.bin"), ("validation", "val.bin")):
            num_rows = min(
                len(getattr(dataset, split)), setting.num_steps * setting.global_batch
            )  # as many as it reads
            getattr(dataset, split)[np.arange(num_rows)][:, :-1].astype(np.uint16).tofile(data / name)
        vocab_size = -(-dataset.vocab_size // 128) * 128
        (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))  # else it uses GPT-2's
        output = run_program(["train.py", *(f"--{key}={value}" for key, value in options.items())], copy)
    seconds = [ms / 1e3 for ms in find_numbers(r"^iter \d+:.* time ([\d.]+)ms", output)]
    num_parameters = find_numbers(r"decayed parameter tensors: \d+, with ([\d,]+) parameters", output)
    return describe_peer(setting, seconds[LAP:], precision, num_parameters, program) | change


def train_run_clm(source: Path, setting: Setting) -> dict[str, Any]:
    """Train the same with Transformers' run_clm.py and our text. Raises `UserError` if that fails."""
    device, dataset = torch.device(setting.device), open_packed_dataset(setting.dataset_dir, setting.block_size)
    precision, end = setting.precision, dataset.metadata["eos_token_id"]
    overrides = {**setting.shape, "n_positions": dataset.block_size, "vocab_size": dataset.vocab_size}
    overrides |= {"bos_token_id": end, "eos_token_id": end, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    options = {
        **{"model_type": "gpt2", "config_overrides": ",".join(f"{key}={value}" for key, value in overrides.items())},
        **{"tokenizer_name": dataset.directory.absolute() / "tokenizer", "block_size": dataset.block_size},
        **{"do_train": True, "max_steps": setting.num_steps, "dataloader_drop_last": True},
        **{"per_device_train_batch_size": setting.micro_batch, "gradient_accumulation_steps": setting.grad_accum},
        **{"optim": "adamw_torch_fused", "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant"},
        **{"torch_compile": why_no_inductor(device) is None, "use_cpu": device.type == "cpu"},
        **({precision: True} if precision != "fp32" else {}),
        **{"logging_steps": LAP, "disable_tqdm": True, "save_strategy": "no", "report_to": "none"},
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, split, num_rows in (
            ("train_file", dataset.train, setting.num_steps * setting.global_batch * 9 // 8),  # the ends are lost
            ("validation_file", dataset.validation, ROWS_PER_TEXT),  # never evaluated; else it splits the text
        ):
            options[name] = Path(folder, f"{name}.json")
            write_texts(options[name], split, num_rows, dataset.tokenizer)
        options |= {"output_dir": f"{folder}/run", "cache_dir": f"{folder}/cache"}
        arguments = [text for key, value in options.items() for text in (f"--{key}", str(value))]
        output = run_program([str(source.absolute()), *arguments], Path(folder))
    arrived_at = [seconds for seconds, line in output if line.startswith("{'loss'")]  # a line per lap
    step_seconds = (np.diff(arrived_at) / LAP).tolist()
    num_parameters = find_numbers(r"trainable parameters = ([\d,]+)", output)
    return describe_peer(setting, step_seconds, precision, num_parameters, source)


def write_texts(path: Path, split: PackedSplit, num_rows: int, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write rows of a dataset as JSON Lines, several in each text."""
    with path.open("w", encoding="utf-8") as file:
        for first in range(0, num_rows, ROWS_PER_TEXT):
            rows = split[np.arange(first, first + ROWS_PER_TEXT) % len(split)]
            file.write(json.dumps({"text": tokenizer.decode(rows[:, :-1].ravel().tolist())}) + "\n")


def find_numbers(pattern: str, output: list[tuple[float, str]]) -> list[float]:
    """Return the numbers that a program has printed, such as 1,234,567."""
    matches = (re.search(pattern, line) for _, line in output)
    return [float(match[1].replace(",", "")) for match in matches if match]


def describe_peer(
    setting: Setting, step_seconds: list[float], precision: str, num_parameters: list[float], program: Path
) -> dict[str, Any]:
    """Return the result of another program. num_parameters: of each of its groups of parameters."""
    if not step_seconds:
        raise UserError("it printed no line per step that this program can read")
    return {
        "step_ms": 1000 * statistics.median(step_seconds),
        "tokens_per_second": setting.global_batch * setting.block_size / statistics.median(step_seconds),
        "precision": precision,
        "num_parameters": int(sum(num_parameters)),
        "program_sha256": hashlib.sha256(program.read_bytes()).hexdigest(),
    }


def run_program(command: list[str], cwd: Path | None = None) -> list[tuple[float, str]]:
    """Run a Python program. Returns its lines, each with the time at which it came (`perf_counter`).

    Raises `UserError` with the last line if the program fails.
    """
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]  # Trainer would take all
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": gpu}
    with subprocess.Popen([sys.executable, *command], cwd=cwd, env=environment, **options) as process:
        try:
            lines = [(time.perf_counter(), line.rstrip()) for line in process.stdout or ()]
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise UserError(next((line for _, line in reversed(lines) if line), "it printed nothing"))
    return lines


def why_skipped(rung: str, setting: Setting) -> str | None:
    """Return why this machine cannot show a rung, or None."""
    device = torch.device(setting.device)
    if rung == "tf32" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
        return "this device has no TF32"
    if rung == "half" and setting.precision == "fp32":
        return "fp32 is faster than bf16 here"
    if rung == "huge_pages" and (device.type != "cpu" or sys.platform != "linux"):
        return "for CPUs with Linux only"
    if rung == "huge_pages" and HUGE_PAGES in os.environ:
        return f"your environment sets {HUGE_PAGES}"
    return why_no_inductor(device) if rung in ("compile", "loss_in_graph") else None


# What to measure: a label, and either a function to call in a fresh process or the reason why it is not run.
Plan = list[tuple[str, Callable[[], dict] | str]]


def fill_memory(on: set[str], setting: Setting, memory_bytes: float) -> Setting:
    """Return the setting with the largest micro-batch, a multiple of 4 rows, that fits by the rung's estimate."""
    options = {
        **{"--config": "gpt2_124m", "--dataset_dir": setting.dataset_dir, "--block_size": setting.block_size},
        "--attn_implementation": "sdpa" if "flash" in on else "eager",
        "--mixed_precision": setting.precision if "half" in on and setting.precision != "fp32" else "no",
        "--optim": "adamw_torch_fused" if "fused" in on else "adamw_torch",
        # The compiled step's estimate has the loss in its graph; earlier rungs use the uncompiled step's.
        "--dynamo_backend": "inductor" if "loss_in_graph" in on else "no",
    }
    config = load_config([str(word) for option in options.items() for word in option])[0]
    model_config = GPT2Config(
        vocab_size=padded_vocab_size(setting.vocab_size, 128 if "padding" in on else 1),
        n_positions=setting.block_size,
        tie_word_embeddings="tied" in on,
        **setting.shape,
    )
    sizes = range(8, MOST_TOKENS // setting.block_size + 1, 4)
    plans = (MemoryPlan(size, False, 1) for size in sizes)
    machine, room = Machine(setting.device), USABLE_SHARE * memory_bytes
    fit = itertools.takewhile(lambda plan: estimate_bytes(plan, config, model_config, machine) < room, plans)
    return dataclasses.replace(setting, micro_batch=max((plan.micro_batch_size for plan in fit), default=4))


def plan_input(setting: Setting) -> Plan:
    """Train with every optimization on, and batches from text, from packed ids, and in each of the recipe's ways."""
    on = {rung for rung in RUNGS if not why_skipped(rung, setting)}
    plan: Plan = [("tokenizing each batch", partial(train, on | {"tokenize"}, setting))]
    plan.append(("packed ids, the same loop", partial(train, on, setting)))
    return plan + [(what, partial(train_recipe, setting, options)) for what, options in INPUTS.items()]


def plan_ladder(setting: Setting, names: list[str] | None, memory_bytes: float | None = None) -> Plan:
    """Add one optimization after another, then train with the recipe itself. names: of the rungs to run; None: all.

    memory_bytes: let each rung fill this much.
    """
    plan: Plan = []
    on: set[str] = set()
    for rung, what in RUNGS.items():
        if reason := why_skipped(rung, setting):
            plan.append((what, reason))
            continue
        on = on | {rung}
        if memory_bytes:
            setting = fill_memory(on, setting, memory_bytes)
        label = f"{what}, {setting.micro_batch} rows" if memory_bytes else what
        if names is None or rung in names or rung == "fp32":
            plan.append((label, partial(train, on, setting)))
    return [*plan, (RECIPE, partial(train_recipe, setting))]


def plan_comparison(setting: Setting, peers: list[Path], rounds: int) -> Plan:
    """Train with recipe/train.py and with other programs, in turn. Raises `UserError` for an unknown program."""
    plan: Plan = [(RECIPE, partial(train_recipe, setting))]
    for path in peers:
        if (path / "train.py").is_file():
            plan.append(("nanoGPT", partial(train_nanogpt, path, setting)))
        elif path.is_file():
            plan.append(("run_clm.py", partial(train_run_clm, path, setting)))
        else:
            clone = f"a clone of nanoGPT (git clone https://github.com/karpathy/nanoGPT {path})"
            raise UserError(f"{path} is neither {clone} nor a copy of run_clm.py")
    return plan * rounds


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
    if "loss" in entry:
        peak, loss = entry["peak_memory_bytes"] / 1e9, entry["loss"]
        cells += [f"{peak:5.2f}", f"{loss:5.2f}", f"{loss - first['loss']:+6.3f}"]
    return f"| {' | '.join(cells)} |" + " |" * (7 - len(cells))


def compare(entries: list[dict], rounds: int) -> list[str]:
    """Say how fast recipe/train.py is compared with each peer: the median of the rounds, and their range."""
    num_programs, lines = len(entries) // rounds, []
    for number in range(1, num_programs):
        pairs = zip(entries[::num_programs], entries[number::num_programs], strict=True)
        pairs = [(ours, peer) for ours, peer in pairs if "not_run" not in ours and "not_run" not in peer]
        ratios = sorted(ours["tokens_per_second"] / peer["tokens_per_second"] for ours, peer in pairs)
        if ratios:
            ours, peer = (entry["what"] for entry in pairs[0])
            median, spread = statistics.median(ratios), f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
            lines.append(f"{ours} is {median:.2f} times as fast as {peer}: {spread}")
            if change := pairs[0][1].get("change"):
                lines.append(textwrap.fill(f"{peer} {change}", 80))
    return lines


def draw(path: Path, machine: str, entries: list[dict], dark: bool) -> None:
    """Draw a bar per rung: its tokens per second, and its speedup over the first one."""
    timed = [entry for entry in entries if "not_run" not in entry]
    title = "Tokens per second, one optimization after another"
    with open_chart(path, title, machine, 0.42 * len(timed) + 0.6, dark) as (axes, colors):
        for row, entry in enumerate(timed):
            speed = entry["tokens_per_second"]
            axes.barh(row, speed, height=0.7, color=colors["blue"])
            label_point(axes, f"{speed / timed[0]['tokens_per_second']:.2f}×", speed, row)
        axes.set_yticks(range(len(timed)), [entry["what"] for entry in timed], color=colors["text"])
        axes.set_ylim(len(timed) - 0.4, -0.6)
        axes.set_xlim(0, 1.28 * max(entry["tokens_per_second"] for entry in timed))  # room for the labels
        axes.grid(axis="x")


def describe_size(setting: Setting, tied: bool) -> str:
    """Say how many parameters GPT-2 has, without padding."""
    options = {"vocab_size": setting.vocab_size, "n_positions": setting.block_size, **setting.shape}
    config = GPT2Config(**options, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=None)
    return f"{count_parameters(config) / 1e6:.1f} M"


def choose_setting(args: argparse.Namespace) -> Setting:
    """Choose the model, the data and the batch for this machine, and prepare the data if necessary."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    recipe = args.config or "gpt2_124m"
    small = args.config is None and device.type == "cpu"
    options = ["--config", recipe, *(CPU_SHAPE if small else [])]
    if args.dataset_dir:
        options += ["--dataset_dir", args.dataset_dir]
    elif not set(load_yaml(recipe)) & set(DATA_SOURCES):  # the demo's text, with a tokenizer of GPT-2's size
        options += ["--dataset_name", STANDARD_LIBRARY, "--tokenizer_vocab_size", "50257"]
        options += CPU_ROWS if small else []
    config = load_config(options)[0]
    if config.model_type not in (None, "gpt2"):
        raise UserError(f"the ladder measures GPT-2, but {recipe} trains a {config.model_type}")
    if len(config.dataset_dir or ()) > 1:
        raise UserError(f"the ladder trains on one dataset, but {recipe} mixes several; pass one as --dataset_dir")
    dataset, micro_batch = open_dataset_for(config), args.micro_batch or (4 if device.type == "cpu" else 16)
    eval_rows = min(EVAL_ROWS, len(dataset.validation)) // micro_batch * micro_batch
    if eval_rows == 0 and not args.peers:
        raise UserError(f"the validation split has fewer rows than micro_batch {micro_batch}; pass a smaller one")
    model_config = build_model_config(config, padded_vocab_size(dataset.vocab_size, 128), 0)
    machine = find_machine(device)
    precision = choose(config, machine, measure_open(config, machine, device, model_config))["precision"].value
    return Setting(
        device.type,
        in_words("precision", precision),
        dataset.directory,
        dataset.vocab_size,
        {key: (config.config_overrides or {}).get(key, value) for key, value in GPT2_SHAPE.items()},
        dataset.block_size,
        micro_batch,
        args.grad_accum,
        LAP + -(-args.steps // LAP) * LAP,
        args.minutes and args.minutes * 60,
        eval_rows,
    )


def parse() -> argparse.Namespace:
    parser = CommandLine(description="What is each optimization worth on this machine?")
    peers = "compare recipe/train.py with these: a clone of nanoGPT, a copy of Transformers' run_clm.py"
    parser.add_argument(
        "--config", type=as_path, help="recipe whose model to use (default: gpt2_124m; on a CPU, 30 M parameters)"
    )
    parser.add_argument(
        "--dataset_dir", type=as_path, help="packed dataset (default: the Python standard library's text)"
    )
    parser.add_argument("--rungs", nargs="+", choices=RUNGS, metavar="RUNG", help=f"only these: {', '.join(RUNGS)}")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--peers", type=Path, nargs="+", metavar="PATH", help=peers)
    modes.add_argument("--input", action="store_true", help="compare where batches come from instead")
    modes.add_argument("--fill_memory", action="store_true", help="give each rung the largest micro-batch (GPU)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each program with --peers (default: 3)")
    parser.add_argument("--steps", type=int, default=12, help="timed steps per rung (default: 12)")
    parser.add_argument("--minutes", type=float, help="train this long on each rung instead, counted from its start")
    parser.add_argument("--micro_batch", type=int, help="rows per forward pass (default: 16; 4 on a CPU)")
    parser.add_argument("--grad_accum", type=int, default=4, help="forward passes per step (default: 4)")
    parser.add_argument("--output_file", type=Path, help="JSON to write (default: a new file in runs/)")
    args = parser.parse_args()
    for name in ("rounds", "steps", "minutes", "micro_batch", "grad_accum"):
        if (value := getattr(args, name)) is not None and not 0 < value < float("inf"):
            raise UserError(f"{name} must be greater than 0, got {value}")
    if args.fill_memory and not torch.cuda.is_available():
        raise UserError("--fill_memory needs a GPU; without one, memory is not what limits the batch")
    return args


def main() -> None:
    args = parse()
    setting = choose_setting(args)
    memory_bytes = measure_usable_bytes(torch.device(setting.device), 1) if args.fill_memory else None
    if args.peers:
        mode, plan = "peers", plan_comparison(setting, args.peers, args.rounds)
    elif args.input:
        mode, plan = "input", plan_input(setting)
    else:
        mode, plan = "ladder", plan_ladder(setting, args.rungs, memory_bytes)
    path = args.output_file or Path("runs") / time.strftime(f"{mode}_{setting.device}_%Y%m%d-%H%M%S.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    untied, tied = describe_size(setting, False), describe_size(setting, True)
    size = f"{tied} parameters" if args.peers else f"{untied} parameters, {tied} with tied embeddings"
    environment, entries = describe_environment(torch.device(setting.device)), []
    limit = f"{setting.num_steps} steps" if setting.seconds is None else f"{setting.seconds / 60:g} minutes"
    about = {
        "what": f"{describe_machine(environment)}; GPT-2, {json.dumps(setting.shape)}, {size}; "
        f"{setting.global_batch} rows of {setting.block_size} tokens per step, {setting.micro_batch} at a time; "
        f"{limit} per row",
        "command": shell_command("python", *sys.argv),
        "environment": environment,
    }
    print(f"{textwrap.fill(about['what'], 80)}\n\n{HEADER}", flush=True)
    for what, job in plan:
        entry = {"what": what, **measure_rung(job)}
        if args.peers and "precision" in entry:
            entry["what"] += f" ({entry['precision']})"
        entries.append(entry)
        print(make_row(entries[-1], entries), flush=True)
        about["finished_at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        path.write_text(json.dumps({**about, "entries": entries}, indent=2) + "\n")
    if all("not_run" in entry for entry in entries):
        raise UserError(f"nothing could be measured: {entries[0]['not_run']}")
    if args.peers:
        print("", *compare(entries, args.rounds), sep="\n")
    if mode == "ladder":
        draw(path.with_suffix(".png"), describe_machine(environment), entries, dark=False)
        draw(path.with_name(f"{path.stem}_dark.png"), describe_machine(environment), entries, dark=True)
    print(f"\nResults: {path}")


if __name__ == "__main__":
    run_main(main, "interrupted; the results so far are in the output file", is_alone=True)
