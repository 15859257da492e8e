"""What options mean: defaults < recipe < command line, and a value is the same wherever it is written."""

import argparse
import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from helpers import ROOT, run_script

from recipe.arguments import OTHER_NAMES, CommandLine, Store, shell_command
from recipe.command_line import CONFIGS_DIR, load_config
from recipe.config import ALIASES, OPTIONS, PATHS, TrainConfig, write_config
from recipe.evaluation.validation import count_eval_rows
from recipe.hardware.choices import Machine
from recipe.hardware.memory import micro_batch_sizes
from recipe.run.decide import EVAL_STEPS

SIZES = ("124m", "124m_fast", "355m", "774m", "1558m")
DATA = ["--dataset_dir", "some/folder"]
RECIPES = sorted(path.stem for path in CONFIGS_DIR.glob("*.yaml"))


def load(*argv: object) -> TrainConfig:
    return load_config([*map(str, argv)]).config


@pytest.fixture
def recipe(tmp_path):
    """Write a recipe file, and return the options that use it."""

    def write(content: str) -> list[str]:
        path = tmp_path / "mine.yaml"
        path.write_text(content)
        return ["--config", str(path)]

    return write


# ------------------------------------------------------------------ which value counts


def test_the_command_line_overrides_the_recipe_which_overrides_the_defaults(recipe):
    options = recipe("dataset_dir: from_file\nlearning_rate: 1.0e-3\nmax_steps: 7\n")
    config, name, _ = load_config([*options, "--max_steps", "9"])
    found = config.dataset_dir, config.learning_rate, config.max_steps, config.adam_beta2, name
    assert found == (["from_file"], 1e-3, 9, 0.95, "mine")


def test_own_text_keeps_the_demos_shape_and_batch():
    demo, name, _ = load_config([])
    assert (name, demo.dataset_name) == ("demo", "python_standard_library")
    config, name, _ = load_config(["--train_file", "a.txt", "b.txt"])
    own = {"dataset_name": None, "train_file": ["a.txt", "b.txt"], "max_eval_samples": "auto"}
    assert name == "demo" and config == dataclasses.replace(demo, **own)


def test_own_weights_take_the_recipe_of_fine_tuning():
    own = ["--model_name_or_path", "X", "--train_file", "Y"]
    assert load_config(own)[:2] == (load(*own, "--config", "gpt2_finetune"), "gpt2_finetune")


def test_a_saved_config_in_the_current_folder_names_its_run(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    write_config(load(*DATA), Path("training_config.yaml"))
    assert load_config(["--config", "training_config.yaml"]).recipe == "mine"


@pytest.mark.parametrize(
    ("argv", "processes", "expected"),
    [
        ("--per_device_train_batch_size 8 --gradient_accumulation_steps 4", 1, (32, [8])),
        ("--per_device_train_batch_size 8 --gradient_accumulation_steps 4", 2, (64, [8])),
        ("--per_device_train_batch_size 4", 2, (8, [4])),
        ("--per_device_train_batch_size=2 --gradient_accumulation_steps=4 --global-batch-size=8", 1, (8, [2])),
    ],
)
def test_a_typed_micro_batch_and_accumulation_set_the_global_batch(monkeypatch, argv, processes, expected):
    """As in Trainer; each of them alone only divides the recipe's."""
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    config = load("--config", "demo", *argv.split())
    assert (config.global_batch_size, micro_batch_sizes(config, Machine("cpu", processes))) == expected


BIG = "--config gpt2_124m --dataset_dir d"
FAST = "--config gpt2_124m_fast --dataset_dir d"
LARGE_CHAR = "--config shakespeare_char_large --train_file a.txt"
SHAPE = {"n_layer": 6, "n_head": 6, "n_embd": 384}
DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1}
CHOSEN = [  # a typed option -> what becomes of the recipe's values that were chosen for another value of it
    ("--lr_scheduler_type linear", {"lr_scheduler_kwargs": None}),
    ("--lr_scheduler_type warmup_stable_decay", {"lr_scheduler_kwargs": load().lr_scheduler_kwargs}),  # the same one
    ("--num_train_epochs 6", {"max_minutes": None, "num_train_epochs": 6}),  # also if they are the recipe's
    ("--streaming --dataset_name a/b", {"num_train_epochs": None, "max_minutes": 2.75, "max_steps": None}),
    (f"{LARGE_CHAR} --model_name_or_path m", {"tokenizer_vocab_size": None, "config_overrides": DROPOUT}),
    (f"{LARGE_CHAR} --model_type llama", {"tokenizer_vocab_size": 257, "config_overrides": DROPOUT}),
    (f"{LARGE_CHAR} --model_type gpt2", {"config_overrides": SHAPE | DROPOUT}),
    (f"{LARGE_CHAR} --config_overrides n_layer=4,a=1", {"config_overrides": SHAPE | DROPOUT | {"n_layer": 4, "a": 1}}),
    (f"{BIG} --optim adamw_bnb_8bit", {"learning_rate": 6e-4, "weight_decay": 0.1}),  # also an AdamW
    (f"{FAST} --optim adamw_torch --learning_rate 1e-3", {"learning_rate": 1e-3, "weight_decay": 0.1}),
    ("--train_file a.txt --tokenizer_name t", {"tokenizer_vocab_size": None}),
    # The warm-up keeps its share of the steps in a shorter run, unless it is typed too.
    (f"{BIG} --max_steps 40000", {"warmup_steps": 715}),
    (f"{BIG} --max_steps 6 --warmup_steps 50", {"warmup_steps": 50}),
    (f"{BIG} --num_train_epochs 3", {"warmup_steps": 715 / 19073}),
    (f"{BIG} --max_minutes 3", {"warmup_steps": 715 / 19073}),
    # Another model has no expected loss.
    (f"{BIG} --max_steps 9 --block_size 1024", {"expected_loss": load(*BIG.split()).expected_loss}),
    (f"{BIG} --config_overrides n_layer=3", {"expected_loss": None}),
    (f"{BIG} --tokenizer_name t", {"expected_loss": None}),  # it is one with GPT-2's tokenizer
]


