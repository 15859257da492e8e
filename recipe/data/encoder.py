"""Encode pieces of text as numpy arrays of token ids, with gigatoken if it returns exactly the tokenizer's ids.

tokenizers encodes about 3 MB/s per core into Python lists; gigatoken reads the same tokenizer.json and encodes over
100 MB/s into an array.
"""

import functools
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import psutil
from tokenizers.pre_tokenizers import ByteLevel

from recipe.data.documents import SPLITS, Piece
from recipe.data.files import find_cut
from recipe.data.packed import id_dtype
from recipe.data.tokenizer import TextTokenizer
from recipe.errors import UserError, one_line

BATCH_CHARACTERS = 1_000_000  # text that a thread encodes at a time
# gigatoken 0.10.0 keeps the ids of every word for ever; the fix came after it (gigatoken#36). The cache takes 70 MB
# for English, but 14 bytes per byte of text in which no word repeats. If the process has grown by the first number and
# the second per tokenizer, a tokenizer starts over, which takes 0.1 s.
OTHER_BYTES, CACHE_BYTES = 256 * 2**20, 96 * 2**20
UNCHECKED_CHARACTERS = 8_000_000

# The characters that are new in Unicode 17, and a few around them. gigatoken 0.10 knows them and tokenizers 0.23 does
# not, so they split "\ua7f1's" differently (gigatoken#43).
RECENT = np.zeros(0x110000, dtype=bool)
for _first, _last in (
    *((0x088F, 0x088F), (0x0C5C, 0x0C5C), (0x0CDC, 0x0CDC), (0x1ACF, 0x1AEB), (0x20C1, 0x20C1), (0x2B96, 0x2B96)),
    *((0xA7CE, 0xA7D4), (0xA7F1, 0xA7F1), (0xFBC3, 0xFBD2), (0xFD90, 0xFD91), (0xFDC8, 0xFDCE), (0x10940, 0x1095F)),
    *((0x10EC5, 0x10EFB), (0x11B60, 0x11B67), (0x11DB0, 0x11DEF), (0x16EA0, 0x16EDF), (0x16FF2, 0x16FF6)),
    *((0x187F8, 0x187FF), (0x18D09, 0x18DF2), (0x1CCFA, 0x1CCFC), (0x1CEBA, 0x1CEF0), (0x1E6C0, 0x1E6FF)),
    *((0x1F6D8, 0x1F6D8), (0x1F777, 0x1F77A), (0x1F8D0, 0x1F8D8), (0x1FA54, 0x1FA57), (0x1FA8A, 0x1FA8F)),
    *((0x1FAC7, 0x1FACD), (0x1FAEA, 0x1FAEF), (0x1FBFA, 0x1FBFA), (0x2B73A, 0x2B73F), (0x2CEA2, 0x2CEAF)),
    (0x323B0, 0x3347F),
):
    RECENT[_first : _last + 1] = True

# What tokenizers may disagree on: contractions, blanks, digits, other scripts, combining marks (whose order depends on
# the version of Unicode), emoji, control characters, special tokens in text.
PROBE = f"""
I'll say it's DON'T we've 'tis "quoted"  two   three\t\ttabs\r\n\r\n\n\n  lines.\n
 \u00a0nbsp\u2028sep\u3000wide\u200bzero
x = {{'a': [1, 23, 4567, 890123]}}  # 3.14 \u00bd \u0663\u0664 \u2167 !!!??? ---___ <|endoftext|> </s>
\u732b\u304c\u597d\u304d \ud55c\uad6d\uc5b4 \u0627\u0644\u0639\u0631\u0628 \u0939\u093f\u0928\u094d\u0926\u0940
e\u0301 x\u0301\u0c3c na\u00efve \u0130\u0131 \ufb01 \u212b \U0001f469\u200d\U0001f680 \U0001d518 \U00031350 \ufffd
\ufeff\x00\x07\x1b\x7f\x85 {" " * 300}{"ab" * 200}
last line"""


class Encoded(NamedTuple):
    """The tokens of a batch of pieces of one split."""

    split: str
    ids: np.ndarray  # of `id_dtype` [tokens], with the end-of-text id after each document
    ends: np.ndarray  # int64 [documents that end here], the position after that id
    num_bytes: int  # of text


class EncodedBatch(NamedTuple):
    """A batch of pieces in reading order."""

    num_pieces: int
    place: Any  # of its last piece
    splits: list[Encoded]


def build_encoder(tokenizer: TextTokenizer, sample: Sequence[Piece]) -> tuple[Callable, str, bool]:
    """Choose the encoder, pieces of one split -> `Encoded`, by the first pieces of the corpus.

    Returns the encoder, a description, and whether it can encode a document piece by piece. Raises `UserError` if the
    pieces are token ids whose bytes cannot be counted.
    """
    kind = type(sample[0].text) if sample else str
    if kind is str:
        encode, how = build_text_encoder(tokenizer, [piece.text for piece in sample])
        takes_parts = isinstance(encode, Gigatoken) and encode.takes_parts()
    else:
        token_bytes = count_token_bytes(tokenizer)
        head = [i for i in sample[0].text[:20].tolist() if 0 <= i < len(token_bytes)]  # others raise an error below
        text = tokenizer.backend_tokenizer.decode(head, skip_special_tokens=False)
        how = f"taken unchanged from the data, which begins {text!r}"
        takes_parts = True
    eos_token_id, vocab_size = tokenizer.eos_token_id, len(tokenizer)

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
            num_bytes = int(token_bytes[ids].sum())
        ends = np.cumsum(lengths)[[piece.ends for piece in pieces]]
        if (largest := int(ids.max(initial=0))) >= vocab_size:  # as uint16, 70000 would silently become 4464
            raise UserError(f"the tokenizer returned id {largest}, beyond its vocabulary of {vocab_size}")
        ids = np.insert(ids.astype(id_dtype(vocab_size)), ends, eos_token_id)
        return Encoded(pieces[0].split, ids, ends + np.arange(1, len(ends) + 1), num_bytes)

    return encode_batch, how, takes_parts


