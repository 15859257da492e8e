"""The ids of a text are its tokenizer's, whoever encodes it; what they stand for is known, or said to be unknown."""

import json
import shutil
import time
from pathlib import Path

import gigatoken
import numpy as np
import pytest
from corpora import write_jsonl, write_text
from helpers import ONE_STEP, PLAIN, TINY, make_documents, read_events, read_summary
from small_model import save_small_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from recipe.data import encode as encode_module
from recipe.data.encode import Encode, build_encoder, choose_encoder, cut_text, encode_documents
from recipe.data.packed import open_packed_dataset
from recipe.data.prepare import prepare_dataset
from recipe.data.source import TextSource
from recipe.data.tokenizer import (
    count_ids,
    count_token_bytes,
    cut_words,
    load_tokenizer,
    save_tokenizer,
    text_ids,
    tokenizer_sha256,
    train_tokenizer,
)
from recipe.evaluation.generation import load_model

END = "<|endoftext|>"
ENGLISH = "".join(make_documents(60)) + "    if x:\n        return  y\n"
RUSSIAN = "Съешь ещё этих мягких французских булок, да выпей же чаю.\n" * 30
HARD = [
    "the them bathe, the", "a <x> b<x>",
    "a <|endoftext|> b", "don't we'll I'VE", "  two  spaces   three\n\n\nlines\t\ttabs \u00a0 nbsp\u2028", "x" * 3000,
    "123456 7,890.12", "\U0001d518nseen \u2211ymbols \x00\x7f\r\n", "\u732b\u732b\u732b", "", " ", "\n",
    "e\u0301 combining", "\u0627\u0644\u0639\u0631\u0628\u064a\u0629",
]  # fmt: skip
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def text_tokenizer(backend: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)


