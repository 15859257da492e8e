"""Resume from a checkpoint on the Hub: `hf://user/name@step-000400-0.8M-3f9a1c`."""

import shutil
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError

from recipe.checkpoint import STATE_NAME, why_damaged
from recipe.config import ADDRESS, TrainConfig
from recipe.errors import UserError
from recipe.metrics import METRICS_NAME
from recipe.publish.hub import (
    MODEL_FILES,
    TRAINING_FILES,
    check_repo_id,
    checkpoints_of,
    hub_reason,
    list_branches,
    prepare_client,
    read_main,
)


def find_on_hub(config: TrainConfig, address: str | None) -> tuple[str, str, Path] | None:
    """Return the repository, branch and downloaded training state of the checkpoint to resume from, or None.

    address: `hf://user/name` stands for the newest resumable checkpoint of the run on main. None: the newest one that
    the run itself has published, if any, so a job that is submitted again to a fresh machine resumes. Raises
    `UserError` if the checkpoint does not exist or cannot be read.
    """
    repo_id = config.hub_model_id or ""
    revision = None
    if address is not None:
        if (parts := ADDRESS.fullmatch(address)) is None:
            raise UserError(f"{address} is no address of a checkpoint; expected hf://user/name@BRANCH")
        repo_id, revision = parts.groups()
    check_repo_id(repo_id)
    if constants.is_offline_mode():
        raise UserError(f"{repo_id} cannot be reached in offline mode; unset HF_HUB_OFFLINE")
    prepare_client()
    try:
        is_there = revision is not None and HfApi().file_exists(repo_id, STATE_NAME, revision=revision)
        branch = revision if is_there else _newest(repo_id)
        if branch is not None and revision in (None, branch):
            return repo_id, branch, Path(hf_hub_download(repo_id, STATE_NAME, revision=branch))
    except RepositoryNotFoundError as error:
        if address is not None:
            raise UserError(f"there is no repository {repo_id} on the Hub, or the token may not read it") from error
        return None
    except Exception as error:  # no connection, ...: the client passes on the errors of several libraries
        raise _unreadable(error, address is None) from error
    if address is None:
        return None
    what = f"revision {revision} of {repo_id}" if revision else f"the run on the main branch of {repo_id}"
    newest = f"; the newest that can be resumed is hf://{repo_id}@{branch}" if branch else ""
    raise UserError(f"{what} has no training state on the Hub (--hub_strategy checkpoint publishes it){newest}")


def _unreadable(error: Exception, is_auto: bool) -> UserError:
    remedy = "run it again, or without --push_to_hub" if is_auto else "run the same command again"
    return UserError(f"the checkpoint on the Hub cannot be read ({hub_reason(error)}); {remedy}")


def _newest(repo_id: str) -> str | None:
    """Return the newest branch of the run on main that can be resumed, or None.

    If main holds no run, as after a job that ended before it published a model there, any run's branch will do.
    """
    branches = checkpoints_of(read_main(repo_id).run_id, list_branches(repo_id))
    return next((name for name in reversed(branches) if HfApi().file_exists(repo_id, STATE_NAME, revision=name)), None)


def download_checkpoint(repo_id: str, revision: str, folder: Path, is_auto: bool) -> None:
    """Download a checkpoint and the run's log, except for files that an earlier attempt has downloaded.

    folder: hidden in output_dir, which stays free for another run if this one refuses the checkpoint. Raises
    `UserError` if the checkpoint is damaged or cannot be read.
    """
    names = [*MODEL_FILES, *TRAINING_FILES, METRICS_NAME]
    try:
        snapshot_download(repo_id, revision=revision, allow_patterns=names, local_dir=folder)
    except Exception as error:  # no connection, a full disk, ...: the client passes on the errors of several libraries
        raise _unreadable(error, is_auto) from error
    if (reason := why_damaged(folder)) is not None:
        shutil.rmtree(folder)
        raise UserError(f"revision {revision} of {repo_id} is damaged on the Hub: {reason}")