def build_text_encoder(tokenizer: TextTokenizer, sample: Sequence[str]) -> tuple[Callable, str]:
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
        encode = Gigatoken(backend.to_str(), plain)
    except (RuntimeError, ImportError) as error:
        return plain, f"tokenizers (gigatoken cannot be used: {one_line(error).partition(' Location:')[0]})"
    texts = [PROBE, *sample]
    for start in range(0, len(texts), 10):  # tokenizers needs hundreds of bytes of memory per token
        some = texts[start : start + 10]
        if not all(map(np.array_equal, encode(some), plain(some))):
            return plain, "tokenizers (gigatoken cannot be used: its ids differ on this text)"
    num_bytes = sum(len(text.encode()) for text in sample)
    return encode, f"gigatoken (equal to tokenizers on the first {num_bytes / 1e6:.1f} MB)"


class Gigatoken:
    """Maps texts to (ids, lengths) as `build_text_encoder` describes. Each concurrent call uses its own tokenizer."""

    def __init__(self, tokenizer_json: str, plain: Callable) -> None:
        """plain: encodes texts with recent characters. Raises `RuntimeError` for a tokenizer without support."""
        import gigatoken  # not at the top, because training on a packed dataset does not need it

        content = json.loads(tokenizer_json)
        if (content["pre_tokenizer"] or {}).get("use_regex") is False:  # gigatoken 0.10.0 ignores it
            raise RuntimeError("the tokenizer does not split text into words")
        content["added_tokens"] = [token for token in content["added_tokens"] if not token["special"]]
        if any(token["single_word"] for token in content["added_tokens"]):  # it ignores that, too
            raise RuntimeError("the tokenizer has added tokens that match single words only")
        # Both may join words that a cut separates.
        self.joins_words = bool(content["model"].get("byte_fallback") or content["added_tokens"])
        self.plain = plain
        self.start = functools.partial(gigatoken.Tokenizer.from_json, json.dumps(content))
        self.idle, self.num_tokenizers = [(self.start(), 0)], 1
        self.first_bytes = psutil.Process().memory_info().rss

    def __call__(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        if has_recent_characters(texts):
            if len(texts) == 1:
                return self.plain(texts)
            ids, lengths = zip(*(self([text]) for text in texts), strict=True)
            return np.concatenate(ids), np.concatenate(lengths)
        try:
            tokenizer, unchecked = self.idle.pop()
        except IndexError:
            tokenizer, unchecked = self.start(), 0
            self.num_tokenizers += 1
        rows = tokenizer.encode_batch(list(texts), parallel=False).layout
        unchecked += sum(map(len, texts))
        if unchecked > UNCHECKED_CHARACTERS:
            unchecked, grown = 0, psutil.Process().memory_info().rss - self.first_bytes
            if grown > OTHER_BYTES + CACHE_BYTES * self.num_tokenizers:
                tokenizer = self.start()
        self.idle.append((tokenizer, unchecked))
        return rows.content.data, np.diff(rows.offsets.data)

    def takes_parts(self) -> bool:
        """Return whether encoding the parts of a text that `find_cut` cuts gives the ids of the text."""
        cuts = [0, *(find_cut(PROBE, end) for end in range(100, len(PROBE), 20)), len(PROBE)]
        parts = [PROBE[start:end] for start, end in itertools.pairwise(cuts)]
        return not self.joins_words and np.array_equal(self(parts)[0], self([PROBE])[0])


def has_recent_characters(texts: Sequence[str]) -> bool:
    """Return whether gigatoken may encode one of the texts differently."""
    codes = np.frombuffer("".join(text for text in texts if not text.isascii()).encode("utf-32-le"), np.uint32)
    return bool(RECENT[codes[codes >= RECENT.argmax()]].any())


def encode_pieces(encode: Callable, pieces: Iterable[Piece], num_workers: int) -> Iterator[EncodedBatch]:
    """Yield the tokens of batches of pieces in reading order, whatever the number of threads.

    Threads encode in parallel, since both encoders release Python's lock. Only a few batches are in memory.
    """

    def encode_batch(batch: list[Piece]) -> EncodedBatch:
        by_split = [[piece for piece in batch if piece.split == split] for split in SPLITS]
        return EncodedBatch(len(batch), batch[-1].place, [encode(of_split) for of_split in by_split if of_split])

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
            yield piece if len(begun) == 1 else piece._replace(text="".join(begun))
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


def count_token_bytes(tokenizer: TextTokenizer) -> np.ndarray:
    """Count the bytes of text of each id, int64 [vocabulary]; special tokens have none."""
    characters, backend = set(ByteLevel.alphabet()), tokenizer.backend_tokenizer
    special = {tokenizer.eos_token, *(t.content for t in backend.get_added_tokens_decoder().values() if t.special)}
    counts = np.zeros(len(tokenizer), np.int64)
    for token, index in backend.get_vocab().items():
        if token not in special:
            if not characters.issuperset(token):
                raise UserError(f"tokenized data needs a byte-level tokenizer; this one has the token '{token}'")
            counts[index] = len(token)
    return counts