@pytest.mark.parametrize(("argv", "expected"), CHOSEN)
def test_what_a_recipe_chose_for_a_value_goes_with_it(argv, expected):
    config = load(*argv.split())
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (f"{FAST} --optim adamw_torch --learning_rate 1e-3", "weight_decay 0.1 0.15 muon"),
        ("--optim adamw_torch --learning_rate 1e-3 --weight_decay 0.2", ""),
        ("--config_overrides n_embd=384,n_head=6", "learning_rate 0.01 128 384"),
        ("--config_overrides n_embd=384,n_head=6 --learning_rate 5e-3", ""),
    ],
)
def test_a_note_says_what_was_chosen_for_another_model_or_optimizer(argv, names):
    notes = load_config(argv.split()).notes
    assert len(notes) == bool(names) and all(name in notes[0] for name in names.split())


LIMITED = "num_train_epochs: 2\nmax_minutes: 3"
LENGTHS = [  # a recipe, what is typed -> steps, epochs and minutes of the run
    ("seed: 1", "", (19073, None, None)),
    ("num_train_epochs: 2", "", (None, 2, None)),
    ("max_steps: -1\nnum_train_epochs: 2", "", (None, 2, None)),  # of Trainer
    ("max_steps: 30\nmax_minutes: 3", "", (30, None, 3)),
    ("max_steps: 30", "--max_minutes 9", (None, None, 9)),
    ("seed: 1", "--max_minutes 9 --max_steps 40", (40, None, 9)),
    ("max_steps: 30", "--num_train_epochs 4 --max_steps -1", (None, 4, None)),
    (LIMITED, "", (None, 2, 3)),
    (LIMITED, "--max_minutes 9", (None, 2, 9)),  # epochs that are enough stay enough
    (LIMITED, "--max_minutes 9 --num_train_epochs 4", (None, 4, 9)),
    (LIMITED, "--num_train_epochs 4", (None, 4, None)),
    (LIMITED, "--max_steps 40", (40, None, None)),
]


@pytest.mark.parametrize(("content", "argv", "length"), LENGTHS)
def test_a_typed_length_replaces_the_recipes(recipe, content, argv, length):
    """Steps or epochs from the same place as a time limit stay its upper bound."""
    config = load(*recipe(content), *DATA, *argv.split())
    assert (config.max_steps, config.num_train_epochs, config.max_minutes) == length


def test_a_warm_up_in_a_recipe_of_epochs_is_kept(recipe):
    """A recipe of epochs does not know its number of steps, so its warm-up cannot become a share of them."""
    assert load(*recipe("num_train_epochs: 2\nwarmup_steps: 50\n"), *DATA, "--max_steps", "100").warmup_steps == 50


