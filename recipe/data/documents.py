"""Documents as they pass: in pieces, told apart, cut off, held out. Nothing here knows where they come from."""

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from recipe.data.files import HASHED_CHARACTERS, Part, Text
from recipe.errors import UserError

SPLITS = ("train", "validation")
# Up to here documents are held back, so that the shares of a small corpus are exact.
HEAD_ROWS = 200  # of a tokenized source, which show whether it holds end-of-text ids
HELD_BACK_DOCUMENTS, HELD_BACK_CHARACTERS = 10_000, 32_000_000


class Piece(NamedTuple):
    """A document, or a part of one that is cut where every byte-level BPE cuts anyway."""

    split: str  # "train" or "validation"
    text: Text
    ends: bool  # the last piece of its document


def split_documents(documents: Iterable[Part], percentage: float, exact: bool = True) -> Iterator[Piece]:
    """Assign each document by the hash of its (first) piece, so that equal documents never fall on both sides.

    A small corpus is split exactly (the smallest hashes, at least one document, never all), if asked for; a larger
    one is streamed, and the share is met on average.
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
    """Rows of token ids that hold end-of-text ids are stretches of one stream: cut it into documents there.

    Where the first rows hold none a row is a document, and text is passed on as it is. Raises `UserError` for an
    end-of-text id in a later row.
    """
    parts = iter(parts)
    first = next(parts, None)
    if first is None or isinstance(first[0], str) or eos_token_id is None:
        yield from () if first is None else (first,)
        del first  # a piece may be long
        yield from parts
        return
    head = [first, *itertools.islice(parts, HEAD_ROWS - 1)]
    is_stream = any(not isinstance(ids, str) and (ids == eos_token_id).any() for ids, _ in head)
    begun: list[np.ndarray] = []
    for ids, ends in itertools.chain(head, parts):
        cuts = np.flatnonzero(ids == eos_token_id) if not isinstance(ids, str) else ()
        if not is_stream:
            if len(cuts):
                raise UserError(
                    f"a row holds the end-of-text id {eos_token_id}, but none of the first {HEAD_ROWS} does"
                )
            yield ids, ends
            continue
        start = 0
        for cut in cuts:
            document = np.concatenate([*begun, ids[start:cut]])
            if len(document):
                yield document, True
            begun, start = [], cut + 1
        begun.append(ids[start:])
    if sum(map(len, begun)):
        yield np.concatenate(begun), True


def take_head(pieces: Iterable[Piece], characters: int) -> Iterator[Piece]:
    """The first documents of each split, up to about so many characters; none after both splits have some."""
    taken = {"train": 0, "validation": 0}
    ended = {"train": True, "validation": True}
    for piece in pieces:
        if taken[piece.split] < characters or not ended[piece.split]:
            yield piece
            taken[piece.split] += len(piece.text)
            ended[piece.split] = piece.ends
        if taken["train"] >= characters and taken["validation"] and all(ended.values()):
            return


def cut_off_tail(parts: Iterable[Part], num_bytes: int, percentage: float) -> Iterator[Piece]:
    """One text: its last percent, by bytes and from the start of a line on, is for validation."""
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
    """Cut a text in two at `position`, or after the last line break before it, if that is within `reach`."""
    line_start = text.rfind("\n", max(0, position - reach), position) + 1
    position = line_start or position
    return text[:position], text[position:]


def hash64(text: Text) -> int:
    """By which documents are held out, and found again."""
    head = text[:HASHED_CHARACTERS]  # a long document comes in pieces, and where the first one ends may vary
    content = head.encode("utf-8") if isinstance(head, str) else head.tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
