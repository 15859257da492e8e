"""The Hub: what is published where, the check before training, and one upload.

Every published checkpoint is a branch, `step-001000-0.5B` (steps and tokens), and the newest model is on `main`.
Uploads are commits of listed files, so a reader sees a checkpoint completely or not at all. Buckets would not give
that: they hold mutable files without commits, and an address of their own, apart from the model's.
"""

import contextlib
import functools
import json
import os
import re
import shutil
from pathlib import Path

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    get_session,
    get_token,
    set_client_factory,
)
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import disable_progress_bars, logging, validate_repo_id

from recipe.checkpoint import CONFIG_NAME, MANIFEST_NAME, OPTIMIZER_NAME, RNG_NAME, STATE_NAME
from recipe.config import TrainConfig
from recipe.errors import UserError, one_line, short_reason
from recipe.publish.card import CARD_NAME, CURVE_NAME, write_model_card
from recipe.publish.facts import EVALUATION_NAME, read_evaluation
from recipe.publish.public import METRICS_NAME, SUMMARY_NAME, public_value, write_public_files

# Only these files are published. The first row is written for the Hub, without local paths.
WRITTEN_FILES = (CARD_NAME, CURVE_NAME, CONFIG_NAME, METRICS_NAME, SUMMARY_NAME, EVALUATION_NAME)
MODEL_FILES = (
    *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja"),
)
TRAINING_FILES = (STATE_NAME, OPTIMIZER_NAME, RNG_NAME, MANIFEST_NAME)  # what only a resume needs
SPOOL_NAME = ".hub"  # in output_dir: a folder for each checkpoint that waits for its upload, named like its branch
FINAL_NAME = "final"  # the folder of the final model, which has no branch of its own
BRANCH = re.compile(r"step-(\d{6,})-\d+\.\dB")
TIMEOUT_SECONDS = 60.0  # the client has none, so a dead connection would hold the end of a run forever
TEMPORARY = (408, 409, 412, 429)  # refusals that a later attempt may not meet


def branch_name(step: int, num_tokens: int) -> str:
    """Return the branch of a checkpoint: `step-001000-0.5B`. num_tokens: trained on so far."""
    return f"step-{step:06d}-{num_tokens / 1e9:.1f}B"


def publishes_training_state(config: TrainConfig) -> bool:
    """Return whether the published checkpoints can be resumed."""
    return bool(config.push_to_hub) and config.hub_strategy in ("checkpoint", "all_checkpoints")


def check_hub(config: TrainConfig) -> None:
    """Create the repository if necessary, and raise `UserError` if the run could not upload to it.

    A Hub that cannot be reached now prints a warning instead, because it may be back before the first upload.
    """
    if not config.push_to_hub:
        return
    repo_id = config.hub_model_id
    check_repo_id(repo_id)
    if constants.is_offline_mode():
        raise UserError("--push_to_hub needs the Hub, but offline mode is on; unset HF_HUB_OFFLINE")
    if get_token() is None:
        raise UserError("--push_to_hub needs a token of the Hub; log in with `hf auth login`, or set HF_TOKEN")
    prepare_client()
    api = HfApi()
    try:
        api.create_repo(repo_id, private=config.hub_private_repo, exist_ok=True)
        api.auth_check(repo_id, write=True)
        if config.hub_private_repo and not api.model_info(repo_id, timeout=TIMEOUT_SECONDS).private:
            raise UserError(f"{repo_id} exists and is public; make it private on the Hub, or omit --hub_private_repo")
    except UserError:
        raise
    except Exception as error:  # refused, unreachable, ...: the client passes on the errors of several libraries
        if is_permanent(error):
            remedy = "log in with a token that may write to it (`hf auth login`), or pass another --hub_model_id"
            raise UserError(f"the Hub refuses uploads to {repo_id} ({hub_reason(error)}); {remedy}") from error
        print(f"warning: the Hub cannot be used now ({hub_reason(error)}); uploads start when it can", flush=True)


def prepare_client() -> None:
    """Give all connections of the client a timeout, and turn its progress bars and warnings off."""
    session = get_session()
    options = {"event_hooks": session.event_hooks, "follow_redirects": True, "timeout": TIMEOUT_SECONDS}
    set_client_factory(functools.partial(type(session), **options))
    disable_progress_bars()
    logging.set_verbosity_error()  # we say ourselves what failed


def check_repo_id(repo_id: str) -> None:
    """Raise `UserError` unless a repository could have this name."""
    try:
        validate_repo_id(repo_id)
        is_valid = repo_id.count("/") == 1
    except HFValidationError:
        is_valid = False
    if not is_valid:
        raise UserError(f"'{repo_id}' cannot be the name of a Hub repository; expected user/name")


def staging_folder(config: TrainConfig, output_dir: Path, step: int) -> Path:
    """Return the folder in which a checkpoint waits for its upload."""
    return output_dir / SPOOL_NAME / branch_name(step, step * config.global_batch_size * config.block_size)


