"""Tokenize units of text, in processes of their own: unit -> a file of token ids for each split.

A process imports neither torch nor transformers and serves one unit after another. It is started as
`python -m recipe.data.pack` and reads pickles: a `Job`, then (number, unit, encoder) for each unit; it answers each
with the unit's summary or an error. It ends when its input ends, so it never outlives its owner.
"""

import contextlib
import hashlib
import json
import os
import pickle
import queue
import secrets
import shutil
import signal
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen
from typing import IO, TYPE_CHECKING

import numpy as np

from recipe.config import SPLITS
from recipe.data.cut import Unit
from recipe.data.encode import Encode, build_encoder, encode_documents
from recipe.data.read import Report, read_unit
from recipe.data.source import TextSource
from recipe.data.tokenizer import added_ids, count_ids, count_token_bytes, end_of_text, special_tokens, unknown_id
from recipe.data.tokens import id_type_of
from recipe.errors import LostProcessError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BATCH_CHARACTERS = 1_000_000  # packed at a time
MIN_BLOCKS = 8  # rows of token ids; fewer may have the same length by chance
ROWS_AT_A_TIME = 1000


@dataclass(frozen=True)
class Encoding:
    """What tokenizing needs from a tokenizer, without transformers."""

    tokenizer_json: str
    vocab_size: int
    end: int  # the id after each document
    prefix: list[int]  # the ids in front of each document
    special: dict[int, str]  # the tokens that stand for no text, by id
    unknown: int | None  # the id for text that the tokenizer cannot spell
    token_bytes: np.ndarray | None  # the bytes of text of each id; None if ids do not say how long their text was

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerFast") -> "Encoding":
        return cls(
            tokenizer_json=tokenizer.backend_tokenizer.to_str(),
            vocab_size=count_ids(tokenizer),
            end=end_of_text(tokenizer),
            prefix=added_ids(tokenizer)[0],
            special=special_tokens(tokenizer),
            unknown=unknown_id(tokenizer),
            token_bytes=count_token_bytes(tokenizer),
        )

    def check(self, ids: np.ndarray) -> None:
        """Raise `UserError` for an id that the tokenizer does not have: as uint16, 70000 would become 4464."""
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            bad = ids.min() if ids.min() < 0 else ids.max()
            problem = f"the data contains token id {bad}, but the tokenizer has {self.vocab_size:,} tokens"
            raise UserError(f"{problem}; pass the tokenizer that made the data")

    def describe(
        self, counts: np.ndarray, num_bytes: int | None = None, num_documents: int | None = None
    ) -> dict[str, int | None]:
        """Return what a stream of ids holds: the counts of a split, and the tokens of unknown text.

        counts: how often each id occurs, int64 [vocabulary]. num_bytes: of the text; by default, what the ids spell.
        num_documents: by default, the ends.
        """
        if num_bytes is None and self.token_bytes is not None:
            num_bytes = int(counts @ self.token_bytes)
        num_tokens = int(counts.sum())
        num_special = int(counts[list(self.special)].sum())
        return {
            "documents": int(counts[self.end]) if num_documents is None else num_documents,
            "tokens": num_tokens,
            "text_tokens": num_tokens - num_special,
            "bytes": num_bytes,
            "unknown": 0 if self.unknown is None else int(counts[self.unknown]),
        }


@dataclass(frozen=True)
class Job:
    """What a process needs to tokenize any unit of a source."""

    source: TextSource
    folder: str  # holds SPLIT-NUMBER.bin and units/NUMBER.json
    encoding: Encoding
    splits: tuple[str, ...] = SPLITS  # those to write
    is_temporary: bool = False  # the folder is removed when its owner has ended


