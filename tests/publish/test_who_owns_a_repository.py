"""One repository holds one run: nobody's files are replaced without consent, and nothing private becomes public."""

import json
import shutil

import pytest
from helpers import read_events
from hub_runs import BRANCHES, PUSH, REPO, SAVE, STATE, branches_of, open_uploads, put
from huggingface_hub import HfApi

from recipe.errors import UserError
from recipe.publish import hub as hub_room
from recipe.publish.hub import MainBranch, decide_main


@pytest.mark.parametrize(
    ("held", "run_id", "step", "final_step", "expected"),
    [
        # The repository is empty, or holds what no run published, another run or this one. This run still trains.
        ((None, 0, ()), "a", 2, None, "published"),
        ((None, 0, ("README.md",)), "a", 2, None, "refused"),
        ((None, 0, ("README.md",)), None, 0, None, "refused"),
        (("b", 6, ("README.md",)), "a", 4, None, "refused"),
        (("a", 2, ("README.md",)), "a", 4, None, "published"),
        (("a", 4, ("README.md",)), "a", 4, None, "published"),  # its card may name more branches
        (("a", 4, ("README.md",)), "a", 2, None, "kept"),
        # It has ended: its final model belongs on main, however old, and no other.
        ((None, 0, ()), "a", 2, 4, "kept"),
        ((None, 0, ()), "a", 4, 4, "published"),
        (("a", 2, ("README.md",)), "a", 4, 2, "kept"),
        (("b", 2, ("README.md",)), "a", 4, 4, "refused"),
    ],
)
def test_who_owns_main(held, run_id, step, final_step, expected):
    """Consent changes what is refused only: another's main is as if it were empty."""
    found, empty = MainBranch(*held, is_private=False), MainBranch(None, 0, (), is_private=False)
    assert decide_main(found, run_id, step, final_step, may_overwrite=False) == expected
    agreed = decide_main(empty, run_id, step, final_step, False) if expected == "refused" else expected
    assert decide_main(found, run_id, step, final_step, may_overwrite=True) == agreed


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("README.md", b"# Mine", "README.md"),
        ("README.md", b"---\nlicense: [mit\n---\n", "README.md"),  # which cannot be read
        ("README.md", b"---\n- a\n---\nhello", "README.md"),
        ("README.md", b"---\nrun_id: b\nstep: 9\n---\n", "another run, at step 9"),
        ("README.md", b"---\nlicense: mit\n---\n", None),  # the Hub's own form makes one
        ("README.md", b"---\nrun_id: [a]\nstep: many\n---\n", None),
        ("config.json", b"{}", "config.json"),
        ("model.gguf", b"x", "model.gguf"),
        ("notes.txt", b"x", None),  # no upload touches it
    ],
)
def test_files_of_others_are_not_replaced_without_consent(run, train, hub, tmp_path, name, content, named):
    """A run is refused before it trains, and its upload is, too: the Hub may have been away at the start."""
    HfApi().create_repo(REPO)
    put(hub, name, content)
    before = hub.files(REPO)
    if named is None:
        assert open_uploads(run).finish(4) and "model.safetensors" in hub.files(REPO)
        return
    with pytest.raises(UserError, match=f"{named}.*--hub_overwrite"):
        train(*PUSH, output_dir=tmp_path / "second")
    assert not list((tmp_path / "second").glob("[!.]*"))
    assert not open_uploads(run).finish(4) and hub.files(REPO) == before
    assert open_uploads(run, "--hub_overwrite").finish(4) and hub.files(REPO).get(name) != content


def test_consent_replaces_all_files_of_another_model(run, hub):
    """Files that the new model does not have go, too, also later; files that are no part of a model stay."""
    HfApi().create_repo(REPO)
    gone = {"vocab.json", "adapter_config.json", "optimizer.pt"}
    for name in (*gone, "README.md", "model.safetensors", "notes.txt"):
        put(hub, name)
    uploads = open_uploads(run, "--hub_overwrite", *STATE)
    shutil.rmtree(run / ".hub" / "step-000002")
    assert uploads.finish()  # of a checkpoint with its training state
    assert hub.files(REPO)["model.safetensors"] == (run / "checkpoint-4" / "model.safetensors").read_bytes()
    assert {*gone, "notes.txt"} & set(hub.files(REPO)) == {"notes.txt"}
    put(hub, "vocab.json")  # as if the run's model had had it before
    assert open_uploads(run).finish(4)
    assert {*gone, "notes.txt"} & set(hub.files(REPO)) == {"notes.txt"}


def edit_card(hub, branch: str = "main") -> None:
    text = hub.files(REPO, branch)["README.md"].decode()
    put(hub, "README.md", (text.replace("license: mit", "license: apache-2.0") + "My note\n").encode(), branch)


