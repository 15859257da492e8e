"""Options: defaults < recipe < command line, and one sentence for each mistake."""

import dataclasses
import json
import re

import pytest
import yaml
from conftest import run_script

from recipe import command_line
from recipe.arguments import OTHER_NAMES
from recipe.command_line import CONFIGS_DIR, load_config
from recipe.config import MISSING, OPTIONS, SECTIONS, VISIBILITY, TrainConfig, may_come_from_hub, save_config
from recipe.errors import UserError
from recipe.evaluation.validation import count_eval_rows
from recipe.hardware.choices import Facts
from recipe.hardware.memory import micro_batch_sizes
from recipe.model.build import build_model_config
from recipe.optim.schedule import plan_schedule
from recipe.run.look import find_folder

SIZES = ("124m", "124m_fast", "355m", "774m", "1558m")
DATA = ["--dataset_dir", "some/folder"]
RECIPES = sorted(path.stem for path in CONFIGS_DIR.glob("*.yaml"))


def load(*argv: object) -> TrainConfig:
    return load_config([*map(str, argv)])[0]


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
    config, name = load_config([*options, "--max_steps", "9"])
    found = config.dataset_dir, config.learning_rate, config.max_steps, config.adam_beta2, name
    assert found == (["from_file"], 1e-3, 9, 0.95, "mine")


def test_own_text_keeps_the_demos_shape_and_batch():
    demo, name = load_config([])
    assert (name, demo.dataset_name) == ("demo", "python_standard_library")
    config, name = load_config(["--train_file", "a.txt", "b.txt"])
    own = {"dataset_name": None, "train_file": ["a.txt", "b.txt"], "max_eval_samples": "auto"}
    assert name == "demo" and config == dataclasses.replace(demo, **own)


def test_own_weights_take_the_recipe_of_fine_tuning():
    own = ["--model_name_or_path", "X", "--train_file", "Y"]
    assert load_config(own) == (load(*own, "--config", "gpt2_finetune"), "gpt2_finetune")


def test_a_saved_config_in_the_current_folder_names_its_run(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    save_config(load(*DATA), tmp_path / "mine" / "training_config.yaml")
    config, name = load_config(["--config", "training_config.yaml"])
    assert name == "mine" and find_folder(config, name).path.name == "mine"


@pytest.mark.parametrize(
    ("argv", "processes", "expected"),
    [
        ("--per_device_train_batch_size 8 --gradient_accumulation_steps 4", 1, (32, [8])),
        ("--per_device_train_batch_size 8 --gradient_accumulation_steps 4", 2, (64, [8])),
        ("--per_device_train_batch_size 4", 2, (8, [4])),
        ("--gradient_accumulation_steps 2", 1, (8, [4])),
        ("--per_device_train_batch_size=2 --gradient_accumulation_steps=4 --global-batch-size=8", 1, (8, [2])),
    ],
)
def test_a_typed_micro_batch_and_accumulation_set_the_global_batch(monkeypatch, argv, processes, expected):
    """As in Trainer; each of them alone only divides the recipe's."""
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    config = load("--config", "demo", *argv.split())
    assert (config.global_batch_size, micro_batch_sizes(config, Facts("cpu", processes))) == expected


def test_config_overrides_are_merged_key_by_key(recipe):
    options = recipe("config_overrides: {n_layer: 12, n_head: 12}\n")
    config = load(*options, *DATA, "--config_overrides", "n_layer=4,resid_pdrop=0.1")
    assert config.config_overrides == {"n_layer": 4, "n_head": 12, "resid_pdrop": 0.1}


FAST = "--config gpt2_124m_fast --dataset_dir d"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--lr_scheduler_type linear", {"lr_scheduler_kwargs": None}),
        ("--max_steps 5", {"max_minutes": None}),
        ("--config demo --model_name_or_path m", {"tokenizer_vocab_size": None}),
        (FAST, {"learning_rate": 2e-3, "weight_decay": 0.15}),
        (f"{FAST} --optim adamw_torch_fused", {"learning_rate": 6e-4, "weight_decay": 0.1}),  # AdamW's, not Muon's
        (f"{FAST} --optim adamw_torch_fused --learning_rate 1e-3", {"learning_rate": 1e-3, "weight_decay": 0.1}),
    ],
)
def test_typed_options_remove_recipe_values_that_no_longer_apply(argv, expected):
    config = load(*argv.split())
    assert {name: getattr(config, name) for name in expected} == expected


