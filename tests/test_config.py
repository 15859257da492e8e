"""Options: defaults < recipe < command line, one sentence for each mistake, and what a run starts from."""

import dataclasses
import json
import math
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from conftest import BLOCK_SIZE, PLAIN, ROOT, TINY, read_events, run_script
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from recipe.arguments import OTHER_NAMES
from recipe.command_line import CONFIGS_DIR, load_config, load_yaml
from recipe.config import SECTIONS, TrainConfig, save_config
from recipe.errors import UserError
from recipe.evaluation.validation import Validation, count_eval_rows
from recipe.hardware.accelerator import choose_dynamo_backend
from recipe.hardware.memory import micro_batch_sizes
from recipe.run.folder import choose_output_dir
from recipe.run.resume import resolve_length

DATA = ["--dataset_dir", "some/folder"]
SCRIPTS = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "scripts").rglob("*.py") if "CommandLine(" in p.read_text())


def load(*argv: str) -> TrainConfig:
    return load_config([*argv])[0]


def test_precedence(tmp_path):
    """The command line overrides the recipe file, which overrides the defaults."""
    path = tmp_path / "mine.yaml"
    path.write_text("dataset_dir: from_file\nlearning_rate: 1.0e-3\nmax_steps: 7\n")
    config, recipe = load_config(["--config", str(path), "--max_steps", "9"])
    assert (config.dataset_dir, config.learning_rate, config.max_steps, config.adam_beta2) == (
        "from_file",
        1e-3,
        9,
        0.95,
    )
    assert recipe == "mine"


def test_own_text_keeps_the_demo():
    """Without arguments, a run needs no download; own text replaces the demo's and keeps its shape and batch."""
    demo, name = load_config([])
    assert (name, demo.dataset_name) == ("demo", "python_standard_library")
    config, name = load_config(["--train_file", "a.txt", "b.txt"])
    assert name == "demo" and config.dataset_name is None
    assert dataclasses.replace(demo, dataset_name=None, train_file=["a.txt", "b.txt"]) == config


def test_own_weights_take_the_recipe_of_fine_tuning():
    """None of the demo's settings."""
    argv = ["--model_name_or_path", "X", "--train_file", "Y", "--learning_rate", "1e-4"]
    config, name = load_config(argv)
    expected = load("--config", "gpt2_finetune", "--train_file", "Y", "--model_name_or_path", "X")
    assert name == "gpt2_finetune" and config == dataclasses.replace(expected, learning_rate=1e-4)


