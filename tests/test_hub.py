"""Publishing against a stand-in for the Hub: what arrives, what a failure costs, and what resumes from there."""

import json
import os
import re
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, default_arguments, launch, read_events, run_script, sigterm_when
from huggingface_hub import HfApi, constants
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.command_line import load_config
from recipe.config import TrainConfig
from recipe.errors import UserError
from recipe.publish import card, download
from recipe.publish import hub as hub_room
from recipe.publish import uploads as uploads_room

REPO = "someone/tiny"
PUSH = ["--push_to_hub", "--hub_model_id", REPO]
SAVE = ["--save_steps", "2"]
BRANCHES = ["step-000002-0.0B", "step-000004-0.0B"]
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Wait for no retry, and draw no curve: tests/test_card.py does."""
    monkeypatch.setattr(card, "save_loss_chart", lambda events, path, title: path.write_bytes(b"PNG"))
    monkeypatch.setattr(uploads_room, "RETRY_SECONDS", (0.0,))
    monkeypatch.setattr(uploads_room, "LAST_RETRY_SECONDS", (0.01, 0.01))


@pytest.fixture
def all_arrive(monkeypatch):
    """Let a run upload every checkpoint, also those that a newer one replaces if uploads fall behind."""
    monkeypatch.setattr("recipe.train.HubUploads", partial(uploads_room.HubUploads, keeps_all=True))


def branches_of(hub) -> list[str]:
    return sorted(set(hub.branches(REPO)) - {"main"})


def config_of(output_dir: Path) -> TrainConfig:
    return load_config(["--config", str(output_dir / "training_config.yaml")])[0]


def files_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def test_the_final_model_arrives(train, hub, dataset_dir, capsys):
    """With `end`, main holds the model of the output folder, byte for byte, and the written files, without paths."""
    output_dir = train(*PUSH, *SAVE, "--hub_strategy", "end", "--hub_private_repo")
    sent, local = hub.files(REPO), files_in(output_dir)
    models = {name for name in sent if name in hub_room.MODEL_FILES}
    assert models == {"config.json", "generation_config.json", "model.safetensors", *TOKENIZER}
    assert all(sent[name] == local[name] for name in models)
    written = {"README.md", "loss_curve.png", "training_config.yaml", "metrics.jsonl", "summary.json"}
    assert set(sent) == models | written
    for private in (dataset_dir.parent.parent, output_dir, ROOT):  # the folder of corpus, dataset and run; the project
        assert not [name for name, content in sent.items() if str(private).encode() in content]
    assert branches_of(hub) == [] and hub.is_private(REPO)
    assert f"published at {hub.endpoint}/{REPO}" in capsys.readouterr().out
    assert not list((output_dir / hub_room.SPOOL_NAME).iterdir())


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
        assert not set(hub.files(REPO, branch)) & set(hub_room.TRAINING_FILES)
        assert f'revision="{branch}"' in hub.files(REPO, branch)["README.md"].decode()
        events = [json.loads(line) for line in hub.files(REPO, branch)["metrics.jsonl"].splitlines()]
        assert max(event["step"] for event in events) == step


@pytest.mark.usefixtures("all_arrive")
@pytest.mark.parametrize(("strategy", "resumable"), [("checkpoint", BRANCHES[1:]), ("all_checkpoints", BRANCHES)])
def test_training_state_is_published(train, hub, strategy, resumable):
    """It arrives byte for byte, for the newest checkpoint or for all; models of older checkpoints stay."""
    output_dir = train(*PUSH, *SAVE, "--hub_strategy", strategy)
    assert branches_of(hub) == BRANCHES
    for step, branch in zip((2, 4), BRANCHES, strict=True):
        sent, saved = hub.files(REPO, branch), files_in(output_dir / f"checkpoint-{step}")
        expected = set(saved) if branch in resumable else set(saved) - set(hub_room.TRAINING_FILES)
        assert {name: sent.get(name) for name in expected} == {name: saved[name] for name in expected}
        assert set(sent) & set(hub_room.TRAINING_FILES) == expected & set(hub_room.TRAINING_FILES)
        if branch not in resumable:  # no commit holds the deleted files
            assert len(hub.commits(REPO, branch)) == 1


@pytest.mark.usefixtures("all_arrive")
def test_a_failed_squash_is_repeated(train, hub):
    """Otherwise the deleted training state would take up space forever."""
    hub.fail("super-squash", 500, times=1)
    train(*PUSH, *SAVE, "--hub_strategy", "checkpoint")
    assert len(hub.commits(REPO, BRANCHES[0])) == 1


def test_main_keeps_the_newest_checkpoint(train, hub, tmp_path):
    """One that an earlier process left behind gets its branch, but main does not go back."""
    output_dir = train(*PUSH, *SAVE, "--hub_strategy", "all_checkpoints")
    del hub.repositories[REPO].branches[BRANCHES[0]]
    newest = hub.branches(REPO)["main"]
    uploads = uploads_room.HubUploads(config_of(output_dir), output_dir, print)
    uploads.add(output_dir / "checkpoint-2", 2)
    uploads.advance()
    assert uploads.finish() and branches_of(hub) == BRANCHES
    assert hub.branches(REPO)["main"] == newest


def test_files_that_a_model_no_longer_has_leave_the_hub(hub, tmp_path):
    """One example is the summary of a run that was extended. Files that the recipe does not publish stay."""
    api = HfApi()
    api.create_repo(REPO)
    for name in ("summary.json", "notes.txt"):
        api.upload_file(path_or_fileobj=b"{}", path_in_repo=name, repo_id=REPO)
    (tmp_path / "config.json").write_text("{}")
    hub_room._commit(api, REPO, tmp_path, ("config.json", "summary.json"), "main", "Step 1", True)
    assert set(hub.files(REPO)) == {"config.json", "notes.txt"}


def test_scores_of_a_saved_model_are_published(train, hub):
    """evaluation.json goes to the Hub and into the card's metadata; the score of a part of a task names its size."""
    output_dir = train(*PUSH, "--hub_strategy", "end")
    scores = {"acc": 0.5, "num_examples": 20}
    content = {"model": "x", "tasks": {"hellaswag": scores}, "texts": [], "note": f"read {output_dir}/a.txt"}
    (output_dir / "evaluation.json").write_text(json.dumps(content))
    assert run_script("scripts/push_to_hub.py", output_dir, "--hub_license", "mit") == ""
    sent = hub.files(REPO)
    assert json.loads(sent["evaluation.json"])["tasks"] == {"hellaswag": scores}
    assert str(output_dir).encode() not in sent["evaluation.json"]
    page = sent["README.md"].decode()
    assert "license: mit" in page and "HellaSwag (20 examples)" in page


