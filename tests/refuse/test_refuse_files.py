"""What comes in from files and from the Hub and is refused: each in one line that names the file or the option."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from helpers import VOCAB_SIZE, shard_of
from huggingface_hub import create_repo
from refusals import check_refusal

from recipe import command_line
from recipe.config import MISSING, PATHS, PUBLIC_OPTIONS, may_come_from_hub
from recipe.errors import UserError

PREPARE = "scripts/prepare_data.py --output_dir packed --tokenizer_name tokenizer --train_file"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, tokenizer_dir, dataset_dir) -> Path:
    """An own folder with a tokenizer and a dataset."""
    folder = tmp_path / "work"  # beside the cache of the Hub
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("tokenizer").symlink_to(tokenizer_dir)
    Path("data").symlink_to(dataset_dir)
    return folder


# ------------------------------------------------------------------ texts, token ids and tasks


def rows(column: str, *values: object) -> str:
    return "".join(json.dumps({column: value}) + "\n" for value in values)


IDS = np.random.default_rng(0).integers(0, VOCAB_SIZE, 5001).astype("<u2")
TEXTS = [  # file, content -> what the answer names
    ("blank.txt", " \n\t\r\n", "blank.txt"),
    ("blank.jsonl", rows("text", "", None), "blank.jsonl"),
    ("body.jsonl", '{"body": "x", "id": 1}\n', "body.jsonl 'text' --text_column_name 'body'"),
    ("chat.jsonl", '{"messages": [{"role": "user"}]}\n', "chat.jsonl 'text' messages dialogs recipe/data/README.md"),
    ("text.csv", f"{'a sentence ' * 10},2\n1,2\n", "text.csv --text_column_name line"),
    ("one.jsonl", rows("text", "word " * 900), "one.jsonl --validation_file, --document_separator"),
    # --- token ids
    ("a.jsonl", rows("text", *20 * [[7], [7, VOCAB_SIZE]]), f"{VOCAB_SIZE} tokenizer"),
    ("a.jsonl", rows("text", *20 * [[7], [7, -5]]), "-5 tokenizer"),
    ("a.jsonl", rows("text", *20 * [[7], [8], [9], "a", "b", "c"]), "text ids"),
    ("a.bin", IDS.tobytes()[:-1], "a.bin 10,001"),
    ("a.bin", IDS.astype("<u4").tobytes(), "a.bin uint16"),
    ("a.bin", shard_of(IDS, version=2), "a.bin 2; 1,"),
    ("a.bin", shard_of(IDS, count=9999), "a.bin 9,999 21,022 11,026"),
    ("a.bin", shard_of(IDS + np.uint16(VOCAB_SIZE)), f"{VOCAB_SIZE} tokenizer"),
]


@pytest.mark.parametrize(("name", "content", "names"), TEXTS)
def test_texts_that_make_no_dataset(name, content, names):
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    check_refusal(f"{PREPARE} {name} --validation_split_percentage 50", names)


# ------------------------------------------------------------------ recipes

RECIPES = [  # content -> what the answer names
    ("- a\n- b", "mine.yaml options"),
    ("a: " + "[" * 5000, "mine.yaml YAML"),
    ("lerning_rate: 1", "mine.yaml 'lerning_rate' learning_rate?"),
    ("dataset_weights: [a]", "mine.yaml dataset_weights 'a'"),
    ("seed: 1.5", "mine.yaml seed '1.5'"),
    ("config_overrides: 3", "config_overrides n_layer=4"),
    ("max_steps: null", "--max_steps, --num_train_epochs --max_minutes"),
    ("hub_language: [en, null]", "mine.yaml hub_language"),
    ("optim: muon", "optim muon learning_rate 0.0006 adamw_torch_fused"),
    ("seed:", "seed"),
]


@pytest.mark.parametrize(("content", "names"), RECIPES)
def test_recipes_that_mean_nothing(content, names):
    Path("mine.yaml").write_text(f"{content}\n")
    check_refusal("recipe/train.py --config mine.yaml --dataset_dir data", names)


HARMLESS = {  # what every published recipe may hold, and what a run understands
    "seed": 7,
    "block_size": 64,
    "config_overrides": {"n_layer": 3},
    "max_steps": 9,
    "learning_rate": 1.0e-3,
    "dataset_name": "jo/corpus",
    "dataset_split": "train",
    "tokenizer_name": "jo/tokenizer",
    "expected_loss": {"value": 3.0, "tolerance": 0.1, "tokens": 100, "dataset": "jo/corpus", "source": "three seeds"},
}
PRIVATE = """
    output_dir run_name cache_dir resume_from_checkpoint report_to profile sample_prompt push_to_hub hub_model_id
    hub_strategy hub_overwrite hub_private_repo hub_license hub_language
