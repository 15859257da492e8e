"""What a run meets when it starts: its processes and device, folders and checkpoints, and the Hub.

Looking changes nothing. recipe/run/decide.py says what the facts are and what follows from them.
"""

import contextlib
import dataclasses
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import Timeout

from recipe.arguments import typed_names
from recipe.checkpoint import (
    BEST_NAME,
    MANIFEST_NAME,
    STATE_NAME,
    VALUES_NAME,
    checkpoint_dir,
    checkpoint_step,
    list_checkpoints,
    read_state,
    why_damaged,
)
from recipe.config import CONFIG_NAME, STANDARD_LIBRARY, TrainConfig
from recipe.data.source import name_of_text
from recipe.disk import lock
from recipe.errors import UserError
from recipe.hardware.accelerator import list_trackers
from recipe.hardware.choices import Facts
from recipe.metrics import METRICS_NAME, SUMMARY_NAME, read_events, with_nan
from recipe.publish.download import find_on_hub
from recipe.publish.hub import DOWNLOAD_NAME, look_at_hub
from recipe.run.decide import ORIGIN_NAME, Checkpoint, Folder, NamedCheckpoint, Surroundings, choose_source
from recipe.run.folder import LOCK_NAME, LOCKS

RESULTS = ("model.safetensors", SUMMARY_NAME)
REPLACED = ("README.md", "config.json", "dataset_dict.json", BEST_NAME)


def look(requested: TrainConfig, recipe: str, facts: Facts) -> Surroundings:
    """Return all facts that decide how the run starts. Call it on the main process. facts: of all processes.

    Raises `UserError` if the Hub does not say whether it has the checkpoint to resume from.
    """
    main_branch = look_at_hub(requested)
    folder = find_folder(requested, recipe)
    named = look_at_named(requested, folder)
    return Surroundings(
        facts=facts,
        folder=folder,
        named=named,
        checkpoints=tuple(look_at_checkpoints(requested, folder, named)),
        main_branch=main_branch,
        trackers=tuple(list_trackers()),
        typed_options=frozenset(typed_names(sys.argv[1:])),
    )


def find_folder(requested: TrainConfig, recipe: str) -> Folder:
    """Return the output folder: the typed one, the checkpoint's, or the first unused of runs/NAME, runs/NAME-2, ..."""
    named = requested.resume_from_checkpoint
    if requested.output_dir is not None:
        return look_at_folder(Path(requested.output_dir))
    if named and not named.startswith("hf://"):
        return look_at_folder(Path(named) if list_checkpoints(Path(named)) else Path(os.path.realpath(named)).parent)
    name = requested.run_name or default_name(requested, recipe)
    numbered = (Path("runs", f"{name}-{number}" if number > 1 else name) for number in itertools.count(1))
    return look_at_folder(next(path for path in numbered if not (read_folder(path).leftovers or is_in_use(path))))


def default_name(requested: TrainConfig, recipe: str) -> str:
    """Name a run after the user's text, or else after its recipe."""
    text = requested.train_file[0] if requested.train_file else requested.dataset_name
    if text is None and recipe == "demo":  # the demo's options on a packed dataset are not the demo
        text = "-".join(Path(directory).absolute().name for directory in requested.dataset_dir or ())
    return recipe if text in (None, STANDARD_LIBRARY) else name_of_text(text)


def look_at_folder(path: Path) -> Folder:
    """Return what is known of an output folder, which need not exist."""
    return dataclasses.replace(read_folder(path), in_use=is_in_use(path))


def read_folder(path: Path) -> Folder:
    """Return what is in an output folder."""
    metrics, origin, checkpoints = path / METRICS_NAME, path / ORIGIN_NAME, list_checkpoints(path)
    is_of_a_run = (path / CONFIG_NAME).exists()
    began_with = origin.read_text().strip() if origin.is_file() else None
    return Folder(
        path=path,
        place=os.path.realpath(path),
        steps=tuple(map(checkpoint_step, checkpoints)),
        run_id=_run_id(checkpoints[-1]) if checkpoints else None,
        results=tuple(name for name in RESULTS if (path / name).exists()),
        logs=(METRICS_NAME,) if metrics.is_file() and b'"event": "train"' in metrics.read_bytes() else (),
        replaced=() if is_of_a_run else tuple(name for name in REPLACED if (path / name).exists()),
        origin=began_with if began_with is None or began_with.startswith("hf://") else os.path.realpath(began_with),
    )


