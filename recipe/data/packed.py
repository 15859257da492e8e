"""The packed dataset on disk: rows of block_size + 1 token ids, and metadata.

    DIR/dataset_dict.json, DIR/train/, DIR/validation/   a datasets.DatasetDict: datasets.load_from_disk(DIR) opens it
    DIR/SPLIT/00012.arrow                                the rows of unit 12
    DIR/tokenizer/                                       the tokenizer that made the ids
    DIR/metadata.json                                    counts, hashes, and where the rows are; written last

Row i of a unit holds tokens [i*T, i*T + T + 1) of its token stream, T = block_size. Each row starts with the last
token of the previous row, so every token but the first is a target exactly once. Up to T - 1 tokens at the end of each
unit do not fill a row and are dropped.
"""

import copy
import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from recipe.data.read import SPLITS
from recipe.data.tokenizer import load_saved_tokenizer, tokenizer_sha256
from recipe.errors import UserError, short_reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT_VERSION = 4
BATCH_TOKENS = 2**22  # per batch of rows, so that a unit of any size takes little memory


class RowsWriter:
    """Writes a stream of token ids as rows, in the Arrow file that `datasets.load_from_disk` reads.

    `chunks` says where the rows are in the file: [offset of the ids, number of rows] of each batch.
    """

    def __init__(self, path: Path, block_size: int, vocab_size: int) -> None:
        self.path, self.block_size, self.dtype = path, block_size, id_dtype(vocab_size)
        self.schema = pa.schema(
            {"input_ids": pa.list_(pa.from_numpy_dtype(self.dtype), block_size + 1)},
            {"huggingface": json.dumps({"info": dataset_info(block_size, vocab_size)})},
        )
        self.chunks, self.digest = [], hashlib.sha256()
        self.pending, self.num_pending = [], 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = pa.OSFile(str(path), "wb")
        self.stream = pa.ipc.new_stream(self.file, self.schema)

    def write(self, ids: np.ndarray) -> None:
        """Append token ids."""
        self.pending.append(ids.astype(self.dtype, copy=False))
        self.num_pending += len(ids)
        if self.num_pending >= BATCH_TOKENS:
            self._write_rows()

    def _write_rows(self) -> None:
        tokens = np.concatenate(self.pending)
        rows = pack_rows(tokens, self.block_size)
        self.pending = [tokens[len(rows) * self.block_size :]]  # starts with the last token written
        self.num_pending = len(self.pending[0])
        if len(rows):
            self.digest.update(rows.data)
            column = pa.FixedSizeListArray.from_arrays(rows.reshape(-1), self.block_size + 1)
            self.stream.write_batch(pa.record_batch([column], schema=self.schema))
            # Without nulls, the ids are the last buffer of the batch, padded to a multiple of 8 bytes.
            self.chunks.append([self.file.tell() - -(-rows.nbytes // 8) * 8, len(rows)])

    def close(self) -> None:
        """Write the rows that are left."""
        if self.pending:
            self._write_rows()
        self.stream.close()
        self.file.close()


def dataset_info(block_size: int, vocab_size: int) -> dict:
    """Describe rows as `datasets` does a list of fixed length, without its import, which takes a second."""
    feature = {"dtype": np.dtype(id_dtype(vocab_size)).name, "_type": "Value"}
    return {"features": {"input_ids": {"feature": feature, "length": block_size + 1, "_type": "List"}}}


def id_dtype(vocab_size: int) -> type:
    """Return the type in which a dataset holds token ids."""
    return np.uint16 if vocab_size <= 2**16 else np.int32


def pack_rows(stream: np.ndarray, block_size: int) -> np.ndarray:
    """Return the rows that a stream fills: [tokens] -> [rows, block_size + 1], overlapping by one token."""
    num_rows = max(0, len(stream) - 1) // block_size
    strides = (block_size * stream.strides[0], stream.strides[0])
    return np.lib.stride_tricks.as_strided(stream, (num_rows, block_size + 1), strides).copy()


class PackedSplit:
    """The rows of one split, memory-mapped: only pages that are read take up memory.

    torch maps the files, because pyarrow 26 makes a whole file resident and numpy keeps each file open.
    """

    def __init__(self, directory: Path, chunks: list[list], block_size: int, vocab_size: int) -> None:
        """chunks: [file name, offset of the ids, number of rows] of each stretch of rows."""
        self.directory, self.block_size, self.vocab_size = directory, block_size, vocab_size
        self.where = [tuple(chunk) for chunk in chunks]
        self.starts = np.cumsum([0, *(num_rows for *_, num_rows in self.where)])  # the first row of each chunk
        self.mapped: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def num_bytes(self) -> int:
        """Size of the rows in memory."""
        return len(self) * (self.block_size + 1) * np.dtype(id_dtype(self.vocab_size)).itemsize

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        """Return the rows with these indices (int64 [batch]) as int64 [batch, block_size + 1].

        Raises `UserError` for an id outside the vocabulary, which would be a device-side assert on CUDA.
        """
        numbers = np.searchsorted(self.starts, indices, side="right") - 1
        rows = np.stack([self.chunk(n)[i - self.starts[n]] for n, i in zip(numbers.tolist(), indices, strict=True)])
        self.check(rows)
        return rows.astype(np.int64)

    def check(self, rows: np.ndarray) -> None:
        """Raise `UserError` if rows hold an id outside the vocabulary."""
        if rows.max() >= self.vocab_size or rows.min() < 0:
            beyond = f"token id {rows.max()}, beyond its vocabulary of {self.vocab_size}"
            raise UserError(f"{self.directory} contains {beyond}; prepare it again")

    def chunk(self, number: int) -> np.ndarray:
        """Return the rows of a chunk: [rows, block_size + 1]."""
        if number not in self.mapped:
            self.mapped[number] = self._map(*self.where[number])
        return self.mapped[number]

    def _map(self, name: str, offset: int, num_rows: int) -> np.ndarray:
        import torch  # not at the top, because preparing data does not need it

        dtype, width = np.dtype(id_dtype(self.vocab_size)), self.block_size + 1
        num_bytes = num_rows * width * dtype.itemsize
        path = self.directory / name
        mapped = torch.from_file(str(path), size=offset + num_bytes, dtype=torch.uint8).numpy()
        return mapped[offset:].view(dtype).reshape(num_rows, width)

    def read_row(self, index: int) -> np.ndarray:
        """Return one row without mapping its file: [block_size + 1]."""
        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        name, offset, _ = self.where[number]
        dtype, width = np.dtype(id_dtype(self.vocab_size)), self.block_size + 1
        offset += int(index - self.starts[number]) * width * dtype.itemsize
        return np.fromfile(self.directory / name, dtype, width, offset=offset)

    def in_memory(self) -> "PackedSplit":
        """Load all rows into memory, as a single chunk."""
        copied = copy.copy(self)
        copied.mapped = {0: np.concatenate([self.chunk(number) for number in range(len(self.where))])}
        copied.starts = np.array([0, len(self)])
        return copied

    def __reduce__(self):  # a worker process maps the files itself
        return PackedSplit, (self.directory, self.where, self.block_size, self.vocab_size)


@dataclass(frozen=True)
class PackedDataset:
    """An open packed dataset, whose splits are indexed by row numbers."""

    directory: Path
    metadata: dict
    train: PackedSplit
    validation: PackedSplit

    @functools.cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Load the tokenizer that made the ids. Raises `UserError` if its files have changed."""
        return load_saved_tokenizer(self.directory / "tokenizer", self.metadata["tokenizer_sha256"])

    @property
    def block_size(self) -> int:
        return self.metadata["block_size"]

    @property
    def vocab_size(self) -> int:
        return self.metadata["vocab_size"]


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


def open_packed_dataset(directory: Path, block_size: int | None = None) -> PackedDataset:
    """Open a complete dataset that has the run's block_size. Raises `UserError` for any other."""
    if not directory.is_dir():
        raise UserError(f"there is no dataset {directory}; create it with scripts/prepare_data.py")
    if not (directory / "metadata.json").is_file():
        remedy = "create one with scripts/prepare_data.py"
        raise UserError(f"{directory} is not a complete packed dataset (it has no metadata.json); {remedy}")
    try:
        metadata = json.loads((directory / "metadata.json").read_text())
        if metadata["format_version"] != FORMAT_VERSION:
            raise UserError(f"it has format {metadata['format_version']}, not {FORMAT_VERSION}")
        splits = [_open_split(directory / name, metadata, metadata["splits"][name]) for name in SPLITS]
    except Exception as error:  # json and numpy raise various errors for damaged files
        reason = error if isinstance(error, UserError) else short_reason(error)
        remedy = "prepare it again with scripts/prepare_data.py --overwrite"
        raise UserError(f"{directory} is not a complete packed dataset ({reason}); {remedy}") from error
    if block_size not in (None, found := metadata["block_size"]):
        remedy = f"pass --block_size {found}, or prepare it again with --block_size {block_size}"
        raise UserError(f"{directory} has block_size {found}, but the run requests {block_size}; {remedy}")
    return PackedDataset(directory, metadata, *splits)


def _open_split(directory: Path, metadata: dict, expected: dict) -> PackedSplit:
    """Open a split. Raises `UserError` if its files do not have the sizes in the metadata."""
    for file, size in expected["file_bytes"].items():
        if (found := (directory / file).stat().st_size) != size:
            raise UserError(f"{directory.name}/{file} has {found} bytes instead of {size}")
    return PackedSplit(directory, expected["chunks"], metadata["block_size"], metadata["vocab_size"])
