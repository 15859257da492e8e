"""Generation from a saved model."""

import io
import json
import shutil
import sys

import pytest
import torch
from conftest import BLOCK_SIZE, run_script
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from recipe.config import TrainConfig
from recipe.errors import UserError
from recipe.evaluation.generation import Sampling, TokenStream, continue_prompt, generate_texts, sample_text
from recipe.model.build import build_model, build_model_config


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
        ({"repetition_penalty": 0}, "repetition_penalty"),
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


def test_the_repetition_penalty(model_dir):
    """It makes the tokens of the context less likely, as in CTRL, also when the context slides."""
    tokens = greedy(model_dir, "the cat", 50, penalty=1.5)
    assert tokens != greedy(model_dir, "the cat", 50)
    expected = "the cat" + AutoTokenizer.from_pretrained(model_dir).decode(tokens)
    assert generate_texts(
        model_dir, "the cat", max_new_tokens=50, temperature=0, repetition_penalty=1.5
    ) == [expected]  # fmt: skip


@pytest.fixture(scope="module")
def loaded(model_dir):
    return AutoModelForCausalLM.from_pretrained(model_dir).eval(), AutoTokenizer.from_pretrained(model_dir)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_streamed_text_is_the_same_text(model_dir, loaded, temperature):
    """The pieces, within the context and beyond it, are the text that is generated without streaming."""
    options = {"max_new_tokens": BLOCK_SIZE + 20, "temperature": temperature, "seed": 5}
    pieces = []
    torch.manual_seed(5)
    stream = TokenStream(pieces.append)
    assert continue_prompt(*loaded, "the cat", Sampling(**options), stream=stream) == ["".join(pieces)]
    assert ["".join(pieces)] == generate_texts(model_dir, "the cat", **options)
    assert len(pieces) > 20 and pieces[0] == "the cat"
    assert stream.num_tokens == BLOCK_SIZE + 19 and 0 < stream.seconds < 60


def test_tokens_of_several_samples_are_counted_without_padding(model_dir, loaded):
    """Of two samples that end at different lengths, only tokens of the texts count, without the first of each."""
    model, tokenizer = loaded
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    stream = TokenStream()
    stream.start("", tokenizer)
    eos = tokenizer.eos_token_id
    for tokens in ([7, 8], [9, eos], [7, eos], [eos, eos]):
        stream.put(torch.tensor(tokens))
    assert stream.num_tokens == 2


@pytest.mark.parametrize("text", ["x €😀 ÿ", "€", "a\n猫"])
def test_characters_appear_when_they_are_complete(loaded, text):
    """A character of several tokens is one piece, and no replacement character stands in for its first bytes."""
    pieces, tokenizer = [], loaded[1]
    stream = TokenStream(pieces.append)
    stream.start("", tokenizer)
    tokens = tokenizer(text)["input_ids"]
    for token in tokens:
        stream.put(torch.tensor([token]))
    assert "".join(pieces) == text and len(pieces) < len(tokens)


def test_a_text_that_ends_within_a_character(loaded):
    """What has been passed on is completed, with the replacement character that the text ends with."""
    pieces, tokenizer = [], loaded[1]
    stream = TokenStream(pieces.append)
    stream.start("the", tokenizer)
    tokens = tokenizer(" mat 😀")["input_ids"][:-1]
    for token in tokens:
        stream.put(torch.tensor([token]))
    assert "".join(pieces) == "the mat "
    stream.finish("the" + tokenizer.decode(tokens))
    assert "".join(pieces) == "the mat \ufffd"


