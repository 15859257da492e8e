"""Resume from a checkpoint on the Hub: `hf://user/name@step-000400-0.8M-3f9a1c`."""

import json
import shutil
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError

from recipe.checkpoint import STATE_NAME, checkpoint_dir, why_damaged
from recipe.config import ADDRESS, TrainConfig
from recipe.errors import UserError
from recipe.publish.hub import (
    DOWNLOAD_NAME,
    MODEL_FILES,
    TRAINING_FILES,
    check_repo_id,
    checkpoints_of,
    hub_reason,
    list_branches,
    prepare_client,
    publishes_training_state,
    read_main,
)
from recipe.publish.public import METRICS_NAME


def fetch_checkpoint(config: TrainConfig, resume: str | None, output_dir: Path) -> str | None:
    """Download the checkpoint to resume from, if it is on the Hub, into a hidden folder of output_dir.

    resume: from `choose_start`. `hf://user/name` is the newest checkpoint, of the run on main, that can be resumed.
    `auto`, which means that output_dir has none, looks on the Hub if the run publishes its training state there, so a
    job that is submitted again to a fresh machine resumes; `hub_overwrite` makes that a new run. Returns the argument
    for `find_checkpoint`. Raises `UserError` if the checkpoint cannot be had.
    """
    if resume is not None and resume.startswith("hf://"):
        if (address := ADDRESS.fullmatch(resume)) is None:
            raise UserError(f"{resume} is no address of a checkpoint; expected hf://user/name@BRANCH")
        repo_id, revision = address.groups()
    elif resume == "auto" and publishes_training_state(config) and not config.hub_overwrite:
        repo_id, revision = config.hub_model_id, None
    else:
        return resume
    check_repo_id(repo_id)
    if constants.is_offline_mode():
        raise UserError(f"{repo_id} cannot be reached in offline mode; unset HF_HUB_OFFLINE")
    prepare_client()
    try:
        is_there = revision is not None and HfApi().file_exists(repo_id, STATE_NAME, revision=revision)
        found = revision if is_there else _newest(repo_id)
        if found is not None and revision in (None, found):
            print(f"resuming from {repo_id}, revision {found}, on the Hub", flush=True)
            return str(_download(repo_id, found, output_dir))
    except RepositoryNotFoundError as error:
        if resume != "auto":
            raise UserError(f"there is no repository {repo_id} on the Hub, or the token may not read it") from error
    except UserError:
        raise
    except Exception as error:  # no connection, a full disk, ...: the client passes on the errors of several libraries
        remedy = "run the same command again" if resume != "auto" else "run it again, or without --push_to_hub"
        raise UserError(f"the checkpoint on the Hub cannot be read ({hub_reason(error)}); {remedy}") from error
    if resume == "auto":
        return resume
    what = f"revision {revision} of {repo_id}" if revision else f"the run on the main branch of {repo_id}"
    newest = f"; the newest that can be resumed is hf://{repo_id}@{found}" if found else ""
    raise UserError(f"{what} has no training state on the Hub (--hub_strategy checkpoint publishes it){newest}")


def _newest(repo_id: str) -> str | None:
    """Return the newest branch of the run on main that can be resumed, or None.

    If main holds no run, as after a job that ended before it published a model there, any run's branch will do.
    """
    found = checkpoints_of(read_main(repo_id).run_id, list_branches(repo_id))
    return next((name for name in reversed(found) if HfApi().file_exists(repo_id, STATE_NAME, revision=name)), None)


def _download(repo_id: str, revision: str, output_dir: Path) -> Path:
    """Download a checkpoint and the run's log, or the files that an earlier attempt has not. Returns the folder.

    It is hidden, so if the run refuses the checkpoint, the folder is free for another run.
    """
    state = Path(hf_hub_download(repo_id, STATE_NAME, revision=revision))
    folder = checkpoint_dir(output_dir / DOWNLOAD_NAME, int(json.loads(state.read_text())["step"]))
    names = [*MODEL_FILES, *TRAINING_FILES, METRICS_NAME]
    snapshot_download(repo_id, revision=revision, allow_patterns=names, local_dir=folder)
    if (reason := why_damaged(folder)) is not None:
        shutil.rmtree(folder)
        raise UserError(f"revision {revision} of {repo_id} is damaged on the Hub: {reason}")
    return folder
