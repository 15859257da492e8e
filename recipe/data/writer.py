"""Write token ids as a packed dataset on disk, with commits that survive a kill.

recipe/data/packed.py describes the files and reads them.
"""

import contextlib
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

from recipe.data.documents import SPLITS
from recipe.data.packed import FORMAT_VERSION, ROWS_NAME, id_dtype, pack_rows
from recipe.data.tokenizer import TextTokenizer, save_tokenizer, tokenizer_sha256
from recipe.errors import UserError

COUNTS = ("documents", "tokens", "bytes", "rows", "max_token_id", "long_documents", "tokens_in_long_documents")
DATA_NAME = "data-00000-of-00001.arrow"
ARROW_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # of the Arrow IPC streaming format


class SplitWriter:
    """Writes token ids as the rows of one split, in the layout that `datasets.load_from_disk` reads.

    The Arrow stream is written message by message, so a later process can truncate it to any `commit` and resume.
    """

    def __init__(
        self, directory: Path, split: str, block_size: int, vocab_size: int, saved: dict | None = None
    ) -> None:
        """saved: what `commit` returned; the file is truncated to that state."""
        self.directory, self.split, self.block_size, self.vocab_size = directory / split, split, block_size, vocab_size
        self.dtype = id_dtype(vocab_size)
        name, width = np.dtype(self.dtype).name, block_size + 1
        # As `datasets` describes a list of fixed length, without its import, which takes a second.
        column = {"feature": {"dtype": name, "_type": "Value"}, "length": width, "_type": "List"}
        self.info = {"features": {"input_ids": column}}
        self.schema = pa.schema(
            {"input_ids": pa.list_(pa.from_numpy_dtype(self.dtype), width)},
            {"huggingface": json.dumps({"info": self.info})},
        )
        path = self.directory / DATA_NAME
        if saved is None:
            self.directory.mkdir(parents=True)
            size = path.write_bytes(self.schema.serialize())
            # batches: [offset of the ids in the file, rows] of each; document_tokens: of the document that has begun
            saved = {"sha256": "", "document_tokens": 0, "batches": [], "pending": []}
            saved |= {"file_bytes": size, "counts": dict.fromkeys(COUNTS, 0)}
        self.state, self.counts = saved, saved["counts"]
        self.pending = [np.array(saved["pending"], self.dtype)]
        self.file = open(path, "r+b")  # noqa: SIM115 (close() closes it)
        self.file.truncate(saved["file_bytes"])
        self.file.seek(0, os.SEEK_END)

    def add(self, ids: np.ndarray, num_bytes: int, ends: np.ndarray) -> None:
        """Append documents or parts of them. ids: integers [tokens]; ends: positions after their end-of-text ids."""
        self.pending.append(ids)
        begun = self.state["document_tokens"]
        lengths = np.diff(ends, prepend=-begun)
        long_ones = lengths[lengths > self.block_size]
        self.counts["documents"] += len(ends)
        self.counts["long_documents"] += len(long_ones)
        self.counts["tokens_in_long_documents"] += int(long_ones.sum())
        self.state["document_tokens"] = len(ids) - int(ends[-1]) if len(ends) else begun + len(ids)
        self.counts["tokens"] += len(ids)
        self.counts["bytes"] += num_bytes

    def commit(self) -> dict:
        """Write all complete rows to disk. Returns the state from which a later process can resume.

        Raises `UserError` for an id outside the vocabulary: as uint16, 70000 would silently become 4464.
        """
        ids = np.concatenate(self.pending)
        largest = int(ids.max(initial=0))
        if largest >= self.vocab_size:
            raise UserError(f"the data contains id {largest}, beyond its vocabulary of {self.vocab_size}")
        self.counts["max_token_id"] = max(self.counts["max_token_id"], largest)
        stream = ids.astype(self.dtype, copy=False)
        rows = pack_rows(stream, self.block_size)
        num_rows = len(rows)
        if num_rows:
            hashed = self.state["sha256"].encode() + hashlib.sha256(rows.data).digest()
            self.state["sha256"] = hashlib.sha256(hashed).hexdigest()
            values = pa.Array.from_buffers(pa.from_numpy_dtype(self.dtype), rows.size, [None, pa.py_buffer(rows)])
            column = pa.FixedSizeListArray.from_arrays(values, self.block_size + 1)
            message = pa.record_batch([column], schema=self.schema).serialize()
            written = pa.ipc.read_record_batch(message, self.schema).column(0).values.buffers()[1]
            self.state["batches"].append([self.file.tell() + written.address - message.address, num_rows])
            self.file.write(message)
            self.counts["rows"] += num_rows
        self.pending = [stream[num_rows * self.block_size :].copy()]  # starts with the last token written
        self.file.flush()
        os.fsync(self.file.fileno())
        self.state |= {"file_bytes": self.file.tell(), "pending": self.pending[0].tolist()}
        return self.state

    def close(self) -> dict:
        """Write the remaining rows and the files that `datasets` needs. Returns the metadata of the split."""
        self.commit()
        self.file.write(ARROW_END_OF_STREAM)
        self.file.close()
        (self.directory / "dataset_info.json").write_text(json.dumps(self.info))
        batches = [[DATA_NAME, offset, num_rows] for offset, num_rows in self.state["batches"]]
        layout = {"block_size": self.block_size, "dtype": np.dtype(self.dtype).name, "batches": batches}
        return {**self.counts, **write_index(self.directory, self.split, self.state["sha256"], [DATA_NAME], layout)}


