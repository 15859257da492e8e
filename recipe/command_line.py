"""Command line and recipe file -> `TrainConfig`; also the argument parser of the other scripts.

Defaults < recipe YAML < command line. Recipe values are parsed as if they had been typed, so both follow the same
rules. This module does not import torch, so mistakes are reported at once.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser  # this name does not import torch

from recipe.arguments import OPTIONS, CommandLine, typed_names, underscored, unknown_option
from recipe.config import SECTIONS, TrainConfig, most_steps
from recipe.errors import UserError, did_you_mean, one_line
from recipe.rules import DATA_SOURCES, TEXT_OPTIONS

CONFIGS_DIR = Path(__file__).parent / "configs"
MAPPINGS = ("config_overrides", "lr_scheduler_kwargs", "expected_loss")
# With another model, tokenizer or row length, losses do not compare with the recipe's.
OTHER_LOSS = {"config_overrides", "model_type", "model_name_or_path", "tokenizer_name", "tokenizer_vocab_size"}
OTHER_LOSS |= {"block_size"}


def load_config(argv: list[str] | None = None) -> tuple[TrainConfig, str]:
    """Parse the command line; `--config NAME|FILE.yaml` (default: demo) replaces the defaults.

    Returns the config and the name of the recipe. Raises `UserError`. `--help` exits.
    """
    argv = underscored(sys.argv[1:] if argv is None else argv)
    parser = _ConfigParser(TrainConfig, prog="recipe/train.py", allow_abbrev=False, add_help=False)
    parser.add_argument("--config")
    parser.add_argument("-h", "--help", action="store_true")
    namespace, unknown = parser.parse_known_args(argv)
    typed = vars(namespace)
    recipe, wants_help = typed.pop("config", "demo"), typed.pop("help", False)
    if unknown and not wants_help:
        raise UserError(unknown_option(unknown[0], [*OPTIONS, "config"]))
    values = _merge(_read_recipe(recipe, parser), typed)
    if wants_help:
        print(_help(recipe, values))
        sys.exit(0)
    path = Path(recipe)  # training_config.yaml represents the run in its folder
    return TrainConfig(**values), path.parent.name if path.name == "training_config.yaml" else path.stem


class _ConfigParser(HfArgumentParser):
    """`HfArgumentParser` whose result holds only what was typed; `TrainConfig` has the defaults and the bounds."""

    def add_argument(self, *names: str, **kwargs: Any) -> argparse.Action:
        kwargs = {key: value for key, value in kwargs.items() if key not in ("at_least", "above", "below", "words")}
        kwargs["default"] = argparse.SUPPRESS
        if kwargs.get("type") in (int, float):  # 1e3 is an integer, nan is not a number
            kwargs["type"] = _integer if kwargs["type"] is int else _number
        elif "true" in kwargs.get("choices", ()):  # YAML and Python spell booleans differently
            kwargs["type"] = str.lower
        return super().add_argument(*names, **kwargs)

    error = CommandLine.error


def _integer(text: str) -> int:
    number = _as_number(text)
    if isinstance(number, str) or number != int(number):
        raise argparse.ArgumentTypeError(f"must be an integer, got '{text}'")
    return int(text) if text.lstrip("+-").isdigit() else int(number)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"must be a number, got '{text}'")
    return number


def _read_recipe(recipe: str, parser: _ConfigParser) -> dict[str, Any]:
    """Read a recipe and parse its single values as if they had been typed."""
    values: dict[str, Any] = {}
    arguments: list[str] = []
    for key, value in load_yaml(recipe).items():
        if key not in OPTIONS:
            raise UserError(f"unknown key '{key}' in {recipe}; {did_you_mean(str(key), OPTIONS)}")
        is_list = "list" in str(OPTIONS[key].type)
        if value is None:
            if OPTIONS[key].default is not None and "words" not in OPTIONS[key].metadata:
                raise UserError(f"{key} in {recipe} has no value; set one, or delete the line")
            values[key] = None
        elif key in MAPPINGS:
            values[key] = parse_mapping(key, value)
        elif is_list and isinstance(value, (str, list)):
            values[key] = [value] if isinstance(value, str) else value
            if not all(isinstance(item, str) and item for item in values[key]):
                raise UserError(f"{key} in {recipe} must be a list of strings, got {value}")
        elif isinstance(value, (list, dict)) or is_list:
            raise UserError(f"{key} in {recipe} must be a single value, got {value}")
        elif value is False and "no" in str(OPTIONS[key].type):  # YAML 1.1 reads `no` as false
            values[key] = "no"
        else:
            arguments.append(f"--{key}={str(value).lower() if isinstance(value, bool) else value}")
    try:
        return values | vars(parser.parse_args(arguments))
    except UserError as error:
        raise UserError(f"{recipe}: {str(error).removeprefix('--')}") from error


def load_yaml(recipe: str) -> dict[str, Any]:
    """Read a recipe by name (`gpt2_124m`) or path. Raises `UserError` if it is not a mapping."""
    is_file = recipe.lower().endswith((".yaml", ".yml"))
    path = Path(recipe) if is_file else CONFIGS_DIR / f"{recipe}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in CONFIGS_DIR.glob("*.yaml")))
        if is_file:
            raise UserError(f"there is no recipe file {recipe}")
        hint = did_you_mean(recipe, known.split(", "), otherwise="pass a .yaml file, or a recipe")
        raise UserError(f"there is no recipe '{recipe}'; {hint} (recipes: {known})")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = one_line(error).replace(' in "<unicode string>",', "")
        raise UserError(f"{path} is not valid YAML: {reason}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must contain a mapping of options to values")
    return content


def _merge(recipe: dict[str, Any], typed: dict[str, Any]) -> dict[str, Any]:
    """Put typed options on top of the recipe's, and drop recipe values that they make meaningless."""
    values = dict(recipe)
    for key in MAPPINGS:
        if key in typed:
            typed[key] = parse_mapping(key, typed[key])

    def drop(*names: str) -> None:
        for name in names:
            values.pop(name, None)

    if set(DATA_SOURCES) & set(typed):
        drop(*DATA_SOURCES, *TEXT_OPTIONS)
    if "lr_scheduler_type" in typed:
        drop("lr_scheduler_kwargs")
    if OTHER_LOSS & set(typed):
        drop("expected_loss")
    if {"max_steps", "num_train_epochs"} & set(typed):
        steps, warmup = (values.get(key, OPTIONS[key].default) for key in ("max_steps", "warmup_steps"))
        drop("max_steps", "num_train_epochs", "max_minutes")
        if 1 <= warmup < steps and typed.get("max_steps", 0) < steps:
            values["warmup_steps"] = warmup / steps  # a shorter run warms up for the same share of its steps
    elif "max_minutes" in typed:
        drop("max_steps", "num_train_epochs")
    if typed.get("optim", "auto") not in ("auto", "muon") and values.get("optim") == "muon":
        drop("learning_rate", "weight_decay")  # chosen for what Muon leaves to AdamW, and for Muon
    if typed.get("model_type", values.get("model_type", "gpt2")) != values.get("model_type", "gpt2"):
        drop("config_overrides")  # of another type
    if "model_name_or_path" in typed:  # the model's shape replaces the recipe's; dropout stays
        overrides = values.get("config_overrides") or {}
        values["config_overrides"] = {
            key: value for key, value in overrides.items() if key.endswith(("_pdrop", "dropout"))
        } or None
        if not {"dataset_dir", "tokenizer_name"} & set(typed):
            drop("tokenizer_vocab_size")
    overrides = (values.get("config_overrides") or {}) | typed.get("config_overrides", {})
    values |= typed
    if "config_overrides" in typed:  # typed values join the recipe's
        values["config_overrides"] = overrides
    for other in ("tokenizer_name", "dataset_dir"):
        if {"tokenizer_vocab_size", other} <= typed.keys():
            raise UserError(f"--tokenizer_vocab_size trains a tokenizer, but --{other} has one; pass only one of them")
    if "max_steps" in values and values.get("num_train_epochs") is not None:
        raise UserError("max_steps and num_train_epochs both set the length of the run; pass only one of them")
    if values.get("max_minutes") is not None and values.get("num_train_epochs") is None:
        values.setdefault("max_steps", most_steps(values["max_minutes"]))
    default = values.get("block_size", OPTIONS["block_size"].default)
    if "dataset_dir" in typed and "block_size" not in typed:
        values["block_size"] = _read_number(Path(values["dataset_dir"]) / "metadata.json", "block_size", default)
    elif "model_name_or_path" in typed and "block_size" not in typed:
        path = Path(values["model_name_or_path"]) / "config.json"
        positions = (_read_number(path, name, default) for name in ("n_positions", "max_position_embeddings"))
        values["block_size"] = min(*positions, default)
    return values


