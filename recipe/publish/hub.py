"""The Hub: what is published where, the check before training, and one upload.

A repository holds one run, known by the random id that its checkpoints and cards carry. `main` is the newest model,
and each published checkpoint a branch, `step-000400-0.8M` (steps and tokens). A run changes no branch of another run.
Uploads are commits of listed files, so a reader sees a checkpoint completely or not at all.
"""

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
    ModelCard,
    ModelCardData,
    constants,
    get_session,
    get_token,
    hf_hub_download,
    set_client_factory,
)
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RemoteEntryNotFoundError
from huggingface_hub.utils import disable_progress_bars, logging, validate_repo_id

from recipe.checkpoint import CONFIG_NAME, MANIFEST_NAME, OPTIMIZER_NAME, RNG_NAME, STATE_NAME
from recipe.config import TrainConfig
from recipe.errors import UserError, one_line, short_reason
from recipe.publish.card import CARD_NAME, CURVE_NAME, EVALUATION_NAME, read_evaluation, write_model_card
from recipe.publish.public import METRICS_NAME, SUMMARY_NAME, public_value, write_public_files

# Only these files are published. The first row is written for the Hub, without local paths.
WRITTEN_FILES = (CARD_NAME, CURVE_NAME, CONFIG_NAME, METRICS_NAME, SUMMARY_NAME, EVALUATION_NAME)
MODEL_FILES = (
    *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja"),
)
TRAINING_FILES = (STATE_NAME, OPTIMIZER_NAME, RNG_NAME, MANIFEST_NAME)  # what only a resume needs
SPOOL_NAME, DOWNLOAD_NAME = ".hub", ".hub/resumed"  # in output_dir: what waits for its upload; a downloaded checkpoint
BRANCH = re.compile(r"step-(\d{6,})-[\d.]+[kMBT](-[0-9a-f]{4})?")
TIMEOUT_SECONDS = 60.0  # the client has none, so a dead connection would hold the end of a run forever
MOST_RETRY_SECONDS = 60  # the longest Retry-After that is obeyed; the client has no limit (2.4), so a run could hang
TEMPORARY = (408, 409, 412, 429)  # refusals that a later attempt may not meet


def branch_name(step: int, num_tokens: int) -> str:
    """Return the branch of a checkpoint: `step-000400-0.8M`. num_tokens: trained on so far."""
    unit, name = next((u for u in ((1e9, "B"), (1e6, "M")) if num_tokens >= u[0] / 10), (1e3, "k"))
    return f"step-{step:06d}-{num_tokens / unit:.1f}{name}"


def step_of(branch: str) -> int:
    return int(branch.split("-")[1])


def publishes_training_state(config: TrainConfig) -> bool:
    """Return whether the published checkpoints can be resumed."""
    return bool(config.push_to_hub) and config.hub_strategy in ("checkpoint", "all_checkpoints")


# ------------------------------------------------------------------ before training


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
        _check_metadata(config)
    except UserError:
        raise
    except Exception as error:  # refused, unreachable, ...: the client passes on the errors of several libraries
        if is_permanent(error):
            remedy = "log in with a token that may write to it (`hf auth login`), or pass another --hub_model_id"
            raise UserError(f"the Hub refuses uploads to {repo_id} ({hub_reason(error)}); {remedy}") from error
        print(f"warning: the Hub cannot be used now ({hub_reason(error)}); uploads start when it can", flush=True)


def _check_metadata(config: TrainConfig) -> None:
    """Raise `UserError` for a license or language that the Hub does not know: it would refuse every upload."""
    card = ModelCardData(library_name="transformers", license=config.hub_license, language=config.hub_language)
    try:
        ModelCard(f"---\n{card.to_yaml()}\n---\n").validate()
    except ValueError as error:
        raise UserError(f"the Hub refuses --hub_license or --hub_language ({one_line(error)})") from error


