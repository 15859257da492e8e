"""Publishing against a stand-in for the Hub: what arrives, what a failure costs, and what resumes from there."""

import json
import os
import re
import shutil
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import ROOT, read_events, run_script, signal_when
from huggingface_hub import HfApi, constants
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.checkpoint import STATE_NAME
from recipe.command_line import load_config
from recipe.errors import UserError
from recipe.publish import hub as hub_room
from recipe.publish import uploads as uploads_room
from recipe.publish.card import weights_sha256
from recipe.publish.hub import TRAINING_FILES, branch_name
from recipe.publish.uploads import HubUploads
from recipe.run.stop import StopSignals

REPO = "someone/tiny"
PUSH = ["--push_to_hub", "--hub_model_id", REPO]
SAVE = ["--save_steps", "2"]
BRANCHES = ["step-000002-0.3k", "step-000004-0.5k"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Do not wait before another attempt."""
    monkeypatch.setattr(uploads_room, "RETRY_SECONDS", (0.0,))
    monkeypatch.setattr(uploads_room, "LAST_RETRY_SECONDS", (0.01, 0.01))


@pytest.fixture
def all_arrive(monkeypatch):
    """Let a run upload every checkpoint, also those that a newer one replaces if uploads fall behind."""
    monkeypatch.setattr("recipe.train.HubUploads", partial(HubUploads, keeps_all=True))


@pytest.fixture(scope="module")
def finished(train_shared) -> Path:
    """A run of four steps with two checkpoints that has published nothing."""
    return train_shared(*SAVE)


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def open_uploads(run: Path, *options: str, run_id: str = "a" * 12) -> HubUploads:
    """Return what a run with this id has staged for its upload at its end."""
    config, _ = load_config(["--config", str(run / "training_config.yaml"), *PUSH, *options])
    uploads, log = HubUploads(config, run_id, run, print, keeps_all=True), run / "metrics.jsonl"
    log.write_text(re.sub(r'"run_id": "\w+"', f'"run_id": "{run_id}"', log.read_text()))
    for step in (2, 4):
        uploads.add(run / f"checkpoint-{step}", step)
    return uploads


def branches_of(hub) -> list[str]:
    return sorted(set(hub.branches(REPO)) - {"main"})


def files_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


# ---------------------------------------------------------------- what arrives


def test_the_final_model_arrives(train, hub, dataset_dir, capsys):
    """With `end`, main holds the model byte for byte, and the written files, without paths or the token."""
    output_dir = train(*PUSH, *SAVE, "--hub_strategy", "end", "--hub_private_repo")
    sent, local = hub.files(REPO), files_in(output_dir)
    models = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    written = {"README.md", "loss_curve.png", "training_config.yaml", "metrics.jsonl", "summary.json"}
    assert set(sent) == models | written
    assert all(sent[name] == local[name] for name in models)
    for private in (dataset_dir.parent.parent, output_dir, ROOT):  # the folder of corpus, dataset and run; the project
        assert not [name for name, content in sent.items() if str(private).encode() in content]
    assert branches_of(hub) == [] and hub.is_private(REPO)
    printed = capsys.readouterr().out
    assert f"published at {hub.endpoint}/{REPO}" in printed
    assert not list((output_dir / ".hub").iterdir())
    # The token is in one header of the requests, and nowhere else.
    assert hub.token not in printed and not any(hub.token.encode() in content for content in local.values())
    assert all(hub.token.encode() not in path.encode() + body for _, path, _, body in hub.requests)
    headers = {name for _, _, headers, _ in hub.requests for name, value in headers.items() if hub.token in value}
    assert headers == {"authorization"}


@pytest.mark.usefixtures("all_arrive")
def test_every_save_is_a_branch(train, hub):
    """Each checkpoint loads by its revision with its own weights; none holds training state."""
    output_dir = train(*PUSH, *SAVE, "--hub_strategy", "every_save")
    assert branches_of(hub) == BRANCHES
    for step, branch in zip((2, 4), BRANCHES, strict=True):
        model = AutoModelForCausalLM.from_pretrained(REPO, revision=branch)
        expected = AutoModelForCausalLM.from_pretrained(output_dir / f"checkpoint-{step}")
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
        assert len(AutoTokenizer.from_pretrained(REPO, revision=branch)) == 500
        assert not set(hub.files(REPO, branch)) & set(TRAINING_FILES)
        assert f'revision="{branch}"' in hub.files(REPO, branch)["README.md"].decode()
        events = [json.loads(line) for line in hub.files(REPO, branch)["metrics.jsonl"].splitlines()]
        assert max(event["step"] for event in events) == step


@pytest.mark.parametrize(("strategy", "resumable"), [("checkpoint", BRANCHES[1:]), ("all_checkpoints", BRANCHES)])
def test_training_state_is_published(run, hub, strategy, resumable):
    """It arrives byte for byte, for the newest checkpoint or for all; models of older checkpoints stay."""
    hub.fail("super-squash", 500, times=1)  # it is repeated, or the deleted state would take up space forever
    assert open_uploads(run, "--hub_strategy", strategy).finish(4)
    assert branches_of(hub) == BRANCHES
    for step, branch in zip((2, 4), BRANCHES, strict=True):
        sent, saved = hub.files(REPO, branch), files_in(run / f"checkpoint-{step}")
        expected = set(saved) if branch in resumable else set(saved) - set(TRAINING_FILES)
        assert {name: sent.get(name) for name in expected} == {name: saved[name] for name in expected}
        assert set(sent) & set(TRAINING_FILES) == expected & set(TRAINING_FILES)
        if branch not in resumable:  # no commit holds the deleted files
            assert len(hub.commits(REPO, branch)) == 1


@pytest.mark.parametrize(
    ("tokens", "name"), [(300, "0.3k"), (819_200, "0.8M"), (99_000_000, "99.0M"), (4_099_932_160, "4.1B")]
)
def test_branches_count_tokens_in_a_unit_that_fits(tokens, name):
    assert branch_name(400, tokens) == f"step-000400-{name}"


def test_a_branch_appears_when_it_is_complete(run, hub):
    """A process that dies at any request leaves no branch with half of a checkpoint, and the next one goes on."""
    for pattern in (r"POST .*/commit/incomplete", r"POST .*/branch/step-000002"):
        hub.fail(pattern, 403, times=None)
        assert not open_uploads(run).finish()
        assert not any(name.startswith("step-000002") for name in hub.branches(REPO))
        hub.heal()
    hub.fail(r"DELETE .*/branch", 403, times=None)
    assert not open_uploads(run).finish()
    assert branches_of(hub) == ["incomplete-aaaaaaaaaaaa", *BRANCHES]  # which the next upload deletes
    hub.heal()
    assert open_uploads(run).finish(4) and branches_of(hub) == BRANCHES


def test_main_keeps_the_newest_model(run, hub):
    """A checkpoint that an earlier process left behind gets its branch, but main does not go back."""
    assert open_uploads(run).finish(4)
    newest = hub.branches(REPO)["main"]
    del hub.repositories[REPO].branches[BRANCHES[0]]
    assert open_uploads(run).finish()
    assert branches_of(hub) == BRANCHES and hub.branches(REPO)["main"] == newest


def test_files_that_a_model_no_longer_has_leave_the_hub(run, hub):
    """One example is the summary of a run that was extended. Files that the recipe does not publish stay."""
    HfApi().create_repo(REPO)
    for name in ("summary.json", "notes.txt"):
        HfApi().upload_file(path_or_fileobj=b"{}", path_in_repo=name, repo_id=REPO)
    assert open_uploads(run).finish()
    assert "notes.txt" in hub.files(REPO) and "summary.json" not in hub.files(REPO, BRANCHES[0])


def test_scores_of_a_saved_model_are_published(run, hub):
    """evaluation.json goes to the Hub without paths; push_to_hub.py changes what the card says of the license."""
    scores = {"hellaswag": {"acc": 0.5, "num_examples": 20}}
    content = {"weights_sha256": weights_sha256(run), "tasks": scores, "texts": [], "note": f"read {run}/a.txt"}
    (run / "evaluation.json").write_text(json.dumps(content))
    assert run_script("scripts/push_to_hub.py", run, "--hub_model_id", REPO, "--hub_license", "mit") == ""
    sent = hub.files(REPO)
    assert json.loads(sent["evaluation.json"])["tasks"] == scores and str(run).encode() not in sent["evaluation.json"]
    assert "license: mit" in sent["README.md"].decode() and branches_of(hub) == BRANCHES


# ---------------------------------------------------------------- two runs and one repository


def test_a_second_run_is_refused(train, hub, tmp_path):
    """Before it trains, in one sentence; a repository without a run, such as one with a README, is accepted."""
    HfApi().create_repo(REPO)
    HfApi().upload_file(path_or_fileobj=b"# Mine", path_in_repo="README.md", repo_id=REPO)
    train(*PUSH)
    before = hub.branches(REPO)
    with pytest.raises(UserError, match="holds another run, at step 4; .*--hub_overwrite"):
        train(*PUSH, "--seed", "1", output_dir=tmp_path / "second")
    assert hub.branches(REPO) == before and not (tmp_path / "second" / "model.safetensors").exists()


def test_a_second_run_that_may_overwrite_changes_no_branch_of_the_first(run, hub, train, tmp_path):
    """Both use the same steps. The second one's model is on main, and its state is the one that resumes.

    With another schedule, a run from the Hub is a new one.
    """
    assert open_uploads(run, "--hub_strategy", "all_checkpoints").finish(4)
    first = {name: commit for name, commit in hub.branches(REPO).items() if name != "main"}
    options = [*PUSH, *SAVE, "--seed", "1", "--hub_strategy", "checkpoint"]
    second = train(*options, "--hub_overwrite", output_dir=tmp_path / "second")
    assert open_uploads(run, "--hub_overwrite").repeat.endswith(" --hub_overwrite")
    found = hub.branches(REPO)
    assert first.items() <= found.items()
    assert hub.files(REPO)["model.safetensors"] == (second / "model.safetensors").read_bytes()
    (newest,) = [name for name in found if "optimizer.pt" in hub.files(REPO, name) and name not in first]
    assert newest.startswith(BRANCHES[1] + "-")
    assert not [name for name in first if f"`{name}`" in hub.files(REPO)["README.md"].decode()]
    third = train(*options, "--resume_from_checkpoint", "auto", output_dir=tmp_path / "third")
    assert read_events(third, "start")[-1]["step"] == 4
    assert read_events(third, "start")[-1]["run_id"] == read_events(second, "start")[-1]["run_id"]
    before = hub.branches(REPO)
    for address, remedy in (("auto", f"resume from hf://{REPO} and pass another"), (f"hf://{REPO}@{newest}", "pass")):
        with pytest.raises(UserError, match=f"another run, .*; with another schedule, this is a new run: {remedy}"):
            fork = ("--resume_from_checkpoint", address, "--max_steps", "6")
            train(*options, *fork, output_dir=tmp_path / "fourth")
    assert hub.branches(REPO) == before


def test_an_upload_checks_the_owner_too(run, hub):
    """The Hub may have been away when the run started."""
    assert open_uploads(run).finish(4)
    before = hub.branches(REPO)
    assert not open_uploads(run, run_id="b" * 12).finish(4)
    assert hub.branches(REPO) == before


# ---------------------------------------------------------------- resume


def losses(output_dir: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in read_events(output_dir, "train")}


@pytest.mark.parametrize("address", [f"hf://{REPO}@{BRANCHES[0]}", f"hf://{REPO}", "auto"])
def test_another_machine_resumes_from_the_hub(train, hub, tmp_path, address):
    """It continues bit for bit, with the whole log. Without a revision, and with `auto`, the newest branch counts."""
    push = [*PUSH, *SAVE, "--hub_strategy", "all_checkpoints"]
    first = train(*push, output_dir=tmp_path / "first")
    del hub.repositories[REPO].branches[BRANCHES[1]]  # as if the first machine had gone after step 2
    if address == "auto":  # and before it published a model on main
        repository = hub.repositories[REPO]
        repository.branches["main"] = next(iter(repository.commits))
    second = train(*push, "--resume_from_checkpoint", address, output_dir=tmp_path / "second")
    assert losses(second) == losses(first)
    assert (second / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    assert branches_of(hub) == BRANCHES


def test_auto_starts_fresh_on_an_empty_hub(train, hub, capsys):
    train(*PUSH, *SAVE, "--hub_strategy", "checkpoint", "--resume_from_checkpoint", "auto")
    assert "the run starts at step 0" in capsys.readouterr().out and BRANCHES[1] in branches_of(hub)


def test_auto_does_not_start_over_while_the_hub_is_away(train, hub):
    """A checkpoint may be there."""
    hub.fail("/refs", 503, times=None)
    with pytest.raises(UserError, match="the checkpoint on the Hub cannot be read .status 503"):
        train(*PUSH, "--hub_strategy", "checkpoint", "--resume_from_checkpoint", "auto")


def test_what_cannot_be_resumed(run, train, hub, tmp_path):
    """One sentence, before a model is built, that names a checkpoint that can be resumed. The folder stays free."""
    assert open_uploads(run, "--hub_strategy", "checkpoint").finish(4)
    for address, words in (
        (
            f"hf://{REPO}@step-000003-0.4k",
            f"has no revision step-000003-0.4k; the newest .* hf://{REPO}@{BRANCHES[1]}",
        ),
        (f"hf://{REPO}@main", f"contains no training state .*{BRANCHES[1]}"),
        ("hf://someone/other", "there is no repository someone/other"),
        ("hf://", "no address of a checkpoint"),
        ("hf://some one/tiny", "cannot be the name of a Hub repository"),
        (f"hf://{REPO}@{BRANCHES[1]}", "belongs to a run with other options: seed 1337 -> 1"),
    ):
        with pytest.raises(UserError, match=words):
            train("--seed", "1", "--resume_from_checkpoint", address, output_dir=tmp_path / "second")
    train("--seed", "1", output_dir=tmp_path / "second")
    with pytest.raises(UserError, match="contains another run"):  # a download does not mix two runs
        train("--resume_from_checkpoint", f"hf://{REPO}", output_dir=tmp_path / "second")


def test_a_damaged_checkpoint_on_the_hub(run, train, hub, tmp_path):
    """Its SHA-256 differs from the manifest's, so nothing of it is used."""
    assert open_uploads(run, "--hub_strategy", "checkpoint").finish(4)
    HfApi().upload_file(path_or_fileobj=b"x", path_in_repo="rng.pt", repo_id=REPO, revision=BRANCHES[1])
    with pytest.raises(UserError, match="is damaged on the Hub: rng.pt has 1 bytes"):
        train("--resume_from_checkpoint", f"hf://{REPO}", output_dir=tmp_path / "second")
    assert not list((tmp_path / "second").rglob("optimizer.pt"))
    state = b'{"step": "x/../../../elsewhere"}'
    HfApi().upload_file(path_or_fileobj=state, path_in_repo=STATE_NAME, repo_id=REPO, revision=BRANCHES[1])
    with pytest.raises(UserError, match="cannot be read .*invalid literal for int"):
        train("--resume_from_checkpoint", f"hf://{REPO}", output_dir=tmp_path / "second")


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("fault", [403, 500, "drop"])
def test_what_could_not_be_uploaded_is_listed_and_repeated(run, hub, capsys, fault):
    """A refusal, an error and a lost connection: each is named once, with the command that uploads the rest."""
    hub.fail(r"POST .*/(preupload|commit)", fault, times=None)
    uploads = open_uploads(run, "--hub_strategy", "checkpoint")
    assert not uploads.finish(4)
    commits = [path for method, path, _, _ in hub.requests if method == "POST" and "/commit/" in path]
    assert len(commits) <= 3 if fault == 403 else len(commits) <= 9 or fault == "drop"
    printed = capsys.readouterr().out
    assert printed.count("failed and will be repeated") == 1
    assert "not uploaded: step-000002, step-000004, final (" in printed
    assert f"to upload what is missing:\n    python scripts/push_to_hub.py {run}\n" in printed
    hub.heal()
    assert run_script("scripts/push_to_hub.py", run, "--hub_model_id", REPO, "--hub_strategy", "checkpoint") == ""
    assert branches_of(hub) == BRANCHES
    assert hub.files(REPO, BRANCHES[1])["optimizer.pt"] == (run / "checkpoint-4" / "optimizer.pt").read_bytes()


def test_training_goes_on_without_the_hub(train, hub, capsys):
    """The whole run, with a Hub that fails from the first upload on; it ends as a run that publishes nothing."""
    hub.fail("POST .*/commit", 500, times=None)
    output_dir = train(*PUSH, *SAVE)
    assert (output_dir / "summary.json").is_file() and "not uploaded" in capsys.readouterr().out


@pytest.mark.parametrize("fault", [429, "drop", "cut", "lose", 0.3])
def test_a_passing_fault_costs_nothing(run, hub, capsys, fault):
    """An upload that fails once is repeated, and the end is as if nothing had happened."""
    hub.fail(r"/commit|/preupload|lfs", fault, times=2)
    assert open_uploads(run, "--hub_strategy", "all_checkpoints").finish(4)
    assert branches_of(hub) == BRANCHES and "not uploaded" not in capsys.readouterr().out


def test_a_storage_error_names_its_cause(run, hub, capsys):
    hub.fail("PUT /lfs-storage", 507, times=None)
    assert not open_uploads(run).finish()
    assert "507" in capsys.readouterr().out


def test_the_hub_may_ask_for_a_pause(run, hub, monkeypatch):
    """A commit is not repeated before; the client itself waits for a minute at most."""
    monkeypatch.setattr(uploads_room, "LAST_RETRY_SECONDS", ())
    hub.fail("POST .*/commit", 429, times=1)
    uploads = open_uploads(run)
    started_at = time.monotonic()
    assert not uploads.finish()
    assert uploads.retry_at - started_at > 2  # what the stand-in asks for
    hub.waits.clear()
    monkeypatch.setattr(hub_room, "MOST_RETRY_SECONDS", 1)
    hub_room.prepare_client()
    hub.fail("/preupload", 429, times=1)
    assert uploads.finish() and hub.waits == [2]  # and one second for rounding


def test_uploads_do_not_hold_up_training(train, hub, capsys):
    """While one hangs, the run trains, saves, and drops what a newer checkpoint replaces; the newest arrives."""
    hub.fail("POST .*/commit", 3.0, times=1)
    output_dir = train(*PUSH, "--save_steps", "1", "--max_steps", "12", "--save_total_limit", "2")
    seconds = [event["train_seconds"] for event in read_events(output_dir, "train")]
    assert seconds[-1] < 3.0
    found = branches_of(hub)
    assert found[-1].startswith("step-000012") and 2 <= len(found) < 12  # the first began during training
    assert f"{12 - len(found)} checkpoints were replaced by newer ones" in capsys.readouterr().out


def test_during_training_a_failing_upload_is_repeated_later(run, hub, monkeypatch):
    monkeypatch.setattr(uploads_room, "RETRY_SECONDS", (1000.0,))
    hub.fail("POST .*/commit", 500, times=None)
    uploads = open_uploads(run)
    for _ in range(5):
        uploads.advance()
        uploads.thread.join()
    assert len([path for _, path, _, _ in hub.requests if "/commit/" in path]) == 2  # one for each checkpoint


@pytest.mark.parametrize("ending", ["seconds", "SIGTERM", "SIGUSR1", "SIGHUP"])
def test_an_upload_that_hangs_is_given_up(run, hub, monkeypatch, capsys, ending):
    """In time, or when the process is told to leave; the command that uploads the rest is printed."""
    healed = threading.Event()
    monkeypatch.setattr(uploads_room, "upload", lambda *args: healed.wait())
    uploads, started_at = open_uploads(run), time.monotonic()
    seconds, name = (1.0, "SIGTERM") if ending == "seconds" else (60.0, ending)
    with StopSignals() as signals, signal_when(lambda: time.monotonic() > started_at + 1, name):
        assert not uploads.finish(4, seconds, lambda: ending != "seconds" and signals.count > 0)
    healed.set()
    assert time.monotonic() - started_at < 20
    printed = capsys.readouterr().out
    reason = "not finished within 1 s" if ending == "seconds" else "interrupted by a signal"
    assert f"({reason})" in printed and "to upload what is missing:\n" in printed


def test_a_connection_that_hangs_does_not_hold_an_upload(run, hub, monkeypatch):
    """The client itself would wait forever."""
    monkeypatch.setattr(hub_room, "TIMEOUT_SECONDS", 1.5)
    hub_room.prepare_client()
    hub.fail("POST .*/commit/", 60.0, times=1)
    started_at = time.monotonic()
    assert open_uploads(run).finish() and time.monotonic() - started_at < 20


def test_a_stopped_run_uploads_its_last_checkpoint(train, hub, tmp_path, monkeypatch):
    """A job that is told to leave takes its state to the Hub, from where the next one resumes."""
    monkeypatch.setattr(os, "_exit", sys.exit)  # which would end this process, too
    with signal_when((tmp_path / "run" / "checkpoint-2").exists), pytest.raises(SystemExit) as end:
        train(*PUSH, *SAVE, "--hub_strategy", "checkpoint", "--max_steps", "100000", "--logging_steps", "1000")
    newest = max((tmp_path / "run").glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    (branch,) = [name for name in branches_of(hub) if "manifest.json" in hub.files(REPO, name)]
    assert hub.files(REPO, branch)["manifest.json"] == (newest / "manifest.json").read_bytes()
    assert end.value.code == 75


# ---------------------------------------------------------------- before training


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"HF_TOKEN": None}, "needs a token"),
        ({"HF_TOKEN": "hf_wrong"}, "status 401: Invalid"),
        ({"HF_TOKEN": "read"}, "status 403"),
        ({"HF_HUB_OFFLINE": "1"}, "offline mode is on"),
    ],
)
def test_a_run_that_could_not_publish_does_not_start(train, hub, monkeypatch, tmp_path, change, words):
    """It ends in one sentence before anything is written, also if the repository exists: creating it then succeeds."""
    HfApi().create_repo(REPO)
    for name, value in change.items():
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, hub.read_only_token if value == "read" else value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", os.environ["HF_HUB_OFFLINE"] == "1")
    with pytest.raises(UserError, match=words):
        train(*PUSH)
    assert not list((tmp_path / "run").glob("[!.]*"))


def test_a_private_run_does_not_become_public(train, hub):
    HfApi().create_repo(REPO)
    with pytest.raises(UserError, match="someone/tiny exists and is public"):
        train(*PUSH, "--hub_private_repo")


def test_a_license_that_the_hub_does_not_know(train, hub):
    with pytest.raises(UserError, match="refuses --hub_license or --hub_language .*MIT"):
        train(*PUSH, "--hub_license", "MIT")


@pytest.mark.parametrize("name", ["tiny", "a/b/c", "someone/ti ny", "someone/a--b", "someone/.."])
def test_an_invalid_repository_name(train, name):
    with pytest.raises(UserError, match="cannot be the name of a Hub repository"):
        train("--push_to_hub", "--hub_model_id", name)


def test_a_hub_that_is_away_at_the_start(train, hub, capsys):
    """That is a warning: it is back when the first upload is due."""
    hub.fail("POST /api/repos/create", 503, times=1)
    train(*PUSH)
    assert "warning: the Hub cannot be used now (status 503" in capsys.readouterr().out
    assert "model.safetensors" in hub.files(REPO)
