"""The packed dataset on disk: token ids in rows of block_size + 1, with the metadata that says what they are.

    DIR/dataset_dict.json, DIR/train/, DIR/validation/   a datasets.DatasetDict: datasets.load_from_disk(DIR) opens it
    DIR/SPLIT/rows.json                                  where the rows lie in the files, to map them without Arrow
    DIR/tokenizer/                                       the tokenizer the ids belong to
    DIR/metadata.json                                    counts, hashes, sizes; written last

Row i of a split holds tokens [i*T, i*T + T + 1) of its token stream, T = block_size: each row starts with the last
token of the row before, so that every token but the first is a target exactly once. Up to T - 1 tokens at the end of
the stream fill no row and are left out. A dataset appears under its name only when it is complete.
"""

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from recipe.data.documents import SPLITS
from recipe.data.tokenizer import load_tokenizer, tokenizer_sha256
from recipe.errors import UserError

FORMAT_VERSION = 3
ROWS_NAME = "rows.json"
METADATA = {
    "block_size": int,
    "vocab_size": int,
    "eos_token_id": int,
    "tokenizer_sha256": str,
    "content_sha256": str,
    "source": dict,
    "splits": dict,
    "shard": list,
}
SAMPLED_ROWS = 256  # rows of a split looked at when it is opened


