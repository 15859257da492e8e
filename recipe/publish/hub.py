"""The Hub: what is published where, the check before training, and one upload.

A repository holds one run. Its `main` branch holds the newest model, with the run's random id on the card. Each
published checkpoint is a branch named by steps, tokens and the beginning of that id, `step-000400-0.8M-3f9a1c`, so a
run knows its own branches and never changes another's. A commit holds a checkpoint completely or not at all.
"""

import contextlib
import re
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

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
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import disable_progress_bars, logging, validate_repo_id
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from yaml import YAMLError

from recipe.checkpoint import MANIFEST_NAME, OPTIMIZER_NAME, RNG_NAME, STATE_NAME
from recipe.config import CONFIG_NAME, TrainConfig
from recipe.disk import link_or_copy
from recipe.errors import UserError, one_line, short_reason
from recipe.metrics import CARD_NAME, CURVE_NAME, METRICS_NAME, count_tokens
from recipe.model.files import GENERATION, TOKENIZER_FILES, is_inside
from recipe.model.weights import WEIGHTS_NAME
from recipe.publish.card import write_model_card
from recipe.publish.public import public_events, write_public_files

# Only these files are published. The first row is written for the Hub.
WRITTEN_FILES = (CARD_NAME, CURVE_NAME, CONFIG_NAME, METRICS_NAME)
MODEL_FILES = ("config.json", GENERATION, WEIGHTS_NAME, *TOKENIZER_FILES)
TRAINING_FILES = (STATE_NAME, OPTIMIZER_NAME, RNG_NAME, MANIFEST_NAME)  # what only a resume needs
# Endings of the file names of any model.
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
WEIGHTS += (".index.json", "adapter_config.json")
SPOOL_NAME = ".hub"  # in output_dir: what waits for its upload
DOWNLOAD_NAME = ".hub/resumed"  # in output_dir: a downloaded checkpoint
BRANCH = re.compile(r"step-\d{6,}-[\d.]+[kMB]-\w+")
ID_LENGTH = 6  # of a run's id in the names of its branches
TIMEOUT_SECONDS = 60.0  # without an answer; the client has none (2.4), so a dead connection would hold a run forever
MAIN = constants.DEFAULT_REVISION


def branch_name(step: int, num_tokens: int, run_id: str) -> str:
    """Return the branch of a checkpoint: `step-000400-0.8M-3f9a1c`. num_tokens: trained on so far."""
    unit, name = next((u for u in ((1e9, "B"), (1e6, "M")) if num_tokens >= u[0] / 10), (1e3, "k"))
    return f"step-{step:06d}-{num_tokens / unit:.1f}{name}-{run_id[:ID_LENGTH]}"


def branch_step(branch: str) -> int:
    return int(branch.split("-")[1])


def publishes_training_state(config: TrainConfig) -> bool:
    """Return whether the published checkpoints can be resumed."""
    return bool(config.push_to_hub) and config.hub_strategy in ("checkpoint", "all_checkpoints")


# ------------------------------------------------------------------ before training


def look_at_hub(config: TrainConfig) -> "MainBranch | None":
    """Return what main holds in the repository to publish to; None if it is new, cannot be read, or is not wanted.

    Raises `UserError` for what would make every upload fail.
    """
    repo_id = config.hub_model_id
    if not config.push_to_hub or repo_id is None:
        return None
    check_repo_id(repo_id)
    if constants.is_offline_mode():
        raise UserError("--push_to_hub needs the Hub, but offline mode is on; unset HF_HUB_OFFLINE")
    if get_token() is None:
        raise UserError("--push_to_hub needs a token of the Hub; log in with `hf auth login`, or set HF_TOKEN")
    prepare_client()
    check_metadata(config)
    try:
        return read_main(repo_id)
    except Exception as error:
        # It is new, or the Hub cannot be used now, which `create_repository` says. The upload looks again.
        if isinstance(error, HfHubHTTPError) and not isinstance(error, RepositoryNotFoundError):
            check_refusal(repo_id, error)
        return None


