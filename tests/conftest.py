"""What the tests share: a small corpus, a tokenizer, a packed dataset, and the programs as functions."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

# Set before torch is imported: no network, and threads that do not spin, because tests may share their cores.
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="true", OMP_WAIT_POLICY="passive")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # each worker has a core

import pytest
import torch
from helpers import BLOCK_SIZE, CPU_ONLY, ROOT, TINY, VOCAB_SIZE, default_arguments, make_documents, run_training
from hub_stand_in import CLIENT, HubStandIn
from huggingface_hub import constants, file_download, hf_api, set_client_factory
from huggingface_hub.utils import _http
from small_model import save_small_model

from recipe.data import cut as cut_module
from recipe.data import files as files_module
from recipe.data import source as source_module
from recipe.data.packed import open_packed_dataset
from recipe.data.prepare import prepare_dataset
from recipe.data.source import TextSource
from recipe.data.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer


@pytest.fixture(autouse=True)
def on_the_cpu(request, monkeypatch):
    """Hide GPUs from tests without the gpu marker, and skip those with it where there is none."""
    if request.node.get_closest_marker("gpu") is None:
        for name, value in CPU_ONLY.items():
            monkeypatch.setenv(name, value)
    elif not torch.cuda.is_available():
        pytest.skip("no CUDA device: GPU paths are not tested on this machine")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stand-in for the Hugging Face Hub on loopback: the Hub of this process, and of those that it starts.

    Logged in with a token that may write. Retries wait 10 ms in this process, and as long as they mean to in others.
    """
    home = tmp_path / "hf_home"
    with HubStandIn() as stand_in:
        folders = {"HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub")}
        environment = {"HF_ENDPOINT": stand_in.endpoint, "HF_TOKEN": stand_in.token, **folders, **CLIENT}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        # The client reads its environment when it is imported.
        read = {"ENDPOINT": stand_in.endpoint, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True, **folders}
        read |= {"HF_TOKEN_PATH": str(home / "token"), "HF_STORED_TOKENS_PATH": str(home / "stored_tokens")}
        read["HF_HUB_DISABLE_TELEMETRY"] = True
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
    """Start tests/programs/absent_gpu.py, which reads runs and writes what it found."""
    torch_dir = Path(torch.__file__).parent
    work = tmp_path_factory.mktemp("absent_gpu")
    compiler = next(filter(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++")), None)
    if compiler is None or not (torch_dir / "include" / "c10").is_dir():
        pytest.skip("building the absent GPU takes a C++ compiler and torch's headers")
    options = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torch_dir}/include", f"-L{torch_dir}/lib"]
    libraries = ["-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_dir}/lib"]
    programs = ROOT / "tests" / "programs"
    subprocess.run([compiler, *options, programs / "no_gpu.cpp", *libraries, "-o", work / "no_gpu.so"], check=True)

    def start() -> subprocess.Popen:
        environment = {**os.environ, **CPU_ONLY, "PYTHONPATH": str(ROOT), "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, programs / "absent_gpu.py", work / "no_gpu.so"]
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
    save_tokenizer(train_tokenizer(documents, VOCAB_SIZE), directory)
    return directory


@pytest.fixture(scope="session")
def dataset_dir(tmp_path_factory, jsonl_file, tokenizer_dir) -> Path:
    directory = tmp_path_factory.mktemp("packed") / "dataset"
    prepare_dataset(TextSource(train_files=(str(jsonl_file),)), directory, load_tokenizer(str(tokenizer_dir)))
    return directory


@pytest.fixture(scope="session")
def other(tmp_path_factory, tokenizer_dir) -> Path:
    """A second, smaller dataset of the same tokenizer, whose text is in a.jsonl beside it."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in make_documents(60, seed=7)))
    prepare_dataset(TextSource((str(folder / "a.jsonl"),)), folder / "other", load_tokenizer(str(tokenizer_dir)))
    return folder / "other"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory, tokenizer_dir) -> Path:
    """A small saved model. No test changes it."""
    return save_small_model(tmp_path_factory.mktemp("private") / "small", tokenizer_dir)


@pytest.fixture(scope="session")
def dataset(dataset_dir):
    return open_packed_dataset(dataset_dir, BLOCK_SIZE)


@pytest.fixture(scope="session")
def four_steps(tmp_path_factory, dataset_dir) -> Path:
    """The folder of a finished run of four steps, with checkpoint-2 and checkpoint-4. No test changes it."""
    folder = tmp_path_factory.mktemp("four_steps") / "run"
    with mock.patch.dict(os.environ, CPU_ONLY):
        run_training([*default_arguments(dataset_dir, folder, TINY), "--save_steps", 2])
    return folder


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

    def run(*arguments: object, real: bool = False, shape: list[str] = TINY) -> Path:
        output_dir = tmp_path_factory.mktemp("shared") / "run"
        with mock.patch.dict(os.environ, CPU_ONLY):
            run_training([*default_arguments(dataset_dir, output_dir, shape), *arguments], real)
        return output_dir

    return run