def _read_number(path: Path, key: str, default: int) -> int:
    """Read a number from a JSON file. If that fails, return the default: opening the folder will explain why."""
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))[key])
    except (OSError, ValueError, KeyError, TypeError):
        return default


def parse_mapping(key: str, value: Any) -> dict[str, Any]:
    """Parse `{n_layer: 4}`, JSON or `n_layer=4,n_embd=128`. Values are YAML scalars, and `1e-5` is a number."""
    examples = {"config_overrides": "n_layer=4,n_embd=128", "lr_scheduler_kwargs": "min_lr_rate=0.1"}
    example = examples.get(key, "value=3.28,tolerance=0.05,...")
    expected = f"{key} must look like {example} or be a JSON object, got {value!r}"
    try:
        if isinstance(value, str):  # JSON is YAML, and so are pairs after this replacement
            is_json = value.lstrip().startswith("{")
            if not is_json and not all("=" in pair for pair in value.split(",")):
                raise UserError(expected)
            value = yaml.safe_load(value if is_json else "{" + value.replace("=", ": ") + "}")
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise UserError(expected)
        return {name: _as_number(item) if isinstance(item, str) else item for name, item in value.items()}
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(expected) from error


def _as_number(text: str) -> float | str:
    """`1e-5`, which YAML 1.1 reads as a string, -> 0.00001."""
    with contextlib.suppress(argparse.ArgumentTypeError):
        return _number(text)
    return text


