"""Token ids that other programs have packed, in .bin files: nanoGPT's, and the shards of llm.c and modded-nanogpt.

nanoGPT writes uint16 ids and nothing else; for vocabularies above 65,536, programs write uint32. A shard begins with
256 int32: 20240520, version 1, the number of ids, and zeros; its ids are uint16. Such files are used in place: a
packed dataset names them, with their size, time and hash (recipe/data/packed.py).
"""

import os
from typing import Any

import numpy as np

from recipe.data.files import digest_files
from recipe.errors import UserError

HEADER = 256  # number of int32 values; the first two:
MAGIC = 20240520
VERSION = 1
CHUNK = 2**22  # ids read at a time


def find_tokens(path: str, vocab_size: int) -> tuple[int, int, str]:
    """Return the byte at which the ids of a file begin, their number, and their type.

    Raises `UserError` if the file holds something other than the ids of such a vocabulary.
    """
    size = os.path.getsize(path)
    id_type = id_type_of(vocab_size)
    header = np.fromfile(path, "<i4", HEADER)
    if len(header) == HEADER and not header[3:].any():
        magic, version, count = header[:3].tolist()
        if (magic, version) != (MAGIC, VERSION):
            expected = f"expected {MAGIC} and {VERSION}, as GPT-2's shards of llm.c and modded-nanogpt have"
            raise UserError(f"{path} begins with magic number {magic} and version {version}; {expected}")
        stop = header.nbytes + 2 * count
        if size != stop:
            expected = f"{count:,} token ids in {stop:,} bytes"
            raise UserError(f"{path} should hold {expected}, but has {size:,}; get it again")
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


def read_token_file(path: str, vocab_size: int, held_out_share: float) -> dict[str, Any]:
    """Hash and count the ids of a file in one pass. Its last ids are the validation part.

    Returns how the metadata of a dataset describes a file that it uses in place, the byte at which the ids start, and
    the `counts` of both parts: how often each id occurs, int64 [vocabulary + 1], the last for all ids beyond. Raises
    `UserError` as `find_tokens` does, and if the file cannot be read.
    """
    import xxhash  # not at the top, because training on a packed dataset does not need it

    try:
        status = os.stat(path)
        start, count, id_type = find_tokens(path, vocab_size)
        left = count - round(count * held_out_share)
        digest = xxhash.xxh3_128()
        counts = np.zeros((2, vocab_size + 1), np.int64)
        with open(path, "rb") as file:
            digest.update(file.read(start))
            while len(ids := np.fromfile(file, id_type, CHUNK)):
                digest.update(ids.data)
                if ids.max() > vocab_size:
                    ids = np.minimum(ids, vocab_size)
                parts = np.split(ids, [max(0, left)])
                counts += [np.bincount(part, minlength=vocab_size + 1) for part in parts]
                left -= len(ids)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    return {
        "type": id_type,
        "bytes": status.st_size,
        "modified_ns": status.st_mtime_ns,
        "digest": f"{status.st_size} {digest.hexdigest()}",  # size and hash, as of a text file
        "start": start,
        "counts": counts,
    }


def check_in_place(path: str, described: dict[str, Any]) -> None:
    """Raise `UserError` if a file is not the one that was described. One with another time is hashed."""
    remedy = "put the file back, or prepare the dataset again with --overwrite"
    try:
        status = os.stat(path)
    except OSError as error:
        raise UserError(f"cannot read {path}, which this dataset uses in place: {error.strerror}; {remedy}") from error
    if status.st_size != described["bytes"]:
        raise UserError(f"{path} has {status.st_size:,} bytes instead of {described['bytes']:,}; {remedy}")
    if status.st_mtime_ns != described["modified_ns"] and digest_files([path]) != [described["digest"]]:
        raise UserError(f"{path} has changed since the dataset was prepared; {remedy}")