@pytest.mark.parametrize(
    ("argv", "processes", "expected"),
    [
        (["--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "4"], "1", (32, [8])),
        (["--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "4"], "2", (64, [8])),
        (["--per_device_train_batch_size", "4"], "2", (8, [4])),
        (["--gradient_accumulation_steps", "2"], "1", (8, [4])),
        (
            ["--per_device_train_batch_size=2", "--gradient_accumulation_steps=4", "--global-batch-size=8"],
            "1",
            (8, [2]),
        ),
    ],
)
def test_a_typed_micro_batch_and_accumulation_set_the_global_batch(monkeypatch, argv, processes, expected):
    """As in Trainer; each of them alone only divides the recipe's."""
    monkeypatch.setenv("WORLD_SIZE", processes)
    config = load("--config", "demo", *argv)
    assert (config.global_batch_size, micro_batch_sizes(config, int(processes), "cpu")) == expected


def test_a_micro_batch_that_is_too_large_names_the_batch_for_it():
    config = load("--config", "demo", "--per_device_train_batch_size", "16")
    with pytest.raises(UserError, match="use one of 1, 2, 4, 8, or --global_batch_size 16"):
        micro_batch_sizes(config, 1, "cpu")


def test_a_config_in_the_current_folder_names_its_run(tmp_path, monkeypatch):
    """`--config training_config.yaml` has a recipe name, and so a default output folder."""
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    save_config(load(*DATA), tmp_path / "mine" / "training_config.yaml")
    config, name = load_config(["--config", "training_config.yaml"])
    assert name == "mine" and choose_output_dir(config, name).name == "mine"


def test_config_overrides_are_merged_key_by_key(tmp_path):
    """`n_layer=4,n_embd=128` changes those two values and keeps the recipe's others."""
    path = tmp_path / "a.yaml"
    path.write_text("config_overrides: {n_layer: 12, n_head: 12}\n")
    config = load("--config", str(path), *DATA, "--config_overrides", "n_layer=4,resid_pdrop=0.1")
    assert config.config_overrides == {"n_layer": 4, "n_head": 12, "resid_pdrop": 0.1}


def test_a_typed_schedule_drops_the_arguments_of_the_recipes():
    assert load("--lr_scheduler_type", "linear").lr_scheduler_kwargs is None
    assert load("--learning_rate", "1").lr_scheduler_kwargs is not None


def test_another_optimizer_drops_what_was_chosen_for_muon():
    """Muon's learning rate and weight decay do not suit AdamW; typed ones stay."""
    fast = ["--config", "gpt2_124m_fast", *DATA]
    assert (load(*fast).learning_rate, load(*fast).weight_decay) == (2e-3, 0.15)
    config = load(*fast, "--optim", "adamw_torch_fused")
    assert (config.learning_rate, config.weight_decay) == (6e-4, 0.1)
    assert load(*fast, "--optim", "adamw_torch_fused", "--learning_rate", "0.001").learning_rate == 0.001


def test_yaml_numbers_and_bare_no(tmp_path):
    """YAML 1.1 reads 6e-4 as a string and `no` as false; a recipe means a number and the word."""
    path = tmp_path / "a.yaml"
    path.write_text("dataset_dir: d\nlearning_rate: 6e-4\nmixed_precision: no\ndynamo_backend: no\nreport_to: none\n")
    config = load("--config", str(path), "--lr_scheduler_kwargs", "min_lr=1e-5")
    assert config.learning_rate == 6e-4
    assert config.lr_scheduler_kwargs == {"min_lr": 1e-5} and config.report_to is None
    assert (config.mixed_precision, config.dynamo_backend) == ("no", "no")


def test_saved_config_repeats_the_run(tmp_path):
    config = load(
        *DATA, "--learning_rate", "3e-4", "--config_overrides", "n_layer=3", "--per_device_train_batch_size", "8"
    )
    save_config(config, tmp_path / "training_config.yaml")
    assert load("--config", str(tmp_path / "training_config.yaml")) == config
    assert config.per_device_train_batch_size == 8


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--lerning_rate", "1"], "did you mean --learning_rate?"),
        (["--learning-rte=1"], "did you mean --learning_rate?"),
        (["--zzzz"], "--help lists all options"),
        (["stray"], "unexpected argument 'stray'"),
        (["--learning_rate", "fast"], "--learning_rate: invalid float value: 'fast'"),
        (["--learning_rate", "nan"], "learning_rate must be greater than 0, got nan"),
        (["--learning_rate"], "expected one argument"),
        (["--max_steps", "1.5"], "--max_steps: invalid int value: '1.5'"),
        (["--max_steps", "0"], "max_steps must be at least 1, got 0"),
        (["--learning_rate", "0"], "learning_rate must be greater than 0, got 0.0"),
        (["--adam_beta2", "1"], "adam_beta2 must be at least 0 and less than 1"),
        (["--label_smoothing_factor", "-0.1"], "label_smoothing_factor must be"),
        (["--warmup_steps", "2.5"], "warmup_steps must be an integer"),
        (["--mixed_precision", "bf61"], "invalid choice: 'bf61'"),
        (["--dynamo_backend", "inductr"], "invalid choice: 'inductr'"),
        (["--bf16_residual", "maybe"], "bf16_residual"),
        (["--resume_from_checkpoint", ""], "resume_from_checkpoint must not be empty"),
        (["--output_dir", ""], "output_dir must not be empty"),
        (["--seed", "4294967296"], "seed must be at least 0 and less than 2147483648"),
        (["--tokenizer_vocab_size", "300"], "but --dataset_dir has one; pass only one of them"),
        (["--validation_file", "a.txt"], "--validation_file cannot be combined with --dataset_dir"),
        (["--validation_split_percentage", "50"], "percentage cannot be combined with --dataset_dir"),
        (["--dataloader_num_workers", "2", "--data_placement", "ram"], "requires --data_placement mmap"),
        (["--lr_scheduler_type", "cosin"], "did you mean cosine?"),
        (["--per_device_train_batch_size", "big"], "per_device_train_batch_size must be auto or at least 1"),
        (["--per_device_train_batch_size", "0"], "per_device_train_batch_size must be auto or at least 1"),
        (["--config_overrides", "n_layer"], "config_overrides must look like n_layer=4,n_embd=128"),
        (["--config", "gpt3"], "there is no recipe 'gpt3'"),
        (["--config", "gone.yaml"], "there is no recipe file 'gone.yaml'"),
        (["--train_file", "a.txt"], "pass exactly one of"),
        (["--push_to_hub"], "--push_to_hub requires --hub_model_id"),
        (["--eval_tasks", "hellaswog"], "did you mean hellaswag?"),
        (["--lr_scheduler_type", "reduce_lr_on_plateau"], "unknown lr_scheduler_type 'reduce_lr_on_plateau'"),
        (["--lr_scheduler_type", "cosine", "--lr_scheduler_kwargs", "min_lr=1e-4"], "cosine_with_min_lr does"),
        (["--lr_scheduler_kwargs", "min_lr_rate=0.1"], "warmup_stable_decay takes no min_lr_rate; cosine_with_min_lr"),
        (["--lr_scheduler_type", "cosine_with_min_lr", "--lr_scheduler_kwargs", "min_lr_rate=abc"], "from 0 to 1"),
        (
            ["--lr_scheduler_type", "cosine_with_min_lr", "--lr_scheduler_kwargs", "min_lr=1"],
            "from 0 to learning_rate",
        ),
        (["--lr_scheduler_kwargs", "num_stable_steps=3"], "takes no num_stable_steps"),
        (["--lr_scheduler_kwargs", "num_decay_steps=2.5"], "a share below 1, got 2.5"),
        (["--lr_scheduler_kwargs", "num_decay_steps=-3"], "below 1, got -3"),
        (["--lr_scheduler_kwargs", "num_decay_steps=50"], "num_decay_steps must be a share of the run below 1"),
        (
            ["--warmup_steps", "90", "--max_steps", "100", "--lr_scheduler_kwargs", "num_decay_steps=20"],
            "90 warm-up steps and 20 decay steps exceed max_steps, 100",
        ),
        (["--resume_from_checkpoint", "latest"], "requires the --output_dir"),
        (["--preprocessing_num_workers", "0"], "preprocessing_num_workers must be at least 1"),
        (["--expected_loss", "value=3.2,tolerance=0.1"], "expected_loss must have value, tolerance, tokens, dataset"),
        (["--max_eval_samples", "some"], "max_eval_samples must be auto or all or at least 1, got 'some'"),
    ],
)
def test_errors_on_the_command_line(argv, expected):
    """Each mistake raises a UserError of one line, never argparse's usage screen."""
    with pytest.raises(UserError) as caught:
        load(*DATA, *argv)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_the_smallest_vocabulary():
    """A byte-level tokenizer needs 256 bytes and the end-of-text token."""
    with pytest.raises(UserError, match="at least 257"):
        load("--train_file", "a.txt", "--tokenizer_vocab_size", "256")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("- a\n- b\n", "must contain a mapping of options to values"),
        ("", "must contain a mapping of options to values"),
        ("a: [\n", "is not valid YAML"),
        ("lerning_rate: 1\n", "did you mean learning_rate?"),
        ("1: 2\n", "unknown key '1'"),
        ("max_steps: many\n", "'many'"),
        ("seed: many\n", "seed: invalid int value: 'many'"),
        ("seed: 1.5\n", "seed: invalid int value: '1.5'"),
        ("warmup_steps: many\n", "'many'"),
        ("block_size: many\n", "'many'"),
        ("tf32: sure\n", "tf32: Truthy value expected"),
        ("learning_rate: [1]\n", "must be a single value"),
        ("learning_rate: {a: 1}\n", "must be a single value"),
        ("mixed_precision: int8\n", "mixed_precision: invalid choice: 'int8'"),
        ("config_overrides: 3\n", "config_overrides must look like n_layer=4"),
        ("seed:\n", "has no value"),
        ("config: demo\n", "unknown key 'config'"),
        ("a: " + "[" * 5000 + "\n", "is not valid YAML"),
    ],
)
def test_errors_in_a_recipe_file(tmp_path, content, expected):
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        load("--config", str(path), *DATA)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("text", "argv", "expected"),
    [
        ("", [], "auto"),
        ("activation_checkpointing: true\n", [], "true"),
        ("activation_checkpointing: false\n", [], "false"),
        ("activation_checkpointing: auto\n", ["--activation_checkpointing"], "true"),
        ("activation_checkpointing: true\n", ["--activation_checkpointing", "False"], "false"),
        ("activation_checkpointing: 'true'\n", ["--activation_checkpointing", "auto"], "auto"),
    ],
)
def test_the_switch_with_auto(tmp_path, text, argv, expected):
    """It accepts YAML's and Python's booleans and a bare flag, and survives saving."""
    path = tmp_path / "a.yaml"
    path.write_text(f"dataset_dir: d\n{text}")
    config = load("--config", str(path), *argv)
    assert config.activation_checkpointing == expected
    save_config(config, path)
    assert load("--config", str(path)) == config


