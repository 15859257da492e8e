"""The packed dataset on disk: a stream of token ids for each split, and metadata.

    DIR/train-00012.bin, DIR/validation-00012.bin   the ids of unit 12, and nothing else: uint16, or uint32 for more
                                                    than 65,536 tokens; `cat DIR/train-*.bin` is nanoGPT's train.bin
    DIR/tokenizer/                                  the tokenizer that made them
    DIR/metadata.json                               counts, hashes, and where the ids are; written last

Token files of other programs are used in place: then the metadata names stretches of them (recipe/data/tokens.py).

A split is one stream: the ids of its units, one after another. A run reads it in rows of its own block_size: row i
holds tokens [i*T, i*T + T + 1), T = block_size. Each row starts with the last token of the previous row, so every
token but the first is a target exactly once. Up to T - 1 tokens at the end of the stream fill no row. For 0 < n < T,
index i + n * rows is row i moved n tokens later in the n-th order of the documents, so that another epoch has other
neighbors in a row; only the last row stays in its place, because no text follows it.
"""

import bisect
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recipe.config import SPLITS
from recipe.data.tokenizer import count_token_bytes, load_saved_tokenizer, text_ids, tokenizer_sha256
from recipe.data.tokens import check_in_place
from recipe.disk import can_map
from recipe.errors import UserError, short_reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT_VERSION = 7
# Of a split. text_tokens: without special tokens and ends of documents. bytes: of their text, as it was read; None if
# unknown.
COUNTS = ("documents", "tokens", "text_tokens", "bytes")
SCANNED_AT_ONCE = 2**24  # ids


class Stretch(NamedTuple):
    """A part of a file that holds token ids."""

    path: str
    type: str  # of an id
    start: int  # byte
    count: int  # of ids


