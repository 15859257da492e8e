"""Token ids that other programs have packed, in .bin files: nanoGPT's, and the shards of llm.c and modded-nanogpt.

nanoGPT writes uint16 ids and nothing else; for vocabularies above 65,536, programs write uint32. A shard begins with
256 int32: 20240520, version 1, the number of ids, and zeros; its ids are uint16. Such files are used in place: a
packed dataset names them, with their size, time and hash (recipe/data/packed.py).
"""

import os
from typing import Any, NamedTuple

import numpy as np

from recipe.data.files import digest_files
from recipe.errors import UserError

HEADER, MAGIC, VERSION = 256, 20240520, 1  # number of int32 values, and the first two
CHUNK = 2**22  # ids read at a time


class Scan(NamedTuple):
    """A file of token ids: where they are, and how often each occurs in its training and its validation part.

    counts: two of int64 [vocabulary]. beyond: the largest id if the vocabulary does not have it. digest: as of
    `digest_file`.
    """

    start: int  # byte of the first id
    type: str  # of an id, for numpy
    sizes: tuple[int, int]  # number of ids in each part
    counts: tuple[np.ndarray, np.ndarray]
    beyond: int | None
    head: np.ndarray  # the first ids
    digest: str


def find_tokens(path: str, vocab_size: int) -> tuple[int, int, str]:
    """Return the byte at which the ids of a file begin, their number, and their type.

    Raises `UserError` if the file holds something else than the ids of such a vocabulary.
    """
    size, id_type = os.path.getsize(path), id_type_of(vocab_size)
    header = np.fromfile(path, "<i4", HEADER)
    if len(header) == HEADER and not header[3:].any():
        magic, version, count = header[:3].tolist()
        if (magic, version) != (MAGIC, VERSION):
            expected = f"expected {MAGIC} and {VERSION}, as GPT-2's shards of llm.c and modded-nanogpt have"
            raise UserError(f"{path} begins with magic number {magic} and version {version}; {expected}")
        if size != (stop := header.nbytes + 2 * count):
            raise UserError(
                f"{path} should hold {count:,} token ids in {stop:,} bytes, but has {size:,}; get it again"
            )
        return header.nbytes, count, "uint16"
    id_bytes = np.dtype(id_type).itemsize
    if size % id_bytes:
        what = f"not a multiple of {id_bytes}, so it does not hold token ids of {8 * id_bytes} bits"
        raise UserError(f"{path} has {size:,} bytes, {what}")
    ids = np.fromfile(path, id_type, CHUNK)
    if len(ids) > 2 and ids[::2].any() and not ids[1::2].any():
        problem = f"seems to hold token ids of {16 * id_bytes} bits or more"
        raise UserError(f"{path} {problem}; with this tokenizer, write them as {id_type}")
    return 0, size // id_bytes, id_type


def id_type_of(vocab_size: int) -> str:
    """Return the type in which a dataset holds token ids."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def scan_tokens(path: str, vocab_size: int, held_out_share: float) -> Scan:
    """Read a file of token ids once. Its last ids are the validation part. Raises `UserError` as `find_tokens`."""
    import xxhash  # not at the top, because training on a packed dataset does not need it

    start, count, id_type = find_tokens(path, vocab_size)
    limit = count - round(count * held_out_share)
    counts = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64)
    digest, largest, position, head = xxhash.xxh3_128(), 0, 0, np.empty(0, id_type)
    with open(path, "rb") as file:
        digest.update(file.read(start))
        while len(ids := np.fromfile(file, id_type, CHUNK)):
            digest.update(ids.data)
            head = ids[:1000] if position == 0 else head
            largest = max(largest, int(ids.max()))
            if largest >= vocab_size:  # `beyond` reports it
                ids = np.minimum(ids, vocab_size - 1)
            for part, own in enumerate(np.split(ids, [max(0, limit - position)])):
                counts[part][:] += np.bincount(own, minlength=vocab_size)
            position += len(ids)
    size = start + count * np.dtype(id_type).itemsize
    beyond = largest if largest >= vocab_size else None
    return Scan(start, id_type, (limit, count - limit), counts, beyond, head, f"{size} {digest.hexdigest()}")


def in_place(path: str, scan: Scan) -> dict[str, Any]:
    """Return how the metadata of a dataset describe a file that it uses in place."""
    status = os.stat(path)
    return {"type": scan.type, "bytes": status.st_size, "modified_ns": status.st_mtime_ns, "digest": scan.digest}


def check_in_place(path: str, described: dict[str, Any]) -> None:
    """Raise `UserError` if a file is not the one that `in_place` described. One with another time is hashed."""
    remedy = "put the file back, or prepare the dataset again"
    try:
        status = os.stat(path)
    except OSError as error:
        raise UserError(f"cannot read {path}, which this dataset uses in place: {error.strerror}; {remedy}") from error
    if status.st_size != described["bytes"]:
        raise UserError(f"{path} has {status.st_size:,} bytes instead of {described['bytes']:,}; {remedy}")
    if status.st_mtime_ns != described["modified_ns"] and digest_files([path]) != [described["digest"]]:
        raise UserError(f"{path} has changed since the dataset was prepared; {remedy}")