# ---------------------------------------------------------------- resume


def losses(output_dir: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in read_events(output_dir, "train")}


@pytest.mark.parametrize("address", [f"hf://{REPO}@{BRANCHES[0]}", f"hf://{REPO}", "auto"])
def test_another_machine_resumes_from_the_hub(train, hub, tmp_path, address):
    """It continues bit for bit, with the whole log. Without a revision, and with `auto`, the newest branch counts."""
    push = [*PUSH, *SAVE, "--hub_strategy", "all_checkpoints"]
    first = train(*push, output_dir=tmp_path / "first")
    del hub.repositories[REPO].branches[BRANCHES[1]]  # as if the first machine had gone after step 2
    second = train(*push, "--resume_from_checkpoint", address, output_dir=tmp_path / "second")
    assert losses(second) == losses(first)
    assert (second / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    assert branches_of(hub) == BRANCHES


def test_auto_starts_fresh_on_an_empty_hub(train, hub, capsys):
    output_dir = train(*PUSH, *SAVE, "--hub_strategy", "checkpoint", "--resume_from_checkpoint", "auto")
    assert "the run starts at step 0" in capsys.readouterr().out
    assert BRANCHES[1] in branches_of(hub) and (output_dir / "model.safetensors").exists()


def test_auto_does_not_start_over_while_the_hub_is_away(train, hub):
    """A checkpoint may be there."""
    hub.fail("/refs", 503, times=None)
    with pytest.raises(UserError, match="the checkpoint on the Hub cannot be read .status 503"):
        train(*PUSH, "--hub_strategy", "checkpoint", "--resume_from_checkpoint", "auto")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (f"hf://{REPO}@step-000003-0.0B", f"{REPO} on the Hub has no revision step-000003-0.0B; the newest"),
        (f"hf://{REPO}@main", f"revision main of {REPO} contains no training state .* newest .* @{BRANCHES[1]}"),
        ("hf://someone/other", "there is no repository someone/other on the Hub"),
        ("hf://", "hf:// is no address of a checkpoint; expected hf://user/name@step"),
        ("hf://some one/tiny", "'some one/tiny' cannot be the name of a Hub repository"),
        (f"hf://{REPO}@{BRANCHES[1]}", "belongs to a run with other options: seed 1337 -> 1"),
    ],
)
def test_what_cannot_be_resumed(train, hub, tmp_path, address, message):
    """One sentence, before a model is built, that names a checkpoint that can be resumed."""
    train(*PUSH, *SAVE, "--hub_strategy", "checkpoint", "--save_total_limit", "1")
    with pytest.raises(UserError, match=re.sub(" [.][*] (?=@)", ".*", message)):
        train("--seed", "1", "--resume_from_checkpoint", address, output_dir=tmp_path / "second")
    download.discard_download()  # as at the end of the process
    train("--seed", "1", output_dir=tmp_path / "second")  # the folder is free