@pytest.mark.parametrize("name", [p.stem for p in sorted(CONFIGS_DIR.glob("*.yaml"))])
def test_every_recipe_loads(name):
    config = load("--config", name) if name == "demo" else load("--config", name, *DATA)
    assert config.global_batch_size * config.block_size == {
        "demo": 2048,
        "gpt2_finetune": 2**15,
        "gpt2_1558m": 2**20,
        "shakespeare_char": 768,  # nanoGPT's 12 rows of 64
    }.get(name, 2**19)


def test_the_numbers_of_gpt2_124m():
    """They are the published ones (GPT-3 table 2.1, build-nanogpt): 10 B tokens in 19,073 steps of 524,288."""
    config = load("--config", "gpt2_124m", *DATA)
    assert config.global_batch_size * config.block_size == 524_288
    assert (config.max_steps, config.warmup_steps) == (19_073, 715)
    assert (config.learning_rate, config.lr_scheduler_type) == (6e-4, "cosine_with_min_lr")
    assert config.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
    assert (config.adam_beta1, config.adam_beta2, config.weight_decay, config.max_grad_norm) == (0.9, 0.95, 0.1, 1.0)
    assert (config.optim, config.attn_implementation) == ("adamw_torch_fused", "sdpa")
    overrides = config.config_overrides
    assert (overrides["n_layer"], overrides["n_head"], overrides["n_embd"]) == (12, 12, 768)
    assert overrides["resid_pdrop"] == overrides["embd_pdrop"] == overrides["attn_pdrop"] == 0
    assert overrides["tie_word_embeddings"] is True


