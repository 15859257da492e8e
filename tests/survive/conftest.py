"""Fixtures of the tests that lose a part of a run: runs to damage, and the state of this process."""

import shutil
import signal
from pathlib import Path

import pytest

from recipe.checkpoint import CheckpointSaver
from recipe.hardware.processes import LAUNCHER_DIED
from recipe.run.stop import SIGNALS


@pytest.fixture(autouse=True)
def no_ignored_signals():
    """In the background or under nohup, pytest inherits ignored signals; the runs must not."""
    handlers = {number: signal.getsignal(number) for number in (*SIGNALS, LAUNCHER_DIED)}
    for number in [number for number, handler in handlers.items() if handler == signal.SIG_IGN]:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def finished(four_steps, tmp_path) -> Path:
    """A copy of that run, in the folder that `train` uses."""
    return shutil.copytree(four_steps, tmp_path / "run", ignore=shutil.ignore_patterns(".lock"))


@pytest.fixture
def saves_at_once(monkeypatch):
    """Let a run wait for each checkpoint, as if it had been killed later. A real kill ends the thread that writes."""
    save = CheckpointSaver.save

    def save_and_wait(self, state):
        save(self, state)
        self.wait()

    monkeypatch.setattr(CheckpointSaver, "save", save_and_wait)


@pytest.fixture
def job_file(tmp_path, monkeypatch) -> Path:
    """The file by which a job script is told that its command would continue the run."""
    monkeypatch.setenv("RESUMABLE_FILE", str(tmp_path / "resumable"))
    return tmp_path / "resumable"