def upload_step_2(run) -> None:
    uploads = open_uploads(run, "--hub_license", "mit")
    shutil.rmtree(run / ".hub" / "step-000004")
    assert uploads.finish()


@pytest.mark.parametrize("is_edited", [True, False])
def test_an_upload_keeps_what_its_owner_edited_on_the_card(run, hub, capsys, is_edited):
    """On main, and on a branch that is written again. Step and scores move on; other cards are written anew."""
    upload_step_2(run)
    for branch in ("main", BRANCHES[0]) if is_edited else ():
        edit_card(hub, branch)
    assert open_uploads(run, "--hub_license", "bsd").finish(4)
    for branch, step in (("main", 4), (BRANCHES[0], 2)):
        text = hub.files(REPO, branch)["README.md"].decode()
        assert text.endswith("My note\n") == is_edited and f"\nstep: {step}\n" in text
        assert ("license: apache-2.0" in text, "license: bsd" in text) == (is_edited, not is_edited)
        assert ("model-index:" in text) == (step == 4)  # step 2 has not been evaluated
    assert ("edited README.md" in capsys.readouterr().out) == is_edited


def test_an_edit_during_an_upload_is_not_lost(run, hub, monkeypatch):
    """Its commit is refused, and the next attempt sees the edit."""
    upload_step_2(run)
    commit_files = hub_room.commit_files
    edits = ["main"]
    monkeypatch.setattr(
        hub_room, "commit_files", lambda *a: (edits and edit_card(hub, edits.pop()), commit_files(*a))[1]
    )
    assert open_uploads(run).finish(4)
    text = hub.files(REPO)["README.md"].decode()
    assert "My note" in text and "\nstep: 4\n" in text
    assert hub.files(REPO)["model.safetensors"] == (run / "model.safetensors").read_bytes()


def test_a_private_model_is_never_uploaded_to_a_public_repository(run, train, hub, tmp_path):
    """The Hub may be away at the start, and the repository may be made public after it."""
    HfApi().create_repo(REPO, private=False)
    hub.fail("POST /api/repos/create", 503, times=1)
    hub.fail(f"GET /api/models/{REPO}$", 503, times=1)
    with pytest.raises(SystemExit) as end:  # after the end of the run
        train(*PUSH, *SAVE, "--hub_private_repo", output_dir=tmp_path / "private")
    assert end.value.code == 1 and (tmp_path / "private" / "summary.json").is_file()
    assert hub.files(REPO) == {} and branches_of(hub) == []
    hub.repositories[REPO].private = True
    assert open_uploads(run, "--hub_private_repo").finish(4)
    before = hub.branches(REPO)
    hub.repositories[REPO].private = False
    assert not open_uploads(run, "--hub_private_repo").finish(4) and hub.branches(REPO) == before


def test_an_organization_decides_whether_new_repositories_are_private(run, hub):
    """Without --hub_private_repo, the request leaves it out, so the organization's default applies."""
    assert open_uploads(run).finish(4)
    (created,) = {body for _, path, _, body in hub.requests if path.endswith("/repos/create")}
    assert not {"private", "visibility"} & {key for key, value in json.loads(created).items() if value is not None}


def test_a_second_run_that_may_overwrite_changes_no_branch_of_the_first(run, hub, train, tmp_path):
    """The second run, of the same steps, has its model on main, and its state is the one that resumes."""
    assert open_uploads(run, "--hub_strategy", "all_checkpoints").finish(4)
    first = {name: commit for name, commit in hub.branches(REPO).items() if name != "main"}
    options = [*PUSH, *SAVE, "--seed", "1", *STATE]
    second = train(*options, "--hub_overwrite", output_dir=tmp_path / "second")
    assert first.items() <= hub.branches(REPO).items()
    assert hub.files(REPO)["model.safetensors"] == (second / "checkpoint-4" / "model.safetensors").read_bytes()
    assert not [name for name in first if f"`{name}`" in hub.files(REPO)["README.md"].decode()]
    third = train(*options, "--resume_from_checkpoint", "auto", output_dir=tmp_path / "third")
    resumed, started = read_events(third, "start")[-1], read_events(second, "start")[-1]
    assert (resumed["step"], resumed["run_id"]) == (4, started["run_id"])


@pytest.mark.parametrize("address", ["auto", f"hf://{REPO}"])
def test_a_run_from_the_hub_with_another_schedule_is_a_new_one(train, hub, tmp_path, address):
    """Without another repository, a fork of a published run is refused before it changes any branch."""
    options = [*PUSH, *SAVE, *STATE]
    train(*options, output_dir=tmp_path / "first")
    before = hub.branches(REPO)
    with pytest.raises(UserError, match="another run, .*another schedule.* pass another --hub_model_id"):
        train(*options, "--resume_from_checkpoint", address, "--max_steps", "6", output_dir=tmp_path / "fork")
    assert hub.branches(REPO) == before
