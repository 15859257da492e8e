"""Token ids -> a packed dataset on disk: rows of each split, commits that survive a kill, shards joined.

The layout is described in recipe/data/packed.py, which reads it.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from recipe.data.documents import SPLITS
from recipe.data.packed import FORMAT_VERSION, ROWS_NAME, pack_rows
from recipe.data.tokenizer import save_tokenizer, tokenizer_sha256
from recipe.errors import UserError

COUNTS = ("documents", "tokens", "bytes", "rows", "max_token_id", "long_documents", "tokens_in_long_documents")
SHORTEST_ADVISED_ROW = 16  # tokens; nothing is learned from shorter ones
ARROW_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # of the Arrow IPC streaming format


class SplitWriter:
    """Token ids in, rows of one split on disk out, in the layout that `datasets.load_from_disk` reads.

    The Arrow stream is written message by message, so that it can be cut back to any `commit` and gone on with.
    """

    def __init__(
        self, directory: Path, split: str, block_size: int, vocab_size: int, saved: dict | None = None
    ) -> None:
        """saved: what `commit` returned; the files are cut back to it."""
        import datasets  # here, because a packed dataset is trained on without it

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
            self.batches: list[list[int]] = []  # [where its ids lie in the file, how many rows] of each record batch
            self.pending = [np.empty(0, self.dtype)]
        else:
            self.file = open(self.path, "r+b")  # noqa: SIM115
            self.file.truncate(saved["file_bytes"])
            self.file.seek(0, os.SEEK_END)
            self.counts, self.sha256, self.document_tokens = saved["counts"], saved["sha256"], saved["document_tokens"]
            self.batches = saved["batches"]
            self.pending = [np.array(saved["pending"], self.dtype)]

    def add(self, ids: np.ndarray, num_bytes: int, ends: np.ndarray) -> None:
        """Append documents or parts of them. ids: integers [tokens]; ends: positions behind their end-of-text ids."""
        self.pending.append(ids)
        lengths = np.diff(ends, prepend=-self.document_tokens)
        long_ones = lengths[lengths > self.block_size]
        self.counts["documents"] += len(ends)
        self.counts["long_documents"] += len(long_ones)
        self.counts["tokens_in_long_documents"] += int(long_ones.sum())
        self.document_tokens = len(ids) - int(ends[-1]) if len(ends) else self.document_tokens + len(ids)
        self.counts["tokens"] += len(ids)
        self.counts["bytes"] += num_bytes

    def commit(self) -> dict:
        """Write the rows that are full to disk. Returns what a later process needs to go on from here.

        Raises `UserError` for an id that is no token: as uint16, 70000 would silently become 4464.
        """
        ids = np.concatenate(self.pending)
        largest, smallest = (int(ids.max()), int(ids.min())) if len(ids) else (0, 0)
        if largest >= self.vocab_size or smallest < 0:
            wrong = largest if smallest >= 0 else smallest
            raise UserError(f"the data holds id {wrong}, beyond its vocabulary of {self.vocab_size}")
        self.counts["max_token_id"] = max(self.counts["max_token_id"], largest)
        stream = ids.astype(self.dtype)
        rows = pack_rows(stream, self.block_size)
        num_rows = len(rows)
        if num_rows:
            self.sha256 = hashlib.sha256(self.sha256.encode() + hashlib.sha256(rows.data).digest()).hexdigest()
            column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), self.block_size + 1)
            message = pa.record_batch([column], schema=self.features.arrow_schema).serialize()
            values = pa.ipc.read_record_batch(message, self.features.arrow_schema).column(0).values.buffers()[1]
            self.batches.append([self.file.tell() + values.address - message.address, num_rows])
            self.file.write(message)
            self.counts["rows"] += num_rows
        self.pending = [stream[num_rows * self.block_size :].copy()]  # begins with the last token written
        self.file.flush()
        os.fsync(self.file.fileno())
        return {
            "file_bytes": self.file.tell(),
            "counts": dict(self.counts),
            "sha256": self.sha256,
            "document_tokens": self.document_tokens,
            "batches": list(self.batches),
            "pending": self.pending[0].tolist(),
        }

    def close(self) -> dict:
        """Write the rest and the files `datasets` wants. Returns the split's part of the metadata."""
        self.commit()
        self.file.write(ARROW_END_OF_STREAM)
        self.file.close()
        import datasets

        datasets.DatasetInfo(features=self.features).write_to_directory(str(self.directory))
        write_state(self.directory, self.split, self.sha256, [self.path.name])
        batches = [[self.path.name, offset, num_rows] for offset, num_rows in self.batches]
        rows = {"block_size": self.block_size, "dtype": np.dtype(self.dtype).name, "batches": batches}
        (self.directory / ROWS_NAME).write_text(json.dumps(rows) + "\n")
        return {**self.counts, "rows_sha256": self.sha256, "file_bytes": sizes_in(self.directory)}


