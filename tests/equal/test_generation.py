"""Text that a saved model, or the model in training, writes."""

import io
import json
import shutil
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import BLOCK_SIZE, make_documents, run_script
from hub_repository import File, Repository
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from recipe.config import TrainConfig
from recipe.evaluation.generation import generate_texts, load_model, sample_text
from recipe.model.build import build_model, build_model_config
from recipe.model.loss import LanguageModelingLoss


@pytest.fixture(scope="module")
def loaded(model_dir):
    return load_model(model_dir, "cpu")


# ------------------------------------------------------------------ with a saved model


def greedy(model_dir, prompt: str, count: int, penalty: float = 1.0) -> list[int]:
    """Independent reference: feed the last block_size tokens and append the most likely one, `count` times.

    penalty: divides the positive logits of the tokens in the context and multiplies the negative ones.
    """
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_dir).eval(), AutoTokenizer.from_pretrained(model_dir)
    ids = tokenizer(prompt)["input_ids"] or [tokenizer.eos_token_id]
    start = len(ids)
    for _ in range(count):
        context = ids[-BLOCK_SIZE:]
        with torch.no_grad():
            logits = model(torch.tensor([context])).logits[0, -1]
        for token in set(context):
            logits[token] *= 1 / penalty if logits[token] > 0 else penalty
        ids.append(int(logits.argmax()))
    return ids[start:]


@pytest.mark.parametrize(
    ("prompt", "penalty"), [("the cat", 1.0), ("the mat while " * 40, 1.0), ("", 1.0), ("the cat", 1.5)]
)
def test_the_model_sees_the_last_block_size_tokens(model_dir, loaded, prompt, penalty):
    """Prompt and continuation can be longer than the context. An empty prompt starts a document. The penalty of
    repetitions is CTRL's, also when the context slides."""
    expected = prompt + loaded[1].decode(greedy(model_dir, prompt, 60, penalty))
    options = {"max_new_tokens": 60, "temperature": 0, "repetition_penalty": penalty}
    assert generate_texts(*loaded, prompt, **options) == [expected]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 0, "top_p": 0.6},
        {"temperature": 1.3, "top_k": 50, "top_p": 0.8, "repetition_penalty": 1.2},
    ],
)
def test_samples_are_those_of_transformers(loaded, options):
    """With the same random numbers, `generate` samples the same tokens while the text fits the context."""
    (model, tokenizer), num_tokens = loaded, BLOCK_SIZE - 10
    ids = tokenizer("the cat", return_tensors="pt").input_ids
    text = generate_texts(model, tokenizer, "the cat", max_new_tokens=num_tokens, seed=3, **options)[0]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        options = {"temperature": 0.8, "top_k": 200, "do_sample": True, "pad_token_id": 0} | options
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, **options)
    assert text == tokenizer.decode(found[0], skip_special_tokens=True)


@pytest.mark.parametrize("at_least", [5, BLOCK_SIZE + 10])
def test_generation_ends_at_the_end_of_text(model_dir, tmp_path, at_least):
    """The end-of-text token ends a text, within the context and beyond it, and is not part of it."""
    shutil.copytree(model_dir, tmp_path / "ending")
    tokenizer, tokens = AutoTokenizer.from_pretrained(model_dir), greedy(model_dir, "the cat", 80)
    end = next(i for i, token in enumerate(tokens) if i >= at_least and token not in tokens[:i])
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(tokens[end])
    tokenizer.save_pretrained(tmp_path / "ending")
    ending = load_model(tmp_path / "ending", "cpu")
    texts = generate_texts(*ending, "the cat", max_new_tokens=80, num_samples=2, temperature=0)
    assert texts == ["the cat" + tokenizer.decode(tokens[:end])] * 2


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_generation_ends_at_each_end_that_the_model_names(model_dir, tmp_path, name):
    """Chat models have one that ends a turn besides the tokenizer's."""
    shutil.copytree(model_dir, tmp_path / "chat")
    tokenizer, tokens = AutoTokenizer.from_pretrained(model_dir), greedy(model_dir, "the cat", 20)
    end = next(i for i, token in enumerate(tokens) if i >= 5 and token not in tokens[:i])
    path = tmp_path / "chat" / name
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [tokenizer.eos_token_id, tokens[end]]}))
    texts = generate_texts(*load_model(tmp_path / "chat", "cpu"), "the cat", max_new_tokens=20, temperature=0)
    assert texts == ["the cat" + tokenizer.decode(tokens[:end])]