def test_a_typed_length_replaces_the_recipes(recipe):
    """Steps or epochs from the same place as a time limit stay its upper bound."""
    steps, epochs, both = "max_steps: 30", "num_train_epochs: 2", "max_steps: 30\nmax_minutes: 3"
    limit, neither = "max_minutes: 3", "seed: 1"
    of_trainer = "max_steps: -1\nnum_train_epochs: 2"
    untyped = {
        steps: (30, None, None),
        epochs: (None, 2, None),
        of_trainer: (None, 2, None),
        both: (30, None, 3),
        limit: (None, None, 3),
    }
    capped = "num_train_epochs: 2\nmax_minutes: 3"
    for argv, length in {
        "": (None, 2, 3),
        "--max_minutes 9": (None, 2, 9),  # epochs that are enough stay enough
        "--max_minutes 9 --num_train_epochs 4": (None, 4, 9),
        "--num_train_epochs 4": (None, 4, None),
        "--max_steps 40": (40, None, None),
    }.items():
        config = load(*recipe(f"dataset_dir: d\n{capped}\n"), *argv.split())
        assert (config.max_steps, config.num_train_epochs, config.max_minutes) == length, argv
    typed = {
        "--max_minutes 9": (None, None, 9),
        "--max_minutes 9 --max_steps 40": (40, None, 9),
        "--num_train_epochs 4": (None, 4, None),
        "--num_train_epochs 4 --max_steps -1": (None, 4, None),
    }
    for content, expected in {**untyped, neither: (19073, None, None)}.items():
        for argv, length in {"": expected, **typed}.items():
            config = load(*recipe(f"dataset_dir: d\n{content}\n"), *argv.split())
            assert (config.max_steps, config.num_train_epochs, config.max_minutes) == length, (content, argv)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("", 715),
        ("--max_steps 6", 715 / 19073),  # a share of the steps: none of 6
        ("--max_steps 40000", 715),
        ("--max_steps 6 --warmup_steps 50", 50),
        ("--num_train_epochs 3", 715 / 19073),
    ],
)
def test_a_shorter_run_has_a_shorter_warm_up(argv, expected):
    """The recipe's warm-up keeps its share of the steps, unless it is typed too."""
    assert load("--config", "gpt2_124m", *DATA, *argv.split()).warmup_steps == pytest.approx(expected)


def test_a_warm_up_in_a_recipe_of_epochs_is_kept(recipe):
    """Its share of the steps is not known."""
    assert load(*recipe("num_train_epochs: 2\nwarmup_steps: 50\n"), *DATA, "--max_steps", "100").warmup_steps == 50


def test_the_block_size_fits_the_model(tmp_path):
    """Unless it is typed; a model with a longer context than the recipe's rows trains on the recipe's."""
    for positions, expected in ((48, 48), (2048, 1024)):
        (tmp_path / "config.json").write_text(json.dumps({"n_positions": positions}))
        assert load("--model_name_or_path", tmp_path, "--train_file", "a.txt").block_size == expected


# ------------------------------------------------------------------ how a value is written


