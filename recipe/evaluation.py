"""Exact validation loss, perplexity and bits per byte."""

import math

import datasets
import evaluate
import torch
from accelerate import Accelerator
from torch import nn

from recipe.data.batches import iterate_validation
from recipe.data.packed import PackedDataset
from recipe.loss import IGNORE_INDEX


class LanguageModelingMetric(evaluate.Metric):
    """Loss, perplexity and bits per byte from sums over any number of batches and processes; needs no download.

    compute(predictions=[sums of nats], references=[numbers of target tokens], tokens_per_byte=...)
    """

    def _info(self):
        return evaluate.MetricInfo(
            description="Mean negative log-likelihood per token in nats, its exponential, and bits per byte of text.",
            citation="",
            inputs_description="predictions: sums of nats; references: the numbers of target tokens they are over.",
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions, references, tokens_per_byte):
        loss = math.fsum(predictions) / sum(references)
        return {
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "bits_per_byte": loss / math.log(2) * tokens_per_byte,
        }


@torch.no_grad()
def evaluate_model(
    accelerator: Accelerator, module: nn.Module, dataset: PackedDataset, batch_size: int
) -> dict[str, float]:
    """Mean over every row of the validation split, each counted once, on any number of processes.

    module: a prepared `LanguageModelingLoss`. Returns loss (nats per token), perplexity and bits_per_byte.
    """
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
