"""The log-probabilities of the last tokens of rows of token ids: what text, HellaSwag and LAMBADA are scored by.

Rows are padded on the right, which causal attention never looks at, so no mask is needed.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from accelerate import PartialState
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedModel

from recipe.progress import progress_target

CPU_TOKENS, GPU_TOKENS = 2048, 16384  # per forward pass: enough to keep all cores, or a GPU, busy
LOGIT_ROWS = 1024  # logits computed at a time: 200 MB in fp32 over GPT-2's vocabulary
SILENT_SECONDS = 2.0  # a shorter evaluation shows no progress bar


def summarize_loss(
    loss_sum: float, num_tokens: int, tokens_per_byte: float, tokens_per_character: float | None = None
) -> dict[str, float]:
    """Return loss (nats per token), perplexity, bits_per_byte and, where known, bits_per_character.

    loss_sum: nats, over num_tokens target tokens.
    """
    loss = loss_sum / num_tokens
    bits_per_token = loss / math.log(2)
    scores = {"loss": loss, "perplexity": exp_or_inf(loss), "bits_per_byte": bits_per_token * tokens_per_byte}
    if tokens_per_character is not None:
        scores["bits_per_character"] = bits_per_token * tokens_per_character
    return scores


def exp_or_inf(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


class Row(NamedTuple):
    """Token ids (int64 [length]) of which the last num_targets are scored, given all that precede them."""

    ids: np.ndarray
    num_targets: int


class Score(NamedTuple):
    """The log-probability of a row's targets in nats, and whether each of them is the most likely token."""

    log_probability: float
    is_greedy: bool


@torch.no_grad()
def score_batch(model: PreTrainedModel, vocab_size: int, rows: Sequence[Row]) -> list[Score]:
    """Score rows in one forward pass. A row has at most n_positions + 1 ids, since the last one is not an input.

    vocab_size: logits beyond it, the padding of the vocabulary, have no part in the softmax.
    """
    inputs = pad_sequence([torch.from_numpy(row.ids[:-1]) for row in rows], batch_first=True)
    width, counts = inputs.shape[1], [row.num_targets for row in rows]
    targets = torch.from_numpy(np.concatenate([row.ids[len(row.ids) - row.num_targets :] for row in rows]))
    # Target k of a row is predicted at the position before it.
    ends = [i * width + len(row.ids) - 1 for i, row in enumerate(rows)]
    positions = torch.cat([torch.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
    hidden = model.base_model(input_ids=inputs.to(model.device), use_cache=False)[0].flatten(0, 1)
    hidden, targets = hidden[positions.to(model.device)], targets.to(model.device)
    found, greedy = [], []
    for part, part_targets in zip(hidden.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True):
        logits = model.get_output_embeddings()(part)[:, :vocab_size].float()
        greedy.append(logits.argmax(dim=-1) == part_targets)
        found.append(logits.log_softmax(dim=-1).gather(1, part_targets[:, None])[:, 0])
    sums = [part.double().sum().item() for part in torch.cat(found).cpu().split(counts)]
    return list(map(Score, sums, [part.all().item() for part in torch.cat(greedy).cpu().split(counts)]))


def make_batches(lengths: Sequence[int], tokens_per_batch: int) -> list[np.ndarray]:
    """Group rows into batches of similar length, longest first. Returns the indices of the rows of each batch."""
    order = np.argsort(-np.asarray(lengths), kind="stable")
    batches, start = [], 0
    while start < len(order):
        count = max(1, tokens_per_batch // max(1, lengths[order[start]]))
        batches.append(order[start : start + count])
        start += count
    return batches


def show_progress(iterable: Iterable, desc: str, unit: str, total: int) -> tqdm:
    """Show a bar on the main process, above the bar of a training run, if the evaluation takes long."""
    return tqdm(
        iterable,
        total=total,
        desc=desc,
        unit=unit,
        leave=False,
        position=0,
        delay=SILENT_SECONDS,
        dynamic_ncols=True,
        disable=not PartialState().is_main_process,
        **progress_target(),
    )
