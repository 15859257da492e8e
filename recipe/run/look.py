"""What a run meets when it starts: its processes and device, folders and checkpoints, and the Hub.

Nothing but the lock of the folder changes. recipe/run/decide.py says what the facts are and what follows from them.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from yaml import YAMLError

from recipe.arguments import typed_names
from recipe.checkpoint import (
    MANIFEST_NAME,
    STATE_NAME,
    checkpoint_dir,
    checkpoint_step,
    list_checkpoints,
    read_state,
    why_damaged,
)
from recipe.config import CONFIG_NAME, STANDARD_LIBRARY, TrainConfig
from recipe.data.source import name_of_text
from recipe.errors import UserError
from recipe.hardware.accelerator import list_trackers
from recipe.hardware.choices import Machine
from recipe.metrics import CARD_NAME, METRICS_NAME, SUMMARY_NAME, read_events, with_nan
from recipe.model.weights import CONFIG_JSON, WEIGHTS_NAME
from recipe.publish.download import find_on_hub
from recipe.publish.hub import DOWNLOAD_NAME, look_at_hub
from recipe.publish.public import read_options
from recipe.run.decide import ORIGIN_NAME, Checkpoint, Folder, Named, Surroundings, resumes_from_its_repository
from recipe.run.folder import lock_output_dir

REPLACED = (CARD_NAME, CONFIG_JSON, WEIGHTS_NAME, "metadata.json")


def look(requested: TrainConfig, path: Path, machine: Machine) -> Surroundings:
    """Return all facts that decide how the run starts. Call it on the main process.

    path: of the output folder, which is locked. machine: of all processes. Raises `UserError` if the Hub does not say
    whether it has the checkpoint to resume from.
    """
    main_branch = look_at_hub(requested)
    folder = look_at_folder(path)
    named = look_at_named(requested, folder)
    return Surroundings(
        machine=machine,
        folder=folder,
        named=named,
        checkpoints=tuple(look_at_checkpoints(requested, folder, named)),
        main_branch=main_branch,
        trackers=tuple(list_trackers()),
        typed_options=frozenset(typed_names(sys.argv[1:])),
    )


def claim_folder(requested: TrainConfig, recipe: str) -> Path:
    """Lock the output folder: the typed one, the checkpoint's, or the first unused of runs/NAME, runs/NAME-2, ...

    Raises `UserError` if another process holds the lock.
    """
    text = requested.resume_from_checkpoint
    path = Path(requested.output_dir) if requested.output_dir is not None else None
    if path is None and text and not text.startswith("hf://"):
        path = find_run_folder(Path(text))
    if path is None:
        name = requested.run_name or default_name(requested, recipe)
        number = 1
        while True:
            path = Path("runs", f"{name}-{number}" if number > 1 else name)
            found = look_at_folder(path)
            if not found.left and not found.steps and lock_output_dir(path):
                return path
            number += 1
    if not lock_output_dir(path):
        raise UserError(f"{path} is in use by another process; wait for it to end, or choose another --output_dir")
    return path


def find_run_folder(path: Path) -> Path | None:
    """Return the folder of the run to which a path belongs: a run's folder, or a checkpoint inside it."""
    if list_checkpoints(path):
        return path
    checkpoint = Path(os.path.realpath(path))
    with contextlib.suppress(UserError):  # no checkpoint, or a damaged one
        run_id = read_state(checkpoint).state.run_id
        if any(event.get("run_id") == run_id for event in read_events(checkpoint.parent)):
            return checkpoint.parent
    return None


def default_name(requested: TrainConfig, recipe: str) -> str:
    """Name a run after the user's text, or else after its recipe."""
    text = requested.train_file[0] if requested.train_file else requested.dataset_name
    if text is None and recipe == "demo":  # the demo's options on a packed dataset are not the demo
        text = "-".join(Path(directory).absolute().name for directory in requested.dataset_dir or ())
    return recipe if text in (None, STANDARD_LIBRARY) else name_of_text(text)


