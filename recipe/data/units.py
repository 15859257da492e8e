"""Tokenize units of text, in processes of their own: unit -> a file of token ids for each split.

A process imports no torch and serves one unit after another. It is started as `python -m recipe.data.units` and reads
pickles: a `Job`, then (number, unit, encoder) for each unit; it answers each with the unit's summary or an error. It
ends when its input ends, so it never outlives its owner.
"""

import contextlib
import dataclasses
import json
import os
import pickle
import queue
import secrets
import shutil
import signal
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, Popen
from typing import IO

import numpy as np

from recipe.config import SPLITS
from recipe.data.cut import Unit
from recipe.data.encode import Encode, build_encoder, encode_documents
from recipe.data.packed import COUNTS, TokenWriter, id_dtype
from recipe.data.read import ReadReport, Text, read_unit
from recipe.data.source import TextSource
from recipe.data.tokenizer import TextTokenizer, open_tokenizer
from recipe.data.tokens import TokenStream
from recipe.errors import LostProcessError, UserError

BATCH_CHARACTERS = 1_000_000  # encoded at a time


@dataclass(frozen=True)
class Job:
    """What a process needs to tokenize any unit of a source."""

    source: TextSource
    folder: str  # holds SPLIT/NUMBER.arrow and units/NUMBER.json
    tokenizer_dir: str
    document_prefix: list[int] = field(default_factory=list)  # ids in front of each document
    splits: tuple[str, ...] = SPLITS  # those to write
    is_temporary: bool = False  # the folder is removed when its owner has ended


class Packer:
    """Writes the documents of one split to its file, and counts what they hold."""

    def __init__(
        self, writer: TokenWriter, encode: Encode, tokenizer: TextTokenizer, prefix: list[int], has_ends: bool
    ) -> None:
        """prefix: ids in front of each document. has_ends: a text may begin and end with special tokens."""
        self.writer, self.encode, self.tokenizer, self.has_ends = writer, encode, tokenizer, has_ends
        self.prefix, self.eos = prefix, tokenizer.eos_token_id
        self.texts, self.characters = [], 0
        self.counts, self.seen = dict.fromkeys((*COUNTS, "unknown", "lost"), 0), np.zeros(len(tokenizer), bool)
        self.special_bytes = np.zeros(len(tokenizer), np.int64)  # of special tokens, which are parsed from the text
        for index, token in tokenizer.backend_tokenizer.get_added_tokens_decoder().items():
            self.special_bytes[index] = len(token.content.encode()) * token.special

    def add(self, text: Text) -> None:
        """Add a document, or a stretch of a token stream."""
        if isinstance(text, TokenStream):
            self.write(text.ids, int((text.ids == self.eos).sum()))
            return
        self.texts.append(text)
        self.characters += len(text)
        if self.characters >= BATCH_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        """Write the tokens of the documents that wait, each with an end-of-text id after it."""
        if not self.texts:
            return
        rows = self.texts
        if is_text := all(isinstance(text, str) for text in self.texts):
            ids, lengths = encode_documents(self.encode, self.texts)
            spelled = self.tokenizer.token_bytes.take(ids).sum() + self.special_bytes.take(ids).sum()
            self.counts["lost"] += sum(len(text.encode()) for text in self.texts) - int(spelled)
            rows = np.split(ids, np.cumsum(lengths)[:-1]) if self.has_ends else []
        elif any(isinstance(text, str) for text in self.texts):
            raise UserError("some documents are text and some are token ids; prepare them separately")
        if self.has_ends or not is_text:
            rows = [self._without_ends(row) for row in rows]
            ids, lengths = np.concatenate(rows), np.array(list(map(len, rows)))
        ends = np.cumsum(lengths)
        places = np.stack([ends - lengths] * len(self.prefix) + [ends], axis=1).reshape(-1)
        self.write(np.insert(ids, places, np.tile([*self.prefix, self.eos], len(ends))), len(ends))
        self.texts, self.characters = [], 0

    def _without_ends(self, ids: np.ndarray) -> np.ndarray:
        """Return the ids of a document without those that `flush` adds."""
        start = len(self.prefix)
        ids = ids[start:] if ids[:start].tolist() == self.prefix else ids
        return ids[:-1] if len(ids) and ids[-1] == self.eos else ids

    def write(self, ids: np.ndarray, num_documents: int) -> None:
        """Write the final ids of documents. Raises `UserError` for an id that the tokenizer does not have."""
        size, unknown = len(self.tokenizer), self.tokenizer.unknown_id
        if len(ids) and not 0 <= ids.min() <= ids.max() < size:  # as uint16, 70000 would silently become 4464
            bad = ids.min() if ids.min() < 0 else ids.max()
            problem = f"the data contains token id {bad}, but the tokenizer has {size:,} tokens"
            raise UserError(f"{problem}; pass the tokenizer that made the data")
        ids = ids.astype(id_dtype(size), copy=False)
        self.seen[ids[~self.seen.take(ids)]] = True  # few ids are new, and take is faster than an assignment
        self.counts["documents"] += num_documents
        self.counts["tokens"] += len(ids)
        self.counts["bytes"] += int(self.tokenizer.token_bytes.take(ids).sum())
        self.counts["unknown"] += 0 if unknown is None else int((ids == unknown).sum())
        self.writer.write(ids)


