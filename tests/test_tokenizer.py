"""What a tokenizer's ids stand for: bytes of text, or unknown text; what is lost or special is said."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import PLAIN, make_documents, read_events, run_script
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from recipe.data.prepare import prepare_dataset
from recipe.data.source import TextSource
from recipe.data.tokenizer import (
    TextTokenizer,
    count_ids,
    count_token_bytes,
    cut_words,
    read_tokenizer,
    train_tokenizer,
)

END = "<|endoftext|>"
ENGLISH = "".join(make_documents(60)) + "    if x:\n        return  y\n"
RUSSIAN = "Съешь ещё этих мягких французских булок, да выпей же чаю.\n" * 30


def gpt_neox() -> Tokenizer:
    """As Pythia's, OLMo's and MPT's: bytes, and added tokens for runs of spaces."""
    backend = train_tokenizer([ENGLISH + RUSSIAN], 500).backend_tokenizer
    backend.add_tokens([AddedToken(" " * count, normalized=False) for count in (2, 4, 8)])
    backend.normalizer = normalizers.NFC()
    return backend


def llama() -> Tokenizer:
    """As Llama 2's and Gemma's: spaces are marked, and what no token spells is spelled in bytes."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.train_from_iterator([ENGLISH], trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", END]))
    content = json.loads(backend.to_str())
    content["model"]["vocab"] |= {f"<0x{byte:02X}>": 300 + byte for byte in range(256)}
    return Tokenizer.from_str(json.dumps(content))


def newer() -> Tokenizer:
    """As Llama 3's and Qwen's: a pattern, and then bytes."""
    backend = train_tokenizer([ENGLISH + RUSSIAN], 500).backend_tokenizer
    split = pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    return backend


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


def words() -> Tokenizer:
    """As in the tutorial of tokenizers: BPE in words, without a token for unknown text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator([ENGLISH], trainers.BpeTrainer(vocab_size=300, special_tokens=[END]))
    return backend


def tokenizer_of(make) -> TextTokenizer:
    backend = make()
    backend.add_special_tokens([END])
    return TextTokenizer(backend, {"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"})


@pytest.mark.parametrize("make", [gpt_neox, llama, newer, characters])
def test_the_bytes_of_the_ids_are_those_of_the_text(make):
    """In languages that take one byte for a character, and two."""
    tokenizer = tokenizer_of(make)
    counts = count_token_bytes(tokenizer)
    for text in (ENGLISH, RUSSIAN):
        ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert counts[ids].sum() == len(text.encode())
    assert counts[tokenizer.eos_token_id] == 0 and len(counts) == count_ids(tokenizer) > max(ids)


@pytest.mark.parametrize("make", [word_piece, words])
def test_bytes_that_are_not_known_are_not_guessed(make):
    """Of a tokenizer that drops white space, none are."""
    tokenizer = tokenizer_of(make)
    counts = count_token_bytes(tokenizer)
    assert counts[tokenizer.eos_token_id] == 0 and set(np.delete(counts, tokenizer.eos_token_id)) == {-1}


@pytest.mark.parametrize(
    ("make", "text", "said", "knows_bytes"),
    [
        (gpt_neox, RUSSIAN, [], True),
        (characters, RUSSIAN, [], True),
        (characters, "犬" * 99, ["warning: 99.0% of the tokens are [UNK]", "no bits per byte"], False),
        (characters, ENGLISH[:2000] + "犬", ["0.0% of the tokens are [UNK]", "no bits per byte"], False),
        (word_piece, ENGLISH[:2000], ["no bits per byte"], False),
        (
            words,
            ENGLISH[:1000] + " " + RUSSIAN[:1000],
            ["warning: this tokenizer has no token for unknown text", "no bits per byte"],
            False,
        ),
    ],
)
def test_what_a_tokenizer_cannot_spell_is_said(tmp_path, make, text, said, knows_bytes, capsys):
    """The share of unknown text is counted, text without any token is noticed, and no count of bytes is wrong."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(text)
    source = TextSource((str(tmp_path / "a.txt"),), (str(tmp_path / "b.txt"),))
    made = prepare_dataset(source, tmp_path / "d", tokenizer_of(make))
    out = capsys.readouterr().out
    assert all(part in out for part in said) and ("warning" in out) == any("warning" in part for part in said)
    assert made["splits"]["train"]["bytes"] == (len(text.encode()) if knows_bytes else None)


@pytest.fixture
def run(tmp_path, train):
    """Train a model with a tokenizer on a.txt, for one step. Returns its folder."""

    def with_tokenizer(tokenizer: TextTokenizer) -> Path:
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        (tmp_path / "a.txt").write_text(ENGLISH * 2)
        shape = ["--config_overrides", "n_layer=1,n_head=1,n_embd=16", "--block_size", 16, "--global_batch_size", 4]
        data = ["--train_file", tmp_path / "a.txt", "--tokenizer_name", tmp_path / "tokenizer"]
        folders = ["--output_dir", tmp_path / "run", "--cache_dir", tmp_path / "cache"]
        train(*data, *folders, *shape, *PLAIN, "--max_steps", 1, alone=True)
        return tmp_path / "run"

    return with_tokenizer


def test_a_run_without_bits_per_byte(tmp_path, run, capsys):
    """They are null in files and a dash in lines; the loss is a loss."""
    folder = run(tokenizer_of(word_piece))
    out = capsys.readouterr().out
    assert ", - bits/byte" in out and "bits_per_byte:     -" in out
    summary = json.loads((folder / "summary.json").read_text())
    events = [*read_events(folder, "eval"), summary]
    assert {event["bits_per_byte"] for event in events} == {None} and summary["eval_loss"] > 1
    assert not run_script("scripts/evaluate_model.py", "--model", folder, "--text_file", tmp_path / "a.txt")
    assert json.loads((folder / "evaluation.json").read_text())["texts"][0]["loss"] > 1


def test_gaps_between_ids_train(run):
    """The vocabulary is the largest id + 1."""
    tokenizer = tokenizer_of(characters)
    folder = run(tokenizer)
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == 1 + max(tokenizer.backend_tokenizer.get_vocab().values())
    assert not run_script("scripts/generate_text.py", "--model", folder, "--max_new_tokens", 3)


# ------------------------------------------------------------------ training


def test_training_on_text_without_spaces_takes_no_quadratic_time():
    """Its words are cut; other texts keep their words, and so their tokenizer."""
    text = "".join(np.random.default_rng(0).choice(list("ACGT"), 100_000))
    started_at = time.perf_counter()
    assert len(train_tokenizer([text], 300)) == 300
    assert time.perf_counter() - started_at < 1.0  # 5 s and more if it is one word
    assert "".join(cut_words(text)) == text and max(map(len, cut_words(text))) == 1000
    assert list(cut_words(ENGLISH)) == [ENGLISH]
    mixed = f"a {'b' * 2500} c"
    assert list(cut_words(mixed)) == [f"a {'b' * 1000}", "b" * 1000, f"{'b' * 500} c"]


def test_a_tokenizer_survives_reading_and_saving(tmp_path):
    """With gaps between its ids."""
    tokenizer_of(characters).save_pretrained(tmp_path)
    assert len(read_tokenizer(str(tmp_path))) == count_ids(tokenizer_of(characters))