def _help(recipe: str, values: dict[str, Any]) -> str:
    """List all options by section, with the defaults that apply under this recipe."""
    width = min(shutil.get_terminal_size().columns, 100)
    wrap = textwrap.TextWrapper(width, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)
    recipes = ", ".join(sorted(path.stem for path in CONFIGS_DIR.glob("*.yaml")))
    lines = ["usage: accelerate launch recipe/train.py [--config NAME|FILE] [--OPTION VALUE]", ""]
    lines += ["  --config NAME|FILE.yaml"]
    lines += wrap.wrap(f"Recipe: {recipes}, or a YAML file (default: demo). The defaults below are those of {recipe}.")
    for option in OPTIONS.values():
        if option.name in SECTIONS:
            lines += ["", f"{SECTIONS[option.name]}:"]
        default, text = values.get(option.name, option.default), option.metadata["help"].replace("%%", "%")
        if isinstance(default, dict):
            default = ",".join(f"{key}={value}" for key, value in default.items())
        if isinstance(default, (bool, float)):
            default = str(default).lower() if isinstance(default, bool) else f"{default:g}"
        if default is not None:
            text = f"{text.partition(' Default: ')[0]} (default: {default})"
        lines += [f"  --{option.name} {_metavar(option)}", *wrap.wrap(text)]
    return "\n".join(lines)


def _metavar(option: dataclasses.Field) -> str:
    """Describe an option's value: `{a,b}`, `N`, `TEXT` ..."""
    hint = str(option.type)
    if "Literal" in hint:
        return "{" + re.sub(r".*\[|\].*|'| ", "", hint) + "}"
    if hint == str(bool):
        return "[true|false]"
    if "list" in hint:
        return "TEXT [TEXT ...]"
    return "N|TEXT" if "words" in option.metadata else "N" if "int" in hint or "float" in hint else "TEXT"


def names_data(recipe: str, options: list[str]) -> bool:
    """Return whether the recipe or the typed options say what to train on."""
    return bool((typed_names(options) | set(load_yaml(recipe))) & set(DATA_SOURCES))