def create_repository(config: TrainConfig) -> None:
    """Create the repository if necessary, and raise `UserError` if the run could not upload to it.

    If the Hub cannot be reached now, prints a warning instead, because it may be back before the first upload.
    """
    repo_id = config.hub_model_id
    if not config.push_to_hub or repo_id is None:
        return
    api = HfApi()
    try:
        api.create_repo(repo_id, private=config.hub_private_repo, exist_ok=True)
        api.auth_check(repo_id, write=True)
    except Exception as error:  # refused, unreachable, ...: the client passes on the errors of several libraries
        check_refusal(repo_id, error)
        print(f"warning: the Hub cannot be used now ({hub_reason(error)}); uploads start when it can", flush=True)


def check_refusal(repo_id: str, error: Exception) -> None:
    """Raise `UserError` if the Hub has answered that the token may not do this."""
    if isinstance(error, HfHubHTTPError) and error.response.status_code in (400, 401, 403, 404):
        remedy = "log in with a token that may write to it (`hf auth login`), or pass another --hub_model_id"
        raise UserError(f"the Hub refuses uploads to {repo_id} ({hub_reason(error)}); {remedy}") from error


def check_metadata(config: TrainConfig) -> None:
    """Raise `UserError` for a license or language that the Hub does not know: it would refuse every upload."""
    card = ModelCardData(library_name="transformers", license=config.hub_license, language=config.hub_language)
    try:
        ModelCard(f"---\n{card.to_yaml()}\n---\n").validate()
    except ValueError as error:
        raise UserError(f"the Hub refuses --hub_license or --hub_language ({one_line(error)})") from error
    except Exception:  # the Hub cannot be used now, which `create_repository` says
        return


def refuse_own_code(model_type: str) -> None:
    """Raise `UserError` for a model that is not one of Transformers' types: its code is private."""
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(f"--push_to_hub uploads no code, which the checkpoints of type {model_type} bring; omit it")


class MainBranch(NamedTuple):
    """What the main branch of a repository holds. run_id, step: on its card."""

    run_id: str | None
    step: int
    files: tuple[str, ...]  # that a model's upload would replace or delete
    is_private: bool
    commit: str | None = None
    card: str = ""


def read_main(repo_id: str) -> MainBranch:
    info = HfApi().model_info(repo_id)
    text = read_card(repo_id, info.sha)
    data = {}
    names = {file.rfilename for file in info.siblings or ()}
    files = {name for name in names if name in WRITTEN_FILES + MODEL_FILES or name.endswith(WEIGHTS)}
    with contextlib.suppress(ValueError, TypeError, AttributeError, YAMLError):  # front matter that is no mapping
        card = ModelCard(text, ignore_metadata_errors=True)
        data = card.data.to_dict()
        if not card.text.strip():  # the Hub's own form makes a card of metadata alone
            files.discard(CARD_NAME)
    run_id = data.get("run_id")
    step = data.get("step")
    return MainBranch(
        run_id=run_id if isinstance(run_id, str) else None,
        step=step if isinstance(step, int) else 0,
        files=tuple(sorted(files)),
        is_private=bool(info.private),
        commit=info.sha,
        card=text,
    )


def read_card(repo_id: str, commit: str | None) -> str:
    """Return the text of the card in a commit, or "" if there is none."""
    try:
        path = hf_hub_download(repo_id, CARD_NAME, revision=commit)
    except EntryNotFoundError:
        return ""
    return Path(path).read_text(encoding="utf-8-sig", errors="replace")


def decide_main(
    main_branch: MainBranch, run_id: str | None, step: int, final_step: int | None, may_overwrite: bool
) -> str:
    """Return what happens to main: the run is "refused", main is "kept" as it is, or the model is "published" there.

    run_id: of this run; None if it is new. step: of the model. final_step: of the run's final model, which may be the
    best one; None before the end, when the newest model is published.
    """
    is_own = main_branch.run_id is not None and main_branch.run_id == run_id
    if not is_own and (main_branch.run_id or main_branch.files) and not may_overwrite:
        return "refused"
    if final_step is not None:
        return "published" if step == final_step else "kept"
    return "kept" if is_own and step < main_branch.step else "published"