def stage(source: Path, folder: Path, names: tuple[str, ...]) -> None:
    """Link the files with these names into a folder, where they outlive the pruning of checkpoints.

    The folder appears under its name when it is complete.
    """
    partial = folder.with_name(f".{folder.name}")
    for path in (partial, folder):
        shutil.rmtree(path, ignore_errors=True)
    partial.mkdir(parents=True)
    for path in (source / name for name in names):
        if path.is_file():
            try:
                os.link(path, partial / path.name)
            except OSError:  # the file system has no hard links
                shutil.copy2(path, partial / path.name)
    partial.rename(folder)


def staged_checkpoints(output_dir: Path) -> list[tuple[Path, int]]:
    """Return the folders of the checkpoints that wait for their upload, with their steps, oldest first."""
    folders = [path for path in (output_dir / SPOOL_NAME).glob("step-*") if BRANCH.fullmatch(path.name)]
    return sorted(((path, step_of(path.name)) for path in folders), key=lambda pair: pair[1])


def upload(api: HfApi, config: TrainConfig, output_dir: Path, folder: Path, step: int, use_xet: bool) -> str:
    """Upload a staged folder, and delete it: its model to the main branch, a checkpoint also to a branch of its name.

    The main branch keeps a newer checkpoint. step: of the model in the folder. use_xet: False sends large files
    through LFS, which networks that block Xet may allow. Returns the address. Raises what the client raises.
    """
    repo_id, main = config.hub_model_id, constants.DEFAULT_REVISION
    branch = None if folder.name == FINAL_NAME else folder.name
    url = api.create_repo(repo_id, private=config.hub_private_repo, exist_ok=True)
    branches = checkpoint_branches(api, repo_id)
    is_newest = branch is None or all(step_of(name) <= step for name in branches)
    branches = sorted({*branches, *filter(None, [branch])}, key=step_of)
    write_public_files(output_dir, folder, step)
    if evaluation := read_evaluation(output_dir, step):
        (folder / EVALUATION_NAME).write_text(json.dumps(public_value(evaluation), indent=2) + "\n", encoding="utf-8")
    card = {"resumable": publishes_training_state(config), "hub_options": config.hub_options()}
    model, message = WRITTEN_FILES + MODEL_FILES, f"Step {step:,}"
    if is_newest:
        write_model_card(output_dir, step, folder, branches=branches, **card)
        _commit(api, repo_id, folder, model, main, message, use_xet)
    if branch:
        write_model_card(output_dir, step, folder, revision=branch, branches=[branch], draw=not is_newest, **card)
        api.create_branch(repo_id, branch=branch, revision=main, exist_ok=True)
        _commit(api, repo_id, folder, model + TRAINING_FILES, branch, message, use_xet)
        if config.hub_strategy == "checkpoint":
            _drop_older_states(api, repo_id, branch)
    shutil.rmtree(folder, ignore_errors=True)
    return str(url)


def _commit(
    api: HfApi, repo_id: str, folder: Path, names: tuple[str, ...], revision: str, message: str, use_xet: bool
) -> None:
    """Make a branch hold exactly the files of a folder that have these names; other files on it stay."""
    files = [path for path in (folder / name for name in names) if path.is_file()]
    gone = _list_files(api, repo_id, revision) & set(names) - {path.name for path in files}
    with contextlib.ExitStack() as stack:  # the client sends paths through Xet, and open files through LFS
        contents = [path if use_xet else stack.enter_context(open(path, "rb")) for path in files]
        operations = [CommitOperationAdd(path.name, content) for path, content in zip(files, contents, strict=True)]
        operations += [CommitOperationDelete(name) for name in sorted(gone)]
        api.create_commit(repo_id, operations, commit_message=message, revision=revision)


def _list_files(api: HfApi, repo_id: str, revision: str) -> set[str]:
    info = api.model_info(repo_id, revision=revision, timeout=TIMEOUT_SECONDS)
    return {file.rfilename for file in info.siblings or ()}


def _drop_older_states(api: HfApi, repo_id: str, newest: str) -> None:
    """Delete the training state of all branches but the newest; the models stay."""
    branches = checkpoint_branches(api, repo_id)
    for branch in reversed(branches[: branches.index(newest)]):
        files = _list_files(api, repo_id, branch) & set(TRAINING_FILES)
        if files:
            deletions = [CommitOperationDelete(name) for name in sorted(files)]
            api.create_commit(repo_id, deletions, commit_message="Delete the training state", revision=branch)
        api.super_squash_history(repo_id, branch=branch)  # without its history, the Hub can free the space
        if not files:
            break  # neither do the older ones have any; this squash repeats one that may have failed


def checkpoint_branches(api: HfApi, repo_id: str) -> list[str]:
    """Return the branches that are named like a checkpoint, oldest first."""
    names = [ref.name for ref in api.list_repo_refs(repo_id).branches if BRANCH.fullmatch(ref.name)]
    return sorted(names, key=step_of)


def step_of(branch: str) -> int:
    return int(BRANCH.fullmatch(branch)[1])


def is_permanent(error: Exception) -> bool:
    """Return whether the Hub has refused a request in a way that another attempt would not change."""
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
    return 400 <= status < 500 and status not in TEMPORARY


def hub_reason(error: Exception) -> str:
    """Summarize an error of the Hub in a few words: its status and message, or its name and message."""
    if isinstance(error, HfHubHTTPError):
        return one_line(f"status {error.response.status_code}: {error.server_message or error.response.reason_phrase}")
    return short_reason(error)
