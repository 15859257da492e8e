"""How fast is recipe/train.py on this machine, compared with the programs that you would use instead?

git clone https://github.com/karpathy/nanoGPT runs/nanoGPT
python scripts/benchmarks/peers.py runs/nanoGPT
python scripts/benchmarks/peers.py ../other_checkout --dataset_dir DIR --per_device_train_batch_size 64

Another checkout of this project shows what a change is worth. Options of recipe/train.py choose model, data and batch.
The other programs get the same, and the precision that recipe/train.py chooses here. All start and compile first. Then
they take turns of four steps, and the others are stopped (SIGSTOP), so a busy host slows all of them alike. Before
each round, the rate of the model's own matrix products is measured, a limit for every program.
"""

import argparse
import contextlib
import json
import os
import pickle
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from recipe.arguments import CommandLine, as_path, shell_command, typed_names
from recipe.command_line import load_config, load_yaml
from recipe.config import DATA_SOURCES
from recipe.data.cache import open_dataset_for
from recipe.data.packed import PackedDataset
from recipe.environment import count_cpus, describe_environment, describe_machine
from recipe.errors import UserError, run_main
from recipe.hardware.choices import in_words
from recipe.hardware.devices import DTYPES
from recipe.hardware.probe import time_products
from recipe.metrics import read_events
from recipe.model.build import build_model_config
from recipe.model.size import padded_vocab_size

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "recipe/train.py"
TURN = 4  # steps
WARM_UP = 3  # log lines before the first turn: the program has compiled
OPTIONS = "--attn_implementation auto --dynamo_backend inductor --optim adamw_torch_fused"
OPTIONS += " --learning_rate 3e-4 --weight_decay 0.1 --lr_scheduler_type constant --warmup_steps 0"
OPTIONS += f" --eval_steps 0 --save_steps 0 --logging_steps {TURN}"
ON_A_GPU = "--per_device_train_batch_size 16 --global_batch_size 64"
# 30 M parameters, because GPT-2 124M takes minutes for a step.
ON_A_CPU = "--per_device_train_batch_size 4 --global_batch_size 16 --block_size 256"
ON_A_CPU += " --config_overrides n_layer=6,n_head=6,n_embd=384"
TEXT = "--dataset_name python_standard_library --tokenizer_vocab_size 50257"
NO_AUTOCAST = "nullcontext() if device_type == 'cpu' else "  # keeps nanoGPT in fp32 on a CPU


class Program:
    """A program that trains, stopped between its turns.

    output: file for what it prints. pattern: of the line after every four steps, there or in the file `log`. checkout:
    where it imports `recipe` from.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        output: Path,
        pattern: str,
        log: Path | None = None,
        cwd: Path | None = None,
        checkout: Path | None = None,
    ) -> None:
        self.name = name
        self.output = output
        self.pattern = pattern
        self.log = log or output
        self.seconds: list[float] = []  # of each turn
        # The environment that the user had, without what recipe/__init__.py adds.
        environment = psutil.Process().environ() | {"PYTHONUNBUFFERED": "1"}
        if checkout:
            environment["PYTHONPATH"] = str(checkout)
        with output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=cwd,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def count_laps(self) -> int:
        return len(re.findall(self.pattern, read(self.log), re.MULTILINE))

    def train(self, num_laps: int = 1) -> float:
        """Continue for this many lines of the log. Returns the seconds. Raises `UserError` if the program ends."""
        wanted = self.count_laps() + num_laps
        started_at = time.perf_counter()
        self.send(signal.SIGCONT)
        while self.count_laps() < wanted:
            if self.process.poll() is not None:
                raise UserError(f"{self.name} ended: {(read(self.output).strip() or 'no output').splitlines()[-1]}")
            time.sleep(0.002)
        seconds = time.perf_counter() - started_at
        self.send(signal.SIGSTOP)
        return seconds

    def send(self, number: int) -> None:
        """Send a signal to the program and those that it has started; they may have ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


