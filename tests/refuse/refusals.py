"""What all refusals have in common: one line that names the cause, and nothing is written."""

import shlex
from pathlib import Path
from unittest import mock

from helpers import run_script


def check_refusal(command: str, names: str) -> None:
    """Run a program in the current folder, which exits with one printable line that contains each of these words.

    The files stay as they were, except hidden ones: locks, and units of text that are done.
    """
    before = visible_files()
    trains = mock.patch("recipe.run.stop.StopSignals", side_effect=AssertionError("the run was not refused"))
    with trains, mock.patch("gc.collect"):  # which takes 0.1 s for each run
        error = run_script(*shlex.split(command))
    assert error.startswith("error: ") and error.isprintable(), error
    assert [name for name in names.split() if name not in error] == [], error
    assert visible_files() == before


def visible_files() -> dict[Path, tuple[int, int]]:
    """Return the size and the time of each file that is not hidden."""
    paths = (path for path in Path().rglob("*") if path.is_file())
    states = {path: path.stat() for path in paths if not any(part.startswith(".") for part in path.parts)}
    return {path: (state.st_size, state.st_mtime_ns) for path, state in states.items()}