class PackedWriter:
    """A packed dataset in the making, in a hidden folder beside its final name; interrupted, it is gone on with.

    `pieces_done` says how many pieces of the source are in it already: those are not to be added again.
    """

    def __init__(
        self, directory: Path, identity: str, block_size: int, vocab_size: int, overwrite: bool = False
    ) -> None:
        """identity: of all that decides the content; what an interrupted run left is used only if it has the same.

        Raises `UserError` if another process is making the same dataset."""
        self.directory, self.identity, self.block_size, self.overwrite = directory, identity, block_size, overwrite
        self.partial = directory.with_name(f".{directory.name}.partial")
        self.replaced = directory.with_name(f".{directory.name}.replaced")
        directory.parent.mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(directory.with_name(f".{directory.name}.lock"), blocking=False)
        try:
            self.lock.acquire()
        except Timeout as error:
            raise UserError(
                f"another process is preparing {directory}; wait for it, or name another folder"
            ) from error
        if self.replaced.exists():  # a process was killed while it replaced the dataset
            shutil.rmtree(self.replaced) if directory.exists() else os.rename(self.replaced, directory)
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

    @property
    def num_bytes_done(self) -> int:
        """Bytes of text that are in it already."""
        return sum(writer.counts["bytes"] for writer in self.splits.values())

    def finish(
        self,
        tokenizer: PreTrainedTokenizerBase,
        source: dict,
        fingerprint: str,
        shard: tuple[int, int] = (0, 1),
        whole_sha256: str = "",
    ) -> dict:
        """Complete the dataset and give it its name. Returns its metadata.

        shard: its index and the number of them; whole_sha256: what the shards of one whole have in common.
        Raises `UserError`, leaving nothing behind, if a split does not fill one row.
        """
        counts = {split: writer.close() for split, writer in self.splits.items()}
        try:
            if shard[1] == 1:  # a shard may be without validation rows
                check_counts(counts, self.block_size, source.get("validation_split_percentage"))
        except UserError:
            self.discard()
            raise
        (self.partial / "dataset_dict.json").write_text(json.dumps({"splits": list(SPLITS)}))
        save_tokenizer(tokenizer, self.partial / "tokenizer", self.block_size)
        metadata = {
            "format_version": FORMAT_VERSION,
            "block_size": self.block_size,
            "vocab_size": len(tokenizer),
            "eos_token_id": tokenizer.eos_token_id,
            "tokenizer_sha256": tokenizer_sha256(tokenizer),
            "content_sha256": sha256_of(counts[split]["rows_sha256"] for split in SPLITS),
            "source": source,
            "fingerprint": fingerprint,
            "shard": list(shard),
            "whole_sha256": whole_sha256,
            "splits": counts,
        }
        (self.partial / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        if self.directory.exists():  # an older dataset to replace, or an empty folder
            if any(self.directory.iterdir()) and not self.overwrite:  # made by another process meanwhile
                raise UserError(f"another process has prepared {self.directory}; pass --overwrite to replace it")
            os.rename(self.directory, self.replaced)
        os.rename(self.partial, self.directory)
        (self.directory / "journal.json").unlink(missing_ok=True)  # up to here a kill has cost nothing
        shutil.rmtree(self.replaced, ignore_errors=True)
        self.release()
        return metadata

    def discard(self) -> None:
        """Leave nothing behind."""
        for writer in self.splits.values():
            writer.file.close()
        shutil.rmtree(self.partial, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Let another process take over what is committed; what is not is of no use to it."""
        if not self.lock.is_locked:
            return
        if not (self.partial / "journal.json").exists():
            shutil.rmtree(self.partial, ignore_errors=True)
        Path(self.lock.lock_file).unlink(missing_ok=True)  # while it is held: filelock sees that its file is gone
        self.lock.release()

    def _read_journal(self) -> dict | None:
        try:
            journal = json.loads((self.partial / "journal.json").read_text(encoding="utf-8"))
            return journal if journal["identity"] == self.identity else None
        except (OSError, ValueError, KeyError):
            return None


def sizes_in(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(directory.iterdir())}


def sha256_of(hexdigests: Iterable[str]) -> str:
    return hashlib.sha256("".join(hexdigests).encode()).hexdigest()


def write_state(directory: Path, split: str, sha256: str, files: list[str]) -> None:
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


def check_counts(counts: dict[str, dict], block_size: int, validation_split_percentage: float | None) -> None:
    """Raise `UserError` if a split has no row, naming the options that would give it one.

    validation_split_percentage: None if the validation text was given instead of held out.
    """
    documents = {split: counts[split]["documents"] for split in SPLITS}
    tokens = {split: counts[split]["tokens"] for split in SPLITS}
    held_out = validation_split_percentage is not None
    if not any(documents.values()):
        raise UserError("the text is empty: it holds no document with any character")
    if not documents["validation"] and held_out:
        reason = "there is only one document"
        if documents["train"] > 1:
            reason = (
                f"the {documents['train']:,} documents are equal, or too few for a "
                f"--validation_split_percentage of {validation_split_percentage:g}"
            )
        raise UserError(
            f"no text is held out for validation: {reason}; "
            "pass a --validation_file or, for .txt files, a --document_separator that occurs in the text"
        )
    short = [split for split in SPLITS if not counts[split]["rows"]]
    if not short:
        return
    name = {"train": "training", "validation": "validation"}[short[0]]
    if not tokens[short[0]]:
        raise UserError(f"the {name} text is empty")
    remedies = []
    largest = 2 ** ((min(tokens.values()) - 1).bit_length() - 1) if min(tokens.values()) > 1 else 0
    if largest >= SHORTEST_ADVISED_ROW:
        remedies.append(f"--block_size {largest}")
    if held_out:
        percentage = math.ceil(120 * (block_size + 1) / sum(tokens.values()))  # of a row and a fifth
        if percentage <= 50:  # so that the training text has as much
            remedies.append(f"--validation_split_percentage {percentage}")
        if short == ["validation"]:
            remedies.append(f"a --validation_file of at least {block_size + 1} tokens")
    raise UserError(
        f"the {name} text has {tokens[short[0]]:,} tokens, fewer than one row of block_size + 1 = {block_size + 1:,}; "
        f"pass {' or '.join([*remedies, 'more text'])}"
    )
