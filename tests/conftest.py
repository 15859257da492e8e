"""What the tests share: a small corpus, a tokenizer, a packed dataset, and the programs as functions."""

import contextlib
import importlib.util
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

# Set before torch is imported: no network, and threads that do not spin, because tests may share their cores.
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="true", OMP_WAIT_POLICY="passive")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # each worker has a core

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from hub_stand_in import CLIENT, HubStandIn
from huggingface_hub import constants, file_download, hf_api, set_client_factory
from huggingface_hub.utils import _http

from recipe.data import cut as cut_module
from recipe.data import files as files_module
from recipe.data import source as source_module
from recipe.data.packed import open_packed_dataset
from recipe.data.prepare import prepare_dataset
from recipe.data.source import TextSource
from recipe.data.tokenizer import read_tokenizer, train_tokenizer

ROOT = Path(__file__).parent.parent
BLOCK_SIZE = 32
VOCAB_SIZE = 500  # padded to 512
WORDS = "the cat sat on a mat while rain fell über den Fluß and naïve 猫 slept; then what? nothing, again."
TINY = ["--config_overrides", "n_layer=2,n_head=2,n_embd=32", "--block_size", str(BLOCK_SIZE)]
PLAIN = ["--mixed_precision", "no", "--dynamo_backend", "no", "--attn_implementation", "sdpa"]  # nothing to measure
# The first hides GPUs from this process, which may have initialized CUDA, the second from the processes it starts.
CPU_ONLY = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}


def make_documents(count: int, seed: int = 0) -> list[str]:
    """Return distinct texts of uneven length, with characters beyond ASCII."""
    rng = random.Random(seed)
    words = WORDS.split()
    return [f"Document {seed}-{i}: " + " ".join(rng.choices(words, k=rng.randint(5, 90))) + "\n" for i in range(count)]


def wet_record(kind: str, content: bytes) -> bytes:
    """Return a record of Common Crawl's extracted text."""
    header = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: https://example.org/\r\n"
    return header.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content + b"\r\n\r\n"


@pytest.fixture(autouse=True)
def on_the_cpu(request, monkeypatch):
    """Hide GPUs from tests without the gpu marker."""
    if request.node.get_closest_marker("gpu") is None:
        for name, value in CPU_ONLY.items():
            monkeypatch.setenv(name, value)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stand-in for the Hugging Face Hub on loopback: the Hub of this process, and of those that it starts.

    Logged in with a token that may write. Retries wait 10 ms in this process, and as long as they mean to in others.
    """
    home = tmp_path / "hf_home"
    with HubStandIn() as stand_in:
        environment = {
            "HF_ENDPOINT": stand_in.endpoint,
            "HF_TOKEN": stand_in.token,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            **CLIENT,
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        # The client reads its environment when it is imported.
        read = {"ENDPOINT": stand_in.endpoint, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
        read |= {"HF_HUB_DISABLE_TELEMETRY": True, "HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub")}
        read |= {"HF_TOKEN_PATH": str(home / "token"), "HF_STORED_TOKENS_PATH": str(home / "stored_tokens")}
        template = stand_in.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in {**read, "HUGGINGFACE_CO_URL_TEMPLATE": template}.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(hf_api.api, "endpoint", stand_in.endpoint)  # huggingface_hub.create_repo() and the like
        for module in (_http, file_download):
            monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda _, sleep=time.sleep: sleep(0.01)))
        set_client_factory(_http.default_client_factory)  # the current one may know other proxies
        yield stand_in
        set_client_factory(_http.default_client_factory)
    assert not stand_in.errors


@pytest.fixture(scope="session")
def absent_gpu(tmp_path_factory) -> Callable[[], subprocess.Popen]:
    """Start tests/absent_gpu.py, which reads runs and writes what it found."""
    torch_dir, work = Path(torch.__file__).parent, tmp_path_factory.mktemp("absent_gpu")
    compiler = next(filter(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++")), None)
    if compiler is None or not (torch_dir / "include" / "c10").is_dir():
        pytest.skip("building the absent GPU takes a C++ compiler and torch's headers")
    options = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torch_dir}/include", f"-L{torch_dir}/lib"]
    libraries = ["-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_dir}/lib"]
    subprocess.run([compiler, *options, ROOT / "tests/no_gpu.cpp", *libraries, "-o", work / "no_gpu.so"], check=True)

    def start() -> subprocess.Popen:
        environment = {**os.environ, **CPU_ONLY, "PYTHONPATH": str(ROOT), "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, ROOT / "tests/absent_gpu.py", work / "no_gpu.so"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=work, env={**environment, "XDG_CACHE_HOME": str(work)}, **pipes)

    return start


@pytest.fixture(scope="session", autouse=True)
def digests(tmp_path_factory):
    """Keep the digests of the tests' files out of the user's cache."""
    folder = tmp_path_factory.mktemp("digests")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files_module, "cache_dir", lambda: folder)
        yield


@pytest.fixture
def small_units(monkeypatch):
    """Let a unit hold about 1,500 bytes of text."""
    monkeypatch.setattr(cut_module, "SMALL_SOURCE", 1000)
    for module in (cut_module, source_module):
        monkeypatch.setattr(module, "SMALLEST_UNIT", 1500)


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
    prepare_dataset(TextSource(train_files=(str(jsonl_file),)), directory, read_tokenizer(str(tokenizer_dir)))
    return directory


@pytest.fixture(scope="session")
def other(tmp_path_factory, tokenizer_dir) -> Path:
    """A second, smaller dataset of the same tokenizer, whose text is in a.jsonl beside it."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in make_documents(60, seed=7)))
    prepare_dataset(TextSource((str(folder / "a.jsonl"),)), folder / "other", read_tokenizer(str(tokenizer_dir)))
    return folder / "other"


@pytest.fixture(scope="session")
def dataset(dataset_dir):
    return open_packed_dataset(dataset_dir, BLOCK_SIZE)


@pytest.fixture
def train(tmp_path, dataset_dir):
    """Run recipe/train.py's main() in this process, as `train("--max_steps", "5")`; returns the output folder.

    shape: the model and row length. alone: pass these arguments and no others. real: see `run_training`.
    """

    def run(
        *arguments: object,
        output_dir: Path = tmp_path / "run",
        dataset_dir: Path = dataset_dir,
        shape: list[str] | None = None,
        alone: bool = False,
        real: bool = False,
    ) -> Path:
        defaults = [] if alone else default_arguments(dataset_dir, output_dir, TINY if shape is None else shape)
        if defaults and "--dataset_dir" in arguments:  # instead of the usual one
            del defaults[(first := defaults.index("--dataset_dir")) : first + 2]
        run_training([*defaults, *arguments], real)
        return output_dir

    return run


@pytest.fixture(scope="module")
def train_shared(tmp_path_factory, dataset_dir):
    """Like `train`, for a run that several tests of a module read and none changes. Each call has its own folder."""

    def run(*arguments: object, real: bool = False) -> Path:
        output_dir = tmp_path_factory.mktemp("shared") / "run"
        with mock.patch.dict(os.environ, CPU_ONLY):
            run_training([*default_arguments(dataset_dir, output_dir, TINY), *arguments], real)
        return output_dir

    return run


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
