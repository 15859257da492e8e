"""Configuration: defaults < recipe file < command line, and one sentence for each mistake."""

import dataclasses
import re
import subprocess
import sys

import pytest
from conftest import ROOT, run_script
from transformers.trainer_utils import SchedulerType

from recipe.arguments import OTHER_NAMES
from recipe.command_line import CONFIGS_DIR, load_config, load_yaml
from recipe.config import SECTIONS, TrainConfig, save_config
from recipe.errors import UserError
from recipe.rules import SCHEDULES

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


def test_the_default_recipe_is_the_demo():
    """Without arguments, the demo trains on a corpus that needs no download."""
    config, recipe = load_config([])
    assert recipe == "demo" and config.dataset_name == "python_standard_library"


def test_a_typed_data_source_replaces_the_recipes():
    """`--train_file` does not conflict with the demo's corpus."""
    config = load("--train_file", "a.txt", "b.txt")
    assert config.train_file == ["a.txt", "b.txt"] and config.dataset_name is None


def test_config_overrides_are_merged_key_by_key(tmp_path):
    """`n_layer=4,n_embd=128` changes those two values and keeps the recipe's others."""
    path = tmp_path / "a.yaml"
    path.write_text("config_overrides: {n_layer: 12, n_head: 12}\n")
    config = load("--config", str(path), *DATA, "--config_overrides", "n_layer=4,resid_pdrop=0.1")
    assert config.config_overrides == {"n_layer": 4, "n_head": 12, "resid_pdrop": 0.1}


def test_a_typed_schedule_drops_the_arguments_of_the_recipes():
    config = load(*DATA, "--lr_scheduler_type", "linear")
    assert config.lr_scheduler_kwargs is None


def test_another_optimizer_drops_what_was_chosen_for_muon():
    """A learning rate and a weight decay beside Muon's do not suit AdamW alone; typed ones stay."""
    fast = ["--config", "gpt2_124m_fast", *DATA]
    assert (load(*fast).learning_rate, load(*fast).weight_decay) == (3e-3, 0.15)
    config = load(*fast, "--optim", "adamw_torch_fused")
    assert (config.learning_rate, config.weight_decay) == (6e-4, 0.1)
    assert load(*fast, "--optim", "adamw_torch_fused", "--learning_rate", "0.001").learning_rate == 0.001


def test_yaml_numbers_and_bare_no(tmp_path):
    """YAML 1.1 reads 6e-4 as a string and `no` as false; a recipe means a number and the word."""
    path = tmp_path / "a.yaml"
    path.write_text("dataset_dir: d\nlearning_rate: 6e-4\nmixed_precision: no\ndynamo_backend: no\nmax_steps: 1e3\n")
    config = load("--config", str(path), "--lr_scheduler_kwargs", "min_lr=1e-5", "--report_to", "none")
    assert config.learning_rate == 6e-4 and config.max_steps == 1000
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
        (["--learning_rate", "fast"], "--learning_rate must be a number, got 'fast'"),
        (["--learning_rate", "nan"], "--learning_rate must be a number, got 'nan'"),
        (["--learning_rate"], "expected one argument"),
        (["--max_steps", "1.5"], "--max_steps must be an integer, got '1.5'"),
        (["--max_steps", "0"], "max_steps must be at least 1, got 0"),
        (["--learning_rate", "0"], "learning_rate must be greater than 0, got 0.0"),
        (["--adam_beta2", "1"], "adam_beta2 must be at least 0 and less than 1"),
        (["--label_smoothing_factor", "-0.1"], "label_smoothing_factor must be"),
        (["--warmup_steps", "2.5"], "warmup_steps must be an integer"),
        (["--mixed_precision", "bf61"], "invalid choice: 'bf61'"),
        (["--dynamo_backend", "inductr"], "invalid choice: 'inductr'"),
        (["--bf16_residual", "maybe"], "--bf16_residual must be true or false, got 'maybe'"),
        (["--resume_from_checkpoint", ""], "resume_from_checkpoint must not be empty"),
        (["--output_dir", ""], "output_dir must not be empty"),
        (["--seed", "4294967296"], "seed must be at least 0 and less than 2147483648"),
        (["--max_steps", "9" * 400], "--max_steps must be an integer"),
        (["--tokenizer_vocab_size", "300"], "but --dataset_dir has one; pass only one of them"),
        (["--validation_file", "a.txt"], "--validation_file cannot be combined with --dataset_dir"),
        (["--validation_split_percentage", "50"], "percentage cannot be combined with --dataset_dir"),
        (["--dataloader_num_workers", "2", "--data_placement", "ram"], "requires --data_placement mmap"),
        (["--lr_scheduler_type", "cosin"], "did you mean cosine?"),
        (["--per_device_train_batch_size", "big"], "per_device_train_batch_size must be auto or at least 1"),
        (["--per_device_train_batch_size", "0"], "per_device_train_batch_size must be auto or at least 1"),
        (["--config_overrides", "n_layer"], "config_overrides must look like n_layer=4,n_embd=128"),
        (["--config", "gpt3"], "there is no recipe 'gpt3'"),
        (["--config", "gone.yaml"], "there is no recipe file gone.yaml"),
        (["--train_file", "a.txt"], "pass exactly one of"),
        (["--push_to_hub"], "--push_to_hub requires --hub_model_id"),
        (
            ["--hub_strategy", "epoch"],
            "--hub_strategy: invalid choice: 'epoch' (choose from",
        ),
        (["--resume_from_checkpoint", "latest"], "requires the --output_dir"),
        (["--eval_only", "--resume_from_checkpoint", "hf://a/b"], "--eval_only evaluates a model on the Hub with"),
        (["--resume_from_checkpoint", "x", "--overwrite"], "pass only one of them"),
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
        ("max_steps: many\n", "bad.yaml: max_steps must be an integer, got 'many'"),
        ("max_steps: 1.5\n", "max_steps must be an integer, got '1.5'"),
        ("max_steps: true\n", "max_steps must be an integer, got 'true'"),
        ("overwrite: sure\n", "overwrite must be true or false, got 'sure'"),
        ("learning_rate: [1]\n", "learning_rate in"),
        ("learning_rate: {a: 1}\n", "must be a single value"),
        ("mixed_precision: int8\n", "mixed_precision: invalid choice: 'int8'"),
        ("config_overrides: 3\n", "config_overrides must look like n_layer=4"),
        ("max_steps:\n", "has no value"),
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
    }.get(name, 2**19)


