"""Encoding: tiktoken encodes only if its ids are the tokenizer's, and ids do not depend on pieces or threads."""

import json

import numpy as np
import pytest
from conftest import make_documents
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from recipe.data import encoder
from recipe.data.documents import Piece
from recipe.data.encoder import (
    BETWEEN_TEXTS,
    NotEqual,
    build_encoder,
    build_text_encoder,
    count_token_bytes,
    encode_pieces,
    to_tiktoken,
)
from recipe.data.tokenizer import load_tokenizer
from recipe.errors import UserError

HARD = [
    "a <|endoftext|> b", "don't we'll I'VE", "  two  spaces   three\n\n\nlines\t\ttabs \u00a0 nbsp\u2028", "x" * 3000,
    "123456 7,890.12", "\U0001d518nseen \u2211ymbols \x00\x7f\r\n", "\u732b\u732b\u732b", "", " ", "\n",
    "e\u0301 combining", "\u0627\u0644\u0639\u0631\u0628\u064a\u0629",
]  # fmt: skip


@pytest.fixture
def tokenizer(tokenizer_dir):
    return load_tokenizer(str(tokenizer_dir))


@pytest.mark.parametrize("text", HARD + make_documents(20))
def test_tiktoken_returns_the_tokenizers_ids(tokenizer, text):
    """Even for text that looks like a special token, because only the packer ends documents."""
    encode, how = build_text_encoder(tokenizer, [])
    assert how.startswith("tiktoken")
    tokenizer.backend_tokenizer.encode_special_tokens = True
    assert encode([text])[0].tolist() == tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(encode([text])[0], clean_up_tokenization_spaces=False) == text
    assert tokenizer.eos_token_id not in encode([text])[0]


def wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def changed(tokenizer, **parts) -> PreTrainedTokenizerFast:
    """Replace a part of the tokenizer's tokenizer.json."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    return wrapped(Tokenizer.from_str(json.dumps({**content, **parts})))


def test_tiktoken_uses_the_tokenizers_split_pattern(tokenizer):
    """Newer tokenizers split by a regular expression before ByteLevel."""
    pattern = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    backend = changed(tokenizer).backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    encode, how = build_text_encoder(wrapped(backend), make_documents(20))
    assert how.startswith("tiktoken")
    backend.encode_special_tokens = True
    for text in HARD:
        assert encode([text])[0].tolist() == backend.encode(text, add_special_tokens=False).ids


def test_tokenizers_encodes_what_tiktoken_cannot(tokenizer):
    """The description of the encoder gives the reason."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model = content["model"]
    merges = [model["merges"][1], model["merges"][0], *model["merges"][2:]]
    byte_level = content["pre_tokenizer"]
    cases = [
        ({"normalizer": json.loads(json.dumps({"type": "Lowercase"}))}, "normalizes"),
        ({"pre_tokenizer": {**byte_level, "add_prefix_space": True}}, "adds a space"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "by a single regular expression"),
        ({"model": {**model, "merges": merges}}, "order of its merges"),
        ({"model": {**model, "byte_fallback": True}}, "not a plain BPE"),
        ({"added_tokens": [*content["added_tokens"], {**content["added_tokens"][0], "id": 500, "content": "<x>",
                                                      "special": False}]}, "not special"),
    ]  # fmt: skip
    for parts, reason in cases:
        other = changed(tokenizer, **parts)
        with pytest.raises(NotEqual, match=reason):
            to_tiktoken(other)
        encode, how = build_text_encoder(other, ["some text"])
        assert how.startswith("tokenizers (tiktoken cannot be used: this tokenizer") and reason in how
        assert encode(["Some cat"])[0].tolist() == other.backend_tokenizer.encode("Some cat").ids


def test_tiktoken_is_checked_on_the_text(tokenizer, monkeypatch):
    """tokenizers encodes if tiktoken's ids differ on a sample."""
    monkeypatch.setattr(encoder, "GPT2_PATTERN", r"\S+|\s+")
    encode, how = build_text_encoder(tokenizer, ["a plain text", *make_documents(5)])
    assert how == "tokenizers (tiktoken cannot be used: its ids differ on this text)"
    assert encode(["the cat"])[0].tolist() == tokenizer("the cat")["input_ids"]


