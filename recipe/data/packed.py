"""The packed dataset on disk: a stream of token ids for each split, and metadata.

    DIR/dataset_dict.json, DIR/train/, DIR/validation/   a datasets.DatasetDict: datasets.load_from_disk(DIR) opens it
    DIR/SPLIT/00012.arrow                                the ids of unit 12, one per row
    DIR/tokenizer/                                       the tokenizer that made them
    DIR/metadata.json                                    counts, hashes, and where the ids are; written last

A split is one stream: the ids of its units, one after another. A run reads it in rows of its own block_size: row i
holds tokens [i*T, i*T + T + 1), T = block_size. Each row starts with the last token of the previous row, so every
token but the first is a target exactly once. Up to T - 1 tokens at the end of the stream fill no row. For n < T, index
i + n * rows is row i moved n tokens later; only the last row stays in its place, because no text follows it.
"""

import bisect
import copy
import functools
import hashlib
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from recipe.config import SPLITS
from recipe.data.tokenizer import count_token_bytes, load_saved_tokenizer, tokenizer_sha256
from recipe.disk import can_map
from recipe.errors import UserError, short_reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT_VERSION = 6
COUNTS = ("documents", "tokens", "bytes")  # of a split; bytes: of the text of the tokens, None if not known
BATCH_TOKENS = 2**22  # at a time, so that a unit of any size takes little memory


