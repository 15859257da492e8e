"""Command line and recipe file -> `TrainConfig`.

Defaults < recipe YAML < command line. A value means the same in a recipe and on the command line. This module imports
neither torch nor transformers, so programs without them start at once.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from recipe.arguments import CommandLine, ScalarLoader, as_path, find_other_name, read_value
from recipe.config import (
    ADDRESS,
    ALIASES,
    CONFIG_NAME,
    DATA_SOURCES,
    DEFAULTS,
    LENGTHS,
    LISTS,
    MAPPINGS,
    OPTIONS,
    TEXT_OPTIONS,
    TrainConfig,
    check_value,
    is_missing,
    may_come_from_hub,
    require,
)
from recipe.errors import UserError, did_you_mean, one_line, quote, short_reason
from recipe.launcher import count_processes

CONFIGS_DIR = Path(__file__).parent / "configs"
RECIPES = sorted(path.stem for path in CONFIGS_DIR.glob("*.yaml"))
# What a recipe chose together: a typed value that differs from the recipe's removes what it chose for its own.
CHOSEN_FOR = {
    **dict.fromkeys(DATA_SOURCES, (*DATA_SOURCES, *TEXT_OPTIONS, "dataset_weights", "max_eval_samples")),
    "streaming": ("num_train_epochs",),  # a stream does not know its epochs
    "model_type": ("config_overrides", "expected_loss"),
    "model_name_or_path": ("config_overrides", "tokenizer_vocab_size", "expected_loss"),
    "tokenizer_name": ("tokenizer_vocab_size", "expected_loss"),
    "tokenizer_vocab_size": ("tokenizer_name", "expected_loss"),
    **dict.fromkeys(("config_overrides", "block_size"), ("expected_loss",)),
    "max_steps": ("num_train_epochs", "max_minutes"),
    "num_train_epochs": ("max_steps", "max_minutes"),
    "max_minutes": ("max_steps",),  # the recipe's epochs stay an upper bound
    "optim": ("learning_rate", "weight_decay", "expected_loss"),
    "lr_scheduler_type": ("lr_scheduler_kwargs",),
}


class TextLoader(yaml.SafeLoader):
    """Reads every value as text, except `null` and merge keys: `no` is not a boolean, and 007 is not a number."""


TextLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class Request(NamedTuple):
    """What a user asks for."""

    config: TrainConfig
    recipe: str  # its name
    notes: list[str]  # what a typed option means for values of the recipe


def load_config(argv: list[str] | None = None) -> Request:
    """Parse the command line on top of the recipe that `--config NAME|FILE.yaml|hf://user/name` names.

    The default recipe is gpt2_finetune for a model of one's own (`--model_name_or_path`), else demo. Raises
    `UserError`. `--help` exits.
    """
    usage = "accelerate launch recipe/train.py [--config NAME|FILE] [--OPTION VALUE]"
    style = argparse.ArgumentDefaultsHelpFormatter
    parser = CommandLine(prog="recipe/train.py", usage=usage, formatter_class=style)
    known = f"Recipe: {', '.join(RECIPES)}, a YAML file, or a published run: hf://user/name."
    parser.add_argument("--config", metavar="NAME|FILE|hf://ID", type=as_path, default=argparse.SUPPRESS, help=known)
    parser.add_run_options(OPTIONS, default=argparse.SUPPRESS)
    words = sys.argv[1:] if argv is None else argv
    typed = vars(parser.parse_args([word for word in words if word not in ("-h", "--help")]))
    recipe = typed.pop("config", None) or ("gpt2_finetune" if "model_name_or_path" in typed else "demo")
    values = load_yaml(recipe)
    if {"-h", "--help"} & {*words}:
        shown = DEFAULTS | {"config": recipe, **values}
        parser.set_defaults(**{name: value for name, value in shown.items() if value is not None})
        parser.print_help()
        parser.exit()
    values, notes = merge(values, unified(typed))
    missing = [name for name, value in values.items() if is_missing(value)]
    if missing:
        count = len(values["dataset_dir"]) if "dataset_dir" in missing else 1
        how = f" ({count} datasets, in the order of its card)" if count > 1 else ""
        raise UserError(f"the author of {recipe} had this only locally; pass your own --{', --'.join(missing)}{how}")
    path = Path(recipe)
    # training_config.yaml represents the run in its folder, and an address the run in its repository.
    name = path.absolute().parent.name if path.name == CONFIG_NAME else path.stem
    if address := ADDRESS.fullmatch(recipe):
        name = address[1].rpartition("/")[2]
    return Request(TrainConfig(**values), name, notes)


def merge(recipe: dict[str, Any], typed: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the recipe's values and the typed ones, by `CHOSEN_FOR`, and notes. Raises `UserError`.

    Besides, config_overrides join, a run of another length warms up for the same share of it, unless it has more
    steps, and the positions of a model bound the length of rows.
    """
    values = dict(recipe)
    notes = []
    own: dict[str, Any] = {**DEFAULTS, "model_type": "gpt2", **recipe}

    def is_other(name: str) -> bool:
        before = own[name]
        now = typed.get(name)
        if now is None or is_missing(before):  # "???" asks for a value
            return False
        if name in DATA_SOURCES and recipe.keys().isdisjoint(DATA_SOURCES):  # a recipe for any text
            return False
        if name == "optim":
            return family(now) != family(before)
        return now != before or name in LENGTHS  # six typed epochs are not six in the recipe's minutes

    for name in filter(is_other, CHOSEN_FOR):
        for chosen in CHOSEN_FOR[name]:
            values.pop(chosen, None)
    steps = own["max_steps"] or 0
    warmup = own["warmup_steps"]
    if "max_steps" in typed and (typed["max_steps"] or 0) < steps and 1 <= warmup < steps:
        values["warmup_steps"] = warmup / steps
    values |= typed

    overrides = own["config_overrides"] or {}
    if is_other("model_type") or is_other("model_name_or_path"):
        overrides = {key: value for key, value in overrides.items() if key.endswith(("_pdrop", "dropout"))}
    values["config_overrides"] = overrides | typed.get("config_overrides", {}) or None

    rate = own["learning_rate"]
    decay = own["weight_decay"]
    default = DEFAULTS["weight_decay"]
    optim = values.get("optim", DEFAULTS["optim"])
    chosen_for = own["optim"] if is_other("optim") else DEFAULTS["optim"]
    if family(optim) != family(chosen_for):
        need = f"optim {optim} needs its own rate; pass --learning_rate ({rate:g} was chosen for {chosen_for})"
        require("learning_rate" in values, need)
        if "weight_decay" not in values and decay != default:
            notes.append(f"weight_decay is {default:g}, the default, because {decay:g} was chosen for {chosen_for}")
    before = width_of(own["config_overrides"] or {})
    now = width_of(values["config_overrides"] or {})
    if None not in (before, now) and before != now and "learning_rate" in recipe.keys() - typed.keys():
        notes.append(f"learning_rate {rate:g} was chosen for a width of {before}, not {now}; wider needs a lower rate")

    for other in ("tokenizer_name", "dataset_dir", "model_name_or_path"):
        problem = f"--tokenizer_vocab_size trains a tokenizer, but --{other} has one; pass only one of them"
        require(not {"tokenizer_vocab_size", other} <= typed.keys(), problem)
    if "model_name_or_path" in typed and "block_size" not in typed:
        values["block_size"] = min([own["block_size"], *read_positions(typed["model_name_or_path"])])
    return values, notes