class TestTheScript:
    """scripts/generate_text.py."""

    def run(self, capsys, *arguments: object) -> tuple[str, str]:
        error = run_script("scripts/generate_text.py", "--max_new_tokens", 12, *arguments)
        assert not error
        return capsys.readouterr()

    def test_prompts_from_a_file(self, model_dir, tmp_path, capsys):
        """Each prompt has the text that it has alone; stdout holds nothing else, the output file the same texts."""
        (tmp_path / "a.txt").write_text("the cat\n\nwhile rain\n")
        (tmp_path / "a.jsonl").write_text('{"prompt": "the cat"}\n{"prompt": "while rain", "id": 2}\n')
        prompts = ["the cat", "while rain"]
        texts = [generate_texts(model_dir, prompt, max_new_tokens=12)[0] for prompt in prompts]
        for name in ("a.txt", "a.jsonl"):
            files = ["--prompts_file", tmp_path / name, "--output_file", tmp_path / "out.jsonl"]
            out, err = self.run(capsys, "--model", model_dir, *files)
            assert out == "\n\n---\n\n".join(texts) + "\n"
            assert err.startswith("22 tokens in ") and "tokens/s" in err
            rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
            assert rows == [{"prompt": p, "text": t} for p, t in zip(prompts, texts, strict=True)]

    def test_several_samples(self, model_dir, capsys):
        """The samples of a prompt are separated."""
        out, _ = self.run(capsys, "--model", model_dir, "--prompt", "the", "--num_samples", 3)
        assert out[:-1].split("\n\n---\n\n") == generate_texts(model_dir, "the", max_new_tokens=12, num_samples=3)

    @pytest.mark.parametrize("typed", ["the\ncat", "the\r\ncat\r\n", "the\ncat\n\nnot read\n"])
    def test_interactive(self, model_dir, capsys, monkeypatch, typed):
        """Prompts come from a pipe until it ends or has an empty line; the first one's text is that of the seed."""
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed, newline=""))
        out, err = self.run(capsys, "--model", model_dir, "--interactive")
        first, second, end = out.split("\n\n")
        assert [first] == generate_texts(model_dir, "the", max_new_tokens=12)
        assert second.startswith("cat") and end == "" and err.count("\n") == 1

    @pytest.mark.parametrize("temperature", ["0", "0.8"])
    def test_ctrl_c_ends_the_interactive_mode(self, model_dir, capsys, monkeypatch, temperature):
        """Ctrl-C at the prompt exits with status 0 and prints no error."""

        class Keyboard(io.StringIO):
            def readline(self, *_) -> str:
                raise KeyboardInterrupt

        monkeypatch.setattr(sys, "stdin", Keyboard())
        assert self.run(capsys, "--model", model_dir, "--interactive", "--temperature", temperature) == ("", "\n")

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            (b"\n", "there is no prompt in"),
            (b"\xff", "cannot read"),
            (b'{"text": "x"}', "line 1 of .* must look like"),
            (b'{"prompt": "x"}\n\n[', "line 3 of .* is not valid JSON"),
            (b'{"prompt": 3}', "must look like"),
        ],
    )
    def test_a_file_without_prompts(self, tmp_path, content, expected):
        """It is an error before a model is loaded."""
        (tmp_path / "p.jsonl").write_bytes(content)
        error = run_script("scripts/generate_text.py", "--model", "gone", "--prompts_file", tmp_path / "p.jsonl")
        with pytest.raises(UserError, match=expected):
            raise UserError(error)

    def test_a_revision_of_a_folder(self, model_dir):
        """Only models on the Hub have revisions."""
        error = run_script("scripts/generate_text.py", "--model", model_dir, "--revision", "step-001000-0.5B")
        assert "selects a branch of a Hub model" in error


def test_a_revision_of_a_model_on_the_hub(model_dir, monkeypatch):
    """The config, the weights and the tokenizer come from the same branch."""
    loaded_from = []

    def load(auto_class: type, source: str, **options):
        loaded_from.append((source, options))
        return auto_class.from_pretrained(model_dir)

    monkeypatch.setattr("recipe.evaluation.generation.load_pretrained", load)
    generate_texts("user/name", "the", revision="step-001000-0.5B", max_new_tokens=1)
    assert loaded_from == [("user/name", {"revision": "step-001000-0.5B"})] * 3