MEANINGS = [  # option, as it is typed, as it stands in a recipe (None: the same), and what the program understands
    # Text keeps its spelling. YAML 1.1 would make a boolean, a number, a date or sixty times a minute of it.
    ("hub_language", "no", None, ["no"]),
    ("hub_language", "no da", "[no, da]", ["no", "da"]),
    ("sample_prompt", "yes", None, "yes"),
    ("run_name", "007", None, "007"),
    ("run_name", "1.10", None, "1.10"),
    ("run_name", "1:30", None, "1:30"),
    ("run_name", "2026-11-25", None, "2026-11-25"),
    ("run_name", "0x10", None, "0x10"),
    ("run_name", "null", "'null'", "null"),
    ("run_name", "a-b", None, "a-b"),
    ("dataset_revision", "1e5", None, "1e5"),
    ("train_file", "1984.txt on", "[1984.txt, on]", ["1984.txt", "on"]),
    ("text_column_name", "y", None, ["y"]),
    # Numbers.
    ("learning_rate", "6e-4", None, 6e-4),
    ("seed", "007", None, 7),
    ("global_batch_size", "1_000", None, 1000),
    ("max_eval_samples", "1_000", None, 1000),
    ("max_eval_samples", "all", None, "all"),
    ("loss_chunks", "8", None, 8),
    ("warmup_steps", "0.1", None, 0.1),
    ("max_steps", "-1", None, 19073),  # Trainer's default: as if it were not there
    ("profile", "25", None, 25),
    # Choices and switches take YAML's and Python's words for true and false.
    ("mixed_precision", "no", None, "no"),
    ("mixed_precision", "off", None, "no"),
    ("mixed_precision", "False", None, "no"),
    ("dynamo_backend", "off", None, "no"),
    ("matmul_precision", "HIGH", None, "high"),
    ("streaming", "on", None, True),
    ("activation_checkpointing", "yes", None, "true"),
    ("activation_checkpointing", "False", None, "false"),
    ("activation_checkpointing", "AUTO", None, "auto"),
    # Lists, dictionaries and paths.
    ("report_to", "none", None, None),
    ("report_to", "none --report_to wandb", "[none, wandb]", ["wandb"]),
    ("report_to", "wandb --report_to none", "[wandb, none]", None),
    ("hub_language", "en --hub_language de", "[en, de]", ["en", "de"]),
    ("train_file", "a.txt --train_file b.txt", "[a.txt, b.txt]", ["a.txt", "b.txt"]),
    ("config_overrides", "n_layer=3", "{n_layer: 3}", {"n_layer": 3}),
    ("config_overrides", '{"n_layer":3}', '\'{"n_layer": 3}\'', {"n_layer": 3}),
    ("config_overrides", "n_layer=3 --config_overrides n_head=2", "n_layer=3,n_head=2", {"n_layer": 3, "n_head": 2}),
    ("config_overrides", "tie_word_embeddings=false", "{tie_word_embeddings: no}", {"tie_word_embeddings": False}),
    ("lr_scheduler_kwargs", "min_lr=1e-5", "{min_lr: 1e-5}", {"min_lr": 1e-5}),
    ("output_dir", "~/runs/a", None, "/home/jo/runs/a"),
    ("output_dir", "$HOME/runs", None, "/home/jo/runs"),
    ("output_dir", "${HOME}", None, "/home/jo"),
    ("output_dir", "a~/$USER", None, "a~/$USER"),
    ("output_dir", "~jo/a", None, "~jo/a"),
    ("train_file", "~/*.txt $HOME/b", "[~/*.txt, $HOME/b]", ["/home/jo/*.txt", "/home/jo/b"]),
    ("eval_tasks", "hellaswag=~/val.jsonl,lambada=$HOME/l.jsonl", None,
     ["hellaswag=/home/jo/val.jsonl,lambada=/home/jo/l.jsonl"]),
    # A value that begins with a dash is never read as an option.
    ("sample_prompt", "-hello", None, "-hello"),
    ("document_separator", "---", None, "---"),
    ("run_name", "-1", None, "-1"),
]  # fmt: skip


@pytest.mark.parametrize(("option", "typed", "yaml_text", "expected"), MEANINGS)
def test_a_value_means_the_same_everywhere(tmp_path, monkeypatch, recipe, option, typed, yaml_text, expected):
    """On the command line, in a recipe, and in the file that a run saves."""
    monkeypatch.setenv("HOME", "/home/jo")
    rest = "tokenizer_vocab_size: 300\n" + "train_file: t.txt\n" * (option != "train_file")
    config = load(*recipe(rest), f"--{option}", *typed.split(" "))
    assert getattr(config, option) == expected
    assert load(*recipe(f"{rest}{option}: {yaml_text or typed}\n")) == config
    save_config(config, tmp_path / "saved.yaml")
    output_dir = ["--output_dir", config.output_dir] if config.output_dir else []
    assert load("--config", tmp_path / "saved.yaml", *output_dir) == config


