"""The packed dataset on disk: rows of block_size + 1 token ids, and metadata.

    DIR/dataset_dict.json, DIR/train/, DIR/validation/   a datasets.DatasetDict: datasets.load_from_disk(DIR) opens it
    DIR/SPLIT/rows.json                                  where the rows are in the files, to map them without Arrow
    DIR/tokenizer/                                       the tokenizer that made the ids
    DIR/metadata.json                                    counts, hashes, sizes; written last

Row i of a split holds tokens [i*T, i*T + T + 1) of its token stream, T = block_size. Each row starts with the last
token of the previous row, so every token but the first is a target exactly once. Up to T - 1 tokens at the end of the
stream do not fill a row and are dropped. A dataset appears under its name only when it is complete.
"""

import copy
import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recipe.data.documents import SPLITS
from recipe.data.tokenizer import load_saved_tokenizer, tokenizer_sha256
from recipe.errors import UserError, short_reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT_VERSION = 3
ROWS_NAME = "rows.json"
METADATA_KEYS = ("source", "shard", "tokenizer_sha256", "content_sha256", "eos_token_id")


@dataclass(frozen=True)
class PackedDataset:
    """An open packed dataset. `splits[name]` is indexed by row numbers."""

    directory: Path
    metadata: dict
    splits: dict[str, "PackedSplit"]

    @property
    def train(self) -> "PackedSplit":
        return self.splits["train"]

    @property
    def validation(self) -> "PackedSplit":
        return self.splits["validation"]

    @functools.cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        return self.load_tokenizer()

    @property
    def block_size(self) -> int:
        return self.metadata["block_size"]

    @property
    def vocab_size(self) -> int:
        return self.metadata["vocab_size"]

    def tokens_per_byte(self, split: str) -> float:
        """Tokens (separators included) per byte of text: converts nats per token to nats per byte."""
        counts = self.metadata["splits"][split]
        return counts["tokens"] / counts["bytes"]

    def load_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Load the tokenizer that made the ids. Raises `UserError` if its files have changed."""
        return load_saved_tokenizer(self.directory / "tokenizer", self.metadata["tokenizer_sha256"])


def metadata_of(dataset: Any) -> dict[str, Any]:
    """Return the metadata of a packed dataset, or what can be told of another: its rows, and hashes of the first.

    dataset: has `train` and `validation` (with a length, indexed by int64 [n] for int64 [n, block_size + 1]) and a
    `tokenizer`.
    """
    if isinstance(dataset, PackedDataset):
        return dataset.metadata
    splits, digest = {}, hashlib.sha256()
    for name in SPLITS:
        split = getattr(dataset, name)
        first = np.asarray(split[np.arange(min(8, len(split)))])
        digest.update(first.astype(np.int64).tobytes())
        num_tokens = len(split) * (first.shape[1] - 1)
        splits[name] = {"documents": 0, "tokens": num_tokens, "bytes": 0, "rows": len(split)}
    return {
        "source": {"dataset_name": type(dataset).__name__},
        "splits": splits,
        "content_sha256": digest.hexdigest(),
        "tokenizer_sha256": tokenizer_sha256(dataset.tokenizer),
        "tokenizer": dataset.tokenizer.name_or_path or type(dataset.tokenizer).__name__,
        "fingerprint": None,
    }


def validation_tokens_per_byte(dataset: Any) -> float:
    """Return `tokens_per_byte` of the validation text, or that of the first rows of a dataset without metadata."""
    if isinstance(dataset, PackedDataset):
        return dataset.tokens_per_byte("validation")
    ids = np.asarray(dataset.validation[np.arange(min(64, len(dataset.validation)))])[:, 1:]
    return ids.size / max(1, len("".join(dataset.tokenizer.batch_decode(ids)).encode()))


class PackedSplit:
    """The rows of one split, memory-mapped: only pages that are read take up memory.

    numpy maps the files because pyarrow 26 makes a whole file resident when it opens it.
    """

    def __init__(self, directory: Path, vocab_size: int) -> None:
        self.directory, self.vocab_size = directory, vocab_size
        layout = json.loads((directory / ROWS_NAME).read_text())
        self.block_size, dtype = int(layout["block_size"]), np.dtype(layout["dtype"])
        files = {name: np.memmap(directory / name, np.uint8, "r").view(np.ndarray) for name, _, _ in layout["batches"]}
        # A view [rows, block_size + 1] of each record batch, and the number of its first row.
        width = self.block_size + 1
        self.chunks = [
            files[name][offset : offset + num_rows * width * dtype.itemsize].view(dtype).reshape(num_rows, width)
            for name, offset, num_rows in layout["batches"]
        ]
        self.starts = np.cumsum([0, *map(len, self.chunks)])

    def stream(self) -> np.ndarray:
        """Concatenate the tokens of all chunks without the overlap of rows: [rows * block_size + chunks]."""
        return np.concatenate([part for rows in self.chunks for part in (rows[:, :-1].reshape(-1), rows[-1, -1:])])

    def in_memory(self) -> "PackedSplit":
        """Load all rows into memory, as a single chunk."""
        copied = copy.copy(self)
        copied.chunks, copied.starts = [np.concatenate(self.chunks)], np.array([0, len(self)])
        return copied

    def __reduce__(self):
        return PackedSplit, (self.directory, self.vocab_size)  # a worker process maps the files itself

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        """Return the rows with these indices (int64 [batch]) as int64 [batch, block_size + 1].

        Raises `UserError` for an id outside the vocabulary, which would be a device-side assert on CUDA.
        """
        chunks = np.searchsorted(self.starts, indices, side="right") - 1
        rows = np.stack([self.chunks[chunk][i - self.starts[chunk]] for chunk, i in zip(chunks, indices, strict=True)])
        self.check(rows)
        return rows.astype(np.int64)

    def check(self, rows: np.ndarray) -> None:
        """Raise `UserError` if rows hold an id outside the vocabulary."""
        if rows.max() >= self.vocab_size or rows.min() < 0:
            beyond = f"token id {rows.max()}, beyond its vocabulary of {self.vocab_size}"
            raise UserError(f"{self.directory} contains {beyond}; prepare it again")


def id_dtype(vocab_size: int) -> type:
    """Return the type in which a dataset holds token ids."""
    return np.uint16 if vocab_size <= 2**16 else np.int32


def pack_rows(stream: np.ndarray, block_size: int) -> np.ndarray:
    """Return the rows that a stream fills: [tokens] -> [rows, block_size + 1], overlapping by one token."""
    num_rows = max(0, len(stream) - 1) // block_size
    strides = (block_size * stream.strides[0], stream.strides[0])
    return np.lib.stride_tricks.as_strided(stream, (num_rows, block_size + 1), strides).copy()


def open_packed_dataset(directory: Path, block_size: int | None = None) -> PackedDataset:
    """Open a complete dataset that has the run's block_size. Raises `UserError` for any other."""
    if not directory.is_dir():
        raise UserError(f"there is no dataset {directory}; create it with scripts/prepare_data.py")
    try:
        metadata = json.loads((directory / "metadata.json").read_text())
        splits = _open_splits(directory, metadata)
    except Exception as error:  # json and numpy raise various errors for damaged files
        reason = error if isinstance(error, UserError) else short_reason(error)
        remedy = "prepare it again with scripts/prepare_data.py --overwrite"
        raise UserError(f"{directory} is not a complete packed dataset ({reason}); {remedy}") from error
    if block_size not in (None, found := metadata["block_size"]):
        remedy = f"pass --block_size {found}, or prepare it again with --block_size {block_size}"
        raise UserError(f"{directory} has block_size {found}, but the run requests {block_size}; {remedy}")
    return PackedDataset(directory, metadata, splits)


