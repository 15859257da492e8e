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


def test_why_flash_attention_does_not_run(monkeypatch):
    """Tried with the run's own type and shapes; a CPU's kernel refuses dropout."""
    shapes = torch.device("cpu"), "bf16", 12, 64, 128
    assert devices.why_no_flash(*shapes) is None
    attend = torch.nn.functional.scaled_dot_product_attention

    def drop(query, *others, **options):
        assert query.shape == (1, 12, 128, 64) and query.dtype == torch.bfloat16 and query.requires_grad
        return attend(query, *others, **options, dropout_p=0.1)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", drop)
    assert devices.why_no_flash(*shapes) == "Both fused kernels do not support non-zero dropout."
    assert torch.backends.cuda.math_sdp_enabled()


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["Memory efficient kernel not used because:", "It has been runtime disabled. (Triggered internally at x)",
          "Flash attention kernel not used because:", "Expected a 16-bit type. (Triggered internally at x)",
          "CuDNN attention kernel not used because:", "Torch was not compiled with cuDNN."],
         "Expected a 16-bit type."),
        ([], "RuntimeError: No available kernel."),
    ],
)  # fmt: skip
def test_the_reason_is_that_against_flash_kernels(monkeypatch, lines, expected):
    """In the order in which torch gives its reasons on a GPU."""

    def refuse(*_, **__):
        for line in lines:
            warnings.warn(line, stacklevel=1)
        raise RuntimeError("No available kernel.")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    assert devices.why_no_flash(torch.device("cpu"), "no", 12, 64, 128) == expected
