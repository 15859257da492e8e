"""The same training in other people's programs, and in a loop with nothing around it, side by side with ours.

In: where their code lies (it is not part of this project). Out: tokens per second of each, and how many times as fast
ours is, from runs that take turns. All train GPT-2 of the same size on the same text; the command lines are recorded.
"""

import hashlib
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipe.benchmark.ladder import Rung, options_of
from recipe.benchmark.machine import Machine
from recipe.benchmark.measure import LAP, Setting, combine, compile_cache, to_arguments, why_it_ended
from recipe.data.packed import PackedDataset, open_packed_dataset
from recipe.environment import count_cpus
from recipe.errors import UserError
from recipe.model.size import padded_vocab_size

BARE_LOOP = Path(__file__).parent.parent.parent / "scripts" / "bare_loop.py"
NANOGPT_CONTEXT = "nullcontext() if device_type == 'cpu' else "  # without it, autocast is for the CPU too
NANOGPT_MICRO_BATCH = 12  # its default
RUN_CLM_MICRO_BATCH = 8  # TrainingArguments' default


@dataclass(frozen=True)
class Peer:
    """A program that prints a line whenever it has trained on `tokens_per_line`."""

    name: str
    what: str
    command: list[str]
    directory: Path
    line: str  # pattern of that line; its first group, if it has one, is the milliseconds it took
    tokens_per_line: int
    sha256: str  # of the program, as it was given
    steps_per_line: int = 1
    leaves: Path | None = None  # a folder that must not be there when it starts
    environment: dict[str, str] = field(default_factory=dict)  # beside this process's
    ours: str = "ours"  # which of our runs it is to be compared with


def build_peers(
    machine: Machine,
    setting: Setting,
    rungs: list[Rung],
    work: Path,
    nanogpt: Path | None,
    run_clm: Path | None,
    num_steps: int,
) -> list[Peer]:
    """Those whose code is there, and the bare loop. Raises `UserError` if it is not what it should be."""
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
    return [*peers, build_bare_loop(setting, options_of(rungs), work)]


def build_bare_loop(setting: Setting, options: dict[str, Any], work: Path) -> Peer:
    """Forward, backward, clip and AdamW on one batch: what is left of ours when the program is taken away.

    It finds what our own run has compiled, which is the same graph.
    """
    command = [sys.executable, str(BARE_LOOP), *to_arguments(combine(setting.run_options, options))]
    line = r"steps to \d+: ([\d.]+) ms"
    tokens = LAP * setting.tokens_per_step
    return Peer(
        "bare_loop",
        "the bare loop",
        command,
        Path.cwd(),
        line,
        tokens,
        _sha256(BARE_LOOP),
        LAP,
        environment=compile_cache(work),
    )