def _open_splits(directory: Path, metadata: dict) -> dict[str, PackedSplit]:
    """Map the rows of both splits. Raises `UserError` if they do not match the metadata."""
    if metadata["format_version"] != FORMAT_VERSION:
        raise UserError(f"it has format {metadata['format_version']}, not {FORMAT_VERSION}")
    if missing := [key for key in METADATA_KEYS if key not in metadata]:
        raise UserError(f"metadata.json lacks {', '.join(missing)}")
    splits, vocab_size = {}, metadata["vocab_size"]
    for name in SPLITS:
        expected = metadata["splits"][name]
        if min(expected[key] for key in ("rows", "tokens", "bytes")) < 1 and metadata["shard"][1] == 1:
            raise UserError(f"metadata.json says that {name} is empty")
        if (largest := expected["max_token_id"]) >= vocab_size:
            raise UserError(f"{name} contains id {largest}, beyond its vocabulary of {vocab_size}")
        for file, size in expected["file_bytes"].items():
            if (found := (directory / name / file).stat().st_size) != size:
                raise UserError(f"{name}/{file} has {found} bytes instead of {size}")
        splits[name] = PackedSplit(directory / name, vocab_size)
        shape = (expected["rows"], metadata["block_size"] + 1)
        if (len(splits[name]), splits[name].block_size + 1) != shape:
            raise UserError(f"{name} does not have {shape[0]} rows of {shape[1]} ids, as in metadata.json")
    return splits
