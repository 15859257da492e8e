"""Batch arithmetic: what divides, and what fits."""

import contextlib
import types

import pytest
import torch
from transformers import GPT2Config

from recipe.command_line import load_config
from recipe.errors import UserError
from recipe.hardware import memory
from recipe.hardware.memory import estimate_bytes, estimate_row_bytes, micro_batch_candidates
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
def test_micro_batches(argv, num_processes, device, expected):
    """Accumulation is derived: the global batch is the recipe's on any hardware."""
    config = config_of("--block_size", "1024", "--global_batch_size", "512", *argv)
    assert micro_batch_candidates(config, num_processes, device) == expected


@pytest.mark.parametrize(
    ("argv", "num_processes", "expected"),
    [
        ([], 3, "does not divide by 3 processes; 510 or 513 would"),
        (["--global_batch_size", "2"], 4, "2 does not divide by 4 processes; 4 would"),
        (["--per_device_train_batch_size", "12"], 8, "these would: 1, 2, 4, 8, 16, 32, 64"),
        (["--gradient_accumulation_steps", "3"], 1, "gradient_accumulation_steps 3 does not divide"),
        (["--gradient_accumulation_steps", "2", "--per_device_train_batch_size", "8"], 1, "leave one of them out"),
    ],
)
def test_a_batch_that_does_not_divide(argv, num_processes, expected):
    """The message names the sizes that would work."""
    with pytest.raises(UserError, match=expected):
        micro_batch_candidates(config_of("--global_batch_size", "512", *argv), num_processes, CPU)


@pytest.fixture
def gpu(monkeypatch):
    """A module that is out of memory above 4 rows, on a pretended GPU: `gpu.find(candidates, global_batch)`."""

    class Module(torch.nn.Linear):
        def forward(self, inputs, targets):
            gpu.tried.append(len(inputs))
            gpu.held.append(sum(allocated))
            if len(inputs) > 4:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
            return super().forward(inputs.float()).sum()

    def empty_like(tensor):
        allocated.append(tensor.numel())
        return empty(tensor.shape)

    def find(candidates, row_bytes=0, argv=("--global_batch_size", "16")):
        gpu.tried, gpu.held = [], []
        allocated.clear()
        config = config_of("--block_size", "8", *argv)
        return memory.find_micro_batch(accelerator, Module(8, 1), candidates, config, row_bytes)

    allocated, empty = [], torch.empty
    gpu = types.SimpleNamespace(find=find, free=10**9)
    accelerator = types.SimpleNamespace(
        device=types.SimpleNamespace(type="cuda"),
        num_processes=1,
        no_sync=lambda module: contextlib.nullcontext(),
        backward=lambda loss: None,
        reduce=lambda tensor, reduction: tensor,
    )
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gpu.free, 10**10))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1000)
    monkeypatch.setattr(torch, "empty_like", empty_like)
    monkeypatch.setattr(torch, "ones", lambda size, device: torch.full(size, 1.0))
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, device: torch.full(size, 0, dtype=dtype))
    return gpu


def test_find_micro_batch_halves_until_it_fits(gpu):
    """Out of memory in a trial moves on to the next size."""
    assert gpu.find([16, 8, 4, 2]) == 4 and gpu.tried == [16, 8, 4]
    with pytest.raises(UserError, match="does not fit with one sequence"):
        gpu.find([16, 8])


def test_a_trial_holds_what_a_step_holds(gpu):
    """AdamW's two moments of 9 parameters, and their gradients once more where a step accumulates them."""
    gpu.find([16, 8, 4], argv=("--global_batch_size", "16"))
    assert gpu.held == [2 * 9, 3 * 9, 4 * 9]  # one trial's gradients are freed before the next, and counted here


def test_sizes_that_cannot_fit_are_not_tried(gpu):
    """9 parameters of 20 bytes and 100 bytes a row: 16 rows take 1,780 bytes; the smallest is always tried."""
    gpu.free = 8 * 100 + 9 * 20 - 1000  # beside 1,000 bytes that are the process's own
    assert gpu.find([16, 8, 4], row_bytes=100) == 4 and gpu.tried == [8, 4]
    assert gpu.find([16, 8, 4], row_bytes=10**6) == 4 and gpu.tried == [4]
    gpu.free = 10**9
    limit = ("--global_batch_size", "16", "--gpu_memory_limit_gb", "1e-6")  # 1,000 bytes
    assert gpu.find([16, 8, 4], row_bytes=100, argv=limit) == 4 and gpu.tried == [8, 4]


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
def test_the_estimate_of_activations(argv, precision, bf16_residual, per_token):
    """Bytes a token, by hand, of 124M parameters."""
    config = config_of("--block_size", "1024", *argv)
    assert estimate_row_bytes(config, GPT2_124M, precision, bf16_residual) == 1024 * per_token
    assert estimate_bytes(10**9, 2, 5, accumulates=True) - estimate_bytes(10**9, 2, 5, accumulates=False) == 4 * 10**9


@pytest.mark.parametrize("switches", [[], ["--bf16_residual", "true"]])
def test_no_more_is_estimated_than_is_saved(switches):
    """The tensors that autograd keeps for backward, in bf16 and not compiled, are at least the estimate."""
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
