"""Compile modes: torch's names, the launcher's choice, and CUDA graphs only with one micro-batch per step."""

import copy

import pytest
import torch
from conftest import read_events
from torch._inductor import list_mode_options

from recipe.command_line import load_config
from recipe.config import TrainConfig
from recipe.errors import UserError
from recipe.hardware import choices
from recipe.hardware.accelerator import compile_module
from recipe.hardware.choices import CUDA_GRAPH_MODES, DYNAMO_MODES, choose_dynamo_mode
from recipe.hardware.devices import has_compiler
from recipe.hardware.micro_batch import micro_batch_candidates, smaller_micro_batch

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def config_of(*argv):
    return load_config(["--dataset_dir", "d", "--global_batch_size", "64", "--block_size", "1024", *argv])[0]


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)

    def forward(self, inputs):
        return self.outer(torch.nn.functional.gelu(self.inner(inputs)))


@pytest.fixture(autouse=True)
def a_compiler(monkeypatch):
    """Let inductor compile for the CUDA device that these tests only name."""
    monkeypatch.setattr(choices, "why_no_inductor", lambda device: None)


def test_the_modes_are_those_of_torch():
    """Torch lists the same names, and says of the same modes that they record CUDA graphs."""
    options = {mode: list_mode_options(mode) for mode in list_mode_options()}
    assert sorted(DYNAMO_MODES) == sorted(options)
    assert sorted(CUDA_GRAPH_MODES) == sorted(mode for mode in options if options[mode].get("triton.cudagraphs"))
    assert str(TrainConfig.__dataclass_fields__["dynamo_mode"].type).count("'") == 2 * len(("auto", *DYNAMO_MODES))


@pytest.mark.parametrize(
    ("argv", "launcher", "expected"),
    [
        ([], None, "default"),
        ([], "reduce-overhead", "reduce-overhead"),
        (["--dynamo_mode", "default"], "max-autotune", "default"),
        (["--dynamo_mode", "lite"], None, "lite"),
    ],
)
def test_the_option_comes_before_the_launcher(monkeypatch, argv, launcher, expected):
    """As for the backend."""
    monkeypatch.delenv("ACCELERATE_DYNAMO_MODE", raising=False)
    if launcher is not None:
        monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", launcher)
    assert choose_dynamo_mode(config_of(*argv)).value == expected


def test_an_unknown_mode_of_the_launcher_is_refused(monkeypatch):
    """It may come from a file for another version."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "fastest")
    with pytest.raises(UserError, match="the launcher's dynamo_mode is 'fastest'; use one of default, lite, "):
        choose_dynamo_mode(config_of())


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
        micro_batch_candidates(config_of("--dynamo_mode", mode, *argv), num_processes, CUDA)


@pytest.mark.parametrize(
    ("argv", "device", "expected"),
    [
        (["--dynamo_mode", "reduce-overhead"], CUDA, [64]),  # a search must not end in accumulation
        (["--dynamo_mode", "max-autotune", "--gradient_accumulation_steps", "1"], CUDA, [64]),
        (["--dynamo_mode", "max-autotune", "--dynamo_backend", "aot_eager"], CUDA, [64, 32, 16, 8, 4, 2, 1]),
        (["--dynamo_mode", "max-autotune-no-cudagraphs"], CUDA, [64, 32, 16, 8, 4, 2, 1]),
        (["--dynamo_mode", "reduce-overhead"], CPU, [4, 2, 1]),  # a CPU has no CUDA graphs
    ],
)
def test_cuda_graphs_use_one_micro_batch(argv, device, expected):
    """Only where inductor records them: on CUDA, in the modes that do."""
    assert micro_batch_candidates(config_of(*argv), 1, device) == expected


def test_the_launchers_mode_is_held_to_the_same_rule(monkeypatch):
    """`accelerate config` offers reduce-overhead and max-autotune."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "max-autotune")
    with pytest.raises(UserError, match="dynamo_mode max-autotune uses CUDA graphs"):
        micro_batch_candidates(config_of("--per_device_train_batch_size", "8"), 1, CUDA)


def test_out_of_memory_with_cuda_graphs_ends_the_run():
    """A smaller micro-batch would accumulate, so the advice is a mode that may."""
    config = config_of("--dynamo_mode", "reduce-overhead")
    with pytest.raises(UserError, match="auto and --dynamo_mode default --per_device_train_batch_size 32,"):
        smaller_micro_batch(config, micro_batch_candidates(config, 1, CUDA), 64, 1)


@pytest.mark.skipif(not has_compiler(), reason="inductor requires a C++ compiler")
@pytest.mark.parametrize("mode", DYNAMO_MODES)
def test_each_mode_compiles_to_the_same_function(mode):
    """Loss and gradients equal those of the module that is not compiled."""
    torch.manual_seed(0)
    module = Layers()
    compiled, inputs = copy.deepcopy(module), torch.randn(4, 8)
    compile_module(compiled, "inductor", mode)
    for m in (module, compiled):
        m(inputs).mean().backward()
    for found, expected in zip(compiled.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", CUDA_GRAPH_MODES)
def test_cuda_graphs_train_like_the_default(train, tmp_path, mode):
    """The losses of twelve steps, evaluations in between, agree."""
    options = ["--max_steps", 12, "--eval_steps", 4, "--dynamo_backend", "inductor", "--tf32", "false"]
    runs = [train(*options, "--dynamo_mode", name, output_dir=tmp_path / name) for name in ("default", mode)]
    expected, found = ([event["loss"] for event in read_events(run, "train")] for run in runs)
    assert found == pytest.approx(expected, abs=1e-4)