@pytest.mark.parametrize(
    ("content", "option", "expected"),
    [
        ("output_dir:", "output_dir", None),
        ("config_overrides: null", "config_overrides", None),
        ("max_eval_samples: null", "max_eval_samples", "all"),
        ("report_to: []", "report_to", []),
        ("<<: {seed: 3, run_name: 007}", "seed", 3),
        ("seed: 1\nseed: 2", "seed", 2),  # YAML keeps the last
        ("config_overrides: {a: [0.00001], b: {c: 1.0e+20}}", "config_overrides", {"a": [1e-5], "b": {"c": 1e20}}),
        ("config_overrides: {a: &x [1], b: *x}", "config_overrides", {"a": [1], "b": [1]}),
        ("train_file: [t.txt, --streaming]", "train_file", ["t.txt", "--streaming"]),
        ("sample_prompt: '--x y'", "sample_prompt", "--x y"),
        ("sample_prompt: --", "sample_prompt", "--"),
        ("sample_prompt: |\n  two\n  lines", "sample_prompt", "two\nlines\n"),
    ],
)
def test_what_only_a_recipe_can_say(recipe, content, option, expected):
    text = "" if content.startswith("train_file") else "train_file: t.txt\n"
    config = load(*recipe(f"tokenizer_vocab_size: 300\n{text}{content}\n"))
    assert getattr(config, option) == expected and not config.streaming