class UnitTokenizer:
    """Tokenizes units of a source."""

    def __init__(self, job: Job) -> None:
        self.job, self.tokenizer = job, open_tokenizer(Path(job.tokenizer_dir))
        self.mark = secrets.token_hex(4)  # other jobs of an array write to the same folder
        parse = job.source.parse_special_tokens
        self.encoders = {"tokenizers": build_encoder(self.tokenizer, "tokenizers", parse)}
        with contextlib.suppress(RuntimeError, ImportError):  # `choose_encoder` reports it
            self.encoders["gigatoken"] = build_encoder(self.tokenizer, "gigatoken", parse)

    def __call__(self, number: int, unit: Unit, encoder: str) -> dict:
        """Write the ids of a unit, then its summary, which marks them as complete. Returns the summary.

        Raises `UserError` if the text cannot be read or the disk is full.
        """
        folder, partial = Path(self.job.folder), f".{number:05d}-{self.mark}"
        try:
            summary = self._write(number, unit, partial, self.encoders[encoder])
            (folder / "units").mkdir(exist_ok=True)
            (folder / "units" / partial).write_text(json.dumps(summary))
            os.replace(folder / "units" / partial, folder / "units" / f"{number:05d}.json")
        except OSError as error:
            remedy = "the finished units are kept, and the same command resumes with the others"
            raise UserError(f"cannot write token ids to {folder}: {error.strerror or error}; {remedy}") from error
        finally:
            for name in (*self.job.splits, "units"):
                (folder / name / partial).unlink(missing_ok=True)
        return summary

    def _write(self, number: int, unit: Unit, partial: str, encode: Encode) -> dict:
        job, report, name = self.job, ReadReport(), f"{number:05d}.arrow"
        writers = {split: TokenWriter(Path(job.folder, split, partial), len(self.tokenizer)) for split in job.splits}
        tools = encode, self.tokenizer, job.document_prefix, job.source.parse_special_tokens
        packers = {split: Packer(writer, *tools) for split, writer in writers.items()}
        for document in read_unit(job.source, unit, report):
            if packer := packers.get(document.split):
                packer.add(document.text)
        summary = {"report": dataclasses.asdict(report), "splits": {}}
        for split, packer in packers.items():
            packer.flush()
            writer = writers[split]
            writer.close()
            summary["splits"][split] = {
                **packer.counts,
                "file_bytes": {name: writer.path.stat().st_size},
                "content_sha256": writer.digest.hexdigest(),
                "chunks": [[name, *chunk] for chunk in writer.chunks],
                "seen": np.packbits(packer.seen).tobytes().hex(),
            }
            os.replace(writer.path, writer.path.with_name(name))
        return summary


class UnitWorkers:
    """Processes that tokenize units, each one at a time."""

    def __init__(self, job: Job, num_workers: int) -> None:
        # Signals to the owner's group do not reach another session: a unit is finished unless the owner ends.
        environment = {**os.environ, "PYTHONSAFEPATH": "1", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "recipe.data.units"]
        self.processes = [
            Popen(command, env=environment, start_new_session=True, stdin=PIPE, stdout=PIPE)
            for _ in range(num_workers)
        ]
        self.idle: queue.SimpleQueue = queue.SimpleQueue()
        for process in self.processes:
            assert process.stdin is not None  # it is a pipe
            _send(job, process.stdin)
            self.idle.put(process)
        self.threads = ThreadPoolExecutor(num_workers)

    def submit(self, number: int, unit: Unit, encoder: str) -> "Future[dict]":
        """Tokenize a unit as soon as a process is idle. The result is its summary."""
        return self.threads.submit(self._run, (number, unit, encoder))

    def _run(self, request: tuple[int, Unit, str]) -> dict:
        process, answer = self.idle.get(), None
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


def _send(message: object, pipe: IO[bytes]) -> None:
    pickle.dump(message, pipe)
    pipe.flush()


def main() -> None:
    for name in ("SIGINT", "SIGHUP"):
        if number := getattr(signal, name, None):  # Windows has no SIGHUP
            signal.signal(number, signal.SIG_IGN)
    tokenize = UnitTokenizer(pickle.load(sys.stdin.buffer))
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