def test_the_list_of_all_options():
    """Before adding an option to this list, look for one that it can replace."""
    assert [option.name for option in dataclasses.fields(TrainConfig)] == OPTIONS.split()


OPTIONS = """
output_dir run_name seed
dataset_dir train_file validation_file dataset_name dataset_config_name dataset_split document_separator skip_bad_files
preprocessing_num_workers text_column_name validation_split_percentage tokenizer_name tokenizer_vocab_size cache_dir
streaming block_size data_placement dataloader_num_workers
model_name_or_path model_type config_overrides pad_vocab_to_multiple_of attn_implementation activation_checkpointing
loss_chunks label_smoothing_factor
global_batch_size per_device_train_batch_size gradient_accumulation_steps
max_steps num_train_epochs max_minutes optim learning_rate lr_scheduler_type lr_scheduler_kwargs
warmup_steps weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm
mixed_precision tf32 dynamo_backend bf16_residual deterministic
logging_steps eval_steps max_eval_samples expected_loss eval_tasks
save_steps save_total_limit resume_from_checkpoint report_to profile
sample_prompt push_to_hub hub_model_id hub_strategy hub_private_repo hub_license hub_language
"""


def test_size_recipes_are_explicit():
    """A recipe for a model size spells out the options that decide the result."""
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    for size in ("124m", "355m", "774m", "1558m"):
        content = load_yaml(f"gpt2_{size}")
        assert set(content) <= names
        assert {"learning_rate", "max_steps", "warmup_steps", "global_batch_size", "weight_decay"} <= set(content)


@pytest.mark.parametrize(("argv", "expected"), [([], None), (["--profile"], 10), (["--profile", "25"], 25)])
def test_a_bare_profile_flag_means_after_ten_steps(argv, expected):
    """Compilation is over by then. A number sets another step."""
    assert load_config([*argv, "--max_steps", "50"])[0].profile == expected


# ------------------------------------------------------------------ what new users type


def test_options_are_checked_before_torch_is_imported():
    """A mistyped option and --help are answered without torch, whose import takes seconds."""
    code = (
        "import runpy, sys; sys.modules['torch'] = None; "
        "sys.argv = ['recipe/train.py', '--max_step=3', *sys.argv[1:]]; "
        "runpy.run_path('recipe/train.py', run_name='__main__')"
    )
    mistake, shown = (
        subprocess.run([sys.executable, "-c", code, *more], capture_output=True, text=True, check=False, cwd=ROOT)
        for more in ((), ("--help",))
    )
    assert mistake.returncode == 1
    assert re.match("error: .*did you mean --max_steps", mistake.stderr.splitlines()[-1])
    assert shown.returncode == 0 and "--max_steps" in shown.stdout


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--bf16", "--mixed_precision"),
        ("--fp16", "--mixed_precision"),
        ("--do_eval", "--eval_steps"),
        ("--lr=1", "use --learning_rate"),
        ("--gradient_checkpointing", "--activation_checkpointing"),
        ("--torch_compile", "--dynamo_backend"),
        ("--overwrite_output_dir", "--output_dir"),
        ("--eval_only", "evaluate_model.py"),
        ("--logging_dir=x", "--output_dir"),
        ("--warmup_ratio=0.1", "--warmup_steps"),
        ("--batch-size=3", "--per_device_train_batch_size"),
    ],
)
def test_options_of_other_programs_get_an_answer(option, expected):
    with pytest.raises(UserError, match=re.escape(expected)):
        load(option, *DATA)


def test_these_answers_name_existing_options():
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    assert not names & set(OTHER_NAMES)
    for answer in OTHER_NAMES.values():
        assert set(re.findall(r"--([a-z_0-9]+)", answer)) <= names | {"cpu", "dynamo_mode"}, answer


@pytest.mark.parametrize(
    "typed", ['{"min_lr_rate": 0.1}', "min_lr_rate=0.1", "min_lr_rate=1e-1", '  {"min_lr_rate": 1e-1}']
)
def test_dictionary_options_take_json_and_pairs(typed):
    config = load("--config", "gpt2_124m", "--lr_scheduler_kwargs", typed, *DATA)
    assert config.lr_scheduler_kwargs == {"min_lr_rate": 0.1}


def test_an_invalid_dictionary_gets_an_example():
    with pytest.raises(UserError, match="must look like min_lr_rate=0.1"):
        load("--lr_scheduler_kwargs", "0.1", *DATA)
    with pytest.raises(UserError, match="must look like n_layer=4,n_embd=128"):
        load("--config_overrides", '{"n_layer": ', *DATA)
    with pytest.raises(UserError, match="join several values with commas"):
        load("--config_overrides", "n_layer=2", "n_head=2", *DATA)


