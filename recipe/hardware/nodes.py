"""What the machines of one run must have in common: the output folder, the options and the data."""

import time
import uuid
from pathlib import Path

from accelerate import PartialState

from recipe.environment import count_local_processes
from recipe.errors import UserError
from recipe.hardware.processes import gather, on_all_processes, on_main_process

SHARED_FOLDER_SECONDS = 60.0  # a client of NFS may not see a new file for this long (acdirmax in nfs(5))


def check_shared(directory: Path) -> None:
    """Raise `UserError` if the machines of a run do not share the folder, which need not exist yet.

    The main process briefly writes a file there, or into the first parent that exists, and the others look for it.
    """
    num_processes = PartialState().num_processes
    if count_local_processes(num_processes) == num_processes:
        return
    name = gather(f".shared-{uuid.uuid4().hex}")[0]

    def write() -> Path:
        marker = next(path for path in (directory, *directory.parents) if path.is_dir()) / name
        marker.touch()
        return marker

    def look_for(marker: Path) -> None:
        given_up_at = time.monotonic() + SHARED_FOLDER_SECONDS
        while not marker.exists():
            if time.monotonic() > given_up_at:
                folder = f"{directory.absolute()} is not the main process's folder"
                raise UserError(f"{folder}; pass an --output_dir on a file system that all machines mount")
            time.sleep(0.2)

    marker = on_main_process(write)
    try:
        on_all_processes(lambda: look_for(marker))
    finally:
        if PartialState().is_main_process:
            marker.unlink(missing_ok=True)


def check_same_run(identity: dict) -> None:
    """Raise `UserError` if the processes were started with different options or data. identity: `run_identity`."""
    main, *others = gather(identity)
    for rank, other in enumerate(others, start=1):
        if different := [key for key in main if other.get(key) != main[key]]:
            listed = "; ".join(f"{key} {main[key]!r} and {other.get(key)!r}" for key in different)
            remedy = "run the same command on the same data on each machine"
            raise UserError(f"process 0 and process {rank} differ in {listed}; {remedy}")
