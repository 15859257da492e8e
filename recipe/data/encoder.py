"""Text -> token ids in numpy arrays, at the speed of tiktoken where it gives the very same ids.

tokenizers encodes about 3 MB/s a core and hands the ids over as Python lists; tiktoken, with the same vocabulary and
split pattern, 20 to 30 MB/s into a buffer. A byte-level BPE's tokenizer.json holds all that tiktoken needs.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tiktoken
from transformers import PreTrainedTokenizerBase

from recipe.data.text import Piece

BATCH_CHARACTERS = 500_000  # text a thread encodes at once

# What tokenizers' ByteLevel pre-tokenizer splits by: GPT-2's pattern.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

Encode = Callable[[str], np.ndarray]


class NotEqual(Exception):
    """Why tiktoken cannot stand in for this tokenizer."""


def build_encoder(tokenizer: PreTrainedTokenizerBase, sample: Sequence[str]) -> tuple[Encode, str]:
    """The fastest function text -> ids (uint32 [tokens]) that is proven to give the tokenizer's ids on `sample`.

    Returns it with a sentence on what it is. No text gives a special token: `<|endoftext|>` is its characters.
    """
    plain = _tokenizers_encode(tokenizer)
    try:
        encoding = to_tiktoken(tokenizer)
    except NotEqual as reason:
        return plain, f"tokenizers (not tiktoken: {reason})"

    def encode(text: str) -> np.ndarray:
        return encoding.encode_to_numpy(text, disallowed_special=())

    num_bytes = 0
    for text in sample:
        if not np.array_equal(encode(text), plain(text)):
            return plain, "tokenizers (not tiktoken: it gives other ids on this text)"
        num_bytes += len(text.encode())
    return encode, f"tiktoken (ids equal to tokenizers' on the first {num_bytes / 1e6:.1f} MB)"


def encode_pieces(
    encode: Encode, eos_token_id: int, pieces: Iterable[Piece], num_workers: int
) -> Iterator[list[tuple[Piece, int, np.ndarray]]]:
    """Batches of (piece, bytes of its text, ids: uint32 [tokens], with the end-of-text id where a document ends).

    Threads encode (both encoders let go of Python's lock) while batches are handed out in reading order, so that
    the result does not depend on their number, and no more than a few batches are in memory.
    """

    def encode_batch(batch: list[Piece]) -> list[tuple[Piece, int, np.ndarray]]:
        encoded = []
        for piece in batch:
            ids = encode(piece.text)
            if piece.ends:
                ids = np.append(ids, np.uint32(eos_token_id))
            num_bytes = len(piece.text) if piece.text.isascii() else len(piece.text.encode("utf-8"))
            encoded.append((piece, num_bytes, ids))
        return encoded

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
    return tiktoken.Encoding("gpt2-recipe", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


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

    def encode(text: str) -> np.ndarray:
        return np.array(backend.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    return encode
