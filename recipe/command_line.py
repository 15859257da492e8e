"""Command line and recipe file -> `TrainConfig`.

Defaults < recipe YAML < command line. This module does not import torch, so programs without it start at once.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser  # this name does not import torch

from recipe.arguments import OTHER_NAMES, CommandLine, typed_names, underscored
from recipe.config import (
    ADDRESS,
    CONFIG_NAME,
    DATA_SOURCES,
    LISTS,
    LITERALS,
    MAPPINGS,
    OPTIONS,
    SECTIONS,
    TEXT_OPTIONS,
    TrainConfig,
    as_numbers,
    is_missing,
    may_come_from_hub,
    parse_mapping,
)
from recipe.errors import UserError, did_you_mean, one_line, short_reason

CONFIGS_DIR = Path(__file__).parent / "configs"
RECIPES = sorted(path.stem for path in CONFIGS_DIR.glob("*.yaml"))
# Names of TrainingArguments, and the option that each sets.
ALIASES = {"bf16": "mixed_precision", "fp16": "mixed_precision", "gradient_checkpointing": "activation_checkpointing"}
# With another model, tokenizer or row length, losses do not compare with the recipe's.
OTHER_LOSS = {"config_overrides", "model_type", "model_name_or_path", "tokenizer_name", "tokenizer_vocab_size"}
OTHER_LOSS |= {"block_size"}


class TrainParser(CommandLine, HfArgumentParser):
    """The parser of recipe/train.py, in the sections of recipe/config.py. The bounds are checked there, too."""

    def __init__(self) -> None:
        usage = "accelerate launch recipe/train.py [--config NAME|FILE] [--OPTION VALUE]"
        super().__init__(dataclass_types=TrainConfig, prog="recipe/train.py", usage=usage)
        self.add_argument(
            "--config",
            metavar="NAME|FILE|hf://ID",
            help=f"Recipe: {', '.join(RECIPES)}, a YAML file, or a published run: hf://user/name.",
        )

    def add_argument(self, *names: str, **kwargs: Any) -> argparse.Action | None:
        name = names[0].lstrip("-")
        if name.startswith("no_"):  # which HfArgumentParser adds to every --name that is true by default
            return None
        if name not in OPTIONS:
            return super().add_argument(*names, **kwargs)
        if name in SECTIONS:  # the first option of one
            self.section = self.add_argument_group(SECTIONS[name])
        kwargs = {key: value for key, value in kwargs.items() if key not in ("at_least", "above", "below", "words")}
        if name == "activation_checkpointing":
            kwargs["type"] = str.lower  # Python's booleans, as YAML's arrive here, and the command line's
        elif name in MAPPINGS:
            kwargs |= {"type": str, "metavar": "VALUE"}  # `TrainConfig` parses it
        elif name not in LITERALS:
            value = "BOOL" if kwargs.get("const") is True else "VALUE"
            kwargs.setdefault("metavar", "N" if kwargs.get("type") in (int, float) else value)
        aliases = ["--gradient_checkpointing"] if name == "activation_checkpointing" else []
        action = self.section.add_argument(f"--{name}", *aliases, **kwargs)  # without a second spelling of the name
        for precision in ("bf16", "fp16") if name == "mixed_precision" else ():
            self.section.add_argument(
                f"--{precision}",
                dest=name,
                nargs="?",
                const=precision,
                default=argparse.SUPPRESS,
                type=lambda text, values={"true": precision, "false": "no"}: values.get(text.lower(), text),
                metavar="BOOL",
                help=f"Short for --{name} {precision}.",
            )
        return action


def load_config(argv: list[str] | None = None) -> tuple[TrainConfig, str]:
    """Parse the command line on top of the recipe that `--config NAME|FILE.yaml|hf://user/name` names.

    The default recipe is gpt2_finetune for a model of one's own (`--model_name_or_path`), else demo. Returns the
    config and the name of the recipe. Raises `UserError`. `--help` exits.
    """
    argv = underscored(sys.argv[1:] if argv is None else argv)
    spelled = typed_names(argv)
    typed = {ALIASES.get(name, name) for name in spelled}
    for option in typed:
        if len(names := sorted(name for name in spelled if ALIASES.get(name, name) == option)) > 1:
            raise UserError(f"--{' and --'.join(names)} set the same option; pass only one of them")
    parser = TrainParser()
    given = parser.parse_known_args([text for text in argv if text not in ("-h", "--help")])[0]
    recipe = given.config or ("gpt2_finetune" if "model_name_or_path" in typed else "demo")
    values = merge(as_typed(load_yaml(recipe)), {name: getattr(given, name) for name in typed & OPTIONS.keys()})
    if missing := [name for name, value in values.items() if is_missing(value)]:
        count = len(values["dataset_dir"]) if "dataset_dir" in missing else 1
        how = f" ({count} datasets, in the order of its card)" if count > 1 else ""
        raise UserError(f"the author of {recipe} had this only locally; pass your own --{', --'.join(missing)}{how}")
    parser.set_defaults(config=recipe, **{name: value for name, value in values.items() if name not in typed})
    args = vars(parser.parse_args(argv))
    args |= {name: values[name] for name in typed & OPTIONS.keys() & values.keys()}
    path = Path(args.pop("config"))
    if address := ADDRESS.fullmatch(recipe):
        return TrainConfig(**args), address[1].rpartition("/")[2]
    # training_config.yaml represents the run in its folder.
    return TrainConfig(**args), path.absolute().parent.name if path.name == CONFIG_NAME else path.stem


def load_yaml(recipe: str) -> dict[str, Any]:
    """Read a recipe by name (`gpt2_124m`), path, or address of a published run (`hf://user/name`).

    Raises `UserError` if it is not a mapping of known options.
    """
    is_file = recipe.lower().endswith((".yaml", ".yml"))
    path = Path(recipe) if is_file else CONFIGS_DIR / f"{recipe}.yaml"
    if address := ADDRESS.fullmatch(recipe):
        path = fetch_recipe(*address.groups())
    if not path.is_file():
        hint = did_you_mean(recipe, RECIPES, otherwise="pass a .yaml file, or a recipe")
        raise UserError(f"there is no recipe {'file ' * is_file}'{recipe}'; {hint} (recipes: {', '.join(RECIPES)})")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{recipe} is not valid YAML: {one_line(error)!r}") from error
    if not isinstance(content, dict):
        raise UserError(f"{recipe} must contain a mapping of options to values")
    for name in ALIASES.keys() & content.keys():
        if (option := ALIASES[name]) in content:
            raise UserError(f"{name} in {recipe} sets {option}, which is set there, too; remove one of them")
        content[option] = getattr(TrainParser().parse_known_args([f"--{name}={content.pop(name)}"])[0], option)
    for key, value in content.items():
        if key not in OPTIONS:
            hint = OTHER_NAMES.get(key) or did_you_mean(str(key), OPTIONS)
            raise UserError(f"unknown key {str(key)!r} in {recipe}; {hint}")
        is_mapping = key in MAPPINGS and isinstance(value, dict) and all(isinstance(name, str) for name in value)
        kind = (int, float) if key == "dataset_weights" else str
        is_list = key in LISTS and isinstance(value, list) and all(isinstance(item, kind) for item in value)
        if isinstance(value, (list, dict, set)) and not (is_mapping or is_list):
            what = f"a list of {'texts' if kind is str else 'numbers'}" if key in LISTS else "a single value"
            what = f"a mapping such as {MAPPINGS[key]}" if key in MAPPINGS else what
            raise UserError(f"{key} in {recipe} must be {what}, got {value}")
    if address and (refused := [name for name, value in content.items() if not may_come_from_hub(name, value)]):
        raise UserError(
            f"{recipe} sets {', '.join(refused)}; a recipe from the Hub may set neither private options nor paths "
            f"(nor names that are folders here); read its {CONFIG_NAME}, and pass a copy of it as --config"
        )
    if path.name == CONFIG_NAME and content.get("hub_private_repo") is False:
        del content["hub_private_repo"]  # written by runs whose option had this default
    return content


def fetch_recipe(repo_id: str, revision: str | None) -> Path:
    """Download the recipe of a published run. Raises `UserError` if that fails."""
    from huggingface_hub import hf_hub_download  # no other recipe needs it
    from huggingface_hub.errors import HfHubHTTPError

    where = f"{repo_id}, revision {revision}" if revision else repo_id
    try:
        return Path(hf_hub_download(repo_id, CONFIG_NAME, revision=revision))
    except HfHubHTTPError as error:
        reason = f"the Hub has none, or your token may not read it (status {error.response.status_code})"
        raise UserError(f"cannot read the training_config.yaml of {where}: {reason}") from error
    except Exception as error:  # no connection, offline mode, a bad name, ...: each library raises its own
        raise UserError(f"cannot read the training_config.yaml of {where}: {short_reason(error)}") from error


def as_typed(content: dict[str, Any]) -> dict[str, Any]:
    """Turn single values of a recipe into text, as if they had been typed: both then follow the same rules."""
    values: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            values[key] = as_numbers(value)
        elif value is None or isinstance(value, list):
            values[key] = value
        elif value is False and key in ("mixed_precision", "dynamo_backend"):  # YAML 1.1 reads `no` as false
            values[key] = "no"
        else:
            values[key] = [value if key == "dataset_weights" else str(value)] if key in LISTS else str(value)
    return values


def merge(recipe: dict[str, Any], typed: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe's values and the typed ones, without recipe values that the typed ones make meaningless."""
    values = dict(recipe)

    def drop(*names: str) -> None:
        for name in names:
            values.pop(name, None)

    sources = set(DATA_SOURCES) & typed.keys()
    if sources and not any(is_missing(values.get(name)) for name in sources):  # else it is the recipe's own text
        if set(DATA_SOURCES) & values.keys():
            drop("max_eval_samples")  # chosen for the recipe's own text
        drop(*DATA_SOURCES, *TEXT_OPTIONS, "dataset_weights")
    if typed.get("lr_scheduler_type", values.get("lr_scheduler_type")) != values.get("lr_scheduler_type"):
        drop("lr_scheduler_kwargs")
    if any(name in typed and not is_missing(values.get(name)) for name in OTHER_LOSS):
        drop("expected_loss")
    if typed.get("optim", "muon") != "muon" and values.get("optim") == "muon":
        drop("learning_rate", "weight_decay")  # chosen for Muon
    model_type = values.get("model_type", "gpt2")
    if typed.get("model_type", model_type) != model_type and "model_name_or_path" not in typed:
        drop("config_overrides")  # they were for another model type
    _merge_length(values, typed)
    overrides = values.get("config_overrides") or {}
    if "model_name_or_path" in typed:  # the model's shape and vocabulary replace the recipe's; dropout stays
        overrides = {key: value for key, value in overrides.items() if key.endswith(("_pdrop", "dropout"))}
        drop("tokenizer_vocab_size")
    if isinstance(text := typed.get("config_overrides"), str):  # typed values join the recipe's
        overrides = overrides | parse_mapping("config_overrides", text)
    values |= typed
    values["config_overrides"] = overrides or None
    for other in ("tokenizer_name", "dataset_dir"):
        if {"tokenizer_vocab_size", other} <= typed.keys():
            raise UserError(f"--tokenizer_vocab_size trains a tokenizer, but --{other} has one; pass only one of them")
    rows, times = str(typed.get("per_device_train_batch_size")), typed.get("gradient_accumulation_steps")
    if rows.isdigit() and times and "global_batch_size" not in typed:  # as every Trainer user expects
        values["global_batch_size"] = int(rows) * times * int(os.environ.get("WORLD_SIZE", "1"))
        values["gradient_accumulation_steps"] = None  # derived, also when the run resumes on other devices
    if "model_name_or_path" in typed and "block_size" not in typed:
        path, default = Path(typed["model_name_or_path"], "config.json"), int(_number("block_size", values))
        positions = (_read_number(path, name, default) for name in ("n_positions", "max_position_embeddings"))
        values["block_size"] = min(*positions, default)
    return values


