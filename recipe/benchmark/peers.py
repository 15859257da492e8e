"""Run the same training in other programs, and in a loop with nothing around it, to compare their speed with ours.

Their code is not part of this project. All train GPT-2 of the same size on the same text; the results record their
commands.
"""

import hashlib
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.benchmark.ladder import Rung, options_of
from recipe.benchmark.machine import Machine
from recipe.benchmark.measure import LAP, Setting, combine, end_program, start_program, to_arguments, why_it_ended
from recipe.data.packed import PackedDataset, open_packed_dataset
from recipe.environment import count_cpus
from recipe.errors import UserError
from recipe.model.size import padded_vocab_size

BARE_LOOP = Path(__file__).parent.parent.parent / "scripts" / "bare_loop.py"
NANOGPT_CONTEXT = "nullcontext() if device_type == 'cpu' else "  # without it, autocast works on the CPU too
NANOGPT_MICRO_BATCH = 12  # its default
RUN_CLM_MICRO_BATCH = 8  # TrainingArguments' default


@dataclass(frozen=True)
class Peer:
    """A program that prints a line every `LAP` steps."""

    name: str
    what: str
    command: list[str]
    directory: Path
    line: str  # pattern of that line; its group, if it has one, is the time of the lap in milliseconds
    tokens_per_step: int
    sha256: str  # of the original program
    output_dir: Path | None = None  # a folder that must not exist when the program starts
    ours: str = "ours"  # our run to compare with


def build_peers(
    machine: Machine,
    setting: Setting,
    rungs: list[Rung],
    work: Path,
    nanogpt: Path | None,
    run_clm: Path | None,
    num_steps: int,
) -> list[Peer]:
    """Prepare the programs whose code is given, and the bare loop. Raises `UserError` if the code cannot be used."""
    peers = []
    dataset = open_packed_dataset(Path(setting.options["dataset_dir"]), setting.block_size)
    if nanogpt is not None:
        peers.append(build_nanogpt(nanogpt, machine, setting, dataset, work / "nanogpt"))
        if machine.device == "cuda":
            peers.append(build_nanogpt(nanogpt, machine, setting, dataset, work / "default", default_batch=True))
        elif machine.bf16:
            peers.append(build_nanogpt(nanogpt, machine, setting, dataset, work / "bf16", bf16_on_cpu=True))
    if run_clm is not None:
        peers.append(build_run_clm(run_clm, machine, setting, dataset, work, 2 * LAP + num_steps))
    # The bare loop has our graph, so it reuses the code that our own run has compiled.
    command = [sys.executable, str(BARE_LOOP), *to_arguments(combine(setting.run_options, options_of(rungs)))]
    line, tokens = r"steps to \d+: ([\d.]+) ms", setting.tokens_per_step
    return [*peers, Peer("bare_loop", "the bare loop", command, Path.cwd(), line, tokens, _sha256(BARE_LOOP))]


