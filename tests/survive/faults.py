"""What the tests of this folder share: faults to plant, and what a run has left."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

from recipe.checkpoint import list_checkpoints

AUTO = ["--resume_from_checkpoint", "auto"]
RESULTS = ("model.safetensors", "summary.json", "README.md")


def at_call(patch, owner: object, name: str, number: int, act: Callable[[], object]) -> list:
    """Do something before the nth call of a function of a module, or of a method of a class.

    patch: a monkeypatch. Returns a list that grows with each call.
    """
    original = getattr(owner, name)
    calls = []

    def call(*arguments, **options):
        calls.append(arguments)
        if len(calls) == number:
            act()
        return original(*arguments, **options)

    patch.setattr(owner, name, call)
    return calls


def send(name: str = "SIGTERM") -> None:
    """Send this process a signal."""
    os.kill(os.getpid(), signal.Signals[name])


def die() -> None:
    """End a run as abruptly as a test in the same process can."""
    raise KeyboardInterrupt


def fail_with(number: int) -> Callable:
    """Return a function that fails as a system call does."""

    def call(*arguments, **options):
        raise OSError(number, os.strerror(number))

    return call


def change_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def last_step(run: Path) -> int:
    """Return the last step in the log, whose last line may be cut off."""
    log = run / "metrics.jsonl"
    steps = re.findall(r'^{"event": "train", "step": (\d+)', log.read_text(), re.MULTILINE) if log.is_file() else []
    return int(steps[-1]) if steps else 0


def name_checkpoints(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder)]
