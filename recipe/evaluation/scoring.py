"""What validation rows, texts and tasks share: windows of tokens, the sums of their losses, and the progress bar."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from accelerate import PartialState
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from recipe.data.batches import to_device
from recipe.hardware.host_memory import FreedMemory
from recipe.hardware.processes import gather
from recipe.model.loss import IGNORE_INDEX
from recipe.progress import progress_target

CPU_TOKENS = 2048  # per forward pass: enough to keep all cores busy
GPU_TOKENS = 8192  # enough to keep a GPU busy
SILENT_SECONDS = 2.0  # a shorter evaluation shows no progress bar

T = TypeVar("T")


class Window(NamedTuple):
    """Token ids (int64 [length]). The last num_targets are scored, given all ids before them."""

    ids: np.ndarray
    num_targets: int


def batch_windows(lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
    """Group windows into batches of similar length, longest first. Returns the indices of the windows of each."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches = []
    start = 0
    while start < len(order):
        count = max(1, tokens_per_batch // max(1, lengths[order[start]]))
        batches.append(order[start : start + count])
        start += count
    return batches


def pad_windows(windows: Sequence[Window], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input_ids and targets, int64 [windows, longest - 1]. Causal attention never sees padding on the right."""
    inputs = []
    targets = []
    for ids, num_targets in windows:
        row = torch.from_numpy(ids)
        inputs.append(row[:-1])
        targets.append(row[1:].clone())
        targets[-1][: len(row) - 1 - num_targets] = IGNORE_INDEX
    padded = (
        pad_sequence(inputs, batch_first=True),
        pad_sequence(targets, batch_first=True, padding_value=IGNORE_INDEX),
    )
    return to_device(padded[0], device), to_device(padded[1], device)


class Totals(NamedTuple):
    """Sums over targets. A special token, such as a separator of documents, is a target but no text."""

    nats: float
    num_tokens: int
    text_nats: float
    num_text_tokens: int

    def num_bytes(self, bytes_per_token: float | None) -> float | None:
        """Return the bytes of the text, None if those of a token are not known."""
        return None if bytes_per_token is None else self.num_text_tokens * bytes_per_token

    def scores(self, num_bytes: float | None) -> dict[str, float | None]:
        """Return loss (nats per token), perplexity, and bits_per_byte of text, None if its bytes are not known."""
        loss = self.nats / self.num_tokens
        bits = self.text_nats / math.log(2)
        bits_per_byte = None if num_bytes is None else bits / max(1, num_bytes)
        return {"loss": loss, "perplexity": exp_or_inf(loss), "bits_per_byte": bits_per_byte}


def exp_or_inf(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


@torch.no_grad()
def sum_losses(
    module: Callable,
    is_text: torch.Tensor,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    num_batches: int,
    name: str,
    must_stop: Callable[[], bool] = lambda: False,
) -> Totals | None:
    """Sum over the batches of all processes; None if must_stop, asked before each batch, is true.

    module: a `LanguageModelingLoss` in evaluation mode, or a function that returns its `losses`. is_text: which ids
    stand for text, bool [vocabulary], on the device. batches: (input_ids, targets) on the device, as the module takes
    them. name: of the progress bar. The host waits for the device only at the end.
    """
    device = is_text.device
    nats = torch.zeros(num_batches, 2, device=device)  # added up on the host, because not every device has float64
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    for i, (input_ids, targets) in enumerate(show_progress(batches, name, num_batches)):
        if must_stop():
            return None
        losses = module(input_ids, targets)["losses"]
        is_target = targets != IGNORE_INDEX
        is_counted = is_text[targets.where(is_target, 0)] & is_target
        nats[i, 0] = losses.sum()
        nats[i, 1] = (losses * is_counted).sum()
        counts += torch.stack([is_target.sum(), is_counted.sum()])
    all_nats, text_nats = nats.cpu().double().sum(dim=0).tolist()
    num_tokens, num_text_tokens = counts.tolist()
    parts = gather(Totals(all_nats, num_tokens, text_nats, num_text_tokens))
    return Totals(*map(sum, zip(*parts, strict=True)))


def show_progress(iterable: Iterable[T], name: str, total: int, unit: str = "batch") -> Iterator[T]:
    """Yield the items. If that takes long, the main process shows a bar, above the bar of a training run."""
    freed_memory = FreedMemory()
    options = {"desc": name, "unit": unit, "leave": False, "delay": SILENT_SECONDS, "position": 0}
    is_quiet = not PartialState().is_main_process
    for item in tqdm(iterable, total=total, dynamic_ncols=True, disable=is_quiet, **options, **progress_target()):
        yield item
        freed_memory.give_back()