def test_hyphens_become_underscores_in_names_but_not_in_values():
    config = load("--max-steps", "7", "--run-name=a-b", "--sample_prompt=--x-y z", "--hub_model_id", "-- a-b", *DATA)
    assert (config.max_steps, config.run_name, config.sample_prompt) == (7, "a-b", "--x-y z")
    assert config.hub_model_id == "-- a-b"


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_accepts_hyphens(script, capsys):
    """A script that has --some_name knows --some-name, and suggests a name for a mistyped one."""
    assert run_script(script, "--help") in ("", "0")
    name = next(
        name for name in re.findall(r"--([a-z]+_[a-z_]+)", capsys.readouterr().out) if name != "skip_bad_files"
    )
    typed = [f"--{name.replace('_', '-')}=1", f"--{name}x=1"]
    if "arguments are required: " in (error := run_script(script, *typed)):
        required = error.partition("arguments are required: ")[2].split(", ")
        error = run_script(
            script,
            *typed,
            *(f"{option.split('/')[0]}=1" if option.startswith("--") else "folder" for option in required),
        )
    assert f"unknown option --{name}x; did you mean --{name}?" in error


def test_the_block_size_is_that_of_the_dataset(dataset_dir):
    """A typed block size overrides it."""
    assert load("--dataset_dir", str(dataset_dir)).block_size == 32
    assert load("--config", "gpt2_124m", "--dataset_dir", str(dataset_dir)).block_size == 32
    assert load("--dataset_dir", str(dataset_dir), "--block_size", "64").block_size == 64


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ([], 715),
        (["--max_steps", "6"], 715 / 19073),  # a share of the steps: none of 6
        (["--max_steps", "40000"], 715),
        (["--max_steps", "6", "--warmup_steps", "50"], 50),
        (["--num_train_epochs", "3"], 715 / 19073),
    ],
)
def test_a_shorter_run_has_a_shorter_warm_up(typed, expected):
    """The recipe's warm-up keeps its share of the steps, unless it is typed too."""
    assert load("--config", "gpt2_124m", *DATA, *typed).warmup_steps == pytest.approx(expected)


def test_a_warm_up_in_a_recipe_of_epochs_is_kept(tmp_path):
    """Its share of the steps is not known."""
    (tmp_path / "a.yaml").write_text("dataset_dir: d\nnum_train_epochs: 2\nwarmup_steps: 50\n")
    assert load("--config", str(tmp_path / "a.yaml"), "--max_steps", "100").warmup_steps == 50


def test_steps_and_epochs_exclude_each_other():
    with pytest.raises(UserError, match="both set the length of the run"):
        load("--max_steps", "3", "--num_train_epochs", "1", *DATA)
    assert load("--max_steps", "3", "--config", "gpt2_finetune", *DATA).num_train_epochs is None


def test_help_shows_the_defaults_of_the_recipe(capsys, monkeypatch):
    """It lists every option once, under its section."""
    monkeypatch.setenv("COLUMNS", "80")
    assert run_script("recipe/train.py", "--config", "gpt2_124m_fast", "--help") in ("", "0")
    shown = capsys.readouterr().out
    text = " ".join(shown.split())
    assert re.search(r"--learning_rate N [^-]*\(default: 0\.002\)", text)
    assert re.search(r"--max_steps N [^-]*\(default: 7820\)", text)
    listed = re.findall(r"^  --(\w+)", shown, re.MULTILINE)
    assert [name for name in listed if name not in ("config", "no_tf32")] == OPTIONS.split()
    assert re.findall(r"^(\S.*):$", shown, re.MULTILINE) == ["options", *SECTIONS.values()]
    assert [line for line in shown.splitlines() if len(line) > 100] == []


# ------------------------------------------------------------------ values of a recipe file


@pytest.mark.parametrize(
    ("text", "option", "expected"),
    [
        ("train_file: [t.txt, --streaming]", "train_file", ["t.txt", "--streaming"]),
        ("train_file: -x.txt", "train_file", ["-x.txt"]),
        ("train_file: t.txt\nrun_name: 'null'", "run_name", "null"),
        ("train_file: t.txt\nsample_prompt: '~'", "sample_prompt", "~"),
        ("train_file: t.txt\nsample_prompt: '--x y'", "sample_prompt", "--x y"),
        ("train_file: t.txt\noutput_dir:", "output_dir", None),
        ("train_file: t.txt\nconfig_overrides: null", "config_overrides", None),
        ("train_file: t.txt\nmax_eval_samples: 1000", "max_eval_samples", 1000),
        ("train_file: t.txt\nmax_eval_samples: null", "max_eval_samples", "all"),
        ("train_file: t.txt\nseed: 0x10", "seed", 16),
        ("train_file: t.txt\ntf32: off", "tf32", False),
        ("train_file: t.txt\nmixed_precision: off", "mixed_precision", "no"),
        ("train_file: t.txt\nactivation_checkpointing: yes", "activation_checkpointing", "true"),
        ("train_file: t.txt\nmax_grad_norm: 1.0e20", "max_grad_norm", 1e20),
    ],
)
def test_a_recipe_value_is_never_read_as_an_option_and_survives_saving(tmp_path, text, option, expected):
    """Dashes, nulls, quoted words, numbers and booleans mean what YAML says, also after a round trip."""
    path = tmp_path / "a.yaml"
    path.write_text(f"tokenizer_vocab_size: 300\n{text}\n")
    config = load("--config", str(path))
    assert getattr(config, option) == expected and not config.streaming
    save_config(config, path)
    assert dataclasses.replace(load("--config", str(path)), output_dir=config.output_dir) == config or expected is None


