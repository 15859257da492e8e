"""Exact validation loss, perplexity and bits per byte."""

import torch
from accelerate import Accelerator
from torch import nn

from recipe.data.batches import iterate_validation
from recipe.data.packed import PackedDataset
from recipe.loss import IGNORE_INDEX


@torch.no_grad()
def evaluate_model(
    accelerator: Accelerator, module: nn.Module, dataset: PackedDataset, batch_size: int
) -> dict[str, float]:
    """Mean over every row of the validation split, each counted once, on any number of processes.

    module: a prepared `LanguageModelingLoss`. Returns loss (nats per token), perplexity and bits_per_byte.
    """
    from recipe.perplexity import LanguageModelingMetric  # here: importing evaluate takes seconds

    split = dataset.splits["validation"]
    losses, weights = [], []
    module.eval()
    for rows, num_real in iterate_validation(split, batch_size, accelerator.process_index, accelerator.num_processes):
        batch = torch.from_numpy(rows).to(accelerator.device)
        targets = batch[:, 1:].clone()
        targets[num_real:] = IGNORE_INDEX
        losses.append(module(batch[:, :-1], targets))
        weights.append(num_real * dataset.block_size)
    module.train()
    weights = torch.tensor(weights, dtype=torch.float64)  # on the host, exactly: bf16 devices need no float64
    sums = torch.stack([torch.stack(losses).cpu().double() @ weights, weights.sum()])
    if accelerator.num_processes > 1:
        sums = accelerator.reduce(sums.to(accelerator.device), reduction="sum").cpu()
    loss_sum, num_tokens = sums.tolist()
    return LanguageModelingMetric(keep_in_memory=True).compute(
        predictions=[loss_sum], references=[int(num_tokens)], tokens_per_byte=dataset.tokens_per_byte("validation")
    )
