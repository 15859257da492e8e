"""A Hub that fails, hangs or refuses costs no training, and what is missing there is named."""

import os
import sys
import threading
import time

import pytest
from helpers import read_events, run_script, signal_when
from hub_runs import BRANCHES, PUSH, REPO, SAVE, STATE, branches_of, open_uploads
from huggingface_hub import HfApi, constants
from huggingface_hub import __version__ as hub_version

from recipe.errors import UserError
from recipe.publish import hub as hub_room
from recipe.publish import uploads as uploads_room

HANGS = 60.0  # seconds


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        *((r"/commit|/preupload|lfs", fault) for fault in (500, "drop", "lose")),
        ("POST .*/commit/", HANGS),  # the client itself would wait forever
        (f"GET /api/models/{REPO}$", HANGS),  # for which the client asks for that (2.4)
    ],
)
def test_an_upload_that_fails_once_is_repeated(run, hub, monkeypatch, pattern, fault):
    """One passing fault in any request leaves the Hub as if nothing had happened."""
    monkeypatch.setattr(hub_room, "TIMEOUT_SECONDS", 1.5)
    hub_room.prepare_client()
    hub.fail(pattern, fault, times=1)
    started_at = time.monotonic()
    assert open_uploads(run, "--hub_strategy", "all_checkpoints").finish(4)
    assert branches_of(hub) == BRANCHES and time.monotonic() - started_at < HANGS / 2


def test_a_hub_that_is_away_at_the_start_may_be_back_for_the_upload(train, hub, monkeypatch):
    """The first request hangs, which checks the license, and so does the one that asks whose the repository is."""
    monkeypatch.setattr(hub_room, "TIMEOUT_SECONDS", 0.5)
    for pattern in ("POST /api/validate-yaml", f"GET /api/models/{REPO}$"):
        hub.fail(pattern, HANGS, times=1)
    started_at = time.monotonic()
    train(*PUSH)
    assert time.monotonic() - started_at < HANGS / 2 and "model.safetensors" in hub.files(REPO)


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [*((r"POST .*/(preupload|commit)", fault) for fault in (401, 403, 500, "drop")), ("PUT /lfs-storage", 507)],
)
def test_what_could_not_be_uploaded_is_named_and_repeated(run, hub, capsys, pattern, fault):
    """Each folder is tried twice; the command that uploads the rest is printed, and works."""
    hub.fail(pattern, fault, times=None)
    assert not open_uploads(run, *STATE).finish(4)
    printed = capsys.readouterr().out
    assert printed.count("will be repeated") == 1
    for name in ("step-000002", "step-000004", "final"):
        assert f"not uploaded: {name} ({f'status {fault}' if fault != 'drop' else ''}" in printed
    assert f"    python scripts/push_to_hub.py {run}\n" in printed
    hub.heal()
    options = ["--hub_model_id", REPO, *STATE, "--hub_license", "mit"]
    assert run_script("scripts/push_to_hub.py", run, *options) == ""
    assert branches_of(hub) == BRANCHES and "license: mit" in hub.files(REPO)["README.md"].decode()
    assert hub.files(REPO, BRANCHES[1])["optimizer.pt"] == (run / "checkpoint-4" / "optimizer.pt").read_bytes()


def test_a_run_whose_final_model_has_not_arrived_has_failed(run, hub, capsys):
    """Though a checkpoint has."""
    hub.fail("POST .*/commit/main", 500, times=None)
    assert not open_uploads(run, "--hub_strategy", "all_checkpoints").finish(4)
    assert "published at" in capsys.readouterr().out
    assert BRANCHES[0] in branches_of(hub) and "model.safetensors" not in hub.files(REPO)


def test_a_failed_upload_is_tried_again_at_the_next_save(run, hub):
    hub.fail("POST .*/commit", 500, times=None)
    uploads = open_uploads(run)
    for _ in range(5):
        uploads.advance()
        uploads.thread.join()
    count = len([path for _, path, _, _ in hub.requests if "/commit/" in path])
    hub.heal()
    uploads.add(run / "checkpoint-4", 4)
    uploads.advance()
    uploads.thread.join()
    assert count == 2 and branches_of(hub) == BRANCHES and not uploads.failures