def refuse_another(config: TrainConfig, main_branch: MainBranch, run_id: str | None, note: str = "") -> None:
    """Raise `UserError` if main holds another model that must stay, or is public against `hub_private_repo`.

    note: begins the remedy.
    """
    repo_id = config.hub_model_id
    if config.hub_private_repo and not main_branch.is_private:
        raise UserError(f"{repo_id} is public; make it private on the Hub, or omit --hub_private_repo")
    if decide_main(main_branch, run_id, 0, None, config.hub_overwrite) == "refused":
        content = f"files that no run of this recipe published ({', '.join(main_branch.files[:3])})"
        if main_branch.run_id:
            content = f"another run, at step {main_branch.step:,}"
        raise UserError(
            f"{repo_id} holds {content}; {note}pass another --hub_model_id, or --hub_overwrite to replace the model "
            "and its card on the main branch (other branches stay)"
        )


def prepare_client() -> None:
    """Give all requests of the client a timeout, and turn its progress bars and warnings off: we say what failed."""
    session = get_session()
    hooks = {"request": [*(hook for hook in session.event_hooks["request"] if hook != limit_time), limit_time]}
    set_client_factory(lambda: type(session)(event_hooks=hooks, follow_redirects=True, timeout=None))
    disable_progress_bars()
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", "Warnings while validating metadata", UserWarning)  # a card without a license


def limit_time(request: Any) -> None:
    """Give a request a timeout, even if it asks for none, as `HfApi.model_info` does (2.4)."""
    limits = request.extensions["timeout"]  # for connect, read, write and pool
    request.extensions["timeout"] = {what: limit or TIMEOUT_SECONDS for what, limit in limits.items()}


def check_repo_id(repo_id: str) -> None:
    """Raise `UserError` unless a repository could have this name."""
    try:
        validate_repo_id(repo_id)
        is_valid = repo_id.count("/") == 1
    except HFValidationError:
        is_valid = False
    if not is_valid:
        raise UserError(f"'{repo_id}' cannot be the name of a Hub repository; expected user/name")


def list_branches(repo_id: str) -> dict[str, str]:
    """Return the last commit of each branch."""
    return {ref.name: ref.target_commit for ref in HfApi().list_repo_refs(repo_id).branches}


def checkpoints_of(run_id: str | None, branches: Iterable[str]) -> list[str]:
    """Return the branches with checkpoints of a run (None: of any run), oldest first."""
    ending = "" if run_id is None else f"-{run_id[:ID_LENGTH]}"
    return sorted((name for name in branches if BRANCH.fullmatch(name) and name.endswith(ending)), key=branch_step)


# ------------------------------------------------------------------ one upload


def link_files(source: Path, folder: Path, names: tuple[str, ...]) -> None:
    """Link the files with these names into a folder, where they outlive the pruning of checkpoints.

    The folder appears under its name when it is complete.
    """
    partial = folder.with_name(f".{folder.name}")
    for path in (partial, folder):
        shutil.rmtree(path, ignore_errors=True)
    partial.mkdir(parents=True)
    for path in (source / name for name in names):
        if path.is_file() and is_inside(path, source):
            link_or_copy(path, partial / path.name)
    partial.rename(folder)


