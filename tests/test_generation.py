"""Generation from a saved model."""

import json
import shutil

import pytest
import torch
from conftest import BLOCK_SIZE
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from recipe.errors import UserError
from recipe.evaluation.generation import generate_texts


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tokenizer_dir):
    """A random model whose next token depends on the whole context, with a tokenizer."""
    torch.manual_seed(0)
    size = {"n_positions": BLOCK_SIZE, "n_layer": 2, "n_head": 2, "n_embd": 32, "initializer_range": 0.6}
    directory = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    eos = tokenizer.eos_token_id
    config = GPT2Config(vocab_size=len(tokenizer), bos_token_id=eos, eos_token_id=eos, **size)
    GPT2LMHeadModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def greedy(model_dir, prompt: str, count: int) -> list[int]:
    """Independent reference: feed the last block_size tokens and append the most likely one, `count` times."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_dir).eval(), AutoTokenizer.from_pretrained(model_dir)
    ids = tokenizer(prompt)["input_ids"] or [tokenizer.eos_token_id]
    start = len(ids)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids[-BLOCK_SIZE:]])).logits[0, -1].argmax()))
    return ids[start:]


@pytest.mark.parametrize("prompt", ["the cat", "the mat while " * 40, ""])
def test_the_model_sees_the_last_block_size_tokens(model_dir, prompt):
    """Prompt and continuation can be longer than the context. An empty prompt starts a document."""
    expected = prompt + AutoTokenizer.from_pretrained(model_dir).decode(greedy(model_dir, prompt, 60))
    assert generate_texts(model_dir, prompt, max_new_tokens=60, temperature=0) == [expected]


@pytest.mark.parametrize("at_least", [5, BLOCK_SIZE + 10])
def test_generation_ends_at_the_end_of_text(model_dir, tmp_path, at_least):
    """The end-of-text token ends a text, within the context and beyond it, and is not part of it."""
    shutil.copytree(model_dir, tmp_path / "ending")
    tokenizer, tokens = AutoTokenizer.from_pretrained(model_dir), greedy(model_dir, "the cat", 80)
    end = next(i for i, token in enumerate(tokens) if i >= at_least and token not in tokens[:i])
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(tokens[end])
    tokenizer.save_pretrained(tmp_path / "ending")
    texts = generate_texts(tmp_path / "ending", "the cat", max_new_tokens=80, num_samples=2, temperature=0)
    assert texts == ["the cat" + tokenizer.decode(tokens[:end])] * 2


def test_the_same_seed_gives_the_same_samples(model_dir):
    """Two calls with one seed agree; the samples of a call differ, and so do those of another seed."""
    options = {"max_new_tokens": 40, "num_samples": 3, "temperature": 1.0}
    a, b = (generate_texts(model_dir, "the", seed=1, **options) for _ in range(2))
    assert a == b and len(set(a)) == 3 and a != generate_texts(model_dir, "the", seed=2, **options)
    assert all(text.startswith("the") for text in a)


def test_top_k_and_top_p(model_dir):
    """top_k=1 and a tiny top_p are both greedy."""
    expected = generate_texts(model_dir, "the", max_new_tokens=20, temperature=0)
    assert generate_texts(model_dir, "the", max_new_tokens=20, temperature=1.0, top_k=1) == expected
    assert generate_texts(model_dir, "the", max_new_tokens=20, temperature=1.0, top_k=0, top_p=1e-6) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"num_samples": 0}, "num_samples"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**32}, "seed"),
    ],
)
def test_options_out_of_range(options, expected):
    """A value out of range is an error before a model is loaded."""
    with pytest.raises(UserError, match=f"{expected} must be"):
        generate_texts("anything", "x", **options)


def test_the_prompt_gets_no_special_tokens(model_dir, tmp_path):
    """A tokenizer that appends an end-of-text token would make the model start a new document."""
    shutil.copytree(model_dir, tmp_path / "closing")
    content = json.loads((tmp_path / "closing" / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    (tmp_path / "closing" / "tokenizer.json").write_text(json.dumps(content))
    expected = generate_texts(model_dir, "the cat", max_new_tokens=9, temperature=0)
    assert generate_texts(tmp_path / "closing", "the cat", max_new_tokens=9, temperature=0) == expected


def test_a_model_that_cannot_be_loaded(tmp_path):
    """The message says what is missing, and where a model is instead."""
    with pytest.raises(UserError, match="prompt must be valid UTF-8"):
        generate_texts(tmp_path, "\udcff")
    with pytest.raises(UserError, match="there is no model in"):
        generate_texts(tmp_path, "x")
    with pytest.raises(UserError, match="there is no folder .*gone"):
        generate_texts(tmp_path / "gone", "x")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="there is no model in .*; there is one in .*broken"):
        generate_texts(tmp_path, "x")
    with pytest.raises(UserError, match="cannot load a model from"):
        generate_texts(tmp_path / "broken", "x")


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_is_an_error(name):
    """An empty folder name does not reach Transformers."""
    with pytest.raises(UserError, match="the name of a folder or Hub id is empty"):
        generate_texts(name, "The")
