"""Micro-batches: sizes that divide the batch, and the search for one that fits."""

import gc
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from conftest import reset_accelerate
from transformers import GPT2Config

from recipe.checkpoint.load import RunState
from recipe.command_line import load_config
from recipe.errors import UserError
from recipe.hardware import micro_batch
from recipe.hardware.choices import Choice
from recipe.hardware.memory import MemoryPlan
from recipe.hardware.micro_batch import micro_batch_candidates, recall_micro_batch, remember_micro_batch
from recipe.run.accumulation import Accumulation

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def config_of(*argv):
    return load_config(["--dataset_dir", "d", "--optim", "auto", *argv])[0]


@pytest.mark.parametrize(
    ("argv", "num_processes", "device", "expected"),
    [
        (["--per_device_train_batch_size", "8"], 2, CUDA, [8]),
        (["--per_device_train_batch_size", "auto"], 1, CUDA, [64, 32, 16, 8, 4, 2, 1]),
        (["--per_device_train_batch_size", "auto"], 1, CPU, [4, 2, 1]),
        (["--per_device_train_batch_size", "auto", "--block_size", "8192"], 1, CPU, [1]),
        (["--gradient_accumulation_steps", "16"], 2, CUDA, [16]),
        (["--gradient_accumulation_steps", "16", "--per_device_train_batch_size", "16"], 2, CUDA, [16]),
        (["--global_batch_size", "480"], 3, CUDA, [40, 32, 20, 16, 10, 8, 5, 4, 2, 1]),
    ],
)
def test_candidates_divide_the_global_batch(argv, num_processes, device, expected):
    """The global batch is the recipe's on any hardware, and accumulation is derived."""
    config = config_of("--block_size", "1024", "--global_batch_size", "512", *argv)
    assert micro_batch_candidates(config, num_processes, device) == expected


@pytest.mark.parametrize(
    ("argv", "num_processes", "expected"),
    [
        ([], 3, "512 is not divisible by 3 processes; use a global batch of 510 or 513"),
        (["--global_batch_size", "2"], 4, "2 is not divisible by 4 processes; use a global batch of 4"),
        (["--per_device_train_batch_size", "12"], 8, "use one of 1, 2, 4, 8, 16, 32, 64"),
        (["--gradient_accumulation_steps", "3"], 1, "gradient_accumulation_steps 3 does not divide"),
        (["--gradient_accumulation_steps", "2", "--per_device_train_batch_size", "8"], 1, "remove one of them"),
    ],
)
def test_a_batch_that_does_not_divide(argv, num_processes, expected):
    """The message lists the sizes that would work."""
    with pytest.raises(UserError, match=expected):
        micro_batch_candidates(config_of("--global_batch_size", "512", *argv), num_processes, CPU)


class CpuWithASearch(str):
    """The name of the CPU, with another type: there, `find_micro_batch` searches."""

    type = "another"


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


class LimitedModule(torch.nn.Module):
    """Runs out of memory above `max_rows` rows, and records each trial."""

    def __init__(self, max_rows: int, where: str = "forward") -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 53), torch.nn.Linear(53, 1)
        self.max_rows, self.where = max_rows, where
        self.tried: list[int] = []
        self.copies: list[int] = []  # tensors as large as the first weight that are alive, in each trial

    def forward(self, inputs, targets):
        self.tried.append(len(inputs))
        assert all(p.grad is None for p in self.parameters()), "gradients of an earlier trial"
        tensors = (o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter))
        self.copies.append(sum(tensor.shape == self.first.weight.shape for tensor in tensors))
        hidden = self.first(inputs.float())
        if len(inputs) > self.max_rows:
            if self.where == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            hidden = FailsInBackward.apply(hidden)
        return self.last(hidden).mean()


@pytest.fixture
def search(monkeypatch):
    """Search on a real Accelerator whose CPU does not look like one: `search(module, candidates)`."""
    reset_accelerate()
    accelerator = Accelerator(cpu=True)
    accelerator.state.device = CpuWithASearch("cpu")
    for name in ("synchronize", "empty_cache"):  # both fail on a machine without an accelerator
        monkeypatch.setattr(torch.accelerator, name, lambda: None)

    def find(module, candidates, *argv):
        config = config_of("--block_size", "8", "--global_batch_size", "16", *argv)
        return micro_batch.find_micro_batch(accelerator, module, candidates, config)

    find.accelerator = accelerator
    yield find
    reset_accelerate()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_search_returns_the_largest_size_that_fits(search, where):
    """Running out of memory in a trial moves on to the next size, and no gradients stay."""
    module = LimitedModule(4, where)
    assert search(module, [16, 8, 4, 2]) == 4 and module.tried == [16, 8, 4]
    assert all(p.grad is None for p in module.parameters())


