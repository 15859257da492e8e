"""A model that is fine-tuned keeps what the run does not train: its tokenizer's files, its special ids, its type."""

import functools
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from conftest import PLAIN, TINY, make_documents, run_script
from hub_repository import File, Repository
from safetensors.torch import load_file
from tokenizers import processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from recipe.config import TrainConfig
from recipe.data.packed import open_packed_dataset
from recipe.data.tokenizer import train_tokenizer
from recipe.errors import UserError
from recipe.evaluation.generation import generate_texts, load_model
from recipe.evaluation.text import read_text
from recipe.model.build import build_model, build_model_config

SHORT = [*PLAIN, "--block_size", 16, "--global_batch_size", 4, "--eval_steps", 0, "--save_steps", 0]
SHORT += ["--load_best_model_at_end", "false"]
CHAT = "{% for m in messages %}<|start|>{{ m.role }}: {{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def chat_tokenizer():
    """A tokenizer as instruct models have: a BOS in front, other special tokens, and a template for chats."""
    backend = train_tokenizer(make_documents(100), 400).backend_tokenizer
    backend.add_special_tokens(["<s>", "</s>", "<|start|>"])
    first = "<s>", backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[first])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = CHAT
    return tokenizer


@pytest.fixture(scope="module")
def instruct(tmp_path_factory, chat_tokenizer):
    """A llama as others publish them."""
    folder, tokenizer = tmp_path_factory.mktemp("models") / "instruct", chat_tokenizer
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(
        vocab_size=403, max_position_embeddings=64, eos_token_id=tokenizer.eos_token_id, **shape, **ids
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"  # Transformers 4 cannot read the class that 5 gives it
    path.write_text(path.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|start|>")]
    GenerationConfig(eos_token_id=ends, temperature=0.6, do_sample=True).save_pretrained(folder)
    return folder


def test_what_is_not_trained_is_copied(tmp_path, jsonl_file, instruct, train, capsys):
    """Byte for byte, also by a checkpoint and a run that resumes; the type and the special ids are the model's."""
    run = ["--model_name_or_path", instruct, "--train_file", jsonl_file, *SHORT, "--save_steps", 1]
    run += ["--output_dir", tmp_path / "run", "--cache_dir", tmp_path / "cache", "--resume_from_checkpoint", "auto"]
    for num_steps in (1, 2):
        train(*run, "--max_steps", num_steps, alone=True)
    assert "llama has no counterpart of resid_pdrop, embd_pdrop" in printed(capsys)
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
    for folder in ("run", "run/checkpoint-1"):
        for name in names:
            assert (tmp_path / folder / name).read_bytes() == (instruct / name).read_bytes(), name
        before, after = (json.loads((path / "config.json").read_text()) for path in (instruct, tmp_path / folder))
        assert after == before | {"attention_dropout": 0.1}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<|start|>user: hi"
    weights = [load_file(folder / "model.safetensors") for folder in (instruct, tmp_path / "run")]
    end = tokenizer.eos_token_id  # also the padding, whose row would not be trained
    assert not torch.equal(*(of["model.embed_tokens.weight"][end] for of in weights))


def test_a_model_of_the_hub_keeps_its_files(tmp_path, jsonl_file, instruct, train, hub):
    """They are downloaded, except others of its repository; later runs need no Hub for them."""
    files = {path.name: File(path.read_bytes(), path.suffix == ".safetensors") for path in instruct.iterdir()}
    repository = hub.repositories["org/instruct"] = Repository(False)
    repository.write_commit("main", None, "", files | {"model.gguf": File(b"large", True)})
    run = ["--model_name_or_path", "org/instruct", "--train_file", jsonl_file, *SHORT, "--max_steps", 1]
    for name in ("a", "b"):
        train(*run, "--output_dir", tmp_path / name, "--cache_dir", tmp_path / "cache", alone=True)
        for copied in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            assert (tmp_path / name / copied).read_bytes() == (instruct / copied).read_bytes()
    assert not list(tmp_path.rglob("model.gguf"))


def printed(capsys) -> str:
    return " ".join(capsys.readouterr().out.split())  # a table breaks its lines


def first_ids(folder: Path, count: int) -> list[int]:
    return open_packed_dataset(folder, 8).train._tokens(0, count).tolist()


def test_documents_begin_as_the_model_expects(tmp_path, jsonl_file, instruct, train, capsys):
    """With the BOS of a model that is fine-tuned; a new model has none, and its tokenizer adds none."""
    common = ["--train_file", jsonl_file, "--output_dir"]
    for name, option in (("new", "--tokenizer_name"), ("tuned", "--model_name_or_path")):
        assert not run_script("scripts/prepare_data.py", option, instruct, *common, tmp_path / name)
    tokenizer = AutoTokenizer.from_pretrained(instruct)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    text = json.loads(jsonl_file.read_text().splitlines()[0])["text"]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert first_ids(tmp_path / "new", len(ids) + 1) == [*ids, eos]
    assert first_ids(tmp_path / "tuned", len(ids) + 3) == [bos, *ids, eos, bos]
    capsys.readouterr()
    model = ["--max_steps", 1, "--model_name_or_path", instruct]
    for data, options, prefix in (("new", [*TINY, "--max_steps", 1], []), ("new", model, []), ("tuned", model, [bos])):
        folder = train(
            "--dataset_dir", tmp_path / data, *SHORT, *options, "--output_dir", tmp_path / "run", alone=True
        )
        folder = tmp_path / "run"
        exported = AutoTokenizer.from_pretrained(folder)
        assert exported(text)["input_ids"] == prefix + ids
        assert read_text(str(jsonl_file), exported).documents[0].tolist() == [(prefix or [eos])[-1], *ids]
        out = printed(capsys)
        assert ("does not begin its documents as the model expects; prepare it with --model" in out) == (
            options is model and not prefix
        )
        assert ("the tokenizer puts nothing in front of a text from now on" in out) == (
            options is model and not prefix
        )
        shutil.rmtree(folder)


def test_generation_begins_as_training_did(instruct, monkeypatch):
    """A prompt follows the BOS; an empty one is the BOS."""
    model, tokenizer = load_model(instruct, "cpu")
    seen, forward = [], model.forward
    monkeypatch.setattr(
        model, "forward", functools.wraps(forward)(lambda ids, **o: seen.append(ids) or forward(ids, **o))
    )
    for prompt in ("the", ""):
        generate_texts(model, tokenizer, prompt, max_new_tokens=1)
    ids = tokenizer("the", add_special_tokens=False)["input_ids"]
    assert [given.tolist() for given in seen] == [[[tokenizer.bos_token_id, *ids]], [[tokenizer.bos_token_id]]]


@pytest.mark.parametrize("tie", [True, False])
def test_added_tokens_start_as_the_mean(tmp_path, instruct, tie):
    """In the embeddings and the output matrix, exactly; a tokenizer of another kind is refused."""
    shutil.copytree(instruct, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(instruct, tie_word_embeddings=tie)
    if not tie:
        torch.nn.init.normal_(model.lm_head.weight)
    model.save_pretrained(tmp_path / "model")
    config = TrainConfig(train_file=["a.txt"], model_name_or_path=str(tmp_path / "model"), block_size=16)
    model_config = build_model_config(config, 405, 401, config.model_name_or_path, 400)
    assert model_config.vocab_size == 405
    built = build_model(config, model_config, config.model_name_or_path)
    for layer in (built.get_input_embeddings(), built.get_output_embeddings()):
        mean = layer.weight[:403].mean(dim=0)
        assert len(layer.weight) == 512 and all(torch.equal(layer.weight[i], mean) for i in (403, 404))
    with pytest.raises(UserError, match="the tokenizer has 500 tokens, more than the 403 of the model"):
        build_model_config(config, 500, 401, config.model_name_or_path, 500)


def test_an_end_of_text_beyond_the_vocabulary_is_replaced(tmp_path, jsonl_file, tokenizer_dir, train, capsys):
    """As in a config whose author left GPT-2's default."""
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=16, n_positions=32, vocab_size=500))
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(tmp_path / "model")
    run = ["--model_name_or_path", tmp_path / "model", "--train_file", jsonl_file, *SHORT, "--max_steps", 1]
    train(*run, "--output_dir", tmp_path / "run", "--cache_dir", tmp_path / "cache", alone=True)
    assert "the end of text is the tokenizer's id 0, not 50256" in printed(capsys)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["eos_token_id"] == 0


def test_an_end_of_text_of_ones_own_is_that_of_the_exported_model(tmp_path, jsonl_file, instruct, train, capsys):
    """A tokenizer with another end, such as a chat's: generation stops where documents of the training text end."""
    tokenizer = AutoTokenizer.from_pretrained(instruct)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    end, run = tokenizer.eos_token_id, ["--model_name_or_path", instruct, "--train_file", jsonl_file, *SHORT]
    run += ["--tokenizer_name", tmp_path / "tokenizer", "--output_dir", tmp_path / "run", "--max_steps", 1]
    train(*run, "--cache_dir", tmp_path / "cache", alone=True)
    before = json.loads((instruct / "config.json").read_text())
    assert f"the end of text is the tokenizer's id {end}, not {before['eos_token_id']}" in printed(capsys)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "run" / name).read_text())["eos_token_id"] == end
    assert json.loads((tmp_path / "run" / "config.json").read_text())["bos_token_id"] == before["bos_token_id"]
    assert GenerationConfig.from_pretrained(tmp_path / "run").temperature == 0.6


