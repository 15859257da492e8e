"""What `auto` means on each device, and compiled graphs."""

import importlib.util
import os
import warnings

import pytest
import torch
from conftest import read_events, reset_accelerate
from torch._dynamo.utils import counters

from recipe.command_line import load_config
from recipe.hardware import accelerator, devices


def config_of(*argv):
    return load_config(["--dataset_dir", "d", *argv])[0]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def triton(monkeypatch, tmp_path):
    """Pretend to have Triton and Python's headers, as a CUDA machine has."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find_spec("torch" if name == "triton" else name))
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CPATH", str(tmp_path))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_inductor_takes_a_compiler(monkeypatch, triton, device):
    monkeypatch.setattr(devices.shutil, "which", lambda name: "/usr/bin/gcc")
    assert devices.why_no_inductor(torch.device(device)) is None
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    assert "compiler" in devices.why_no_inductor(torch.device(device))


def test_emulation_does_not_count_as_bf16_units(monkeypatch):
    """On a T4, is_bf16_supported() alone says yes."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert not devices.has_bf16_units(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert devices.has_bf16_units(torch.device("cuda"))


def test_deterministic_algorithms_are_a_switch(monkeypatch, tmp_path):
    """The switch sets PyTorch's own option, inductor's and cuBLAS's. On a CPU only max-autotune needs it."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    seen = []
    try:
        tuned = "max-autotune-no-cudagraphs"
        for mode, switch in ((tuned, []), ("default", []), (tuned, ["--deterministic"])):
            monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", mode)
            torch.use_deterministic_algorithms(False)
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
            reset_accelerate()
            accelerator.build_accelerator(config_of("--mixed_precision", "no", *switch), tmp_path, {})
            on = torch.are_deterministic_algorithms_enabled(), torch._inductor.config.deterministic
            seen.append((*on, os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        reset_accelerate()
    assert seen == [(False, False, None), (True, True, None), (True, True, ":4096:8")]


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


# ------------------------------------------------------------------ flash attention


class Params:
    """Stands for `torch.backends.cuda.SDPAParams`, which takes tensors of CUDA only in a build for it."""

    def __init__(self, query, *_):
        self.query = query


@pytest.mark.parametrize(
    ("precision", "head_dim", "expected"),
    [
        ("bf16", 64, None),
        ("fp16", 256, None),
        ("no", 64, "expected a 16-bit type"),
        ("bf16", 33, "expected a multiple of 8"),
        ("fp16", 512, "torch gives no reason"),
    ],
)
def test_why_flash_attention_does_not_run(monkeypatch, precision, head_dim, expected):
    """Asked with the run's own type and shapes; torch gives its reasons as warnings."""

    def can_use_flash(inputs, debug):
        if inputs.query.dtype == torch.float32:
            warnings.warn("expected a 16-bit type (Triggered internally at sdp_utils.cpp:100.)", stacklevel=1)
        if inputs.query.shape[-1] % 8:
            warnings.warn("expected a multiple of 8", stacklevel=1)
        assert debug and inputs.query.shape[:3] == (1, 12, 1024)
        return inputs.query.dtype != torch.float32 and inputs.query.shape[-1] in (64, 256)

    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", Params)
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", can_use_flash)
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda inputs: False)
    found = devices.why_no_flash(torch.device("cpu"), precision, 12, head_dim, 1024)
    assert found == expected
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda inputs: True)
    assert devices.why_no_flash(torch.device("cpu"), precision, 12, head_dim, 1024) is None
