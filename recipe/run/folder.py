"""The output folder of a run: its name, its lock, and the command that resumes it."""

import functools
import itertools
import os
import shlex
import shutil
import sys
from pathlib import Path

from filelock import FileLock, Timeout

from recipe.arguments import typed_names
from recipe.checkpoint import CONFIG_NAME, list_checkpoints, record_config, remove_partial_checkpoints
from recipe.config import STANDARD_LIBRARY, TrainConfig
from recipe.data.source import name_of_text
from recipe.errors import UserError
from recipe.hardware.processes import LAUNCHERS
from recipe.publish.hub import DOWNLOAD_NAME
from recipe.publish.public import METRICS_NAME, SUMMARY_NAME

LOCK_NAME = ".lock"
RESUMABLE_NAME = ".resumable"  # exists while the run waits to be resumed: launchers turn every exit code into 1
RESULTS = ("model.safetensors", SUMMARY_NAME)


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
    resumed, there = config.resume_from_checkpoint, directory.absolute()
    resumes_here = bool(resumed) and there in (Path(resumed).absolute(), Path(resumed).absolute().parent)
    if resumed == "latest":
        resumes_here = True
    elif resumed and resumed.startswith("hf://"):  # again, after it ended before its first checkpoint here
        resumes_here = (directory / DOWNLOAD_NAME).is_dir() and not list_checkpoints(directory)
    elif resumed == "auto":  # also if the run ended before its first checkpoint, but not if it finished
        resumes_here = bool(list_checkpoints(directory)) or not any((directory / name).exists() for name in RESULTS)
    leftovers = files_of_a_run(directory)
    if leftovers and not resumes_here:
        resume = f"resume it ({resume_command(directory)}), " if list_checkpoints(directory) else ""
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
        text = Path(config.dataset_dir).absolute().name
    return recipe if text in (None, STANDARD_LIBRARY) else name_of_text(text)


def files_of_a_run(directory: Path) -> list[Path]:
    """Return what a run has left of value. One that ended before its first log line leaves an unused folder."""
    metrics = directory / METRICS_NAME
    logged = [metrics] if metrics.exists() and b'"event": "train"' in metrics.read_bytes() else []
    return [*list_checkpoints(directory), *(p for name in RESULTS if (p := directory / name).exists()), *logged]


def resume_command(directory: Path, checkpoint: str | Path = "auto", output_dir: Path | None = None) -> str:
    """Return the command that resumes the run in a folder, with this process's launcher options.

    output_dir: where to, if not into the same folder.
    """
    folder, start, target = (shlex.quote(str(path)) for path in (directory, checkpoint, output_dir or directory))
    command = f"{launch_command()} --resume_from_checkpoint {start} --config {folder}/{CONFIG_NAME}"
    # The consent is for this run, and not recorded.
    consent = " --hub_overwrite" * (output_dir is None and "hub_overwrite" in typed_names(sys.argv[1:]))
    return f"{command} --output_dir {target}{consent}"


def launch_command() -> str:
    """Return the command that started this process, without the script's own options."""
    try:  # on Linux; only the parent's command line holds the launcher's options
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode().split("\0")[:-1]
        launcher = next(i for i, word in enumerate(words) if Path(word).name in LAUNCHERS)
        script = next(i for i in range(launcher, len(words)) if words[i].endswith("train.py"))
        environment = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except (OSError, ValueError, StopIteration):
        has_launcher = not Path("/proc").is_dir() or "ACCELERATE_DYNAMO_BACKEND" in os.environ
        return f"{'accelerate launch' if has_launcher else 'python'} {shlex.quote(sys.argv[0])}"
    on_cpu = next((f"{text.decode()} " for text in environment if text.startswith(b"ACCELERATE_USE_CPU=")), "")
    return on_cpu + shlex.join(LAUNCHERS[Path(words[launcher]).name].split() + words[launcher + 1 : script + 1])


def open_output_dir(directory: Path, config: TrainConfig, resume_dir: Path | None) -> None:
    """Prepare the output folder for the run, which has passed all checks."""
    remove_partial_checkpoints(directory)
    (directory / RESUMABLE_NAME).unlink(missing_ok=True)
    record_config(directory, config)
    if resume_dir is not None and (resume_dir / METRICS_NAME).is_file():  # a download brings the log of its run
        shutil.copyfile(resume_dir / METRICS_NAME, directory / METRICS_NAME)
    else:
        shutil.rmtree(directory / DOWNLOAD_NAME, ignore_errors=True)


@functools.cache
def _lock_of(path: Path) -> FileLock:
    return FileLock(path)  # the system releases it however the process ends


def lock_output_dir(directory: Path) -> None:
    """Create and lock the folder until this process ends. Raises `UserError` if another process holds it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / LOCK_NAME).touch()
    except OSError as error:
        raise UserError(f"cannot write to output_dir {directory} ({error.strerror})") from error
    lock = _lock_of(directory.absolute() / LOCK_NAME)
    try:
        if not lock.is_locked:
            lock.acquire(blocking=False)
    except Timeout as error:
        remedy = "wait for it to end, or choose another --output_dir"
        raise UserError(f"{directory} is in use by another process; {remedy}") from error
    except (NotImplementedError, OSError) as error:  # some network file systems do not support locks
        print(f"warning: {directory} cannot be locked ({error}); make sure that no other run uses it", flush=True)


def release_output_dir(directory: Path) -> None:
    """Release the folder before this process ends."""
    _lock_of(directory.absolute() / LOCK_NAME).release(force=True)
