"""The packed dataset on disk: token ids in rows of block_size + 1, with the metadata that says what they are.

    DIR/dataset_dict.json, DIR/train/, DIR/validation/   a datasets.DatasetDict: datasets.load_from_disk(DIR) opens it
    DIR/tokenizer/                                       the tokenizer the ids belong to
    DIR/metadata.json                                    counts, hashes, sizes; written last

Row i of a split holds tokens [i*T, i*T + T + 1) of its token stream, T = block_size: each row starts with the last
token of the row before, so that every token but the first is a target exactly once. Up to T - 1 tokens at the end of
the stream fill no row and are left out. A dataset appears under its name only when it is complete.
"""

import copy
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
from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from recipe.config import UserError
from recipe.data.tokenizer import load_tokenizer, save_tokenizer, tokenizer_sha256

FORMAT_VERSION = 1
SPLITS = ("train", "validation")
COUNTS = ("documents", "tokens", "bytes", "rows", "max_token_id", "long_documents", "tokens_in_long_documents")
METADATA = {
    "block_size": int,
    "vocab_size": int,
    "eos_token_id": int,
    "tokenizer_sha256": str,
    "content_sha256": str,
    "source": dict,
    "splits": dict,
}
ARROW_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # of the Arrow IPC streaming format
SAMPLED_ROWS = 4096  # rows of a split looked at when it is opened


class SplitWriter:
    """Token ids in, rows of one split on disk out, in the layout that `datasets.load_from_disk` reads.

    The Arrow stream is written message by message, so that it can be cut back to any `commit` and gone on with.
    """

    def __init__(
        self, directory: Path, split: str, block_size: int, vocab_size: int, saved: dict | None = None
    ) -> None:
        """saved: what `commit` returned; the files are cut back to it."""
        self.directory, self.split, self.block_size, self.vocab_size = directory / split, split, block_size, vocab_size
        self.dtype = np.uint16 if vocab_size <= 2**16 else np.int32
        column = datasets.List(datasets.Value(np.dtype(self.dtype).name), length=block_size + 1)
        self.features = datasets.Features({"input_ids": column})
        self.path = self.directory / "data-00000-of-00001.arrow"
        if saved is None:
            self.directory.mkdir(parents=True)
            self.file = open(self.path, "wb")  # noqa: SIM115 (close() closes it)
            self.file.write(self.features.arrow_schema.serialize())
            self.counts = dict.fromkeys(COUNTS, 0)
            self.document_tokens = 0  # of the document that has begun
            self.sha256 = ""
            self.pending = [np.empty(0, self.dtype)]
        else:
            self.file = open(self.path, "r+b")  # noqa: SIM115
            self.file.truncate(saved["file_bytes"])
            self.file.seek(0, os.SEEK_END)
            self.counts, self.sha256, self.document_tokens = saved["counts"], saved["sha256"], saved["document_tokens"]
            self.pending = [np.array(saved["pending"], self.dtype)]

    def add(self, ids: np.ndarray, num_bytes: int, ends: bool) -> None:
        """Append a document or a piece of one. ids: integers [tokens], with the end-of-text id where it ends."""
        if len(ids):
            largest = int(ids.max())
            if largest >= self.vocab_size or int(ids.min()) < 0:
                raise UserError(f"the tokenizer gave id {largest}, beyond its vocabulary of {self.vocab_size}")
            self.counts["max_token_id"] = max(self.counts["max_token_id"], largest)
            self.pending.append(ids.astype(self.dtype))
        self.document_tokens += len(ids)
        if ends:
            self.counts["documents"] += 1
            if self.document_tokens > self.block_size:
                self.counts["long_documents"] += 1
                self.counts["tokens_in_long_documents"] += self.document_tokens
            self.document_tokens = 0
        self.counts["tokens"] += len(ids)
        self.counts["bytes"] += num_bytes

    def commit(self) -> dict:
        """Write the rows that are full to disk. Returns what a later process needs to go on from here."""
        stream = np.concatenate(self.pending)
        num_rows = max(0, len(stream) - 1) // self.block_size
        if num_rows:
            windows = np.lib.stride_tricks.sliding_window_view(stream, self.block_size + 1)
            rows = np.ascontiguousarray(windows[:: self.block_size][:num_rows])
            self.sha256 = hashlib.sha256(self.sha256.encode() + hashlib.sha256(rows.data).digest()).hexdigest()
            column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), self.block_size + 1)
            self.file.write(pa.record_batch([column], schema=self.features.arrow_schema).serialize())
            self.counts["rows"] += num_rows
        self.pending = [stream[num_rows * self.block_size :].copy()]  # begins with the last token written
        self.file.flush()
        os.fsync(self.file.fileno())
        return {
            "file_bytes": self.file.tell(),
            "counts": dict(self.counts),
            "sha256": self.sha256,
            "document_tokens": self.document_tokens,
            "pending": self.pending[0].tolist(),
        }

    def close(self) -> dict:
        """Write the rest and the files `datasets` wants. Returns the split's part of the metadata."""
        self.commit()
        self.file.write(ARROW_END_OF_STREAM)
        self.file.close()
        datasets.DatasetInfo(features=self.features).write_to_directory(str(self.directory))
        _write_state(self.directory, self.split, self.sha256, [self.path.name])
        return {**self.counts, "rows_sha256": self.sha256, "file_bytes": {self.path.name: self.path.stat().st_size}}