def test_a_download_does_not_mix_two_runs(train, hub, tmp_path):
    train(*PUSH, *SAVE, "--hub_strategy", "checkpoint")
    other = train(*SAVE, "--max_steps", "6", output_dir=tmp_path / "other")
    with pytest.raises(UserError, match="contains checkpoints already .checkpoint-2, checkpoint-6"):
        train("--resume_from_checkpoint", f"hf://{REPO}", output_dir=other)


def test_a_damaged_checkpoint_on_the_hub(train, hub, tmp_path):
    """Its SHA-256 differs from the manifest's, so nothing of it is used."""
    train(*PUSH, *SAVE, "--hub_strategy", "checkpoint")
    HfApi().upload_file(
        path_or_fileobj=b"x", path_in_repo="rng.pt", repo_id=REPO, revision=BRANCHES[1], commit_message="damage"
    )
    with pytest.raises(UserError, match="is damaged on the Hub: rng.pt has 1 bytes"):
        train("--resume_from_checkpoint", f"hf://{REPO}", output_dir=tmp_path / "second")
    assert not list((tmp_path / "second").glob("*checkpoint*"))


# ---------------------------------------------------------------- faults

FAULTS = [401, 403, 404, 409, 412, 429, 500, 503, "drop", "lose"]


@pytest.mark.parametrize("fault", FAULTS)
def test_training_ends_well_without_the_hub(train, hub, capsys, fault):
    """The run completes and names the command that repeats the uploads; that command brings everything to the Hub."""
    hub.fail(r"POST .*/(preupload|commit)", fault, times=None)
    output_dir = train(*PUSH, *SAVE, "--hub_strategy", "checkpoint")
    printed = capsys.readouterr().out
    assert printed.count("the upload of step-000002-0.0B failed") <= 1
    assert re.search(r"not uploaded: (step-000002-0.0B, )?step-000004-0.0B, final \(", printed)
    assert f"to upload what is missing:\n    python scripts/push_to_hub.py {output_dir}\n" in printed
    assert (output_dir / "model.safetensors").is_file()
    hub.heal()
    assert run_script("scripts/push_to_hub.py", output_dir) == ""
    assert branches_of(hub) == BRANCHES
    assert hub.files(REPO)["model.safetensors"] == (output_dir / "model.safetensors").read_bytes()
    state = (output_dir / "checkpoint-4" / "optimizer.pt").read_bytes()
    assert hub.files(REPO, BRANCHES[1])["optimizer.pt"] == state