@pytest.mark.parametrize(("positions", "block_size"), [(48, 48), (2048, 1024)])
def test_the_block_size_fits_the_model(tmp_path, positions, block_size):
    """Unless it is typed; a model with a longer context than the recipe's rows trains on the recipe's."""
    (tmp_path / "config.json").write_text(json.dumps({"n_positions": positions}))
    assert load("--model_name_or_path", tmp_path, "--train_file", "a.txt").block_size == block_size


def test_the_consent_to_overwrite_is_given_once(tmp_path):
    """A later `--config training_config.yaml` does not repeat it."""
    write_config(load(*DATA, "--hub_overwrite"), tmp_path / "training_config.yaml")
    assert not load("--config", tmp_path / "training_config.yaml").hub_overwrite


# ------------------------------------------------------------------ how a value is written

MEANINGS = [  # option, as it is typed, as it stands in a recipe (None: the same), and what the program understands
    # Text keeps its spelling. YAML 1.1 would make a boolean, a number, a date or sixty times a minute of it.
    ("hub_language", "no", None, ["no"]),
    ("run_name", "007", None, "007"),
    ("run_name", "null", "'null'", "null"),
    ("dataset_revision", "1e5", None, "1e5"),
    # Numbers.
    ("learning_rate", "6e-4", None, 6e-4),
    ("global_batch_size", "1_000", None, 1000),
    ("max_eval_samples", "all", None, "all"),
    ("max_steps", "-1", None, 19073),  # Trainer's default: as if it were not there
    # Choices and switches take YAML's and Python's words for true and false.
    ("mixed_precision", "no", None, "no"),
    ("matmul_precision", "HIGH", None, "high"),
    ("streaming", "on", None, True),
    ("activation_checkpointing", "yes", None, "true"),
    # Lists, dictionaries and paths.
    ("report_to", "none --report_to wandb", "[none, wandb]", ["wandb"]),
    ("report_to", "wandb --report_to none", "[wandb, none]", None),
    ("train_file", "a.txt --train_file b.txt", "[a.txt, b.txt]", ["a.txt", "b.txt"]),
    ("config_overrides", '{"n_layer":3}', "'{\"n_layer\": 3}'", {"n_layer": 3}),
    ("config_overrides", "n_layer=3 --config_overrides n_head=2", "n_layer=3,n_head=2", {"n_layer": 3, "n_head": 2}),
    ("config_overrides", "tie_word_embeddings=false", "{tie_word_embeddings: no}", {"tie_word_embeddings": False}),
    ("output_dir", "a~/$USER", None, "a~/$USER"),
    ("train_file", "~/*.txt $HOME/b", "[~/*.txt, $HOME/b]", ["/home/jo/*.txt", "/home/jo/b"]),
    # A value that begins with a dash is never read as an option.
    ("sample_prompt", "-hello", None, "-hello"),
    ("run_name", "-1", None, "-1"),
]


@pytest.mark.parametrize(("option", "typed", "yaml_text", "expected"), MEANINGS)
def test_a_value_means_the_same_everywhere(tmp_path, monkeypatch, recipe, option, typed, yaml_text, expected):
    """On the command line, in a recipe, and in the file that a run saves."""
    monkeypatch.setenv("HOME", "/home/jo")
    source = {"train_file": "", "streaming": "dataset_name: jo/corpus\n"}.get(option, "train_file: t.txt\n")
    rest = "tokenizer_vocab_size: 300\n" + source
    config = load(*recipe(rest), f"--{option}", *typed.split(" "))
    assert getattr(config, option) == expected
    assert load(*recipe(f"{rest}{option}: {yaml_text or typed}\n")) == config
    write_config(config, tmp_path / "training_config.yaml")
    output_dir = ["--output_dir", config.output_dir] if config.output_dir else []
    assert load("--config", tmp_path / "training_config.yaml", *output_dir) == config