def width_of(overrides: dict[str, Any]) -> Any:
    return overrides.get("n_embd", overrides.get("hidden_size"))


def family(optim: str) -> str:
    """The AdamWs are one, because a learning rate of one suits them all."""
    return optim.partition("_")[0]


def read_positions(folder: str) -> list[int]:
    """Return the number of positions of a model in a folder; [] if it does not say, which loading it will explain."""
    try:
        config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        return [config[name] for name in ("n_positions", "max_position_embeddings") if type(config.get(name)) is int]
    except (OSError, ValueError, AttributeError):
        return []


def unified(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a recipe, or of a command line, under our names.

    If they set a length, max_steps is among them; None is no limit, and so is Trainer's -1. As in Trainer, micro-batch
    and accumulation make the global batch. Raises `UserError` for a value that an option cannot have, and if two of
    them set the same.
    """
    own: dict[str, Any] = {}
    for alias, value in values.items():
        name = ALIASES.get(alias, alias)
        names = [other for other in values if ALIASES.get(other, other) == name]
        require(names == [alias], f"{' and '.join(names)} set the same option; keep only one of them")
        if (name, value) != ("max_steps", -1):
            check_value(name, value)
            own[name] = value
    steps = own.get("max_steps")
    epochs = own.get("num_train_epochs")
    problem = "max_steps and num_train_epochs both set the length of the run; keep only one of them"
    require(not (steps and epochs), problem)
    if not own.keys().isdisjoint(LENGTHS):
        own["max_steps"] = steps
    rows = own.get("per_device_train_batch_size")
    times = own.get("gradient_accumulation_steps")
    if isinstance(rows, int) and times and "global_batch_size" not in own:
        # Accumulation is derived from it, also when the run resumes on other devices.
        own |= {"global_batch_size": rows * times * count_processes(), "gradient_accumulation_steps": None}
    return own


def load_yaml(recipe: str) -> dict[str, Any]:
    """Read a recipe by name (`gpt2_124m`), path, or address of a published run (`hf://user/name`).

    Values are the text in the file, not what YAML makes of `no` or 007. Raises `UserError` unless the file is a
    mapping of known options to values that they can have.
    """
    is_file = recipe.lower().endswith((".yaml", ".yml"))
    path = Path(recipe) if is_file else CONFIGS_DIR / f"{recipe}.yaml"
    if address := ADDRESS.fullmatch(recipe):
        path = fetch_recipe(*address.groups())
    if not path.is_file():
        hint = did_you_mean(path.stem, RECIPES, otherwise="pass a .yaml file, or a recipe")
        what = "recipe file" if is_file else "recipe"
        raise UserError(f"there is no {what} '{recipe}'; {hint} (recipes: {', '.join(RECIPES)})")
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.load(text, TextLoader)
        typed = yaml.load(text, ScalarLoader)
    except Exception as error:  # PyYAML's constructors raise any
        raise UserError(f"{recipe} is not valid YAML: {one_line(error)!r}") from error
    require(isinstance(content, dict), f"{recipe} must contain a mapping of options to values")
    try:
        for name in map(str, content):
            if name not in OPTIONS.keys() | ALIASES.keys():
                raise UserError(f"unknown key {name!r}; {find_other_name(name) or did_you_mean(name, OPTIONS)}")
        refused = [name for name in content if not may_come_from_hub(ALIASES.get(name) or name, content[name])]
        require(
            not (address and refused),
            f"a recipe from the Hub may set neither private options nor paths (nor names that are folders here), but "
            f"it sets {', '.join(refused)}; read its {CONFIG_NAME}, and pass a copy of it as --config",
        )
        return unified({name: read_yaml(name, value, typed.get(name)) for name, value in content.items()})
    except UserError as error:
        raise UserError(f"{recipe}: {error}") from error


def read_yaml(name: str, value: Any, typed: Any) -> Any:
    """Convert an option of a recipe. value: its text. typed: the same as YAML types it. Raises `UserError`."""
    if value is None or (isinstance(value, dict) and name in MAPPINGS):
        return typed
    items = value if isinstance(value, list) and name in LISTS else [value]
    what = "a list of single values" if name in LISTS else "a single value"
    require(all(isinstance(item, str) for item in items), f"{name} must be {what}, got {quote(typed)}")
    values = [read_value(name, str(item)) for item in items]
    return values if name in LISTS else values[0]


def fetch_recipe(repo_id: str, revision: str | None) -> Path:
    """Download the recipe of a published run. Raises `UserError` if that fails."""
    from huggingface_hub import hf_hub_download  # no other recipe needs it

    where = f"{repo_id}, revision {revision}" if revision else repo_id
    try:
        return Path(hf_hub_download(repo_id, CONFIG_NAME, revision=revision))
    except Exception as error:  # no connection, offline mode, a bad name, ...: each library raises its own
        raise UserError(f"cannot read the training_config.yaml of {where}: {short_reason(error)}") from error
