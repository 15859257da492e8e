"""What the tests of the Hub share: a run of four steps with two checkpoints, its uploads, and what has arrived."""

import re
from pathlib import Path

from hub_repository import File

from recipe.command_line import load_config
from recipe.publish.uploads import HubUploads

REPO = "someone/tiny"
PUSH = ["--push_to_hub", "--hub_model_id", REPO]
SAVE = ["--save_steps", "2"]
STATE = ["--hub_strategy", "checkpoint"]
BRANCHES = ["step-000002-0.3k-aaaaaa", "step-000004-0.5k-aaaaaa"]  # of `open_uploads`


def open_uploads(run: Path, *options: str, run_id: str = "a" * 12) -> HubUploads:
    """Return what a run with this id has staged for its upload at its end."""
    config = load_config(["--config", str(run / "training_config.yaml"), *PUSH, *options]).config
    uploads = HubUploads(config, run_id, run, print, keeps_all=True)
    log = run / "metrics.jsonl"
    log.write_text(re.sub(r'"run_id": "\w+"', f'"run_id": "{run_id}"', log.read_text()))
    for step in (2, 4):
        uploads.add(run / f"checkpoint-{step}", step)
    return uploads


def branches_of(hub, repo: str = REPO) -> list[str]:
    return sorted(set(hub.branches(repo)) - {"main"})


def put(hub, name: str, content: bytes = b"mine", branch: str = "main") -> None:
    """Put a file on a branch as Git does, unchecked."""
    repository = hub.repositories[REPO]
    files = repository.files(branch) | {name: File(content, large=False)}
    repository.write_commit(branch, repository.branches[branch], "", files)


def files_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