@pytest.mark.parametrize(
    ("content", "option", "expected"),
    [
        ("config_overrides: null", "config_overrides", None),
        ("report_to: []", "report_to", []),
        ("<<: {seed: 3, run_name: 007}", "seed", 3),
        ("config_overrides: {a: [0.00001], b: {c: 1.0e+20}}", "config_overrides", {"a": [1e-5], "b": {"c": 1e20}}),
        ("train_file: [t.txt, --streaming]", "train_file", ["t.txt", "--streaming"]),
        ("sample_prompt: |\n  two\n  lines", "sample_prompt", "two\nlines\n"),
    ],
)
def test_what_only_a_recipe_can_say(recipe, content, option, expected):
    text = "" if content.startswith("train_file") else "train_file: t.txt\n"
    config = load(*recipe(f"tokenizer_vocab_size: 300\n{text}{content}\n"))
    assert getattr(config, option) == expected and not config.streaming


def test_a_command_line_has_switches_hyphens_and_values_like_names_of_options():
    config = load(*DATA, "--profile", "--max-steps", "7", "--sample_prompt=--streaming")
    assert (config.profile, config.max_steps, config.sample_prompt) == (10, 7, "--streaming")
    assert not config.streaming


@pytest.mark.parametrize(
    ("typed", "line", "option", "expected"),
    [
        ("--bf16", "bf16: true", "mixed_precision", "bf16"),
        ("--bf16=false", "bf16: false", "mixed_precision", "no"),
        ("--gradient_checkpointing", "gradient_checkpointing: true", "activation_checkpointing", "true"),
        ("--tf32 false", "tf32: false", "matmul_precision", "highest"),
    ],
)
def test_names_of_training_arguments(recipe, typed, line, option, expected):
    """--bf16, --fp16, --tf32 and --gradient_checkpointing set our options, typed or in a recipe."""
    assert getattr(load(*DATA, *typed.split()), option) == expected
    assert getattr(load(*recipe(line), *DATA), option) == expected
    other = "medium" if option == "matmul_precision" else "auto"
    assert getattr(load(*recipe(line), *DATA, f"--{option}", other), option) == other


def test_the_answers_for_options_of_other_programs_name_existing_ones():
    answers = yaml.safe_load(OTHER_NAMES.read_text())
    names = [name for others in answers.values() for name in others.split()]
    assert len(set(names)) == len(names) and not OPTIONS.keys() & names
    for answer in answers:
        assert set(re.findall(r"--([a-z_0-9]+)", answer)) <= {*OPTIONS, "cpu", "dynamo_mode"}, answer