def test_uploads_do_not_hold_up_training(train, hub):
    """While an upload hangs, the run trains, saves, and drops what a newer checkpoint replaces; the newest arrives."""
    hub.fail("POST .*/commit", 3.0, times=1)
    output_dir = train(*PUSH, "--save_steps", "1", "--max_steps", "12", "--save_total_limit", "2")
    assert read_events(output_dir, "train")[-1]["train_seconds"] < 3.0
    found = branches_of(hub)
    assert found[-1].startswith("step-000012") and 2 <= len(found) < 12  # the first began during training


@pytest.mark.parametrize(
    ("seconds", "seconds_to_signal", "reason"),
    [(1.0, HANGS, "not finished in time"), (HANGS, 1.0, "interrupted by a signal")],
)
def test_an_upload_that_hangs_is_given_up(run, hub, monkeypatch, capsys, seconds, seconds_to_signal, reason):
    """The command that uploads the rest is printed. While a run waits, it says for what."""
    healed = threading.Event()
    monkeypatch.setattr(uploads_room, "REPORT_SECONDS", 0.3)
    monkeypatch.setattr(uploads_room, "upload", lambda *_: healed.wait())
    uploads = open_uploads(run)
    started_at = time.monotonic()
    assert not uploads.finish(4, seconds, lambda: time.monotonic() > started_at + seconds_to_signal)
    assert time.monotonic() - started_at < HANGS / 3
    healed.set()
    uploads.thread.join()  # or it would go on in the next test
    printed = capsys.readouterr().out
    assert f"({reason})" in printed
    assert "scripts/push_to_hub.py" in printed
    assert printed.count(f"still uploading to {REPO}: final, step-000002, step-000004") >= 2


def test_a_stopped_run_uploads_its_last_checkpoint(train, hub, tmp_path, monkeypatch):
    """A job that is told to leave takes its state to the Hub, from where the next one resumes."""
    monkeypatch.setattr(os, "_exit", sys.exit)  # which would end this process, too
    with signal_when((tmp_path / "run" / "checkpoint-2").exists), pytest.raises(SystemExit) as end:
        train(*PUSH, *SAVE, *STATE, "--max_steps", "100000", "--logging_steps", "1000")
    newest = max((tmp_path / "run").glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    (branch,) = [name for name in branches_of(hub) if "manifest.json" in hub.files(REPO, name)]
    assert hub.files(REPO, branch)["manifest.json"] == (newest / "manifest.json").read_bytes()
    assert end.value.code == 75


@pytest.mark.parametrize(
    ("token", "is_offline", "options", "named"),
    [
        (None, False, [], "hf auth login"),
        ("hf_any", False, [], "401"),
        ("hf_any", False, [], "403"),  # it may only read
        ("hf_any", True, [], "HF_HUB_OFFLINE"),
        ("hf_any", False, ["--hub_license", "MIT"], "--hub_license"),
        *(("hf_any", False, ["--hub_model_id", name], "user/name") for name in ("tiny", "a/b/c", "a/ti ny", "a/..")),
    ],
)
def test_a_run_that_could_not_publish_does_not_start(
    train, hub, monkeypatch, tmp_path, token, is_offline, options, named
):
    """Nothing is written, though the repository exists and its creation succeeds."""
    if "--hub_license" in options and hub_version.startswith("1."):
        pytest.skip("before version 2, the client asks huggingface.co about licenses, whatever the endpoint")
    HfApi().create_repo(REPO)
    if named.isdigit():
        hub.fail("auth-check/write", int(named), times=None)
    monkeypatch.setenv("HF_TOKEN", token or "")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    with pytest.raises(UserError, match=named):
        train(*PUSH, *options)
    assert not list((tmp_path / "run").glob("[!.]*"))
