"""What `auto` means on each device, and compiled graphs."""

import importlib.util
import os
import types

import pytest
import torch
from conftest import read_events, reset_accelerate
from torch._dynamo.utils import counters

from recipe.command_line import load_config
from recipe.environment import count_cpus
from recipe.errors import UserError
from recipe.hardware import accelerator, devices, processes
from recipe.hardware.accelerator import choose_attention, choose_dynamo_backend, choose_mixed_precision

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def config_of(*argv):
    return load_config(["--dataset_dir", "d", *argv])[0]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("argv", "launcher", "device", "bf16", "expected"),
    [
        ([], "no", CPU, True, "bf16"),
        ([], "no", CPU, False, "no"),
        ([], "no", CUDA, True, "bf16"),
        ([], "no", CUDA, False, "fp16"),  # T4: is_bf16_supported() alone says yes, through emulation
        ([], "fp16", CUDA, True, "fp16"),
        ([], "bf16", CPU, False, "bf16"),
        (["--mixed_precision", "no"], "bf16", CPU, True, "no"),
        (["--mixed_precision", "bf16"], "no", CPU, False, "bf16"),
    ],
)
def test_precision(monkeypatch, argv, launcher, device, bf16, expected):
    """The script's option, else the launcher's, else the fastest native type of the hardware."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": bf16})
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or bf16)
    choice = choose_mixed_precision(config_of(*argv), device)
    assert choice.value == expected and choice.reason


@pytest.mark.parametrize(
    ("launcher", "device", "message"), [("fp8", CUDA, "Conv1D"), ("fp16", CPU, "requires a CUDA device")]
)
def test_precision_that_does_not_work(monkeypatch, launcher, device, message):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    with pytest.raises(UserError, match=message):
        choose_mixed_precision(config_of(), device)


@pytest.fixture
def triton(monkeypatch, tmp_path):
    """Pretend to have Triton and Python's headers, as a CUDA machine has."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find_spec("torch" if name == "triton" else name))
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CPATH", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "launcher", "device", "flops", "compiler", "expected"),
    [
        ([], "no", CUDA, 1, "/usr/bin/gcc", "inductor"),
        ([], "no", CUDA, 1, None, "no"),
        ([], "NO", CPU, 1e13, "/usr/bin/g++", "no"),
        ([], "no", CPU, 1e16, "/usr/bin/g++", "inductor"),
        ([], "no", CPU, 1e16, None, "no"),
        ([], "INDUCTOR", CPU, 1e13, "/usr/bin/g++", "inductor"),
        (["--dynamo_backend", "no"], "inductor", CUDA, 1e16, None, "no"),
        (["--dynamo_backend", "aot_eager"], "no", CUDA, 1e16, None, "aot_eager"),
    ],
)
def test_dynamo(monkeypatch, triton, argv, launcher, device, flops, compiler, expected):
    """With a compiler, inductor is the default on a GPU, and on a CPU if the run is long."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", launcher)
    monkeypatch.setattr(devices.shutil, "which", lambda name: compiler)
    choice = choose_dynamo_backend(config_of("--max_steps", "9", *argv), device, flops)  # without a time limit
    assert choice.value == expected and choice.reason


@pytest.mark.parametrize(("argv", "launcher"), [(["--dynamo_backend", "inductor"], "no"), ([], "inductor")])
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_inductor_is_refused_where_it_cannot_compile(monkeypatch, triton, argv, launcher, device):
    """Whether the script or the launcher requests it."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", launcher)
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"cannot compile: \w+ requires a C(\+\+)? compiler.*; use no"):
        choose_dynamo_backend(config_of(*argv), device, 1)


def test_deterministic_algorithms_are_a_switch(monkeypatch, tmp_path):
    """The switch sets PyTorch's own option, inductor's and cuBLAS's. On a CPU only max-autotune needs it."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(processes.torch, "set_num_threads", lambda count: None)
    seen = []
    try:
        tuned = "max-autotune-no-cudagraphs"
        for mode, switch in ((tuned, []), ("default", []), (tuned, ["--deterministic"])):
            monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", mode)
            torch.use_deterministic_algorithms(False)
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
            reset_accelerate()
            accelerator.build_accelerator(config_of(*switch), tmp_path)
            on = torch.are_deterministic_algorithms_enabled(), torch._inductor.config.deterministic
            seen.append((*on, os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        reset_accelerate()
    assert seen == [(False, False, None), (True, True, None), (True, True, ":4096:8")]


@pytest.mark.parametrize(
    ("argv", "device", "expected"),
    [
        (["--block_size", "512"], CPU, "eager"),
        (["--block_size", "1024"], CPU, "sdpa"),
        (["--block_size", "512"], CUDA, "sdpa"),
    ],
)
def test_attention(argv, device, expected):
    """Plain attention is faster on a CPU up to 512 tokens."""
    assert choose_attention(config_of(*argv), device).value == expected


def test_a_run_uses_all_cores_unless_the_user_chooses(monkeypatch):
    """`accelerate launch` without a config sets OMP_NUM_THREADS=1; any other number is the user's."""
    state = types.SimpleNamespace(device=CPU, num_processes=1)
    before = torch.get_num_threads()
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    try:
        for value, expected in (("1", count_cpus()), ("3", 1)):
            torch.set_num_threads(1)
            monkeypatch.setenv("OMP_NUM_THREADS", value)
            processes.use_all_cores(state)
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def plain(train_shared):
    return train_shared("--max_steps", "3")


def test_one_graph_for_training_and_one_for_evaluation(train):
    """The model compiles to two graphs without a break, and no later step or evaluation recompiles."""
    counters.clear()
    options = ["--max_steps", "4", "--eval_steps", "2", "--per_device_train_batch_size", "2"]
    output_dir = train("--dynamo_backend", "aot_eager", "--mixed_precision", "bf16", *options)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    assert len(read_events(output_dir, "eval")) == 3


def test_bf16_stays_close_to_fp32(train, plain):
    """Autocast changes the losses by rounding only."""
    half = train("--mixed_precision", "bf16", "--max_steps", "3")
    losses = [[e["loss"] for e in read_events(run, "train")] for run in (plain, half)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], abs=0.05)