def unchanged(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    return tokenizer


def with_newer_pattern(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """As Llama 3's and Qwen's, which split by a regular expression before they map bytes."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    return text_tokenizer(backend)


# ------------------------------------------------------------------ ids


def ids_of(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
    """Return what `tokenizers` itself has for each text, special tokens as characters."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.encode_special_tokens = True
    return [backend.encode(text, add_special_tokens=False).ids for text in texts]


def chosen(tokenizer: PreTrainedTokenizerFast, sample: list[str]) -> tuple[Encode, str]:
    """Return the encoder that is chosen on a sample, and why."""
    name, encode, how = choose_encoder(tokenizer.backend_tokenizer.to_str(), sample)
    assert how.startswith(name)
    return encode, how


@pytest.mark.parametrize("change", [unchanged, with_newer_pattern])
def test_gigatoken_returns_the_ids_of_tokenizers(tokenizer, change):
    """Even for text that looks like a special token, because only the packer ends documents; for empty texts, too."""
    other = change(tokenizer)
    encode, how = chosen(other, make_documents(20))
    assert how.startswith("gigatoken")
    for texts in (HARD, make_documents(20), [], [""], ["", "", "a"], [*HARD, "c"], *([text] for text in HARD)):
        ids, lengths = encode(texts)
        expected = ids_of(other, texts)
        assert ids.dtype == np.uint32 and lengths.tolist() == list(map(len, expected))
        assert ids.tolist() == [index for of_text in expected for index in of_text]
        assert other.backend_tokenizer.decode(ids, skip_special_tokens=False) == "".join(texts)
        assert other.eos_token_id not in ids
    assert (ids_of(other, HARD) == ids_of(tokenizer, HARD)) == (change is unchanged)


def changes_of(content: dict) -> dict[str, dict]:
    """Return changes of a tokenizer.json that gigatoken may refuse, ignore or implement."""
    model, byte_level, special = content["model"], content["pre_tokenizer"], content["added_tokens"][0]
    added = {**special, "id": 500, "content": "the", "special": False}
    return {
        "lower case": {"normalizer": {"type": "Lowercase"}},
        "no pattern": {"pre_tokenizer": {**byte_level, "use_regex": False}},
        "dropout": {"model": {**model, "dropout": 1.0}},
        "added token": {"added_tokens": [special, added]},
        "added word": {"added_tokens": [special, {**added, "single_word": True}]},
        "padding": {"padding": {"strategy": {"Fixed": 5000}, "direction": "Right", "pad_to_multiple_of": None,
                                "pad_id": 5, "pad_type_id": 0, "pad_token": "x"}},
        "truncation": {"truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}},
    }  # fmt: skip


@pytest.mark.parametrize("name", changes_of({"model": {"merges": []}, "pre_tokenizer": {}, "added_tokens": [{}]}))
@pytest.mark.parametrize("encoder", ["chosen", "tokenizers"])
def test_no_part_of_a_tokenizer_is_lost(tokenizer, name, encoder):
    """Whoever encodes, the ids are the tokenizer's; padding and truncation are ignored."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    other = text_tokenizer(Tokenizer.from_str(json.dumps(content | changes_of(content)[name])))
    expected = ids_of(tokenizer if name in ("padding", "truncation") else other, HARD)
    encode = build_encoder(other.backend_tokenizer.to_str(), "tokenizers")
    encode = chosen(other, make_documents(3))[0] if encoder == "chosen" else encode
    assert [encode([text])[0].tolist() for text in HARD] == expected


def test_an_encoder_that_differs_in_one_id_is_not_used(tokenizer, monkeypatch):
    real = gigatoken.Tokenizer.encode_batch

    def wrong(self, texts, parallel):
        return real(self, [text.replace("plain", "plane") for text in texts], parallel=parallel)

    monkeypatch.setattr(gigatoken.Tokenizer, "encode_batch", wrong)
    encode, how = chosen(tokenizer, [*make_documents(15), "a plain text"])
    assert how.startswith("tokenizers")
    assert encode(["a plain cat"])[0].tolist() == ids_of(tokenizer, ["a plain cat"])[0]


def like_llama(_: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    return tokenizer_of(llama)


@pytest.mark.parametrize("batch_characters", [1, 20, 300])
@pytest.mark.parametrize("change", [unchanged, with_newer_pattern, like_llama])
def test_the_pieces_of_a_text_have_its_ids(monkeypatch, batch_characters, change):
    """Whatever the tokenizer, wherever the text has a line end or space to cut it at.

    They are few at a time, because tokenizers needs 110 to 150 bytes for each character that it encodes.
    """
    monkeypatch.setattr(encode_module, "BATCH_CHARACTERS", batch_characters)
    hard = "one two\nthree  \n\n four,\tfive\r\nsix 'll  \u00a0 seven\u2028 eight"
    text = "".join(make_documents(20)) + "two words\n\n and more\n\n" * 20 + hard
    tokenizer = change(train_tokenizer([text], 400))  # runs of white space have tokens
    encode = chosen(tokenizer, [text])[0]
    sizes = []

    def count_and_encode(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        sizes.append(sum(map(len, texts)))
        return encode(texts)

    assert encode_documents(count_and_encode, [text, "a"])[0].tolist() == sum(ids_of(tokenizer, [text, "a"]), [])
    assert batch_characters == 1 or max(sizes) < len(text) / 3
    pieces = list(cut_text(text, encode))
    assert "".join(pieces) == text
    assert batch_characters == 1 or len(pieces) > len(text) / batch_characters / 2


CONFIGS = {
    "a token to add": {"eos_token": END, "pad_token": "<pad>", "tokenizer_class": "GPT2Tokenizer"},
    "several to add": {"eos_token": END, "additional_special_tokens": ["<a>", "<b>"]},
    "another end": {"eos_token": "e", "tokenizer_class": "GPT2Tokenizer"},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_tokenizer_that_its_config_adds_tokens_to_is_that_of_transformers(tmp_path, tokenizer_dir, config):
    folder = Path(shutil.copytree(tokenizer_dir, tmp_path / "tokenizer"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    loaded = load_tokenizer(str(folder))
    expected = AutoTokenizer.from_pretrained(folder)
    assert loaded.eos_token_id == expected.eos_token_id
    assert loaded("the cat, it's 12")["input_ids"] == expected.backend_tokenizer.encode("the cat, it's 12").ids


def digits() -> Tokenizer:
    """As SmolLM2's: each digit is a word, which Transformers 5's class GPT2Tokenizer ignores."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=[END], initial_alphabet=alphabet)
    backend.train_from_iterator(["12 34 5678 " * 99], trainer)  # so there are tokens of several digits
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), backend.pre_tokenizer])
    return backend