@pytest.mark.parametrize(
    ("argv", "option", "expected"),
    [
        ("", "profile", None),
        ("--profile", "profile", 10),
        ("", "activation_checkpointing", "auto"),
        ("--activation_checkpointing", "activation_checkpointing", "true"),
        ("--max-steps 7", "max_steps", 7),
        ("--sample-prompt=--x-y", "sample_prompt", "--x-y"),
        ("--sample_prompt=--streaming", "sample_prompt", "--streaming"),
    ],
)
def test_what_only_a_command_line_can_say(recipe, argv, option, expected):
    """A switch alone, hyphens in names, and values like the names of options."""
    config = load(*recipe("activation_checkpointing: auto\n"), *DATA, *argv.split())
    assert getattr(config, option) == expected and not config.streaming


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--lerning_rate 1", "did you mean --learning_rate?"),
        ("--zzzz", "--help lists all options"),
        ("--seed 1 stray", "unexpected argument 'stray'"),
        ("--config_overrides n_layer=2 n_head=2", "join several values with commas"),
        ("--learning_rate", "expected one argument"),
        ("--run_name --seed 3", "begins with a dash is written --run_name=VALUE"),
        (
            "--resume_from_checkpoint True",
            "names no folder; pass latest (the newest checkpoint in --output_dir)",
        ),
        ("--learning_rate nan", "learning_rate must be greater than 0, got nan"),
        ("--max_steps 0", "max_steps must be at least 1, got 0"),
        ("--adam_beta2 1", "adam_beta2 must be at least 0 and less than 1"),
        ("--mixed_precision bf61", "invalid choice: 'bf61'"),
        ("--output_dir=", "output_dir must not be empty"),
        ("--per_device_train_batch_size 0", "per_device_train_batch_size must be auto or at least 1"),
        ("--max_eval_samples some", "max_eval_samples must be auto or all or at least 1"),
        ('--config_overrides {"n_layer":', "must look like n_layer=4,n_embd=128"),
        ("--config gpt3", "there is no recipe 'gpt3'"),
        ("--config gone.yaml", "there is no recipe file 'gone.yaml'"),
        ("--train_file a.txt", "pass exactly one of"),
        ("--tokenizer_vocab_size 300", "but --dataset_dir has one; pass only one of them"),
        ("--validation_file a.txt", "--validation_file cannot be combined with --dataset_dir"),
        ("--dataloader_num_workers 2 --data_placement ram", "requires --data_placement mmap"),
        ("--push_to_hub", "--push_to_hub requires --hub_model_id"),
        ("--resume_from_checkpoint latest", "requires the --output_dir"),
        ("--max_steps 3 --num_train_epochs 1", "both set the length of the run"),
        ("--warmup_steps 2.5", "warmup_steps must be an integer"),
        ("--lr_scheduler_type cosin", "did you mean cosine?"),
        ("--lr_scheduler_kwargs min_lr_rate=0.1", "warmup_stable_decay takes no min_lr_rate; cosine_with_min_lr does"),
        ("--lr_scheduler_kwargs num_decay_steps=2.5", "a share below 1, got 2.5"),
        ("--lr_scheduler_kwargs num_decay_steps=50", "with max_minutes, num_decay_steps must be a share of the run"),
        ("--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs min_lr=1", "from 0 to learning_rate"),
        ("--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs min_lr_rate=abc", "from 0 to 1"),
        (
            "--max_steps 9 --warmup_steps 8 --lr_scheduler_kwargs num_decay_steps=3",
            "3 decay steps exceed max_steps, 9",
        ),
        ("--expected_loss value=3.2,tolerance=0.1", "expected_loss must have value, tolerance, tokens, dataset"),
        ("--eval_tasks hellaswog", "unknown task 'hellaswog'; did you mean hellaswag?"),
        ("--eval_tasks lambada,lambada", "lambada is given twice"),
        # Names of other programs.
        ("--bf16 maybe", "--bf16: invalid choice: 'maybe'"),
        ("--fp16 --mixed_precision bf16", "fp16 and mixed_precision set the same option; keep only one of them"),
        ("--lr=1", "use --learning_rate"),
        ("--batch-size=3", "use --per_device_train_batch_size"),
        ("--overwrite_output_dir", "pass another --output_dir"),
        ("--eval_only", "evaluate_model.py"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_sentence(argv, expected):
    with pytest.raises(UserError) as caught:
        load(*DATA, *argv.split())
    assert expected in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("- a\n- b", "must contain a mapping of options to values"),
        ("a: " + "[" * 5000, "is not valid YAML"),
        ("lerning_rate: 1", "did you mean learning_rate?"),
        ("config: demo", "unknown key 'config'"),
        (
            "bf16: true\nmixed_precision: fp16",
            "mine.yaml: two lines set mixed_precision; keep only one of them",
        ),
        ("dataset_weights: [a]", "mine.yaml: dataset_weights: invalid float value: 'a'"),
        ("1: 2", "unknown key '1'"),
        ("seed: 1.5", "seed: invalid int value: '1.5'"),
        ("tokenizer_vocab_size: 256", "at least 257"),  # the bytes and the end-of-text token
        ("tf32: sure", "matmul_precision: invalid choice: 'sure'"),
        ("tf32: true\nmatmul_precision: high", "two lines set matmul_precision"),
        ("mixed_precision: int8", "mixed_precision: invalid choice: 'int8'"),
        ("learning_rate: [1]", "must be a single value"),
        ("config_overrides: 3", "config_overrides must look like n_layer=4"),
        ("max_steps: null", "nothing limits the run"),
        (
            "max_steps: 40\nnum_train_epochs: 0.5",
            "mine.yaml: max_steps 40 and num_train_epochs 0.5 both set",
        ),
        ("hub_language: [en, null]", "mine.yaml: hub_language must be a list of single values"),
        ("train_file: [a, ~]", "mine.yaml: train_file must be a list of single values"),
        ("optim: --", "optim: invalid choice: '--'"),
        ("resume_from_checkpoint: true", "--resume_from_checkpoint true names no folder; pass latest"),
    ],
)
def test_a_mistake_in_a_recipe_is_one_sentence(recipe, content, expected):
    with pytest.raises(UserError) as caught:
        load(*recipe(f"{content}\n"), *DATA)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_the_answers_for_options_of_other_programs_name_existing_ones():
    assert not OPTIONS.keys() & OTHER_NAMES
    for answer in OTHER_NAMES.values():
        assert set(re.findall(r"--([a-z_0-9]+)", answer)) <= {*OPTIONS, "cpu", "dynamo_mode"}, answer