def test_a_template_that_is_in_the_text_is_not_put_around_it_again(tmp_path, instruct, chat_tokenizer, train):
    """Texts that a chat template has made begin and end with special tokens; training and scoring see each once."""
    texts = [f"<s><|start|>user: {text}</s>" for text in make_documents(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    run = ["--model_name_or_path", instruct, "--train_file", tmp_path / "a.jsonl", "--parse_special_tokens", *SHORT]
    run += ["--max_steps", 1, "--output_dir", tmp_path / "run", "--cache_dir", tmp_path / "cache"]
    train(*run, alone=True)
    ids = chat_tokenizer(texts, add_special_tokens=False)["input_ids"]
    (folder,) = (tmp_path / "cache").iterdir()
    packed = open_packed_dataset(folder, 16).metadata["splits"]
    assert sum(of["tokens"] for of in packed.values()) == sum(map(len, ids))
    scored = read_text(str(tmp_path / "a.jsonl"), AutoTokenizer.from_pretrained(tmp_path / "run"))
    assert [document.tolist() for document in scored.documents] == ids
    assert scored.num_characters == sum(len(text) - len("<s><|start|></s>") for text in texts)


def test_fine_tuning_with_added_tokens(tmp_path, jsonl_file, instruct, train, capsys):
    """The exported model has the new size; so has its checkpoint, from which the run resumes."""
    tokenizer = AutoTokenizer.from_pretrained(instruct)
    tokenizer.add_tokens(["<call>", "<result>"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    run = ["--model_name_or_path", instruct, "--tokenizer_name", tmp_path / "tokenizer", "--train_file", jsonl_file]
    run += [*SHORT, "--save_steps", 1, "--output_dir", tmp_path / "run", "--cache_dir", tmp_path / "cache"]
    for num_steps in (1, 2):
        train(*run, "--max_steps", num_steps, "--resume_from_checkpoint", "auto", alone=True)
        grows = "the vocabulary grows from 403 by 2 tokens, which start as the mean of all" in printed(capsys)
        assert grows == (num_steps == 1)
    model, loaded = load_model(tmp_path / "run", "cpu")
    assert model.config.vocab_size == 405 and loaded.convert_tokens_to_ids("<result>") == 404


def test_special_tokens_in_a_text_are_parsed_only_on_request(tmp_path, chat_tokenizer, train, capsys):
    """By the dataset, the exported tokenizer, and scoring alike; one line says what the text contains."""
    chat_tokenizer.save_pretrained(tmp_path / "tokenizer")
    texts = [f"<|start|>user: {text}</s>" for text in make_documents(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    start, end = (chat_tokenizer.convert_tokens_to_ids(token) for token in ("<|start|>", "</s>"))
    for parse in (False, True):
        options = ["--parse_special_tokens"] * parse
        run = [
            "--train_file",
            tmp_path / "a.jsonl",
            "--tokenizer_name",
            tmp_path / "tokenizer",
            *options,
            *TINY,
            *SHORT,
        ]
        train(*run, "--max_steps", 1, "--output_dir", tmp_path / str(parse), "--cache_dir", tmp_path / "c", alone=True)
        out = capsys.readouterr().out
        assert ("the text contains </s> (60 times" in out) != parse
        assert "<|start|> (60)" in out and ("made ids" in out) == parse
        exported = AutoTokenizer.from_pretrained(tmp_path / str(parse))
        assert exported.split_special_tokens != parse
        exported.save_pretrained(tmp_path / "again")
        for tokenizer in (exported, AutoTokenizer.from_pretrained(tmp_path / "again")):
            ids = tokenizer(texts[0])["input_ids"]
            assert (ids.count(start), ids.count(end)) == ((1, 1) if parse else (0, 0))
        assert read_text(str(tmp_path / "a.jsonl"), exported).documents[0].tolist() == [exported.eos_token_id, *ids]
    assert len(list((tmp_path / "c").iterdir())) == 2


def test_bits_per_byte_of_the_fine_tuned_are_those_of_the_text(jsonl_file, instruct):
    """The BOS is no text."""
    tokenizer = AutoTokenizer.from_pretrained(instruct)
    from recipe.data.tokenizer import count_token_bytes

    counts, text = count_token_bytes(tokenizer), "".join(make_documents(5))
    assert counts[tokenizer(text)["input_ids"]].sum() == len(text.encode()) and math.isfinite(counts.sum())
