"""Encode pieces of text as numpy arrays of token ids, with tiktoken if it returns exactly the tokenizer's ids.

tokenizers encodes about 3 MB/s per core into Python lists; tiktoken, with the same vocabulary and split pattern,
encodes 20 to 30 MB/s into a buffer.
"""

import itertools
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import tiktoken
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from recipe.data.documents import SPLITS, Piece
from recipe.errors import UserError

BATCH_CHARACTERS = 500_000  # text that a thread encodes at a time
BETWEEN_TEXTS = "\x00 gpt2-recipe: the next text \x01"  # cannot overlap itself: none of its prefixes is its suffix

# GPT-2's pattern, by which tokenizers' ByteLevel splits text. The group turns all branches but the look-ahead into one
# plain regular expression for tiktoken's engine, which is 1.3 times as fast.
GPT2_PATTERN = r"""(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s+(?!\S)|\s+"""


class Encoded(NamedTuple):
    """The tokens of a batch of pieces of one split."""

    split: str
    ids: np.ndarray  # uint32 [tokens], with the end-of-text id after each document
    ends: np.ndarray  # int64 [documents that end here], the position after that id
    num_bytes: int  # of text


class NotEqual(Exception):
    """The reason why tiktoken cannot replace a tokenizer."""


def build_encoder(tokenizer: PreTrainedTokenizerBase, sample: Sequence[Piece]) -> tuple[Callable, str, bool]:
    """Choose the encoder, pieces of one split -> `Encoded`, by the first pieces of the corpus.

    Returns the encoder, a description, and whether it can encode a document piece by piece. Raises `UserError` if the
    pieces are token ids whose bytes cannot be counted.
    """
    kind = type(sample[0].text) if sample else str
    if kind is str:
        encode, how = build_text_encoder(tokenizer, [piece.text for piece in sample])
        takes_parts = how.startswith("tiktoken")
    else:
        token_bytes = count_token_bytes(tokenizer)
        head = [i for i in sample[0].text[:20].tolist() if 0 <= i < len(token_bytes)]  # others raise an error below
        how = f"taken unchanged from the data, which begins {tokenizer.decode(head)!r}"
        takes_parts = True

    def encode_batch(pieces: Sequence[Piece]) -> Encoded:
        texts = [piece.text for piece in pieces]
        if not all(isinstance(text, kind) for text in texts):
            raise UserError("some documents are text and some are token ids; prepare them separately")
        if kind is str:
            ids, lengths = encode(texts)
            num_bytes = sum(len(text) if text.isascii() else len(text.encode("utf-8")) for text in texts)
        else:
            ids, lengths = np.concatenate(texts), [len(text) for text in texts]
            wrong = ids[(ids < 0) | (ids >= len(token_bytes))]
            if len(wrong):
                found = f"the data contains token id {wrong[0]}, but the tokenizer has {len(token_bytes)} tokens"
                raise UserError(f"{found}; pass the tokenizer that made the data")
            ids, num_bytes = ids.astype(np.uint32), int(token_bytes[ids].sum())
        ends = np.cumsum(lengths)[[piece.ends for piece in pieces]]
        ids = np.insert(ids, ends, tokenizer.eos_token_id)
        return Encoded(pieces[0].split, ids, ends + np.arange(1, len(ends) + 1), num_bytes)

    return encode_batch, how, takes_parts