class PackedSplit:
    """The rows of a stream of token ids, memory-mapped: only pages that are read take up memory.

    torch maps the files, because numpy keeps each file open.
    """

    def __init__(
        self,
        name: str,
        stretches: list[Stretch],
        block_size: int,
        vocab_size: int,
        sizes: list[int] | None = None,
        end_of_document: int | None = None,
    ) -> None:
        """name: for messages. sizes: lengths of the streams of several datasets, one after another.

        No row has ids of two datasets. end_of_document: the id; None if it may be within a document, too.
        """
        self.name = name
        self.stretches = stretches
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.end_of_document = end_of_document
        self.orders: dict[int, tuple[int, np.ndarray, np.ndarray]] = {}  # the newest of each part
        self.chunks = [map_ids(stretch) for stretch in stretches]  # readable even after the files are replaced
        self.starts = [0, *itertools.accumulate(map(len, self.chunks))]  # of the chunks in the stream
        self.sizes = sizes or [self.starts[-1]]
        self.first_tokens = np.cumsum([0, *self.sizes])
        self.first_rows = np.cumsum([0, *(max(0, size - 1) // block_size for size in self.sizes)])

    @classmethod
    def joined(cls, splits: list["PackedSplit"]) -> "PackedSplit":
        """Return the rows of several datasets, one after another."""
        ends = {split.end_of_document for split in splits}
        return cls(
            name=", ".join(split.name for split in splits),
            stretches=[stretch for split in splits for stretch in split.stretches],
            block_size=splits[0].block_size,
            vocab_size=splits[0].vocab_size,
            sizes=[split.starts[-1] for split in splits],
            end_of_document=ends.pop() if len(ends) == 1 else None,
        )

    def __len__(self) -> int:
        return int(self.first_rows[-1])

    def row_starts(self, indices: np.ndarray) -> np.ndarray:
        """Return where rows begin in the stream, in its order. indices, and the result: int64 [batch]."""
        shifts, rows = np.divmod(indices, len(self))
        part = np.searchsorted(self.first_rows, rows, side="right") - 1
        starts = (rows - self.first_rows[part]) * self.block_size + self.first_tokens[part]
        return starts + shifts * (rows + 1 < self.first_rows[part + 1])  # the last row of a part stays

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        """Return the rows with these indices (int64 [batch]) as int64 [batch, block_size + 1].

        Raises `UserError` for an id outside the vocabulary, which would be a device-side assert on CUDA.
        """
        indices = np.asarray(indices)
        places = zip(self.row_starts(indices).tolist(), (indices // len(self)).tolist(), strict=True)
        rows = np.stack([self._row(start, start + self.block_size + 1, shift) for start, shift in places])
        self.check(rows)
        return rows.astype(np.int64)

    def _row(self, start: int, stop: int, shift: int) -> np.ndarray:
        """Return ids of the stream in the order of a shift."""
        if shift == 0 or self.end_of_document is None:
            return self._tokens(start, stop)
        ends, moved = self._reorder(int(np.searchsorted(self.first_tokens, start, side="right")) - 1, shift)
        number = int(np.searchsorted(ends, start, side="right"))
        pieces = []
        while start < stop:
            end = min(stop, int(ends[number]))
            pieces.append(self._tokens(start + int(moved[number]), end + int(moved[number])))
            start = end
            number += 1
        return np.concatenate(pieces)

    def _reorder(self, part: int, shift: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where each document of a dataset ends in the order of a shift, and how much later its ids are."""
        if part not in self.orders or self.orders[part][0] != shift:
            first, last = self.first_tokens[part : part + 2].tolist()
            found = [np.array([first, last])]
            for start in range(first, last, SCANNED_AT_ONCE):
                ids = self._tokens(start, min(start + SCANNED_AT_ONCE, last))
                found.append(start + 1 + np.flatnonzero(ids == self.end_of_document))
            places = np.unique(np.concatenate(found))  # between documents
            order = np.argsort(mix((places[:-1] - first).astype(np.uint64) + mix(np.array([shift], np.uint64))))
            ends = first + np.cumsum(np.diff(places)[order])
            self.orders[part] = shift, ends, places[1:][order] - ends
        return self.orders[part][1:]

    def _tokens(self, start: int, stop: int) -> np.ndarray:
        number = bisect.bisect_right(self.starts, start) - 1
        pieces = []
        while start < stop:
            pieces.append(self.chunks[number][start - self.starts[number] : stop - self.starts[number]])
            number += 1
            start = self.starts[number]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def check(self, ids: np.ndarray) -> None:
        """Raise `UserError` if there is an id outside the vocabulary."""
        if ids.max() >= self.vocab_size:
            beyond = f"token id {ids.max()}, beyond its vocabulary of {self.vocab_size}"
            raise UserError(f"{self.name} contains {beyond}; prepare it again")

    def __reduce__(self):  # a worker process maps the files itself
        return PackedSplit, (
            self.name,
            self.stretches,
            self.block_size,
            self.vocab_size,
            self.sizes,
            self.end_of_document,
        )


def mix(values: np.ndarray) -> np.ndarray:
    """Finalize as splitmix64 does (Steele, Lea and Flood 2014): uint64 with wrap-around."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def map_ids(stretch: Stretch) -> np.ndarray:
    """Map the ids of a part of a file into memory."""
    import torch  # not at the top, because preparing data does not need it

    path = Path(stretch.path)
    dtype = np.dtype(stretch.type)
    if not can_map(path):
        return np.fromfile(path, dtype, stretch.count, offset=stretch.start)
    size = stretch.start + stretch.count * dtype.itemsize
    return torch.from_file(str(path), size=size, dtype=torch.uint8).numpy()[stretch.start :].view(dtype)


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
        sha256 = self.metadata["tokenizer_sha256"]
        return load_saved_tokenizer(self.directory / "tokenizer", sha256, **encoding_of(self.metadata))

    @property
    def vocab_size(self) -> int:
        return self.metadata["vocab_size"]


def encoding_of(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return how the text of a packed dataset was encoded, besides its tokenizer."""
    inputs = metadata.get("inputs", {})
    defaults = {"document_prefix": [], "parse_special_tokens": False}
    return {name: inputs.get(name, default) for name, default in defaults.items()}


def metadata_of(dataset: Any) -> dict[str, Any]:
    """Return the metadata of a packed dataset with its rows; of a user's own, the rows and a hash of the first ones.

    dataset: has `train` and `validation` (with a length, indexed by int64 [n] for int64 [n, block_size + 1]) and a
    `tokenizer`.
    """
    if isinstance(dataset, PackedDataset):
        counts = dataset.metadata["splits"]
        rows = {"train": len(dataset.train), "validation": len(dataset.validation)}
        return dataset.metadata | {"splits": {name: counts[name] | {"rows": rows[name]} for name in SPLITS}}
    splits = {}
    digest = hashlib.sha256()
    token_bytes = count_token_bytes(dataset.tokenizer)
    is_text = text_ids(dataset.tokenizer)
    for name in SPLITS:
        split = getattr(dataset, name)
        ids = np.asarray(split[np.arange(min(100, len(split)))])
        digest.update(ids[:8].astype(np.int64).tobytes())
        num_tokens = len(split) * (ids.shape[1] - 1)
        counts = {
            "documents": None,
            "tokens": num_tokens,
            "text_tokens": round(is_text[ids].mean() * num_tokens),
            "bytes": None,
        }
        if token_bytes is not None:  # estimated from these rows
            counts["bytes"] = round(token_bytes[ids].mean() * num_tokens)
        splits[name] = counts | {"rows": len(split)}
    return {
        "source": {"dataset_name": "a dataset of your own"},
        "splits": splits,
        "content_sha256": digest.hexdigest(),
        "tokenizer_sha256": tokenizer_sha256(dataset.tokenizer),
        "tokenizer": dataset.tokenizer.name_or_path or type(dataset.tokenizer).__name__,
    }


def bytes_per_token(dataset: Any) -> float | None:
    """Return the mean bytes of a text token in the validation split, None if unknown. dataset: as above."""
    counts = metadata_of(dataset)["splits"]["validation"]
    return None if counts["bytes"] is None else counts["bytes"] / max(1, counts["text_tokens"])


def add_known(counts: Iterable[int | None]) -> int | None:
    """Add up counts; None if one is not known."""
    counts = list(counts)
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def open_packed_dataset(directory: Path, block_size: int) -> PackedDataset:
    """Open a dataset in rows of block_size + 1 tokens. Raises `UserError` if it is damaged or a split fills no row."""
    metadata = read_metadata(directory)
    check_splits(metadata, block_size)
    size = metadata["vocab_size"]
    end = metadata["eos_token_id"]
    encoding = encoding_of(metadata)
    if encoding["parse_special_tokens"] or end in encoding["document_prefix"]:
        end = None  # it may follow each message of a dialog, or begin documents, too
    train, validation = (
        PackedSplit(str(directory), list_stretches(directory, metadata, split), block_size, size, end_of_document=end)
        for split in SPLITS
    )
    return PackedDataset(directory, metadata, block_size, train, validation)


def list_stretches(directory: Path, metadata: dict[str, Any], split: str) -> list[Stretch]:
    """Return where the ids of a split are."""
    files = metadata["files"]
    stretches = metadata["splits"][split]["stretches"]
    return [
        Stretch(str(directory.absolute() / name), files[name]["type"], start, count)
        for name, start, count in stretches
    ]


def read_metadata(directory: Path) -> dict[str, Any]:
    """Return the metadata of a complete packed dataset. Raises `UserError` for anything else."""
    if not directory.is_dir():
        raise UserError(f"there is no dataset {directory}; create it with scripts/prepare_data.py")
    if not (directory / "metadata.json").is_file():
        remedy = "create one with scripts/prepare_data.py"
        raise UserError(f"{directory} is not a complete packed dataset (it has no metadata.json); {remedy}")
    try:
        metadata = json.loads((directory / "metadata.json").read_text())
        version = metadata["format_version"]
        if version != FORMAT_VERSION:
            raise UserError(f"it has format {version}, not {FORMAT_VERSION}")
        for split in SPLITS:
            for name, start, count in metadata["splits"][split]["stretches"]:
                described = metadata["files"][name]
                if not 0 <= start <= start + count * np.dtype(described["type"]).itemsize <= described["bytes"]:
                    raise UserError(f"{name} does not hold its ids")
        for name, described in metadata["files"].items():
            if "digest" in described and os.path.isabs(name):  # a file of another program
                continue
            if "digest" in described or Path(name).name != name:
                raise UserError(f"{name} is not a file in it")
            actual = (directory / name).stat().st_size
            if actual != described["bytes"]:
                raise UserError(f"{name} has {actual} bytes instead of {described['bytes']}")
    except Exception as error:  # json raises various errors for damaged files
        reason = error if isinstance(error, UserError) else short_reason(error)
        remedy = "prepare it again with scripts/prepare_data.py --overwrite"
        raise UserError(f"{directory} is not a complete packed dataset ({reason}); {remedy}") from error
    for name, described in metadata["files"].items():
        if "digest" in described:
            check_in_place(name, described)
    return metadata


def check_splits(metadata: dict[str, Any], block_size: int) -> None:
    """Raise `UserError` if a split fills no row, naming the options that would provide some."""
    counts = metadata["splits"]
    held_out = metadata["source"]["validation_split_percentage"]
    short = next((split for split in SPLITS if counts[split]["tokens"] <= block_size), None)
    if short is None:
        return
    tokens = counts[short]["tokens"]
    documents = counts["train"]["documents"]
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