CLASSES = {
    "a dictionary": {"eos_token": {"content": END, "__type": "AddedToken"}, "add_bos_token": False},
    "GPT2Tokenizer": {"tokenizer_class": "GPT2Tokenizer", "eos_token": END},
    "the class knows its tokens": {"tokenizer_class": "GPT2Tokenizer"},  # as for files of ByteLevelBPETokenizer
}


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("is_tuned", [False, True])
def test_a_tokenizer_that_its_class_would_rebuild_is_its_tokenizer_json(tmp_path, train, model_dir, name, is_tuned):
    """In training, and for AutoTokenizer on the exported model, new or fine-tuned."""
    text = "at 12:34, 5678 of them"
    folder = tmp_path / "tokenizer"
    write_text(tmp_path / "a.txt", (ENGLISH + text) * 9)
    tokenizer = text_tokenizer(digits())
    expected = tokenizer.backend_tokenizer.encode(text).ids
    save_tokenizer(tokenizer, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(CLASSES[name]))
    options = ["--tokenizer_name", folder, *TINY]
    if is_tuned:
        save_small_model(tmp_path / "model", folder, vocab_size=count_ids(tokenizer))
        options = ["--model_name_or_path", shutil.copytree(folder, tmp_path / "model", dirs_exist_ok=True)]
        assert AutoTokenizer.from_pretrained(tmp_path / "model")(text)["input_ids"] != expected
    options += ["--train_file", tmp_path / "a.txt", "--cache_dir", tmp_path / "cache", "--block_size", 16, *ONE_STEP]
    train(*options, *PLAIN, "--global_batch_size", 4, "--output_dir", tmp_path / "run", alone=True)
    for loaded in (AutoTokenizer.from_pretrained(tmp_path / "run"), load_model(tmp_path / "run", "cpu")[1]):
        assert loaded(text)["input_ids"] == expected
        assert loaded.eos_token == END
    (packed,) = (tmp_path / "cache").iterdir()
    assert open_packed_dataset(packed, 8).tokenizer(text)["input_ids"] == expected


# ------------------------------------------------------------------ bytes


def gpt_neox() -> Tokenizer:
    """As Pythia's, OLMo's and MPT's: bytes, and added tokens for runs of spaces."""
    backend = train_tokenizer([ENGLISH + RUSSIAN], 500).backend_tokenizer
    backend.add_tokens([AddedToken(" " * count, normalized=False) for count in (2, 4, 8)])
    backend.normalizer = normalizers.NFC()
    return backend


def llama() -> Tokenizer:
    """As Llama 2's: spaces are marked, also one in front of a text, and what no token spells is spelled in bytes."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.train_from_iterator([ENGLISH], trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", END]))
    content = json.loads(backend.to_str())
    content["model"]["vocab"] |= {f"<0x{byte:02X}>": 300 + byte for byte in range(256)}
    return Tokenizer.from_str(json.dumps(content))


def newer() -> Tokenizer:
    return with_newer_pattern(train_tokenizer([ENGLISH + RUSSIAN], 500)).backend_tokenizer


def characters() -> Tokenizer:
    """A token for each character, with gaps between the ids."""
    found = sorted(set(ENGLISH + RUSSIAN))
    vocabulary = {character: 3 * number for number, character in enumerate(found)}
    backend = Tokenizer(models.WordLevel({**vocabulary, "[UNK]": 1, END: 3 * len(found) + 1}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return backend


def word_piece() -> Tokenizer:
    """As BERT's: it drops white space, and marks what continues a word."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", END])
    backend.train_from_iterator([ENGLISH], trainer)
    return backend