def test_help_lists_every_option_once_with_the_defaults_of_the_recipe(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run_script("recipe/train.py", "--config", "gpt2_124m_fast", "--help") in ("", "0")
    shown = capsys.readouterr().out
    text = " ".join(shown.split())
    assert re.search(r"--learning_rate N [^-]*\(default: 0\.002\)", text)
    assert re.search(r"--max_steps N [^-]*\(default: 7820\)", text)
    listed = re.findall(r"^  --(\w+)", shown, re.MULTILINE)
    assert [name for name in listed if name not in ("config", "bf16", "fp16", "tf32")] == list(OPTIONS)
    assert re.findall(r"^(\S.*):$", shown, re.MULTILINE) == ["options", *SECTIONS.values()]


# ------------------------------------------------------------------ the recipes, and what their numbers lead to


@pytest.mark.parametrize(("text", "value"), [("true", "high"), ("false", "highest"), ("off", "highest")])
def test_tf32_is_read_as_the_precision_of_matrix_products(text, value, tmp_path):
    """Recipes and published runs contain it."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"tf32: {text}\ndataset_dir: d\n")
    assert load("--config", recipe).matmul_precision == load("--tf32", text, *DATA).matmul_precision == value
    assert load("--tf32", *DATA).matmul_precision == "high"


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
    """They are the published ones (GPT-3 table 2.1, build-nanogpt): 10 B tokens in 19,073 steps of 524,288."""
    config = load("--config", "gpt2_124m", *DATA)
    assert (config.max_steps, config.warmup_steps, config.tokens_per_step) == (19_073, 715, 524_288)
    assert (config.learning_rate, config.lr_scheduler_type) == (6e-4, "cosine_with_min_lr")
    assert config.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
    assert (config.adam_beta1, config.adam_beta2, config.weight_decay, config.max_grad_norm) == (0.9, 0.95, 0.1, 1.0)
    assert (config.optim, config.attn_implementation) == ("adamw_torch_fused", "sdpa")
    overrides = {"n_layer": 12, "n_head": 12, "n_embd": 768, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    assert config.config_overrides == overrides | {"tie_word_embeddings": True}


def test_the_learning_rates_and_shapes_of_the_other_sizes():
    """Learning rates of GPT-3's table 2.1, shapes of GPT-2."""
    published = {"355m": (3e-4, 24, 16, 1024), "774m": (2.5e-4, 36, 20, 1280), "1558m": (2e-4, 48, 25, 1600)}
    for size, expected in published.items():
        content = yaml.safe_load((CONFIGS_DIR / f"gpt2_{size}.yaml").read_text())
        shape = content["config_overrides"]
        assert (content["learning_rate"], shape["n_layer"], shape["n_head"], shape["n_embd"]) == expected


@pytest.mark.parametrize(("epochs", "rows", "expected"), [(1, 100, 25), (1, 101, 26), (0.001, 100, 1), (2.5, 10, 7)])
def test_a_partial_step_of_the_epochs_counts_as_a_step(epochs, rows, expected):
    config = load(*DATA, "--num_train_epochs", epochs, "--global_batch_size", "4", "--max_minutes", "9")
    schedule = plan_schedule(config, rows)
    assert (schedule.max_steps, schedule.num_examples, schedule.max_minutes) == (expected, 4 * expected, 9)


@pytest.mark.parametrize("name", ["demo --max_steps 1200", *(f"gpt2_{size}" for size in SIZES)])
def test_evaluation_costs_two_percent_by_default(name):
    """All evaluations of a recipe cost at most 2% of its training if an evaluated row costs 0.4 of a trained one.

    The recipes of GPT-2 evaluate the same rows, so that their losses compare; `auto` is for other text.
    """
    config = load("--config", *name.split(), *DATA)
    rows = count_eval_rows(config, 10**9)
    num_evaluations = 1 + len({*range(config.eval_steps, config.max_steps + 1, config.eval_steps), config.max_steps})
    share = num_evaluations * rows * 0.4 / (config.max_steps * config.global_batch_size)
    assert (0.015 if config.max_eval_samples == "auto" else 0.009) < share <= 0.02
    assert config.max_eval_samples == ("auto" if name.startswith("demo") else 6000)


@pytest.mark.parametrize(
    ("typed", "num_rows", "expected"),
    [("all", 1000, 1000), ("7", 1000, 7), ("2000", 1000, 1000), ("auto", 1000, 8), ("auto", 5, 5)],
)
def test_an_evaluation_has_a_few_rows_and_never_more_than_there_are(typed, num_rows, expected):
    assert count_eval_rows(load(*DATA, "--max_steps", "1", "--max_eval_samples", typed), num_rows) == expected


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        ("--bf16", "mixed_precision", "bf16"),
        ("--fp16 true", "mixed_precision", "fp16"),
        ("--bf16=false", "mixed_precision", "no"),
        ("--gradient_checkpointing", "activation_checkpointing", "true"),
        ("--gradient-checkpointing false", "activation_checkpointing", "false"),
    ],
)
def test_names_of_training_arguments(recipe, argv, name, value):
    """They are typed options: a recipe's value does not win. In a recipe, they are options as well."""
    assert getattr(load(*DATA, *argv.split()), name) == value
    key, _, text = argv.lstrip("-").replace("=", " ").partition(" ")
    written = recipe(f"{key.replace('-', '_')}: {text or 'true'}\n")
    assert getattr(load(*written, *DATA), name) == value
    assert getattr(load(*written, *DATA, f"--{name}", "auto"), name) == "auto"