def test_help_lists_every_option_once_with_the_defaults_of_the_recipe(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run_script("recipe/train.py", "--config", "gpt2_124m_fast", "--help") in ("", "0")
    shown = capsys.readouterr().out
    text = " ".join(shown.split())
    assert re.search(r"--learning_rate N [^-]*\(default: 0\.002\)", text)
    assert re.search(r"--max_steps N [^-]*\(default: 7820\)", text)
    listed = re.findall(r"^  --(\w+)", shown, re.MULTILINE)
    assert [name for name in listed if name not in ("config", *ALIASES)] == list(OPTIONS)
    sections = [option.metadata["section"] for option in OPTIONS.values() if "section" in option.metadata]
    assert re.findall(r"^(\S.*):$", shown, re.MULTILINE) == ["options", *sections] and len(sections) > 5


# ------------------------------------------------------------------ the recipes, and what their numbers lead to


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_loads_with_its_tokens_per_step(name):
    config = load("--config", name, *([] if name == "demo" else DATA))
    special = {
        "demo": 2048,
        "gpt2_finetune": 2**15,
        "gpt2_1558m": 2**20,
        "shakespeare_char": 12 * 64,
        "shakespeare_char_large": 2**12,
    }
    assert config.global_batch_size * config.block_size == special.get(name, 2**19)


def test_the_numbers_of_gpt2_124m():
    """The recipe has the published numbers (GPT-3 table 2.1, build-nanogpt): 10 B tokens in 19,073 steps."""
    config = load("--config", "gpt2_124m", *DATA)
    assert (config.max_steps, config.warmup_steps, config.tokens_per_step) == (19_073, 715, 524_288)
    assert (config.optim, config.lr_scheduler_type) == ("adamw_torch_fused", "cosine_with_min_lr")
    assert config.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
    assert (config.adam_beta1, config.adam_beta2, config.weight_decay, config.max_grad_norm) == (0.9, 0.95, 0.1, 1.0)


@pytest.mark.parametrize(
    ("size", "rate", "num_heads"), [("124m", 6e-4, 12), ("355m", 3e-4, 16), ("774m", 2.5e-4, 20), ("1558m", 2e-4, 25)]
)
def test_the_learning_rates_and_heads_of_the_sizes(size, rate, num_heads):
    """Learning rates of GPT-3's table 2.1, heads of GPT-2."""
    config = load("--config", f"gpt2_{size}", *DATA)
    assert (config.learning_rate, config.config_overrides["n_head"]) == (rate, num_heads)


@pytest.mark.parametrize("name", ["demo --max_steps 1200", *(f"gpt2_{size}" for size in SIZES)])
def test_evaluation_costs_two_percent_by_default(name):
    """All evaluations of a recipe cost at most 2% of its training if an evaluated row costs 0.4 of a trained one.

    The recipes of GPT-2 evaluate the same rows, so that their losses compare; `auto` is for other text.
    """
    config = load("--config", *name.split(), *DATA)
    if config.eval_steps == "auto":
        config = dataclasses.replace(config, eval_steps=EVAL_STEPS)
    rows = count_eval_rows(config, 10**9)
    num_evaluations = 1 + len({*range(config.eval_steps, config.max_steps + 1, config.eval_steps), config.max_steps})
    share = num_evaluations * rows * 0.4 / (config.max_steps * config.global_batch_size)
    assert (0.015 if config.max_eval_samples == "auto" else 0.009) < share <= 0.02
    assert config.max_eval_samples == ("auto" if name.startswith("demo") else 6000)


@pytest.mark.parametrize(("typed", "num_rows", "expected"), [("2000", 1000, 1000), ("auto", 1000, 8), ("auto", 5, 5)])
def test_an_evaluation_has_a_few_rows_and_never_more_than_there_are(typed, num_rows, expected):
    config = load(*DATA, "--max_steps", "1", "--eval_steps", "5", "--max_eval_samples", typed)
    assert count_eval_rows(config, num_rows) == expected


# ------------------------------------------------------------------ command lines of all programs

SCRIPTS = sorted(path for path in ROOT.glob("scripts/**/*.py") if "CommandLine(" in path.read_text())
A_PATH = re.compile(r"(^|_)(dir|files?|path|model|config|peers|nanogpt|tasks|tokenizer_name|dataset_name)$")


@pytest.fixture(params=SCRIPTS, ids=lambda path: path.stem)
def parser(request, monkeypatch) -> argparse.ArgumentParser:
    """The parser of each script, which stops before it reads anything."""
    found: list[argparse.ArgumentParser] = []

    def capture(self, *_):
        found.append(self)
        raise SystemExit

    for name in ("parse_args", "parse_with_run_options"):
        monkeypatch.setattr(CommandLine, name, capture)
    run_script(str(request.param.relative_to(ROOT)))
    return found[0]


def test_every_path_of_a_script_may_begin_in_the_home_folder(parser, monkeypatch):
    monkeypatch.setenv("HOME", "/home/jo")
    paths = [option for option in parser._actions if A_PATH.search(option.dest)]
    assert paths
    for option in paths:
        for text in ("~/x", "$HOME/x", "${HOME}/x"):
            assert str(parser._get_value(option, text)) == "/home/jo/x", option.dest


def test_every_list_of_a_script_goes_on_when_it_is_given_twice(parser):
    assert all(isinstance(option, Store) for option in parser._actions if option.nargs == "+")


def test_options_of_a_run_that_expand_the_home_folder_are_paths():
    assert {name for name in OPTIONS if A_PATH.search(name)} <= {*PATHS}


@pytest.mark.parametrize("default", [None, [], ["z"], argparse.SUPPRESS])
def test_a_list_that_is_typed_twice_goes_on_and_replaces_the_default(default):
    parser = CommandLine()
    parser.add_argument("--list", nargs="+", default=default)
    for _ in range(2):
        assert parser.parse_args(["--list", "a", "b", "--list", "c"]).list == ["a", "b", "c"]
    assert vars(parser.parse_args([])) == ({} if default is argparse.SUPPRESS else {"list": default})


@pytest.mark.parametrize("value", ["a b", "-Hello", "it's", "$HOME", ""])
def test_a_printed_command_is_read_as_it_was_meant(value):
    words = shlex.split(shell_command("python", "a.py", value, dataset_dir=value, overwrite=True))
    parser = argparse.ArgumentParser()
    parser.add_argument("--dataset_dir")
    parser.add_argument("--overwrite", action="store_true")
    assert words[:3] == ["python", "a.py", value]
    assert vars(parser.parse_args(words[3:])) == {"dataset_dir": value, "overwrite": True}
