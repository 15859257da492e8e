"""The folder of a run: which one, whose it is, and one run in it at a time."""

import atexit
import fcntl
import itertools
import json
import os
import shlex
import shutil
import socket
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import TextIO

from recipe.checkpoint.load import LATEST_NAME, list_checkpoints, remove_partial_checkpoints
from recipe.checkpoint.save import CONFIG_NAME, record_config
from recipe.config import STANDARD_LIBRARY, TrainConfig
from recipe.data.text import name_of_text
from recipe.errors import UserError

METRICS_NAME = "metrics.jsonl"
SUMMARY_NAME = "summary.json"
LOCK_NAME = ".lock"
TRACKER_ID_NAME = ".tracker_id"
LAUNCHERS = {  # how they are found in a command line, and how they are typed
    "accelerate": "accelerate",
    "accelerate-launch": "accelerate launch",
    "accelerate.commands.launch": "accelerate launch",
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
}


def choose_output_dir(config: TrainConfig, recipe: str) -> Path:
    """Name the run's folder, and lock it if it is there; nothing in it is changed.

    Without `output_dir` it is the first free one of runs/NAME, runs/NAME-2, ... Raises `UserError` if it holds another
    run, is in use or cannot be written.
    """
    resumed = config.resume_from_checkpoint
    if config.eval_only:  # which writes nothing
        return Path(config.output_dir or resumed or ".")
    if config.output_dir is None and resumed:  # a path: the run it belongs to
        directory = Path(resumed) if list_checkpoints(Path(resumed)) else Path(resumed).absolute().parent
    elif config.output_dir is None:
        name = config.run_name or _default_name(config, recipe)
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
            resume = f"resume it ({resume_command(directory)}), " if list_checkpoints(directory) else ""
            raise UserError(
                f"{directory} holds another run ({', '.join(p.name for p in leftovers[:3])}); {resume}"
                "replace it (--overwrite), or name another --output_dir"
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


def _default_name(config: TrainConfig, recipe: str) -> str:
    """The name of the user's own text, else that of the recipe."""
    text = config.train_file[0] if config.train_file else config.dataset_name
    if text is None and recipe == "demo":  # a packed dataset under the demo's options is not the demo
        text = Path(config.dataset_dir).absolute().name
    return recipe if text in (None, STANDARD_LIBRARY) else name_of_text(text)


def resume_command(directory: Path) -> str:
    """What resumes the run in a folder, with the launcher's options as they are in this process."""
    folder = shlex.quote(str(directory))
    return f"{launch_command()} --resume_from_checkpoint auto --config {folder}/{CONFIG_NAME} --output_dir {folder}"


def launch_command() -> str:
    """The command that started this process, up to the script's own options."""
    try:  # Linux; the launcher is the parent, and nothing else tells with which options it was called
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode().split("\0")[:-1]
        launcher, name = next((i, LAUNCHERS[Path(word).name]) for i, word in enumerate(words)
                              if Path(word).name in LAUNCHERS)  # fmt: skip
        script = next(i for i in range(launcher, len(words)) if words[i].endswith("train.py"))
        environment = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except (OSError, ValueError, StopIteration):
        by_hand = Path("/proc").is_dir() and "ACCELERATE_DYNAMO_BACKEND" not in os.environ
        return f"{'python' if by_hand else 'accelerate launch'} {shlex.quote(sys.argv[0])}"
    on_cpu = next((f"{text.decode()} " for text in environment if text.startswith(b"ACCELERATE_USE_CPU=")), "")
    return on_cpu + shlex.join([*name.split(), *words[launcher + 1 : script + 1]])


def tracker_id(directory: Path) -> str:
    """The id under which trackers know the run in a folder: the same for every sitting."""
    path = directory / TRACKER_ID_NAME
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:12] + "\n")
    return path.read_text().strip()


def files_of_a_run(directory: Path) -> list[Path]:
    """What shows that a folder holds a run, and what `--overwrite` removes from it.

    A run that ended before its first log line has left nothing that anyone could miss: its folder counts as free.
    """
    names = (LATEST_NAME, "model.safetensors", METRICS_NAME, SUMMARY_NAME, CONFIG_NAME, TRACKER_ID_NAME)
    files = [*list_checkpoints(directory), *(directory / name for name in names if (directory / name).exists())]
    results = [path for path in files if path.name not in (CONFIG_NAME, TRACKER_ID_NAME, METRICS_NAME)]
    metrics = directory / METRICS_NAME
    has_trained = metrics.exists() and b'"event": "train"' in metrics.read_bytes()
    return files if results or has_trained else []


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
    record_config(directory, config)


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
        if left:
            print(f"taking over the lock of {holder}: that process is gone", flush=True)
    except BlockingIOError as error:
        file.close()
        raise UserError(f"{directory} is in use by {holder}; wait for it, or name another --output_dir") from error
    except OSError as error:  # some network file systems have no locks: whether the holder lives cannot be known
        last = f"; the last to use it was {holder}" if left else ""
        print(
            f"warning: {directory} cannot be locked ({error.strerror}){last}: make sure that no other run uses it",
            flush=True,
        )
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
