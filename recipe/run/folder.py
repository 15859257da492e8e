"""The output folder of a run: claimed with a lock, and released."""

import json
import os
from pathlib import Path

from filelock import FileLock, Timeout

from recipe.disk import lock, write_file
from recipe.errors import UserError

LOCK_NAME = ".lock"
LOCKS: dict[Path, FileLock] = {}  # that this process holds; the system releases them however it ends


def lock_output_dir(directory: Path) -> bool:
    """Create and lock the folder. Returns False if another process holds it."""
    path = Path(os.path.realpath(directory)) / LOCK_NAME
    if path in LOCKS:
        return True
    try:
        directory.mkdir(parents=True, exist_ok=True)
        held = lock(path, blocking=False)
    except Timeout:
        return False
    except OSError as error:
        raise UserError(f"cannot write to output_dir {directory} ({error.strerror})") from error
    if held is not None:
        LOCKS[path] = held
    return True


def release_output_dirs() -> None:
    """Release the folders that this process holds."""
    while LOCKS:
        LOCKS.popitem()[1].release(force=True)


def drop_events_after(path: Path, step: int) -> None:
    """Remove the events after the checkpoint that a run resumes from: they will be logged again."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):  # cut off by a kill or a full disk
            continue
    write_file(path, "".join(kept))
