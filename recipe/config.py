"""What a run is told: dataclass defaults < recipe YAML < command line, all checked before anything is built.

In: the command line. Out: one frozen `TrainConfig`, or a `UserError` whose message is the whole explanation.
"""

import argparse
import dataclasses
import difflib
import json
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from transformers import HfArgumentParser  # which does not import torch: a mistyped option must not wait for it

from recipe.errors import UserError

# The first option of each section, in the order of `TrainConfig`: the headings of --help.
SECTIONS = {
    "output_dir": "What a run leaves, and where",
    "dataset_dir": "Data: exactly one of dataset_dir, train_file and dataset_name",
    "model_name_or_path": "Model",
    "global_batch_size": "Batch: the recipe fixes the global size, the hardware the size per device",
    "max_steps": "Optimizer and schedule",
    "mixed_precision": "Precision and compilation; auto: the launcher's, else what is fastest",
    "logging_steps": "Logging, evaluation, checkpoints",
    "sample_prompt": "At the end",
}
CONFIGS_DIR = Path(__file__).parent / "configs"
STANDARD_LIBRARY = "python_standard_library"  # the dataset_name that needs no download: the demo's corpus
PROFILED_STEPS = 3
PROFILE_AFTER_STEPS = 10  # what --profile alone means: past compiling, and the allocator has seen every size
DATA_SOURCES = ("dataset_dir", "train_file", "dataset_name")
TEXT_OPTIONS = (  # how text is read: for train_file and dataset_name
    "validation_file",
    "dataset_config_name",
    "dataset_split",
    "text_column_name",
    "document_separator",
    "validation_split_percentage",
    "skip_bad_files",
)
# transformers.SchedulerType, whose module imports torch; a test keeps the two equal.
SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "reduce_lr_on_plateau",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
    "greedy",
)
RETIRED = ("keep_freed_memory",)  # in the training_config.yaml of older runs, without effect on their numbers
SCHEDULE_OPTIONS = ("max_steps", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")
# Names of TrainingArguments, run_clm.py and nanoGPT that mean something else here, or nothing.
OTHER_NAMES = {
    "bf16": "here it is --mixed_precision bf16 (the default on hardware that has it)",
    "fp16": "here it is --mixed_precision fp16 (the default on a GPU without bf16)",
    "dtype": "here it is --mixed_precision",
    "do_train": "a run always trains; leave it out",
    "do_eval": "a run always evaluates (--eval_steps, --max_eval_samples); --eval_only does nothing else",
    "do_predict": "use --eval_only, or scripts/generate_text.py",
    "eval_strategy": "use --eval_steps N; 0 evaluates only at the start and the end",
    "evaluation_strategy": "use --eval_steps N; 0 evaluates only at the start and the end",
    "eval_interval": "here it is --eval_steps",
    "eval_iters": "here it is --max_eval_samples, in rows",
    "save_strategy": "use --save_steps N; 0 saves no checkpoints",
    "gradient_checkpointing": "here it is --activation_checkpointing, as in Transformers since 5.17",
    "torch_compile": "here it is --dynamo_backend inductor",
    "torch_compile_backend": "here it is --dynamo_backend",
    "torch_compile_mode": "here it is --dynamo_mode",
    "compile": "here it is --dynamo_backend inductor",
    "overwrite_output_dir": "here it is --overwrite",
    "logging_dir": "TensorBoard's files go into --output_dir",
    "log_interval": "here it is --logging_steps",
    "warmup_ratio": "here it is --warmup_steps with a number below 1, as in Transformers 5",
    "num_epochs": "here it is --num_train_epochs",
    "max_iters": "here it is --max_steps",
    "max_train_samples": "use --max_steps or --num_train_epochs",
    "max_seq_length": "here it is --block_size",
    "batch_size": "use --global_batch_size (per step) or --per_device_train_batch_size (per forward)",
    "train_batch_size": "use --global_batch_size (per step) or --per_device_train_batch_size (per forward)",
    "lr": "here it is --learning_rate",
    "min_lr": "use --lr_scheduler_kwargs min_lr_rate=0.1",
    "model": "here it is --model_name_or_path",
    "init_from": "here it is --model_name_or_path, or --resume_from_checkpoint",
    "config_name": "here it is --config_overrides, or --model_name_or_path",
    "dropout": "use --config_overrides resid_pdrop=0.1,embd_pdrop=0.1,attn_pdrop=0.1",
    "no_cuda": "use accelerate launch --cpu",
    "use_cpu": "use accelerate launch --cpu",
    "device": "the launcher chooses the device: accelerate launch --cpu, or CUDA_VISIBLE_DEVICES",
    "fsdp": "GPT-2's sizes fit on one device; several devices use DistributedDataParallel",
    "deepspeed": "GPT-2's sizes fit on one device; several devices use DistributedDataParallel",
    "hub_token": "log in with `hf auth login`, or set HF_TOKEN; a token never belongs on a command line",
    "hub_strategy": "the final model is uploaded once, with --push_to_hub",
    "load_best_model_at_end": "the final model is the last one; every checkpoint-N can be loaded by itself",
}

T = TypeVar("T")


def _field(default: Any, text: str, **kwargs) -> Any:
    return field(default=default, metadata={"help": text, **kwargs})


@dataclass(frozen=True)
class TrainConfig:
    """One training run. Names are Hugging Face's (`TrainingArguments` 5.x, `run_clm.py`) wherever it has one."""

    # --- what a run leaves, and where
    output_dir: str | None = _field(None, "Folder of the run. Default: the first free runs/NAME, runs/NAME-2, ...")
    overwrite: bool = _field(False, "Remove another run's checkpoints and results from output_dir first.")
    run_name: str | None = _field(None, "Name in trackers, in the default output_dir and in the model card.")
    seed: int = _field(1337, "Seeds the initial weights and the order of the training rows.")

    # --- data: exactly one of dataset_dir, train_file and dataset_name
    dataset_dir: str | None = _field(None, "Packed dataset, as written by scripts/prepare_data.py.")
    train_file: list[str] | None = _field(
        None,
        "Text to prepare first: .txt, .jsonl, .json, .csv or .parquet files (or .gz, .zst of them), folders, globs.",
    )
    validation_file: list[str] | None = _field(None, "Validation text. Default: a share of the training documents.")
    dataset_name: str | None = _field(
        None, f"Hub id or local folder of a dataset to prepare first, or '{STANDARD_LIBRARY}'."
    )
    dataset_config_name: str | None = _field(None, "Configuration of dataset_name.")
    dataset_split: str = _field("train", "Split of dataset_name to take the documents from.")
    document_separator: str | None = _field(
        None, r"Cuts .txt files into documents, e.g. '\n\n' for blank lines. Default: a file is a document."
    )
    skip_bad_files: bool = _field(False, "Count files that cannot be read instead of stopping at the first.")
    preprocessing_num_workers: int | None = _field(None, "Threads that encode text. Default: all cores.")
    text_column_name: str = _field("text", "Column that holds the text (jsonl, parquet, dataset_name).")
    validation_split_percentage: float = _field(5.0, "Percent of documents held out where no validation is given.")
    tokenizer_name: str | None = _field(None, "Tokenizer folder or Hub id. Default: train one on the training text.")
    tokenizer_vocab_size: int | None = _field(None, "Size of the byte-level BPE to train without tokenizer_name.")
    cache_dir: str = _field("runs/data", "Where train_file and dataset_name are prepared, once for all runs.")
    streaming: bool = _field(False, "Tokenize and pack train_file or dataset_name during the run; nothing is stored.")
    shuffle_buffer_size: int = _field(10_000, "Rows among which a streamed text is shuffled.")
    block_size: int = _field(1024, "Tokens in a row. A packed dataset brings its own.")
    data_placement: Literal["mmap", "ram", "device", "python_lists"] = _field(
        "mmap", "Where the packed rows are read from; python_lists: row by row, to see what that costs."
    )
    dataloader_num_workers: int = _field(0, "Processes that build batches; 0 builds them in the training process.")

    # --- model
    model_name_or_path: str | None = _field(
        None, "Start from these weights, with their shape and tokenizer: a folder or Hub id of any GPT-2 model."
    )
    model_type: Literal["gpt2"] = _field("gpt2", "Transformers model type.")
    config_overrides: dict | str | None = _field(
        None, "Values for the model's own config: a mapping in YAML, n_layer=4,n_embd=128 on the command line."
    )
    pad_vocab_to_multiple_of: int = _field(128, "Pad the embedding matrix for fast matmuls; never exported.")
    attn_implementation: Literal["auto", "sdpa", "sdpa_with_mask", "eager"] = _field(
        "auto",
        "sdpa takes the flash kernels, without a mask; sdpa_with_mask is Transformers' own; eager: plain matmuls.",
    )
    bf16_residual: Literal["auto", "true", "false"] = _field(
        "auto", "Keep the residual stream in bf16 too; needs bf16 mixed precision. auto: on CUDA."
    )
    sigmoid_gelu: Literal["auto", "true", "false"] = _field(
        "auto", "Compute gelu_new as x * sigmoid(2u), which equals 0.5x * (1 + tanh(u)). auto: with inductor on CUDA."
    )
    index_mask: Literal["auto", "true", "false"] = _field(
        "auto",
        "Keep the vocabulary's padding out of the loss by its index; else add a bias. auto: with inductor on CUDA.",
    )
    activation_checkpointing: bool = _field(False, "Recompute activations in backward: less memory, more time.")
    loss_chunks: int = _field(1, "Compute the loss in this many pieces: less memory, more time.")
    loss_in_graph: bool = _field(True, "Compile model and loss as one; else the model returns logits.")
    label_smoothing_factor: float = _field(0.0, "Share of probability spread over all real tokens.")

    # --- batch: the recipe fixes the global one, the hardware the one per device
    global_batch_size: int = _field(512, "Sequences per optimizer step over all devices.")
    per_device_train_batch_size: int | str | None = _field(
        "auto", "Sequences per forward on one device (the micro-batch), or auto: the largest that fits."
    )
    per_device_eval_batch_size: int | None = _field(
        None, "Sequences per forward in evaluation. Default: 2,048 tokens on a CPU, the micro-batch on a GPU."
    )
    gradient_accumulation_steps: int | None = _field(None, "Derived from the batch sizes; if given, it must agree.")

    # --- optimizer and schedule
    max_steps: int = _field(19073, "Optimizer steps of the whole run.")
    num_train_epochs: float | None = _field(None, "Passes over the training rows, in place of max_steps.")
    max_minutes: float | None = _field(
        None, "Shorten max_steps, by the speed of the first steps, so that the whole run ends within this time."
    )
    change_schedule: bool = _field(
        False, "Let a resumed run continue with another max_steps, learning_rate, schedule or warm-up."
    )
    optim: Literal["adamw_torch_fused", "adamw_torch"] = _field("adamw_torch_fused", "Optimizer.")
    learning_rate: float = _field(6e-4, "Peak learning rate.")
    lr_scheduler_type: str = _field("cosine_with_min_lr", "Any of Transformers' schedules.")
    lr_scheduler_kwargs: dict | str | None = _field(None, "Its own arguments, as min_lr_rate=0.1 or as JSON.")
    warmup_steps: float = _field(715, "Linear warm-up steps; below 1 it is a share of max_steps.")
    weight_decay: float = _field(0.1, "On matrices and embeddings only.")
    adam_beta1: float = _field(0.9, "AdamW beta1.")
    adam_beta2: float = _field(0.95, "AdamW beta2.")
    adam_epsilon: float = _field(1e-8, "AdamW epsilon.")
    max_grad_norm: float = _field(1.0, "Clip the global gradient norm here; 0 does not clip.")
    max_bad_steps: int = _field(10, "Stop after so many steps in a row whose loss or gradients are not finite.")
    spike_sigmas: float | None = _field(
        None, "Leave out steps whose loss or gradient norm is so many standard deviations above the last 128."
    )

    # --- precision and compile: auto takes the best the hardware really has, unless the launcher has decided
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = _field("auto", "Autocast type.")
    tf32: bool = _field(True, "TF32 for the CUDA matmuls that stay in fp32.")
    dynamo_backend: Literal["auto", "no", "inductor", "aot_eager", "eager"] = _field("auto", "Torch dynamo backend.")
    dynamo_mode: Literal["default", "max-autotune-no-cudagraphs"] = _field("default", "How long inductor tunes.")
    deterministic: bool = _field(False, "Use only algorithms that repeat bit for bit; slower. A CPU always does.")
    huge_pages: bool = _field(True, "CPU: put large tensors in huge pages, which takes Linux less time.")
    gpu_memory_limit_gb: float | None = _field(None, "Use no more of the GPU's memory than this (in 1e9 bytes).")

    # --- periodic
    logging_steps: int = _field(10, "Steps between log lines; the only steps on which the host waits for the device.")
    eval_on_start: bool = _field(True, "Evaluate before the first step, to compare with.")
    eval_steps: int = _field(250, "Steps between evaluations; 0: only the first and the last.")
    max_eval_samples: int | str | None = _field(
        "auto", "Validation rows in an evaluation: a number, all, or auto: about 2% of the run for all evaluations."
    )
    exact_final_eval: bool = _field(False, "Use all validation rows in the last evaluation.")
    eval_only: bool = _field(
        False, "Evaluate model_name_or_path, or a checkpoint, on all validation rows; no training."
    )
    save_steps: int = _field(1000, "Steps between checkpoints; 0: none.")
    save_total_limit: int | None = _field(None, "Keep this many checkpoints, the newest. Default: all.")
    on_save_failure: Literal["continue", "stop"] = _field("continue", "When a checkpoint cannot be written: train on?")
    resume_from_checkpoint: str | None = _field(
        None,
        "A checkpoint folder; latest: the newest valid one in output_dir; auto: latest, else a new run.",
    )
    report_to: list[str] | None = _field(None, "Trackers of Accelerate: trackio, tensorboard, wandb, ...")
    project: str = _field("gpt2-recipe", "The project that trackers file the run under.")
    profile: int | None = _field(None, "Show where the time of 3 steps goes, after this many (--profile alone: 10).")

    # --- at the end
    sample_prompt: str = _field("The", "Prompt of the sample printed at the end.")
    push_to_hub: bool = _field(False, "Upload the final model to the Hub.")
    hub_model_id: str | None = _field(None, "user/name of the model repository on the Hub.")
    hub_private_repo: bool = _field(False, "Create the Hub repository as private.")

    def __post_init__(self):
        _check_values(self)


def load_config(argv: list[str] | None = None) -> tuple[TrainConfig, str]:
    """Parse the command line; `--config NAME|FILE.yaml` (default: demo) sets the defaults under it.

    Returns the config and the name of the recipe it came from. Raises `UserError`. `--help` ends the process.
    """
    parser = _Parser(TrainConfig, prog="recipe/train.py", allow_abbrev=False, add_help=False)
    parser.add_argument("--config", default="demo")
    parser.add_argument("-h", "--help", action="store_true")
    profile = next(action for action in parser._actions if action.dest == "profile")
    profile.nargs, profile.const = "?", PROFILE_AFTER_STEPS
    for action in parser._actions:
        if action.choices and "true" in action.choices:  # written as a flag, or as Python and YAML spell booleans
            action.nargs, action.const, action.type = "?", "true", str.lower
        action.default = argparse.SUPPRESS  # what is left is what was typed
    argv = sys.argv[1:] if argv is None else argv
    given, unknown = parser.parse_known_args(underscored(argv, parser._option_string_actions))
    given = vars(given)
    recipe, wants_help = given.pop("config", "demo"), given.pop("help", False)
    names = [f.name for f in dataclasses.fields(TrainConfig)]
    if unknown and not wants_help:
        raise UserError(unknown_option(unknown[0], [*names, "config"]))
    values = _merge(recipe, load_yaml(recipe), given, names)
    if wants_help:
        print(_help(recipe, values))
        sys.exit(0)
    path = Path(recipe)  # a run's own training_config.yaml stands for that run
    return TrainConfig(**values), path.parent.name if path.name == "training_config.yaml" else path.stem


def _merge(recipe: str, from_file: dict[str, Any], given: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The recipe's options with those that were typed on top, each of its own type."""
    from_file = {key: value for key, value in from_file.items() if key not in RETIRED}
    for key in from_file:
        if key not in names:
            raise UserError(_unknown_message(f"key '{key}' in {recipe}", str(key), names))
    if any(source in given for source in DATA_SOURCES):  # a source that was typed replaces the recipe's own
        from_file = {key: value for key, value in from_file.items() if key not in DATA_SOURCES + TEXT_OPTIONS}
    if "lr_scheduler_type" in given:  # arguments of the recipe's schedule would not fit another
        from_file.pop("lr_scheduler_kwargs", None)
    hints = get_type_hints(TrainConfig)
    values = {key: _convert(key, value, hints[key]) for key, value in from_file.items()}
    if {"max_steps", "num_train_epochs"} & set(given):  # the length of the run is the user's
        steps, warmup = (values.get(key, getattr(TrainConfig, key)) for key in ("max_steps", "warmup_steps"))
        values = {k: v for k, v in values.items() if k not in ("max_steps", "num_train_epochs", "max_minutes")}
        longer = "max_steps" in given and _convert("max_steps", given["max_steps"], int) >= steps
        if 1 <= warmup < steps and not longer:  # the warm-up keeps its share of a shorter run
            values["warmup_steps"] = warmup / steps
    if "model_name_or_path" in given:  # its shape replaces the recipe's, but for dropout
        overrides = values.get("config_overrides") or {}
        values["config_overrides"] = {key: value for key, value in overrides.items() if key.endswith("_pdrop")} or None
        if "dataset_dir" not in given and "tokenizer_name" not in given:
            values.pop("tokenizer_vocab_size", None)
    for key, value in given.items():
        converted = _convert(key, value, hints[key])
        # One size of the model may be changed without repeating the others.
        values[key] = {**(values.get(key) or {}), **converted} if key == "config_overrides" else converted
    if "max_steps" in values and values.get("num_train_epochs") is not None:
        raise UserError("max_steps and num_train_epochs both say how long the run is: pass one of them")
    if "block_size" not in given and "dataset_dir" in given:
        values["block_size"] = _number_in(Path(values["dataset_dir"]) / "metadata.json", "block_size", values)
    elif "block_size" not in given and "model_name_or_path" in given:
        length = _number_in(Path(values["model_name_or_path"]) / "config.json", "n_positions", values)
        values["block_size"] = min(length, values.get("block_size", TrainConfig.block_size))
    return values


def _number_in(path: Path, key: str, values: dict[str, Any]) -> int:
    """A number in a JSON file; the present block size if it cannot be read, which opening the folder will explain."""
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))[key])
    except (OSError, ValueError, KeyError, TypeError):
        return values.get("block_size", TrainConfig.block_size)