def write_index(directory: Path, split: str, sha256: str, files: list[str], layout: dict) -> dict:
    """Write the files by which `datasets` and `PackedSplit` find a split's rows. Returns its hash and file sizes."""
    state: dict = {"_data_files": [{"filename": name} for name in files], "_fingerprint": sha256[:16]}
    state |= {"_format_columns": None, "_format_kwargs": {}, "_format_type": None, "_output_all_columns": False}
    state["_split"] = split
    (directory / "state.json").write_text(json.dumps(state, indent=2))
    (directory / ROWS_NAME).write_text(json.dumps(layout) + "\n")
    sizes = {path.name: path.stat().st_size for path in sorted(directory.iterdir())}
    return {"rows_sha256": sha256, "file_bytes": sizes}


class PackedWriter:
    """Writes a packed dataset to a hidden folder next to its final name, and resumes an interrupted one.

    `pieces_done` counts the pieces of the source that it holds. Raises `UserError` if another process prepares it.
    """

    def __init__(
        self, directory: Path, identity: str, block_size: int, vocab_size: int, overwrite: bool = False
    ) -> None:
        """identity: hash of everything that determines the content; an interrupted run resumes only if it is equal."""
        self.directory, self.identity, self.block_size, self.overwrite = directory, identity, block_size, overwrite
        self.partial = directory.with_name(f".{directory.name}.partial")
        self.replaced = directory.with_name(f".{directory.name}.replaced")
        directory.parent.mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(directory.with_name(f".{directory.name}.lock"), blocking=False)
        try:
            self.lock.acquire()
        except Timeout as error:
            remedy = "wait for it to end or choose another folder"
            raise UserError(f"another process is preparing {directory}; {remedy}") from error
        if self.replaced.exists():  # a process was killed while it replaced the dataset
            shutil.rmtree(self.replaced) if directory.exists() else os.rename(self.replaced, directory)
        journal = {}
        with contextlib.suppress(OSError, ValueError):
            journal = json.loads((self.partial / "journal.json").read_text(encoding="utf-8"))
        if journal.get("identity") != identity:
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir()
            journal = {"pieces_done": 0, "splits": dict.fromkeys(SPLITS)}
        self.pieces_done = journal["pieces_done"]
        saved = journal["splits"]
        self.splits = {s: SplitWriter(self.partial, s, block_size, vocab_size, saved[s]) for s in SPLITS}

    def commit(self) -> None:
        """Make everything added so far survive a kill."""
        splits = {split: writer.commit() for split, writer in self.splits.items()}
        content = {"identity": self.identity, "pieces_done": self.pieces_done, "splits": splits}
        written = self.partial / "journal.json.new"
        with open(written, "w", encoding="utf-8") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(written, self.partial / "journal.json")

    def finish(self, tokenizer: TextTokenizer, about: dict) -> dict:
        """Complete the dataset and move it to its final name. Returns its metadata.

        about: its source, fingerprint, shard (index and number of shards) and whole_sha256 (equal for all shards).
        Raises `UserError`, leaving nothing behind, if a split does not fill a row.
        """
        counts = {split: writer.close() for split, writer in self.splits.items()}
        try:
            if about["shard"][1] == 1:  # a shard may lack validation rows
                check_counts(counts, self.block_size, about["source"].get("validation_split_percentage"))
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
            **about,
            "splits": counts,
        }
        (self.partial / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        if self.directory.exists():  # an older dataset to replace, or an empty folder
            if any(self.directory.iterdir()) and not self.overwrite:  # another process created it meanwhile
                raise UserError(f"another process has prepared {self.directory}; pass --overwrite to replace it")
            os.rename(self.directory, self.replaced)
        os.rename(self.partial, self.directory)
        (self.directory / "journal.json").unlink(missing_ok=True)  # until here, a killed process can resume
        shutil.rmtree(self.replaced, ignore_errors=True)
        self.close()
        return metadata

    def discard(self) -> None:
        """Remove everything written."""
        for writer in self.splits.values():
            writer.file.close()
        shutil.rmtree(self.partial, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Release the lock, so another process can resume from the last commit, and remove what cannot be resumed."""
        if not self.lock.is_locked:
            return
        if not (self.partial / "journal.json").exists():
            shutil.rmtree(self.partial, ignore_errors=True)
        Path(self.lock.lock_file).unlink(missing_ok=True)  # while locked: filelock notices that its file is gone
        self.lock.release()


def sha256_of(hexdigests: Iterable[str]) -> str:
    return hashlib.sha256("".join(hexdigests).encode()).hexdigest()


def check_counts(counts: dict[str, dict], block_size: int, held_out: float | None) -> None:
    """Raise `UserError` if a split has no rows, naming the options that would provide some.

    held_out: validation_split_percentage, or None if the validation text is separate.
    """
    num_documents = counts["train"]["documents"]
    if num_documents and not counts["validation"]["documents"] and held_out:
        reason = f"the {num_documents:,} documents are identical, or there are too few to hold out {held_out:g}%"
        remedy = "pass a --validation_file or, for .txt files, a --document_separator that occurs in the text"
        if num_documents == 1:
            reason = "there is only one document"
        raise UserError(f"no text is held out for validation: {reason}; {remedy}")
    short = next((split for split in SPLITS if not counts[split]["rows"]), None)
    if short is None:
        return
    tokens, width = [counts[split]["tokens"] for split in SPLITS], block_size + 1
    remedies = []
    if min(tokens) > 16:  # a model learns nothing from shorter rows
        remedies.append(f"--block_size {2 ** ((min(tokens) - 1).bit_length() - 1)}")
    if held_out:
        percentage = math.ceil(120 * width / max(1, sum(tokens)))  # enough for 1.2 rows
        if percentage <= 50:  # more would leave the training text too short
            remedies.append(f"--validation_split_percentage {percentage}")
        remedies.append(f"a --validation_file of at least {width} tokens")
    raise UserError(
        f"the {short.replace('train', 'training')} text has {counts[short]['tokens']:,} tokens, fewer than one row of "
        f"block_size + 1 = {width:,}; pass {' or '.join([*remedies, 'more text'])}"
    )
