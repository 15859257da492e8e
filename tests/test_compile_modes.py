"""Compile modes: torch's names, chosen by the launcher, and CUDA graphs only with one micro-batch per step."""

import copy

import pytest
import torch
from accelerate import Accelerator
from conftest import read_events, reset_accelerate
from torch._inductor import list_mode_options
from transformers import GPT2Config, GPT2LMHeadModel

from recipe.command_line import load_config
from recipe.errors import UserError
from recipe.hardware import accelerator
from recipe.hardware.accelerator import find_facts, parallelize
from recipe.hardware.choices import CUDA_GRAPH_MODES, DYNAMO_MODES, Facts, choose, settle
from recipe.hardware.devices import has_compiler
from recipe.hardware.memory import micro_batch_sizes, smaller_micro_batches
from recipe.model.loss import LanguageModelingLoss

NO_DROPOUT = ("attn_pdrop", "embd_pdrop", "resid_pdrop")


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


def test_the_mode_is_the_launchers(monkeypatch, launch_with):
    """The start table shows it where inductor compiles; one of another version of torch is refused."""
    monkeypatch.setattr(accelerator, "why_no_inductor", lambda device: None)
    typed = ["--mixed_precision", "no", "--attn_implementation", "sdpa"]
    for backend, mode, expected in (("inductor", "lite", "lite"), ("inductor", "default", None), ("no", "lite", None)):
        launch_with(mode)
        choices = choose(config_of("--dynamo_backend", backend, *typed), find_facts(torch.device("cpu")), None)
        assert (choices["mode"].value if "mode" in choices else None) == expected
    launch_with("fastest")
    with pytest.raises(UserError, match="the launcher's dynamo_mode is 'fastest'; use one of default, lite, "):
        settle(config_of(), find_facts(torch.device("cpu")))


@pytest.mark.parametrize("mode", CUDA_GRAPH_MODES)
@pytest.mark.parametrize(
    ("argv", "num_processes", "share", "size"),
    [
        (["--per_device_train_batch_size", "16"], 1, 64, 16),
        (["--gradient_accumulation_steps", "2"], 2, 32, 16),
        (["--global_batch_size", "256"], 2, 128, 64),  # auto: 64 rows of 1,024 tokens are the largest micro-batch
    ],
)
def test_cuda_graphs_with_accumulation_are_refused(mode, argv, num_processes, share, size):
    """Whether the number of micro-batches is given or found."""
    expected = (
        rf"dynamo_mode {mode} uses CUDA graphs.* one micro-batch of {share} sequences per process, not of {size};"
    )
    with pytest.raises(UserError, match=expected):
        micro_batch_sizes(config_of(*argv), Facts("cuda", num_processes, launcher_mode=mode))


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
    config, facts = config_of(*argv), Facts(device_type, launcher_mode=mode)
    assert micro_batch_sizes(config, facts) == expected
    smaller = smaller_micro_batches(config, expected[0], facts)
    assert smaller == ([] if expected == [64] else expected[1:])


@pytest.mark.skipif(not has_compiler(), reason="inductor requires a C++ compiler")
@pytest.mark.parametrize("mode", DYNAMO_MODES)
def test_each_mode_compiles_to_the_same_function(launch_with, mode):
    """Loss and gradients equal those of the module that is not compiled."""
    launch_with(mode)
    reset_accelerate()
    torch.manual_seed(0)
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 64, "n_positions": 8}
    module = LanguageModelingLoss(GPT2LMHeadModel(GPT2Config(**shape, **dict.fromkeys(NO_DROPOUT, 0.0))), 64)
    config = config_of("--dynamo_backend", "inductor")
    compiled, rows = parallelize(copy.deepcopy(module), config, Accelerator(cpu=True), None), torch.randint(64, (4, 9))
    for m in (module, compiled):
        m(rows[:, :-1], rows[:, 1:])["loss"].backward()
    for found, expected in zip(compiled.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", CUDA_GRAPH_MODES)
def test_cuda_graphs_train_like_the_default(train, launch_with, tmp_path, mode):
    """The losses of twelve steps, evaluations in between, agree."""
    options = ["--max_steps", 12, "--eval_steps", 4, "--dynamo_backend", "inductor", "--tf32", "false"]
    runs = []
    for name in ("default", mode):
        launch_with(name)
        runs.append(train(*options, output_dir=tmp_path / name))
    expected, found = ([event["loss"] for event in read_events(run, "train")] for run in runs)
    assert found == pytest.approx(expected, abs=1e-4)
