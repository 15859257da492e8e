"""Text -> token ids in numpy arrays, at the speed of tiktoken where it gives the very same ids.

tokenizers encodes about 3 MB/s a core and hands the ids over as Python lists; tiktoken, with the same vocabulary and
split pattern, 20 to 30 MB/s into a buffer. A byte-level BPE's tokenizer.json holds all that tiktoken needs.
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

from recipe.data.documents import SPLITS, Piece
from recipe.errors import UserError

BATCH_CHARACTERS = 500_000  # text a thread encodes at once
BETWEEN_TEXTS = "\x00 gpt2-recipe: the next text \x01"  # no beginning of it is its end: it cannot overlap itself

# What tokenizers' ByteLevel pre-tokenizer splits by: GPT-2's pattern. The group makes all but the look-ahead one plain
# regular expression for tiktoken's engine: 1.3 times as fast.
GPT2_PATTERN = r"""(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s+(?!\S)|\s+"""

# Texts -> the ids of all of them in a row (uint32 [tokens]) and how many are of each (int64 [texts]).
Encode = Callable[[Sequence[str]], tuple[np.ndarray, np.ndarray]]


class Encoded(NamedTuple):
    """What a batch of pieces gives for one split."""

    split: str
    ids: np.ndarray  # uint32 [tokens], with the end-of-text id where a document ends
    ends: np.ndarray  # int64 [documents that end here], the position behind that id
    num_bytes: int  # of text


EncodePieces = Callable[[Sequence[Piece]], Encoded]


class NotEqual(Exception):
    """Why tiktoken cannot stand in for this tokenizer."""


def build_encoder(tokenizer: PreTrainedTokenizerBase, sample: Sequence[Piece]) -> tuple[EncodePieces, str, bool]:
    """What turns pieces of one split into ids, judged by the first pieces of the corpus.

    Returns it with a sentence on what it is, and whether it gives for parts of a document what it gives for the
    whole. Raises `UserError` for pieces that are ids already, if their bytes cannot be counted.
    """
    eos_token_id = tokenizer.eos_token_id
    if sample and not isinstance(sample[0].text, str):
        token_bytes = count_token_bytes(tokenizer)

        def take_ids(pieces: Sequence[Piece]) -> Encoded:
            _check_kind(pieces, np.ndarray)
            ids = np.concatenate([piece.text for piece in pieces])
            wrong = ids[(ids < 0) | (ids >= len(token_bytes))]
            if len(wrong):
                raise UserError(
                    f"the data holds token id {wrong[0]}, but the tokenizer has {len(token_bytes)} tokens: "
                    "pass the tokenizer the data was made with"
                )
            num_bytes = int(token_bytes[ids].sum())
            ends = np.cumsum([len(piece.text) for piece in pieces])
            ids = np.insert(ids.astype(np.uint32), ends, eos_token_id)
            return Encoded(pieces[0].split, ids, ends + np.arange(1, len(ends) + 1), num_bytes)

        head = [
            index for index in sample[0].text[:20].tolist() if 0 <= index < len(token_bytes)
        ]  # take_ids refuses the others
        return take_ids, f"taken from the data as they are; they begin {tokenizer.decode(head)!r}", True

    encode, how = build_text_encoder(tokenizer, [piece.text for piece in sample])

    def encode_texts(pieces: Sequence[Piece]) -> Encoded:
        _check_kind(pieces, str)
        texts = [piece.text for piece in pieces]
        ids, lengths = encode(texts)
        ends = np.cumsum(lengths)[[piece.ends for piece in pieces]]
        num_bytes = sum(len(text) if text.isascii() else len(text.encode("utf-8")) for text in texts)
        ids = np.insert(ids, ends, eos_token_id)
        return Encoded(pieces[0].split, ids, ends + np.arange(1, len(ends) + 1), num_bytes)

    return encode_texts, how, how.startswith("tiktoken")


def _check_kind(pieces: Sequence[Piece], kind: type) -> None:
    if not all(isinstance(piece.text, kind) for piece in pieces):
        raise UserError("some documents are text and some are token ids; prepare them separately")


def build_text_encoder(tokenizer: PreTrainedTokenizerBase, sample: Sequence[str]) -> tuple[Encode, str]:
    """The fastest function texts -> ids that is proven to give the tokenizer's ids on `sample`.

    Returns it with a sentence on what it is. No text gives a special token: `<|endoftext|>` is its characters.
    """
    plain = _tokenizers_encode(tokenizer)
    try:
        encoding = to_tiktoken(tokenizer)
    except NotEqual as reason:
        return plain, f"tokenizers (not tiktoken: {reason})"

    between_id = encoding.encode_single_token(BETWEEN_TEXTS)

    def encode(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        # One call for many texts, since after each a thread must wait for Python's lock.
        joined = BETWEEN_TEXTS.join(texts)
        if joined.count(BETWEEN_TEXTS) != len(texts) - 1:  # there is none, or one holds the separator
            return plain(texts)
        try:
            ids = encoding.encode_to_numpy(joined, allowed_special={BETWEEN_TEXTS}, disallowed_special=())
        except ValueError:  # a million blanks in a row are too much for its regular expressions (tiktoken 0.14)
            return plain(texts)
        between = np.flatnonzero(ids == between_id)
        return np.delete(ids, between), np.diff(between, prepend=-1, append=len(ids)) - 1

    if not all(map(np.array_equal, encode(sample), plain(sample))):
        return plain, "tokenizers (not tiktoken: it gives other ids on this text)"
    num_bytes = sum(len(text.encode()) for text in sample)
    return encode, f"tiktoken (ids equal to tokenizers' on the first {num_bytes:,} bytes)"


def encode_pieces(
    encode: EncodePieces, pieces: Iterable[Piece], num_workers: int
) -> Iterator[tuple[int, list[Encoded]]]:
    """Batches of (number of pieces, what they give for each split), in reading order.

    Threads encode (both encoders let go of Python's lock) while batches are handed out in reading order, so that
    the result does not depend on their number, and no more than a few batches are in memory.
    """

    def encode_batch(batch: list[Piece]) -> tuple[int, list[Encoded]]:
        of_splits = [[piece for piece in batch if piece.split == split] for split in SPLITS]
        return len(batch), [encode(of_split) for of_split in of_splits if of_split]

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
            for future in running:
                future.cancel()


def whole_documents(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Put documents together that come in pieces, for an encoder that takes no parts."""
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
    """The same byte-level BPE for tiktoken. Raises `NotEqual` with the reason if it has parts tiktoken has not."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model = content["model"]
    if model["type"] != "BPE" or model.get("dropout") or model.get("byte_fallback") or model.get("unk_token"):
        raise NotEqual("it is not a plain BPE")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise NotEqual("it marks parts of words")
    if content["normalizer"] is not None:
        raise NotEqual("it normalizes text")
    if any(not token["special"] for token in content["added_tokens"]):
        raise NotEqual("it has added tokens that are not special")
    pattern = _split_pattern(content["pre_tokenizer"])
    to_byte = {char: byte for byte, char in _bytes_to_unicode().items()}
    vocabulary = model["vocab"]
    special = {token["content"] for token in content["added_tokens"]}
    try:
        ranks = {bytes(to_byte[c] for c in token): i for token, i in vocabulary.items() if token not in special}
        merged = [vocabulary["".join(pair if isinstance(pair, list) else pair.split(" "))] for pair in model["merges"]]
    except KeyError as error:
        raise NotEqual("its vocabulary is not byte-level") from error
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise NotEqual("it has no token for some byte")
    if merged != sorted(merged) or len(merged) != len(ranks) - 256:
        raise NotEqual("its ids do not follow the order of its merges")
    # Without any special token tiktoken 0.14 looks for one at every character, and takes almost twice as long.
    between = {BETWEEN_TEXTS: 1 + max([*vocabulary.values(), *(token["id"] for token in content["added_tokens"])])}
    return tiktoken.Encoding("gpt2-recipe", pat_str=pattern, mergeable_ranks=ranks, special_tokens=between)


def count_token_bytes(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """How many bytes of text each id stands for, int64 [vocabulary]; none for special tokens."""
    characters, special = set(_bytes_to_unicode().values()), set(tokenizer.all_special_tokens)
    counts = np.zeros(len(tokenizer), np.int64)
    for token, index in tokenizer.get_vocab().items():
        if token not in special:
            if not characters.issuperset(token):
                raise UserError(f"data that is tokenized already needs a byte-level tokenizer; this one has '{token}'")
            counts[index] = len(token)
    return counts


def _split_pattern(pre_tokenizer: dict | None) -> str:
    """The regular expression by which text is cut before merging."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    if any(step is None or step["type"] not in ("ByteLevel", "Split") for step in steps):
        raise NotEqual("it cuts text in a way that is not one regular expression")
    if any(step.get("add_prefix_space") for step in steps):
        raise NotEqual("it adds a space in front of text")
    patterns = [GPT2_PATTERN for step in steps if step["type"] == "ByteLevel" and step.get("use_regex", True)]
    for step in steps:
        if step["type"] == "Split":
            if step["behavior"] != "Isolated" or step["invert"] or "Regex" not in step["pattern"]:
                raise NotEqual("it cuts text in a way that is not one regular expression")
            patterns.append(step["pattern"]["Regex"])
    if len(patterns) != 1 or steps[-1]["type"] != "ByteLevel":
        raise NotEqual("it cuts text in a way that is not one regular expression")
    return patterns[0]


def _bytes_to_unicode() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary (Radford et al. 2019)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


def _tokenizers_encode(tokenizer: PreTrainedTokenizerBase) -> Encode:
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()

    def encode(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids = [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        lengths = np.array([len(i) for i in ids], dtype=np.int64)
        return np.fromiter(itertools.chain.from_iterable(ids), np.uint32, lengths.sum()), lengths

    return encode