"""
HOSTILE = [  # the text of a recipe from the Hub -> what the answer names
    ("{push_to_hub: true, hub_model_id: a/b, train_file: /etc/passwd}", "hub_model_id, push_to_hub, train_file"),
    ("train_file: !!set {a, b}", "train_file"),
    ("config_overrides: {1: 2}", "config_overrides names"),
    ('"\\e[2J": 1', r"\x1b"),
    (f"dataset_name: {MISSING}", "--dataset_name"),
    (f"dataset_dir: ['{MISSING}', '{MISSING}']", "--dataset_dir (2"),
]


@pytest.fixture
def published(folder, monkeypatch):
    """Publish a recipe at hf://jo/run."""
    monkeypatch.setattr(command_line, "fetch_recipe", lambda *_: folder / "training_config.yaml")
    return Path("training_config.yaml").write_text


@pytest.mark.parametrize(("content", "names"), HOSTILE)
def test_recipes_from_the_hub(published, content, names):
    published(content)
    check_refusal("recipe/train.py --config hf://jo/run", f"hf://jo/run {names}")


@pytest.mark.parametrize("name", PRIVATE.split())
def test_a_recipe_from_the_hub_sets_no_private_option(published, name):
    """A recipe that sets a private option is refused, and the option is named."""
    published(yaml.safe_dump(HARMLESS | {name: "mine/precious"}))
    check_refusal("recipe/train.py --config hf://jo/run", f"hf://jo/run {name}; training_config.yaml")


def test_a_recipe_from_the_hub_is_obeyed_in_what_is_public(published):
    published(yaml.safe_dump(HARMLESS))
    config = command_line.load_config(["--config", "hf://jo/run"])[0]
    assert {name: getattr(config, name) for name in HARMLESS} == HARMLESS
    assert not {*PATHS} & {*PUBLIC_OPTIONS}


def test_a_message_quotes_the_beginning_of_a_long_value(published):
    """A few aliases of YAML stand for millions of items."""
    lists = ", ".join(f"&{name} [{'*' + inner}{(', *' + inner) * 8}]" for inner, name in itertools.pairwise("abcdef"))
    published(f"seed: [&a [1, 2, 3], {lists}]")
    with pytest.raises(UserError, match="seed must be a single value") as refused:
        command_line.load_config(["--config", "hf://jo/run"])
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("name", "value", "is_taken"),
    [
        ("train_file", [MISSING], True),
        ("dataset_dir", [MISSING, "runs/data"], False),
        ("dataset_dir", [MISSING, MISSING], True),
        ("dataset_name", "jo/corpus", True),
        ("model_name_or_path", "here/model", False),  # a folder on this machine
        ("model_name_or_path", "jo/model", True),
        ("document_separator", "---", False),
    ],
)
def test_a_recipe_from_the_hub_names_data_and_models_of_the_hub_only(name, value, is_taken):
    Path("here", "model").mkdir(parents=True)
    assert may_come_from_hub(name, value) == is_taken


# ------------------------------------------------------------------ models of the Hub


@pytest.mark.parametrize("name", ["someone/gone", "someone/model --revision v7"])
def test_a_model_or_revision_that_the_hub_lacks(hub, name):
    create_repo("someone/model")
    check_refusal(f"scripts/generate_text.py --model {name}", name.replace("--revision", ""))