def test_the_consent_to_overwrite_is_given_once(tmp_path):
    """A later `--config training_config.yaml` does not repeat it."""
    save_config(load(*DATA, "--hub_overwrite"), tmp_path / "training_config.yaml")
    assert not load("--config", str(tmp_path / "training_config.yaml")).hub_overwrite


# ------------------------------------------------------------------ recipes from the Hub


HARMLESS = {  # what every published recipe may hold, and what a run understands
    **{"seed": 7, "block_size": 64, "config_overrides": {"n_layer": 3}, "max_steps": 9, "learning_rate": 1.0e-3},
    **{"dataset_name": "jo/corpus", "dataset_split": "train", "tokenizer_name": "jo/tokenizer"},
    "expected_loss": {"value": 3.0, "tolerance": 0.1, "tokens": 100, "dataset": "jo/corpus", "source": "three seeds"},
}


PRIVATE = {
    *("output_dir", "run_name", "cache_dir", "eval_tasks", "resume_from_checkpoint", "report_to", "profile"),
    *("sample_prompt", "push_to_hub", "hub_model_id", "hub_strategy", "hub_overwrite", "hub_private_repo"),
    *("hub_license", "hub_language"),
}


@pytest.fixture
def published(tmp_path, monkeypatch):
    """Publish a recipe, and return the options that use it."""

    def publish(**content: object) -> list[str]:
        (tmp_path / "training_config.yaml").write_text(yaml.safe_dump(content))
        monkeypatch.setattr(command_line, "fetch_recipe", lambda *_: tmp_path / "training_config.yaml")
        return ["--config", "hf://jo/run"]

    return publish


@pytest.mark.parametrize("name", OPTIONS)
def test_a_recipe_from_the_hub_cannot_set_what_is_private(published, name):
    """It is refused by name, whatever its value. Everything else may be set, or left to whoever runs it."""
    assert (name in PRIVATE) == (name not in VISIBILITY)
    if name not in PRIVATE:
        assert may_come_from_hub(name, MISSING)
        return
    value = {"push_to_hub": True, "hub_overwrite": True, "profile": 3}.get(name, "mine/precious")
    hostile = published(**HARMLESS, **{name: value})
    with pytest.raises(UserError, match=rf"hf://jo/run: a recipe from the Hub may set .*, but it sets {name}; read"):
        load(*hostile)


