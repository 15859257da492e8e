"""Texts -> numpy arrays of token ids, with gigatoken if it returns exactly the tokenizer's ids.

tokenizers encodes about 3 MB/s per core into Python lists; gigatoken reads the same tokenizer.json and encodes over
100 MB/s into an array.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import psutil
from tokenizers import Tokenizer

from recipe.errors import one_line

SAMPLE_CHARACTERS = 1_000_000  # compared to choose an encoder
BATCH_CHARACTERS = 300_000  # encoded at a time, because tokenizers needs 110 to 150 bytes of memory per character
SLICE_CHARACTERS = 10_000  # of the sample, so that tokenizers encodes slices on all cores
SEAM = 100  # characters on both sides of a cut that must have the same ids with and without it
# gigatoken 0.10 never evicts its cache (gigatoken#36): 70 MB for English, but 14 bytes per byte of text in which no
# word repeats. When the process has grown by this much, the tokenizer starts over, which takes 0.1 s.
CACHE_BYTES = 256 * 2**20
UNCHECKED_CHARACTERS = 8_000_000

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

# Maps texts to their ids, one after the other (uint32 [tokens]), and the number of ids of each (int64 [texts]). Unless
# it parses special tokens, it never returns one: `<|endoftext|>` in a text is encoded as characters.
Encode = Callable[[Sequence[str]], tuple[np.ndarray, np.ndarray]]


def choose_encoder(
    tokenizer_json: str, sample: Sequence[str], parse_special_tokens: bool = False
) -> tuple[str, Encode, str]:
    """Choose the fastest encoder that returns the tokenizer's ids on a sample.

    Returns its name for `build_encoder`, the encoder, and the reason.
    """
    plain = build_encoder(tokenizer_json, "tokenizers", parse_special_tokens)
    try:
        encode = build_encoder(tokenizer_json, "gigatoken", parse_special_tokens)
    except (RuntimeError, ImportError) as error:
        reason = one_line(error).partition(" Location:")[0]
        return "tokenizers", plain, f"tokenizers (gigatoken cannot be used: {reason})"
    texts = [PROBE]
    characters = 0
    for text in sample:
        head = text[: max(0, SAMPLE_CHARACTERS - characters)]
        texts += [head[start : start + SLICE_CHARACTERS] for start in range(0, len(head), SLICE_CHARACTERS)]
        characters += len(head)
    for batch in batches(texts):
        if not all(map(np.array_equal, encode(batch), plain(batch))):
            return "tokenizers", plain, "tokenizers (gigatoken cannot be used: its ids differ on this text)"
    return "gigatoken", encode, f"gigatoken (equal to tokenizers on the first {characters / 1e6:.1f} M characters)"


def build_encoder(tokenizer_json: str, name: str, parse_special_tokens: bool = False) -> Encode:
    """Return an encoder, "gigatoken" or "tokenizers". Raises `RuntimeError` or `ImportError` if it cannot be used."""
    backend = Tokenizer.from_str(tokenizer_json)
    backend.encode_special_tokens = not parse_special_tokens
    backend.no_truncation()
    backend.no_padding()
    if name == "gigatoken":
        return Gigatoken(backend.to_str(), parse_special_tokens)
    return functools.partial(_encode_plainly, backend)


def _encode_plainly(backend: Tokenizer, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    ids = [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
    lengths = np.array([len(i) for i in ids], dtype=np.int64)
    return np.fromiter(itertools.chain.from_iterable(ids), np.uint32, lengths.sum()), lengths


class Gigatoken:
    """An `Encode` whose memory is bounded. It is not thread-safe."""

    def __init__(self, tokenizer_json: str, parse_special_tokens: bool) -> None:
        """Raises `RuntimeError` for a tokenizer without support."""
        import gigatoken  # not at the top, because training on a packed dataset needs neither
        import orjson

        content = orjson.loads(tokenizer_json)
        if (content["pre_tokenizer"] or {}).get("use_regex") is False:  # gigatoken 0.10.0 ignores it
            raise RuntimeError("the tokenizer does not split text into words")
        added = content["added_tokens"]
        content["added_tokens"] = [token for token in added if parse_special_tokens or not token["special"]]
        if any(token["single_word"] for token in content["added_tokens"]):  # gigatoken 0.10.0 ignores this, too
            raise RuntimeError("the tokenizer has added tokens that match single words only")
        self.start = functools.partial(gigatoken.Tokenizer.from_json, orjson.dumps(content).decode())
        self.tokenizer: Any = self.start()  # it returns awkward arrays, whose type does not say what they hold
        self.unchecked = 0
        self.process = psutil.Process()
        self.first_bytes = self.process.memory_info().rss

    def __call__(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        rows = self.tokenizer.encode_batch(list(texts), parallel=False).layout
        self.unchecked += sum(map(len, texts))
        if self.unchecked > UNCHECKED_CHARACTERS:
            self.unchecked = 0
            if self.process.memory_info().rss - self.first_bytes > CACHE_BYTES:
                self.tokenizer = self.start()
        return rows.content.data, np.diff(rows.offsets.data)


def encode_documents(encode: Encode, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Encode texts of any length, the long ones in pieces. Returns the same as `encode`, in little memory."""
    pieces = [list(cut_text(text, encode)) for text in texts]
    parts = [encode(batch) for batch in batches(piece for of_text in pieces for piece in of_text)]
    ids, lengths = map(np.concatenate, zip(*parts, strict=True))
    firsts = np.cumsum([0, *map(len, pieces[:-1])])
    return ids, np.add.reduceat(lengths, firsts)


def batches(texts: Iterator[str] | Sequence[str]) -> Iterator[list[str]]:
    """Group texts into batches of about `BATCH_CHARACTERS`."""
    batch = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch


def cut_text(text: str, encode: Encode) -> Iterator[str]:
    """Cut a long text into pieces that have the same ids as the whole."""
    start = end = 0
    while len(text) - end > BATCH_CHARACTERS:
        cut = find_cut(text, end, end + BATCH_CHARACTERS, encode)
        end = cut or end + BATCH_CHARACTERS
        if cut:
            yield text[start:cut]
            start = cut
    yield text[start:]


def find_cut(text: str, start: int, end: int, encode: Encode) -> int | None:
    """Return the last place between two positions where this tokenizer ends a word; None if none is found.

    Most tokenizers do after a line break, and before a space, if the characters on both sides are not white space.
    Whether this one does is tried on the text around the place.
    """
    for mark, shift in (("\n", 1), (" ", 0)):
        position = text.rfind(mark, start + 1, end - 1)
        num_tries = 0
        while position > start and num_tries < 3:
            if not text[position - 1].isspace() and not text[position + 1].isspace():
                cut = position + shift
                num_tries += 1
                left, right = text[max(start, cut - SEAM) : cut], text[cut : cut + SEAM]
                ids, lengths = encode([left + right, left, right])
                if np.array_equal(ids[: lengths[0]], ids[lengths[0] :]):
                    return cut
            position = text.rfind(mark, start + 1, position)
    return None
