"""Generation from a saved model."""

import json
import shutil

import pytest
import torch
from conftest import BLOCK_SIZE
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.errors import UserError
from recipe.evaluation.generation import generate_texts


@pytest.fixture
def model_dir(train):
    return train("--max_steps", "30")


def greedy(model_dir, prompt: str, count: int) -> str:
    """Independent: the last block_size tokens through the model, the likeliest next one, again and again."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_dir).eval(), AutoTokenizer.from_pretrained(model_dir)
    ids = tokenizer(prompt)["input_ids"]
    start = len(ids)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids[-BLOCK_SIZE:]])).logits[0, -1].argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            return prompt + tokenizer.decode(ids[start:-1])
    return prompt + tokenizer.decode(ids[start:])


@pytest.mark.parametrize("prompt", ["the cat", "the mat while " * 40])
def test_greedy_generation_beyond_the_context(model_dir, prompt):
    """Longer than the context, in the prompt or in what is generated, means the last block_size tokens are seen."""
    assert generate_texts(model_dir, prompt, max_new_tokens=60, temperature=0) == [greedy(model_dir, prompt, 60)]


def test_a_seed_is_a_text(model_dir):
    """The same seed gives the same samples, the samples of a call differ, another seed gives others."""
    options = {"max_new_tokens": 40, "num_samples": 3, "temperature": 1.0}
    a, b = (generate_texts(model_dir, "the", seed=1, **options) for _ in range(2))
    assert a == b and len(set(a)) == 3 and a != generate_texts(model_dir, "the", seed=2, **options)
    assert all(text.startswith("the") for text in a)


def test_restricting_to_the_likeliest(model_dir):
    """top_k=1 and a tiny top_p are greedy."""
    expected = generate_texts(model_dir, "the", max_new_tokens=20, temperature=0)
    assert generate_texts(model_dir, "the", max_new_tokens=20, temperature=1.0, top_k=1) == expected
    assert generate_texts(model_dir, "the", max_new_tokens=20, temperature=1.0, top_k=0, top_p=1e-6) == expected


def test_no_prompt_starts_a_document(model_dir):
    assert generate_texts(model_dir, "", max_new_tokens=5)[0] != ""


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
    with pytest.raises(UserError, match=f"{expected} must be"):
        generate_texts("anything", "x", **options)


def test_nothing_is_put_around_the_prompt(model_dir, tmp_path):
    """A tokenizer that closes texts would make the model begin a new document."""
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


def test_no_model(tmp_path):
    with pytest.raises(UserError, match="the prompt is not valid UTF-8"):
        generate_texts(tmp_path, "\udcff")
    with pytest.raises(UserError, match="there is no model in"):
        generate_texts(tmp_path, "x")
    with pytest.raises(UserError, match="there is no folder .*gone"):
        generate_texts(tmp_path / "gone", "x")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="there is no model in .*; there is one in .*broken"):
        generate_texts(tmp_path, "x")
    with pytest.raises(UserError, match="cannot load a model and its tokenizer"):
        generate_texts(tmp_path / "broken", "x")


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_is_an_error(name):
    with pytest.raises(UserError, match="the name of a folder or Hub id is empty"):
        generate_texts(name, "The")