def test_a_sample_depends_on_the_seed_and_its_number_alone(loaded):
    """Sample 0 is the only one of a call for one, and more samples add to those of a call for fewer."""
    one, two, four, other = (
        generate_texts(*loaded, "the", max_new_tokens=40, num_samples=number, temperature=1.0, seed=seed)
        for number, seed in ((1, 1), (2, 1), (4, 1), (4, 2))
    )
    assert one == four[:1]
    assert two == four[:2]
    assert len({*four, *other}) == 8


def test_a_streamed_text_is_the_same_text(loaded):
    """The pieces, within the context and beyond it, are the continuation that the function returns."""
    options, pieces = {"max_new_tokens": BLOCK_SIZE + 20, "temperature": 1.0, "seed": 5}, []
    (text,) = generate_texts(*loaded, "the cat", **options, stream=pieces.append)
    assert len(pieces) > 20
    assert text == "the cat" + "".join(pieces)
    assert [text] == generate_texts(*loaded, "the cat", **options)


class Writer(GPT2LMHeadModel):
    """Writes the ids of `wanted`, whatever it reads."""

    def forward(self, input_ids, past_key_values=None, **_):
        logits = F.one_hot(torch.tensor([[self.wanted.pop(0)]]), self.config.vocab_size)
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize(("prompt", "expected"), [("the cat", "the cat sat über 猫 a mat"), ("", "rain fell")])
def test_the_first_space_is_kept_and_pieces_are_whole_characters(prompt, expected):
    """The tokenizer drops the first space of what it decodes, as SentencePiece's does."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    decoding = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(decoding)
    special = ["</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, limit_alphabet=20)
    backend.train_from_iterator(make_documents(60), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    ids, written = tokenizer(expected)["input_ids"], tokenizer(prompt)["input_ids"]
    assert ids[: len(written)] == written
    model, pieces = Writer(GPT2Config(vocab_size=len(tokenizer), n_layer=1, n_embd=8, n_head=1)).eval(), []
    model.wanted = [*ids[len(written) :], tokenizer.eos_token_id]
    (text,) = generate_texts(model, tokenizer, prompt, temperature=0, stream=pieces.append)
    assert text == expected == prompt + "".join(pieces)
    assert not any("\ufffd" in piece for piece in pieces)


def test_the_prompt_gets_no_special_tokens(model_dir, loaded):
    """A tokenizer that appends an end-of-text token would make the model start a new document."""
    closing, options = AutoTokenizer.from_pretrained(model_dir), {"max_new_tokens": 9, "temperature": 0}
    end = [("<|endoftext|>", 0)]
    closing.backend_tokenizer.post_processor = TemplateProcessing("$A <|endoftext|>", special_tokens=end)
    assert closing("the cat")["input_ids"][-1] == 0
    assert generate_texts(loaded[0], closing, "the cat", **options) == generate_texts(*loaded, "the cat", **options)


def test_a_revision_of_a_model_on_the_hub_is_that_of_all_its_files(model_dir, hub):
    repository = hub.repositories["user/name"] = Repository(False)  # there is nothing on main
    files = {path.name: File(path.read_bytes(), path.suffix == ".safetensors") for path in model_dir.iterdir()}
    repository.write_commit("step-001000-0.5B", None, "", files)
    model, tokenizer = load_model("user/name", "cpu", "step-001000-0.5B")
    assert model.config.vocab_size == len(tokenizer)


# ------------------------------------------------------------------ scripts/generate_text.py


@pytest.fixture
def generate(model_dir, capsys):
    """Run the script. Returns what it wrote to stdout, which is text alone."""

    def run(*arguments: object) -> str:
        assert not run_script("scripts/generate_text.py", "--model", model_dir, "--max_new_tokens", 12, *arguments)
        out, err = capsys.readouterr()
        assert not err
        return out

    return run


@pytest.mark.parametrize(
    ("name", "content", "num_samples"),
    [
        ("a.txt", "the cat\n\nwhile rain\n", 1),
        ("a.jsonl", '{"prompt": "the cat"}\n{"prompt": "while rain", "id": 2}\n', 3),
    ],
)
def test_each_prompt_of_a_file_has_the_texts_that_it_has_alone(generate, loaded, tmp_path, name, content, num_samples):
    """A line separates them."""
    (tmp_path / name).write_text(content)
    options = ["--output_file", tmp_path / "out.jsonl", "--num_samples", num_samples]
    out = generate("--prompts_file", tmp_path / name, *options)
    expected = [
        {"prompt": prompt, "text": text}
        for prompt in ("the cat", "while rain")
        for text in generate_texts(*loaded, prompt, max_new_tokens=12, num_samples=num_samples)
    ]
    assert out == "\n\n---\n\n".join(row["text"] for row in expected) + "\n"
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == expected


@pytest.mark.parametrize("typed", ["the\nthe", "the\r\nthe\r\n\r\nnot read\r\n"])
def test_a_prompt_that_is_typed_again_gets_another_text(generate, loaded, monkeypatch, typed):
    """Prompts come from a pipe until it ends or has an empty line; the first one's text is that of the seed."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed, newline=""))
    first, second, end = generate("--interactive").split("\n\n")
    assert [first] == generate_texts(*loaded, "the", max_new_tokens=12)
    assert second.startswith("the")
    assert second != first
    assert end == ""


