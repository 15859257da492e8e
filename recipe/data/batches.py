"""Packed rows -> batches, in an order that is a pure function of (seed, dataset).

Training example k, counted over the whole run, is row `example_rows(k)`: epoch k // rows, and in it a permutation
without replacement. Step s uses examples [s*G, (s+1)*G), G = global_batch_size, whatever the micro-batch, the
accumulation or the number of processes, so one integer is the whole position of a run.
"""

import signal
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed
from torch.profiler import record_function
from torch.utils.data import DataLoader

from recipe.data.packed import PackedSplit

FEISTEL_ROUNDS = 6


def example_rows(examples: np.ndarray, num_rows: int, seed: int) -> np.ndarray:
    """Row of each training example. examples: int64 [n], counted from the start of the run; returns int64 [n].

    A Feistel network over the smallest even number of bits that holds num_rows, walked until it lands inside
    (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"): a permutation of each epoch that needs no
    memory and, unlike numpy's generators, cannot change with a library version.
    """
    epochs, positions = np.divmod(examples, num_rows)
    half_bits = max(1, (int(num_rows - 1).bit_length() + 1) // 2)
    half_mask = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    round_keys = _mix(np.arange(1, FEISTEL_ROUNDS + 1, dtype=np.uint64))
    keys = _mix(epochs.astype(np.uint64) + _mix(np.full(len(examples), seed, dtype=np.uint64)))
    rows = positions.astype(np.uint64)
    outside = np.ones(len(rows), dtype=bool)
    while outside.any():
        left, right = rows[outside] >> shift, rows[outside] & half_mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right + keys[outside] + round_key) & half_mask)
        rows[outside] = (left << shift) | right
        outside = rows >= num_rows
    return rows.astype(np.int64)


def _mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014), over uint64 with wrap-around."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class TrainOrder:
    """Sampler of one process: yields the row numbers of its micro-batches, step after step, without end.

    Micro-batch m of step s on process p holds examples s*G + (m*P + p)*B + [0, B), P processes, B = micro-batch.
    """

    def __init__(
        self,
        num_rows: int,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        first_step: int = 0,
        process_index: int = 0,
        num_processes: int = 1,
    ) -> None:
        self.num_rows, self.seed, self.first_step = num_rows, seed, first_step
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.process_index, self.num_processes = process_index, num_processes

    def __iter__(self) -> Iterator[np.ndarray]:
        return (example_rows(examples, self.num_rows, self.seed) for examples in self.examples())

    def examples(self) -> Iterator[np.ndarray]:
        """The numbers of the examples in each micro-batch of this process."""
        start = self.first_step * self.global_batch_size + self.process_index * self.micro_batch_size
        while True:
            yield np.arange(start, start + self.micro_batch_size)
            start += self.num_processes * self.micro_batch_size


class TrainBatches:
    """Endless (input_ids, targets), int64 [micro-batch, block_size] on the device, one batch ahead of its use.

    `position` is where a streamed source is read from to get the last batch again; None for a packed dataset.
    """

    def __init__(self, batches: Iterator[tuple[torch.Tensor, tuple | None]]) -> None:
        self.batches, self.position = batches, None
        self.ahead = next(batches)

    def __iter__(self) -> "TrainBatches":
        return self

    def close(self) -> None:
        """End the processes that make batches."""
        self.batches.close()

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows, self.position = self.ahead
        with record_function("DataLoader"):  # as recipe/run/profile.py names it
            self.ahead = next(self.batches)
        return rows[:, :-1], rows[:, 1:]


def build_train_batches(
    split: PackedSplit, order: TrainOrder, device: torch.device, num_workers: int = 0, placement: str = "mmap"
) -> TrainBatches:
    """Batches of a packed dataset.

    placement: where the rows are read from: "mmap" (the file), "ram" (read into memory first) or "device" (all
    tokens there, and indexed there). Copies to a GPU do not wait. "python_lists" is how it is often written, row by
    row; it is here to be measured.
    """
    if placement == "device":
        batches = _index_on_device(split, order, device)
    elif placement == "python_lists":
        batches = (torch.tensor([split[row][0].tolist() for row in rows[:, None]]).to(device) for rows in order)
    else:
        loader = DataLoader(
            split.in_memory() if placement == "ram" else split,
            sampler=order,
            batch_size=None,  # an element of the order is a whole micro-batch
            num_workers=num_workers,
            pin_memory=device.type == "cuda",
            # It draws a seed for its workers: from a generator of its own, or dropout after a resume would differ.
            generator=torch.Generator(),
            multiprocessing_context="spawn" if num_workers else None,  # forking a process with CUDA may hang
            worker_init_fn=outlive_the_first_signal,
        )
        batches = (batch.to(device, non_blocking=True) for batch in loader)
    return TrainBatches((rows, None) for rows in batches)


def _index_on_device(split: PackedSplit, order: TrainOrder, device: torch.device) -> Iterator[torch.Tensor]:
    """Rows gathered on the device from a stream that is there: 2 bytes a token if the ids are uint16."""
    split.check_all()
    stream = split.stream()
    is_uint16 = stream.dtype == np.uint16  # which torch cannot index on every device: keep the bits as int16
    tokens = torch.from_numpy(stream.view(np.int16) if is_uint16 else stream).to(device)
    offsets = torch.arange(split.block_size + 1, device=device)
    for rows in order:
        starts = torch.from_numpy(split.positions(rows)).to(device, non_blocking=True)
        gathered = tokens[starts[:, None] + offsets].long()
        yield gathered & 0xFFFF if is_uint16 else gathered


def iterate_validation(
    split: PackedSplit, num_rows: int, batch_size: int, process_index: int, num_processes: int
) -> Iterator[tuple[np.ndarray, int]]:
    """`num_rows` rows, spread evenly over the split, each once over all processes.

    Yields (rows int64 [batch_size, block_size + 1], how many of them are real).

    All processes get the same number of batches of the same shape (a second shape would be a second compiled
    graph, an unequal number a hang); rows beyond the real ones repeat another and are not to be counted.
    """
    num_batches = -(-num_rows // (batch_size * num_processes))
    for batch in range(num_batches):
        start = (batch * num_processes + process_index) * batch_size
        indices = np.arange(start, start + batch_size)
        num_real = int(np.clip(num_rows - start, 0, batch_size))
        yield split[np.minimum(indices, num_rows - 1) * len(split) // num_rows], num_real


def outlive_the_first_signal(_worker: int = 0) -> None:
    """In a process that makes batches: a signal to the whole group must not take the data from under the last step."""
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR2):  # the last: the launcher has died
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _frame: signal.signal(number, signal.SIG_DFL))