def upload(
    config: TrainConfig, run_id: str, output_dir: Path, folder: Path, step: int, final_step: int | None, is_final: bool
) -> str:
    """Upload and delete a staged folder. A checkpoint gets a branch; `decide_main` says whether main gets the model.

    final_step: as for `decide_main`. is_final: the folder holds the final model, which has no branch. Returns the
    address. Raises `UserError` if the repository holds another run or model, and what the client raises, also for a
    branch that has changed since it was looked at: the next attempt sees what was edited.
    """
    assert config.hub_model_id is not None  # --push_to_hub requires it
    repo_id = config.hub_model_id
    message = f"Step {step:,}"
    api = HfApi()
    url = api.create_repo(repo_id, private=config.hub_private_repo, exist_ok=True)
    main_branch = read_main(repo_id)
    branches = list_branches(repo_id)
    refuse_another(config, main_branch, run_id)
    own = checkpoints_of(run_id, branches)
    write_public_files(output_dir, folder, step, repo_id)
    hub_options = {name: value for name, value in vars(config).items() if name.startswith("hub_")}
    card = {"hub_options": hub_options, "earlier": [name for name in own if branch_step(name) < step]}
    if not is_final:
        num_tokens = count_tokens(step, public_events(output_dir, step), config.block_size)
        branch = branch_name(step, num_tokens, run_id)
        stays = config.hub_strategy == "all_checkpoints"  # else the next checkpoint deletes this state
        resumable = branch if stays and (folder / OPTIMIZER_NAME).exists() else None
        before = read_card(repo_id, branches[branch]) if branch in branches else ""
        (folder / CARD_NAME).write_text(before, encoding="utf-8")
        write_model_card(output_dir, step, folder, revision=branch, resumable=resumable, **card)
        commit_branch(api, repo_id, folder, branch, branches, message)
        if config.hub_strategy == "checkpoint":
            drop_older_states(api, repo_id, card["earlier"])
        own = sorted({*own, branch}, key=branch_step)
    if decide_main(main_branch, run_id, step, final_step, config.hub_overwrite) == "published":
        resumable = own[-1] if own and publishes_training_state(config) else None
        before = main_branch.card if main_branch.run_id == run_id else ""
        (folder / CARD_NAME).write_text(before, encoding="utf-8")
        write_model_card(output_dir, step, folder, resumable=resumable, **card)
        gone = () if main_branch.run_id == run_id else main_branch.files
        commit_files(api, repo_id, folder, WRITTEN_FILES + MODEL_FILES, MAIN, message, main_branch.commit, gone)
    shutil.rmtree(folder, ignore_errors=True)
    return str(url)


def commit_branch(api: HfApi, repo_id: str, folder: Path, branch: str, branches: dict[str, str], message: str) -> None:
    """Make a branch of a folder's files. A new branch appears complete; an existing one is replaced in one commit."""
    names = WRITTEN_FILES + MODEL_FILES + TRAINING_FILES
    working = f"incomplete-{branch.rpartition('-')[2]}"
    if branch in branches:  # from an earlier attempt
        commit_files(api, repo_id, folder, names, branch, message, branches[branch])
    else:
        api.create_branch(repo_id, branch=working, exist_ok=True)  # it exists if an upload was killed
        commit = commit_files(api, repo_id, folder, names, working, message)
        api.create_branch(repo_id, branch=branch, revision=commit)
    if branch not in branches or working in branches:
        api.delete_branch(repo_id, branch=working)


def commit_files(
    api: HfApi,
    repo_id: str,
    folder: Path,
    names: tuple[str, ...],
    revision: str,
    message: str,
    parent: str | None = None,
    replaced: tuple[str, ...] = (),
) -> str:
    """Make a branch hold exactly the files of a folder that have these names, and none of `replaced`; others stay.

    `upload_folder` could make several commits, between which a reader would see half of a checkpoint (2.4). The Hub
    refuses the commit if `parent` is no longer the branch's last one. Returns the commit's id.
    """
    files = {path.name: path for path in (folder / name for name in names) if path.is_file()}
    gone = set(api.list_repo_files(repo_id, revision=revision)) & ({*names, *replaced} - files.keys())
    operations = [CommitOperationAdd(name, path) for name, path in files.items()]
    operations += [CommitOperationDelete(name) for name in sorted(gone)]
    commit = api.create_commit(repo_id, operations, commit_message=message, revision=revision, parent_commit=parent)
    return commit.oid


def drop_older_states(api: HfApi, repo_id: str, older: list[str]) -> None:
    """Delete the training state of the run's older branches; the models stay."""
    for branch in reversed(older):
        files = set(api.list_repo_files(repo_id, revision=branch)) & set(TRAINING_FILES)
        if files:
            deletions = [CommitOperationDelete(name) for name in sorted(files)]
            api.create_commit(repo_id, deletions, commit_message="Delete the training state", revision=branch)
        api.super_squash_history(repo_id, branch=branch)  # without its history, the Hub can free the space
        if not files:
            break  # the older ones have none either; this squash repeats one that may have failed


def hub_reason(error: BaseException) -> str:
    """Summarize an error of the Hub in a few words: its status and message, or its name and message."""
    while not isinstance(error, HfHubHTTPError) and error.__cause__ is not None:
        error = error.__cause__  # the client hides why a large file could not be stored (2.4)
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, HfHubHTTPError):
        return one_line(f"status {error.response.status_code}: {error.server_message or error.response.reason_phrase}")
    return short_reason(error)
