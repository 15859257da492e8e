"""What the command lines of all programs have in common."""

import argparse
import re
import shlex
import sys
from pathlib import Path

import pytest
from conftest import ROOT, run_script

from recipe.arguments import CommandLine, Store, as_path, shell_command
from recipe.command_line import parse_value
from recipe.config import KINDS, MAPPINGS, OPTIONS, PATHS
from recipe.data.files import find_files
from recipe.errors import UserError

SCRIPTS = sorted(path for path in ROOT.glob("scripts/**/*.py") if "CommandLine(" in path.read_text())
A_PATH = re.compile(
    r"(^|_)(dir|(?<!bad_)files?|path|model|inspect|config|peers|nanogpt|tasks|tokenizer_name|dataset_name)$"
)


@pytest.fixture
def actions(monkeypatch):
    """Return the parser of a program, and its options."""

    def find(path: Path) -> tuple[argparse.ArgumentParser, list[argparse.Action]]:
        found: list[argparse.ArgumentParser] = []

        def capture(self, *_):
            found.append(self)
            raise SystemExit

        for name in ("parse_args", "parse_with_run_options"):
            monkeypatch.setattr(CommandLine, name, capture)
        run_script(str(path.relative_to(ROOT)))
        return found[0], found[0]._actions

    return find


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_path_may_begin_in_the_home_folder_and_every_list_goes_on(path, actions, monkeypatch):
    monkeypatch.setenv("HOME", "/home/jo")
    parser, options = actions(path)
    paths = [option for option in options if A_PATH.search(option.dest)]
    assert paths
    for option in paths:
        for text in ("~/x", "$HOME/x", "${HOME}/x"):
            assert str(parser._get_value(option, text)) == "/home/jo/x", option.dest
    for option in options:
        assert option.nargs != "+" or isinstance(option, Store), option.dest


def test_the_options_of_a_run_that_are_paths():
    """All whose name says so; the others are text, of which `~` and `$HOME` are a part."""
    assert {name for name in OPTIONS if A_PATH.search(name)} <= PATHS
    texts = {name for name in OPTIONS.keys() - MAPPINGS.keys() if KINDS[name] is str}
    assert {name for name in texts if parse_value(name, "~/x") != "~/x"} == PATHS


@pytest.mark.parametrize("name", ["~", "~/a b", "$HOME/*.txt"])
def test_a_home_folder_that_nobody_knows(name, monkeypatch):
    monkeypatch.setattr("os.path.expanduser", lambda text: text)
    with pytest.raises(UserError, match="is unknown; set HOME, or write the whole path"):
        as_path(name)


@pytest.mark.parametrize(("encoding", "is_taken"), [("utf-8", True), ("ascii", False), ("iso8859-1", False)])
def test_a_path_that_other_libraries_would_spell_in_another_way(monkeypatch, encoding, is_taken):
    """tokenizers and pyarrow take a path for UTF-8 (0.23, 25). A path in ASCII is the same everywhere."""
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: encoding)
    assert as_path("runs/a") == "runs/a"
    if is_taken:
        assert as_path("läufe/a") == "läufe/a"
    else:
        with pytest.raises(UserError, match=r"the path 'l\\xe4ufe/a' is not safe in this locale; set PYTHONUTF8=1"):
            as_path("läufe/a")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--text ---", {"text": "---", "list": ["z"]}),
        ("--text -Hello --list a", {"text": "-Hello", "list": ["a"]}),
        ("--text=--list", {"text": "--list", "list": ["z"]}),
        ("--number -5", {"number": -5.0, "list": ["z"]}),
        ("--list -a b --list=-c", {"list": ["-a", "b", "-c"]}),
        ("--text --list", "--text: expected one argument; a value that begins with a dash is written --text=VALUE"),
        ("--text --tetx x", "--text: expected one argument; a value that begins with a dash is written --text=VALUE"),
        ("--list --text a", "--list: expected at least one argument; a value that begins with a dash is written --"),
        ("--text a -b", "unknown option --b; --help lists all options"),
        ("--list a -text b", "unknown option --text"),
    ],
)
def test_a_value_that_begins_with_a_dash(argv, expected):
    """It is taken, unless it is or looks like the name of an option."""
    parser = CommandLine()
    parser.add_argument("--text", default=argparse.SUPPRESS)
    parser.add_argument("--number", type=float, default=argparse.SUPPRESS)
    parser.add_argument("--list", nargs="+", default=["z"])
    if isinstance(expected, dict):
        assert vars(parser.parse_args(argv.split())) == expected
    else:
        with pytest.raises(UserError, match=f"^{re.escape(expected)}"):
            parser.parse_args(argv.split())


@pytest.mark.parametrize("default", [None, [], ["z"], argparse.SUPPRESS])
def test_a_list_that_is_given_twice_goes_on(default):
    """What is typed replaces the default."""
    parser = CommandLine()
    parser.add_argument("--list", nargs="+", default=default)
    for _ in range(2):
        assert parser.parse_args(["--list", "a", "b", "--list", "c"]).list == ["a", "b", "c"]
    assert vars(parser.parse_args([])) == ({} if default is argparse.SUPPRESS else {"list": default})


def test_a_bracket_in_a_pattern_is_named(tmp_path):
    (tmp_path / "corpus [v2]").mkdir()
    (tmp_path / "corpus [v2]" / "a.txt").write_text("the cat")
    with pytest.raises(UserError, match=r"in a pattern, \[ starts a set of characters, so write \[\[\] for"):
        find_files([str(tmp_path / "corpus [v2]" / "*.txt")])
    assert find_files([str(tmp_path / "corpus [[]v2]" / "*.txt")]).paths == [str(tmp_path / "corpus [v2]" / "a.txt")]


@pytest.mark.parametrize("value", ["a b", "-Hello", "it's", "$HOME", "*.txt", "", "ü"])
def test_a_printed_command_is_read_as_it_was_meant(value):
    words = shlex.split(shell_command("python", "a.py", value, dataset_dir=value, overwrite=True))
    parser = argparse.ArgumentParser()
    parser.add_argument("--dataset_dir")
    parser.add_argument("--overwrite", action="store_true")
    assert words[:3] == ["python", "a.py", value]
    assert vars(parser.parse_args(words[3:])) == {"dataset_dir": value, "overwrite": True}
