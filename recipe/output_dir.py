"""The folder of a run: which one, whose it is, and one run in it at a time."""

import atexit
import fcntl
import itertools
import json
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import TextIO

from recipe.checkpoint import LATEST_NAME, list_checkpoints, remove_partial_checkpoints
from recipe.config import STANDARD_LIBRARY, TrainConfig, UserError, save_config
from recipe.data.text import name_of_text

METRICS_NAME = "metrics.jsonl"
SUMMARY_NAME = "summary.json"
CONFIG_NAME = "training_config.yaml"
LOCK_NAME = ".lock"


def choose_output_dir(config: TrainConfig, recipe: str) -> Path:
    """Name the run's folder, and lock it if it is there; nothing in it is changed.

    Without `output_dir` it is the first free one of runs/NAME, runs/NAME-2, ... Raises `UserError` if it holds another
    run, is in use or cannot be written.
    """
    resumed = config.resume_from_checkpoint
    if config.output_dir is None and resumed:  # a path: the run it belongs to
        directory = Path(resumed) if list_checkpoints(Path(resumed)) else Path(resumed).absolute().parent
    elif config.output_dir is None:
        text = config.train_file or [config.dataset_name if config.dataset_name != STANDARD_LIBRARY else None]
        name = config.run_name or (name_of_text(text[0]) if text[0] else recipe)
        numbered = (Path("runs") / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
        directory = next(path for path in numbered if not files_of_a_run(path))
    else:
        directory = Path(config.output_dir)
        leftovers = files_of_a_run(directory)
        there = directory.absolute()
        goes_on = resumed and there in (Path(resumed).absolute(), Path(resumed).absolute().parent)
        if resumed == "latest":
            goes_on = True
        elif resumed == "auto":  # also a run that ended before its first checkpoint, but not one that was finished
            finished = any((directory / name).exists() for name in (SUMMARY_NAME, "model.safetensors"))
            goes_on = bool(list_checkpoints(directory)) or not finished
        if leftovers and not (goes_on or config.overwrite):
            raise UserError(
                f"{directory} holds another run ({', '.join(p.name for p in leftovers[:3])}); "
                + ("go on with it (--resume_from_checkpoint auto), " if list_checkpoints(directory) else "")
                + "replace it (--overwrite), or name another --output_dir"
            )
        strangers = [name for name in ("README.md", "config.json", "dataset_dict.json") if (directory / name).exists()]
        if strangers and not (directory / CONFIG_NAME).exists():
            raise UserError(f"{directory} holds files that a run would replace ({', '.join(strangers)}); name another")
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):  # os.access does not know of read-only file systems, nor root
            pass
    except OSError as error:
        raise UserError(
            f"cannot write to output_dir {directory}: {existing} is not a writable folder ({error.strerror})"
        ) from error
    if directory.is_dir():
        lock_output_dir(directory)
    return directory


def files_of_a_run(directory: Path) -> list[Path]:
    """What shows that a folder holds a run, and what `--overwrite` removes from it."""
    names = (LATEST_NAME, "model.safetensors", METRICS_NAME, SUMMARY_NAME, CONFIG_NAME)
    return [*list_checkpoints(directory), *(directory / name for name in names if (directory / name).exists())]


def open_output_dir(directory: Path, config: TrainConfig, resumed: bool) -> None:
    """Create the run's folder; with `overwrite` remove another run's checkpoints and results, and nothing else.

    Raises `UserError` if another run has been there since `choose_output_dir`.
    """
    lock_output_dir(directory)
    if not (resumed or config.overwrite) and list_checkpoints(directory):
        raise UserError(f"another run has begun in {directory} by now; start again")
    for path in files_of_a_run(directory) if config.overwrite else []:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    remove_partial_checkpoints(directory)
    save_config(config, directory / f".{CONFIG_NAME}")
    os.replace(directory / f".{CONFIG_NAME}", directory / CONFIG_NAME)


_locks: dict[Path, TextIO] = {}  # of this process; the system gives them up when it ends, however it ends


def lock_output_dir(directory: Path) -> None:
    """Make the folder this process's until it ends. Raises `UserError` naming the process that has it."""
    key = directory.absolute()
    if key in _locks:
        return
    directory.mkdir(parents=True, exist_ok=True)
    file = open(directory / LOCK_NAME, "a+", encoding="utf-8")  # noqa: SIM115 (open for as long as the lock is held)
    file.seek(0)
    left = file.read()
    try:
        owner = json.loads(left)
        holder = f"process {owner['pid']} on {owner['host']}, since {owner['started_at']}"
    except (ValueError, KeyError, TypeError):
        holder = "another process"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise UserError(f"{directory} is in use by {holder}; wait for it, or name another --output_dir") from error
    except OSError as error:
        print(f"warning: {directory} cannot be locked ({error.strerror}): start one run in it only", flush=True)
    if left:
        print(f"the lock of {holder}, was left behind: that process is gone", flush=True)
    file.truncate(0)
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started_at": now}) + "\n")
    file.flush()
    _locks[key] = file
    atexit.register(release_output_dir, directory.absolute())


def release_output_dir(directory: Path) -> None:
    """Give the folder up: at the latest where the process ends by itself, so that a lock left over means a kill."""
    file = _locks.pop(directory.absolute(), None)
    if file is not None:
        file.truncate(0)  # not unlinked: another process may have opened it by now
        file.close()
