"""A stream of documents, in pieces: cut token ids into documents, hold documents out, keep the head of a text."""

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from recipe.data.files import HASHED_CHARACTERS, count_utf8_bytes
from recipe.data.rows import Part, Text
from recipe.errors import UserError

SPLITS = ("train", "validation")
HEAD_ROWS = 200  # of a tokenized source; they show whether its rows hold end-of-text ids
# A corpus up to this size is held in memory to split it exactly.
HELD_BACK_DOCUMENTS, HELD_BACK_CHARACTERS = 10_000, 32_000_000


class Piece(NamedTuple):
    """A document, or a part of one that is cut where every byte-level BPE splits text."""

    split: str  # "train" or "validation"
    text: Text
    ends: bool  # whether the document ends with this piece
    place: dict | None = None  # a JSON value from which the source resumes after this piece; None where it cannot


def split_documents(
    documents: Iterable[Part], percentage: float, exact: bool = True, start: dict | None = None
) -> Iterator[Piece]:
    """Assign each document to a split by the hash of its first piece, so equal documents are never in both.

    exact: hold out exactly this percentage of a small corpus (the smallest hashes; at least one document, never
    all). For a large corpus the percentage is met on average, and documents are streamed.
    start: the place of the piece before the documents; it holds the threshold for their hashes.
    """
    documents, start = iter(documents), start or {}
    held_back, hashes, num_characters, starts = [], set(), 0, True
    threshold = start.get("threshold", math.floor(percentage / 100 * 2**64))
    exact = exact and not start
    for part in documents if exact else ():
        text, ends, _ = part
        held_back.append(part)
        if starts:
            hashes.add(hash64(text))
        starts, num_characters = ends, num_characters + len(text)
        if ends and (len(held_back) >= HELD_BACK_DOCUMENTS or num_characters >= HELD_BACK_CHARACTERS):
            break
    else:
        if exact:  # the corpus is small
            ordered = sorted(hashes)
            count = min(max(1, round(len(ordered) * percentage / 100)), len(ordered) - 1)
            threshold = ordered[count - 1] if count > 0 else -1
    split = start.get("split")  # of a document that has begun
    for text, ends, place in itertools.chain(held_back, documents):
        split = split or ("validation" if hash64(text) <= threshold else "train")
        begun = {} if ends else {"split": split}
        yield Piece(split, text, ends, place and {**place, "threshold": threshold, **begun})
        split = None if ends else split


def cut_ids_into_documents(
    parts: Iterable[Part], eos_token_id: int | None, start: dict | None = None
) -> Iterator[Part]:
    """Cut rows of token ids at their end-of-text ids, across rows; pass text on unchanged.

    If the first rows hold no such id, each row is a document, and an end-of-text id in a later row is a `UserError`.
    start: the place of the part before; it holds whether rows form a stream, and how many ids of the first to drop.
    """
    parts, place = iter(parts), start or {}
    head = list(itertools.islice(parts, 0 if start else 1))
    if head and not isinstance(head[0].text, str):
        head += itertools.islice(parts, HEAD_ROWS - 1)
    is_stream = place.get("is_stream", any(len(_find_id(part.text, eos_token_id)) for part in head))
    dropped = place.get("dropped_ids", 0)
    parts = itertools.chain(head, parts)
    del head  # a document may be long
    begun: list[np.ndarray] = []
    for part in parts:
        if not is_stream:
            if len(_find_id(part.text, eos_token_id)):
                remedy = f"the first {HEAD_ROWS} rows do not; end every document with it, or none"
                raise UserError(f"a row contains the end-of-text id {eos_token_id}, but {remedy}")
            yield part
            continue
        *ended, rest = np.split(part.text[dropped:], np.flatnonzero(part.text[dropped:] == eos_token_id) + 1)
        for with_end in ended:
            document = np.concatenate([*begun, with_end[:-1]])
            dropped += len(with_end)
            if len(document):
                yield Part(document, True, place | {"is_stream": True, "dropped_ids": dropped})
            begun = []
        begun.append(rest)
        place, dropped = part.place or {}, 0
    if sum(map(len, begun)):
        yield Part(np.concatenate(begun), True, place | {"is_stream": True, "dropped_ids": 0})


def _find_id(text: Text, token_id: int | None) -> np.ndarray | tuple:
    return () if isinstance(text, str) or token_id is None else np.flatnonzero(text == token_id)


def take_head(pieces: Iterable[Piece], characters: int) -> Iterator[Piece]:
    """Yield the first documents of each split, about `characters` of each; stop when both splits have some."""
    taken, ended = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, True)
    for piece in pieces:
        if taken[piece.split] < characters or not ended[piece.split]:
            yield piece._replace(place=None)  # what was taken before it would be unknown
            taken[piece.split] += len(piece.text)
            ended[piece.split] = piece.ends
        if taken["train"] >= characters and taken["validation"] and all(ended.values()):
            return


def cut_off_tail(
    parts: Iterable[Part], num_bytes: int, percentage: float, start: dict | None = None
) -> Iterator[Piece]:
    """Hold out the last percentage of the bytes of a single text, from the start of a line.

    start: the place of the piece before; it holds the number of bytes before the parts, and their split.
    """
    start = start or {}
    position, split = start.get("position", 0), start.get("split", "train")
    limit = num_bytes * (1 - percentage / 100)
    for text, ends, place in parts:
        length = count_utf8_bytes(text)
        rest = text
        if split == "train" and (position + length > limit or ends):
            share = min((limit - position) / length, 1.0) if length else 1.0
            head, rest = cut_at_line(text, round(len(text) * share), reach=round(num_bytes - limit) // 2)
            yield Piece("train", head, True)
            split = "validation"
        position += length
        yield Piece(split, rest, ends, place and {**place, "position": position, "split": split})


def cut_at_line(text: str, position: int, reach: int) -> tuple[str, str]:
    """Cut a text in two: after the last line break within `reach` before `position`, else at `position`."""
    line_start = text.rfind("\n", max(0, position - reach), position) + 1
    position = line_start or position
    return text[:position], text[position:]


def hash64(text: Text) -> int:
    """Hash the start of a document. (The first piece of a long document may end anywhere after it.)"""
    head = text[:HASHED_CHARACTERS]
    content = head.encode("utf-8") if isinstance(head, str) else head.tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