@contextlib.contextmanager
def warmed_up(program: Program) -> Iterator[Program]:
    """Let a program compile. Ends it on leaving."""
    print(f"{program.name} compiles ...", flush=True)
    try:
        program.train(WARM_UP)
        yield program
    finally:
        program.send(signal.SIGKILL)
        program.process.wait()


def find_device() -> torch.device:
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def read(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


def start_recipe(name: str, checkout: Path, options: list[str], folder: Path) -> Program:
    command = [str(checkout / "recipe" / "train.py"), *options, "--output_dir", str(folder / "run")]
    log = folder / "run" / "metrics.jsonl"
    return Program(name, command, folder / "output.txt", '"event": "train"', log, checkout=checkout)


def start_nanogpt(source: Path, dataset: PackedDataset, run: dict[str, Any], folder: Path) -> Program:
    """Start a copy of nanoGPT. run: the `start` event of recipe/train.py."""
    if dataset.vocab_size > 2**16:
        raise UserError(f"nanoGPT reads 16-bit token ids, but this vocabulary has {dataset.vocab_size:,} tokens")
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(".git", "*.bin"), dirs_exist_ok=True)
    code = (source / "train.py").read_text()
    if NO_AUTOCAST not in code:
        raise UserError(f"this is not nanoGPT's train.py: it has no `{NO_AUTOCAST}`")
    if run["mixed_precision"] != "no":
        (folder / "train.py").write_text(code.replace(NO_AUTOCAST, ""))
    data = folder / "data" / "peers"
    data.mkdir(parents=True)
    for name, split in (("train", dataset.train), ("val", dataset.validation)):
        rows = split[np.arange(min(len(split), 10_000))]
        rows[:, :-1].astype(np.uint16).tofile(data / f"{name}.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": padded_vocab_size(dataset.vocab_size, 128)}))
    options = f"--dataset=peers --device={find_device().type} --log_interval={TURN}"
    options += f" --dtype={str(DTYPES[run['mixed_precision']]).removeprefix('torch.')} --bias=True --eval_iters=1"
    options += f" --compile={run['dynamo_backend'] != 'no'} --learning_rate=3e-4 --decay_lr=False"
    options += f" --block_size={dataset.block_size} --batch_size={run['per_device_train_batch_size']}"
    same = [f"--{name}={run[name]}" for name in ("n_layer", "n_head", "n_embd", "gradient_accumulation_steps")]
    command = ["train.py", *options.split(), *same, f"--max_iters={run['max_steps']}"]
    return Program(source.resolve().name, command, folder / "output.txt", r"^iter \d+:", cwd=folder)


