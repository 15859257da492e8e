"""The output folder of a run: its name, its lock, and what it may hold when the run starts."""

import itertools
import shutil
from pathlib import Path

from filelock import FileLock, Timeout

from recipe.arguments import shell_command
from recipe.checkpoint import clean_checkpoints, list_checkpoints, record_config
from recipe.config import CONFIG_NAME, STANDARD_LIBRARY, TrainConfig
from recipe.data.source import name_of_text
from recipe.disk import lock
from recipe.errors import UserError
from recipe.publish.hub import DOWNLOAD_NAME
from recipe.publish.public import METRICS_NAME, SUMMARY_NAME
from recipe.run.resume import choose_start, origin_of, read_origin

LOCK_NAME = ".lock"
RESULTS = ("model.safetensors", SUMMARY_NAME)
LOCKS: dict[Path, FileLock] = {}  # that this process holds; the system releases them however it ends


def choose_output_dir(config: TrainConfig, recipe: str) -> Path:
    """Choose the output folder, and lock it; nothing else in it changes.

    Without `output_dir` it is the checkpoint's folder, or the first unused of runs/NAME, runs/NAME-2, ... Raises
    `UserError` if the folder holds another run, is in use, or cannot be written.
    """
    resumed = config.resume_from_checkpoint
    if config.output_dir is None and resumed and not resumed.startswith("hf://"):
        directory = Path(resumed) if list_checkpoints(Path(resumed)) else Path(resumed).absolute().parent
    elif config.output_dir is None:
        name = config.run_name or _default_name(config, recipe)
        numbered = (Path("runs") / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
        directory = next(path for path in numbered if _is_unused(path))
    else:
        directory = Path(config.output_dir)
    lock_output_dir(directory)
    clean_checkpoints(directory)
    _check_contents(directory, config)
    return directory


def _is_unused(directory: Path) -> bool:
    """Return whether a folder holds no run, not even one that has just started; lock it if so."""
    if files_of_a_run(directory):
        return False
    try:
        lock_output_dir(directory)
    except UserError:  # another process uses it
        if not directory.is_dir():
            raise
        return False
    return True


def _check_contents(directory: Path, config: TrainConfig) -> None:
    """Raise `UserError` if the folder holds another run, or other files that a run would replace."""
    named = config.resume_from_checkpoint
    # Also a run that ended before its first checkpoint, but not one that finished: its model could be anyone's.
    is_same = named is not None and (named == "auto" or read_origin(directory) == origin_of(config))
    is_same = is_same and not any((directory / name).exists() for name in RESULTS)
    leftovers = files_of_a_run(directory)
    if leftovers and not is_same and choose_start(config, directory) != "latest":
        options = {"config": directory / CONFIG_NAME, "output_dir": directory, "resume_from_checkpoint": "auto"}
        resume = shell_command(**options)
        resume = f"resume it ({resume}), " if list_checkpoints(directory) else ""
        raise UserError(
            f"{directory} contains another run ({', '.join(path.name for path in leftovers[:3])}); {resume}"
            "delete the folder, or choose another --output_dir"
        )
    foreign = [name for name in ("README.md", "config.json", "dataset_dict.json") if (directory / name).exists()]
    if foreign and not (directory / CONFIG_NAME).exists():
        raise UserError(
            f"{directory} contains files that a run would replace ({', '.join(foreign)}); choose another --output_dir"
        )


def _default_name(config: TrainConfig, recipe: str) -> str:
    """Name a run after the user's text, or else after its recipe."""
    text = config.train_file[0] if config.train_file else config.dataset_name
    if text is None and recipe == "demo":  # the demo's options on a packed dataset are not the demo
        text = "-".join(Path(directory).absolute().name for directory in config.dataset_dir)
    return recipe if text in (None, STANDARD_LIBRARY) else name_of_text(text)


def files_of_a_run(directory: Path) -> list[Path]:
    """Return what a run has left of value. One that ended before its first log line leaves an unused folder."""
    metrics = directory / METRICS_NAME
    logged = [metrics] if metrics.exists() and b'"event": "train"' in metrics.read_bytes() else []
    return [*list_checkpoints(directory), *(p for name in RESULTS if (p := directory / name).exists()), *logged]


def open_output_dir(directory: Path, config: TrainConfig, resume_dir: Path | None) -> None:
    """Prepare the output folder for the run, which has passed all checks. config: as typed."""
    record_config(directory, config)
    if resume_dir is not None and (resume_dir / METRICS_NAME).is_file():  # a download brings the log of its run
        shutil.copyfile(resume_dir / METRICS_NAME, directory / METRICS_NAME)
    else:
        shutil.rmtree(directory / DOWNLOAD_NAME, ignore_errors=True)


def lock_output_dir(directory: Path) -> None:
    """Create and lock the folder. Raises `UserError` if another process holds it."""
    path = directory.absolute() / LOCK_NAME
    if path in LOCKS:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        held = lock(path, blocking=False)
    except Timeout as error:
        remedy = "wait for it to end, or choose another --output_dir"
        raise UserError(f"{directory} is in use by another process; {remedy}") from error
    except OSError as error:
        raise UserError(f"cannot write to output_dir {directory} ({error.strerror})") from error
    if held is not None:
        LOCKS[path] = held


def release_output_dirs() -> None:
    """Release the folders that this process holds."""
    while LOCKS:
        LOCKS.popitem()[1].release(force=True)
