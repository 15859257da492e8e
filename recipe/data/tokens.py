"""Token ids that other programs have packed, in .bin files: nanoGPT's, and the shards of llm.c and modded-nanogpt.

nanoGPT writes uint16 ids and nothing else. A shard begins with 256 int32: 20240520, version 1, the number of ids, and
zeros; its ids are uint16, too.
"""

import os
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy as np

from recipe.errors import UserError

HEADER, MAGIC, VERSION = 256, 20240520, 1  # number of int32 values, and the first two
CHUNK = 2**22  # ids read at a time
ID_BYTES = 2


class TokenStream(NamedTuple):
    """A stretch of ids, uint16 [tokens], in which the documents already have their end-of-text ids."""

    ids: np.ndarray


def find_tokens(path: str) -> tuple[int, int]:
    """Return where the ids of a file begin and end, in bytes. Raises `UserError` if it holds something else."""
    size = os.path.getsize(path)
    header = np.fromfile(path, "<i4", HEADER)
    has_header = len(header) == HEADER and not header[3:].any()
    if not has_header:
        if size % ID_BYTES:
            raise UserError(f"{path} has {size:,} bytes, an odd number, so it does not hold token ids of 16 bits")
        halves = np.fromfile(path, "<u2", CHUNK)
        if len(halves) > 2 and halves[::2].any() and not halves[1::2].any():
            raise UserError(f"{path} seems to hold token ids of 32 or 64 bits; write them as uint16")
        return 0, size
    magic, version, count = header[:3].tolist()
    if (magic, version) != (MAGIC, VERSION):
        expected = f"expected {MAGIC} and {VERSION}, as GPT-2's shards of llm.c and modded-nanogpt have"
        raise UserError(f"{path} begins with magic number {magic} and version {version}; {expected}")
    if size != (stop := header.nbytes + ID_BYTES * count):
        raise UserError(f"{path} should hold {count:,} token ids in {stop:,} bytes, but has {size:,}; get it again")
    return header.nbytes, stop


def read_tokens(file: BinaryIO, start: int, stop: int) -> Iterator[TokenStream]:
    """Yield the ids from one byte to another."""
    file.seek(start)
    for position in range(start, stop, ID_BYTES * CHUNK):
        data = file.read(min(stop - position, ID_BYTES * CHUNK))
        yield TokenStream(np.frombuffer(data, "<u2"))
