"""What a device can do: compile, multiply in bf16, repeat exactly, and attend with flash kernels."""

import importlib.util
import os
import warnings
from unittest import mock

import pytest
import torch
from helpers import read_events, reset_accelerate, values_of
from torch._dynamo.utils import counters

from recipe.command_line import load_config
from recipe.hardware import accelerator, devices


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_inductor_takes_a_compiler(monkeypatch, tmp_path, device):
    """Next to Triton and Python's headers, which a CUDA machine has."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find_spec("torch" if name == "triton" else name))
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CPATH", str(tmp_path))
    monkeypatch.setattr(devices.shutil, "which", lambda name: "/usr/bin/gcc")
    assert devices.why_no_inductor(torch.device(device)) is None
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    assert "compiler" in devices.why_no_inductor(torch.device(device))


@pytest.mark.parametrize("has_units", [True, False])
def test_emulation_does_not_count_as_bf16_units(monkeypatch, has_units):
    """On a T4, is_bf16_supported() alone says yes."""
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: has_units or including_emulation
    )
    assert devices.has_bf16_units(torch.device("cuda")) == has_units


@pytest.fixture
def restored_determinism():
    with mock.patch.dict(os.environ):
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        torch.use_deterministic_algorithms(False)
        reset_accelerate()
        yield
    torch.use_deterministic_algorithms(False)
    reset_accelerate()


@pytest.mark.parametrize(
    ("mode", "switch", "expected"),
    [
        ("default", [], (True, True, None)),
        ("max-autotune-no-cudagraphs", [], (False, False, None)),
        ("max-autotune-no-cudagraphs", ["--deterministic"], (True, True, ":4096:8")),
    ],
)
def test_deterministic_algorithms_are_a_switch(monkeypatch, tmp_path, restored_determinism, mode, switch, expected):
    """The switch sets PyTorch's own option, inductor's and cuBLAS's. On a CPU only max-autotune needs it."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", mode)
    config = load_config(["--dataset_dir", "d", "--mixed_precision", "no", *switch])[0]
    accelerator.build_accelerator(config, tmp_path, {})
    on = torch.are_deterministic_algorithms_enabled(), torch._inductor.config.deterministic
    assert (*on, os.environ.get("CUBLAS_WORKSPACE_CONFIG")) == expected


def test_a_compiled_run_in_bf16_has_two_graphs_and_differs_by_rounding_only(train, tmp_path):
    """One graph for training and one for evaluation, without a break. No later step or evaluation recompiles."""
    options = ["--eval_steps", "2", "--per_device_train_batch_size", "2"]
    plain = train(*options, output_dir=tmp_path / "plain")
    counters.clear()
    half = train("--dynamo_backend", "aot_eager", "--mixed_precision", "bf16", *options)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    assert len(read_events(half, "eval")) == 3
    losses = values_of(plain, "loss")
    assert values_of(half, "loss") == pytest.approx(losses, abs=0.05)
    assert values_of(half, "loss") != pytest.approx(losses, abs=1e-5)  # more than by compiling


# ------------------------------------------------------------------ flash attention


def test_flash_attention_is_tried_with_the_runs_own_type_and_shapes(monkeypatch):
    """Other kernels are not allowed in the meantime."""
    attend = torch.nn.functional.scaled_dot_product_attention
    tried = []

    def watch(query, *others, **options):
        tried.append((query.shape, query.dtype, query.requires_grad, torch.backends.cuda.math_sdp_enabled()))
        return attend(query, *others, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
    assert devices.why_no_flash(torch.device("cpu"), "bf16", 12, 64, 128) is None
    assert tried == [((1, 12, 128, 64), torch.bfloat16, True, False)]
    assert torch.backends.cuda.math_sdp_enabled()


ON_A_GPU = [  # torch's reasons, in its order
    "Memory efficient kernel not used because:",
    "It has been runtime disabled. (Triggered internally at x)",
    "Flash attention kernel not used because:",
    "Expected a 16-bit type. (Triggered internally at x)",
    "CuDNN attention kernel not used because:",
    "Torch was not compiled with cuDNN.",
]


def test_of_several_reasons_that_against_flash_kernels_counts(monkeypatch):
    def refuse(*_, **__):
        for line in ON_A_GPU:
            warnings.warn(line, stacklevel=1)
        raise RuntimeError("No available kernel.")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    assert devices.why_no_flash(torch.device("cpu"), "no", 12, 64, 128) == "Expected a 16-bit type."