def main() -> None:
    args, options = parse()
    config = load_config(options).config
    dataset = open_dataset_for(config)
    model_config = build_model_config(config, padded_vocab_size(dataset.vocab_size, 128), 0)
    device = find_device()
    if device.type == "cpu":
        torch.set_num_threads(count_cpus())
    max_steps = TURN * (WARM_UP + args.rounds + 1)
    flops_per_second = []
    with contextlib.ExitStack() as stack:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the stopped programs, as Ctrl-C does
        stack.callback(signal.signal, signal.SIGTERM, before)
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(1 + len(args.programs))]
        options += ["--max_steps", str(max_steps)]
        programs = [stack.enter_context(warmed_up(start_recipe(RECIPE, ROOT, options, folders[0])))]
        run = next(event for event in read_events(folders[0] / "run") if event["event"] == "start")
        run["max_steps"] = max_steps
        for source, folder in zip(args.programs, folders[1:], strict=True):
            if (source / "recipe" / "train.py").is_file():
                program = start_recipe(source.resolve().name, source.absolute(), options, folder)
            else:
                program = start_nanogpt(source, dataset, run, folder)
            programs.append(stack.enter_context(warmed_up(program)))
        for _ in range(args.rounds):
            flops_per_second += time_products(device, model_config, [run["mixed_precision"]]).values()
            for program in programs:
                program.seconds.append(program.train())
            print(", ".join(f"{program.name} {program.seconds[-1]:.2f} s" for program in programs), flush=True)
    rows = run["per_device_train_batch_size"] * run["gradient_accumulation_steps"]
    tokens = TURN * rows * dataset.block_size
    environment = describe_environment(device)
    about = {
        "what": f"{describe_machine(environment)}; GPT-2 with {run['num_parameters'] / 1e6:.1f} M parameters, "
        f"{in_words('precision', run['mixed_precision'])}; {rows} rows of {dataset.block_size} tokens per step, "
        f"{run['per_device_train_batch_size']} at a time; {args.rounds} turns of {TURN} steps",
        "command": shell_command("python", *sys.argv),
        "environment": environment,
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "product_flops_per_second": flops_per_second,
        "turn_seconds": {program.name: program.seconds for program in programs},
        "turn_tokens": tokens,
        "flops_per_token": run["flops_per_token"],
    }
    path = args.output_file or Path("runs") / time.strftime(f"peers_{device.type}_%Y%m%d-%H%M%S.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about, indent=2) + "\n")
    print(textwrap.fill(about["what"], 80), make_table(about), f"Results: {path}", sep="\n\n")


def make_table(found: dict[str, Any]) -> str:
    """Return a table in Markdown: medians, and how many times as fast recipe/train.py is, turn by turn."""
    lines = ["| program | tokens/s | of product rate | recipe / program | range |", "|---|---:|---:|---:|---:|"]
    ours = found["turn_seconds"][RECIPE]
    for name, seconds in found["turn_seconds"].items():
        speed = found["turn_tokens"] / statistics.median(seconds)
        share = speed * found["flops_per_token"] / statistics.median(found["product_flops_per_second"])
        ratios = [theirs / mine for theirs, mine in zip(seconds, ours, strict=True)]
        numbers = f"{statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f}"
        lines.append(f"| {name} | {speed:,.0f} | {share:.0%} | {numbers} |")
    rates = [rate / 1e9 for rate in found["product_flops_per_second"]]
    return "\n".join(
        [*lines, "", f"products: {statistics.median(rates):,.0f} GFLOP/s, {min(rates):,.0f} to {max(rates):,.0f}"]
    )


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = CommandLine(description="Compare recipe/train.py, to which all other options go, with other programs.")
    parser.add_argument("programs", type=Path, nargs="+", help="a clone of nanoGPT, or another checkout")
    parser.add_argument("--config", type=as_path, help="recipe (default: gpt2_124m; on a CPU, 30 M parameters)")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each program (default: 12)")
    parser.add_argument("--output_file", type=Path, help="JSON to write (default: a new file in runs/)")
    args, typed = parser.parse_with_run_options()
    set_here = {"logging_steps", "max_steps"} & typed_names(typed)
    if set_here:
        raise UserError(f"--{min(set_here)} cannot be chosen: a turn is {TURN} steps, and --rounds counts the turns")
    if args.rounds < 1:
        raise UserError(f"--rounds must be at least 1, got {args.rounds}")
    if len({path.resolve().name for path in args.programs}) < len(args.programs):
        raise UserError("two of the programs have the same name; rename the folder of one")
    for path in args.programs:
        if not any((path / name).is_file() for name in ("train.py", RECIPE)):
            clone = f"a clone of nanoGPT (git clone https://github.com/karpathy/nanoGPT {path})"
            raise UserError(f"{path} is neither {clone} nor a checkout of this project")
    recipe = args.config or "gpt2_124m"
    options = ["--config", recipe, *OPTIONS.split()]
    options += (ON_A_CPU if find_device().type == "cpu" and not args.config else ON_A_GPU).split()
    if not {*DATA_SOURCES} & (typed_names(typed) | load_yaml(recipe).keys()):
        options += TEXT.split()
    return args, [*options, *typed]


if __name__ == "__main__":
    run_main(main, "interrupted; nothing was written", is_alone=True)