def test_ctrl_c_ends_the_interactive_mode_without_an_error(generate, monkeypatch):
    monkeypatch.setattr("builtins.input", mock.Mock(side_effect=KeyboardInterrupt))
    assert generate("--interactive") == ""


# ------------------------------------------------------------------ with the model in training


@pytest.fixture
def in_training(tokenizer_dir):
    """Build a model as training does, with wide weights, so that its text depends on the context."""

    def build(**options):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
        shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "initializer_range": 0.6, "resid_pdrop": 0.5}
        options |= {"block_size": BLOCK_SIZE, "config_overrides": shape, "pad_vocab_to_multiple_of": 512}
        config = TrainConfig(dataset_dir="x", **options)
        torch.manual_seed(0)
        model_config = build_model_config(config, len(tokenizer), tokenizer.eos_token_id)
        return build_model(config, model_config).train(), tokenizer

    return build


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": "true"}])
def test_a_sample_during_training_is_that_of_the_saved_model(in_training, options):
    """Padding tokens are never sampled, even if the model prefers them, and the same seed repeats the sample."""
    model, tokenizer = in_training(**options)
    vocab_size = len(tokenizer)
    assert model.config.vocab_size > vocab_size
    with torch.no_grad():
        model.lm_head.weight[vocab_size:] = 100 * model.lm_head.weight[:1].clone()
    texts = [sample_text(model, tokenizer, "the cat", seed, vocab_size) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    model.resize_token_embeddings(vocab_size)
    saved = [generate_texts(model.eval(), tokenizer, "the cat", max_new_tokens=64, seed=seed) for seed in (1, 2)]
    assert texts[::2] == [text for (text,) in saved]


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": "true"}, {"bf16_residual": True}])
def test_a_sample_leaves_no_trace(in_training, options):
    """Random state, mode and configs are as before, even after an error, and so are the next gradients."""
    model, tokenizer = in_training(**options)
    ids = torch.randint(len(tokenizer), (2, BLOCK_SIZE))

    def trace() -> list:
        modes = [module.training for module in model.modules()]
        return [torch.get_rng_state().tolist(), modes, model.config.to_dict(), model.generation_config.to_dict()]

    def gradient() -> torch.Tensor:
        with torch.random.fork_rng(), torch.autocast("cpu", torch.bfloat16):
            model.zero_grad()
            model(ids, labels=ids, use_cache=False).loss.backward()
        return model.transformer.wte.weight.grad.clone()

    before, gradient_before = trace(), gradient()
    with torch.autocast("cpu", torch.bfloat16):
        sample_text(model, tokenizer, "the cat", 1, len(tokenizer))
    with pytest.raises(ValueError):
        sample_text(model, tokenizer, None, 1, len(tokenizer))
    assert trace() == before
    assert torch.equal(gradient(), gradient_before)


def test_neither_a_sample_nor_the_step_after_it_compiles_the_model_again(in_training):
    model, tokenizer = in_training()
    compiled, module = [], LanguageModelingLoss(model, len(tokenizer))
    module.compile(backend=lambda graph, inputs: compiled.append(graph) or graph, dynamic=False, fullgraph=True)
    ids = torch.randint(len(tokenizer), (2, BLOCK_SIZE))
    for _ in range(2):
        module(ids, ids)
        sample_text(model, tokenizer, "the cat", 1, len(tokenizer))
    assert len(compiled) == 1
    torch.compiler.reset()