def look_at_folder(path: Path) -> Folder:
    """Return what is in an output folder, which need not exist."""
    metrics = path / METRICS_NAME
    origin = path / ORIGIN_NAME
    checkpoints = list_checkpoints(path)
    is_of_a_run = bool(checkpoints) or (path / CONFIG_NAME).exists()
    left = [name for name in (SUMMARY_NAME, WEIGHTS_NAME) if (path / name).exists()]
    if metrics.is_file() and b'"event": "train"' in metrics.read_bytes():
        left.append(METRICS_NAME)
    began_with = origin.read_text().strip() if origin.is_file() else None
    return Folder(
        path=path,
        place=os.path.realpath(path),
        steps=tuple(map(checkpoint_step, checkpoints)),
        left=tuple(left),
        has_ended=SUMMARY_NAME in left,
        replaced=() if is_of_a_run else tuple(name for name in REPLACED if (path / name).exists()),
        origin=began_with if began_with is None or began_with.startswith("hf://") else os.path.realpath(began_with),
    )


def look_at_named(requested: TrainConfig, folder: Folder) -> Named | None:
    """Return what the command names, or, for `auto` in a folder without checkpoints, the origin of its run."""
    text = requested.resume_from_checkpoint
    if text == "auto":
        text = None if folder.steps else folder.origin
    if text is None or text.startswith("hf://"):
        return Named(text, text) if text else None
    path = Path(text)
    beside = tuple(checkpoint_step(other) for other in list_checkpoints(path.parent) if other.name != path.name)
    return Named(text, os.path.realpath(text), not path.exists(), beside)


def look_at_checkpoints(requested: TrainConfig, folder: Folder, named: Named | None) -> Iterator[Checkpoint]:
    """Verify the checkpoints to begin with, newest first, and yield each. Stop at the first intact one."""
    if requested.resume_from_checkpoint is None:
        return
    is_on_hub = named.text.startswith("hf://") if named else resumes_from_its_repository(requested)
    if is_on_hub and not folder.steps:
        if published := find_on_hub(requested, named.text if named else None):
            repo_id, branch, state = published
            saved = read_state(state.parent)
            path = checkpoint_dir(folder.path / DOWNLOAD_NAME, saved.state.step)
            yield Checkpoint(path, None, saved, repo_id=repo_id, branch=branch)
        return
    paths: list[tuple[Path, Path]] = []  # where each is, and where it will be after an interrupted save is cleaned up
    if folder.steps:
        paths = [(path, checkpoint_dir(folder.path, checkpoint_step(path))) for path in list_checkpoints(folder.path)]
    elif named is not None and not named.is_gone:
        path = Path(named.text)
        found = list_checkpoints(path)
        if not found and any((path / name).is_file() for name in (STATE_NAME, MANIFEST_NAME)):
            found = [path]
        paths = [(path, path) for path in found]
    for path, name in reversed(paths):
        fault = why_damaged(path)
        if fault is None:
            yield Checkpoint(name, None, read_state(path), read_recorded_options(path.parent))
            return
        yield Checkpoint(name, fault)


def read_recorded_options(folder: Path) -> dict[str, Any]:
    """Return the options in a run's folder; {} if there are none, or none that can be read."""
    with contextlib.suppress(YAMLError, ValueError):
        return dict(read_options(folder))
    return {}


def read_evaluations(folder: Path) -> dict[int, dict[str, Any]]:
    """Return {step: evaluation with its sample} from the log of a run, which need not repeat these."""
    events = read_events(folder)
    texts = {event["step"]: event["text"] for event in events if event["event"] == "sample"}
    evaluations = [with_nan(event) for event in events if event["event"] == "eval"]
    numbers = ("loss", "perplexity", "seconds", "num_rows")
    evaluations = [event for event in evaluations if all(isinstance(event.get(key), (int, float)) for key in numbers)]
    return {event["step"]: event | {"sample": texts.get(event["step"])} for event in evaluations}
