"""A model that is fine-tuned keeps what the run does not train: its tokenizer's files, its special ids, its type."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import PLAIN, TINY, make_documents, read_words, run_script
from hub_repository import File, Repository
from safetensors.torch import load_file
from small_model import save_small_model
from tokenizers import processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from recipe.config import TrainConfig
from recipe.data.packed import open_packed_dataset
from recipe.data.tokenizer import train_tokenizer
from recipe.evaluation.generation import encode_prompt, load_model
from recipe.evaluation.text import read_text
from recipe.model.build import build_model, build_model_config
from recipe.model.files import own_files

SHORT = [*PLAIN, "--block_size", 16, "--global_batch_size", 4, "--eval_steps", 0, "--save_steps", 0]
SHORT += ["--load_best_model_at_end", "false", "--max_steps", 1]
COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@pytest.fixture(scope="module")
def chat_tokenizer():
    """A tokenizer as instruct models have: a BOS in front, other special tokens, and a template for chats."""
    backend = train_tokenizer(make_documents(100), 400).backend_tokenizer
    backend.add_special_tokens(["<s>", "</s>", "<|start|>"])
    first = "<s>", backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[first])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}<|start|>{{ m.role }}: {{ m.content }}{% endfor %}"
    return tokenizer


@pytest.fixture(scope="module")
def instruct(tmp_path_factory, chat_tokenizer):
    """A llama as others publish them."""
    folder = tmp_path_factory.mktemp("models") / "instruct"
    tokenizer = chat_tokenizer
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"vocab_size": 403, "max_position_embeddings": 64}
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    AutoModelForCausalLM.from_config(LlamaConfig(**shape, **ids)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"  # Transformers 4 cannot read the class that 5 gives it
    path.write_text(path.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|start|>")]
    GenerationConfig(eos_token_id=ends, temperature=0.6, do_sample=True).save_pretrained(folder)
    return folder


@pytest.fixture
def tune(tmp_path, jsonl_file, train):
    """Train a model for a step on a text: `tune(model)`. Returns the folder of the run."""

    def run(model, *options: object, name: str = "run", text: Path = jsonl_file) -> Path:
        command = ["--model_name_or_path", model, "--train_file", text, *SHORT, *options]
        train(*command, "--output_dir", tmp_path / name, "--cache_dir", tmp_path / "cache", alone=True)
        return tmp_path / name

    return run


def texts_of_chats(path: Path, first: str = "") -> tuple[Path, list[str]]:
    """Write texts with special tokens in them, as a chat's template makes them."""
    texts = [f"{first}<|start|>user: {text}</s>" for text in make_documents(60)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path, texts


def config_of(folder: Path, name: str = "config.json") -> dict:
    return json.loads((folder / name).read_text())


# ------------------------------------------------------------------ what is kept


def test_what_is_not_trained_is_copied_byte_for_byte(instruct, chat_tokenizer, tune, capsys):
    """By a checkpoint and by a run that resumes, too.

    The embedding of the padding, which is the end of text, is trained. A dropout that the type lacks is named.
    """
    for num_steps in (1, 2):
        run = tune(instruct, "--save_steps", 1, "--resume_from_checkpoint", "auto", "--max_steps", num_steps)
    for folder in (run, run / "checkpoint-1"):
        for name in COPIED:
            assert (folder / name).read_bytes() == (instruct / name).read_bytes(), name
        names_of_transformers_4 = {"rope_theta": 10000.0, "rope_scaling": None}
        assert config_of(folder) == config_of(instruct) | {"attention_dropout": 0.1} | names_of_transformers_4
    tokenizer = AutoTokenizer.from_pretrained(run)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<|start|>user: hi"
    weights = [load_file(folder / "model.safetensors")["model.embed_tokens.weight"] for folder in (instruct, run)]
    assert chat_tokenizer.pad_token_id == chat_tokenizer.eos_token_id
    assert not torch.equal(*(rows[chat_tokenizer.eos_token_id] for rows in weights))
    assert "resid_pdrop" in read_words(capsys)


def test_a_model_of_the_hub_keeps_its_files(instruct, tune, hub, tmp_path):
    """The model's files are downloaded, no others of the repository, and later runs need no Hub for them."""
    files = {path.name: File(path.read_bytes(), path.suffix == ".safetensors") for path in instruct.iterdir()}
    repository = hub.repositories["org/instruct"] = Repository(False)
    repository.write_commit("main", None, "", files | {"model.gguf": File(b"large", True)})
    for name in ("a", "b"):
        run = tune("org/instruct", name=name)
        for copied in COPIED:
            assert (run / copied).read_bytes() == (instruct / copied).read_bytes()
    assert not list(tmp_path.rglob("model.gguf"))


def test_a_link_is_followed_only_within_the_folder_or_the_cache_of_the_hub(tmp_path, capsys):
    folder = tmp_path / "models--jo--a" / "snapshots" / "1f"
    for path in (tmp_path / "id_rsa", folder / "deep" / "vocab.json", folder.parents[1] / "blobs" / "9e"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
    for name, target in (("chat_template.jinja", tmp_path / "id_rsa"), ("vocab.json", "deep/vocab.json")):
        (folder / name).symlink_to(target)
    (folder / "merges.txt").symlink_to("../../blobs/9e")
    assert own_files(folder) == {"vocab.json": b"vocab.json", "merges.txt": b"9e"}
    assert capsys.readouterr().out.count("chat_template.jinja is a link") == 1


def test_no_path_of_its_authors_machine_is_exported(instruct, tune, tmp_path):
    shutil.copytree(instruct, tmp_path / "model")
    own = config_of(instruct, "tokenizer_config.json")
    paths = dict.fromkeys(("name_or_path", "special_tokens_map_file", "tokenizer_file"), "/home/jo/secret")
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(own | paths))
    assert config_of(tune(tmp_path / "model"), "tokenizer_config.json") == own


# ------------------------------------------------------------------ where documents begin and end


@pytest.mark.parametrize(
    ("source", "is_tuned", "has_bos"),
    [
        ("--tokenizer_name", False, False),
        ("--model_name_or_path", True, True),
        ("--tokenizer_name", True, False),  # against the model's expectation, as a warning says
    ],
)
def test_documents_begin_as_the_model_expects(
    tmp_path, jsonl_file, instruct, train, capsys, source, is_tuned, has_bos
):
    """A fine-tuned model has its BOS before documents, a new model has none; exported tokenizers and prompts agree."""
    data = tmp_path / "data"
    run = tmp_path / "run"
    command = [source, instruct, "--train_file", jsonl_file, "--output_dir", data]
    assert not run_script("scripts/prepare_data.py", *command)
    tokenizer = AutoTokenizer.from_pretrained(instruct)
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    text = json.loads(jsonl_file.read_text().splitlines()[0])["text"]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    expected = [bos, *ids, eos, bos] if has_bos else [*ids, eos]
    assert open_packed_dataset(data, 8).train._tokens(0, len(expected)).tolist() == expected
    capsys.readouterr()
    model = ["--model_name_or_path", instruct] if is_tuned else TINY
    train("--dataset_dir", data, *SHORT, *model, "--output_dir", run, alone=True)
    exported = AutoTokenizer.from_pretrained(run)
    assert exported(text)["input_ids"] == [bos] * has_bos + ids == encode_prompt(exported, text)
    assert encode_prompt(exported, "") == [bos if has_bos else eos]
    assert read_text(str(jsonl_file), exported).documents[0].tolist() == [bos if has_bos else eos, *ids]
    assert ("prepare it with --model" in read_words(capsys)) == (is_tuned and not has_bos)


def test_an_end_of_text_beyond_the_vocabulary_is_replaced(tmp_path, tokenizer_dir, tune, capsys):
    """As in a config whose author left GPT-2's default."""
    model = save_small_model(tmp_path / "model", tokenizer_dir, bos_token_id=50256, eos_token_id=50256)
    assert config_of(tune(model))["eos_token_id"] == 0
    assert "50256" in read_words(capsys)


def test_an_end_of_text_of_ones_own_is_that_of_the_exported_model(tmp_path, instruct, tune, capsys):
    """Generation stops where documents of the training text end, such as at a chat's end. All else is as before."""
    tokenizer = AutoTokenizer.from_pretrained(instruct)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    run = tune(instruct, "--tokenizer_name", tmp_path / "tokenizer")
    end = tokenizer.eos_token_id
    before = config_of(instruct)
    assert f"{end}, not {before['eos_token_id']}" in read_words(capsys)
    assert config_of(run)["eos_token_id"] == end
    assert config_of(run)["bos_token_id"] == before["bos_token_id"]
    generation = "generation_config.json"
    assert config_of(run, generation) == config_of(instruct, generation) | {"eos_token_id": end}


# ------------------------------------------------------------------ special tokens in the text


def test_a_template_that_is_in_the_text_is_not_put_around_it_again(tmp_path, instruct, chat_tokenizer, tune):
    """Texts that begin and end with special tokens: training and scoring see each once."""
    path, texts = texts_of_chats(tmp_path / "a.jsonl", first="<s>")
    run = tune(instruct, "--parse_special_tokens", text=path)
    ids = chat_tokenizer(texts, add_special_tokens=False)["input_ids"]
    (folder,) = (tmp_path / "cache").iterdir()
    packed = open_packed_dataset(folder, 16).metadata["splits"]
    assert sum(of["tokens"] for of in packed.values()) == sum(map(len, ids))
    scored = read_text(str(path), AutoTokenizer.from_pretrained(run))
    assert [document.tolist() for document in scored.documents] == ids
    assert scored.num_characters == sum(len(text) - len("<s><|start|></s>") for text in texts)


@pytest.mark.parametrize("parse", [False, True])
def test_special_tokens_in_a_text_are_parsed_only_on_request(tmp_path, chat_tokenizer, train, capsys, parse):
    """By the exported tokenizer, also when it is saved again, and by scoring. A line counts what the text contains."""
    chat_tokenizer.save_pretrained(tmp_path / "tokenizer")
    path, texts = texts_of_chats(tmp_path / "a.jsonl")
    run = ["--train_file", path, "--tokenizer_name", tmp_path / "tokenizer", *TINY, *SHORT]
    run += ["--output_dir", tmp_path / "run", "--cache_dir", tmp_path / "cache"]
    train(*run, *["--parse_special_tokens"] * parse, alone=True)
    assert "<|start|> (60)" in capsys.readouterr().out
    exported = AutoTokenizer.from_pretrained(tmp_path / "run")
    exported.save_pretrained(tmp_path / "again")
    for tokenizer in (exported, AutoTokenizer.from_pretrained(tmp_path / "again")):
        assert tokenizer.split_special_tokens != parse
        ids = tokenizer(texts[0])["input_ids"]
        for token in ("<|start|>", "</s>"):
            assert ids.count(chat_tokenizer.convert_tokens_to_ids(token)) == parse
    (folder,) = (tmp_path / "cache").iterdir()
    assert open_packed_dataset(folder, 8).train._tokens(0, len(ids)).tolist() == ids
    assert read_text(str(path), exported).documents[0].tolist() == [exported.eos_token_id, *ids]


# ------------------------------------------------------------------ added tokens


@pytest.mark.parametrize("tie", [True, False])
def test_added_tokens_start_as_the_mean(tmp_path, tokenizer_dir, tie):
    """Exactly, in the embeddings and in the output matrix."""
    folder = save_small_model(tmp_path / "model", tokenizer_dir, tie_word_embeddings=tie)
    dropout = {"resid_pdrop": 0.1}
    config = TrainConfig(train_file=["a.txt"], model_name_or_path=str(folder), block_size=16, config_overrides=dropout)
    model = build_model(config, build_model_config(config, 502, 0, folder, 500), folder)
    assert model.config.tie_word_embeddings == tie and model.transformer.h[0].mlp.dropout.p == 0.1
    for rows in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        assert len(rows) == 512
        assert torch.equal(rows[500:502], rows[:500].mean(dim=0).expand(2, -1))


def test_a_model_fine_tuned_with_added_tokens_has_their_number(tmp_path, instruct, tune, capsys):
    """The checkpoint has the same number of tokens, and the run resumes from it."""
    tokenizer = AutoTokenizer.from_pretrained(instruct)
    tokenizer.add_tokens(["<call>", "<result>"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    options = ["--tokenizer_name", tmp_path / "tokenizer", "--save_steps", 1, "--resume_from_checkpoint", "auto"]
    for num_steps in (1, 2):
        run = tune(instruct, *options, "--max_steps", num_steps)
        assert ("grows from 403 by 2" in read_words(capsys)) == (num_steps == 1)
    model, loaded = load_model(run, "cpu")
    assert model.config.vocab_size == 405
    assert loaded.convert_tokens_to_ids("<result>") == 404
