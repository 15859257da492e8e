"""Build batches from packed rows, in an order that is a pure function of (seed, dataset).

Training example k, counted from the start of the data, is row `example_rows(k)`. Each epoch k // rows is a permutation
of all rows. After the first epoch, the documents are in another order (`PackedSplit`), and rows begin at other places
(`row_shift`). A step uses the next global_batch_size examples, for any micro-batch, accumulation and number of
processes. The position of a run is therefore one integer, the number of examples so far.
"""

import itertools
import signal
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.profiler import record_function
from torch.utils.data import DataLoader

from recipe.data.mixture import split_examples
from recipe.data.packed import PackedSplit, mix

FEISTEL_ROUNDS = 6


def example_rows(examples: np.ndarray, num_rows: int, seed: int) -> np.ndarray:
    """Return the row of each training example. examples: int64 [n], counted from the start of the run.

    A Feistel network over the smallest even number of bits that holds num_rows, repeated until the result is below
    num_rows (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). No library version can change it.
    """
    epochs, positions = np.divmod(examples, num_rows)
    half_bits = max(1, (int(num_rows - 1).bit_length() + 1) // 2)
    half_mask = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    round_keys = mix(np.arange(1, FEISTEL_ROUNDS + 1, dtype=np.uint64))
    keys = mix(epochs.astype(np.uint64) + mix(np.full(len(examples), seed, dtype=np.uint64)))
    rows = positions.astype(np.uint64)
    outside = np.ones(len(rows), dtype=bool)
    while outside.any():
        left, right = rows[outside] >> shift, rows[outside] & half_mask
        for round_key in round_keys:
            left, right = right, left ^ (mix(right + keys[outside] + round_key) & half_mask)
        rows[outside] = (left << shift) | right
        outside = rows >= num_rows
    return rows.astype(np.int64)


def row_shift(epochs: np.ndarray, below: int) -> np.ndarray:
    """Return by how many tokens an epoch moves the starts of its rows: 0 in the first. epochs and result: int64 [n].

    A model memorizes text sooner if every epoch cuts it at the same places, or moves the cuts by a constant distance.
    The shift is therefore a hash of the epoch. It also numbers an order of the documents.
    """
    return (mix(epochs.astype(np.uint64)) % np.uint64(below)).astype(np.int64)


@dataclass(frozen=True)
class TrainOrder:
    """Sampler of one process: yields the row numbers of its micro-batches without end.

    Micro-batch m of process p holds examples first_example + (m*P + p)*B + [0, B), P processes, B = micro-batch.
    """

    num_rows: int
    seed: int
    global_batch_size: int
    micro_batch_size: int
    first_example: int = 0
    process_index: int = 0
    num_processes: int = 1
    shift_below: int = 1  # block_size; 1: rows begin at the same places in every epoch
    parts: tuple[tuple[int, int], ...] = ()  # of a mixture: the rows and the share of each dataset

    def __iter__(self) -> Iterator[np.ndarray]:
        return map(self.rows, self.examples())

    def rows(self, examples: np.ndarray) -> np.ndarray:
        """Return the row of each training example, as `PackedSplit` counts them.

        A dataset of a mixture keeps its own order and epochs.
        """
        parts = self.parts or ((self.num_rows, 1),)
        datasets, numbers = split_examples(examples, [share for _, share in parts])
        rows = np.empty_like(examples)
        first = 0
        for index, (num_rows, _) in enumerate(parts):
            own = numbers[datasets == index]
            shifts = row_shift(own // num_rows, self.shift_below)
            rows[datasets == index] = shifts * self.num_rows + first + example_rows(own, num_rows, self.seed)
            first += num_rows
        return rows

    def examples(self) -> Iterator[np.ndarray]:
        """Yield the example numbers of each micro-batch of this process."""
        first = self.first_example + self.process_index * self.micro_batch_size
        for start in itertools.count(first, self.num_processes * self.micro_batch_size):
            yield np.arange(start, start + self.micro_batch_size)


class TrainBatches:
    """Endless (input_ids, targets), int64 [micro-batch, block_size] on the device, fetched one batch ahead.

    `position` is where a streamed source resumes after the step of the last batch; None for a packed dataset.
    """

    def __init__(
        self, batches: Generator[tuple[torch.Tensor, tuple | None], None, None], device: torch.device
    ) -> None:
        """batches: (rows: int64 [micro-batch, block_size + 1], position)."""
        self.batches = batches
        self.device = device
        self.position = None
        self.wait_seconds = 0.0
        self.ahead = self._fetch()

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        batch = self.ahead
        self.ahead = self._fetch()
        rows, self.position = batch
        return rows[:, :-1], rows[:, 1:]

    def _fetch(self) -> tuple[torch.Tensor, tuple | None]:
        started_at = time.perf_counter()
        with record_function("DataLoader"):  # the name under which profiles count it
            rows, position = next(self.batches)
            rows = to_device(rows, self.device)
        self.wait_seconds += time.perf_counter() - started_at
        return rows, position

    def take_wait(self) -> float:
        """Return the seconds that the host has waited for batches since the last call."""
        seconds = self.wait_seconds
        self.wait_seconds = 0.0
        return seconds

    def close(self) -> None:
        """End the worker processes."""
        self.batches.close()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to the device without waiting for it. The host must not change the tensor afterward."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.pin_memory()  # returns the tensor itself if it is already pinned
    return tensor.to(device, non_blocking=True)


def read_rows(
    split: PackedSplit, order: TrainOrder, device: torch.device, num_workers: int = 0
) -> Generator[tuple[torch.Tensor, None], None, None]:
    """Yield the micro-batches of a packed split, without end."""
    loader = build_loader(split, order, device, num_workers)
    yield from ((rows, None) for rows in loader)


def build_loader(split: PackedSplit, order: TrainOrder, device: torch.device, num_workers: int) -> DataLoader:
    """Build a loader of complete micro-batches."""
    return DataLoader(
        split,  # pyright: ignore[reportArgumentType]  # a `Dataset` by what it does
        batch_size=None,
        sampler=order,
        num_workers=num_workers,
        pin_memory=device.type == "cuda",
        # The loader draws a seed for its workers. Torch's default generator would change dropout after a resume.
        generator=torch.Generator(),
        multiprocessing_context="spawn" if num_workers else None,  # forking a process that uses CUDA may hang
        worker_init_fn=survive_first_signal,
    )


def iterate_validation(
    split: PackedSplit, num_rows: int, batch_size: int, process_index: int, num_processes: int
) -> Iterator[tuple[np.ndarray, int]]:
    """Yield (rows int64 [batch_size, block_size + 1], number of rows that count), spread evenly over the split.

    All processes get the same number of batches (or they would hang) of the same shape (or the graph would be compiled
    twice), so the last rows may repeat others; they do not count.
    """
    num_batches = -(-num_rows // (batch_size * num_processes))
    for batch in range(num_batches):
        start = (batch * num_processes + process_index) * batch_size
        indices = np.arange(start, start + batch_size)
        num_real = int(np.clip(num_rows - start, 0, batch_size))
        yield split[np.minimum(indices, num_rows - 1) * len(split) // num_rows], num_real


def survive_first_signal(_worker: int = 0) -> None:
    """Keep a worker alive when a signal goes to the whole process group: the last step still needs its data."""
    for name in ("SIGINT", "SIGUSR1", "SIGHUP", "SIGUSR2"):  # SIGUSR2: the launcher has died
        if number := getattr(signal, name, None):  # Windows lacks most of them
            signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _frame: signal.signal(number, signal.SIG_DFL))
