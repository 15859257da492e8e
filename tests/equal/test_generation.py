"""Text that a saved model, or the model in training, writes."""

import io
import json
import shutil
import sys
from unittest import mock

import pytest
import torch
from helpers import BLOCK_SIZE, make_documents, run_script
from hub_repository import File, Repository
from small_model import save_small_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    pipeline,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from recipe.config import TrainConfig
from recipe.evaluation.generation import generate_texts, load_model, sample_text
from recipe.model.build import build_model, build_model_config
from recipe.model.loss import LanguageModelingLoss


@pytest.fixture(scope="module")
def loaded(model_dir):
    return load_model(model_dir, "cpu")


# ------------------------------------------------------------------ with a saved model

GREEDY = {"do_sample": False, "temperature": 1.0, "top_k": 50}
NUM_NEW = BLOCK_SIZE - 10


@pytest.mark.parametrize(
    "options",
    [
        GREEDY,
        GREEDY | {"repetition_penalty": 1.5},
        {},  # of a model that does not say how: nanoGPT's
        {"do_sample": True, "temperature": 1.3, "top_k": 50, "top_p": 0.8, "repetition_penalty": 1.2},
    ],
)
def test_texts_within_the_context_are_those_of_generate(loaded, options):
    """The same seed gives the same tokens, for several samples at once, and the random state stays as it was."""
    model, tokenizer = loaded
    before = torch.get_rng_state()
    texts = generate_texts(model, tokenizer, "the cat", max_new_tokens=NUM_NEW, num_samples=3, seed=3, **options)
    assert torch.equal(torch.get_rng_state(), before)
    ids = tokenizer(["the cat"] * 3, return_tensors="pt").input_ids
    with torch.random.fork_rng():
        torch.manual_seed(3)
        options = options or {"do_sample": True, "temperature": 0.8, "top_k": 200}
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, **options)
    assert ["the cat" + text for text in texts] == tokenizer.batch_decode(found, skip_special_tokens=True)
    assert len({*texts}) == (3 if options.get("do_sample") else 1)


