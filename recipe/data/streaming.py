"""Build training batches from text during the run: a worker process reads, tokenizes and packs it; nothing is stored.

The stream repeats the training documents without end. Row i is tokens [i*T, i*T + T + 1) of it, as in a prepared
dataset, T = block_size. Rows are shuffled within windows of W = shuffle_buffer_size rows: training example k is a row
of window k // W, which is permuted without replacement. The order is therefore a pure function of (seed, text), for
any number of processes: each one tokenizes the whole stream and keeps its own examples.
"""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import IterableDataset

from recipe.config import TrainConfig
from recipe.data.batches import TrainBatches, TrainOrder, build_loader, build_train_batches, example_rows
from recipe.data.encoder import encode_pieces
from recipe.data.packed import PackedDataset, pack_rows
from recipe.data.prepare import open_pieces, source_from
from recipe.data.text import TextSource
from recipe.data.tokenizer import read_tokenizer
from recipe.environment import count_cpus, count_local_processes
from recipe.errors import ProcessError, UserError


class Position(NamedTuple):
    """Where to resume reading the stream: at a piece of the training text, after this many tokens."""

    piece: int = 0
    token: int = 0


@dataclass(eq=False)
class StreamedRows(IterableDataset):
    """The micro-batches of one process, made by a single worker of a DataLoader.

    Yields (rows: int64 [micro-batch, block_size + 1], `Position` to resume from), or the `UserError` that ends it.
    """

    source: TextSource
    tokenizer_dir: Path
    block_size: int
    order: TrainOrder  # over num_rows = shuffle_buffer_size
    start: Position
    num_threads: int

    def __iter__(self) -> Iterator[tuple[torch.Tensor, Position] | UserError]:
        num_rows = self.order.num_rows
        held: dict[int, list] = {}  # window -> [rows, Position]
        try:
            windows = _one_ahead(self.windows())
            for examples in self.order.examples():
                window_of = examples // num_rows
                while window_of[-1] not in held:
                    window, *content = next(windows)
                    held[window] = content
                held = {window: content for window, content in held.items() if window >= window_of[0]}
                rows_of = example_rows(examples, num_rows, self.order.seed)
                rows = np.stack([held[window][0][row] for window, row in zip(window_of, rows_of, strict=True)])
                yield torch.from_numpy(rows.astype(np.int64)), held[window_of[0]][1]
        except UserError as error:  # the loader would add a traceback to an exception
            yield error

    def windows(self) -> Iterator[tuple[int, np.ndarray, Position]]:
        """Yield windows of the stream without end: (number, rows uint32 [num_rows, block_size + 1], where to resume).

        The first window is the first that begins at or after `start`.
        """
        tokenizer, num_rows = read_tokenizer(str(self.tokenizer_dir)), self.order.num_rows
        window_tokens = num_rows * self.block_size
        window = -(-self.start.token // window_tokens)
        piece, token = self.start
        marks = [self.start]  # the start of each batch of pieces, from the last one at or before the window
        ids, ids_start = [], token
        while True:
            encode, _, pieces = open_pieces(self.source, tokenizer)
            pieces = (piece for piece in pieces if piece.split == "train")
            for num_pieces, _, batch in encode_pieces(encode, itertools.islice(pieces, piece, None), self.num_threads):
                ids += [encoded.ids for encoded in batch]
                piece += num_pieces
                token += sum(len(encoded.ids) for encoded in batch)
                marks.append(Position(piece, token))
                while token > (window + 1) * window_tokens:
                    first = window * window_tokens
                    stream = np.concatenate(ids)[first - ids_start :]
                    marks = [mark for mark, after in itertools.pairwise(marks) if after.token > first] + marks[-1:]
                    yield window, pack_rows(stream[: window_tokens + 1], self.block_size), marks[0]
                    window += 1
                    ids, ids_start = [stream[window_tokens:].copy()], first + window_tokens
            piece = 0  # start over at the first document
            marks[-1] = Position(piece, token)


def build_batches(
    config: TrainConfig,
    dataset: PackedDataset,
    accelerator: Accelerator,
    micro_batch_size: int,
    first_step: int,
    position: tuple[int, int] | None,
) -> TrainBatches:
    """Build this process's training batches, from `first_step` on: of the dataset, or of the streamed text.

    dataset: of a streamed text, its prepared head; position: `TrainBatches.position` after the previous step.
    """
    split, device, num_processes = dataset.splits["train"], accelerator.device, accelerator.num_processes
    num_rows, rank = config.shuffle_buffer_size if config.streaming else len(split), accelerator.process_index
    order = TrainOrder(
        num_rows, config.seed, config.global_batch_size, micro_batch_size, first_step, rank, num_processes
    )
    if not config.streaming:
        placement = "python_lists" if config.python_lists else config.data_placement
        return build_train_batches(split, order, device, config.dataloader_num_workers, placement)
    source, tokenizer_dir, start = source_from(config), dataset.directory / "tokenizer", Position(*(position or ()))
    num_threads = config.preprocessing_num_workers or max(1, count_cpus() // count_local_processes(num_processes))
    rows = StreamedRows(source, tokenizer_dir, dataset.block_size, order, start, num_threads)
    loader = build_loader(rows, device, num_workers=1, prefetch_factor=8)

    def batches() -> Iterator[tuple[torch.Tensor, Position]]:
        for item in loader:
            if isinstance(item, UserError):
                raise ProcessError(str(item))
            yield item[0].to(device, non_blocking=True), Position(*item[1])

    return TrainBatches(batches(), device)


def _one_ahead(windows: Iterator) -> Iterator:
    """Prepare the next window in a thread while the caller uses the current one."""
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(next, windows)
        while True:
            ready = future.result()
            future = thread.submit(next, windows)
            yield ready
