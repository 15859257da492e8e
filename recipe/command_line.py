"""Command line and recipe file -> `TrainConfig`.

Defaults < recipe YAML < command line. A value means the same in a recipe and on the command line. This module does not
import torch, so programs without it start at once.
"""

import argparse
import contextlib
import functools
import json
import sys
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser  # this name does not import torch

from recipe.arguments import OTHER_NAMES, CommandLine, Store, as_path, typed_names
from recipe.config import (
    ADDRESS,
    CONFIG_NAME,
    DATA_SOURCES,
    KINDS,
    LISTS,
    LITERALS,
    MAPPINGS,
    OPTIONS,
    PATHS,
    SECTIONS,
    TEXT_OPTIONS,
    WORDS,
    TrainConfig,
    is_missing,
    may_come_from_hub,
)
from recipe.errors import UserError, did_you_mean, one_line, short_reason
from recipe.launcher import FALSE, TRUE, count_processes

CONFIGS_DIR = Path(__file__).parent / "configs"
RECIPES = sorted(path.stem for path in CONFIGS_DIR.glob("*.yaml"))
# Names of TrainingArguments, and the option that each sets.
ALIASES = {"bf16": "mixed_precision", "fp16": "mixed_precision", "tf32": "matmul_precision"}
ALIASES |= {"gradient_checkpointing": "activation_checkpointing"}
SHORT = {"bf16": ("no", "bf16"), "fp16": ("no", "fp16"), "tf32": ("highest", "high")}  # what false and true mean
# With another model, tokenizer or row length, losses do not compare with the recipe's.
OTHER_LOSS = {"config_overrides", "model_type", "model_name_or_path", "tokenizer_name", "tokenizer_vocab_size"}
OTHER_LOSS |= {"block_size"}
TRUTH: dict[str, bool] = dict.fromkeys(TRUE, True) | dict.fromkeys(FALSE, False)  # in any case


class TextLoader(yaml.SafeLoader):
    """Reads every value as text, except `null` and merge keys: `no` is not a boolean, and 007 is not a number."""


TextLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class TrainParser(CommandLine, HfArgumentParser):
    """The parser of recipe/train.py, with the sections of recipe/config.py, which also checks the bounds."""

    def __init__(self) -> None:
        usage = "accelerate launch recipe/train.py [--config NAME|FILE] [--OPTION VALUE]"
        super().__init__(dataclass_types=TrainConfig, prog="recipe/train.py", usage=usage)
        self.add_argument(
            "--config",
            metavar="NAME|FILE|hf://ID",
            type=as_path,
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
        kwargs |= {"type": functools.partial(parse_value, name), "action": Store}
        if name not in LITERALS:
            value = "N" if KINDS[name] in (int, float) else "BOOL" if kwargs.get("const") is True else "VALUE"
            kwargs.setdefault("metavar", value)
        aliases = ["--gradient_checkpointing"] if name == "activation_checkpointing" else []
        action = self.section.add_argument(f"--{name}", *aliases, **kwargs)  # without a second spelling of the name
        for short, (_, value) in SHORT.items():
            if ALIASES[short] == name:
                self.section.add_argument(
                    f"--{short}",
                    dest=name,
                    nargs="?",
                    const=value,
                    default=argparse.SUPPRESS,
                    choices=kwargs["choices"],
                    type=functools.partial(parse_value, short),
                    metavar="BOOL",
                    help=f"Short for --{name} {value}.",
                )
        return action

    def read(self, words: list[str]) -> dict[str, Any]:
        """Return the options on a command line. Raises `UserError`."""
        parsed, spelled, values = vars(self.parse_args(words)), typed_names(words), {}
        for option in {ALIASES.get(name, name) for name in spelled} & parsed.keys():
            if len(names := sorted(name for name in spelled if ALIASES.get(name, name) == option)) > 1:
                raise UserError(f"{' and '.join(names)} set the same option; keep only one of them")
            values[option] = parsed[option]
        return check_length(values)


def parse_value(name: str, text: str) -> Any:
    """Convert the text of a value to the option's type: `off` is False, or "no" for `mixed_precision`.

    Raises `UserError` for an invalid value. An unknown choice is returned as it is, because `TrainConfig` refuses it.
    """
    if name in PATHS:
        return as_path(text)
    if name in MAPPINGS:
        return parse_mapping(name, text)
    truth = TRUTH.get(text.lower())
    if name in SHORT:
        return text if truth is None else SHORT[name][truth]
    if choices := LITERALS.get(ALIASES.get(name, name)):
        same = [choice for choice in choices if str(choice).lower() == text.lower()]
        same += [choice for choice in choices if truth is not None and TRUTH.get(choice) is truth]
        return same[0] if same else text
    kind = KINDS[name]
    with contextlib.suppress(ValueError):
        if kind is not bool or truth is not None:
            return truth if kind is bool else kind(text)
    if name in WORDS:
        return text
    raise UserError(f"{name}: invalid {kind.__name__} value: {text!r}")


def parse_mapping(key: str, text: str) -> dict[str, Any]:
    """Parse JSON or `n_layer=4,n_embd=128`, whose values are YAML scalars. Raises `UserError`."""
    expected = f"{key} must look like {MAPPINGS[key]} or be a JSON object, got {text!r}"
    try:  # JSON is YAML, and so are pairs after this replacement
        is_json = text.lstrip().startswith("{")
        if not is_json and not all("=" in pair for pair in text.split(",")):
            raise UserError(expected)
        value = yaml.safe_load(text if is_json else "{" + text.replace("=", ": ") + "}")
    except yaml.YAMLError as error:
        raise UserError(expected) from error
    if not isinstance(value, dict):
        raise UserError(expected)
    return as_numbers(value)


def as_numbers(mapping: dict[str, Any]) -> dict[str, Any]:
    """Turn values such as `1e-5`, which YAML 1.1 reads as text, into numbers."""
    numbers = dict(mapping)
    for name, value in mapping.items():
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                numbers[name] = float(value)
    return numbers


def check_length(values: dict[str, Any]) -> dict[str, Any]:
    """Drop Trainer's `max_steps: -1`. Raises `UserError` if both steps and epochs are set.

    values: the options of the recipe, or those of the command line.
    """
    if values.get("max_steps") == -1:  # Trainer's default
        values = {name: value for name, value in values.items() if name != "max_steps"}
    steps, epochs = values.get("max_steps"), values.get("num_train_epochs")
    if steps and epochs:
        problem = f"max_steps {steps} and num_train_epochs {epochs:g}"
        raise UserError(f"{problem} both set the length of the run; keep only one of them")
    return values


def load_config(argv: list[str] | None = None) -> tuple[TrainConfig, str]:
    """Parse the command line on top of the recipe that `--config NAME|FILE.yaml|hf://user/name` names.

    The default recipe is gpt2_finetune for a model of one's own (`--model_name_or_path`), else demo. Returns the
    config and the name of the recipe. Raises `UserError`. `--help` exits.
    """
    parser = TrainParser()
    words = sys.argv[1:] if argv is None else argv
    typed_values = parser.read([word for word in words if word not in ("-h", "--help")])
    recipe = typed_values.pop("config", None) or ("gpt2_finetune" if "model_name_or_path" in typed_values else "demo")
    values = merge(load_yaml(recipe), typed_values)
    if {"-h", "--help"} & {*words}:
        parser.set_defaults(config=recipe, **values)
        parser.print_help()
        parser.exit()
    if missing := [name for name, value in values.items() if is_missing(value)]:
        count = len(values["dataset_dir"]) if "dataset_dir" in missing else 1
        how = f" ({count} datasets, in the order of its card)" if count > 1 else ""
        raise UserError(f"the author of {recipe} had this only locally; pass your own --{', --'.join(missing)}{how}")
    path = Path(recipe)
    if address := ADDRESS.fullmatch(recipe):
        return TrainConfig(**values), address[1].rpartition("/")[2]
    # training_config.yaml represents the run in its folder.
    return TrainConfig(**values), path.absolute().parent.name if path.name == CONFIG_NAME else path.stem


def load_yaml(recipe: str) -> dict[str, Any]:
    """Read a recipe by name (`gpt2_124m`), path, or address of a published run (`hf://user/name`).

    Values are the text in the file, not what YAML makes of `no` or 007. Raises `UserError` unless the file is a
    mapping of known options.
    """
    is_file = recipe.lower().endswith((".yaml", ".yml"))
    path = Path(recipe) if is_file else CONFIGS_DIR / f"{recipe}.yaml"
    if address := ADDRESS.fullmatch(recipe):
        path = fetch_recipe(*address.groups())
    if not path.is_file():
        hint = did_you_mean(recipe, RECIPES, otherwise="pass a .yaml file, or a recipe")
        raise UserError(f"there is no recipe {'file ' * is_file}'{recipe}'; {hint} (recipes: {', '.join(RECIPES)})")
    try:
        text = path.read_text(encoding="utf-8")
        content, yaml_values = yaml.load(text, TextLoader), yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{recipe} is not valid YAML: {one_line(error)!r}") from error
    if not isinstance(content, dict):
        raise UserError(f"{recipe} must contain a mapping of options to values")
    values: dict[str, Any] = {}
    try:
        for name in map(str, content):
            if name not in OPTIONS.keys() | ALIASES.keys():
                raise UserError(f"unknown key {name!r}; {OTHER_NAMES.get(name) or did_you_mean(name, OPTIONS)}")
        refused = [name for name, value in content.items() if not may_come_from_hub(ALIASES.get(name) or name, value)]
        if address and refused:
            raise UserError(
                f"a recipe from the Hub may set neither private options nor paths (nor names that are folders here), "
                f"but it sets {', '.join(refused)}; read its {CONFIG_NAME}, and pass a copy of it as --config"
            )
        for name, value in content.items():
            if (option := ALIASES.get(name) or name) in values:
                raise UserError(f"two lines set {option}; keep only one of them")
            values[option] = read_value(name, value, yaml_values.get(name))
        values = check_length(values)
    except UserError as error:
        raise UserError(f"{recipe}: {error}") from error
    return values


def read_value(name: str, value: Any, yaml_value: Any) -> Any:
    """Convert an option of a recipe. value: its text. yaml_value: the same as YAML types it. Raises `UserError`."""
    if value is None:
        return None
    if isinstance(yaml_value, dict) and name in MAPPINGS and all(isinstance(key, str) for key in yaml_value):
        return as_numbers(yaml_value)
    items = value if isinstance(value, list) and name in LISTS else [value]
    if any(item is None or isinstance(item, (list, dict, set)) for item in items):
        what = "a list of single values" if name in LISTS else "a single value"
        what = f"a mapping such as {MAPPINGS[name]}" if name in MAPPINGS else what
        raise UserError(f"{name} must be {what}, got {yaml_value}")
    values = [parse_value(name, str(item)) for item in items]
    return values if name in LISTS else values[0]


def fetch_recipe(repo_id: str, revision: str | None) -> Path:
    """Download the recipe of a published run. Raises `UserError` if that fails."""
    from huggingface_hub import hf_hub_download  # no other recipe needs it
    from huggingface_hub.errors import HfHubHTTPError

    where = f"{repo_id}, revision {revision}" if revision else repo_id
    try:
        return Path(hf_hub_download(repo_id, CONFIG_NAME, revision=revision))
    except Exception as error:  # no connection, offline mode, a bad name, ...: each library raises its own
        reason = short_reason(error)
        if isinstance(error, HfHubHTTPError):
            reason = f"the Hub has none, or your token may not read it (status {error.response.status_code})"
        raise UserError(f"cannot read the training_config.yaml of {where}: {reason}") from error


def merge(recipe: dict[str, Any], typed_values: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe's values and the typed ones, without recipe values that the typed ones make meaningless."""
    values = dict(recipe)

    def drop(*names: str) -> None:
        for name in names:
            values.pop(name, None)

    sources = set(DATA_SOURCES) & typed_values.keys()
    if sources and not any(is_missing(values.get(name)) for name in sources):  # else the recipe asks for this text
        if set(DATA_SOURCES) & values.keys():
            drop("max_eval_samples")  # chosen for the recipe's own text
        drop(*DATA_SOURCES, *TEXT_OPTIONS, "dataset_weights")
    if typed_values.get("lr_scheduler_type", values.get("lr_scheduler_type")) != values.get("lr_scheduler_type"):
        drop("lr_scheduler_kwargs")
    if any(name in typed_values and not is_missing(values.get(name)) for name in OTHER_LOSS):
        drop("expected_loss")
    if typed_values.get("optim", "muon") != "muon" and values.get("optim") == "muon":
        drop("learning_rate", "weight_decay")  # chosen for Muon
    model_type = values.get("model_type", "gpt2")
    if typed_values.get("model_type", model_type) != model_type and "model_name_or_path" not in typed_values:
        drop("config_overrides")  # they were for another model type
    if typed_values.get("streaming") and "max_minutes" in values:
        drop("num_train_epochs")  # a stream does not know its epochs
    _merge_length(values, typed_values)
    overrides = values.get("config_overrides") or {}
    if "model_name_or_path" in typed_values:  # the model's shape and vocabulary replace the recipe's; dropout stays
        overrides = {key: value for key, value in overrides.items() if key.endswith(("_pdrop", "dropout"))}
        drop("tokenizer_vocab_size")
    overrides = overrides | typed_values.get("config_overrides", {})  # typed values join the recipe's
    values |= typed_values
    values["config_overrides"] = overrides or None
    for other in ("tokenizer_name", "dataset_dir"):
        if {"tokenizer_vocab_size", other} <= typed_values.keys():
            raise UserError(f"--tokenizer_vocab_size trains a tokenizer, but --{other} has one; pass only one of them")
    rows, times = typed_values.get("per_device_train_batch_size"), typed_values.get("gradient_accumulation_steps")
    if isinstance(rows, int) and times and "global_batch_size" not in typed_values:  # as every Trainer user expects
        values["global_batch_size"] = rows * times * count_processes()
        values["gradient_accumulation_steps"] = None  # derived, also when the run resumes on other devices
    if "model_name_or_path" in typed_values and "block_size" not in typed_values:
        path, default = Path(typed_values["model_name_or_path"], "config.json"), int(_number("block_size", values))
        positions = (_read_number(path, name, default) for name in ("n_positions", "max_position_embeddings"))
        values["block_size"] = min(*positions, default)
    return values


def _merge_length(values: dict[str, Any], typed_values: dict[str, Any]) -> None:
    """Let a typed length of the run replace the recipe's. values: of the recipe, changed in place."""
    steps, warmup = _number("max_steps", values), _number("warmup_steps", values)
    if values.get("max_steps") is None and {"num_train_epochs", "max_minutes"} & values.keys():
        steps = 0  # unknown
    lengths = {"max_steps", "num_train_epochs", "max_minutes"} & typed_values.keys()
    most = values.get("num_train_epochs") if lengths == {"max_minutes"} <= values.keys() else None
    if lengths:
        for name in ("max_steps", "num_train_epochs", "max_minutes"):
            values.pop(name, None)
    if most:  # typed minutes replace the recipe's, but its epochs stay an upper bound
        values["num_train_epochs"] = most
    if lengths - {"max_minutes"} and 1 <= warmup < steps and typed_values.get("max_steps", 0) < steps:
        values["warmup_steps"] = warmup / steps  # a shorter run warms up for the same share of its steps
    has_other_length = {"num_train_epochs", "max_minutes"} & (typed_values.keys() | values.keys())
    if "max_steps" not in typed_values and has_other_length:
        values.setdefault("max_steps", None)


def _number(name: str, values: dict[str, Any]) -> float:
    """Return the value of an option, or its default."""
    return values[name] if isinstance(values.get(name), (int, float)) else getattr(TrainConfig, name)


def _read_number(path: Path, key: str, default: int) -> int:
    """Read a number from a JSON file. If that fails, return the default: opening the folder will explain why."""
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))[key])
    except (OSError, ValueError, KeyError, TypeError):
        return default