def build_text_encoder(tokenizer: PreTrainedTokenizerBase, sample: Sequence[str]) -> tuple[Callable, str]:
    """Choose the fastest encoder that returns the tokenizer's ids on `sample`. Returns it and its description.

    It maps texts to their concatenated ids (uint32 [tokens]) and the number of ids of each (int64 [texts]). It never
    returns a special token: `<|endoftext|>` in a text is encoded as characters.
    """
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()

    def plain(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids = [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        lengths = np.array([len(i) for i in ids], dtype=np.int64)
        return np.fromiter(itertools.chain.from_iterable(ids), np.uint32, lengths.sum()), lengths

    try:
        encoding = to_tiktoken(tokenizer)
    except NotEqual as reason:
        return plain, f"tokenizers (tiktoken cannot be used: this tokenizer {reason})"

    between_id = encoding.encode_single_token(BETWEEN_TEXTS)

    def encode(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        # One call for many texts, because a thread waits for Python's lock after each call.
        joined = BETWEEN_TEXTS.join(texts)
        if joined.count(BETWEEN_TEXTS) != len(texts) - 1:  # no texts, or a text holds the separator
            return plain(texts)
        try:
            ids = encoding.encode_to_numpy(joined, allowed_special={BETWEEN_TEXTS}, disallowed_special=())
        except ValueError:  # its regular expressions fail on a million blanks in a row (tiktoken 0.14)
            return plain(texts)
        between = np.flatnonzero(ids == between_id)
        return np.delete(ids, between), np.diff(between, prepend=-1, append=len(ids)) - 1

    if not all(map(np.array_equal, encode(sample), plain(sample))):
        return plain, "tokenizers (tiktoken cannot be used: its ids differ on this text)"
    num_bytes = sum(len(text.encode()) for text in sample)
    return encode, f"tiktoken (ids equal to tokenizers' on the first {num_bytes:,} bytes)"


def encode_pieces(encode: Callable, pieces: Iterable[Piece], num_workers: int) -> Iterator[tuple[int, list[Encoded]]]:
    """Yield batches of (number of pieces, tokens of each split) in reading order, whatever the number of threads.

    Threads encode in parallel, since both encoders release Python's lock. Only a few batches are in memory.
    """

    def encode_batch(batch: list[Piece]) -> tuple[int, list[Encoded]]:
        by_split = [[piece for piece in batch if piece.split == split] for split in SPLITS]
        return len(batch), [encode(of_split) for of_split in by_split if of_split]

    with ThreadPoolExecutor(num_workers) as threads:
        running: deque = deque()
        try:
            for batch in _batches(pieces):
                running.append(threads.submit(encode_batch, batch))
                if len(running) > 2 * num_workers:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            threads.shutdown(cancel_futures=True)


def join_pieces(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Join the pieces of each document, for an encoder that needs complete documents."""
    begun: list[str] = []
    for piece in pieces:
        begun.append(piece.text)
        if piece.ends:
            yield piece if len(begun) == 1 else Piece(piece.split, "".join(begun), True)
            begun = []


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch, characters = [], 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def to_tiktoken(tokenizer: PreTrainedTokenizerBase) -> tiktoken.Encoding:
    """Build the same byte-level BPE for tiktoken. Raises `NotEqual` if tiktoken lacks a part of it."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model = content["model"]
    extras = ("dropout", "byte_fallback", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    if model["type"] != "BPE" or any(model.get(extra) for extra in extras):
        raise NotEqual("is not a plain BPE")
    if content["normalizer"] is not None:
        raise NotEqual("normalizes text")
    if not all(token["special"] for token in content["added_tokens"]):
        raise NotEqual("has added tokens that are not special")
    pattern = _split_pattern(content["pre_tokenizer"])
    to_byte = {char: byte for byte, char in bytes_to_unicode().items()}
    vocabulary = model["vocab"]
    special = {token["content"] for token in content["added_tokens"]}
    try:
        ranks = {bytes(to_byte[c] for c in token): i for token, i in vocabulary.items() if token not in special}
        merged = [vocabulary["".join(pair if isinstance(pair, list) else pair.split(" "))] for pair in model["merges"]]
    except KeyError as error:
        raise NotEqual("has a vocabulary that is not byte-level") from error
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise NotEqual("has no token for some byte")
    if merged != sorted(merged) or len(merged) != len(ranks) - 256:
        raise NotEqual("has ids that do not follow the order of its merges")
    # Without any special token, tiktoken 0.14 searches for one at every character and takes almost twice as long.
    between = {BETWEEN_TEXTS: 1 + max([*vocabulary.values(), *(token["id"] for token in content["added_tokens"])])}
    return tiktoken.Encoding("gpt2-recipe", pat_str=pattern, mergeable_ranks=ranks, special_tokens=between)


def count_token_bytes(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Count the bytes of text of each id, int64 [vocabulary]; special tokens have none."""
    characters, special = set(bytes_to_unicode().values()), set(tokenizer.all_special_tokens)
    counts = np.zeros(len(tokenizer), np.int64)
    for token, index in tokenizer.get_vocab().items():
        if token not in special:
            if not characters.issuperset(token):
                raise UserError(f"tokenized data needs a byte-level tokenizer; this one has the token '{token}'")
            counts[index] = len(token)
    return counts


def _split_pattern(pre_tokenizer: dict | None) -> str:
    """Return the regular expression that splits text before merging: that of ByteLevel, or of a Split before it."""
    pre_tokenizer = pre_tokenizer or {}
    *splits, byte_level = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    if byte_level.get("add_prefix_space"):
        raise NotEqual("adds a space in front of text")
    if byte_level.get("type") == "ByteLevel":
        if not splits and byte_level.get("use_regex", True):
            return GPT2_PATTERN
        if len(splits) == 1 and splits[0]["type"] == "Split" and not byte_level.get("use_regex", True):
            pattern = splits[0]["pattern"].get("Regex")
            if pattern is not None and splits[0]["behavior"] == "Isolated" and not splits[0]["invert"]:
                return pattern
    raise NotEqual("does not split text by a single regular expression")