def test_the_search_fails_if_nothing_fits(search):
    with pytest.raises(UserError, match="try --activation_checkpointing or a smaller recipe"):
        search(LimitedModule(0), [2, 1])


def test_other_errors_end_the_search(search):
    module = LimitedModule(4)
    module.last = torch.nn.Linear(7, 1)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        search(module, [4, 2])


def test_a_trial_holds_the_memory_of_a_step(search):
    """Besides each weight, it holds AdamW's two moments, and the gradient if the step accumulates."""
    module = LimitedModule(4)
    search(module, [16, 8, 4])
    assert module.copies == [1 + 2, 1 + 2 + 1, 1 + 2 + 1]


def test_a_trial_holds_one_moment_of_muons_matrices(search, monkeypatch):
    """Besides each weight and the gradient of a step that accumulates."""
    module = LimitedModule(4)
    monkeypatch.setattr(micro_batch, "find_matrices", lambda module: dict.fromkeys(module.parameters(), 1))
    search(module, [16, 8, 4], "--optim", "muon")
    assert module.copies == [1 + 1, 1 + 1 + 1, 1 + 1 + 1]


def test_a_cpu_and_a_fixed_size_are_not_searched(search):
    module = LimitedModule(4)
    assert search(module, [16]) == 16 and module.tried == []
    config = config_of("--block_size", "8", "--global_batch_size", "16")
    assert micro_batch.find_micro_batch(Accelerator(cpu=True), module, [16, 8], config) == 16 and module.tried == []


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """The file of remembered sizes, in an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "gpt2_recipe" / "micro_batch.json"


def test_a_size_is_remembered_until_it_is_replaced(answers):
    """Each key has its own size, and a process that was killed leaves no partial file behind."""
    assert recall_micro_batch("a") is None
    remember_micro_batch("a", 16)
    remember_micro_batch("b", 4)
    remember_micro_batch("a", 8)
    assert (recall_micro_batch("a"), recall_micro_batch("b"), recall_micro_batch("c")) == (8, 4, None)
    assert [path.name for path in answers.parent.iterdir()] == ["micro_batch.json"]


@pytest.mark.parametrize("content", ["", "{", "[1]", "7", '{"a": "16"}', '{"a": -1}', "\xff"])
def test_a_damaged_file_is_replaced(answers, content):
    """What is not a size counts as unknown, and the next answer is stored all the same."""
    answers.parent.mkdir()
    answers.write_bytes(content.encode("latin-1"))
    assert recall_micro_batch("a") is None
    remember_micro_batch("a", 16)
    assert recall_micro_batch("a") == 16


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    remember_micro_batch("a", 16)
    assert recall_micro_batch("a") is None


def test_a_remembered_size_is_used_untried_until_memory_runs_out(search, answers, monkeypatch):
    """A run starts with the size that an earlier one found for the same plan, and tries again after it failed."""
    monkeypatch.setattr(Accumulation, "start", lambda self, state: None)
    monkeypatch.setattr(Accumulation, "close", lambda self: None)
    config = config_of("--block_size", "8", "--global_batch_size", "16")
    choices = {"precision": Choice("no", "a test")}

    def accumulate(module, planned=8):
        module.model = SimpleNamespace(config=GPT2Config())
        plan = MemoryPlan(planned, False, 1, "adamw_torch_fused", {})
        return Accumulation(config, search.accelerator, module, None, choices, plan)

    first = LimitedModule(4)
    assert accumulate(first).micro_batch_size == 4 and first.tried == [8, 4]  # not 16, which is beyond the plan
    again = LimitedModule(4)
    accumulation = accumulate(again)
    assert accumulation.micro_batch_size == 4 and again.tried == []
    accumulation.shrink(RunState())
    third = LimitedModule(4)
    assert accumulation.micro_batch_size == 2
    assert accumulate(third).micro_batch_size == 4 and third.tried == [8, 4]
    other = LimitedModule(4)  # less memory is free, so that the plan is another
    assert accumulate(other, planned=2).micro_batch_size == 2 and other.tried == [2]