@pytest.fixture
def training_model(tokenizer_dir):
    """Build a model as training does, with wide weights, so that its text depends on the context."""

    def build(**options):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
        shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "initializer_range": 0.6, "resid_pdrop": 0.5}
        config = TrainConfig(
            dataset_dir="x", block_size=BLOCK_SIZE, config_overrides=shape, pad_vocab_to_multiple_of=512, **options
        )
        torch.manual_seed(0)
        model_config = build_model_config(config, len(tokenizer), tokenizer.eos_token_id)
        return build_model(config, model_config).train(), tokenizer

    return build


def sample_slowly(model, tokenizer, prompt: str, count: int, seed: int) -> str:
    """Independent reference of temperature 0.8 and top_k 200: a whole forward pass for each token, without padding."""
    model.eval()
    ids = tokenizer(prompt)["input_ids"]
    start = len(ids)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        for _ in range(count):
            logits = model(torch.tensor([ids[-BLOCK_SIZE:]]), use_cache=False).logits[0, -1] / 0.8
            logits[len(tokenizer) :] = -torch.inf
            logits[logits < logits.topk(200).values[-1]] = -torch.inf
            ids.append(int(torch.multinomial(logits.softmax(0), 1)))
            if ids[-1] == tokenizer.eos_token_id:
                ids.pop()
                break
    return prompt + tokenizer.decode(ids[start:])


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": "true"}])
def test_a_sample_during_training(training_model, options):
    """It is that of a plain loop that never takes a token of the padding, and a second one is the same."""
    model, tokenizer = training_model(**options)
    vocab_size = len(tokenizer)
    assert model.config._attn_implementation == "sdpa_without_mask" and model.config.vocab_size > vocab_size
    texts = [sample_text(model, tokenizer, "the cat", 60, seed, vocab_size) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[::2] == [sample_slowly(model, tokenizer, "the cat", 60, seed) for seed in (1, 2)]


def test_no_sample_has_a_token_of_the_padding(training_model):
    """Also when the model prefers these tokens."""
    model, tokenizer = training_model()
    with torch.no_grad():
        model.lm_head.weight[len(tokenizer) :] = 100 * model.lm_head.weight[:1].clone()
    stream_ids = []
    tokenizer.decode = lambda ids, **_: str(stream_ids.extend(ids))
    sample_text(model, tokenizer, "the cat", 60, vocab_size=len(tokenizer))
    assert stream_ids and max(stream_ids) < len(tokenizer)
    sample_text(model, tokenizer, "the cat", 60)
    assert max(stream_ids) >= len(tokenizer)


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": "true"}, {"bf16_residual": True}])
def test_a_sample_leaves_no_trace(training_model, options):
    """Random state, mode, configs and hooks are as before, also after an error, and so are the next gradients."""
    model, tokenizer = training_model(**options)
    ids = torch.randint(len(tokenizer), (2, BLOCK_SIZE))

    def trace() -> list:
        hooks = [len(module._forward_hooks) for module in model.modules()]
        modes = [module.training for module in model.modules()]
        return [
            torch.get_rng_state().tolist(),
            hooks,
            modes,
            model.config.to_dict(),
            model.generation_config.to_dict(),
        ]

    def gradient() -> torch.Tensor:
        with torch.random.fork_rng(), torch.autocast("cpu", torch.bfloat16):
            model.zero_grad()
            model(ids, labels=ids, use_cache=False).loss.backward()
        return model.transformer.wte.weight.grad.clone()

    before, gradient_before = trace(), gradient()
    sample_text(model, tokenizer, "the cat", 8, vocab_size=len(tokenizer))
    with pytest.raises(UserError):
        sample_text(model, tokenizer, "the cat", 0)
    assert trace() == before
    assert torch.equal(gradient(), gradient_before)


def test_a_compiled_model_is_not_compiled_again(training_model):
    """Neither a sample nor the training step after it."""
    model, tokenizer = training_model()
    compiled = []
    model.compile(backend=lambda graph, inputs: compiled.append(graph) or graph, dynamic=False, fullgraph=True)
    ids = torch.randint(len(tokenizer), (2, BLOCK_SIZE))
    for _ in range(2):
        model(ids, use_cache=False)
        sample_text(model, tokenizer, "the cat", 4, vocab_size=len(tokenizer))
    assert len(compiled) == 1
    torch.compiler.reset()