@pytest.mark.parametrize("fault", [429, 500, "drop", "cut", 0.3])
def test_a_passing_fault_costs_nothing(train, hub, capsys, fault):
    """An upload that fails once is repeated, and the run ends as if nothing had happened."""
    hub.fail(r"/commit|/preupload|lfs", fault, times=3)
    train(*PUSH, *SAVE, "--hub_strategy", "all_checkpoints")
    assert branches_of(hub) == BRANCHES
    assert "not uploaded" not in capsys.readouterr().out


def test_without_xet(train, hub, monkeypatch):
    """Where Xet cannot be reached, as behind some firewalls, the second attempt goes through LFS."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    output_dir = train(*PUSH, *SAVE, "--hub_strategy", "checkpoint")
    assert any("xet-write-token" in path for _, path, _, _ in hub.requests)
    assert hub.files(REPO)["model.safetensors"] == (output_dir / "model.safetensors").read_bytes()
    assert branches_of(hub)[-1] == BRANCHES[1]


def test_uploads_do_not_hold_up_training(train, hub, capsys):
    """While one hangs, the run trains, saves, and drops what a newer checkpoint replaces; the newest arrives."""
    hub.fail("POST .*/commit", 3.0, times=1)
    output_dir = train(*PUSH, "--save_steps", "1", "--max_steps", "12", "--save_total_limit", "2")
    seconds = [event["train_seconds"] for event in read_events(output_dir, "train")]
    assert seconds[-1] < 3.0
    found, printed = branches_of(hub), capsys.readouterr().out
    assert found[-1] == "step-000012-0.0B" and 2 <= len(found) < 12  # the first began during training
    left = "step-000011-0.0B (a newer one was due)" in printed  # the limit of two checkpoints has deleted the others
    assert f"{12 - len(found) - left} checkpoints were replaced by newer ones" in printed


def test_a_failing_upload_is_not_repeated_at_once(train, hub, monkeypatch, tmp_path):
    """During training, the next attempt waits. At the end, a refusal is final; other failures get three attempts."""
    monkeypatch.setattr(uploads_room, "RETRY_SECONDS", (1000.0,))
    for fault, attempts in ((403, 1), (500, 3)):
        hub.requests.clear()
        hub.fail("POST .*/commit/", fault, times=None)
        train(*PUSH, "--save_steps", "1", "--max_steps", "8", output_dir=tmp_path / str(fault))
        commits = [path for method, path, _, _ in hub.requests if method == "POST" and "/commit/" in path]
        assert attempts + 1 <= len(commits) <= 2 * attempts + 1  # one in training; the last checkpoint and the model
        hub.heal()


def test_a_connection_that_hangs_does_not_hold_the_run(train, hub, monkeypatch):
    """The client itself would wait forever."""
    monkeypatch.setattr(hub_room, "TIMEOUT_SECONDS", 1.5)
    hub.fail("POST .*/commit/", 60.0, times=1)
    started_at = time.perf_counter()
    train(*PUSH, "--hub_strategy", "end")
    assert time.perf_counter() - started_at < 20 and "model.safetensors" in hub.files(REPO)


@pytest.mark.parametrize(("stopped", "code"), [(True, 75), (False, 0)])
def test_an_upload_that_never_returns_does_not_hold_the_end(train, hub, tmp_path, monkeypatch, capsys, stopped, code):
    """At a stop, and at the end of a complete run, it is given up in time, with the command that uploads the rest."""
    run, healed = tmp_path / "run", threading.Event()
    monkeypatch.setattr(uploads_room, "upload", lambda *args: healed.wait())
    monkeypatch.setattr("recipe.run.report.STOP_SECONDS", 1.0)
    monkeypatch.setattr(uploads_room.HubUploads.finish, "__defaults__", (None, 1.0))  # of a complete run
    monkeypatch.setattr(os, "_exit", sys.exit)  # which would end this process, too
    options = [*PUSH, *SAVE, "--logging_steps", "1000", "--max_steps", "100000" if stopped else "8"]
    started_at = time.perf_counter()
    with sigterm_when((run / "checkpoint-2").exists if stopped else lambda: False), pytest.raises(SystemExit) as end:
        train(*options)
    healed.set()
    assert end.value.code == code and time.perf_counter() - started_at < 30
    assert f"to upload what is missing:\n    python scripts/push_to_hub.py {run}\n" in capsys.readouterr().out
    assert (run / ".resumable").exists() == stopped != (run / "summary.json").exists()


def test_a_stopped_run_uploads_its_last_checkpoint(train, hub, tmp_path):
    """A job that is told to leave takes its state to the Hub, from where the next one resumes."""
    with sigterm_when((tmp_path / "run" / "checkpoint-2").exists), pytest.raises(SystemExit):
        train(*PUSH, *SAVE, "--hub_strategy", "checkpoint", "--max_steps", "100000", "--logging_steps", "1000")
    newest = max((tmp_path / "run").glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    branch = f"step-{int(newest.name.partition('-')[2]):06d}-0.0B"
    assert hub.files(REPO, branch)["manifest.json"] == (newest / "manifest.json").read_bytes()


# ---------------------------------------------------------------- before training


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"HF_TOKEN": None}, "--push_to_hub needs a token"),
        ({"HF_TOKEN": "hf_wrong"}, "refuses uploads to someone/tiny .status 401: Invalid"),
        ({"HF_TOKEN": "read"}, "refuses uploads to someone/tiny .status 403"),
        ({"HF_HUB_OFFLINE": "1"}, "offline mode is on"),
    ],
)
def test_a_run_that_could_not_publish_does_not_start(train, hub, monkeypatch, tmp_path, change, message):
    """It ends in one sentence before anything is written."""
    for name, value in change.items():
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, hub.read_only_token if value == "read" else value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", os.environ["HF_HUB_OFFLINE"] == "1")
    with pytest.raises(UserError, match=message):
        train(*PUSH)
    assert not list((tmp_path / "run").glob("[!.]*"))


def test_a_token_that_cannot_write_to_an_existing_repository(train, hub, monkeypatch):
    """Creating what exists succeeds with any token."""
    HfApi().create_repo(REPO)
    monkeypatch.setenv("HF_TOKEN", hub.read_only_token)
    with pytest.raises(UserError, match="refuses uploads to someone/tiny .status 403"):
        train(*PUSH)


def test_a_private_run_does_not_become_public(train, hub):
    HfApi().create_repo(REPO)
    with pytest.raises(UserError, match="someone/tiny exists and is public"):
        train(*PUSH, "--hub_private_repo")


@pytest.mark.parametrize("name", ["tiny", "a/b/c", "someone/ti ny", "someone/a--b", "someone/.."])
def test_an_invalid_repository_name(train, name):
    with pytest.raises(UserError, match="cannot be the name of a Hub repository; expected user/name"):
        train("--push_to_hub", "--hub_model_id", name)


def test_a_hub_that_is_away_at_the_start(train, hub, capsys):
    """That is a warning: it is back when the first upload is due."""
    hub.fail("POST /api/repos/create", 503, times=1)
    train(*PUSH)
    assert "warning: the Hub cannot be used now (status 503" in capsys.readouterr().out
    assert "model.safetensors" in hub.files(REPO)


def test_the_token_stays_in_the_header(hub, tmp_path, dataset_dir):
    """A run of its own process writes it to no file, prints it nowhere, and sends it in no body and no address."""
    arguments = default_arguments(dataset_dir, tmp_path / "run", TINY)
    result = launch([*arguments, *PUSH, *SAVE, "--hub_strategy", "checkpoint"], tmp_path)
    assert result.returncode == 0, result.stderr
    assert branches_of(hub) == BRANCHES[-1:] or branches_of(hub) == BRANCHES
    assert hub.token not in result.stdout + result.stderr
    for path in tmp_path.rglob("*"):
        assert not (path.is_file() and hub.token.encode() in path.read_bytes()), path
    sent = [(path.encode(), body, headers) for _, path, headers, body in hub.requests]
    assert all(hub.token.encode() not in path + body for path, body, _ in sent)
    names = {name for _, _, headers in sent for name, value in headers.items() if hub.token in value}
    assert names == {"authorization"}
