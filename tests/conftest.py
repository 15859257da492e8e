"""Shared material: a small corpus, a tokenizer, a packed dataset, and the training program as a function."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

# Before torch: tests compare numbers and time nothing, and must not reach for the network.
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="true")

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from recipe.data.packed import open_packed_dataset
from recipe.data.prepare import prepare_dataset
from recipe.data.text import TextSource
from recipe.data.tokenizer import load_tokenizer, train_tokenizer
from recipe.hardware.processes import LAUNCHER_DIED
from recipe.run.output_dir import release_output_dir
from recipe.run.stop import SIGNALS

ROOT = Path(__file__).parent.parent
BLOCK_SIZE = 32
VOCAB_SIZE = 500  # padded to 512
WORDS = "the cat sat on a mat while rain fell über den Fluß and naïve 猫 slept; then what? nothing, again."
TINY = ["--config_overrides", "n_layer=2,n_head=2,n_embd=32", "--block_size", str(BLOCK_SIZE)]
PLAIN = ["--mixed_precision", "no", "--dynamo_backend", "no"]


def make_documents(count: int, seed: int = 0) -> list[str]:
    """Distinct texts of uneven length with characters beyond ASCII."""
    rng = random.Random(seed)
    words = WORDS.split()
    return [f"Document {seed}-{i}: " + " ".join(rng.choices(words, k=rng.randint(5, 90))) + "\n" for i in range(count)]


@pytest.fixture(autouse=True)
def on_the_cpu(request, monkeypatch):
    """Only what is marked gpu sees a GPU: the numbers of all other tests are a CPU's."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # for this process, where CUDA may have been looked for
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for those it starts


@pytest.fixture(scope="session")
def documents() -> list[str]:
    return make_documents(300)


@pytest.fixture(scope="session")
def jsonl_file(tmp_path_factory, documents) -> Path:
    path = tmp_path_factory.mktemp("text") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory, documents) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(documents, VOCAB_SIZE).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def dataset_dir(tmp_path_factory, jsonl_file, tokenizer_dir) -> Path:
    directory = tmp_path_factory.mktemp("packed") / "dataset"
    prepare_dataset(
        TextSource(train_files=(str(jsonl_file),)), directory, BLOCK_SIZE, load_tokenizer(str(tokenizer_dir))
    )
    return directory


@pytest.fixture(scope="session")
def dataset(dataset_dir):
    return open_packed_dataset(dataset_dir)


@pytest.fixture
def train(tmp_path, monkeypatch, dataset_dir):
    """Run recipe/train.py's main() in this process, as `train("--max_steps", "5")`; returns the output folder.

    alone: pass these arguments and no others.
    """

    def run(
        *arguments: str, output_dir: Path = tmp_path / "run", dataset_dir: Path = dataset_dir, alone: bool = False
    ) -> Path:
        from recipe.train import main

        argv = [
            "--dataset_dir",
            str(dataset_dir),
            "--output_dir",
            str(output_dir),
            *TINY,
            "--global_batch_size",
            "4",
            "--max_steps",
            "4",
            "--logging_steps",
            "1",
            "--warmup_steps",
            "2",
            "--learning_rate",
            "0.003",
            "--eval_steps",
            "0",
            "--save_steps",
            "0",
            *PLAIN,
        ]
        monkeypatch.setattr(sys, "argv", ["recipe/train.py", *([] if alone else argv), *map(str, arguments)])
        reset_accelerate()
        num_threads = torch.get_num_threads()
        handlers = {number: signal.getsignal(number) for number in (*SIGNALS, LAUNCHER_DIED)}
        try:
            main()
        finally:
            reset_accelerate()
            torch.set_num_threads(num_threads)
            torch.compiler.reset()
            release_output_dir(output_dir)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return output_dir

    return run


def reset_accelerate() -> None:
    """Accelerate keeps its state in singletons, for the life of a process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()


def read_events(output_dir: Path, event: str) -> list[dict]:
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def launch(arguments: list[str], cwd: Path, launcher: tuple[str, ...] = (), **environment: str):
    """`accelerate launch recipe/train.py` as a user runs it. Returns the finished process with its output as text."""
    command = [sys.executable, "-m", "accelerate.commands.launch", *launcher, str(ROOT / "recipe" / "train.py")]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "OMP_"))}
    return subprocess.run(
        [*command, *map(str, arguments)],
        cwd=cwd,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