def build_nanogpt(
    source: Path,
    machine: Machine,
    setting: Setting,
    dataset: PackedDataset,
    folder: Path,
    bf16_on_cpu: bool = False,
    default_batch: bool = False,
) -> Peer:
    """nanoGPT's train.py, in a copy, with our tokens as its data.

    bf16_on_cpu: change the line that keeps autocast from CPUs. default_batch: its own micro-batch, not ours.
    """
    if not (source / "train.py").is_file():
        raise UserError(f"{source} holds no train.py; git clone https://github.com/karpathy/nanoGPT {source}")
    if dataset.vocab_size > 2**16:
        raise UserError(f"nanoGPT reads token ids of 16 bits, and this vocabulary has {dataset.vocab_size:,}")
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(".git", "*.bin", "*.pkl"))
    data = folder / "data" / "ladder"
    data.mkdir(parents=True)
    for split, name in (("train", "train.bin"), ("validation", "val.bin")):
        dataset.splits[split].stream().astype("uint16").tofile(data / name)
    micro_batch, what, ours = setting.micro_batch, "nanoGPT", "ours"
    if default_batch:
        micro_batch, what, ours = (
            NANOGPT_MICRO_BATCH,
            f"nanoGPT at its default micro-batch, {NANOGPT_MICRO_BATCH}",
            "ours_auto",
        )
    elif bf16_on_cpu:
        what = "nanoGPT, given bf16 on the CPU, compiled"
        text = (folder / "train.py").read_text()
        if NANOGPT_CONTEXT not in text:
            raise UserError(f"{source / 'train.py'} chooses autocast otherwise than the nanoGPT that is known here")
        (folder / "train.py").write_text(text.replace(NANOGPT_CONTEXT, ""))
    elif machine.device == "cpu":
        what = "nanoGPT, its CPU path: fp32, compiled"
    with open(data / "meta.pkl", "wb") as file:  # else its vocabulary is always GPT-2's
        pickle.dump({"vocab_size": padded_vocab_size(dataset.vocab_size, 128)}, file)
    accumulation = max(1, setting.global_batch // micro_batch)
    options = {
        "dataset": "ladder",
        "device": machine.device,
        "compile": True,
        "bias": True,  # as GPT-2
        "dropout": 0.0,
        "block_size": setting.block_size,
        **setting.model_size,
        "batch_size": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "max_iters": 100_000,
        "eval_interval": 1_000_000,
        "eval_iters": 1,
        "log_interval": LAP,  # where its host waits for the device, as ours
        "decay_lr": False,
        "learning_rate": 3e-4,
    }
    if machine.device == "cpu":
        options["dtype"] = "bfloat16" if bf16_on_cpu else "float32"
    command = [sys.executable, "train.py", *(f"--{key}={value}" for key, value in options.items())]
    tokens_per_step = micro_batch * accumulation * setting.block_size
    tokens = LAP * tokens_per_step  # a line's own time is that of one step, with the wait for those before it
    return Peer(
        folder.name, what, command, folder, r"iter \d+: ", tokens, _sha256(source / "train.py"), LAP, ours=ours
    )


def build_run_clm(
    source: Path, machine: Machine, setting: Setting, dataset: PackedDataset, work: Path, num_steps: int
) -> Peer:
    """Transformers' run_clm.py with the Trainer, at its defaults with bf16 and torch.compile.

    It gets text for that many steps, so that it meets no end of an epoch.
    """
    if not source.is_file():
        raise UserError(f"there is no {source}; it is examples/pytorch/language-modeling/run_clm.py of Transformers")
    accumulation = max(1, setting.global_batch // RUN_CLM_MICRO_BATCH)
    tokens_per_step = RUN_CLM_MICRO_BATCH * accumulation * setting.block_size
    # It drops what is left of every 1,000 lines; its validation split takes a part.
    ids = dataset.splits["train"].stream()[: 3 * num_steps * tokens_per_step // 2].tolist()
    (work / "text.txt").write_text(dataset.load_tokenizer().decode(ids), encoding="utf-8")
    overrides = {**setting.model_size, "n_positions": setting.block_size, "vocab_size": setting.vocab_size}
    options = {
        "model_type": "gpt2",
        "config_overrides": ",".join(f"{key}={value}" for key, value in overrides.items()),
        "tokenizer_name": dataset.directory.resolve() / "tokenizer",
        "train_file": work / "text.txt",
        "do_train": True,
        "block_size": setting.block_size,
        "bf16": True,
        "torch_compile": True,
        "gradient_accumulation_steps": accumulation,
        "dataloader_drop_last": True,
        "max_steps": num_steps,
        "logging_steps": LAP,
        "save_strategy": "no",
        "report_to": "none",
        "output_dir": work / "run_clm",
        "cache_dir": work / "cache",
        **({"use_cpu": True} if machine.device == "cpu" else {}),
    }
    command = [sys.executable, str(source.resolve()), *to_arguments(options)]
    what = "run_clm.py with bf16 and torch.compile"
    ours = "ours_auto" if machine.device == "cuda" else "ours"
    tokens = LAP * tokens_per_step
    leaves = work / "run_clm"
    return Peer("run_clm", what, command, work, r"\{'loss':", tokens, _sha256(source), LAP, leaves, ours=ours)


def measure_peer(peer: Peer, num_steps: int, deadline: float) -> dict[str, Any]:
    """Run it until it has done so many steps after the first `LAP`; tokens per second, by the median line.

    Where the lines hold no time, when they come is what counts. Returns `{"failed": reason}` if it ends before.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **peer.environment}
    environment.setdefault("CUDA_VISIBLE_DEVICES", "0")  # the Trainer would take all GPUs
    if environment.get("OMP_NUM_THREADS", "1") == "1":  # as recipe/hardware/accelerator.py does for ours
        environment["OMP_NUM_THREADS"] = str(count_cpus())
    if peer.leaves is not None:
        shutil.rmtree(peer.leaves, ignore_errors=True)
    num_warm_up = LAP // peer.steps_per_line
    num_lines = num_steps // peer.steps_per_line
    times: list[float] = []
    before, lines, started_at = None, [], time.monotonic()
    process = subprocess.Popen(
        peer.command,
        cwd=peer.directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    too_late = threading.Timer(min(max(0, deadline - time.monotonic()), threading.TIMEOUT_MAX), _kill, [process])
    too_late.start()
    try:
        for line in process.stdout:
            lines.append(line)
            found = re.search(peer.line, line)
            now = time.monotonic()
            if found:
                seconds = float(found[1]) / 1e3 if found.groups() else before and now - before
                before = now
                times += [seconds] if seconds else []
            if len(times) >= num_warm_up + num_lines:
                break
        else:
            out_of_time = time.monotonic() >= deadline
            seconds = f"not done in {deadline - started_at:.0f} s"
            return {"failed": seconds if out_of_time else why_it_ended("".join(lines))}
    finally:
        too_late.cancel()
        _kill(process)
        process.wait()
        process.stdout.close()
    steady = sorted(times[num_warm_up:])
    return {"tokens_per_second": round(peer.tokens_per_line / steady[len(steady) // 2])}


def _kill(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def _sha256(program: Path) -> str:
    return hashlib.sha256(program.read_bytes()).hexdigest()
