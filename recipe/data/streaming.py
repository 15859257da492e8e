"""Text -> training batches while the run goes on: read, tokenized and packed in a process beside it, never stored.

The stream is the training documents, over and over. Row i is tokens [i*T, i*T + T + 1) of it, as in a prepared
dataset, T = block_size. Rows are shuffled within windows of W = shuffle_buffer_size: training example k is a row of
window k // W, a permutation of each window without replacement. So the order is a pure function of (seed, text), on
any number of processes: each of them tokenizes the whole stream and keeps its own examples.
"""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedTokenizerBase

from recipe.config import TrainConfig
from recipe.data.batches import TrainBatches, TrainOrder, build_train_batches, example_rows, outlive_the_first_signal
from recipe.data.encoder import encode_pieces
from recipe.data.packed import PackedDataset, pack_rows
from recipe.data.prepare import open_pieces, source_from
from recipe.data.text import TextSource
from recipe.data.tokenizer import load_tokenizer
from recipe.environment import count_cpus, count_local_processes
from recipe.errors import ProcessError, UserError


class Position(NamedTuple):
    """Where in the stream reading begins: a piece of the training text, and how many tokens came before it."""

    piece: int = 0
    token: int = 0


def read_windows(
    source: TextSource,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    num_rows: int,
    start: Position,
    num_workers: int,
) -> Iterator[tuple[int, np.ndarray, Position]]:
    """Windows of the stream without end: (number, rows uint32 [num_rows, block_size + 1], where to read it from).

    The first one is the first that lies behind `start` as a whole. Raises `UserError` where there is no text.
    """
    window_tokens = num_rows * block_size
    window = -(-start.token // window_tokens)
    piece, token = start
    marks = [start]  # where each batch of pieces begins, from the last one at or before the window on
    ids, ids_start = [], token
    while True:
        token_before = token
        encode, _, pieces = open_pieces(source, tokenizer)
        pieces = (piece for piece in pieces if piece.split == "train")
        for num_pieces, batch in encode_pieces(encode, itertools.islice(pieces, piece, None), num_workers):
            ids += [encoded.ids for encoded in batch]
            piece += num_pieces
            token += sum(len(encoded.ids) for encoded in batch)
            marks.append(Position(piece, token))
            while token > (window + 1) * window_tokens:
                first = window * window_tokens
                stream = np.concatenate(ids)[first - ids_start :]
                marks = [mark for mark, after in itertools.pairwise(marks) if after.token > first] + marks[-1:]
                yield window, pack_rows(stream[: window_tokens + 1], block_size), marks[0]
                window += 1
                ids, ids_start = [stream[window_tokens:].copy()], first + window_tokens
        if token == token_before and piece == 0:
            raise UserError("there is no training text to stream")
        piece = 0  # and once more from the first document
        marks[-1] = Position(piece, token)


class StreamedRows(IterableDataset):
    """The micro-batches of one process, for the one worker of a DataLoader.

    Yields (rows: int64 [micro-batch, block_size + 1], `Position` to resume from), or the `UserError` that ends it.
    """

    def __init__(
        self,
        source: TextSource,
        tokenizer_dir: Path,
        block_size: int,
        order: TrainOrder,
        start: Position,
        num_threads: int,
    ) -> None:
        """order: over num_rows = shuffle_buffer_size."""
        self.source, self.tokenizer_dir, self.block_size = source, tokenizer_dir, block_size
        self.order, self.start, self.num_threads = order, start, num_threads

    def __iter__(self) -> Iterator[tuple[torch.Tensor, Position] | UserError]:
        try:
            yield from self._batches()
        except UserError as error:  # the loader would wrap it into a traceback
            yield error

    def _batches(self) -> Iterator[tuple[torch.Tensor, Position]]:
        num_rows = self.order.num_rows
        tokenizer = load_tokenizer(str(self.tokenizer_dir))
        windows = _one_ahead(
            read_windows(self.source, tokenizer, self.block_size, num_rows, self.start, self.num_threads)
        )
        held: dict[int, tuple[np.ndarray, Position]] = {}
        for examples in self.order.examples():
            window_of = examples // num_rows
            while window_of[-1] not in held:
                window, rows, position = next(windows)
                held[window] = rows, position
            held = {window: content for window, content in held.items() if window >= window_of[0]}
            rows_of = example_rows(examples, num_rows, self.order.seed)
            rows = np.stack([held[window][0][row] for window, row in zip(window_of, rows_of, strict=True)])
            yield torch.from_numpy(rows.astype(np.int64)), held[window_of[0]][1]


def build_batches(
    config: TrainConfig,
    dataset: PackedDataset,
    accelerator: Accelerator,
    micro_batch_size: int,
    first_step: int,
    position: tuple[int, int] | None,
) -> TrainBatches:
    """The training batches of this process from a step on: of the dataset, or of the text whose head it was made of.

    position: what `TrainBatches.position` was after the step before.
    """
    split, device, num_processes = dataset.splits["train"], accelerator.device, accelerator.num_processes
    order = TrainOrder(
        config.shuffle_buffer_size if config.streaming else len(split),
        config.seed,
        config.global_batch_size,
        micro_batch_size,
        first_step,
        accelerator.process_index,
        num_processes,
    )
    if not config.streaming:
        placement = "python_lists" if config.python_lists else config.data_placement
        return build_train_batches(split, order, device, config.dataloader_num_workers, placement)
    num_threads = config.preprocessing_num_workers or max(1, count_cpus() // count_local_processes(num_processes))
    rows = StreamedRows(
        source_from(config),
        dataset.directory / "tokenizer",
        dataset.block_size,
        order,
        Position(*(position or ())),
        num_threads,
    )
    loader = DataLoader(
        rows,
        batch_size=None,
        num_workers=1,
        prefetch_factor=8,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # see build_train_batches
        multiprocessing_context="spawn",
        worker_init_fn=outlive_the_first_signal,
    )

    def batches() -> Iterator[tuple[torch.Tensor, Position]]:
        for item in loader:
            if isinstance(item, UserError):
                raise ProcessError(str(item))
            yield item[0].to(device, non_blocking=True), Position(*item[1])

    return TrainBatches(batches())


def _one_ahead(windows: Iterator) -> Iterator:
    """Make the next window while the batches of this one are used."""
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(next, windows)
        while True:
            ready = future.result()
            future = thread.submit(next, windows)
            yield ready