class Packer:
    """Writes the documents of one split to its file, and counts them and their ids."""

    def __init__(self, file: IO[bytes], encode: Encode, encoding: Encoding, parses_special: bool) -> None:
        """parses_special: a text may hold special tokens, and begin and end with them."""
        self.file = file
        self.encode = encode
        self.encoding = encoding
        self.parses_special = parses_special
        self.digest = hashlib.sha256()
        self.counts = np.zeros(encoding.vocab_size, np.int64)
        self.texts = []
        self.characters = 0
        self.num_documents = 0
        self.num_bytes = 0

    def add(self, text: str) -> None:
        """Add a document."""
        self.texts.append(text)
        self.characters += len(text)
        if self.characters >= BATCH_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        """Write the tokens of the documents that wait."""
        if not self.texts:
            return
        texts = self.texts
        self.texts = []
        self.characters = 0
        ids, lengths = encode_documents(self.encode, texts)
        self.num_bytes += sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
        if self.parses_special:  # special tokens are no text
            special = self.encoding.special
            found = ids[np.isin(ids, list(special))].tolist()
            self.num_bytes -= sum(len(special[index].encode()) for index in found)
            self.add_rows(np.split(ids, np.cumsum(lengths)[:-1]))
        else:
            self._write_documents(ids, lengths)

    def add_rows(self, rows: list[np.ndarray]) -> None:
        """Add the ids of documents, with or without what packing puts around them."""
        bare = []
        prefix = self.encoding.prefix
        for ids in rows:
            start = len(prefix) if ids[: len(prefix)].tolist() == prefix else 0
            has_end = len(ids) > start and ids[-1] == self.encoding.end
            bare.append(ids[start : len(ids) - has_end])
        if bare:
            self._write_documents(np.concatenate(bare), np.array(list(map(len, bare))))

    def _write_documents(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Write documents, whose ids follow each other, each between the prefix and an end of text."""
        ends = np.cumsum(lengths)
        prefix = self.encoding.prefix
        places = np.stack([ends - lengths] * len(prefix) + [ends], axis=1).reshape(-1)
        self.write(np.insert(ids, places, np.tile([*prefix, self.encoding.end], len(ends))))
        self.num_documents += len(ends)

    def write(self, ids: np.ndarray) -> None:
        """Write ids as they are."""
        data = ids.astype(id_type_of(self.encoding.vocab_size), copy=False)
        self.file.write(data.data)
        self.digest.update(data.data)
        self.counts += np.bincount(data, minlength=len(self.counts))

    def close(self, is_text: bool) -> dict:
        """Write what is left. Returns what the file holds, and the hash of its ids."""
        self.flush()
        num_bytes = self.num_bytes if is_text else None
        counts = self.encoding.describe(self.counts, num_bytes, self.num_documents or None)
        return {**counts, "content_sha256": self.digest.hexdigest()}


class UnitTokenizer:
    """Tokenizes units of a source."""

    def __init__(self, job: Job, encoders: dict[str, Encode] | None = None) -> None:
        """encoders: those that exist already, by their names for `build_encoder`."""
        self.job = job
        self.encoders = encoders or {}
        self.mark = secrets.token_hex(4)  # other jobs of an array write to the same folder

    def __call__(self, number: int, unit: Unit, encoder: str) -> dict:
        """Write the ids of a unit, then its summary, which marks them as complete. Returns the summary.

        encoder: a name for `build_encoder`. Raises `UserError` if the text cannot be read or the disk is full.
        """
        job = self.job
        folder = Path(job.folder)
        self.build(encoder)
        partial = {split: folder / f".{split}-{number:05d}-{self.mark}" for split in (*job.splits, "unit")}
        try:
            (folder / "units").mkdir(exist_ok=True)
            with contextlib.ExitStack() as files:
                opened = {split: files.enter_context(partial[split].open("wb")) for split in job.splits}
                summary = self._pack(unit, opened, self.encoders[encoder])
            partial["unit"].write_text(json.dumps(summary))
            for split in job.splits:
                os.replace(partial[split], folder / f"{split}-{number:05d}.bin")
            os.replace(partial["unit"], folder / "units" / f"{number:05d}.json")
        except OSError as error:
            remedy = "the finished units are kept, and the same command resumes with the others"
            raise UserError(f"cannot write token ids to {folder}: {error.strerror or error}; {remedy}") from error
        finally:
            for path in partial.values():
                path.unlink(missing_ok=True)
        return summary

    def build(self, name: str) -> None:
        """Build an encoder unless it exists. Raises `RuntimeError` or `ImportError` if it cannot be used."""
        if name not in self.encoders:
            parses_special = self.job.source.parse_special_tokens
            self.encoders[name] = build_encoder(self.job.encoding.tokenizer_json, name, parses_special)

    def _pack(self, unit: Unit, files: Mapping[str, IO[bytes]], encode: Encode) -> dict:
        job = self.job
        report = Report()
        rows = []
        kinds = set()
        are_blocks = True
        parses_special = job.source.parse_special_tokens
        packers = {split: Packer(file, encode, job.encoding, parses_special) for split, file in files.items()}

        def add_rows() -> None:
            for split, packer in packers.items():
                own = [ids for of, ids in rows if of == split]
                if are_blocks and own:
                    packer.write(np.concatenate(own))
                else:
                    packer.add_rows(own)
            rows.clear()

        for split, text in read_unit(job.source, unit, report):
            kinds.add(type(text))
            if isinstance(text, str):
                if packer := packers.get(split):
                    packer.add(text)
                continue
            job.encoding.check(text)
            if rows and len(rows[-1][1]) != len(rows[0][1]):  # only the last block may be shorter
                are_blocks = False
            rows.append((split, text.astype(id_type_of(job.encoding.vocab_size))))
            if not are_blocks and len(rows) >= ROWS_AT_A_TIME:
                add_rows()
        if len(kinds) > 1:
            raise UserError("some documents are text and some are token ids; prepare them separately")
        are_blocks = are_blocks and len(rows) >= MIN_BLOCKS and len(rows[-1][1]) <= len(rows[0][1])
        if are_blocks and not job.source.has_validation:  # neighbors are parts of one document
            limit = len(rows) - max(1, round(len(rows) * job.source.held_out_share))
            rows = [("train" if number < limit else "validation", ids) for number, (_, ids) in enumerate(rows)]
        add_rows()
        splits = {split: packer.close(is_text=kinds != {np.ndarray}) for split, packer in packers.items()}
        return {"type": id_type_of(job.encoding.vocab_size), "report": report, "splits": splits}


class UnitWorkers:
    """Processes that tokenize units, each one at a time."""

    def __init__(self, job: Job, num_workers: int) -> None:
        # Signals to the owner's group do not reach another session: a unit is finished unless the owner ends.
        environment = {**os.environ, "PYTHONSAFEPATH": "1", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "recipe.data.pack"]
        self.processes = [
            Popen(command, env=environment, start_new_session=True, stdin=PIPE, stdout=PIPE)
            for _ in range(num_workers)
        ]
        self.idle: queue.SimpleQueue = queue.SimpleQueue()
        self.threads = ThreadPoolExecutor(num_workers)
        for process in self.processes:
            self.threads.submit(self._start, process, job)

    def _start(self, process: Popen, job: Job) -> None:
        with contextlib.suppress(BrokenPipeError):  # `_run` reports it
            _send(job, process.stdin)  # takes as long as the process takes to start
        self.idle.put(process)

    def submit(self, number: int, unit: Unit, encoder: str) -> "Future[dict]":
        """Tokenize a unit as soon as a process is idle. The result is its summary."""
        return self.threads.submit(self._run, (number, unit, encoder))

    def _run(self, request: tuple[int, Unit, str]) -> dict:
        process = self.idle.get()
        answer = None
        with contextlib.suppress(BrokenPipeError, EOFError, pickle.UnpicklingError):
            _send(request, process.stdin)
            answer = pickle.load(process.stdout)
        self.idle.put(process)
        if answer is None:
            why = "its own output says why, unless it was killed, for example when the memory was full"
            raise LostProcessError(f"a process that tokenizes text has ended; {why}")
        if isinstance(answer, UserError):
            raise answer
        return answer

    def close(self) -> None:
        """End the processes, even in the middle of a unit."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


def _send(message: object, pipe: IO[bytes] | None) -> None:
    assert pipe is not None
    pickle.dump(message, pipe)
    pipe.flush()


def main() -> None:
    for name in ("SIGINT", "SIGHUP"):
        if number := getattr(signal, name, None):  # Windows has no SIGHUP
            signal.signal(number, signal.SIG_IGN)
    tokenize = UnitTokenizer(pickle.load(sys.stdin.buffer))
    with contextlib.suppress(RuntimeError, ImportError):  # the likely choice, which its owner is checking meanwhile
        tokenize.build("gigatoken")
    with contextlib.suppress(BrokenPipeError, EOFError):  # the owner has ended, perhaps in the middle of a unit
        while True:
            number, unit, encoder = pickle.load(sys.stdin.buffer)
            try:
                answer = tokenize(number, unit, encoder)
            except UserError as error:
                answer = UserError(str(error))  # without its cause, which may not be picklable
            _send(answer, sys.stdout.buffer)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it at its exit
    if tokenize.job.is_temporary:
        shutil.rmtree(tokenize.job.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
