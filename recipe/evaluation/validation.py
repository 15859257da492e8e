"""Validation loss, perplexity and bits per byte, over a sample of the validation rows or over all of them."""

import time

import torch
from accelerate import Accelerator
from torch import nn
from tqdm import tqdm

from recipe.data.batches import iterate_validation
from recipe.data.packed import PackedDataset
from recipe.hardware.host_memory import FreedMemory
from recipe.model.loss import IGNORE_INDEX
from recipe.progress import progress_target

CPU_TOKENS = 2048  # in a forward: enough for all cores, and 400 MB of fp32 logits over GPT-2's vocabulary
SILENT_SECONDS = 2.0  # a shorter evaluation shows no progress bar


def choose_eval_batch_size(block_size: int, micro_batch_size: int, device: torch.device) -> int:
    """Rows in a forward of evaluation: on a GPU those of training, which are known to fit."""
    return max(1, CPU_TOKENS // block_size) if device.type == "cpu" else micro_batch_size


@torch.no_grad()
def evaluate_model(
    accelerator: Accelerator, module: nn.Module, dataset: PackedDataset, batch_size: int, num_rows: int
) -> dict[str, float]:
    """Mean over `num_rows` validation rows, each counted once, on any number of processes.

    module: a prepared `LanguageModelingLoss`. Returns loss (nats per token), perplexity and bits_per_byte, with
    num_rows and the seconds it took.
    """
    from recipe.evaluation.perplexity import LanguageModelingMetric  # here: importing evaluate takes seconds

    started_at = time.perf_counter()
    split = dataset.splits["validation"]
    num_processes = accelerator.num_processes
    num_batches = -(-num_rows // (batch_size * num_processes))
    losses = torch.zeros(num_batches, device=accelerator.device)  # allocated once: memory stays flat
    num_tokens = torch.zeros(num_batches, dtype=torch.float64)  # on the host, which has float64 whatever the device
    bar = tqdm(
        iterate_validation(split, num_rows, batch_size, accelerator.process_index, num_processes),
        total=num_batches,
        desc="evaluating",
        unit="batch",
        leave=False,
        position=0,  # over the bar of the training, which waits
        delay=SILENT_SECONDS,
        dynamic_ncols=True,
        disable=not accelerator.is_main_process,
        **progress_target(),
    )
    freed_memory = FreedMemory()
    module.eval()
    for i, (rows, num_real) in enumerate(bar):
        batch = torch.from_numpy(rows).to(accelerator.device)
        targets = batch[:, 1:].clone()
        targets[num_real:] = IGNORE_INDEX
        losses[i] = module(batch[:, :-1], targets)
        num_tokens[i] = num_real * dataset.block_size
        freed_memory.give_back()
    module.train()
    loss_sum = losses.cpu().double() @ num_tokens
    if num_processes > 1:
        loss_sum = accelerator.reduce(loss_sum.to(accelerator.device), reduction="sum")
    metrics = LanguageModelingMetric(keep_in_memory=True).compute(
        predictions=[loss_sum.item()],
        references=[num_rows * dataset.block_size],
        tokens_per_byte=dataset.tokens_per_byte("validation"),
    )
    return {**metrics, "num_rows": num_rows, "seconds": time.perf_counter() - started_at}