def check_owner(config: TrainConfig, run_id: str | None, note: str = "") -> None:
    """Raise `UserError` if the repository holds another run. run_id: of this run; None if it is new.

    note: begins the remedy.
    """
    if not config.push_to_hub or config.hub_overwrite:
        return
    try:
        owner, step = read_owner(config.hub_model_id, list_branches(config.hub_model_id)[constants.DEFAULT_REVISION])
    except Exception:  # the Hub cannot be used now, which `check_hub` has said; the upload checks again
        return
    if owner not in (None, run_id):
        raise holds_another_run(config, step, note)


def holds_another_run(config: TrainConfig, step: int, note: str = "") -> UserError:
    return UserError(
        f"{config.hub_model_id} holds another run, at step {step:,}; {note}pass another --hub_model_id, or "
        "--hub_overwrite to replace its model (the branches of its checkpoints stay)"
    )


def prepare_client() -> None:
    """Give all connections of the client a timeout, and turn its progress bars and warnings off."""
    session = get_session()
    hooks = {"request": session.event_hooks["request"], "response": [_limit_retry_after]}
    options = {"event_hooks": hooks, "follow_redirects": True, "timeout": TIMEOUT_SECONDS}
    set_client_factory(functools.partial(type(session), **options))
    disable_progress_bars()
    logging.set_verbosity_error()  # we say ourselves what failed


def _limit_retry_after(response) -> None:
    if (seconds := response.headers.get("Retry-After", "")).isdigit():
        response.headers["Retry-After"] = str(min(int(seconds), MOST_RETRY_SECONDS))


def check_repo_id(repo_id: str) -> None:
    """Raise `UserError` unless a repository could have this name."""
    try:
        validate_repo_id(repo_id)
        is_valid = repo_id.count("/") == 1
    except HFValidationError:
        is_valid = False
    if not is_valid:
        raise UserError(f"'{repo_id}' cannot be the name of a Hub repository; expected user/name")


# ------------------------------------------------------------------ what a repository holds


def list_branches(repo_id: str) -> dict[str, str]:
    """Return the commit of every branch."""
    return {ref.name: ref.target_commit for ref in HfApi().list_repo_refs(repo_id).branches}


@functools.cache  # a commit does not change
def read_owner(repo_id: str, commit: str) -> tuple[str | None, int]:
    """Return the id of the run that a commit holds, and its step; (None, 0) if it is not a run of this recipe."""
    try:
        card = ModelCard.load(hf_hub_download(repo_id, CARD_NAME, revision=commit), ignore_metadata_errors=True)
    except RemoteEntryNotFoundError:
        return None, 0
    return card.data.get("run_id"), card.data.get("step") or 0


def branches_of_run(repo_id: str, run_id: str, branches: dict[str, str]) -> list[str]:
    """Return the branches that hold checkpoints of a run, oldest first. branches: from `list_branches`."""
    return [name for name in checkpoint_branches(branches) if read_owner(repo_id, branches[name])[0] == run_id]


def checkpoint_branches(branches: dict[str, str]) -> list[str]:
    """Return the branches that are named like a checkpoint, of any run, oldest first."""
    return sorted(filter(BRANCH.fullmatch, branches), key=step_of)


# ------------------------------------------------------------------ one upload


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


