"""Encoding: gigatoken encodes only if its ids are the tokenizer's, and ids do not depend on pieces or threads."""

import itertools
import json
import os

import gigatoken
import numpy as np
import pytest
from conftest import make_documents
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import GPT2Tokenizer, PreTrainedTokenizerFast

from recipe.data import encoder
from recipe.data.documents import Piece
from recipe.data.encoder import Gigatoken, build_encoder, build_text_encoder, count_token_bytes, encode_pieces
from recipe.data.files import find_cut
from recipe.data.tokenizer import load_tokenizer
from recipe.errors import UserError

HARD = [
    "the them bathe, the", "a <x> b<x>",
    "a <|endoftext|> b", "don't we'll I'VE", "  two  spaces   three\n\n\nlines\t\ttabs \u00a0 nbsp\u2028", "x" * 3000,
    "123456 7,890.12", "\U0001d518nseen \u2211ymbols \x00\x7f\r\n", "\u732b\u732b\u732b", "", " ", "\n",
    "e\u0301 combining", "\u0627\u0644\u0639\u0631\u0628\u064a\u0629",
]  # fmt: skip


@pytest.fixture
def tokenizer(tokenizer_dir):
    return load_tokenizer(str(tokenizer_dir))


def ids_of(tokenizer, texts) -> list[list[int]]:
    """What tokenizers itself returns for each text, special tokens as characters."""
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    return [backend.encode(text, add_special_tokens=False).ids for text in texts]


@pytest.mark.parametrize("text", HARD + make_documents(20))
def test_gigatoken_returns_the_tokenizers_ids(tokenizer, text):
    """Even for text that looks like a special token, because only the packer ends documents."""
    encode, how = build_text_encoder(tokenizer, [])
    assert how.startswith("gigatoken")
    assert encode([text])[0].tolist() == ids_of(tokenizer, [text])[0]
    assert tokenizer.decode(encode([text])[0], clean_up_tokenization_spaces=False) == text
    assert tokenizer.eos_token_id not in encode([text])[0]


def wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def changed(tokenizer, **parts) -> PreTrainedTokenizerFast:
    """Replace a part of the tokenizer's tokenizer.json."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    return wrapped(Tokenizer.from_str(json.dumps({**content, **parts})))


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def test_gigatoken_uses_the_tokenizers_split_pattern(tokenizer):
    """Newer tokenizers split by a regular expression before ByteLevel."""
    other = changed(tokenizer)
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    encode, how = build_text_encoder(other, make_documents(20))
    assert how.startswith("gigatoken") and encode.takes_parts()
    assert [encode([text])[0].tolist() for text in HARD] == ids_of(other, HARD) != ids_of(tokenizer, HARD)


def changes(tokenizer) -> dict[str, dict]:
    """Changes of a tokenizer.json that gigatoken may refuse, ignore or implement."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model, byte_level, special = content["model"], content["pre_tokenizer"], content["added_tokens"][0]
    return {
        "lower case": {"normalizer": {"type": "Lowercase"}},
        "composed": {"normalizer": {"type": "NFC"}},
        "words": {"pre_tokenizer": {"type": "Whitespace"}},
        "no pattern": {"pre_tokenizer": {**byte_level, "use_regex": False}},
        "space in front": {"pre_tokenizer": {**byte_level, "add_prefix_space": True}},
        "order of merges": {"model": {**model, "merges": model["merges"][::-1]}},
        "dropout": {"model": {**model, "dropout": 1.0}},
        "byte fallback": {"model": {**model, "byte_fallback": True}},
        "whole words": {"model": {**model, "ignore_merges": True}},
        "added token": {"added_tokens": [special, {**special, "id": 500, "content": "the", "special": False}]},
        "added word": {
            "added_tokens": [special, {**special, "id": 500, "content": "the", "single_word": True, "special": False}]
        },
    }


@pytest.mark.parametrize("name", changes(GPT2Tokenizer()))
def test_no_part_of_a_tokenizer_is_lost(tokenizer, name):
    """Whoever encodes, the ids are the tokenizer's; and documents are cut only where that changes nothing."""
    other = changed(tokenizer, **changes(tokenizer)[name])
    encode, how = build_text_encoder(other, make_documents(3))
    assert how.startswith(("gigatoken (equal to tokenizers", "tokenizers (gigatoken cannot be used: "))
    assert [encode([text])[0].tolist() for text in HARD] == ids_of(other, HARD)
    text = "".join(make_documents(3))
    if isinstance(encode, Gigatoken) and encode.takes_parts():
        cuts = [0, find_cut(text, 200), find_cut(text, 400), len(text)]
        parts = [text[start:end] for start, end in itertools.pairwise(cuts)]
        assert encode(parts)[0].tolist() == ids_of(other, [text])[0]
    else:
        assert how.startswith("tokenizers") or name in ("space in front", "added token")
        assert name not in ("order of merges", "whole words")