def _merge_length(values: dict[str, Any], typed: dict[str, Any]) -> None:
    """Let a typed length of the run replace the recipe's. values: of the recipe, changed in place."""
    if {"max_steps", "num_train_epochs"} <= typed.keys():
        raise UserError("max_steps and num_train_epochs both set the length of the run; pass only one of them")
    steps, warmup = _number("max_steps", values), _number("warmup_steps", values)
    if values.get("max_steps") is None and {"num_train_epochs", "max_minutes"} & values.keys():
        steps = 0  # unknown
    lengths = {"max_steps", "num_train_epochs", "max_minutes"} & typed.keys()
    if lengths:
        for name in ("max_steps", "num_train_epochs", "max_minutes"):
            values.pop(name, None)
    if lengths - {"max_minutes"} and 1 <= warmup < steps and typed.get("max_steps", 0) < steps:
        values["warmup_steps"] = warmup / steps  # a shorter run warms up for the same share of its steps
    if "max_steps" not in typed and ({"num_train_epochs", "max_minutes"} & (typed.keys() | values.keys())):
        values.setdefault("max_steps", None)


def _number(name: str, values: dict[str, Any]) -> float:
    """Return the value of an option, or its default. Raises `UserError` if it is not a number."""
    text = values.get(name)
    try:
        return float(getattr(TrainConfig, name) if text is None else text)
    except ValueError as error:
        raise UserError(f"{name}: invalid value {text!r}") from error


def _read_number(path: Path, key: str, default: int) -> int:
    """Read a number from a JSON file. If that fails, return the default: opening the folder will explain why."""
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))[key])
    except (OSError, ValueError, KeyError, TypeError):
        return default
