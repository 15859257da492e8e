"""Tokenize a text into windows of rows, without end, in one process for all training processes of a machine.

`recipe/data/streaming.py` starts this program and maps its windows. They are files on a local disk, because a
container's /dev/shm may hold 64 MB only; what is read soon after it was written is still in memory.

    FOLDER/7.npy, 7.json   window 7: its rows, and where to resume reading the text to get it again
    FOLDER/readers.npy     of each training process: the first window that it still needs, the last that it asked for
    FOLDER/error           the reason why no other window follows; blank until then
"""

import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recipe.data.encoder import encode_pieces
from recipe.data.packed import pack_rows
from recipe.data.prepare import open_pieces
from recipe.data.text import TextSource
from recipe.data.tokenizer import read_tokenizer
from recipe.errors import HANDLED_SIGNALS, ProcessError, UserError

WINDOWS_AHEAD = 2  # of the last one that a training process asked for
ERROR_BYTES = 4096  # allocated at the start: the disk may be full when the error occurs
POLL_SECONDS = 0.02


class Position(NamedTuple):
    """Where to resume reading the stream: after this many tokens, at a piece of the training text.

    place: what the source skips to first, a JSON value; the pieces are counted from there. Checkpoints that are older
    than places lack it.
    """

    piece: int = 0
    token: int = 0
    place: Any = None


@dataclass(frozen=True)
class TextWindows:
    """The windows of a text that repeats without end: (number, rows [num_rows, block_size + 1], `Position`).

    Rows have the vocabulary's `id_dtype`. The first window is the first that begins at or after `start`; a window can
    be read again from its position.
    """

    source: TextSource
    tokenizer_dir: str
    block_size: int
    num_rows: int
    start: Position
    num_threads: int

    def __iter__(self) -> Iterator[tuple[int, np.ndarray, Position]]:
        tokenizer = read_tokenizer(self.tokenizer_dir)
        window_tokens = self.num_rows * self.block_size
        window = -(-self.start.token // window_tokens)
        position = self.start
        marks = [position]  # the start of each batch of pieces, from the last one at or before the window
        ids, ids_start = [], position.token
        while True:
            encode, _, pieces = open_pieces(self.source, tokenizer, start=position.place)
            pieces = (piece for piece in pieces if piece.split == "train")
            pieces = itertools.islice(pieces, position.piece, None)
            for num_pieces, place, batch in encode_pieces(encode, pieces, self.num_threads):
                ids += [encoded.ids for encoded in batch]
                piece, token, before = position
                token += sum(len(encoded.ids) for encoded in batch)
                position = Position(piece + num_pieces, token, before) if place is None else Position(0, token, place)
                marks.append(position)
                while token > (window + 1) * window_tokens:
                    first = window * window_tokens
                    stream = np.concatenate(ids)[first - ids_start :]
                    marks = [mark for mark, after in itertools.pairwise(marks) if after.token > first] + marks[-1:]
                    yield window, pack_rows(stream[: window_tokens + 1], self.block_size), marks[0]
                    window += 1
                    ids, ids_start = [stream[window_tokens:].copy()], first + window_tokens
            position = marks[-1] = Position(token=position.token)  # start over at the first document


def create_folder(num_processes: int) -> Path:
    """Create the folder that `publish` and its readers share. Until a process is a reader, it needs no window."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="gpt2-recipe-stream-"))
        np.save(folder / "readers.npy", np.full((num_processes, 2), (np.iinfo(np.int64).max, -1)))
        (folder / "error").write_bytes(b" " * ERROR_BYTES)
    except OSError as error:
        raise no_space("a temporary folder", error) from error
    return folder


def start_tokenizing(windows: TextWindows, folder: Path) -> subprocess.Popen:
    """Start this program. It ends when its standard input is closed, or when the caller is gone for whatever reason.

    It has a session of its own, so that a signal that kills the caller's group lets it remove the folder. It does not
    import the main module, and thus torch, as a spawned process of multiprocessing would.
    """
    command = [sys.executable, "-m", "recipe.data.windows", str(folder)]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # no module in the working directory hides another
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True, start_new_session=True)
    process.stdin.write(json.dumps(dataclasses.asdict(windows)) + "\n")
    process.stdin.flush()
    return process


def publish(windows: TextWindows, folder: Path, writing: threading.Lock) -> None:
    """Write windows to files, at most `WINDOWS_AHEAD`, and remove those that no reader needs any more.

    The limit counts from the reader that is furthest ahead: the others may need its windows before they use their own
    up, since the last micro-batches of a large step may lie windows after the first.
    """
    readers = np.load(folder / "readers.npy", mmap_mode="r")
    for number, rows, position in windows:
        while number > readers[:, 1].max() + WINDOWS_AHEAD:
            time.sleep(POLL_SECONDS)
        with writing:
            for path in folder.glob("[0-9]*"):
                if int(path.stem) < readers[:, 0].min():
                    path.unlink()
            try:
                (folder / f"{number}.json").write_text(json.dumps(position))
                with open(folder / "partial", "wb") as file:  # np.save's errors do not say that the disk is full
                    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(rows))
                    file.write(rows.data)
                os.rename(folder / "partial", folder / f"{number}.npy")  # it appears when it is complete
            except OSError as error:
                (folder / "partial").unlink(missing_ok=True)  # others report the error on the same disk
                raise no_space(folder, error) from error


def no_space(folder: str | Path, error: OSError) -> ProcessError:
    remedy = "set TMPDIR to a folder with more space on a local disk, or pass a smaller --shuffle_buffer_size"
    return ProcessError(f"cannot write token ids to {folder}: {error.strerror or error}; {remedy}")


def main() -> None:
    """Publish windows in the folder that is the argument until standard input ends, and remove it.

    Standard input begins with a line of JSON, the fields of `TextWindows`.
    """
    for number in (*HANDLED_SIGNALS, signal.SIGUSR2):  # a run that is told to stop needs data for its last step
        signal.signal(number, signal.SIG_IGN)
    folder, writing = Path(sys.argv[1]), threading.Lock()
    fields = json.loads(sys.stdin.readline())

    def end_with_the_run() -> None:
        sys.stdin.read()
        writing.acquire()  # forever: no file may appear in the folder while it is removed
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    watch = threading.Thread(target=end_with_the_run, daemon=True)
    watch.start()
    try:
        source, start = TextSource(**fields.pop("source")), Position(*fields.pop("start"))
        publish(TextWindows(source=source, start=start, **fields), folder, writing)
    except UserError as error:
        with open(folder / "error", "r+b") as file:
            file.write(str(error).encode()[:ERROR_BYTES])
    watch.join()


if __name__ == "__main__":
    main()
