"""The command line of the programs, and how a value is read. Imports neither torch nor transformers."""

import argparse
import functools
import os
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from recipe.config import ALIASES, CHOICES, DEFAULTS, KINDS, LISTS, MAPPINGS, OPTIONS, PATHS
from recipe.errors import UserError, did_you_mean
from recipe.launcher import FALSE, TRUE

OTHER_NAMES = Path(__file__).parent / "other_names.yaml"  # of options, in other programs
TRUTH: dict[str, bool] = dict.fromkeys(TRUE, True) | dict.fromkeys(FALSE, False)  # in any case
LONG_OPTION = re.compile(r"^--[a-zA-Z][\w-]*(?==|$)")
SHOWN_CHOICES = 60  # characters in the line of an option in --help; more are in its text
HOME = re.compile(r"(^|(?<=[=,]))(~|[$]HOME|[$]{HOME})(?=/|$)")  # also in hellaswag=~/a.jsonl


class ScalarLoader(yaml.SafeLoader):
    """Reads YAML 1.1 with numbers such as 1e-5, which it would take for text."""


ScalarLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$"), list("-+.0123456789")
)


class Store(argparse.Action):
    """Stores a value in place of the default. If a list or mapping is typed twice, the second extends the first."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest, self.default)  # none yet, if the default is SUPPRESS
        if before is not self.default and isinstance(values, (list, dict)):
            values = [*before, *values] if isinstance(values, list) else before | values
        setattr(namespace, self.dest, values)


class CommandLine(argparse.ArgumentParser):
    """The parser of a program. It raises `UserError` for mistakes.

    It accepts `--max-steps` for `--max_steps`, joins a list that is typed twice, and expands `~` and `$HOME` in every
    option whose type is `Path` or `as_path`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        self.register("type", Path, lambda text: Path(as_path(text)))
        self.register("action", None, Store)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            raise UserError(unknown_option(unknown[0], [action.dest for action in self._actions]))
        return parsed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(underscored(sys.argv[1:] if args is None else args), namespace)

    def _parse_optional(self, arg_string: str) -> Any:
        # argparse would take every word that begins with a dash for an option, but `---` and `-Hello` are values.
        known = self._option_string_actions
        is_option = arg_string in known or f"-{arg_string}" in known or LONG_OPTION.match(arg_string)
        return super()._parse_optional(arg_string) if is_option else None

    def add_run_options(self, names: Iterable[str], **kwargs: Any) -> None:
        """Add options of recipe/train.py with their defaults and help. kwargs: for `add_argument`, override them.

        With all options, --help has sections, and a switch may take a BOOL; in a script, that could be an argument.
        """
        names = list(names)
        is_whole = names == list(OPTIONS)
        group = self
        for name in names:
            marks = OPTIONS[name].metadata
            kind = KINDS[name]
            choices = CHOICES[name]
            if is_whole and "section" in marks:
                group = self.add_argument_group(marks["section"])
            text = marks["help"].replace("%", "%%")
            shown = f"{{{','.join(choices)}}}" if choices else "VALUE"
            shown = {bool: "BOOL", int: "N", float: "N"}.get(kind, shown)
            if len(shown) > SHOWN_CHOICES:
                shown = "NAME"
                text += f" One of {', '.join(choices)}."
            reads: dict[str, Any] = {"type": functools.partial(read_value, name), "metavar": shown}
            if name in LISTS:
                reads["nargs"] = "+"
            elif kind is bool and not is_whole:
                reads = {"action": "store_true"}
            elif kind is bool or "alone" in marks:
                reads |= {"nargs": "?", "const": marks.get("alone", True)}
            reads = {"default": DEFAULTS[name], "help": text, **reads, **kwargs}
            group.add_argument(f"--{name}", **reads)
            aliases = marks.get("aliases", {}) if is_whole else {}
            for alias, (_, value) in aliases.items():
                group.add_argument(
                    f"--{alias}",
                    type=functools.partial(read_value, alias),
                    nargs="?",
                    const="true",
                    metavar="BOOL",
                    default=argparse.SUPPRESS,
                    help=f"Sets {name} to {value}.",
                )

    def parse_with_run_options(self) -> tuple[argparse.Namespace, list[str]]:
        """Return the script's options, and recipe/train.py's as typed. Raises `UserError` for any other."""
        args, options = self.parse_known_args()
        for text in options:
            name = LONG_OPTION.match(text)
            if name and name[0][2:] not in OPTIONS.keys() | ALIASES.keys():
                raise UserError(unknown_option(text, [*vars(args), *OPTIONS]))
        return args, options

    def error(self, message: str) -> None:
        text = re.sub(r"^argument (--\w+)[^:]*: ", r"\1: ", message)
        if text.endswith(("expected one argument", "expected at least one argument")):
            text += f"; a value that begins with a dash is written {text.partition(':')[0]}=VALUE"
        raise UserError(text)