def greedy(model_dir, prompt: str, count: int) -> list[int]:
    """Independent reference: append the most likely token, `count` times.

    Once the text fills the context, the model sees only its second half, and continues.
    """
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    ids = tokenizer(prompt)["input_ids"] or [tokenizer.eos_token_id]
    window = ids
    start = len(ids)
    for _ in range(count):
        window = window[-(BLOCK_SIZE // 2) :] if len(window) >= BLOCK_SIZE else window
        with torch.no_grad():
            token = int(model(torch.tensor([window])).logits[0, -1].argmax())
        ids = [*ids, token]
        window = [*window, token]
    return ids[start:]


@pytest.mark.parametrize("prompt", ["the cat", "the mat while " * 40, ""])
def test_a_text_beyond_the_context_goes_on_from_its_last_half(model_dir, loaded, prompt):
    """Prompt and continuation can be longer than the context. An empty prompt starts a document."""
    expected = loaded[1].decode(greedy(model_dir, prompt, 60))
    assert generate_texts(*loaded, prompt, max_new_tokens=60, **GREEDY) == [expected]


@pytest.mark.parametrize("at_least", [5, BLOCK_SIZE + 10])
def test_a_text_ends_at_each_end_that_the_model_names(model_dir, tmp_path, at_least):
    """Chat models have one that ends a turn besides the tokenizer's. It is not part of the text, nor streamed."""
    shutil.copytree(model_dir, tmp_path / "chat")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokens = greedy(model_dir, "the cat", 80)
    end = next(i for i, token in enumerate(tokens) if i >= at_least and token not in tokens[:i])
    path = tmp_path / "chat" / "generation_config.json"
    pieces = []
    path.write_text(json.dumps({"eos_token_id": [tokenizer.eos_token_id, tokens[end]]}))
    chat = load_model(tmp_path / "chat", "cpu")
    texts = generate_texts(*chat, "the cat", max_new_tokens=80, num_samples=2, **GREEDY)
    assert texts == [tokenizer.decode(tokens[:end])] * 2
    assert generate_texts(*chat, "the cat", max_new_tokens=80, stream=pieces.append, **GREEDY) == texts[:1]
    assert len(pieces) > 1
    assert "".join(pieces) == texts[0]


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def chat_dir(tokenizer_dir, tmp_path_factory):
    """A model whose tokenizer has a chat template."""
    folder = save_small_model(tmp_path_factory.mktemp("chat"), tokenizer_dir, n_positions=256)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


class Writer(GPT2LMHeadModel):
    """Writes the ids of `wanted`, whatever it reads."""

    def forward(self, input_ids, past_key_values=None, **_):
        logits = 9.0 * F.one_hot(torch.tensor([[self.wanted.pop(0)]]), self.config.vocab_size)
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)


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
    ids = tokenizer(expected)["input_ids"]
    written = tokenizer(prompt)["input_ids"]
    assert ids[: len(written)] == written
    model = Writer(GPT2Config(vocab_size=len(tokenizer), n_layer=1, n_embd=8, n_head=1)).eval()
    pieces = []
    model.wanted = [*ids[len(written) :], tokenizer.eos_token_id]
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    (text,) = generate_texts(model, tokenizer, prompt, stream=pieces.append)
    assert prompt + text == expected == prompt + "".join(pieces)
    assert not any("\ufffd" in piece for piece in pieces)


def test_the_prompt_gets_no_special_tokens(model_dir, loaded):
    """A tokenizer that appends an end-of-text token would make the model start a new document."""
    closing = AutoTokenizer.from_pretrained(model_dir)
    options = {"max_new_tokens": 9, **GREEDY}
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


def test_several_samples_appear_one_after_the_other(generate, loaded):
    texts = generate_texts(*loaded, "the", max_new_tokens=12, num_samples=2, do_sample=True)
    out = generate("--prompt", "the", "--num_samples", 2, "--top_k", 50)
    assert out == "\n\n---\n\n".join("the" + text for text in texts) + "\n"


@pytest.mark.parametrize("typed", ["the\nthe", "the\r\nthe\r\n\r\nnot read\r\n"])
def test_a_prompt_that_is_typed_again_gets_another_text(generate, loaded, monkeypatch, typed):
    """Prompts come from a pipe until it ends or has an empty line; the first one's text is that of the seed."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed, newline=""))
    first, second, end = generate("--interactive").split("\n\n")
    assert [first.removeprefix("the")] == generate_texts(*loaded, "the", max_new_tokens=12)
    assert second.startswith("the")
    assert second != first
    assert end == ""


def test_a_dialog_goes_on_with_its_turns(chat_dir, monkeypatch, capsys):
    """Each line is the user's; the second answer follows the first one, as in a pipeline."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\nwhile rain\n"))
    options = ["--interactive", "--max_new_tokens", 5, "--temperature", 0]
    assert not run_script("scripts/generate_text.py", "--model", chat_dir, *options)
    turns = []
    chat = pipeline("text-generation", model=str(chat_dir))
    for line in ("the cat", "while rain"):
        turns = chat([*turns, {"role": "user", "content": line}], max_new_tokens=5, do_sample=False)[0][
            "generated_text"
        ]
    answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    assert len(answers) == 2 and capsys.readouterr().out == "".join(f"{answer}\n\n" for answer in answers)


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
    options = {"max_new_tokens": 64, "temperature": 0.8, "top_k": 200, "do_sample": True}
    saved = [generate_texts(model.eval(), tokenizer, "the cat", seed=seed, **options) for seed in (1, 2)]
    assert texts[::2] == ["the cat" + text for (text,) in saved]


def test_a_sample_of_a_chat_model_answers_the_prompt(in_training, chat_dir):
    model, _ = in_training()
    tokenizer = AutoTokenizer.from_pretrained(chat_dir)
    turns = [{"role": "user", "content": "the cat"}]
    options = {"max_new_tokens": 64}
    model.resize_token_embeddings(len(tokenizer))
    answers = generate_texts(model.eval(), tokenizer, turns, seed=1, **options)
    assert [sample_text(model, tokenizer, "the cat", 1, len(tokenizer))] == [
        f"user: the cat\n\nassistant: {text}" for text in answers
    ]


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

    before = trace()
    gradient_before = gradient()
    with torch.autocast("cpu", torch.bfloat16):
        sample_text(model, tokenizer, "the cat", 1, len(tokenizer))
    with pytest.raises(ValueError):
        sample_text(model, tokenizer, None, 1, len(tokenizer))
    assert trace() == before
    assert torch.equal(gradient(), gradient_before)


def test_neither_a_sample_nor_the_step_after_it_compiles_the_model_again(in_training):
    model, tokenizer = in_training()
    compiled = []
    module = LanguageModelingLoss(model, len(tokenizer))
    module.compile(backend=lambda graph, inputs: compiled.append(graph) or graph, dynamic=False, fullgraph=True)
    ids = torch.randint(len(tokenizer), (2, BLOCK_SIZE))
    for _ in range(2):
        module(ids, ids)
        sample_text(model, tokenizer, "the cat", 1, len(tokenizer))
    assert len(compiled) == 1
    torch.compiler.reset()