def build_nanogpt(
    source: Path,
    machine: Machine,
    setting: Setting,
    dataset: PackedDataset,
    folder: Path,
    bf16_on_cpu: bool = False,
    default_batch: bool = False,
) -> Peer:
    """Prepare a copy of nanoGPT with our tokens as its data.

    bf16_on_cpu: change the line that disables autocast on CPUs. default_batch: use its micro-batch instead of ours.
    """
    program = source / "train.py"
    if not program.is_file():
        raise UserError(f"{source} has no train.py; run git clone https://github.com/karpathy/nanoGPT {source}")
    if dataset.vocab_size > 2**16:
        raise UserError(f"nanoGPT reads 16-bit token ids, but this vocabulary has {dataset.vocab_size:,} tokens")
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(".git", "*.bin", "*.pkl"))
    data = folder / "data" / "ladder"
    data.mkdir(parents=True)
    for split, name in (("train", "train.bin"), ("validation", "val.bin")):
        dataset.splits[split].stream().astype("uint16").tofile(data / name)
    # Without this file, nanoGPT would always use GPT-2's vocabulary.
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": padded_vocab_size(dataset.vocab_size, 128)}))
    micro_batch, what = setting.micro_batch, "nanoGPT"
    if default_batch:
        micro_batch, what = NANOGPT_MICRO_BATCH, f"nanoGPT at its default micro-batch, {NANOGPT_MICRO_BATCH}"
    elif bf16_on_cpu:
        what = "nanoGPT changed to bf16 on CPU, compiled"
        text = program.read_text()
        if NANOGPT_CONTEXT not in text:
            raise UserError(f"{program} has no line with `{NANOGPT_CONTEXT.strip()}`; use another nanoGPT commit")
        (folder / "train.py").write_text(text.replace(NANOGPT_CONTEXT, ""))
    elif machine.device == "cpu":
        what = "nanoGPT's CPU path: fp32, compiled"
    accumulation = max(1, setting.global_batch // micro_batch)
    options = (  # GPT-2 has biases; at log_interval its host waits for the device, as ours does
        f"dataset=ladder device={machine.device} compile=True bias=True dropout=0.0 block_size={setting.block_size} "
        f"batch_size={micro_batch} gradient_accumulation_steps={accumulation} log_interval={LAP} max_iters=100000 "
        "eval_interval=1000000 eval_iters=1 decay_lr=False learning_rate=0.0003"
    ).split()
    options += [f"{key}={value}" for key, value in setting.model_size.items()]
    if machine.device == "cpu":
        options.append("dtype=bfloat16" if bf16_on_cpu else "dtype=float32")
    command = [sys.executable, "train.py", *(f"--{option}" for option in options)]
    tokens = micro_batch * accumulation * setting.block_size
    # The time in its lines is that of one step and of the wait for the steps before, so the pattern ignores it.
    ours = "ours_auto" if default_batch else "ours"
    return Peer(folder.name, what, command, folder, r"iter \d+: ", tokens, _sha256(program), ours=ours)


def build_run_clm(
    source: Path, machine: Machine, setting: Setting, dataset: PackedDataset, work: Path, num_steps: int
) -> Peer:
    """Prepare Transformers' run_clm.py with Trainer's defaults, bf16, torch.compile, and text for that many steps."""
    if not source.is_file():
        raise UserError(f"{source} does not exist; expected examples/pytorch/language-modeling/run_clm.py")
    accumulation = max(1, setting.global_batch // RUN_CLM_MICRO_BATCH)
    tokens_per_step = RUN_CLM_MICRO_BATCH * accumulation * setting.block_size
    # Half as much again: run_clm.py drops the remainder of every 1,000 lines and holds out a validation split.
    ids = dataset.splits["train"].stream()[: 3 * num_steps * tokens_per_step // 2].tolist()
    (work / "text.txt").write_text(dataset.load_tokenizer().decode(ids), encoding="utf-8")
    overrides = {**setting.model_size, "n_positions": setting.block_size, "vocab_size": setting.vocab_size}
    paths = {
        "tokenizer_name": dataset.directory.resolve() / "tokenizer",
        "train_file": work / "text.txt",
        "output_dir": work / "run_clm",
        "cache_dir": work / "cache",
        "config_overrides": ",".join(f"{key}={value}" for key, value in overrides.items()),
    }
    options = (
        f"--model_type gpt2 --do_train True --block_size {setting.block_size} --bf16 True --torch_compile True "
        f"--gradient_accumulation_steps {accumulation} --dataloader_drop_last True --max_steps {num_steps} "
        f"--logging_steps {LAP} --save_strategy no --report_to none --use_cpu {machine.device == 'cpu'}"
    )
    return Peer(
        "run_clm",
        "run_clm.py with bf16 and torch.compile",
        [sys.executable, str(source.resolve()), *to_arguments(paths), *options.split()],
        work,
        r"\{'loss':",
        tokens_per_step,
        _sha256(source),
        output_dir=work / "run_clm",
        ours="ours_auto" if machine.device == "cuda" else "ours",
    )


def measure_peer(peer: Peer, num_steps: int, deadline: float) -> dict[str, Any]:
    """Run a program for one lap and then `num_steps`; return its tokens per second, or `{"failed": reason}`.

    The median lap counts. Lines without a time are timed when they arrive.
    """
    environment = {"PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":  # use all cores, as recipe/hardware/processes.py does for ours
        environment["OMP_NUM_THREADS"] = str(count_cpus())
    if peer.output_dir is not None:
        shutil.rmtree(peer.output_dir, ignore_errors=True)
    laps: list[float] = []
    before, lines, started_at = None, [], time.monotonic()
    process = start_program(peer.command, subprocess.PIPE, peer.directory, **environment)
    seconds_left = max(0, deadline - started_at)
    too_late = threading.Timer(seconds_left, end_program, [process])
    too_late.start()
    try:
        for line in (raw.decode(errors="replace") for raw in process.stdout):
            lines.append(line)
            if found := re.search(peer.line, line):
                now = time.monotonic()
                if found.groups():
                    laps.append(float(found[1]) / 1e3)
                elif before is not None:
                    laps.append(now - before)
                before = now
            if len(laps) > num_steps // LAP:
                break
        else:
            out_of_time = time.monotonic() >= deadline
            too_slow = f"not finished after {seconds_left:.0f} s"
            return {"failed": too_slow if out_of_time else why_it_ended("".join(lines))}
    finally:
        too_late.cancel()
        end_program(process)
        process.stdout.close()
    median = statistics.median(laps[1:])  # the first lap warms up
    return {"tokens_per_second": round(LAP * peer.tokens_per_step / median)}


def _sha256(program: Path) -> str:
    return hashlib.sha256(program.read_bytes()).hexdigest()
