"""Token ids that other programs have packed, in .bin files: nanoGPT's, and the shards of llm.c and modded-nanogpt.

nanoGPT writes uint16 ids and nothing else; for vocabularies above 65,536, programs write uint32. A shard begins with
256 int32: 20240520, version 1, the number of ids, and zeros; its ids are uint16.
"""

import os
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy as np

from recipe.errors import UserError

HEADER, MAGIC, VERSION = 256, 20240520, 1  # number of int32 values, and the first two
CHUNK = 2**22  # ids read at a time


class TokenStream(NamedTuple):
    """A stretch of ids, uint16 or uint32 [tokens], in which the documents already have their end-of-text ids."""

    ids: np.ndarray


def find_tokens(path: str, id_bytes: int) -> tuple[int, int, int]:
    """Return where the ids of a file begin and end, and the size of each, in bytes.

    id_bytes: the size in a file without a header. Raises `UserError` if the file holds something else.
    """
    size = os.path.getsize(path)
    header = np.fromfile(path, "<i4", HEADER)
    has_header = len(header) == HEADER and not header[3:].any()
    if not has_header:
        if size % id_bytes:
            what = f"not a multiple of {id_bytes}, so it does not hold token ids of {8 * id_bytes} bits"
            raise UserError(f"{path} has {size:,} bytes, {what}")
        ids = np.fromfile(path, f"<u{id_bytes}", CHUNK)
        if len(ids) > 2 and ids[::2].any() and not ids[1::2].any():
            problem = f"seems to hold token ids of {16 * id_bytes} bits or more"
            raise UserError(f"{path} {problem}; with this tokenizer, write them as uint{8 * id_bytes}")
        return 0, size, id_bytes
    magic, version, count = header[:3].tolist()
    if (magic, version) != (MAGIC, VERSION):
        expected = f"expected {MAGIC} and {VERSION}, as GPT-2's shards of llm.c and modded-nanogpt have"
        raise UserError(f"{path} begins with magic number {magic} and version {version}; {expected}")
    if size != (stop := header.nbytes + 2 * count):
        raise UserError(f"{path} should hold {count:,} token ids in {stop:,} bytes, but has {size:,}; get it again")
    return header.nbytes, stop, 2


def read_tokens(file: BinaryIO, start: int, stop: int, id_bytes: int) -> Iterator[TokenStream]:
    """Yield the ids from one byte to another."""
    file.seek(start)
    for position in range(start, stop, id_bytes * CHUNK):
        data = file.read(min(stop - position, id_bytes * CHUNK))
        yield TokenStream(np.frombuffer(data, f"<u{id_bytes}"))