class TokenWriter:
    """Writes a stream of token ids, one per row, to an Arrow file that `datasets.load_from_disk` reads.

    `chunks` says where they are in the file: [offset, number of ids] of each batch.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        self.path, self.dtype = path, id_dtype(vocab_size)
        info = {"huggingface": json.dumps({"info": dataset_info(vocab_size)})}
        self.schema = pa.schema({"input_ids": pa.from_numpy_dtype(self.dtype)}, info)
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
            self._write_batch()

    def _write_batch(self) -> None:
        tokens = np.concatenate(self.pending)
        self.pending, self.num_pending = [], 0
        self.digest.update(tokens.data)
        self.stream.write_batch(pa.record_batch([pa.array(tokens)], schema=self.schema))
        # Without nulls, the ids are the last buffer of the batch, padded to a multiple of 8 bytes.
        self.chunks.append([self.file.tell() - -(-tokens.nbytes // 8) * 8, len(tokens)])

    def close(self) -> None:
        """Write the ids that are left."""
        if self.num_pending:
            self._write_batch()
        self.stream.close()
        self.file.close()


def dataset_info(vocab_size: int) -> dict:
    """Describe the column as `datasets` does, without its import, which takes a second."""
    return {"features": {"input_ids": {"dtype": np.dtype(id_dtype(vocab_size)).name, "_type": "Value"}}}


def id_dtype(vocab_size: int) -> type:
    """Return the type in which a dataset holds token ids."""
    return np.uint16 if vocab_size <= 2**16 else np.int32


class PackedSplit:
    """The rows of a stream of token ids, memory-mapped: only pages that are read take up memory.

    torch maps the files, because pyarrow 26 makes a whole file resident and numpy keeps each file open.
    """

    def __init__(
        self, directory: Path, chunks: list[list], block_size: int, vocab_size: int, sizes: list[int] | None = None
    ) -> None:
        """chunks: [file name, offset, number of ids] of each stretch of the stream.

        sizes: lengths of the streams of several datasets, one after another; no row has ids of two datasets.
        """
        self.directory, self.where, self.block_size, self.vocab_size = directory, chunks, block_size, vocab_size
        self.chunks = [self._map(*chunk) for chunk in chunks]  # readable also when the files are replaced
        self.starts = [0, *itertools.accumulate(map(len, self.chunks))]  # of the chunks in the stream
        self.sizes = sizes or [self.starts[-1]]
        self.first_tokens = np.cumsum([0, *self.sizes])
        self.first_rows = np.cumsum([0, *(max(0, size - 1) // block_size for size in self.sizes)])

    @classmethod
    def joined(cls, splits: list["PackedSplit"]) -> "PackedSplit":
        """Return the rows of several datasets, one after another."""
        first = splits[0]
        where = [[str(split.directory.absolute() / name), *place] for split in splits for name, *place in split.where]
        names = Path(", ".join(str(split.directory) for split in splits))  # for messages; the paths in it are absolute
        return cls(names, where, first.block_size, first.vocab_size, [split.starts[-1] for split in splits])

    def __len__(self) -> int:
        return int(self.first_rows[-1])

    def row_starts(self, indices: np.ndarray) -> np.ndarray:
        """Return where rows begin in the stream. indices, and the result: int64 [batch]."""
        shifts, rows = np.divmod(indices, len(self))
        part = np.searchsorted(self.first_rows, rows, side="right") - 1
        starts = (rows - self.first_rows[part]) * self.block_size + self.first_tokens[part]
        return starts + shifts * (rows + 1 < self.first_rows[part + 1])  # the last row of a part stays

    @property
    def num_bytes(self) -> int:
        """Size of the ids in memory."""
        return self.starts[-1] * np.dtype(id_dtype(self.vocab_size)).itemsize

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        """Return the rows with these indices (int64 [batch]) as int64 [batch, block_size + 1].

        Raises `UserError` for an id outside the vocabulary, which would be a device-side assert on CUDA.
        """
        starts = self.row_starts(np.asarray(indices)).tolist()
        rows = np.stack([self._tokens(start, start + self.block_size + 1) for start in starts])
        self.check(rows)
        return rows.astype(np.int64)

    def _tokens(self, start: int, stop: int) -> np.ndarray:
        number, pieces = bisect.bisect_right(self.starts, start) - 1, []
        while start < stop:
            pieces.append(self.chunks[number][start - self.starts[number] : stop - self.starts[number]])
            start, number = self.starts[number + 1], number + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def check(self, ids: np.ndarray) -> None:
        """Raise `UserError` if there is an id outside the vocabulary."""
        if ids.max() >= self.vocab_size or ids.min() < 0:
            beyond = f"token id {ids.max()}, beyond its vocabulary of {self.vocab_size}"
            raise UserError(f"{self.directory} contains {beyond}; prepare it again")

    def _map(self, name: str, offset: int, num_ids: int) -> np.ndarray:
        import torch  # not at the top, because preparing data does not need it

        path, dtype = self.directory / name, np.dtype(id_dtype(self.vocab_size))
        if not can_map(path):
            return np.fromfile(path, dtype, num_ids, offset=offset)
        size = offset + num_ids * dtype.itemsize
        return torch.from_file(str(path), size=size, dtype=torch.uint8).numpy()[offset:].view(dtype)

    def in_memory(self) -> "PackedSplit":
        """Load all ids into memory, as a single chunk."""
        copied = copy.copy(self)
        copied.chunks, copied.starts = [np.concatenate(self.chunks)], [0, self.starts[-1]]
        return copied

    def __reduce__(self):  # a worker process maps the files itself
        return PackedSplit, (self.directory, self.where, self.block_size, self.vocab_size, self.sizes)


@dataclass(frozen=True)
class PackedDataset:
    """An open packed dataset, whose splits are indexed by row numbers, or a mixture (recipe/data/mixture.py)."""

    directory: Path  # of a mixture, the first one's
    metadata: dict
    block_size: int
    train: PackedSplit
    validation: PackedSplit
    parts: dict[str, "PackedDataset"] = field(default_factory=dict)  # of a mixture, by name
    shares: dict[str, float] = field(default_factory=dict)  # of the training examples, which add up to 1

    @functools.cached_property
    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """Load the tokenizer that made the ids. Raises `UserError` if its files have changed."""
        directory, sha256 = self.directory / "tokenizer", self.metadata["tokenizer_sha256"]
        return load_saved_tokenizer(directory, sha256, **encoding_of(self.metadata))

    @property
    def vocab_size(self) -> int:
        return self.metadata["vocab_size"]


def encoding_of(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return how the text of a packed dataset was encoded, besides its tokenizer."""
    inputs = metadata.get("inputs", {})
    defaults = {"document_prefix": [], "parse_special_tokens": False}
    return {name: inputs.get(name, default) for name, default in defaults.items()}


def token_bytes_of(dataset: Any) -> np.ndarray:
    """From `count_token_bytes`; -1 if the ids of the validation text lack its bytes. dataset: as for `metadata_of`."""
    counts = count_token_bytes(dataset.tokenizer)
    if isinstance(dataset, PackedDataset) and dataset.metadata["splits"]["validation"]["bytes"] is None:
        counts[:] = -1
    return counts