def upload(config: TrainConfig, run_id: str, output_dir: Path, folder: Path, step: int, is_final: bool) -> str:
    """Upload a staged folder, and delete it: a checkpoint to its branch, and the newest model also to main.

    Returns the address. Raises `UserError` if the repository holds another run, and what the client raises.
    """
    api, repo_id, main = HfApi(), config.hub_model_id, constants.DEFAULT_REVISION
    url = api.create_repo(repo_id, private=config.hub_private_repo, exist_ok=True)
    branches = list_branches(repo_id)
    owner, newest_step = read_owner(repo_id, branches[main])
    if owner not in (None, run_id) and not config.hub_overwrite:
        raise holds_another_run(config, newest_step)
    working = f"incomplete-{run_id}"
    if working in branches:  # an upload was killed
        api.delete_branch(repo_id, branch=working)
    own = branches_of_run(repo_id, run_id, branches)
    write_public_files(output_dir, folder, step)
    if evaluation := read_evaluation(output_dir, step):
        text = json.dumps(public_value(evaluation), indent=2) + "\n"
        (folder / EVALUATION_NAME).write_text(text, encoding="utf-8")
    model, message = WRITTEN_FILES + MODEL_FILES, f"Step {step:,}"
    card = {"earlier": [name for name in own if step_of(name) < step], "hub_options": config.hub_options()}
    if not is_final:
        branch = next((name for name in own if step_of(name) == step), None)  # from an earlier attempt
        if branch is None:
            branch = branch_name(step, step * config.tokens_per_step)
            branch += f"-{run_id[:4]}" * (branch in branches)  # another run's, which stays
        is_resumable = (folder / OPTIMIZER_NAME).exists()
        own = [*own, branch]
        write_model_card(output_dir, step, folder, revision=branch, resumable=branch if is_resumable else None, **card)
        if branch in branches:
            _commit(api, repo_id, folder, model + TRAINING_FILES, branch, message)
        else:  # it appears when its commit is complete
            api.create_branch(repo_id, branch=working)
            commit = _commit(api, repo_id, folder, model + TRAINING_FILES, working, message)
            api.create_branch(repo_id, branch=branch, revision=commit)
            api.delete_branch(repo_id, branch=working)
        if config.hub_strategy == "checkpoint":
            _drop_older_states(api, repo_id, branch, [name for name in own if step_of(name) < step])
    if owner != run_id or step >= newest_step:
        resumable = max(own, key=step_of, default=None) if publishes_training_state(config) else None
        write_model_card(output_dir, step, folder, resumable=resumable, **card)
        _commit(api, repo_id, folder, model, main, message)
    shutil.rmtree(folder, ignore_errors=True)
    return str(url)


def _commit(api: HfApi, repo_id: str, folder: Path, names: tuple[str, ...], revision: str, message: str) -> str:
    """Make a branch hold exactly the files of a folder that have these names; other files on it stay.

    Returns the commit's id.
    """
    files = [path for path in (folder / name for name in names) if path.is_file()]
    gone = _list_files(api, repo_id, revision) & set(names) - {path.name for path in files}
    operations = [CommitOperationAdd(path.name, path) for path in files]
    operations += [CommitOperationDelete(name) for name in sorted(gone)]
    return api.create_commit(repo_id, operations, commit_message=message, revision=revision).oid


def _list_files(api: HfApi, repo_id: str, revision: str) -> set[str]:
    info = api.model_info(repo_id, revision=revision, timeout=TIMEOUT_SECONDS)
    return {file.rfilename for file in info.siblings or ()}


def _drop_older_states(api: HfApi, repo_id: str, newest: str, older: list[str]) -> None:
    """Delete the training state of the run's older branches; the models stay."""
    for branch in reversed(older):
        files = _list_files(api, repo_id, branch) & set(TRAINING_FILES)
        if files:
            deletions = [CommitOperationDelete(name) for name in sorted(files)]
            api.create_commit(repo_id, deletions, commit_message="Delete the training state", revision=branch)
        api.super_squash_history(repo_id, branch=branch)  # without its history, the Hub can free the space
        if not files:
            break  # neither do the older ones have any; this squash repeats one that may have failed


# ------------------------------------------------------------------ errors


def is_permanent(error: Exception) -> bool:
    """Return whether the Hub has refused a request in a way that another attempt would not change."""
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
    return isinstance(error, UserError) or (400 <= status < 500 and status not in TEMPORARY)


def retry_after(error: Exception) -> float:
    """Return the seconds for which the Hub asked to wait; 0 if it did not ask. The client ignores it for commits."""
    text = error.response.headers.get("Retry-After", "") if isinstance(error, HfHubHTTPError) else ""
    return float(text) if text.isdigit() else 0.0


def hub_reason(error: BaseException) -> str:
    """Summarize an error of the Hub in a few words: its status and message, or its name and message."""
    while not isinstance(error, HfHubHTTPError) and error.__cause__ is not None:
        error = error.__cause__  # the client hides why a large file could not be stored (2.4)
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, HfHubHTTPError):
        return one_line(f"status {error.response.status_code}: {error.server_message or error.response.reason_phrase}")
    return short_reason(error)