@pytest.mark.parametrize(
    "text", ["report_to: {a: 1}", "report_to: [[wandb]]", "report_to: [null]", "max_steps: null", "train_file: []x"]
)
def test_malformed_recipe_values_are_errors(tmp_path, text):
    (tmp_path / "a.yaml").write_text(f"dataset_dir: d\n{text}\n")
    with pytest.raises(UserError):
        load("--config", str(tmp_path / "a.yaml"))


def test_typed_options_remove_recipe_values_that_no_longer_apply():
    """--max_steps removes the demo's time limit; another model its vocabulary size and its expected loss."""
    assert load("--max_steps", "5").max_minutes is None and load("--max_steps", "5").expected_loss
    other_model = load("--config", "demo", "--model_name_or_path", "m")
    assert other_model.tokenizer_vocab_size is other_model.expected_loss is None
    assert load("--per-device_train_batch_size", "2").per_device_train_batch_size == 2


# ------------------------------------------------------------------ the length of a run and of its evaluations


@pytest.mark.parametrize(("epochs", "rows", "expected"), [(1, 100, 25), (1, 101, 26), (0.001, 100, 1), (2.5, 10, 7)])
def test_a_partial_step_counts_as_a_step(epochs, rows, expected):
    config = load(*DATA, "--num_train_epochs", str(epochs), "--global_batch_size", "4")
    assert resolve_length(config, rows).max_steps == expected


def test_epochs_become_steps(train, dataset, dataset_dir, tmp_path):
    """Half an epoch is rounded up to whole steps, which the folder's config records."""
    options = ["--dataset_dir", dataset_dir, "--output_dir", tmp_path / "run", *TINY, *PLAIN, "--save_steps", "0"]
    output_dir = train(*options, "--num_train_epochs", "0.5", "--global_batch_size", "4", alone=True)
    recorded = json.loads((output_dir / "summary.json").read_text())["step"]
    assert recorded == math.ceil(len(dataset.train) * 0.5 / 4)
    content = yaml.safe_load((output_dir / "training_config.yaml").read_text())
    assert content["max_steps"] == recorded and "num_train_epochs" not in content


def test_a_typed_length_replaces_the_recipes(tmp_path):
    """Steps or epochs from the same place as a time limit stay its upper bound."""
    contents = {"steps": {"max_steps": 30, "warmup_steps": 5}, "epochs": {"num_train_epochs": 2}}
    contents |= {"both": contents["steps"] | {"max_minutes": 3}, "limit": {"max_minutes": 3}, "none": {"seed": 1}}
    found = {}
    for name, content in contents.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"dataset_dir": "DIR", **content}))
        for typed in ("", "--max_minutes 9", "--max_minutes 9 --max_steps 40", "--num_train_epochs 4"):
            config = load("--config", str(path), *typed.split())
            found[name, typed] = (config.max_steps, config.num_train_epochs, config.max_minutes)
    untyped = {"steps": (30, None, None), "epochs": (None, 2, None), "both": (30, None, 3), "limit": (None, None, 3)}
    untyped["none"] = (19073, None, None)
    assert found == {
        **{(name, ""): expected for name, expected in untyped.items()},
        **{(name, "--max_minutes 9"): (None, None, 9) for name in contents},
        **{(name, "--max_minutes 9 --max_steps 40"): (40, None, 9) for name in contents},
        **{(name, "--num_train_epochs 4"): (None, 4, None) for name in contents},
    }
    both = load(*DATA, "--num_train_epochs", "2", "--max_minutes", "9")
    assert resolve_length(both, 800).max_steps == 200 and both.max_minutes == 9


@pytest.mark.parametrize("name", ["demo --max_steps 1200", "gpt2_124m", "gpt2_355m", "gpt2_774m", "gpt2_1558m"])
def test_evaluation_costs_two_percent_by_default(name):
    """All evaluations of a recipe cost at most 2% of its training if an evaluated row costs 0.4 of a trained one."""
    config = load("--config", *name.split(), *DATA)
    rows = count_eval_rows(config, 10**9)
    num_evaluations = 1 + len({*range(config.eval_steps, config.max_steps + 1, config.eval_steps), config.max_steps})
    share = num_evaluations * rows * 0.4 / (config.max_steps * config.global_batch_size)
    assert 0.015 < share <= 0.02


