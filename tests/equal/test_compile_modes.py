"""Compile modes: torch's names, chosen by the launcher, each of the same function, and what CUDA graphs require."""

import copy

import pytest
import torch
from accelerate import Accelerator
from helpers import reset_accelerate, values_of
from torch._dynamo.utils import counters
from torch._inductor import list_mode_options
from transformers import GPT2Config, GPT2LMHeadModel

from recipe.command_line import load_config
from recipe.hardware.accelerator import find_machine, parallelize
from recipe.hardware.choices import CUDA_GRAPH_MODES, DYNAMO_MODES, Machine
from recipe.hardware.devices import has_compiler
from recipe.hardware.memory import micro_batch_sizes, smaller_micro_batches
from recipe.hardware.sharding import list_blocks
from recipe.model.loss import LanguageModelingLoss


def config_of(*argv):
    return load_config(["--dataset_dir", "d", "--global_batch_size", "64", "--block_size", "1024", *argv])[0]


@pytest.fixture
def launch_with(monkeypatch):
    """Set the mode as the launcher does: `launch_with("lite")`."""
    return lambda mode: monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", mode)


def test_the_modes_are_those_of_torch():
    """Torch lists the same names, and says of the same modes that they record CUDA graphs."""
    options = {mode: list_mode_options(mode) for mode in list_mode_options()}
    assert sorted(DYNAMO_MODES) == sorted(options)
    assert sorted(CUDA_GRAPH_MODES) == sorted(mode for mode in options if options[mode].get("triton.cudagraphs"))


def test_the_launchers_answers_about_compilation_are_found(monkeypatch, launch_with):
    launch_with("lite")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    machine = find_machine(torch.device("cpu"))
    assert (machine.launcher_mode, machine.launcher_backend) == ("lite", "inductor")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "True")
    assert find_machine(torch.device("cpu")).launcher_backend == "inductor_regional"


@pytest.mark.parametrize(
    ("mode", "argv", "device_type", "expected"),
    [
        ("reduce-overhead", [], "cuda", [64]),  # running out of memory must not end in accumulation
        ("max-autotune", ["--gradient_accumulation_steps", "1"], "cuda", [64]),
        ("max-autotune", ["--dynamo_backend", "aot_eager"], "cuda", [64, 32, 16, 8, 4, 2, 1]),
        ("max-autotune-no-cudagraphs", [], "cuda", [64, 32, 16, 8, 4, 2, 1]),
        ("reduce-overhead", [], "cpu", [4, 2, 1]),  # a CPU has no CUDA graphs
    ],
)
def test_cuda_graphs_use_one_micro_batch(mode, argv, device_type, expected):
    """Only where inductor records them: on CUDA, in the modes that do."""
    config = config_of(*argv)
    machine = Machine(device_type, launcher_mode=mode)
    assert micro_batch_sizes(config, machine) == expected
    assert smaller_micro_batches(config, expected[0], machine) == expected[1:]


@pytest.mark.skipif(not has_compiler(), reason="inductor requires a C++ compiler")
@pytest.mark.parametrize(
    ("backend", "mode"), [*(("inductor", mode) for mode in DYNAMO_MODES), ("inductor_regional", "default")]
)
def test_each_mode_compiles_to_the_same_function(launch_with, backend, mode):
    """Loss and gradients equal those of the module that is not compiled. Of regions, all blocks share one graph."""
    launch_with(mode)
    reset_accelerate()
    torch.manual_seed(0)
    torch.compiler.reset()
    counters.clear()
    shape = {"n_layer": 3, "n_head": 2, "n_embd": 16, "vocab_size": 64, "n_positions": 8}
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    module = LanguageModelingLoss(GPT2LMHeadModel(GPT2Config(**shape, **dropout)), 64)
    config = config_of("--dynamo_backend", backend)
    compiled = parallelize(copy.deepcopy(module), config, Accelerator(cpu=True), None)
    rows = torch.randint(64, (4, 9))
    losses = []
    for some_module in (module, compiled):
        loss = some_module(rows[:, :-1], rows[:, 1:])["loss"]
        loss.backward()
        losses.append(loss)
    torch.testing.assert_close(*losses)
    for found, expected in zip(compiled.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
    assert counters["stats"]["unique_graphs"] == (2 if backend == "inductor_regional" else 1)  # and that of the loss
    torch.compiler.reset()


def test_ten_blocks_that_differ_are_ten_graphs():
    """More than torch would compile of one function."""
    torch.compiler.reset()
    counters.clear()
    shape = {"n_layer": 10, "n_head": 2, "n_embd": 16, "vocab_size": 64, "n_positions": 8}
    module = LanguageModelingLoss(GPT2LMHeadModel(GPT2Config(**shape, scale_attn_by_inverse_layer_idx=True)), 64)
    module.compile(list_blocks(module), backend="eager", fullgraph=True, dynamic=False)
    rows = torch.randint(64, (4, 9))
    module(rows[:, :-1], rows[:, 1:])
    assert counters["stats"]["unique_graphs"] == 10 + 1
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", CUDA_GRAPH_MODES)
def test_cuda_graphs_train_like_the_default(train, launch_with, tmp_path, mode):
    """The losses of twelve steps, evaluations in between, agree."""
    options = ["--max_steps", 12, "--eval_steps", 4, "--dynamo_backend", "inductor", "--tf32", "false"]
    runs = []
    for name in ("default", mode):
        launch_with(name)
        runs.append(train(*options, output_dir=tmp_path / name))
    assert values_of(runs[1], "loss") == pytest.approx(values_of(runs[0], "loss"), abs=1e-4)
