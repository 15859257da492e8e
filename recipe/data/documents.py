"""A stream of documents, in pieces: cut token ids into documents, hold documents out, keep the head of a text."""

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from recipe.data.files import HASHED_CHARACTERS, Part, Text
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
    place: Any = None  # JSON: where the source can resume reading directly after this piece


def split_documents(documents: Iterable[Part], percentage: float, exact: bool = True) -> Iterator[Piece]:
    """Assign each document to a split by the hash of its first piece, so equal documents are never in both.

    exact: hold out exactly this percentage of a small corpus (the smallest hashes; at least one document, never
    all). For a large corpus the percentage is met on average, and documents are streamed.
    """
    documents = iter(documents)
    held_back, hashes, num_characters, starts = [], set(), 0, True
    threshold = math.floor(percentage / 100 * 2**64)
    for text, ends in documents if exact else ():
        held_back.append((text, ends))
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
    split, starts = "train", True
    for text, ends in itertools.chain(held_back, documents):
        if starts:
            split = "validation" if hash64(text) <= threshold else "train"
        yield Piece(split, text, ends)
        starts = ends


def cut_ids_into_documents(parts: Iterable[Part], eos_token_id: int | None) -> Iterator[Part]:
    """Cut rows of token ids at their end-of-text ids, across rows; pass text on unchanged.

    If the first rows hold no such id, each row is a document, and an end-of-text id in a later row is a `UserError`.
    """
    parts = iter(parts)
    head = list(itertools.islice(parts, 1))
    if head and not isinstance(head[0][0], str):
        head += itertools.islice(parts, HEAD_ROWS - 1)
    is_stream = any(len(_find_id(ids, eos_token_id)) for ids, _ in head)
    parts = itertools.chain(head, parts)
    del head  # a document may be long
    begun: list[np.ndarray] = []
    for ids, ends in parts:
        cuts = _find_id(ids, eos_token_id)
        if not is_stream:
            if len(cuts):
                remedy = f"the first {HEAD_ROWS} rows do not; end every document with it, or none"
                raise UserError(f"a row contains the end-of-text id {eos_token_id}, but {remedy}")
            yield ids, ends
            continue
        *ended, rest = np.split(ids, np.asarray(cuts) + 1)
        for with_end in ended:
            document = np.concatenate([*begun, with_end[:-1]])
            if len(document):
                yield document, True
            begun = []
        begun.append(rest)
    if sum(map(len, begun)):
        yield np.concatenate(begun), True


def _find_id(text: Text, token_id: int | None) -> np.ndarray | tuple:
    return () if isinstance(text, str) or token_id is None else np.flatnonzero(text == token_id)


def take_head(pieces: Iterable[Piece], characters: int) -> Iterator[Piece]:
    """Yield the first documents of each split, about `characters` of each; stop when both splits have some."""
    taken, ended = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, True)
    for piece in pieces:
        if taken[piece.split] < characters or not ended[piece.split]:
            yield piece
            taken[piece.split] += len(piece.text)
            ended[piece.split] = piece.ends
        if taken["train"] >= characters and taken["validation"] and all(ended.values()):
            return


def cut_off_tail(parts: Iterable[Part], num_bytes: int, percentage: float) -> Iterator[Piece]:
    """Hold out the last percentage of the bytes of a single text, from the start of a line."""
    limit, position, split = num_bytes * (1 - percentage / 100), 0, "train"
    for text, ends in parts:
        length = len(text.encode("utf-8"))
        rest = text
        if split == "train" and (position + length > limit or ends):
            share = min((limit - position) / length, 1.0) if length else 1.0
            head, rest = cut_at_line(text, round(len(text) * share), reach=round(num_bytes - limit) // 2)
            yield Piece("train", head, True)
            split = "validation"
        yield Piece(split, rest, ends)
        position += length


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