@pytest.mark.parametrize(
    ("typed", "num_rows", "expected"),
    [("all", 1000, 1000), ("7", 1000, 7), ("2000", 1000, 1000), ("auto", 1000, 8), ("auto", 5, 5)],
)
def test_max_eval_samples(typed, num_rows, expected):
    """`auto` evaluates a few rows even in the shortest run, and no option more rows than there are."""
    assert count_eval_rows(load(*DATA, "--max_steps", "1", "--max_eval_samples", typed), num_rows) == expected


def test_a_short_time_limit_does_not_pay_for_compiling():
    """With a limit of time alone, the number of steps is not known."""
    short, long = (load(*DATA, "--max_minutes", minutes) for minutes in ("2", "60"))
    found = [choose_dynamo_backend(config, torch.device("cpu"), math.inf).reason for config in (short, long)]
    assert ["too short to pay for compiling" in reason for reason in found] == [True, False]


# ------------------------------------------------------------------ what may change when a run resumes

RESUME = ["--resume_from_checkpoint", "auto"]


@pytest.fixture(scope="module")
def four_steps(train_shared):
    """A finished run with checkpoints 2 and 4."""
    return train_shared("--save_steps", "2")


@pytest.fixture
def finished(four_steps, tmp_path):
    """A copy of the finished run of four steps, in the folder that `train` uses."""
    return shutil.copytree(four_steps, tmp_path / "run", ignore=shutil.ignore_patterns(".lock"))


def recipe_of(run, **changes):
    """Return the options that resume a run by its own recipe, some values of which have changed."""
    path = run.parent / "recipe.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load((run / "training_config.yaml").read_text()) | changes))
    return [*RESUME, "--config", path, "--output_dir", run]


def test_only_typed_options_change_the_schedule(train, finished):
    """A changed recipe is refused; other data or batches are always refused."""
    recipe_changes = {"learning_rate": (0.002, "0.003 -> 0.002"), "max_steps": (8, "4 -> 8")}
    recipe_changes["max_minutes"] = (9.0, "None -> 9.0")
    for name, (value, expected) in recipe_changes.items():
        with pytest.raises(UserError, match=f"{name} {expected}; type the option on the command line"):
            train(*recipe_of(finished, **{name: value}), alone=True)
    for typed, expected in (("--seed 1", "seed 1337 -> 1"), ("--optim muon", "optim"), ("--weight_decay 0", "decay")):
        with pytest.raises(UserError, match=f"{expected}.*start a new run"):
            train(*RESUME, "--max_steps", "8", *typed.split())
    with pytest.raises(UserError, match="is at step 4 already"):
        train(*RESUME, "--max_steps", "3")
    assert [e["step"] for e in read_events(finished, "train")] == [1, 2, 3, 4]


def test_a_typed_change_keeps_the_past_and_is_recorded(train, finished, capsys):
    """Only the steps after it follow the new schedule, and the folder records what changed."""
    before = [e["loss"] for e in read_events(finished, "train")]
    recipe = recipe_of(finished, learning_rate=0.002, save_steps=4)
    train(*recipe, "--max_steps", "8", "--learning_rate", "0.002", alone=True)
    assert "from step 5, learning_rate is 0.002 instead of 0.003" in capsys.readouterr().out
    events = read_events(finished, "train")
    assert [e["loss"] for e in events[:4]] == before
    assert [e["learning_rate"] for e in events[4:]] == pytest.approx([0.002 * (8 - k) / 6 for k in range(4, 8)])
    (record,) = read_events(finished, "schedule")
    changes = {"learning_rate": [0.003, 0.002], "max_steps": [4, 8]}
    assert record == {"event": "schedule", "step": 4, "changes": changes}
    # The changed run resumes by its own recipe, also from the checkpoint before the change.
    shutil.rmtree(finished / "checkpoint-8")
    train(*recipe_of(finished), alone=True)
    assert read_events(finished, "train")[-1]["step"] == 8


def test_typed_epochs_and_schedules_may_change_what_follows_from_them(train, finished, dataset):
    """Epochs are consent to their number of steps, a schedule to other arguments of it."""
    epochs = 8 / len(dataset.train) * 4
    typed = ["--num_train_epochs", epochs, "--lr_scheduler_type", "cosine_with_min_lr"]
    recipe = recipe_of(finished, lr_scheduler_kwargs=None)
    train(*recipe, *typed, "--lr_scheduler_kwargs", "min_lr_rate=0.5", alone=True)
    (record,) = read_events(finished, "schedule")
    assert record["changes"].keys() == {"max_steps", "lr_scheduler_type", "lr_scheduler_kwargs"}
    assert read_events(finished, "train")[-1]["step"] == 8


