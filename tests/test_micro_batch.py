"""Batch arithmetic: what divides, and what fits."""

import contextlib
import types

import pytest
import torch

from recipe import micro_batch
from recipe.config import UserError, load_config
from recipe.micro_batch import micro_batch_candidates

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


def test_find_micro_batch_halves_until_it_fits(monkeypatch):
    """Out of memory in a trial moves on to the next size; any other error is not hidden."""
    tried = []

    class Module(torch.nn.Linear):
        def forward(self, inputs, targets):
            tried.append(len(inputs))
            if len(inputs) > 4:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
            return super().forward(inputs.float()).sum()

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
    monkeypatch.setattr(torch, "ones", lambda size, device: torch.full(size, 1.0))
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, device: torch.full(size, 0, dtype=dtype))
    assert micro_batch.find_micro_batch(accelerator, Module(8, 1), [16, 8, 4, 2], 8) == 4
    assert tried == [16, 8, 4]
    with pytest.raises(UserError, match="does not fit with one sequence"):
        micro_batch.find_micro_batch(accelerator, Module(8, 1), [16, 8], 8)