def underscored(argv: list[str], known: Container[str]) -> list[str]:
    """`--max-steps 5` -> `--max_steps 5`, for the names that are known; everything else, and so values, stays."""
    found = []
    for text in argv:
        name, equals, value = text.partition("=")
        replaced = "--" + name.removeprefix("--").replace("-", "_")
        found.append(replaced + equals + value if name.startswith("--") and replaced in known else text)
    return found


def _help(recipe: str, values: dict[str, Any]) -> str:
    """All options by section, with the defaults that apply under this recipe."""
    width = min(shutil.get_terminal_size().columns, 100)
    wrap = textwrap.TextWrapper(width, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)
    lines = [
        "usage: accelerate launch recipe/train.py [--config NAME|FILE] [--OPTION VALUE]",
        "",
        "  --config NAME|FILE.yaml",
        *wrap.wrap(
            f"Recipe: {', '.join(sorted(p.stem for p in CONFIGS_DIR.glob('*.yaml')))}, or a YAML file (default: demo)."
            f" The defaults below are those of {recipe}."
        ),
    ]
    hints = get_type_hints(TrainConfig)
    for option in dataclasses.fields(TrainConfig):
        if option.name in SECTIONS:
            lines += ["", f"{SECTIONS[option.name]}:"]
        kinds = [kind for kind in _kinds(hints[option.name]) if kind not in (type(None), dict)]
        if get_origin(kinds[0]) is Literal:
            value = "{" + ",".join(map(str, get_args(kinds[0]))) + "}"
        else:
            value = "|".join("TEXT" if kind is str else "N" if kind in (int, float) else "" for kind in kinds)
            value = "TEXT [TEXT ...]" if get_origin(kinds[0]) is list else value
        lines.append(f"  --{option.name} {'[true|false]' if kinds == [bool] else value}")
        default = values.get(option.name, option.default)
        if isinstance(default, dict):
            default = ",".join(f"{key}={item}" for key, item in default.items())
        shown = "" if default is None else f" (default: {str(default).lower() if kinds == [bool] else default})"
        text = option.metadata["help"] if default is None else re.sub(r" Default: .*", "", option.metadata["help"])
        lines += wrap.wrap(text + shown)
    return "\n".join(lines)


