"""Training batches from text during the run: each machine tokenizes the units that its processes need next.

The stream visits the units in a seeded order, without end: each epoch is a permutation of all units. A unit is the
shuffle window: its rows come in a random order. Training example k is therefore a pure function of (seed, source) for
any number of processes. Each machine tokenizes into a temporary folder on a local disk, and its processes map the
files.
"""

import contextlib
import dataclasses
import json
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch

from recipe.config import TrainConfig
from recipe.data.batches import TrainOrder, example_rows, row_shift
from recipe.data.cut import Unit
from recipe.data.encode import choose_encoder
from recipe.data.pack import Encoding, Job, UnitWorkers
from recipe.data.packed import PackedDataset, PackedSplit, Stretch
from recipe.data.read import list_units, read_sample
from recipe.data.source import source_from
from recipe.environment import count_cpus
from recipe.errors import LostProcessError, UserError

UNITS_AHEAD = 2
POLL_SECONDS = 0.02
Gather = Callable[[object], list]  # a process's part -> the parts of all processes, by rank
Position = tuple[int, int]  # a window, counted from the start of the run, and an example in it


class TextStream:
    """The training rows of a source, without end. Window n holds the rows of the n-th unit of the order.

    The processes of a machine share a folder; the first of them starts the processes that tokenize.
    """

    def __init__(
        self, job: Job, units: list[Unit], encoder: str, dataset: PackedDataset, seed: int, rank: int, gather: Gather
    ) -> None:
        """job: its folder is replaced. dataset: the prepared part. gather: called by all processes together."""
        self.units = units
        self.encoder = encoder
        self.seed = seed
        self.block_size = dataset.block_size
        self.vocab_size = dataset.vocab_size
        try:
            own = Path(tempfile.mkdtemp(prefix="gpt2-recipe-stream-"))
            host = socket.gethostname()
        except OSError as error:
            raise UserError(f"cannot create a temporary folder: {error.strerror}; set TMPDIR") from error
        folders = gather((host, str(own)))
        # Processes are on one machine if they share a host name and a file system.
        first = next(i for i, (name, path) in enumerate(folders) if name == host and Path(path).is_dir())
        gather(None)  # until all have looked
        self.folder = Path(folders[first][1])
        self.workers = None
        if first == rank:
            self.workers = UnitWorkers(dataclasses.replace(job, folder=str(own)), min(UNITS_AHEAD, count_cpus()))
        else:
            own.rmdir()
        self.futures: dict[int, Future] = {}
        self.opened: dict[int, PackedSplit] = {}

    def window(self, number: int) -> PackedSplit:
        """Return the rows of a window. Waits for them. Raises `UserError` if the text cannot be tokenized."""
        if number in self.opened:
            return self.opened[number]
        summary = self.folder / "units" / f"{number:05d}.json"
        if self.workers is not None:
            for ahead in range(number, number + UNITS_AHEAD + 1):
                if ahead not in self.futures:
                    self.futures[ahead] = self.workers.submit(ahead, self.units[self._unit_of(ahead)], self.encoder)
            try:
                self.futures[number].result()
            except UserError as error:
                kind = LostProcessError if isinstance(error, LostProcessError) else UserError
                raise kind(f"{error}; the run needs space for a few units in TMPDIR") from error
        while not summary.exists():
            if not self.folder.exists():
                raise LostProcessError(
                    "the process that tokenizes the text on this machine has ended; its output says why"
                )
            time.sleep(POLL_SECONDS)
        found = json.loads(summary.read_text())
        count = found["splits"]["train"]["tokens"]
        path = str(self.folder / f"train-{number:05d}.bin")
        stretches = [Stretch(path, found["type"], 0, count)] if count else []
        self.opened[number] = PackedSplit(str(self.folder), stretches, self.block_size, self.vocab_size)
        return self.opened[number]

    def _unit_of(self, number: int) -> int:
        return int(example_rows(np.array([number]), len(self.units), self.seed)[0])

    def forget(self, before: int) -> None:
        """Delete the windows before number `before`, the first that a process of this machine may still open."""
        for number in [number for number in self.opened if number < before]:
            del self.opened[number]
            self.futures.pop(number, None)
            if self.workers is not None:
                for path in (f"train-{number:05d}.bin", f"units/{number:05d}.json"):
                    (self.folder / path).unlink(missing_ok=True)

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()
            shutil.rmtree(self.folder, ignore_errors=True)


def read_stream(
    stream: TextStream, order: TrainOrder, position: Sequence[int]
) -> Generator[tuple[torch.Tensor, Position], None, None]:
    """Yield the micro-batches of one process: (rows: int64 [micro-batch, block_size + 1], position after the step).

    order: counts examples from `position`, where its first step begins.
    """
    first, skipped = position
    starts = [-skipped]  # the first example of each window from `first` on
    previous_window = current_window = first  # in which the previous step and this one begin
    last_step = -1

    def locate(example: int) -> int:
        """Return the window of an example, counted from `first`."""
        while example >= starts[-1]:
            starts.append(starts[-1] + len(stream.window(first + len(starts) - 1)))
        return int(np.searchsorted(starts, example, side="right")) - 1

    with contextlib.closing(stream):
        for examples in order.examples():
            step = int(examples[0]) // order.global_batch_size
            end = (step + 1) * order.global_batch_size
            after = locate(end)
            if step > last_step:  # other processes may still be at the step before
                stream.forget(previous_window)
                previous_window = current_window
                current_window = first + after
                last_step = step
            windows = np.searchsorted(starts, examples, side="right") - 1
            parts = []
            for number in np.unique(windows).tolist():
                window = stream.window(first + number)
                index = examples[windows == number] - starts[number]
                rows = example_rows((first + number) * len(window) + index, len(window), stream.seed)
                epochs = np.full_like(rows, (first + number) // len(stream.units))
                parts.append(window[rows + len(window) * row_shift(epochs, order.shift_below)])
            yield torch.from_numpy(np.concatenate(parts)), (first + after, end - starts[after])


def open_stream(config: TrainConfig, dataset: PackedDataset, rank: int, gather: Gather) -> TextStream:
    """Open the run's text. dataset: its prepared part, which has its tokenizer."""
    revision = dataset.metadata["source"]["dataset_revision"]  # the commit that all processes read
    source = source_from(dataclasses.replace(config, dataset_revision=revision))
    encoding = Encoding.of(dataset.tokenizer)
    units = [unit for unit in list_units(source) if not unit.is_validation]
    sample = [text for text in read_sample(source, units) if isinstance(text, str)]
    encoder, _, _ = choose_encoder(encoding.tokenizer_json, sample, source.parse_special_tokens)
    job = Job(source, "", encoding, ("train",), is_temporary=True)
    return TextStream(job, units, encoder, dataset, config.seed, rank, gather)
