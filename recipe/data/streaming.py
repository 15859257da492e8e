"""Build training batches from text during the run: one process per machine reads, tokenizes and packs it.

The stream repeats the training documents without end. Row i is tokens [i*T, i*T + T + 1) of it, as in a prepared
dataset, T = block_size. Rows are shuffled within windows of W = shuffle_buffer_size rows: training example k is a row
of window k // W, which is permuted without replacement. The order is therefore a pure function of (seed, text), for
any number of processes: each one maps the windows of its machine and takes its own examples.
"""

import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import torch
from accelerate import Accelerator

from recipe.config import TrainConfig
from recipe.data.batches import TrainBatches, TrainOrder, build_train_batches, example_rows
from recipe.data.packed import PackedDataset
from recipe.data.prepare import source_from
from recipe.data.windows import ERROR_BYTES, POLL_SECONDS, Position, TextWindows, create_folder, start_tokenizing
from recipe.environment import count_cpus, count_local_processes
from recipe.errors import ProcessError

Gather = Callable[[object], list]  # the parts of all processes of the run, by rank


class SharedWindows:
    """The windows that one process of this machine writes and all read.

    A machine is a host's name and a file system: of the processes that share both, the first starts the program that
    tokenizes (recipe/data/windows.py). `gather` is called twice, by all processes of the run.
    """

    def __init__(self, windows: TextWindows, rank: int, num_processes: int, gather: Gather) -> None:
        own, host = create_folder(num_processes), socket.gethostname()
        folders = gather((host, str(own)))
        writer = next(rank for rank, (where, path) in enumerate(folders) if where == host and Path(path).is_dir())
        self.folder, self.process = Path(folders[writer][1]), None
        self.error_file = os.open(self.folder / "error", os.O_RDONLY)  # may be read after the folder has been removed
        self.reader = np.load(self.folder / "readers.npy", mmap_mode="r+")[rank]
        self.reader[:] = 0
        if writer == rank:
            self.process = start_tokenizing(windows, own)
        else:
            shutil.rmtree(own)
        self.pid = gather(self.process and self.process.pid)[writer]

    def wait_for(self, number: int, oldest: int) -> tuple[np.ndarray, Position]:
        """Return the rows of a window, memory-mapped, and its position. oldest: the first one that is still needed.

        Raises `ProcessError` if the text has an error, or the process that tokenizes it has ended.
        """
        self.reader[:] = oldest, number
        while True:
            with contextlib.suppress(FileNotFoundError):
                rows = np.load(self.folder / f"{number}.npy", mmap_mode="r")
                return rows, Position(*json.loads((self.folder / f"{number}.json").read_text()))
            has_ended = not is_running(self.pid)
            if message := os.pread(self.error_file, ERROR_BYTES, 0).decode(errors="ignore").strip():
                raise ProcessError(message)
            if has_ended:
                why = "its own output says why, unless it was killed, for example when the memory was full"
                raise ProcessError(f"the process that tokenizes the streamed text has ended; {why}")
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """End the process that tokenizes, if this one has started it. It removes the folder."""
        os.close(self.error_file)
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()
            shutil.rmtree(self.folder, ignore_errors=True)  # the process may have been killed


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def take_examples(
    order: TrainOrder, wait_for: Callable[[int, int], tuple[np.ndarray, Position]]
) -> Iterator[tuple[torch.Tensor, Position]]:
    """Yield the micro-batches of one process: (rows: int64 [micro-batch, block_size + 1], `Position` to resume from).

    order: over the rows of a window. wait_for: see `SharedWindows`.
    """
    held: dict[int, tuple[np.ndarray, Position]] = {}
    for examples in order.examples():
        numbers = examples // order.num_rows
        held = {
            number: held.get(number) or wait_for(number, int(numbers[0])) for number in np.unique(numbers).tolist()
        }
        rows_of = example_rows(examples, order.num_rows, order.seed)
        rows = np.stack([held[number][0][row] for number, row in zip(numbers, rows_of, strict=True)])
        yield torch.from_numpy(rows.astype(np.int64)), held[numbers[0]][1]


def build_batches(
    config: TrainConfig,
    dataset: PackedDataset,
    accelerator: Accelerator,
    micro_batch_size: int,
    first_step: int,
    position: list | None,
    gather: Gather = lambda part: [part],
) -> TrainBatches:
    """Build this process's training batches, from `first_step` on: of the dataset, or of the streamed text.

    dataset: of a streamed text, its prepared head; position: `TrainBatches.position` after the previous step.
    gather: returns the parts of all processes, by rank; all call this function together.
    """
    split, device, num_processes = dataset.train, accelerator.device, accelerator.num_processes
    num_rows, rank = config.shuffle_buffer_size if config.streaming else len(split), accelerator.process_index
    order = TrainOrder(
        num_rows, config.seed, config.global_batch_size, micro_batch_size, first_step, rank, num_processes
    )
    if not config.streaming:
        return build_train_batches(split, order, device, config.dataloader_num_workers, config.data_placement)
    source, tokenizer_dir, start = source_from(config), str(dataset.directory / "tokenizer"), Position(*position or ())
    num_threads = config.preprocessing_num_workers or max(1, count_cpus() // count_local_processes(num_processes))
    windows = TextWindows(source, tokenizer_dir, dataset.block_size, num_rows, start, num_threads)

    def batches() -> Iterator[tuple[torch.Tensor, Position]]:
        with contextlib.closing(SharedWindows(windows, rank, num_processes, gather)) as shared:
            for rows, resume_from in take_examples(order, shared.wait_for):
                pinned = rows.pin_memory() if device.type == "cuda" else rows
                yield pinned.to(device, non_blocking=True), resume_from

    return TrainBatches(batches(), device)
