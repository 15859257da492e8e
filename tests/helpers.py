"""What the tests share besides the fixtures: sizes, texts, and the programs as functions."""

import contextlib
import importlib.util
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parent.parent
BLOCK_SIZE = 32
VOCAB_SIZE = 500  # padded to 512
WORDS = "the cat sat on a mat while rain fell über den Fluß and naïve 猫 slept; then what? nothing, again."
TINY = ["--config_overrides", "n_layer=2,n_head=2,n_embd=32", "--block_size", str(BLOCK_SIZE)]
ONE_STEP, TWO_STEPS = (["--max_steps", steps, "--warmup_steps", "0"] for steps in ("1", "2"))
PLAIN = ["--mixed_precision", "no", "--dynamo_backend", "no", "--attn_implementation", "sdpa"]  # nothing to measure
# The first hides GPUs from this process, which may have initialized CUDA, the second from the processes it starts.
CPU_ONLY = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}

has_bitsandbytes = importlib.util.find_spec("bitsandbytes") is not None
needs_bitsandbytes = pytest.mark.skipif(not has_bitsandbytes, reason="bitsandbytes is not installed")


def make_documents(count: int, seed: int = 0) -> list[str]:
    """Return distinct texts of uneven length, with characters beyond ASCII."""
    rng = random.Random(seed)
    words = WORDS.split()
    return [f"Document {seed}-{i}: " + " ".join(rng.choices(words, k=rng.randint(5, 90))) + "\n" for i in range(count)]


def shard_of(ids: np.ndarray, magic: int = 20240520, version: int = 1, count: int | None = None) -> bytes:
    """Return what llm.c and modded-nanogpt write. count: what the header says."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    return header.tobytes() + ids.tobytes()


def write_task(folder: Path, name: str) -> Path:
    """Write a task of lm-eval, hellaswag or lambada_openai, whose examples are the sample beside this file."""
    room, split = ("hellaswag", "validation") if name == "hellaswag" else ("lambada", "test")
    tasks = Path(importlib.util.find_spec("lm_eval").origin).parent / "tasks"
    lines = [f"include: {tasks / room / name}.yaml", f"task: own_{room}", "tag: null", "training_split: null"]
    lines += ["dataset_path: json", "dataset_name: null"]
    lines += [f"dataset_kwargs: {{data_files: {{{split}: {ROOT / 'tests' / f'{room}_sample.jsonl'}}}}}"]
    (folder / f"{room}.yaml").write_text("\n".join(lines))
    return folder / f"{room}.yaml"


STUBS = {
    "recipe.evaluation.validation.sample_text": lambda model, tokenizer, prompt, *_: f"{prompt} sample",
    "recipe.publish.card.save_loss_chart": lambda events, path, *_: path.write_bytes(b"PNG"),
    "gc.collect": lambda *_: 0,  # three times in a run, 0.1 s each
}


def default_arguments(dataset_dir: Path, output_dir: Path, shape: list[str]) -> list[str]:
    """Return the options of a run of four steps that neither evaluates nor saves on the way."""
    options = {
        "dataset_dir": dataset_dir,
        "output_dir": output_dir,
        "global_batch_size": 4,
        "max_steps": 4,
        "logging_steps": 1,
        "warmup_steps": 2,
        "optim": "adamw_torch_fused",
        "learning_rate": 0.003,
        "lr_scheduler_type": "linear",
        "eval_steps": 0,
        "save_steps": 0,
        "load_best_model_at_end": "false",
    }
    return [*shape, *PLAIN, *(str(text) for key, value in options.items() for text in (f"--{key}", value))]


def run_training(arguments: list[object], real: bool = False) -> None:
    """Run recipe/train.py's main(), which leaves this process as it was, and exit with its status if that is not 0.

    real: generate the samples, draw the loss curve and collect garbage, which take longer than all else in a small
    run.
    """
    from recipe.train import main

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", ["recipe/train.py", *map(str, arguments)]))
        for name, stub in {} if real else STUBS.items():
            stack.enter_context(mock.patch(name, stub))
        status = main()
    if status:
        sys.exit(status)


def load_program(path: str) -> ModuleType:
    """Import a program, which is not part of the package. path: relative to the repository."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


@contextlib.contextmanager
def signal_when(condition: Callable[[], object], name: str = "SIGTERM") -> Iterator[None]:
    """Send this process a signal within the block, as soon as a condition is true; a thread checks it."""
    left = threading.Event()

    def watch() -> None:
        while not left.wait(0.05):
            if condition():
                os.kill(os.getpid(), signal.Signals[name])
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        left.set()


def run_script(path: str, *arguments: object) -> str:
    """Run a program in this process as `python PATH ARGUMENTS`. Returns what it exits with: "" or its error.

    path: relative to the repository. The program sees this process's working directory, and prints to its streams.
    """
    argv = mock.patch.object(sys, "argv", [path, *map(str, arguments)])
    try:
        with argv, mock.patch.dict(os.environ):
            runpy.run_path(str(ROOT / path), run_name="__main__")
    except SystemExit as stop:
        return str(stop.code or "")
    return ""


def reset_accelerate() -> None:
    """Clear the singletons in which Accelerate keeps its state."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()


def read_events(output_dir: Path, event: str) -> list[dict]:
    """Return the lines of metrics.jsonl of one kind: train, eval, ..."""
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def values_of(run: Path, name: str, event: str = "train", after: int = -1) -> list[float]:
    """Return what a run has logged after a step."""
    return [line[name] for line in read_events(run, event) if line["step"] > after]


def list_steps(run: Path, event: str = "train") -> list[int]:
    return values_of(run, "step", event)


def read_summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def read_weights(folder: Path) -> bytes:
    """Return the bytes of the weights, without the header of their file, which names a step and a loss."""
    content = (folder / "model.safetensors").read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]


def read_words(capsys) -> str:
    """Return what was printed since the last call, however its lines are broken."""
    return " ".join(capsys.readouterr().out.split())


def stock_loss(folder: Path, rows: np.ndarray) -> float:
    """Return the loss of a saved model on rows, by Transformers, with eager attention, and torch alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    rows = torch.from_numpy(rows)
    with torch.no_grad():
        logits = model.eval()(input_ids=rows[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


def launch(
    arguments: list[object],
    cwd: Path,
    launcher: tuple[str, ...] = (),
    program: Path = ROOT / "recipe" / "train.py",
    **environment: str,
):
    """Run `accelerate launch recipe/train.py` as a user does. Returns the finished process and its output."""
    command = [sys.executable, "-m", "accelerate.commands.launch", *launcher, str(program)]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "OMP_NUM"))}
    return subprocess.run(
        [*command, *map(str, arguments)],
        cwd=cwd,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