def read_value(name: str, text: str) -> Any:
    """Convert the text of a value, wherever it is written, to the option's type: `off` is False, "no" or "false".

    Raises `UserError` for a mapping or a path that cannot be read. Any other text that is not a value of the option is
    returned as it is, and refused when the options are checked.
    """
    truth = TRUTH.get(text.lower())
    if name in ALIASES:
        if truth is None:
            raise UserError(f"{name} must be true or false, got {text!r}")
        return OPTIONS[ALIASES[name]].metadata["aliases"][name][truth]
    if name in PATHS:
        return as_path(text)
    if name in MAPPINGS:
        return read_mapping(name, text)
    for choice in CHOICES[name]:
        if choice == text.lower() or (truth is not None and TRUTH.get(choice) is truth):
            return choice
    kind = KINDS[name]
    if kind is bool:
        return text if truth is None else truth
    try:
        return kind(text)
    except ValueError:
        return text


def read_mapping(name: str, text: str) -> dict[str, Any]:
    """Parse JSON or `n_layer=4,n_embd=128`, whose values are YAML scalars. Raises `UserError`."""
    is_json = text.lstrip().startswith("{")
    try:  # JSON is YAML, and so are pairs after this replacement
        value = yaml.load(text if is_json else "{" + text.replace("=", ": ") + "}", ScalarLoader)
    except Exception:  # PyYAML's constructors raise any
        value = None
    if not isinstance(value, dict) or not (is_json or all("=" in pair for pair in text.split(","))):
        example = OPTIONS[name].metadata.get("example", "NAME=VALUE")
        raise UserError(f"{name} must look like {example} or be a JSON object, got {text!r}")
    return value


def as_path(text: str) -> str:
    """Expand `~` and `$HOME` in a path, a pattern, or a name that may be a path.

    Raises `UserError` if the home folder is unknown.
    """
    if HOME.search(text):
        home = os.path.expanduser("~")
        if home == "~":
            raise UserError(f"the home folder in {text} is unknown; set HOME, or write the whole path")
        text = HOME.sub(lambda _: home.rstrip("/"), text) or "/"
    return text


def underscored(argv: list[str]) -> list[str]:
    """`--max-steps=5` -> `--max_steps=5`; values stay as they are."""
    return [LONG_OPTION.sub(lambda name: "--" + name[0][2:].replace("-", "_"), text) for text in argv]


def shell_command(*words: object, **options: object) -> str:
    """Return a command, or the end of one, as a shell reads it. options: {name: value}; True is the option alone."""
    for name, value in options.items():
        if value is True:
            words += (f"--{name}",)
        elif str(value).startswith("-"):  # argparse takes such a value for an option
            words += (f"--{name}={value}",)
        else:
            words += (f"--{name}", value)
    return shlex.join(map(str, words))


def typed_names(argv: list[str]) -> set[str]:
    """Return the names of the options on a command line: `["--max-steps=5"]` -> {"max_steps"}."""
    return {text[2:].partition("=")[0] for text in underscored(argv) if text.startswith("--")}


def unknown_option(option: str, names: list[str]) -> str:
    """Return the message for an option that does not exist."""
    is_whole = "config_overrides" in names  # the options of recipe/train.py
    if not option.startswith("-"):
        hint = "pass text as --train_file and a recipe as --config" if is_whole else "--help lists all options"
        if "=" in option:
            hint = "join several values with commas: n_layer=2,n_head=2"
        return f"unexpected argument '{option}'; {hint}"
    name = option.lstrip("-").split("=")[0].replace("-", "_")
    answer = find_other_name(name) if is_whole else None
    return f"unknown option --{name}; {answer or did_you_mean(name, names, '--')}"


def find_other_name(name: str) -> str | None:
    """Return what to use instead of an option of another program, or None."""
    answers = yaml.safe_load(OTHER_NAMES.read_text(encoding="utf-8"))
    return next((answer for answer, others in answers.items() if name in others.split()), None)