def test_an_encoder_with_other_ids_is_not_used(tokenizer, monkeypatch):
    """tokenizers encodes if a single id differs on the sample; the description says so."""
    real = gigatoken.Tokenizer.encode_batch

    def wrong(self, texts, parallel):
        return real(self, [text.replace("plain", "plane") for text in texts], parallel=parallel)

    monkeypatch.setattr(gigatoken.Tokenizer, "encode_batch", wrong)
    encode, how = build_text_encoder(tokenizer, [*make_documents(15), "a plain text"])
    assert how == "tokenizers (gigatoken cannot be used: its ids differ on this text)"
    assert encode(["a plain cat"])[0].tolist() == ids_of(tokenizer, ["a plain cat"])[0]


def test_a_tokenizer_that_is_not_bpe_encodes_itself():
    """The description of the encoder gives gigatoken's reason in one line."""
    backend = Tokenizer(models.WordLevel({"a": 0, "<|endoftext|>": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder, backend.normalizer = decoders.WordPiece(), normalizers.NFC()
    encode, how = build_text_encoder(wrapped(backend), ["a b"])
    assert 'Unsupported model type "WordLevel"' in how and "Location" not in how
    assert encode(["a b"])[0].tolist() == [0, 2]


@pytest.mark.parametrize("character", ["࢏", "꟱", "᫏", "𲎰", "𞛀", "⮖"])
def test_characters_that_are_new_in_unicode_17(tokenizer, character):
    """gigatoken knows them and tokenizers does not; the ids are those of tokenizers."""
    texts = ["the cat", f"{character}'s 1{character}2 a{character}b", "sat"]
    encode, how = build_text_encoder(tokenizer, [])
    assert how.startswith("gigatoken")
    assert encode(texts)[0].tolist() == [i for ids in ids_of(tokenizer, texts) for i in ids]


def test_texts_encoded_together_have_the_ids_of_each(tokenizer):
    """This includes empty texts."""
    encode = build_text_encoder(tokenizer, [])[0]
    for texts in (HARD, [], [""], ["", "", "a"], [*HARD, "c"]):
        ids, lengths = encode(texts)
        assert ids.dtype == np.uint32 and len(lengths) == len(texts)
        expected = ids_of(tokenizer, texts)
        assert lengths.tolist() == list(map(len, expected))
        assert ids.tolist() == [i for one in expected for i in one]


@pytest.mark.parametrize(("limit", "num_built"), [(2**40, 1), (-(2**40), 11)])
def test_the_encoder_starts_over_when_its_cache_has_grown(tokenizer, monkeypatch, limit, num_built):
    """A new tokenizer replaces one whose process has grown beyond the limit; the ids stay the same."""
    monkeypatch.setattr(encoder, "OTHER_BYTES", limit)
    monkeypatch.setattr(encoder, "UNCHECKED_CHARACTERS", 10_000)
    built, real = [], gigatoken.Tokenizer.from_json
    monkeypatch.setattr(gigatoken.Tokenizer, "from_json", lambda content: built.append(1) or real(content))
    encode = build_text_encoder(tokenizer, [])[0]
    rng = np.random.default_rng(0)
    texts = [" ".join(map(str, rng.integers(10**8, 10**9, 2_000))) for _ in range(10)]
    assert [encode([text])[0].tolist() for text in texts] == ids_of(tokenizer, texts)
    assert len(built) == num_built


def test_encoding_works_in_a_forked_process(tokenizer):
    """A process that has encoded with threads may fork, and its child encode."""
    pieces = [Piece("train", text, True) for text in make_documents(40)]
    encode = build_encoder(tokenizer, pieces)[0]
    expected = encode(pieces).ids
    list(encode_pieces(encode, pieces, 2))
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(encode(pieces).ids, expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("num_workers", [1, 4])
@pytest.mark.parametrize("batch_characters", [1, 200, 10**9])
def test_pieces_come_back_in_order(tokenizer, monkeypatch, num_workers, batch_characters):
    """For any batches and threads, each split has its ids and bytes, and the end-of-text id after each document."""
    monkeypatch.setattr(encoder, "BATCH_CHARACTERS", batch_characters)
    splits = ["train", "train", "validation"]
    pieces = [Piece(splits[i % 3], text + "\u00e9", i % 4 != 0) for i, text in enumerate(make_documents(40))]
    batches = list(encode_pieces(build_encoder(tokenizer, pieces)[0], iter(pieces), num_workers))
    assert sum(batch.num_pieces for batch in batches) == len(pieces)
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    for split in ("train", "validation"):
        found = [part for batch in batches for part in batch.splits if part.split == split]
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
