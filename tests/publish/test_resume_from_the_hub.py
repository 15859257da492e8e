"""A run continues on another machine from what it has published."""

import pytest
from helpers import list_steps, read_events, read_summary, read_weights
from hub_runs import BRANCHES, PUSH, REPO, SAVE, STATE, branches_of, open_uploads, put
from huggingface_hub import HfApi

from recipe.checkpoint import STATE_NAME
from recipe.errors import UserError

RESUME = ["--resume_from_checkpoint", f"hf://{REPO}"]


@pytest.mark.parametrize("how", ["branch", "newest", "auto"])
def test_another_machine_resumes_bit_for_bit_with_the_whole_log(train, hub, tmp_path, how):
    """The newest branch is resumed without a revision, and with `auto`, which begins a run on an empty Hub."""
    push = [*PUSH, *SAVE, "--hub_strategy", "all_checkpoints"]
    first = train(*push, "--resume_from_checkpoint", "auto", output_dir=tmp_path / "first")
    branches = branches_of(hub)
    repository = hub.repositories[REPO]
    del repository.branches[branches[1]]  # as if the first machine had gone after step 2
    if how == "auto":  # and before it published a model on main
        repository.branches["main"] = next(iter(repository.commits))
    address = {"branch": f"hf://{REPO}@{branches[0]}", "newest": f"hf://{REPO}", "auto": "auto"}[how]
    second = train(*push, "--resume_from_checkpoint", address, output_dir=tmp_path / "second")
    losses = [{event["step"]: event["loss"] for event in read_events(run, "train")} for run in (first, second)]
    assert losses[0] == losses[1]
    assert read_weights(second) == read_weights(first)
    assert branches_of(hub) == branches


def test_a_checkpoint_from_the_hub_goes_on_with_other_data(train, hub, tmp_path, other):
    """A run with other data is a new one, whose log and card are of its own data."""
    train(*PUSH, *SAVE, *STATE, output_dir=tmp_path / "first")
    branch = train(*RESUME, "--max_steps", 6, "--dataset_dir", other, output_dir=tmp_path / "branch")
    stages = read_summary(branch)["stages"]
    assert [(stage["source"], stage["step"]) for stage in stages] == [("other text", 0), ("a.jsonl", 4)]
    assert list_steps(branch, "eval") == [4, 6]
    assert stages[1]["content_sha256"] in (branch / "README.md").read_text()


def test_files_that_have_arrived_are_not_downloaded_again(run, train, hub, tmp_path):
    """After an interrupted download, the same command fetches only the missing files."""
    assert open_uploads(run, *STATE).finish(4)
    hub.fail("GET .*/resolve/.*/optimizer.pt", 500, times=None)
    with pytest.raises(UserError, match="same command"):
        train(*RESUME, output_dir=tmp_path / "second")
    hub.heal()
    hub.requests.clear()
    train(*RESUME, output_dir=tmp_path / "second")
    loaded = [path for method, path, _, _ in hub.requests if method == "GET" and "/resolve/" in path]
    assert any("optimizer.pt" in path for path in loaded) and not any("model.safetensors" in path for path in loaded)


def test_auto_does_not_start_over_while_the_hub_is_away(train, hub):
    """A run that cannot ask the Hub ends, because a checkpoint may be there."""
    HfApi().create_repo(REPO)
    hub.fail("/refs", 503, times=None)
    with pytest.raises(UserError, match="503"):
        train(*PUSH, *STATE, "--resume_from_checkpoint", "auto")


@pytest.mark.parametrize(
    ("address", "named"),
    [
        (f"hf://{REPO}@step-3", f"step-3 .* hf://{REPO}@{BRANCHES[1]}"),  # the newest that can be resumed
        (f"hf://{REPO}@main", f"main .* hf://{REPO}@{BRANCHES[1]}"),
        ("hf://someone/other", "someone/other"),
        ("hf://", "hf://user/name"),
        ("hf://some one/tiny", "some one/tiny"),
        (f"hf://{REPO}@{BRANCHES[1]}", "optim 'adamw_torch_fused' -> 'muon'"),
    ],
)
def test_an_address_that_cannot_be_resumed_leaves_the_folder_free(run, train, hub, tmp_path, address, named):
    assert open_uploads(run, *STATE).finish(4)
    with pytest.raises(UserError, match=named):
        train("--optim", "muon", "--resume_from_checkpoint", address, output_dir=tmp_path / "second")
    assert not list((tmp_path / "second").glob("[!.]*"))


@pytest.mark.parametrize(("name", "content"), [("rng.pt", b"x"), (STATE_NAME, b'{"step": "x/../../../elsewhere"}')])
def test_nothing_of_a_damaged_checkpoint_is_used(run, train, hub, tmp_path, name, content):
    """A file that is not the manifest's, or that the recipe has not written, ends the run in one sentence."""
    assert open_uploads(run, *STATE).finish(4)
    put(hub, name, content, BRANCHES[1])
    with pytest.raises(UserError, match="damaged"):
        train(*RESUME, output_dir=tmp_path / "second")
    assert not list((tmp_path / "second").rglob("optimizer.pt"))