def test_all_that_is_refused_is_named_at_once(published):
    hostile = published(**HARMLESS, push_to_hub=True, hub_model_id="me/precious", train_file="/etc/passwd")
    with pytest.raises(UserError, match="but it sets hub_model_id, push_to_hub, train_file; read"):
        load(*hostile, "--train_file", "a.txt")


@pytest.mark.parametrize(
    ("name", "value", "is_taken"),
    [
        ("train_file", "/etc/passwd", False),
        ("train_file", ["a/b"], False),
        ("train_file", [MISSING], True),
        ("dataset_dir", [MISSING, "runs/data"], False),
        ("dataset_dir", [MISSING, MISSING], True),
        ("dataset_name", "../private", False),
        ("dataset_name", "jo/corpus", True),
        ("dataset_name", "python_standard_library", True),
        ("model_name_or_path", "runs/base/checkpoint-4", False),
        ("model_name_or_path", "here/model", False),  # a folder on this machine
        ("model_name_or_path", "jo/model", True),
        ("tokenizer_name", MISSING, True),
        ("document_separator", "---", False),
        ("validation_file", [MISSING], True),
    ],
)
def test_a_needed_option_is_an_id_of_the_hub_or_missing(tmp_path, monkeypatch, name, value, is_taken):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "model").mkdir(parents=True)
    assert may_come_from_hub(name, value) == is_taken


def test_a_recipe_from_the_hub_is_obeyed_in_what_is_public(published):
    config = load(*published(**HARMLESS))
    assert {name: getattr(config, name) for name in HARMLESS} == HARMLESS
    for missing, option in ((MISSING, "dataset_name"), ([MISSING], "dataset_dir")):
        with pytest.raises(UserError, match=f"had this only locally; pass your own --{option}"):
            load(*published(seed=7, **{option: missing}))
    with pytest.raises(UserError, match="expected_loss must have"):  # the end of a run prints it
        load(*published(**HARMLESS | {"expected_loss": HARMLESS["expected_loss"] | {"source": "\x1b[2J"}}))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train_file: !!set {a, b}", "hf://jo/run: a recipe from the Hub may set .* it sets train_file; read"),
        ("config_overrides: {1: 2}", "hf://jo/run: config_overrides must be a mapping such as n_layer"),
        ('"\\e[2J": 1', "hf://jo/run: unknown key '\\\\x1b"),
        ('config_overrides: {"\\e[2J": 1}\ndataset_name: jo/a\ntokenizer_name: jo/a', None),
        ("seed: [", "hf://jo/run is not valid YAML"),
        ("[1]", "hf://jo/run must contain a mapping"),
    ],
)
def test_a_hostile_file_is_one_sentence_without_escapes(tmp_path, monkeypatch, text, expected):
    (tmp_path / "training_config.yaml").write_text(text)
    monkeypatch.setattr(command_line, "fetch_recipe", lambda *_: tmp_path / "training_config.yaml")
    with pytest.raises(UserError, match=expected or "config_overrides cannot set '\\\\x1b") as refused:
        build_model_config(load("--config", "hf://jo/run"), 10, 0)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("written", "typed", "expected"),
    [
        (None, [], None),
        (False, [], None),  # of a run whose option had this default
        (True, [], True),
        ("typed", [], False),  # of a run of this version
        (True, ["--hub_private_repo", "false"], False),
        (False, ["--hub_private_repo"], True),
    ],
)
def test_a_private_repository_is_yes_no_or_what_its_owner_has_set(tmp_path, written, typed, expected):
    own = ["--hub_private_repo", "false"] if written == "typed" else []
    save_config(load(*DATA, *own), tmp_path / "training_config.yaml")
    content = yaml.safe_load((tmp_path / "training_config.yaml").read_text())
    content |= {"hub_private_repo": written} if isinstance(written, bool) else {}
    (tmp_path / "training_config.yaml").write_text(yaml.safe_dump(content))
    assert load("--config", tmp_path / "training_config.yaml", *typed).hub_private_repo is expected