def test_the_numbers_of_gpt2_124m():
    """They are the published ones (GPT-3 table 2.1, build-nanogpt): 10 B tokens in 19,073 steps of 524,288."""
    config = load("--config", "gpt2_124m", *DATA)
    assert config.global_batch_size * config.block_size == 524_288
    assert (config.max_steps, config.warmup_steps) == (19_073, 715)
    assert (config.learning_rate, config.lr_scheduler_type) == (6e-4, "cosine_with_min_lr")
    assert config.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
    assert (config.adam_beta1, config.adam_beta2, config.weight_decay, config.max_grad_norm) == (0.9, 0.95, 0.1, 1.0)
    assert (config.optim, config.attn_implementation) == ("auto", "sdpa")  # the fused AdamW where it fits
    overrides = config.config_overrides
    assert (overrides["n_layer"], overrides["n_head"], overrides["n_embd"]) == (12, 12, 768)
    assert overrides["resid_pdrop"] == overrides["embd_pdrop"] == overrides["attn_pdrop"] == 0
    assert overrides["tie_word_embeddings"] is True


def test_the_list_of_all_options():
    """Before adding an option to this list, look for one that it can replace."""
    assert [option.name for option in dataclasses.fields(TrainConfig)] == OPTIONS.split()


OPTIONS = """
output_dir overwrite run_name seed
dataset_dir train_file validation_file dataset_name dataset_config_name dataset_split document_separator skip_bad_files
preprocessing_num_workers text_column_name validation_split_percentage tokenizer_name tokenizer_vocab_size cache_dir
streaming shuffle_buffer_size block_size data_placement dataloader_num_workers
model_name_or_path model_type config_overrides pad_vocab_to_multiple_of attn_implementation activation_checkpointing
loss_chunks label_smoothing_factor
global_batch_size per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps
max_steps num_train_epochs max_minutes optim learning_rate muon_learning_rate lr_scheduler_type lr_scheduler_kwargs
warmup_steps weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm
mixed_precision tf32 dynamo_backend dynamo_mode bf16_residual deterministic
logging_steps eval_steps max_eval_samples expected_loss eval_only eval_tasks max_eval_task_seconds
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


def test_the_schedules_are_those_of_transformers():
    """Config keeps its own list because Transformers' module imports torch."""
    assert set(SCHEDULES.split()) == {schedule.value for schedule in SchedulerType} - {
        "reduce_lr_on_plateau",
        "greedy",
    }


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
        ("--bf16", "--mixed_precision bf16"),
        ("--fp16", "--mixed_precision fp16"),
        ("--do_eval", "--eval_steps"),
        ("--do_train", "omit this option"),
        ("--gradient_checkpointing", "--activation_checkpointing"),
        ("--torch_compile", "--dynamo_backend inductor"),
        ("--overwrite_output_dir", "--overwrite"),
        ("--logging_dir=x", "--output_dir"),
        ("--warmup_ratio=0.1", "--warmup_steps"),
        ("--batch-size=3", "--global_batch_size"),
    ],
)
def test_options_of_other_programs_get_an_answer(option, expected):
    with pytest.raises(UserError, match=re.escape(expected)):
        load(option, *DATA)


