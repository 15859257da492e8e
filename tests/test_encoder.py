"""gigatoken encodes only if its ids are those of tokenizers, and the pieces of a long text have the text's ids."""

import json

import gigatoken
import numpy as np
import pytest
from conftest import make_documents
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import GPT2Tokenizer, PreTrainedTokenizerFast

from recipe.data import encode as encode_module
from recipe.data.encode import Encode, build_encoder, choose_encoder, cut_text
from recipe.data.tokenizer import load_tokenizer

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
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.encode_special_tokens = True
    return [backend.encode(text, add_special_tokens=False).ids for text in texts]


def chosen(tokenizer, sample=()) -> tuple[Encode, str]:
    """Return the encoder that is chosen on a sample, and why."""
    name, how = choose_encoder(tokenizer, sample)
    assert how.startswith(name)
    return build_encoder(tokenizer, name), how


def wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def changed(tokenizer, **parts) -> PreTrainedTokenizerFast:
    """Replace a part of the tokenizer's tokenizer.json."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    return wrapped(Tokenizer.from_str(json.dumps({**content, **parts})))


def test_gigatoken_returns_the_tokenizers_ids(tokenizer):
    """Even for text that looks like a special token, because only the packer ends documents; for empty texts, too."""
    encode, how = chosen(tokenizer, make_documents(20))
    assert how.startswith("gigatoken")
    for texts in (HARD, make_documents(20), [], [""], ["", "", "a"], [*HARD, "c"], *([text] for text in HARD)):
        ids, lengths = encode(texts)
        expected = ids_of(tokenizer, texts)
        assert ids.dtype == np.uint32 and lengths.tolist() == list(map(len, expected))
        assert ids.tolist() == [i for one in expected for i in one]
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == "".join(texts)
        assert tokenizer.eos_token_id not in ids


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def use_split_pattern(tokenizer) -> PreTrainedTokenizerFast:
    """Newer tokenizers split by a regular expression before ByteLevel."""
    other = changed(tokenizer)
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    return other


def test_gigatoken_uses_the_tokenizers_split_pattern(tokenizer):
    other = use_split_pattern(tokenizer)
    encode, how = chosen(other, make_documents(20))
    assert how.startswith("gigatoken")
    assert [encode([text])[0].tolist() for text in HARD] == ids_of(other, HARD) != ids_of(tokenizer, HARD)


def changes(tokenizer) -> dict[str, dict]:
    """Changes of a tokenizer.json that gigatoken may refuse, ignore or implement."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model, byte_level, special = content["model"], content["pre_tokenizer"], content["added_tokens"][0]
    added = {**special, "id": 500, "content": "the", "special": False}
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
        "added token": {"added_tokens": [special, added]},
        "added word": {"added_tokens": [special, {**added, "single_word": True}]},
        "padding": {"padding": {"strategy": {"Fixed": 5000}, "direction": "Right", "pad_to_multiple_of": None,
                                "pad_id": 5, "pad_type_id": 0, "pad_token": "x"}},
        "truncation": {"truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}},
    }  # fmt: skip


@pytest.mark.parametrize("name", changes(GPT2Tokenizer()))
@pytest.mark.parametrize("encoder", ["chosen", "tokenizers"])
def test_no_part_of_a_tokenizer_is_lost(tokenizer, name, encoder):
    """Whoever encodes, the ids are the tokenizer's; padding and truncation are ignored."""
    parts = changes(tokenizer)[name]
    other = changed(tokenizer, **parts)
    encode, how = chosen(other, make_documents(3)) if encoder == "chosen" else (build_encoder(other, encoder), None)
    assert how is None or how.startswith(("gigatoken (equal to tokenizers", "tokenizers (gigatoken cannot be used: "))
    expected = ids_of(tokenizer if name in ("padding", "truncation") else other, HARD)
    assert [encode([text])[0].tolist() for text in HARD] == expected


def test_an_encoder_with_other_ids_is_not_used(tokenizer, monkeypatch):
    """tokenizers encodes if a single id differs on the sample; the description says so."""
    real = gigatoken.Tokenizer.encode_batch

    def wrong(self, texts, parallel):
        return real(self, [text.replace("plain", "plane") for text in texts], parallel=parallel)

    monkeypatch.setattr(gigatoken.Tokenizer, "encode_batch", wrong)
    encode, how = chosen(tokenizer, [*make_documents(15), "a plain text"])
    assert how == "tokenizers (gigatoken cannot be used: its ids differ on this text)"
    assert encode(["a plain cat"])[0].tolist() == ids_of(tokenizer, ["a plain cat"])[0]


def test_a_tokenizer_that_is_not_bpe_encodes_itself():
    """The description of the encoder gives gigatoken's reason in one line."""
    backend = Tokenizer(models.WordLevel({"a": 0, "<|endoftext|>": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder, backend.normalizer = decoders.WordPiece(), normalizers.NFC()
    encode, how = chosen(wrapped(backend), ["a b"])
    assert 'Unsupported model type "WordLevel"' in how and "Location" not in how
    assert encode(["a b"])[0].tolist() == [0, 2]


@pytest.mark.parametrize("piece_characters", [1, 20, 300])
@pytest.mark.parametrize("change", [GPT2Tokenizer, use_split_pattern])
def test_the_pieces_of_a_text_have_its_ids(tokenizer, monkeypatch, piece_characters, change):
    """For GPT-2's pattern and its successors, wherever the text has a single line end or space to cut it at."""
    monkeypatch.setattr(encode_module, "PIECE_CHARACTERS", piece_characters)
    other = use_split_pattern(tokenizer) if change is use_split_pattern else tokenizer
    text = "".join(make_documents(20)) + "one two\nthree  \n\n four,\tfive\r\nsix 'll  \u00a0 seven\u2028 eight"
    pieces = list(cut_text(text))
    assert "".join(pieces) == text
    if piece_characters > 1:
        assert len(pieces) > len(text) / piece_characters
        encode = chosen(other, [text])[0]
        assert encode(pieces)[0].tolist() == ids_of(other, [text])[0]
