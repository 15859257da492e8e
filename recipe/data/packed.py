"""The packed dataset on disk: token ids in rows of block_size + 1, with the metadata that says what they are.

    DIR/dataset_dict.json, DIR/train/, DIR/validation/   a datasets.DatasetDict: datasets.load_from_disk(DIR) opens it
    DIR/tokenizer/                                       the tokenizer the ids belong to
    DIR/metadata.json                                    counts, hashes, sizes; written last

Row i of a split holds tokens [i*T, i*T + T + 1) of its token stream, T = block_size: each row starts with the last
token of the row before, so that every token but the first is a target exactly once. Up to T - 1 tokens at the end of
the stream fill no row and are left out. A dataset appears under its name only when it is complete.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from recipe.config import UserError
from recipe.data.tokenizer import load_tokenizer, save_tokenizer, tokenizer_sha256

FORMAT_VERSION = 1
SPLITS = ("train", "validation")
BATCH_TOKENS = 4_000_000  # tokens an Arrow record batch holds, about; 8 MB as uint16
SAMPLED_ROWS = 4096  # rows of a split looked at when it is opened


class SplitWriter:
    """Token ids in, rows of one split on disk out, in the layout that `datasets.load_from_disk` reads."""

    def __init__(self, directory: Path, split: str, block_size: int, vocab_size: int) -> None:
        self.directory = directory / split
        self.directory.mkdir(parents=True)
        self.split, self.block_size, self.vocab_size = split, block_size, vocab_size
        self.dtype = np.uint16 if vocab_size <= 2**16 else np.int32
        column = datasets.List(datasets.Value(np.dtype(self.dtype).name), length=block_size + 1)
        self.features = datasets.Features({"input_ids": column})
        self.path = self.directory / "data-00000-of-00001.arrow"
        self.file = pa.OSFile(str(self.path), "wb")
        self.arrow = pa.ipc.new_stream(self.file, self.features.arrow_schema)
        self.pending: list[np.ndarray] = []
        self.num_pending = 0
        self.counts = {"documents": 0, "tokens": 0, "bytes": 0, "rows": 0, "max_token_id": 0}
        self.digest = hashlib.sha256()

    def add(self, ids: np.ndarray, num_bytes: int) -> None:
        """Append one document. ids: int64 [tokens], its end-of-text id included; num_bytes: of its text."""
        largest = int(ids.max())
        if largest >= self.vocab_size or int(ids.min()) < 0:
            raise UserError(f"the tokenizer gave id {largest}, beyond its vocabulary of {self.vocab_size}")
        self.counts["max_token_id"] = max(self.counts["max_token_id"], largest)
        self.counts["documents"] += 1
        self.counts["tokens"] += len(ids)
        self.counts["bytes"] += num_bytes
        self.pending.append(ids.astype(self.dtype))
        self.num_pending += len(ids)
        if self.num_pending >= BATCH_TOKENS:
            self._flush()

    def _flush(self) -> None:
        stream = np.concatenate(self.pending) if self.pending else np.empty(0, self.dtype)
        num_rows = max(0, len(stream) - 1) // self.block_size
        if num_rows:
            windows = np.lib.stride_tricks.sliding_window_view(stream, self.block_size + 1)
            rows = np.ascontiguousarray(windows[:: self.block_size][:num_rows])
            self.digest.update(rows.data)
            column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), self.block_size + 1)
            self.arrow.write_batch(pa.record_batch([column], schema=self.features.arrow_schema))
            self.counts["rows"] += num_rows
        self.pending = [stream[num_rows * self.block_size :]]  # begins with the last token written
        self.num_pending = len(self.pending[0])

    def close(self) -> dict:
        """Write what is left and the files `datasets` wants. Returns the split's part of the metadata."""
        self._flush()
        self.arrow.close()
        self.file.close()
        info = datasets.DatasetInfo(features=self.features)
        info.write_to_directory(str(self.directory))
        sha256 = self.digest.hexdigest()
        state = {
            "_data_files": [{"filename": self.path.name}],
            "_fingerprint": sha256[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": self.split,
        }
        (self.directory / "state.json").write_text(json.dumps(state, indent=2))
        return {**self.counts, "rows_sha256": sha256, "file_bytes": {self.path.name: self.path.stat().st_size}}


def write_packed_dataset(
    directory: Path,
    encoded: Iterable[tuple[str, int, np.ndarray]],
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    source: dict,
    fingerprint: str,
) -> dict:
    """Write a whole dataset beside its final name and rename it when complete. Returns its metadata.

    encoded: (split, bytes, ids) as from `encode_documents`. Raises `UserError`, leaving nothing behind, if a split
    does not fill one row.
    """
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        writers = {split: SplitWriter(partial, split, block_size, len(tokenizer)) for split in SPLITS}
        for split, num_bytes, ids in encoded:
            writers[split].add(ids, num_bytes)
        counts = {split: writer.close() for split, writer in writers.items()}
        _check_counts(counts, block_size)
        (partial / "dataset_dict.json").write_text(json.dumps({"splits": list(SPLITS)}))
        save_tokenizer(tokenizer, partial / "tokenizer", block_size)
        metadata = {
            "format_version": FORMAT_VERSION,
            "block_size": block_size,
            "vocab_size": len(tokenizer),
            "eos_token_id": tokenizer.eos_token_id,
            "tokenizer_sha256": tokenizer_sha256(tokenizer),
            "content_sha256": hashlib.sha256("".join(counts[s]["rows_sha256"] for s in SPLITS).encode()).hexdigest(),
            "source": source,
            "fingerprint": fingerprint,
            "splits": counts,
        }
        (partial / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        if directory.exists():  # an older dataset to replace, or an empty folder
            replaced = partial.with_name(partial.name.replace("partial", "replaced"))
            os.rename(directory, replaced)
            os.rename(partial, directory)
            shutil.rmtree(replaced)
        else:
            os.rename(partial, directory)
    except OSError as error:
        raise UserError(f"cannot write the dataset {directory}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return metadata


def _check_counts(counts: dict[str, dict], block_size: int) -> None:
    if not any(counts[split]["documents"] for split in SPLITS):
        raise UserError("the text is empty: it holds no document with any character")
    for split in SPLITS:
        if counts[split]["rows"] == 0:
            remedy = (
                "; or pass a --validation_file or a larger --validation_split_percentage"
                if split == "validation"
                else ""
            )
            raise UserError(
                f"the {split} text has {counts[split]['tokens']} tokens, fewer than one row of "
                f"block_size + 1 = {block_size + 1}: give more text or a smaller --block_size"
                f"{remedy}"
            )


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
        if tokenizer_sha256(tokenizer) != self.metadata["tokenizer_sha256"]:
            raise UserError(
                f"{self.directory}/tokenizer is not the tokenizer this dataset was made with; "
                "prepare the dataset again"
            )
        return tokenizer


class PackedSplit:
    """Rows of one split, memory-mapped: only the pages that are read come into memory."""

    def __init__(self, directory: Path, vocab_size: int) -> None:
        self.directory, self.vocab_size = directory, vocab_size
        # One zero-copy view [rows, block_size + 1] for each record batch, and where each one starts.
        self.chunks = [
            chunk.flatten().to_numpy().reshape(len(chunk), -1)
            for chunk in datasets.load_from_disk(str(directory)).data.column("input_ids").chunks
        ]
        self.starts = np.cumsum([0, *map(len, self.chunks)])

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
        if rows.max() >= self.vocab_size or rows.min() < 0:
            raise UserError(
                f"{self.directory} holds token id {rows.max()}, beyond its vocabulary of "
                f"{self.vocab_size}; prepare it again"
            )
        return rows.astype(np.int64)


def open_packed_dataset(directory: Path, block_size: int | None = None) -> PackedDataset:
    """Open a dataset if it is complete and what the run asks for. Raises `UserError` saying what is wrong."""
    again = "make it with scripts/prepare_data.py"
    if not directory.is_dir():
        raise UserError(f"there is no dataset {directory}; {again}")
    try:
        metadata = json.loads((directory / "metadata.json").read_text())
        if metadata["format_version"] != FORMAT_VERSION:
            raise UserError(f"{directory} has format {metadata['format_version']}, not {FORMAT_VERSION}; {again}")
        for split in SPLITS:
            for name, size in metadata["splits"][split]["file_bytes"].items():
                found = (directory / split / name).stat().st_size
                if found != size:
                    raise UserError(f"{directory}/{split}/{name} has {found} bytes instead of {size}; {again}")
        splits = {name: PackedSplit(directory / name, metadata["vocab_size"]) for name in SPLITS}
        for name, split in splits.items():
            expected = (metadata["splits"][name]["rows"], metadata["block_size"] + 1)
            if (len(split), split.chunks[0].shape[1]) != expected:
                raise UserError(
                    f"{directory}/{name} has not the {expected[0]} rows of {expected[1]} ids that its "
                    f"metadata says; {again}"
                )
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(
            f"{directory} is not a complete packed dataset: {Path(str(error.filename or error)).name} "
            f"is missing; {again}"
        ) from error
    except Exception as error:  # damaged JSON or Arrow: json, pyarrow and datasets each raise their own
        raise UserError(f"{directory} is not a complete packed dataset: {str(error)[:200]}; {again}") from error
    if block_size is not None and metadata["block_size"] != block_size:
        raise UserError(
            f"{directory} has block_size {metadata['block_size']}, the run asks for {block_size}; "
            f"pass --block_size {metadata['block_size']} or prepare it with {block_size}"
        )
    for split in splits.values():  # a first look over the split; each batch is checked again as it is read
        split[np.unique(np.linspace(0, len(split) - 1, SAMPLED_ROWS).astype(np.int64))]
    return PackedDataset(directory, metadata, splits)