def lacking() -> Tokenizer:
    """As ByteLevelBPETokenizer's without `initial_alphabet`: bytes that the training text lacks have no token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.train_from_iterator(["plain words and 0123456789.\n" * 9], trainers.BpeTrainer(special_tokens=[END]))
    return backend


def spaced() -> Tokenizer:
    """It puts a space in front of a text."""
    backend = train_tokenizer([ENGLISH], 400).backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return backend


def tokenizer_of(make) -> PreTrainedTokenizerFast:
    backend = make()
    backend.add_special_tokens([END])
    return text_tokenizer(backend)


@pytest.mark.parametrize("make", [newer, digits])
def test_the_bytes_of_the_ids_are_those_of_the_text(make):
    """In languages that take one byte for a character, and two. The end of text has none."""
    tokenizer = tokenizer_of(make)
    counts = count_token_bytes(tokenizer)
    for text in (ENGLISH, RUSSIAN):
        ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert counts[ids].sum() == len(text.encode())
    assert counts[tokenizer.eos_token_id] == 0
    assert len(counts) == count_ids(tokenizer) > max(ids)


@pytest.mark.parametrize("make", [gpt_neox, llama, characters, word_piece, lacking, spaced])
def test_bytes_that_are_not_known_are_not_guessed(make):
    """Of a tokenizer that changes or drops text, or does not spell bytes."""
    assert count_token_bytes(tokenizer_of(make)) is None


def test_special_tokens_are_no_text_but_unknown_text_is():
    tokenizer = tokenizer_of(llama)
    tokenizer.backend_tokenizer.add_special_tokens(["<pad>", "<unk>"])
    others = {tokenizer.backend_tokenizer.token_to_id(token) for token in ("<pad>", END)}
    assert set(np.flatnonzero(~text_ids(tokenizer)).tolist()) == others


@pytest.mark.parametrize(
    ("make", "text", "said"),
    [
        (characters, RUSSIAN, ""),
        (characters, "犬" * 99, "warning: 99.3% of the tokens are [UNK]"),
        (characters, ENGLISH[:2000] + "犬", "0.0% of the tokens are [UNK]"),
        (word_piece, ENGLISH[:2000], ""),
        (lacking, "plain 猫 words\n" * 99, "warning: this tokenizer has no token for unknown text"),
        (gpt_neox, "plain e\u0301\n" * 99, ""),
        (spaced, ENGLISH, ""),
    ],
)
@pytest.mark.parametrize("parses", [False, True])
def test_the_bytes_of_a_dataset_are_those_of_its_text_as_read(tmp_path, make, text, said, parses, capsys):
    """Whatever a tokenizer makes of it: a normalizer, a space in front. What it cannot spell is said."""
    train, validation = (write_text(tmp_path / f"{name}.txt", text * count) for name, count in (("a", 2), ("b", 1)))
    source = TextSource((train,), (validation,), parse_special_tokens=parses)
    tokenizer = tokenizer_of(make)
    made = prepare_dataset(source, tmp_path / "d", tokenizer)
    out = capsys.readouterr().out
    assert said in out
    assert ("warning" in out) == ("warning" in said)
    counts = made["splits"]["validation"]
    assert (counts["bytes"], counts["text_tokens"]) == (len(text.encode()), len(ids_of(tokenizer, [text])[0]))


def test_parsed_special_tokens_have_no_bytes(tmp_path, tokenizer_dir):
    """Neither have the ends that packing does not repeat."""
    tokenizer = load_tokenizer(str(tokenizer_dir))
    tokenizer.backend_tokenizer.add_special_tokens(["<|user|>"])
    rows = [f"<|user|>über {number} the cat{END * (number % 2)}" for number in range(40)]
    source = TextSource((write_jsonl(tmp_path / "a.jsonl", rows),), parse_special_tokens=True)
    splits = prepare_dataset(source, tmp_path / "d", tokenizer)["splits"].values()
    text = [row.replace("<|user|>", "").replace(END, "") for row in rows]
    assert sum(split["bytes"] for split in splits) == len("".join(text).encode())
    assert sum(split["text_tokens"] for split in splits) == sum(map(len, ids_of(tokenizer, text)))
    assert sum(split["tokens"] - split["text_tokens"] for split in splits) == 80


@pytest.mark.parametrize("make", [gpt_neox, llama, newer, characters, word_piece, digits, lacking])
def test_a_tokenizer_and_its_identity_survive_saving(tmp_path, tokenizer, make):
    """This holds with gaps between the ids, too. Another tokenizer has another identity."""
    saved = tokenizer_of(make)
    save_tokenizer(saved, tmp_path)
    assert count_ids(load_tokenizer(str(tmp_path))) == count_ids(saved)
    assert tokenizer_sha256(load_tokenizer(str(tmp_path))) == tokenizer_sha256(saved) != tokenizer_sha256(tokenizer)


def test_a_run_without_bits_per_byte_has_losses(tmp_path, train, capsys):
    """On token ids that do not say how long their text was. They are null in files and a dash in lines.

    The vocabulary of the model is the largest id + 1, also if there are gaps between the ids.
    """
    tokenizer = tokenizer_of(characters)
    text = write_jsonl(tmp_path / "a.jsonl", ids_of(tokenizer, make_documents(200)))
    prepare_dataset(TextSource((text,)), tmp_path / "d", tokenizer)
    run = train(*ONE_STEP, dataset_dir=tmp_path / "d")
    out = capsys.readouterr().out
    assert ", - bits/byte" in out and "bits_per_byte:     -" in out
    summary = read_summary(run)
    assert {event["bits_per_byte"] for event in [*read_events(run, "eval"), summary]} == {None}
    assert summary["eval_loss"] > 1
    largest = max(tokenizer.backend_tokenizer.get_vocab().values())
    assert json.loads((run / "config.json").read_text())["vocab_size"] == largest + 1


# ------------------------------------------------------------------ training a tokenizer


def test_training_on_text_without_spaces_takes_no_quadratic_time():
    """Only words of a thousand characters are cut for it."""
    long = f"a {'b' * 2500} c"
    assert list(cut_words(long)) == [f"a {'b' * 1000}", "b" * 1000, f"{'b' * 500} c"]
    assert list(cut_words(ENGLISH)) == [ENGLISH]
    text = "".join(np.random.default_rng(0).choice(list("ACGT"), 100_000))
    started_at = time.perf_counter()
    assert len(train_tokenizer([text], 300)) == 300
    assert time.perf_counter() - started_at < 1.0  # 5 s and more if it is one word