def load_yaml(recipe: str) -> dict[str, Any]:
    """Read a recipe by name (`gpt2_124m`) or path. Raises `UserError` if it is not there or not a mapping."""
    path = Path(recipe) if recipe.lower().endswith((".yaml", ".yml")) else CONFIGS_DIR / f"{recipe}.yaml"
    if not path.is_file() and recipe.lower().endswith((".yaml", ".yml")):
        raise UserError(f"there is no recipe file {recipe}")
    if not path.is_file():
        known = sorted(p.stem for p in CONFIGS_DIR.glob("*.yaml"))
        raise UserError(f"no recipe '{recipe}': pass a .yaml file or one of {', '.join(known)}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        kind = "empty" if content is None else f"a {type(content).__name__}"
        raise UserError(f"{path} must hold a mapping of options to values, and is {kind}")
    return content


def save_config(config: TrainConfig, path: Path) -> None:
    """Write the resolved config so that `--config PATH` repeats the run, in this folder or another."""
    values = {key: value for key, value in dataclasses.asdict(config).items() if value is not None}
    for key in ("output_dir", "overwrite", "resume_from_checkpoint", "change_schedule"):
        values.pop(key, None)
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")


class _Parser(HfArgumentParser):
    def error(self, message):
        raise UserError(message.replace("argument ", "", 1))


class CommandLine(argparse.ArgumentParser):
    """The parser of a script: a mistake is a `UserError` that offers the nearest name; names are typed in full."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_args(self, args=None, namespace=None):
        args = underscored(sys.argv[1:] if args is None else args, self._option_string_actions)
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            raise UserError(unknown_option(unknown[0], [action.dest for action in self._actions]))
        return found

    error = _Parser.error


def unknown_option(option: str, names: list[str]) -> str:
    """The message for an option that does not exist."""
    if not option.startswith("-"):
        hint = "; several values of one option are joined by commas: n_layer=2,n_head=2" if "=" in option else ""
        hint = hint or "; text is given by --train_file, a recipe by --config"
        return f"there is no option before '{option}'{hint}"
    name = option.lstrip("-").split("=")[0]
    if name in OTHER_NAMES and "config_overrides" in names:
        return f"unknown option --{name}; {OTHER_NAMES[name]}"
    return _unknown_message(f"option --{name}", name, names, "--")


def _unknown_message(what: str, key: str, names: list[str], prefix: str = "") -> str:
    nearest = difflib.get_close_matches(key.replace("-", "_").removeprefix("no_"), names, n=1, cutoff=0.5)
    hint = f"did you mean {prefix}{nearest[0]}?" if nearest else "--help lists all options"
    return f"unknown {what}; {hint}"


def _convert(key: str, value: Any, hint: Any) -> Any:
    """Bring a YAML or command-line value to the field's type, or raise `UserError`.

    YAML 1.1 reads `6e-4` as a string, so strings that are numbers are taken as numbers.
    """
    options = _kinds(hint)
    if value == "" and dict not in options:
        raise UserError(f"{key} must not be empty; leave it out for its default")
    if value is None and type(None) in options:
        return None
    if dict in options:
        return parse_mapping(key, value)
    for option in options:
        if get_origin(option) is Literal and value is False and "no" in get_args(option):
            return "no"  # YAML 1.1 reads a bare `no` as false
        if get_origin(option) is Literal and isinstance(value, bool) and str(value).lower() in get_args(option):
            return str(value).lower()
        if get_origin(option) is Literal and value in get_args(option):
            return value
        if get_origin(option) is list and isinstance(value, (list, str)):
            items = [value] if isinstance(value, str) else value
            if items and all(isinstance(item, str) and item for item in items):
                return items
        if option is bool and isinstance(value, bool):
            return value
        if option in (int, float) and not isinstance(value, bool) and isinstance(value, (int, float, str)):
            number = _number(value)
            if number is None:
                continue
            if option is float:
                return number
            if number == int(number):
                return int(value) if isinstance(value, int) else int(number)
        if option is str and isinstance(value, str):
            return value
        if option is str and value is False:
            return "no"
    names = []
    for option in options:
        if option is not type(None):
            names.append(
                " or ".join(map(str, get_args(option)))
                if get_origin(option) is Literal
                else {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}.get(
                    option, "a list of strings"
                )
            )
    raise UserError(f"{key} must be {' or '.join(names)}, got {value!r}")


def _kinds(hint: Any) -> tuple:
    """The types that a field may have."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def parse_mapping(key: str, value: Any) -> dict[str, Any]:
    """`{n_layer: 4}`, JSON or `'n_layer=4,n_embd=128'` -> dict; values are YAML scalars, and `1e-5` is a number."""
    example = "n_layer=4,n_embd=128" if key == "config_overrides" else "min_lr_rate=0.1"
    expected = f"{key} must look like {example}, or be a JSON object, got {value!r}"
    if isinstance(value, str):
        pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
        try:
            if value.lstrip().startswith("{"):
                value = json.loads(value)
            elif all(name.strip() and equals for name, equals, _ in pairs):
                value = {name.strip(): yaml.safe_load(text) for name, _, text in pairs}
        except (ValueError, RecursionError, yaml.YAMLError) as error:
            raise UserError(expected) from error
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise UserError(expected)
    numbers = {name: _number(item) for name, item in value.items() if isinstance(item, str)}
    return {name: item if numbers.get(name) is None else numbers[name] for name, item in value.items()}


def _check_values(config: TrainConfig) -> None:
    """Ranges, and the options that need or exclude one another."""

    def require(ok: bool, name: str, expected: str) -> None:
        if not ok:
            raise UserError(f"{name} must be {expected}, got {getattr(config, name)!r}")

    for name in (
        "block_size",
        "pad_vocab_to_multiple_of",
        "loss_chunks",
        "global_batch_size",
        "max_steps",
        "logging_steps",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
        "save_total_limit",
        "shuffle_buffer_size",
        "max_bad_steps",
        "profile",
    ):
        value = getattr(config, name)
        require(value is None or value >= 1, name, "at least 1")
    for name in (
        "eval_steps",
        "save_steps",
        "dataloader_num_workers",
        "seed",
        "weight_decay",
        "max_grad_norm",
        "warmup_steps",
    ):
        require(getattr(config, name) >= 0, name, "at least 0")
    for name in (
        "learning_rate",
        "adam_epsilon",
        "spike_sigmas",
        "gpu_memory_limit_gb",
        "num_train_epochs",
        "max_minutes",
    ):
        value = getattr(config, name)
        require(value is None or value > 0, name, "greater than 0")
    for name in ("adam_beta1", "adam_beta2", "label_smoothing_factor"):
        require(0 <= getattr(config, name) < 1, name, "at least 0 and below 1")
    require(
        config.warmup_steps < 1 or config.warmup_steps == int(config.warmup_steps),
        "warmup_steps",
        "a whole number of steps, or a share of max_steps below 1",
    )
    require(config.seed < 2**31, "seed", "below 2**31")
    micro_batch = config.per_device_train_batch_size
    require(
        micro_batch == "auto" or (isinstance(micro_batch, int) and micro_batch >= 1),
        "per_device_train_batch_size",
        "auto or at least 1",
    )
    require(
        config.tokenizer_vocab_size is None or config.tokenizer_vocab_size >= 257,
        "tokenizer_vocab_size",
        "at least 257 (256 bytes and the end-of-text token)",
    )
    if config.lr_scheduler_type not in SCHEDULES:
        raise UserError(
            _unknown_message(f"lr_scheduler_type '{config.lr_scheduler_type}'", config.lr_scheduler_type, SCHEDULES)
            + f" (one of {', '.join(SCHEDULES)})"
        )
    samples = config.max_eval_samples
    require(
        samples in ("auto", "all", None) or (isinstance(samples, int) and samples >= 1),
        "max_eval_samples",
        "auto, all or at least 1",
    )
    if config.num_train_epochs is not None and config.streaming:
        raise UserError(
            "--num_train_epochs needs a prepared dataset; a streamed text has no known length: --max_steps"
        )
    if config.change_schedule and not config.resume_from_checkpoint:
        raise UserError("--change_schedule is for a run that is resumed: add --resume_from_checkpoint auto")
    if config.eval_only and not (config.model_name_or_path or config.resume_from_checkpoint):
        raise UserError("--eval_only needs a model: --model_name_or_path DIR_OR_ID (a run, a checkpoint, a Hub id)")

    given = [name for name in DATA_SOURCES if getattr(config, name) is not None]
    if len(given) != 1:
        found = " and ".join(f"--{name}" for name in given) if given else "none"
        raise UserError(
            f"pass exactly one of --dataset_dir (a packed dataset), --train_file and --dataset_name "
            f"(text to prepare first); found {found}"
        )
    if config.dataset_dir is not None:
        for field_ in dataclasses.fields(config):
            if field_.name in TEXT_OPTIONS and getattr(config, field_.name) != field_.default:
                raise UserError(f"--{field_.name} has no effect on --dataset_dir, which is prepared; leave it out")
    if config.streaming and config.dataset_dir is not None:
        raise UserError("--streaming reads --train_file or --dataset_name, not a packed --dataset_dir")
    if config.streaming and (config.data_placement != "mmap" or config.dataloader_num_workers):
        raise UserError(
            "--streaming makes its batches in a process of its own; leave --data_placement and "
            "--dataloader_num_workers out"
        )
    if config.profile and config.resume_from_checkpoint is None and config.profile + PROFILED_STEPS > config.max_steps:
        raise UserError(
            f"the {PROFILED_STEPS} steps after step {config.profile} cannot be profiled: max_steps is "
            f"{config.max_steps}; --profile {max(1, config.max_steps - PROFILED_STEPS)} would do"
        )
    if not config.loss_in_graph and config.loss_chunks > 1:
        raise UserError("--loss_chunks needs the loss in the graph: leave --no_loss_in_graph out")
    if config.report_to == ["none"]:  # as Hugging Face says it
        object.__setattr__(config, "report_to", None)
    try:
        config.sample_prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError("sample_prompt is not valid UTF-8 text") from error
    if config.model_name_or_path and config.tokenizer_name is None:
        object.__setattr__(config, "tokenizer_name", config.model_name_or_path)
    if config.dataset_dir is None and config.tokenizer_name is None and config.tokenizer_vocab_size is None:
        raise UserError("preparing text needs --tokenizer_name DIR_OR_ID, or --tokenizer_vocab_size N to train one")
    if config.dataloader_num_workers and config.data_placement != "mmap":
        raise UserError(f"--dataloader_num_workers reads with --data_placement mmap only, not {config.data_placement}")
    if config.push_to_hub and not config.hub_model_id:
        raise UserError("--push_to_hub needs --hub_model_id user/name")
    if config.resume_from_checkpoint in ("latest", "auto") and config.output_dir is None:
        raise UserError(
            f"--resume_from_checkpoint {config.resume_from_checkpoint} needs the --output_dir of the run to go on with"
        )
    if config.resume_from_checkpoint and config.overwrite:
        raise UserError("--overwrite removes the checkpoints that --resume_from_checkpoint needs: pass one of them")
