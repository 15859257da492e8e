"""Micro-batches: sizes that divide the batch, and the search for one that fits."""

import gc

import pytest
import torch
from accelerate import Accelerator
from conftest import reset_accelerate
from transformers import GPT2Config

from recipe.command_line import load_config
from recipe.errors import UserError
from recipe.hardware import micro_batch
from recipe.hardware.memory import estimate_bytes, estimate_row_bytes
from recipe.hardware.micro_batch import micro_batch_candidates
from recipe.model.build import build_model, build_model_config
from recipe.model.loss import LanguageModelingLoss

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def config_of(*argv):
    return load_config(["--dataset_dir", "d", *argv])[0]


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
        ([], 3, "512 is not divisible by 3 processes; use 510 or 513"),
        (["--global_batch_size", "2"], 4, "2 is not divisible by 4 processes; use 4"),
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

    def find(module, candidates, row_bytes=0):
        config = config_of("--block_size", "8", "--global_batch_size", "16")
        return micro_batch.find_micro_batch(accelerator, module, candidates, config, row_bytes)

    yield find
    reset_accelerate()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_search_returns_the_largest_size_that_fits(search, where):
    """Running out of memory in a trial moves on to the next size, and no gradients stay."""
    module = LimitedModule(4, where)
    assert search(module, [16, 8, 4, 2]) == 4 and module.tried == [16, 8, 4]
    assert all(p.grad is None for p in module.parameters())


def test_the_search_fails_if_nothing_fits(search):
    with pytest.raises(UserError, match="--activation_checkpointing --loss_chunks 8"):
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


def test_a_cpu_and_a_fixed_size_are_not_searched(search):
    module = LimitedModule(4)
    assert search(module, [16]) == 16 and module.tried == []
    config = config_of("--block_size", "8", "--global_batch_size", "16")
    assert micro_batch.find_micro_batch(Accelerator(cpu=True), module, [16, 8], config, 0) == 16 and module.tried == []


def test_sizes_that_cannot_fit_are_not_tried(search, monkeypatch):
    """20 bytes for each of 531 parameters and 1,000 for each row; the smallest size is always tried."""
    module = LimitedModule(16)
    assert sum(p.numel() for p in module.parameters()) == 531
    monkeypatch.setattr(micro_batch, "_usable_bytes", lambda device, limit_gb: 531 * 20 + 8 * 1000)
    assert search(module, [16, 8, 4], row_bytes=1000) == 8 and module.tried == [8]
    assert search(module, [16, 8, 4], row_bytes=10**6) == 4 and module.tried == [8, 4]


def test_usable_memory_is_free_or_held_already_up_to_the_limit(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7_000, 10**10))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1_000)
    assert micro_batch._usable_bytes(CUDA, None) == 8_000
    assert micro_batch._usable_bytes(CUDA, 1e-6) == 1_000


GPT2_124M = GPT2Config(vocab_size=50304)


@pytest.mark.parametrize(
    ("argv", "precision", "bf16_residual", "per_token"),
    [
        ([], "bf16", False, 12 * 768 * 36 + 50304 * 4),
        ([], "bf16", True, 12 * 768 * 32 + 50304 * 4),
        ([], "no", False, 12 * 768 * 64 + 50304 * 8),
        (["--loss_chunks", "8"], "fp16", False, 12 * 768 * 36 + 50304 // 2),
        (["--activation_checkpointing"], "bf16", False, 768 * 36 + 12 * 768 * 4 + 50304 * 4),
    ],
)
def test_the_estimate_of_activation_memory(argv, precision, bf16_residual, per_token):
    """Bytes per token of GPT-2 124M, computed by hand."""
    config = config_of("--block_size", "1024", *argv)
    assert estimate_row_bytes(config, GPT2_124M, precision, bf16_residual) == 1024 * per_token
    assert estimate_bytes(10**9, 2, 5, accumulates=True) - estimate_bytes(10**9, 2, 5, accumulates=False) == 4 * 10**9


@pytest.mark.parametrize("switches", [[], ["--bf16_residual", "true"]])
def test_the_estimate_is_a_lower_bound(switches):
    """Without compilation, autograd keeps at least as many bytes for backward."""
    options = ["--config_overrides", "n_layer=4,n_head=2,n_embd=64", "--block_size", "64"]
    config = config_of(*options, *switches)
    model_config = build_model_config(config, 512, 0)
    model = build_model(config, model_config, bf16_residual=config.bf16_residual == "true")
    module, saved = LanguageModelingLoss(model, 512).train(), {}
    weights = {p.data_ptr() for p in model.parameters()}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    rows = torch.randint(512, (8, 65))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        loss = module(rows[:, :-1], rows[:, 1:])
    estimate = 8 * estimate_row_bytes(config, model.config, "bf16", config.bf16_residual == "true")
    assert loss.isfinite() and estimate <= sum(saved.values())