def test_a_branch_from_an_earlier_checkpoint_requires_its_own_folder(train, finished, tmp_path):
    """Otherwise checkpoints of the old schedule would count as the run's newest."""
    branch = ["--resume_from_checkpoint", finished / "checkpoint-2", "--max_steps", "3"]
    with pytest.raises(UserError, match=r"\(checkpoint-4\)"):
        train(*branch)
    branched = train(*branch, output_dir=tmp_path / "branch")
    assert [e["step"] for e in read_events(branched, "train")] == [3]


def test_a_change_of_precision_is_reported(train, finished, capsys):
    train(*RESUME, "--max_steps", "5", "--mixed_precision", "bf16")
    assert "the precision changes from no to bf16 at step 4" in capsys.readouterr().out


def test_a_run_interrupted_before_its_first_step_leaves_its_folder_free(train, monkeypatch):
    """The same command starts again, and the log holds nothing of the first try."""
    run = Validation.run

    def interrupted(*args):
        run(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Validation, "run", interrupted)
        train()
    assert [e["step"] for e in read_events(train(), "eval")] == [0, 4]


# ------------------------------------------------------------------ starting from existing weights


def fine_tune(train, source, *arguments, output_dir):
    """Train on an existing model, whose shape may not be overridden; dropout may."""
    overrides = ["--block_size", BLOCK_SIZE, "--config_overrides", "resid_pdrop=0.0"]
    return train("--model_name_or_path", source, *arguments, output_dir=output_dir, shape=overrides)


@pytest.fixture
def base(four_steps, tmp_path):
    """A model to start from: a copy of the finished run."""
    return shutil.copytree(four_steps, tmp_path / "base", ignore=shutil.ignore_patterns("checkpoint-*", ".lock"))


def test_training_starts_from_existing_weights(train, base, tmp_path, dataset):
    """At step 0 the model has the loss of the stock model; the run resumes bit for bit without its source."""
    arguments = ["--save_steps", "2", "--max_eval_samples", "all"]
    tuned = fine_tune(train, base, *arguments, output_dir=tmp_path / "tuned")
    first, last = (e["loss"] for e in read_events(tuned, "eval"))
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    rows = torch.from_numpy(dataset.validation[np.arange(len(dataset.validation))])
    with torch.no_grad():
        logits = model(input_ids=rows[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()
    assert first == pytest.approx(expected, abs=1e-5) and last < first
    config = AutoModelForCausalLM.from_pretrained(tuned).config
    assert (config.n_layer, config.n_embd, config.vocab_size, config.n_positions) == (2, 32, 500, BLOCK_SIZE)
    base.rename(tmp_path / "elsewhere")
    resume = ["--resume_from_checkpoint", tuned / "checkpoint-2"]
    resumed = fine_tune(train, base, *arguments, *resume, output_dir=tmp_path / "resumed")
    assert (resumed / "model.safetensors").read_bytes() == (tuned / "model.safetensors").read_bytes()


def test_models_of_other_trainers(train, base, tmp_path):
    """More rows than the tokenizer has tokens are dropped, and half-precision weights train in fp32."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float16)
    model.resize_token_embeddings(640)
    model.save_pretrained(tmp_path / "other")
    for path in base.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "other")
    tuned = fine_tune(train, tmp_path / "other", "--max_steps", "1", output_dir=tmp_path / "tuned")
    assert AutoModelForCausalLM.from_pretrained(tuned).config.vocab_size == 500
    assert {tensor.dtype for tensor in load_file(tuned / "model.safetensors").values()} == {torch.float32}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config_overrides", "n_layer=3"], "n_layer cannot differ from the model in"),
        (["--block_size", "64"], "has 32 positions, fewer than block_size 64"),
        (["--model_name_or_path", "no/such/folder"], "there is no folder no/such/folder"),
        (["--model_name_or_path", ""], "must not be empty"),
    ],
)
def test_models_that_training_cannot_start_from(train, base, tmp_path, arguments, expected):
    with pytest.raises(UserError, match=expected):
        fine_tune(train, base, *arguments, output_dir=tmp_path / "tuned")


@pytest.mark.parametrize("break_it", ["tokenizer", "weights", "vocabulary"])
def test_incomplete_models_are_refused(train, base, tmp_path, break_it):
    """Transformers would build an empty tokenizer, and initialize missing weights at random."""
    if break_it == "tokenizer":
        for path in base.glob("tokenizer*"):
            path.unlink()
        expected = "there is no tokenizer.json in"
    elif break_it == "weights":
        weights = load_file(base / "model.safetensors")
        del weights["transformer.h.1.mlp.c_fc.weight"]
        save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
        expected = "lacks weights: transformer.h.1.mlp.c_fc.weight"
    else:
        model = AutoModelForCausalLM.from_pretrained(base)
        model.resize_token_embeddings(400)
        model.save_pretrained(base)
        expected = "the tokenizer has 500 tokens, more than the 400 of the model"
    with pytest.raises(UserError, match=expected):
        fine_tune(train, base, output_dir=tmp_path / "tuned")