def test_a_tokenizer_that_is_not_bpe_encodes_itself():
    """tiktoken supports BPE only."""
    backend = Tokenizer(models.WordLevel({"a": 0, "<|endoftext|>": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder, backend.normalizer = decoders.WordPiece(), normalizers.NFC()
    encode, how = build_text_encoder(wrapped(backend), ["a b"])
    assert "not a plain BPE" in how and encode(["a b"])[0].tolist() == [0, 2]


def test_texts_encoded_together_have_the_ids_of_each(tokenizer):
    """This includes empty texts and a text that holds the internal separator."""
    encode = build_text_encoder(tokenizer, [])[0]
    for texts in (HARD, [], [""], ["", "", "a"], [*HARD, f"a{BETWEEN_TEXTS}b", "c"]):
        ids, lengths = encode(texts)
        assert ids.dtype == np.uint32 and len(lengths) == len(texts)
        backend = tokenizer.backend_tokenizer
        backend.encode_special_tokens = True
        expected = [backend.encode(text, add_special_tokens=False).ids for text in texts]
        assert lengths.tolist() == list(map(len, expected))
        assert ids.tolist() == [i for one in expected for i in one]


@pytest.mark.parametrize("num_workers", [1, 4])
@pytest.mark.parametrize("batch_characters", [1, 200, 10**9])
def test_pieces_come_back_in_order(tokenizer, monkeypatch, num_workers, batch_characters):
    """For any batches and threads, each split has its ids and bytes, and the end-of-text id after each document."""
    monkeypatch.setattr(encoder, "BATCH_CHARACTERS", batch_characters)
    splits = ["train", "train", "validation"]
    pieces = [Piece(splits[i % 3], text + "\u00e9", i % 4 != 0) for i, text in enumerate(make_documents(40))]
    batches = list(encode_pieces(build_encoder(tokenizer, pieces)[0], iter(pieces), num_workers))
    assert sum(num_pieces for num_pieces, _ in batches) == len(pieces)
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    for split in ("train", "validation"):
        found = [part for _, parts in batches for part in parts if part.split == split]
        ids, ends, position = [], [], 0
        for piece in pieces:
            if piece.split == split:
                ids += backend.encode(piece.text, add_special_tokens=False).ids
                if piece.ends:
                    ids.append(tokenizer.eos_token_id)
                    ends.append(len(ids))
        assert np.concatenate([part.ids for part in found]).tolist() == ids
        for part in found:
            assert all(part.ids[end - 1] == tokenizer.eos_token_id for end in part.ends)
            assert [position + end for end in part.ends] == ends[: len(part.ends)]
            ends, position = ends[len(part.ends) :], position + len(part.ids)
        assert not ends
        expected = sum(len(piece.text.encode()) for piece in pieces if piece.split == split)
        assert sum(part.num_bytes for part in found) == expected


def test_token_ids_are_kept_and_their_bytes_counted(tokenizer):
    """Ids beyond the vocabulary, and text among them, are errors."""
    texts = ["the cat sat\n", "caf\u00e9 \U0001d518", "on <b> it"]
    rows = [np.array(tokenizer(text)["input_ids"]) for text in texts]
    encode, how, _ = build_encoder(tokenizer, [Piece("train", row, True) for row in rows])
    assert "'the cat sat" in how
    _, ids, ends, num_bytes = encode([Piece("train", row, True) for row in rows])
    expected = [*build_encoder(tokenizer, [])[0]([Piece("train", text, True) for text in texts])]
    assert (ids.tolist(), ends.tolist()) == (expected[1].tolist(), expected[2].tolist())
    assert num_bytes == expected[3] == sum(len(text.encode()) for text in texts)
    with pytest.raises(UserError, match="contains token id 500, but the tokenizer has 500 tokens"):
        encode([Piece("train", np.array([1, 500]), True)])
    with pytest.raises(UserError, match="some documents are text and some are token ids; prepare them separately"):
        encode([Piece("train", rows[0], True), Piece("train", "text", True)])


def test_token_ids_need_a_byte_level_tokenizer():
    """Otherwise their bytes cannot be counted."""
    backend = Tokenizer(models.WordLevel({"\u2581a": 0, "<|endoftext|>": 1}, unk_token="[UNK]"))
    with pytest.raises(UserError, match="needs a byte-level tokenizer; this one has the token '\u2581a'"):
        count_token_bytes(wrapped(backend))


def test_only_a_few_batches_are_read_ahead(tokenizer, monkeypatch):
    """Memory does not depend on the size of the corpus."""
    monkeypatch.setattr(encoder, "BATCH_CHARACTERS", 1)
    drawn = []

    def endless():
        while True:
            drawn.append(1)
            yield Piece("train", "text", True)

    batches = encode_pieces(build_encoder(tokenizer, [])[0], endless(), 3)
    for _ in range(10):
        next(batches)
    batches.close()
    assert len(drawn) < 10 + 3 * 4