def test_these_answers_name_existing_options():
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    assert not names & set(OTHER_NAMES)
    for answer in OTHER_NAMES.values():
        assert set(re.findall(r"--([a-z_]+)", answer)) <= names | {"cpu"}, answer


@pytest.mark.parametrize(
    "typed", ['{"min_lr_rate": 0.1}', "min_lr_rate=0.1", "min_lr_rate=1e-1", '  {"min_lr_rate": 1e-1}']
)
def test_dictionary_options_take_json_and_pairs(typed):
    assert load("--lr_scheduler_kwargs", typed, *DATA).lr_scheduler_kwargs == {"min_lr_rate": 0.1}


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
        ([], 50),
        (["--max_steps", "6"], 50 / 1200),  # a share of the steps: none of 6
        (["--max_steps", "2400"], 50),
        (["--max_steps", "6", "--warmup_steps", "50"], 50),
        (["--num_train_epochs", "3"], 50 / 1200),
    ],
)
def test_a_shorter_run_has_a_shorter_warm_up(typed, expected):
    """The recipe's warm-up keeps its share of the steps, unless it is typed too."""
    assert load_config(typed)[0].warmup_steps == pytest.approx(expected)


def test_steps_and_epochs_exclude_each_other():
    with pytest.raises(UserError, match="both set the length of the run"):
        load("--max_steps", "3", "--num_train_epochs", "1", *DATA)
    assert load("--max_steps", "3", "--config", "gpt2_finetune", *DATA).num_train_epochs is None


def test_help_shows_the_defaults_of_the_recipe(capsys, monkeypatch):
    """It includes what else was typed, and lists every option once, under its section."""
    monkeypatch.setenv("COLUMNS", "80")
    assert run_script("recipe/train.py", "--config", "gpt2_355m", "--max_steps", "7", "--help") in ("", "0")
    shown = capsys.readouterr().out
    text = " ".join(shown.split())
    assert re.search(r"--learning_rate N [^-]*\(default: 0\.0003\)", text)
    assert re.search(r"--max_steps N [^-]*\(default: 7\)", text)
    assert re.findall(r"^  --(\w+)", shown, re.MULTILINE) == ["config", *OPTIONS.split()]
    assert re.findall(r"^(\S.*):$", shown, re.MULTILINE) == list(SECTIONS.values())
    assert [line for line in shown.splitlines() if len(line) > 100] == []


# ------------------------------------------------------------------ values of a recipe file


@pytest.mark.parametrize(
    ("text", "option", "expected"),
    [
        ("train_file: [t.txt, --overwrite]", "train_file", ["t.txt", "--overwrite"]),
        ("train_file: -x.txt", "train_file", ["-x.txt"]),
        ("train_file: t.txt\nrun_name: 'null'", "run_name", "null"),
        ("train_file: t.txt\nsample_prompt: '~'", "sample_prompt", "~"),
        ("train_file: t.txt\nsample_prompt: '--x y'", "sample_prompt", "--x y"),
        ("train_file: t.txt\noutput_dir:", "output_dir", None),
        ("train_file: t.txt\nconfig_overrides: null", "config_overrides", None),
        ("train_file: t.txt\nmax_eval_samples: 1e3", "max_eval_samples", 1000),
        ("train_file: t.txt\nmax_eval_samples: null", "max_eval_samples", None),
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
    assert getattr(config, option) == expected and not config.overwrite
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
    other_model = load("--model_name_or_path", "m")
    assert other_model.tokenizer_vocab_size is other_model.expected_loss is None
    assert load("--per-device_train_batch_size", "2").per_device_train_batch_size == 2