@dataclass(frozen=True)
class PackedDataset:
    """An opened packed dataset. `splits[name]` is indexed by row numbers."""

    directory: Path
    metadata: dict
    splits: dict[str, "PackedSplit"]

    @property
    def block_size(self) -> int:
        return self.metadata["block_size"]

    @property
    def vocab_size(self) -> int:
        return self.metadata["vocab_size"]

    def tokens_per_byte(self, split: str) -> float:
        """Tokens per byte of text, separators counted as tokens: turns nats per token into nats per byte."""
        counts = self.metadata["splits"][split]
        return counts["tokens"] / counts["bytes"]

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer the ids belong to. Raises `UserError` if its files were changed."""
        tokenizer = load_tokenizer(str(self.directory / "tokenizer"))
        same = tokenizer_sha256(tokenizer) == self.metadata["tokenizer_sha256"]
        if not same or len(tokenizer) != self.vocab_size:
            raise UserError(
                f"{self.directory}/tokenizer is not the tokenizer this dataset was made with; "
                "prepare the dataset again"
            )
        return tokenizer


class PackedSplit:
    """Rows of one split, memory-mapped: only the pages that are read come into memory.

    Arrow itself would bring a whole file into resident memory when it opens it (pyarrow 26), so numpy maps it.
    """

    def __init__(self, directory: Path, vocab_size: int) -> None:
        self.directory, self.vocab_size = directory, vocab_size
        layout = json.loads((directory / ROWS_NAME).read_text())
        self.block_size, dtype = int(layout["block_size"]), np.dtype(layout["dtype"])
        files = {name: np.memmap(directory / name, np.uint8, "r").view(np.ndarray) for name, _, _ in layout["batches"]}
        # One view [rows, block_size + 1] for each record batch, and where each one starts.
        width = self.block_size + 1
        self.chunks = [
            files[name][offset : offset + num_rows * width * dtype.itemsize].view(dtype).reshape(num_rows, width)
            for name, offset, num_rows in layout["batches"]
        ]
        self.places = [(directory / name, offset) for name, offset, _ in layout["batches"]]
        self.starts = np.cumsum([0, *map(len, self.chunks)])

    def stream(self) -> np.ndarray:
        """The tokens of each chunk without the overlap of its rows: uint16 or int32 [rows * block_size + chunks]."""
        parts = [part for chunk in self.chunks for part in (chunk[:, :-1].reshape(-1), chunk[-1, -1:])]
        return np.concatenate(parts)

    def positions(self, indices: np.ndarray) -> np.ndarray:
        """Where rows begin in `stream()`. (The chunks of different shards do not go on into one another.)"""
        return indices * self.block_size + np.searchsorted(self.starts, indices, side="right") - 1

    def in_memory(self) -> "PackedSplit":
        """The same rows read into memory."""
        copied = copy.copy(self)
        copied.chunks = [np.array(chunk) for chunk in self.chunks]
        return copied

    def __reduce__(self):
        return PackedSplit, (self.directory, self.vocab_size)  # a worker process maps the file itself

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        """indices: int64 [batch] -> int64 [batch, block_size + 1]. Raises `UserError` for ids that are no tokens.

        The check is here because an id beyond the vocabulary is a device-side assert on CUDA.
        """
        which = np.searchsorted(self.starts, indices, side="right") - 1
        rows = np.stack([self.chunks[chunk][i - self.starts[chunk]] for chunk, i in zip(which, indices, strict=True)])
        self._check(rows)
        return rows.astype(np.int64)

    def check_sample(self) -> None:
        """Raise `UserError` if an id in some rows all over the split is no token.

        They are read, not mapped: a page that is mapped may bring 2 MB into resident memory.
        """
        for row in np.unique(np.linspace(0, len(self) - 1, min(SAMPLED_ROWS, len(self))).astype(np.int64)):
            chunk = np.searchsorted(self.starts, row, side="right") - 1
            (path, offset), view = self.places[chunk], self.chunks[chunk]
            skipped = int(row - self.starts[chunk]) * view.shape[1] * view.itemsize
            self._check(np.fromfile(path, view.dtype, view.shape[1], offset=offset + skipped))

    def check_all(self) -> None:
        """Raise `UserError` if any id in the split is no token."""
        for chunk in self.chunks:
            self._check(chunk)

    def _check(self, rows: np.ndarray) -> None:
        if rows.max() >= self.vocab_size or rows.min() < 0:
            raise UserError(
                f"{self.directory} holds token id {rows.max()}, beyond its vocabulary of "
                f"{self.vocab_size}; prepare it again"
            )


def pack_rows(stream: np.ndarray, block_size: int) -> np.ndarray:
    """The rows that a stream fills: [tokens] -> [rows, block_size + 1], each beginning with the end of the last."""
    num_rows = max(0, len(stream) - 1) // block_size
    if not num_rows:
        return np.empty((0, block_size + 1), stream.dtype)
    windows = np.lib.stride_tricks.sliding_window_view(stream, block_size + 1)
    return np.ascontiguousarray(windows[::block_size][:num_rows])


def open_packed_dataset(directory: Path, block_size: int | None = None) -> PackedDataset:
    """Open a dataset if it is complete and what the run asks for. Raises `UserError` saying what is wrong."""
    again = "make it (again) with scripts/prepare_data.py --overwrite"
    if not directory.is_dir():
        raise UserError(f"there is no dataset {directory}; make it with scripts/prepare_data.py")
    try:
        metadata = json.loads((directory / "metadata.json").read_text())
        if metadata["format_version"] != FORMAT_VERSION:
            raise UserError(f"{directory} has format {metadata['format_version']}, not {FORMAT_VERSION}; {again}")
        for key, kind in METADATA.items():
            if not isinstance(metadata[key], kind):
                raise UserError(f"{directory}/metadata.json: {key} is {metadata[key]!r}; {again}")
        for name, content in metadata["source"].get("shards", {}).items():
            if json.loads((directory.parent / name / "metadata.json").read_text())["content_sha256"] != content:
                raise UserError(f"{name} has changed since it was merged into {directory}; merge the shards again")
        for split in SPLITS:
            counts = [metadata["splits"][split][key] for key in ("rows", "tokens", "bytes")]
            if min(counts) < 1 and metadata["shard"][1] == 1:
                raise UserError(f"{directory}/metadata.json says that {split} is empty; {again}")
            for name, size in metadata["splits"][split]["file_bytes"].items():
                found = (directory / split / name).stat().st_size
                if found != size:
                    raise UserError(f"{directory}/{split}/{name} has {found} bytes instead of {size}; {again}")
        splits = {name: PackedSplit(directory / name, metadata["vocab_size"]) for name in SPLITS}
        for name, split in splits.items():
            expected = (metadata["splits"][name]["rows"], metadata["block_size"] + 1)
            if (len(split), split.block_size + 1) != expected:
                raise UserError(
                    f"{directory}/{name} does not have the {expected[0]} rows of {expected[1]} ids that "
                    f"metadata.json gives; {again}"
                )
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(
            f"{directory} is not a complete packed dataset: {error.filename or error} is missing; {again}"
        ) from error
    except Exception as error:  # damaged JSON, or a file that is not what it says: json and numpy raise their own
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise UserError(f"{directory} is not a complete packed dataset ({reason}); {again}") from error
    if block_size is not None and metadata["block_size"] != block_size:
        raise UserError(
            f"{directory} has block_size {metadata['block_size']}, the run asks for {block_size}; "
            f"pass --block_size {metadata['block_size']} or prepare it with {block_size}"
        )
    for split in splits.values():  # a first look over the split; each batch is checked again as it is read
        split.check_sample()
    return PackedDataset(directory, metadata, splits)