class PackedWriter:
    """A packed dataset in the making, in a hidden folder beside its final name; interrupted, it is gone on with.

    `pieces_done` says how many pieces of the source are in it already: those are not to be added again.
    """

    def __init__(self, directory: Path, identity: str, block_size: int, vocab_size: int) -> None:
        """identity: of all that decides the content; what an interrupted run left is used only if it has the same.

        Raises `UserError` if another process is making the same dataset."""
        self.directory, self.identity, self.block_size = directory, identity, block_size
        self.partial = directory.with_name(f".{directory.name}.partial")
        directory.parent.mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(directory.with_name(f".{directory.name}.lock"), blocking=False)
        try:
            self.lock.acquire()
        except Timeout as error:
            raise UserError(
                f"another process is preparing {directory}; wait for it, or name another folder"
            ) from error
        journal = self._read_journal()
        if journal is None:
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir()
            journal = {"pieces_done": 0, "splits": dict.fromkeys(SPLITS)}
        self.pieces_done = journal["pieces_done"]
        self.splits = {
            split: SplitWriter(self.partial, split, block_size, vocab_size, journal["splits"][split])
            for split in SPLITS
        }

    def commit(self, pieces_done: int) -> None:
        """Make all that was added so far survive a kill."""
        content = {
            "identity": self.identity,
            "pieces_done": pieces_done,
            "splits": {split: writer.commit() for split, writer in self.splits.items()},
        }
        written = self.partial / "journal.json.new"
        with open(written, "w", encoding="utf-8") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(written, self.partial / "journal.json")

    def finish(self, tokenizer: PreTrainedTokenizerBase, source: dict, fingerprint: str) -> dict:
        """Complete the dataset and give it its name. Returns its metadata.

        Raises `UserError`, leaving nothing behind, if a split does not fill one row.
        """
        counts = {split: writer.close() for split, writer in self.splits.items()}
        try:
            _check_counts(counts, self.block_size)
        except UserError:
            self.discard()
            raise
        (self.partial / "journal.json").unlink(missing_ok=True)
        (self.partial / "dataset_dict.json").write_text(json.dumps({"splits": list(SPLITS)}))
        save_tokenizer(tokenizer, self.partial / "tokenizer", self.block_size)
        metadata = {
            "format_version": FORMAT_VERSION,
            "block_size": self.block_size,
            "vocab_size": len(tokenizer),
            "eos_token_id": tokenizer.eos_token_id,
            "tokenizer_sha256": tokenizer_sha256(tokenizer),
            "content_sha256": _sha256_of(counts[split]["rows_sha256"] for split in SPLITS),
            "source": source,
            "fingerprint": fingerprint,
            "splits": counts,
        }
        (self.partial / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        replaced = None
        if self.directory.exists():  # an older dataset to replace, or an empty folder
            replaced = self.directory.with_name(f".{self.directory.name}.replaced")
            os.rename(self.directory, replaced)
        os.rename(self.partial, self.directory)
        if replaced is not None:
            shutil.rmtree(replaced)
        self.release()
        return metadata

    def discard(self) -> None:
        """Leave nothing behind."""
        for writer in self.splits.values():
            writer.file.close()
        shutil.rmtree(self.partial, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Let another process take over what is committed."""
        self.lock.release()
        Path(self.lock.lock_file).unlink(missing_ok=True)

    def _read_journal(self) -> dict | None:
        try:
            journal = json.loads((self.partial / "journal.json").read_text(encoding="utf-8"))
            return journal if journal["identity"] == self.identity else None
        except (OSError, ValueError, KeyError):
            return None


def merge_shards(directory: Path, num_shards: int) -> dict:
    """Make one dataset of DIR-00000-of-N, ... by writing metadata alone: the rows stay where they are.

    Raises `UserError` if a shard is missing, or was not made as a part of the same whole.
    """
    if directory.exists():
        raise UserError(f"{directory} exists; name the folder that the shards' names begin with")
    shards = [open_packed_dataset(shard_dir(directory, index, num_shards)) for index in range(num_shards)]
    for shard in shards:
        for key in ("block_size", "vocab_size", "tokenizer_sha256"):
            if shard.metadata[key] != shards[0].metadata[key]:
                raise UserError(f"{shard.directory} has another {key} than {shards[0].directory}")
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    metadata = {**shards[0].metadata, "source": {"shards": [shard.directory.name for shard in shards]}, "splits": {}}
    for split in SPLITS:
        parts = [shard.metadata["splits"][split] for shard in shards]
        files = {
            f"../../{shard.directory.name}/{split}/{name}": size
            for shard, part in zip(shards, parts, strict=True)
            for name, size in part["file_bytes"].items()
        }
        merge = {key: sum for key in COUNTS} | {"max_token_id": max}
        counts = {key: how(part[key] for part in parts) for key, how in merge.items()}
        sha256 = _sha256_of(part["rows_sha256"] for part in parts)
        metadata["splits"][split] = {**counts, "rows_sha256": sha256, "file_bytes": files}
        (partial / split).mkdir(parents=True)
        shutil.copy(shards[0].directory / split / "dataset_info.json", partial / split)
        _write_state(partial / split, split, sha256, list(files))
    metadata["content_sha256"] = _sha256_of(metadata["splits"][split]["rows_sha256"] for split in SPLITS)
    metadata["fingerprint"] = _sha256_of(shard.metadata["fingerprint"] for shard in shards)
    shutil.copytree(shards[0].directory / "tokenizer", partial / "tokenizer")
    (partial / "dataset_dict.json").write_text(json.dumps({"splits": list(SPLITS)}))
    (partial / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    os.rename(partial, directory)
    return metadata


def shard_dir(directory: Path, index: int, num_shards: int) -> Path:
    """Where a shard of a dataset is prepared: beside the dataset it will be a part of."""
    return directory.with_name(f"{directory.name}-{index:05d}-of-{num_shards:05d}")


def _sha256_of(hexdigests: Iterable[str]) -> str:
    return hashlib.sha256("".join(hexdigests).encode()).hexdigest()


def _write_state(directory: Path, split: str, sha256: str, files: list[str]) -> None:
    """The file by which `datasets.load_from_disk` finds the rows of a split."""
    state = {
        "_data_files": [{"filename": name} for name in files],
        "_fingerprint": sha256[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": split,
    }
    (directory / "state.json").write_text(json.dumps(state, indent=2))


def _check_counts(counts: dict[str, dict], block_size: int) -> None:
    num_documents = sum(counts[split]["documents"] for split in SPLITS)
    if num_documents == 0:
        raise UserError("the text is empty: it holds no document with any character")
    if counts["validation"]["documents"] == 0:
        raise UserError(
            f"the text is one document, or {num_documents} equal ones, and none can be held out: "
            "pass a --validation_file"
        )
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
        same = tokenizer_sha256(tokenizer) == self.metadata["tokenizer_sha256"]
        if not same or len(tokenizer) != self.vocab_size:
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
        self.block_size = self.chunks[0].shape[1] - 1

    def stream(self) -> np.ndarray:
        """All tokens in order, without the overlap of the rows: uint16 or int32 [rows * block_size + 1]."""
        return np.concatenate([*(chunk[:, :-1].reshape(-1) for chunk in self.chunks), self.chunks[-1][-1, -1:]])

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


def open_packed_dataset(directory: Path, block_size: int | None = None) -> PackedDataset:
    """Open a dataset if it is complete and what the run asks for. Raises `UserError` saying what is wrong."""
    again = "make it (again) with scripts/prepare_data.py --overwrite"
    if not directory.is_dir():
        raise UserError(f"there is no dataset {directory}; {again}")
    try:
        metadata = json.loads((directory / "metadata.json").read_text())
        if metadata["format_version"] != FORMAT_VERSION:
            raise UserError(f"{directory} has format {metadata['format_version']}, not {FORMAT_VERSION}; {again}")
        for key, kind in METADATA.items():
            if not isinstance(metadata[key], kind):
                raise UserError(f"{directory}/metadata.json: {key} is {metadata[key]!r}; {again}")
        for split in SPLITS:
            if min(metadata["splits"][split][key] for key in ("rows", "tokens", "bytes")) < 1:
                raise UserError(f"{directory}/metadata.json says that {split} is empty; {again}")
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
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise UserError(f"{directory} is not a complete packed dataset ({reason}); {again}") from error
    if block_size is not None and metadata["block_size"] != block_size:
        raise UserError(
            f"{directory} has block_size {metadata['block_size']}, the run asks for {block_size}; "
            f"pass --block_size {metadata['block_size']} or prepare it with {block_size}"
        )
    for split in splits.values():  # a first look over the split; each batch is checked again as it is read
        split[np.unique(np.linspace(0, len(split) - 1, SAMPLED_ROWS).astype(np.int64))]
    return PackedDataset(directory, metadata, splits)
