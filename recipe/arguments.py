"""The command line of the scripts, and hints for names of other programs. Imports neither torch nor transformers."""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from recipe.config import LISTS, OPTIONS, PATHS
from recipe.errors import UserError, did_you_mean

# Names of TrainingArguments, run_clm.py and nanoGPT that this program spells in another way.
OTHER_NAMES = {
    "mixed_precision": "dtype",
    "eval_steps": "do_eval eval_strategy evaluation_strategy eval_interval",
    "max_eval_samples": "eval_iters",
    "save_steps": "save_strategy",
    "logging_steps": "log_interval",
    "dynamo_backend": "torch_compile torch_compile_backend compile",
    "max_steps": "max_iters lr_decay_iters max_train_samples do_train",
    "num_train_epochs": "num_epochs",
    "warmup_steps": "warmup_ratio",
    "block_size": "max_seq_length seq_len",
    "per_device_train_batch_size": "batch_size train_batch_size per_device_eval_batch_size",
    "learning_rate": "lr",
    "lr_scheduler_kwargs": "min_lr decay_lr",
    "config_overrides": "config_name dropout n_layer n_head n_embd",
    "model_name_or_path": "model init_from",
    "resume_from_checkpoint": "resume",
    "output_dir": "logging_dir out_dir",
    "max_grad_norm": "grad_clip",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "report_to": "wandb wandb_log",
}
OTHER_NAMES = {name: f"use --{option}" for option, names in OTHER_NAMES.items() for name in names.split()}
OTHER_NAMES |= dict.fromkeys(("eval_only", "do_predict"), "use scripts/evaluate_model.py")
OTHER_NAMES |= dict.fromkeys(("no_cuda", "use_cpu", "device"), "the launcher decides: accelerate launch --cpu")
OTHER_NAMES |= dict.fromkeys(("torch_compile_mode", "dynamo_mode"), "pass --dynamo_mode to accelerate launch")
OTHER_NAMES |= dict.fromkeys(("fsdp", "deepspeed"), "the launcher decides: see accelerate_configs/fsdp.yaml")
OTHER_NAMES |= dict.fromkeys(("overwrite", "overwrite_output_dir"), "delete the folder, or pass another --output_dir")
OTHER_NAMES["hub_token"] = "log in with `hf auth login` or set HF_TOKEN; never put a token on a command line"
LONG_OPTION = re.compile(r"^--[a-zA-Z][\w-]*(?==|$)")
HOME = re.compile(r"(^|(?<=[=,]))(~|[$]HOME|[$]{HOME})(?=/|$)")  # also in hellaswag=~/a.jsonl


class Store(argparse._StoreAction):
    """Stores a value in place of the default. If a list or mapping is typed twice, the second extends the first."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest, self.default)  # none yet, if the default is SUPPRESS
        if before is not self.default and isinstance(values, (list, dict)):
            values = [*before, *values] if isinstance(values, list) else before | values
        setattr(namespace, self.dest, values)


class CommandLine(argparse.ArgumentParser):
    """The parser of a script. It raises `UserError` for mistakes.

    It accepts `--max-steps` for `--max_steps`, joins a list that is typed twice, and expands `~` and `$HOME` in every
    option whose type is `Path` or `as_path`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        self.register("type", Path, lambda text: Path(as_path(text)))
        self.register("action", None, Store)

    def parse_args(
        self, args: list[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        words = underscored(sys.argv[1:] if args is None else args)
        parsed, unknown = self.parse_known_args(words, namespace or argparse.Namespace())
        if unknown:
            raise UserError(unknown_option(unknown[0], [action.dest for action in self._actions]))
        return parsed

    def _parse_optional(self, arg_string: str) -> Any:
        # argparse would take every word that begins with a dash for an option, but `---` and `-Hello` are values.
        known = self._option_string_actions
        is_option = arg_string in known or f"-{arg_string}" in known or LONG_OPTION.match(arg_string)
        return super()._parse_optional(arg_string) if is_option else None

    def add_run_options(self, names: Iterable[str], **kwargs: Any) -> None:
        """Add options of recipe/train.py with their defaults and help. kwargs: for `add_argument`, override them."""
        for name in names:
            default, text = OPTIONS[name].default, OPTIONS[name].metadata["help"].replace("%", "%%")
            reader = as_path if name in PATHS else float if isinstance(default, float) else str
            kind: dict[str, Any] = {"type": reader} | ({"nargs": "+"} if name in LISTS else {})
            if isinstance(default, bool) or OPTIONS[name].metadata.get("const") is True:
                kind = {"action": "store_true"}
            self.add_argument(f"--{name}", **{"default": default, "help": text, **kind, **kwargs})

    def parse_with_run_options(self) -> tuple[argparse.Namespace, list[str]]:
        """Return the script's options, and recipe/train.py's as typed. Raises `UserError` for any other."""
        args, options = self.parse_known_args(underscored(sys.argv[1:]))
        for text in options:
            if (name := LONG_OPTION.match(text)) and name[0][2:] not in OPTIONS:
                raise UserError(unknown_option(text, [*vars(args), *OPTIONS]))
        return args, options

    def error(self, message: str) -> None:
        text = re.sub(r"^argument (--\w+)[^:]*: ", r"\1: ", message)
        if text.endswith(("expected one argument", "expected at least one argument")):
            text += f"; a value that begins with a dash is written {text.partition(':')[0]}=VALUE"
        raise UserError(text)


def as_path(text: str) -> str:
    """Expand `~` and `$HOME` in a path, a pattern, or a name that may be a path.

    Raises `UserError` if the home folder is unknown, or if this locale would make libraries disagree on the path.
    """
    if HOME.search(text):
        if (home := os.path.expanduser("~")) == "~":
            raise UserError(f"the home folder in {text} is unknown; set HOME, or write the whole path")
        text = HOME.sub(lambda _: home.rstrip("/"), text) or "/"
    if not text.isascii() and sys.getfilesystemencoding() != "utf-8":
        raise UserError(f"the path {ascii(text)} is not safe in this locale; set PYTHONUTF8=1")
    return text


def underscored(argv: list[str]) -> list[str]:
    """`--max-steps=5` -> `--max_steps=5`; values stay as they are."""
    return [LONG_OPTION.sub(lambda name: "--" + name[0][2:].replace("-", "_"), text) for text in argv]


def shell_command(*words: object, **options: object) -> str:
    """Return a command, or the end of one, as a shell reads it. options: {name: value}; True is the option alone."""
    for name, value in options.items():
        joined = value is True or str(value).startswith("-")  # argparse takes such a value for an option
        words += (f"--{name}" + f"={value}" * (value is not True),) if joined else (f"--{name}", value)
    return shlex.join(map(str, words))


def typed_names(argv: list[str]) -> set[str]:
    """Return the names of the options on a command line: `["--max-steps=5"]` -> {"max_steps"}."""
    return {text[2:].partition("=")[0] for text in underscored(argv) if text.startswith("--")}


def unknown_option(option: str, names: list[str]) -> str:
    """Return the message for an option that does not exist."""
    if not option.startswith("-"):
        hint = "join several values with commas: n_layer=2,n_head=2" if "=" in option else ""
        return f"unexpected argument '{option}'; {hint or 'pass text as --train_file and a recipe as --config'}"
    name = option.lstrip("-").split("=")[0].replace("-", "_")
    if (answer := OTHER_NAMES.get(name)) and "config_overrides" in names:
        return f"unknown option --{name}; {answer}"
    return f"unknown option --{name}; {did_you_mean(name, names, '--')}"