def is_in_use(path: Path) -> bool:
    """Return whether another process holds the lock of a folder."""
    path = Path(os.path.realpath(path)) / LOCK_NAME
    if path in LOCKS or not path.exists():
        return False
    try:
        file_lock = lock(path, blocking=False)
    except Timeout:
        return True
    except OSError:  # not writable, as locking the folder will say
        return False
    if file_lock is not None:
        file_lock.release()
    return False


def look_at_named(requested: TrainConfig, folder: Folder) -> NamedCheckpoint | None:
    """Return the checkpoint that the command names, or, for `auto`, the one that the folder's run began with."""
    text = requested.resume_from_checkpoint
    if text == "auto" and not folder.steps:
        text = folder.origin
    if text in (None, "auto", "latest"):
        return None
    if text.startswith("hf://"):
        return NamedCheckpoint(text, text)
    path, place = Path(text), os.path.realpath(text)
    if (path / VALUES_NAME).is_file():
        remedy = "start from it with --model_name_or_path, or resume from a checkpoint"
        raise UserError(f"{text} is the best model of a run, without a training state; {remedy}")
    if checkpoints := list_checkpoints(path):
        return NamedCheckpoint(text, place, place, tuple(map(checkpoint_step, checkpoints)), _run_id(checkpoints[-1]))
    if any((path / name).is_file() for name in (STATE_NAME, MANIFEST_NAME)):
        with contextlib.suppress(UserError):  # `look_at_checkpoints` says what is wrong
            state = read_state(path).state
            return NamedCheckpoint(text, place, os.path.dirname(place), (state.step,), state.run_id)
        return NamedCheckpoint(text, place, os.path.dirname(place), (0,))
    beside = tuple(checkpoint_step(other) for other in list_checkpoints(path.parent) if other.name != path.name)
    return NamedCheckpoint(text, place, os.path.dirname(place), beside=beside, is_gone=not path.exists())


def look_at_checkpoints(requested: TrainConfig, folder: Folder, named: NamedCheckpoint | None) -> Iterator[Checkpoint]:
    """Verify the checkpoints to resume from, newest first, and yield each. Stop at the first intact one."""
    try:
        source = choose_source(requested, folder, named)
    except UserError:  # `decide_start` raises it again
        return
    if folder.in_use:
        return
    if source == "hub":
        if published := find_on_hub(requested, named.text if named else None):
            repo_id, branch, state = published
            saved = read_state(state.parent)
            path = checkpoint_dir(folder.path / DOWNLOAD_NAME, int(saved.state.step))
            yield Checkpoint(path, None, saved, repo_id, branch)
        return
    paths: list[tuple[Path, Path]] = []  # where each is, and its name after `clean_checkpoints`
    if source == "own":
        paths = [(path, checkpoint_dir(folder.path, checkpoint_step(path))) for path in list_checkpoints(folder.path)]
    elif source == "named" and named is not None and named.steps:
        path = Path(named.text)
        paths = [(path, path) for path in list_checkpoints(path) or [path]]
    for path, name in reversed(paths):
        if (fault := why_damaged(path)) is None:
            yield Checkpoint(name, None, read_state(path))
            return
        yield Checkpoint(name, fault)


def _run_id(checkpoint: Path) -> str | None:
    with contextlib.suppress(UserError):  # damaged
        return read_state(checkpoint).state.run_id
    return None


def read_evaluations(folder: Path) -> dict[int, dict[str, Any]]:
    """Return {step: evaluation with its sample} from the log of a run, which need not repeat these."""
    events = read_events(folder)
    texts = {event["step"]: event["text"] for event in events if event["event"] == "sample"}
    evaluations = (with_nan(event) for event in events if event["event"] == "eval")
    return {event["step"]: event | {"sample": texts.get(event["step"])} for event in evaluations}