def metadata_of(dataset: Any) -> dict[str, Any]:
    """Return the metadata of a packed dataset with its rows; of a user's own, the rows and a hash of the first ones.

    dataset: has `train` and `validation` (with a length, indexed by int64 [n] for int64 [n, block_size + 1]) and a
    `tokenizer`.
    """
    if isinstance(dataset, PackedDataset):
        counts = dataset.metadata["splits"]
        rows = {"train": len(dataset.train), "validation": len(dataset.validation)}
        return dataset.metadata | {"splits": {name: counts[name] | {"rows": rows[name]} for name in SPLITS}}
    splits, digest = {}, hashlib.sha256()
    for name in SPLITS:
        split = getattr(dataset, name)
        first = np.asarray(split[np.arange(min(8, len(split)))])
        digest.update(first.astype(np.int64).tobytes())
        num_tokens = len(split) * (first.shape[1] - 1)
        splits[name] = {"documents": None, "tokens": num_tokens, "bytes": None, "rows": len(split)}
    return {
        "source": {"dataset_name": "a dataset of your own"},
        "splits": splits,
        "content_sha256": digest.hexdigest(),
        "tokenizer_sha256": tokenizer_sha256(dataset.tokenizer),
        "tokenizer": dataset.tokenizer.name_or_path or type(dataset.tokenizer).__name__,
    }


def open_packed_dataset(directory: Path, block_size: int) -> PackedDataset:
    """Open a dataset in rows of block_size + 1 tokens. Raises `UserError` if it is damaged or a split fills no row."""
    metadata = read_metadata(directory)
    check_splits(metadata, block_size)
    train, validation = (
        PackedSplit(directory / split, metadata["splits"][split]["chunks"], block_size, metadata["vocab_size"])
        for split in SPLITS
    )
    return PackedDataset(directory, metadata, block_size, train, validation)


def read_metadata(directory: Path) -> dict[str, Any]:
    """Return the metadata of a complete packed dataset. Raises `UserError` for anything else."""
    if not directory.is_dir():
        raise UserError(f"there is no dataset {directory}; create it with scripts/prepare_data.py")
    if not (directory / "metadata.json").is_file():
        remedy = "create one with scripts/prepare_data.py"
        raise UserError(f"{directory} is not a complete packed dataset (it has no metadata.json); {remedy}")
    try:
        metadata = json.loads((directory / "metadata.json").read_text())
        if metadata["format_version"] != FORMAT_VERSION:
            raise UserError(f"it has format {metadata['format_version']}, not {FORMAT_VERSION}")
        for split in SPLITS:
            for file, size in metadata["splits"][split]["file_bytes"].items():
                if (actual := (directory / split / file).stat().st_size) != size:
                    raise UserError(f"{split}/{file} has {actual} bytes instead of {size}")
    except Exception as error:  # json raises various errors for damaged files
        reason = error if isinstance(error, UserError) else short_reason(error)
        remedy = "prepare it again with scripts/prepare_data.py --overwrite"
        raise UserError(f"{directory} is not a complete packed dataset ({reason}); {remedy}") from error
    return metadata


def check_splits(metadata: dict[str, Any], block_size: int) -> None:
    """Raise `UserError` if a split fills no row, naming the options that would provide some."""
    counts, held_out = metadata["splits"], metadata["source"]["validation_split_percentage"]
    short = next((split for split in SPLITS if counts[split]["tokens"] <= block_size), None)
    if short is None:
        return
    tokens, documents = counts[short]["tokens"], counts["train"]["documents"]
    problem = f"the {short} text has {tokens:,} tokens, fewer than one row of block_size + 1 = {block_size + 1:,}"
    remedies = ["more text"]
    if tokens > 16:  # a model learns nothing from shorter rows
        remedies.append(f"--block_size {2 ** ((tokens - 1).bit_length() - 1)}")
    if held_out and short == "validation":
        problem += f" ({held_out:g}% of {documents + counts[short]['documents']:,} documents are held out)"
        remedies += ["a larger --validation_split_percentage", "a --validation_file"]
        if documents == 1:
            remedies.append("a --document_separator that occurs in the text")
    raise UserError(f"{problem}; pass {' or '.join(remedies)}")
