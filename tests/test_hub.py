"""Publishing against a stand-in for the Hub: what arrives, what a failure costs, and what resumes from there."""

import dataclasses
import json
import os
import re
import shutil
import sys
import threading
import time
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml
from conftest import ROOT, TINY, default_arguments, launch, read_events, run_script, signal_when
from hub_repository import File
from huggingface_hub import HfApi, constants
from huggingface_hub import __version__ as hub_version
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.checkpoint import STATE_NAME, CheckpointSaver, RunState
from recipe.command_line import load_config
from recipe.config import IDENTITY_OPTIONS, MISSING, OPTIONS, PUBLIC, SCHEDULE_OPTIONS, VISIBILITY
from recipe.errors import UserError
from recipe.publish import hub as hub_room
from recipe.publish import uploads as uploads_room
from recipe.publish.hub import TRAINING_FILES, MainBranch, branch_name, decide_main
from recipe.publish.uploads import HubUploads
from recipe.run.facts import RunFacts, collect_facts
from recipe.run.stop import StopSignals

REPO = "someone/tiny"
PUSH = ["--push_to_hub", "--hub_model_id", REPO]
SAVE = ["--save_steps", "2"]
STEPS = ["step-000002-0.3k", "step-000004-0.5k"]
BRANCHES = [f"{name}-aaaaaa" for name in STEPS]  # of `open_uploads`


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Do not wait before another attempt."""
    monkeypatch.setattr(uploads_room, "PAUSE_SECONDS", 0.0)


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


def branches_of(hub, repo: str = REPO) -> list[str]:
    return sorted(set(hub.branches(repo)) - {"main"})


def steps_of(hub) -> list[str]:
    return [name.rpartition("-")[0] for name in branches_of(hub)]


def files_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


# ---------------------------------------------------------------- what arrives


def test_the_final_model_arrives(train, hub, dataset_dir, capsys):
    """With `end`, main holds the model byte for byte, and the written files; the token is in one header only."""
    output_dir = train(*PUSH, *SAVE, "--hub_strategy", "end", "--hub_private_repo")
    sent, local = hub.files(REPO), files_in(output_dir)
    models = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert set(sent) == models | {"README.md", "loss_curve.png", "training_config.yaml", "metrics.jsonl"}
    assert all(sent[name] == local[name] for name in models)
    assert branches_of(hub) == [] and hub.is_private(REPO)
    printed = capsys.readouterr().out
    assert f"published at {hub.endpoint}/{REPO}" in printed and hub.token not in printed
    assert not list((output_dir / ".hub").iterdir())
    headers = {name for _, _, headers, _ in hub.requests for name, value in headers.items() if hub.token in value}
    assert headers == {"authorization"}


def test_nothing_private_is_in_any_request(train, hub, dataset_dir, tmp_path, monkeypatch):
    """Canaries in every option that takes text, in file names, in log keys and in the environment."""
    folder = tmp_path / "canary-user" / "canary-project"
    shutil.copytree(dataset_dir, folder / "canary-data")
    metadata = json.loads((folder / "canary-data" / "metadata.json").read_text())
    metadata["source"] |= {
        "train_files": ["/canary/a.txt"],
        "dataset_name": "canary/x",
        "dataset_config_name": "canary",
    }
    metadata["tokenizer"] = "canary/tokenizer"
    shutil.copytree(dataset_dir / "tokenizer", folder / "canary" / "tokenizer")
    (folder / "canary-data" / "metadata.json").write_text(json.dumps(metadata))
    for name in ("HF_CANARY", "WANDB_PROJECT", "USER", "HOSTNAME", "SLURM_JOB_NAME"):
        monkeypatch.setenv(name, "canary")
    monkeypatch.chdir(folder)
    shutil.copytree(folder / "canary-data", folder / "more" / "canary-2")
    options = [
        "--dataset_dir",
        folder / "canary-data",
        folder / "more" / "canary-2",
        "--run_name",
        "canary",
        "--cache_dir",
        "/canary/cache",
    ]
    options += ["--report_to", "tensorboard", "--save_steps", "2", "--tokenizer_name", "canary/tokenizer"]
    options += ["--hub_strategy", "all_checkpoints"]

    @dataclasses.dataclass(frozen=True)
    class MoreFacts(RunFacts):
        canary: int = 1

    monkeypatch.setattr(
        "recipe.train.collect_facts",
        lambda *args: MoreFacts(**vars(collect_facts(*args)) | {"recipe": "canary"}),
    )
    run = train(*PUSH, *options, output_dir=folder / "canary-run")
    assert "canary" in (run / "metrics.jsonl").read_text() and "canary" in (run / "training_config.yaml").read_text()
    text = yaml.safe_load((run / "training_config.yaml").read_text())
    for name, option in OPTIONS.items():  # as if the run had been started with them
        is_public = VISIBILITY.get(name) == PUBLIC or name.startswith(("hub_", "sample"))
        if "str" in str(option.type) and not is_public:
            text[name] = ["canary"] if "list" in str(option.type) else "canary/canary"
    (run / "training_config.yaml").write_text(yaml.safe_dump(text))
    (run / "notes-canary.txt").write_text("canary")
    (run / "evaluation.json").write_text(json.dumps({"texts": [{"name": "canary.txt", "loss": 1.0}]}))
    config, _ = load_config(["--dataset_dir", "x", "--block_size", "32", "--global_batch_size", "4", *PUSH])
    uploads = HubUploads(config, read_events(run, "start")[0]["run_id"], run, print, keeps_all=True)
    uploads.add(run / "checkpoint-4", 4)
    assert uploads.finish(4) and len(branches_of(hub)) == 2
    for method, path, headers, body in hub.requests:
        assert b"canary" not in (path + json.dumps(headers)).encode() + body, f"{method} {path}"
    for branch in hub.branches(REPO):  # also what was sent in base64
        assert not [name for name, content in hub.files(REPO, branch).items() if b"canary" in content]


def test_published_options_repeat_the_run(run, hub):
    """They are a recipe; what a resumed run must share is among them."""
    assert open_uploads(run).finish(4)
    found = yaml.safe_load(hub.files(REPO)["training_config.yaml"])
    own = yaml.safe_load((run / "training_config.yaml").read_text())
    shared = (*IDENTITY_OPTIONS, "global_batch_size", *SCHEDULE_OPTIONS)
    assert all(VISIBILITY[name] == PUBLIC for name in shared)
    assert (
        found.pop("dataset_dir") == [MISSING]
        and found.pop("tokenizer_name") == REPO
        and found.pop("expected_loss")["tokens"] == 4 * 4 * 32
    )
    assert found.items() <= own.items()
    (run / "public.yaml").write_bytes(hub.files(REPO)["training_config.yaml"])
    config, _ = load_config(["--config", str(run / "public.yaml"), "--dataset_dir", *own["dataset_dir"]])
    first, _ = load_config(["--config", str(run / "training_config.yaml")])
    assert all(getattr(config, name) == getattr(first, name) for name in shared)


def test_a_published_run_is_a_recipe(train, hub, jsonl_file, tokenizer_dir, tmp_path, capsys):
    """Its address repeats it, with the author's text but not its name, and the end says that the loss is as expected.

    The card has the command; without the text, one sentence asks for it; other text does not compare.
    """
    options = ["--config", "demo", "--max_minutes", "5", *PUSH, "--train_file", jsonl_file, "--cache_dir", tmp_path]
    options += ["--tokenizer_name", tokenizer_dir, *TINY, "--global_batch_size", "4", "--warmup_steps", "0"]
    options += ["--validation_split_percentage", "20", "--max_eval_samples", "3"]  # needed to repeat it
    with mock.patch("recipe.run.decide.measure_progress", lambda _, state: state.step / 6):
        train(*options, "--output_dir", tmp_path / "first", alone=True)
    card = hub.files(REPO)["README.md"].decode()
    assert f"accelerate launch recipe/train.py --config hf://{REPO} --train_file TRAIN_FILE\n" in card
    assert "To repeat the run with its own train_file" in card
    command = ["--config", f"hf://{REPO}", "--cache_dir", tmp_path / "cache"]
    with pytest.raises(
        UserError, match=f"the author of hf://{REPO} had this only locally; pass your own --train_file"
    ):
        train(*command, alone=True)
    moved = Path(shutil.copy(jsonl_file, tmp_path / "mine.jsonl"))
    capsys.readouterr()
    train(*command, "--train_file", moved, "--output_dir", tmp_path / "again", alone=True)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"(hf://{REPO}). This run: " in printed and ", as expected." in printed
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("first", "again")]
    assert [summary["step"] for summary in summaries] == [6, 6]
    (tmp_path / "mine.jsonl").write_text(jsonl_file.read_text() * 2)
    train(*command, "--train_file", moved, "--output_dir", tmp_path / "other", alone=True)
    assert "after other text, so the two do not compare" in " ".join(capsys.readouterr().out.split())
    for address, expected in (
        (f"hf://{REPO}@gone", "revision gone"),
        ("hf://someone/gone", "someone/gone: the Hub has none"),
    ):
        with pytest.raises(UserError, match=f"cannot read the training_config.yaml .*{expected}"):
            train("--config", address, alone=True)


@pytest.mark.usefixtures("all_arrive")
def test_the_best_model_is_on_main(train, hub, monkeypatch):
    """Also if newer checkpoints are uploaded before it or after it."""
    note, losses = RunState.add_evaluation, {0: 9.0, 2: 1.0, 4: 2.0}

    def replace(state, values):
        values["loss"] = losses[state.step]
        note(state, values)

    monkeypatch.setattr(RunState, "add_evaluation", replace)
    run = train(*PUSH, *SAVE, "--eval_steps", "2", "--load_best_model_at_end", "true")
    assert steps_of(hub) == STEPS
    for _ in range(2):
        assert hub.files(REPO)["model.safetensors"] == (run / "checkpoint-2" / "model.safetensors").read_bytes()
        card = hub.files(REPO)["README.md"].decode()
        assert "The run had 4 steps. This is its model with the lowest validation loss, after 2." in card
        assert yaml.safe_load(hub.files(REPO)["training_config.yaml"])["expected_loss"]["value"] == 1.0
        assert not run_script("scripts/push_to_hub.py", run, "--hub_model_id", REPO)


@pytest.mark.usefixtures("all_arrive")
def test_every_save_is_a_branch(train, hub):
    """Each checkpoint loads by its revision with its own weights; none holds training state."""
    output_dir = train(*PUSH, *SAVE, "--hub_strategy", "every_save")
    assert steps_of(hub) == STEPS
    for step, branch in zip((2, 4), branches_of(hub), strict=True):
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
    stays = BRANCHES if strategy == "all_checkpoints" else []  # else the next checkpoint deletes it
    for step, branch in zip((2, 4), BRANCHES, strict=True):
        sent, saved = hub.files(REPO, branch), files_in(run / f"checkpoint-{step}")
        expected = set(saved) - {"training_config.yaml"} - (set() if branch in resumable else set(TRAINING_FILES))
        assert {name: sent.get(name) for name in expected} == {name: saved[name] for name in expected}
        assert set(sent) & set(TRAINING_FILES) == expected & set(TRAINING_FILES)
        assert (b"To continue from" in sent["README.md"]) == (branch in stays)
        if branch not in resumable:  # no commit holds the deleted files
            assert len(hub.commits(REPO, branch)) == 1


@pytest.mark.parametrize(
    ("tokens", "name"), [(300, "0.3k"), (819_200, "0.8M"), (99_000_000, "99.0M"), (4_099_932_160, "4.1B")]
)
def test_branches_count_tokens_in_a_unit_that_fits(tokens, name):
    assert branch_name(400, tokens, "abcdef012345") == f"step-000400-{name}-abcdef"


def test_a_branch_appears_when_it_is_complete(run, hub):
    """A process that dies at any request leaves no branch with half of a checkpoint, and the next one goes on."""
    for pattern in (r"POST .*/commit/incomplete", r"POST .*/branch/step-000002"):
        hub.fail(pattern, 403, times=None)
        assert not open_uploads(run).finish()
        assert not any(name.startswith("step-000002") for name in hub.branches(REPO))
        hub.heal()
    hub.fail(r"DELETE .*/branch", 403, times=None)
    assert not open_uploads(run).finish()
    hub.heal()
    assert open_uploads(run).finish(4) and branches_of(hub) == BRANCHES


@pytest.mark.parametrize(("pattern", "fault"), [("POST .*/step-000004", "lose"), ("DELETE .*/branch", 500)])
def test_no_branch_of_an_upload_remains(run, hub, pattern, fault):
    """Also if the branch of the last checkpoint appeared, but that request or the next one failed."""
    uploads = open_uploads(run)
    shutil.rmtree(run / ".hub" / "step-000002")
    hub.fail(pattern, fault)
    assert uploads.finish(4) and branches_of(hub) == BRANCHES[1:]


def test_main_keeps_the_newest_model(run, hub):
    """A checkpoint that an earlier process left behind gets its branch, but main does not go back."""
    assert open_uploads(run).finish(4)
    newest = hub.branches(REPO)["main"]
    del hub.repositories[REPO].branches[BRANCHES[0]]
    uploads = open_uploads(run)
    shutil.rmtree(run / ".hub" / "step-000004")
    assert uploads.finish()
    assert branches_of(hub) == BRANCHES and hub.branches(REPO)["main"] == newest


def test_files_that_a_model_no_longer_has_leave_main(run, hub):
    """Files that the recipe does not publish stay."""
    assert open_uploads(run).finish(4)
    for name in ("vocab.json", "notes.txt"):
        HfApi().upload_file(path_or_fileobj=b"{}", path_in_repo=name, repo_id=REPO)
    assert open_uploads(run).finish(4)
    assert "notes.txt" in hub.files(REPO) and "vocab.json" not in hub.files(REPO)


# ---------------------------------------------------------------- two runs and one repository


@pytest.mark.parametrize(
    ("held", "run_id", "step", "final_step", "expected"),
    [
        # The repository is empty, or holds what no run published, another run or this one. This run still trains.
        ((None, 0, ()), "a", 2, None, "published"),
        ((None, 0, ("README.md",)), "a", 2, None, "refused"),
        ((None, 0, ("README.md",)), None, 0, None, "refused"),
        (("b", 2, ("README.md",)), "a", 4, None, "refused"),
        (("b", 2, ("README.md",)), None, 0, None, "refused"),
        (("b", 9, ()), "a", 4, None, "refused"),
        (("a", 2, ("README.md",)), "a", 4, None, "published"),
        (("a", 4, ("README.md",)), "a", 4, None, "published"),  # its card may name more branches
        (("a", 4, ("README.md",)), "a", 2, None, "kept"),
        # It has ended: its final model belongs on main, however old, and no other.
        ((None, 0, ()), "a", 2, 4, "kept"),
        ((None, 0, ()), "a", 4, 4, "published"),
        (("a", 4, ("README.md",)), "a", 2, 2, "published"),
        (("a", 2, ("README.md",)), "a", 4, 2, "kept"),
        (("b", 2, ("README.md",)), "a", 4, 4, "refused"),
    ],
)
def test_who_owns_main(held, run_id, step, final_step, expected):
    """Consent changes what is refused only: another's main is as if it were empty."""
    found = MainBranch(*held, is_private=False)
    assert decide_main(found, run_id, step, final_step, may_overwrite=False) == expected
    empty = MainBranch(None, 0, (), is_private=False)
    agreed = decide_main(empty, run_id, step, final_step, False) if expected == "refused" else expected
    assert decide_main(found, run_id, step, final_step, may_overwrite=True) == agreed


@pytest.mark.parametrize(
    ("name", "content", "is_taken"),
    [
        ("README.md", b"# Mine", False),
        ("README.md", b"---\nlicense: mit\n---\nNotes", False),
        ("README.md", b"---\nlicense: mit\n---\n", True),  # the Hub's own form makes one
        ("README.md", b"---\nrun_id: [a]\nstep: many\n---\n", True),
        ("tokenizer.json", b"{}", False),
        ("config.json", b"{}", False),
        ("model.gguf", b"x", False),
        ("notes.txt", b"x", True),  # no upload touches it
    ],
)
def test_files_of_others_are_not_replaced_without_consent(run, train, hub, tmp_path, name, content, is_taken):
    HfApi().create_repo(REPO)
    HfApi().upload_file(path_or_fileobj=content, path_in_repo=name, repo_id=REPO)
    before = hub.files(REPO)
    if is_taken:
        assert open_uploads(run).finish(4) and "model.safetensors" in hub.files(REPO)
        return
    with pytest.raises(UserError, match=f"holds files that no run .*{name}.*--hub_overwrite"):
        train(*PUSH, output_dir=tmp_path / "second")
    assert not open_uploads(run).finish(4) and hub.files(REPO) == before
    assert open_uploads(run, "--hub_overwrite").finish(4) and hub.files(REPO).get(name) != content


@pytest.mark.parametrize("card", [b"---\nlicense: [mit\n---\n", b"---\n- a\n---\nhello"])
def test_a_card_that_cannot_be_read_is_a_file_of_others(run, train, hub, tmp_path, card):
    """Git may have pushed it unchecked. It is refused at the start, and replaced with consent."""
    HfApi().create_repo(REPO)
    hub.repositories[REPO].commits[hub.branches(REPO)["main"]].files["README.md"] = File(card, False)
    with pytest.raises(UserError, match="holds files that no run .*README.md"):
        train(*PUSH, output_dir=tmp_path / "second")
    assert open_uploads(run, "--hub_overwrite").finish(4) and "model.safetensors" in hub.files(REPO)


def test_a_private_model_is_never_uploaded_to_a_public_repository(run, train, hub, tmp_path, capsys):
    """Also if the Hub was away at the start, and if the repository was made public since."""
    HfApi().create_repo(REPO, private=False)
    hub.fail("POST /api/repos/create", 503, times=1)
    hub.fail(f"GET /api/models/{REPO}$", 503, times=1)
    with pytest.raises(SystemExit):
        train(*PUSH, *SAVE, "--hub_private_repo", output_dir=tmp_path / "private")
    assert f"{REPO} is public; make it private" in capsys.readouterr().out
    assert set(hub.files(REPO)) == set() and branches_of(hub) == []
    hub.repositories[REPO].private = True
    assert open_uploads(run, "--hub_private_repo").finish(4)
    before, hub.repositories[REPO].private = hub.branches(REPO), False
    assert not open_uploads(run, "--hub_private_repo").finish(4) and hub.branches(REPO) == before


def test_an_organization_decides_whether_new_repositories_are_private(train, hub):
    """Without the option, nothing is sent, so its own default counts."""
    train(*PUSH)
    (created,) = {body for method, path, _, body in hub.requests if path.endswith("/repos/create")}
    assert not {"private", "visibility"} & {key for key, value in json.loads(created).items() if value is not None}


def test_every_line_of_a_published_run_is_ours(hub, dataset_dir, tmp_path):
    """The client, Transformers and Python's warnings print nothing, and lines fit into 80 columns."""
    options = default_arguments(dataset_dir, tmp_path / "run", TINY)
    options += ["--optim", "muon", *SAVE, "--hub_strategy", "checkpoint"]
    launcher = ("--config_file", str(ROOT / "accelerate_configs" / "cpu.yaml"), "--num_cpu_threads_per_process", "2")
    result = launch([*options, *PUSH], tmp_path, launcher, COLUMNS="80")
    assert result.returncode == 0, result.stderr
    labels = "recipe|device|threads|precision|dynamo|attention|memory|model|data|batch|optimizer|run|hub"
    ours = rf"({labels}) +\S| {{11}}\S|---|\w+: |step +\d|A sample for|    .*|  (generate|longer) |             --|$"
    ours += r"|\d+% of the time waits for data"
    ours += r"|  [\d.]+\w? tokens \+ "  # what an evaluation has seen
    ours += "|published at |uploading to |checkpoints replaced before"
    printed = result.stdout.replace(str(tmp_path), "x").replace(str(dataset_dir), "y")
    assert [line for line in printed.splitlines() if not re.match(ours, line)] == []
    assert [line for line in printed.splitlines() if len(line) > 80] == []
    assert [line for line in result.stderr.splitlines() if "tok/s" not in line] == []


def test_consent_replaces_all_files_of_another_model(run, hub):
    """Also those that this one does not have; files that are no part of a model stay."""
    HfApi().create_repo(REPO)
    for name in ("README.md", "model.safetensors", "vocab.json", "adapter_config.json", "optimizer.pt", "notes.txt"):
        HfApi().upload_file(path_or_fileobj=b"mine", path_in_repo=name, repo_id=REPO)
    uploads = open_uploads(run, "--hub_overwrite", "--hub_strategy", "checkpoint")
    shutil.rmtree(run / ".hub" / "step-000002")
    assert uploads.finish()  # of a checkpoint with its training state
    assert hub.files(REPO)["model.safetensors"] == (run / "model.safetensors").read_bytes()
    left = {"vocab.json", "adapter_config.json", "optimizer.pt", "notes.txt"} & set(hub.files(REPO))
    assert left == {"notes.txt"}


def test_a_second_run_is_refused(train, hub, tmp_path):
    """Before it trains, in one sentence, and by the upload, because the Hub may have been away at the start."""
    first = train(*PUSH)
    before = hub.branches(REPO)
    with pytest.raises(UserError, match="holds another run, at step 4; .*--hub_overwrite"):
        train(*PUSH, "--seed", "1", output_dir=tmp_path / "second")
    assert hub.branches(REPO) == before and not (tmp_path / "second" / "model.safetensors").exists()
    config, _ = load_config(["--config", str(first / "training_config.yaml")])
    assert not HubUploads(config, "b" * 12, first, print).finish(4) and hub.branches(REPO) == before


def test_a_second_run_that_may_overwrite_changes_no_branch_of_the_first(run, hub, train, tmp_path):
    """Both use the same steps. The second one's model is on main, and its state is the one that resumes.

    With another schedule, a run from the Hub is a new one.
    """
    assert open_uploads(run, "--hub_strategy", "all_checkpoints").finish(4)
    first = {name: commit_files for name, commit_files in hub.branches(REPO).items() if name != "main"}
    options = [*PUSH, *SAVE, "--seed", "1", "--hub_strategy", "checkpoint"]
    second = train(*options, "--hub_overwrite", output_dir=tmp_path / "second")
    found = hub.branches(REPO)
    assert first.items() <= found.items()
    assert hub.files(REPO)["model.safetensors"] == (second / "model.safetensors").read_bytes()
    (newest,) = [name for name in found if "optimizer.pt" in hub.files(REPO, name) and name not in first]
    assert not [name for name in first if f"`{name}`" in hub.files(REPO)["README.md"].decode()]
    third = train(*options, "--resume_from_checkpoint", "auto", output_dir=tmp_path / "third")
    assert read_events(third, "start")[-1]["step"] == 4
    assert read_events(third, "start")[-1]["run_id"] == read_events(second, "start")[-1]["run_id"]
    before = hub.branches(REPO)
    for address, remedy in (("auto", f"resume from hf://{REPO} and pass another"), (f"hf://{REPO}@{newest}", "pass")):
        with pytest.raises(
            UserError,
            match=f"another run, .*; with other data, another schedule or another batch, this is a new run: {remedy}",
        ):
            fork = ("--resume_from_checkpoint", address, "--max_steps", "6")
            train(*options, *fork, output_dir=tmp_path / "fourth")
    assert hub.branches(REPO) == before


# ---------------------------------------------------------------- resume


def losses(output_dir: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in read_events(output_dir, "train")}


@pytest.mark.parametrize("how", ["branch", "newest", "auto"])
def test_another_machine_resumes_from_the_hub(train, hub, tmp_path, how):
    """It continues bit for bit, with the whole log. Without a revision, and with `auto`, the newest branch counts."""
    push = [*PUSH, *SAVE, "--hub_strategy", "all_checkpoints"]
    first = train(*push, output_dir=tmp_path / "first")
    branches = branches_of(hub)
    del hub.repositories[REPO].branches[branches[1]]  # as if the first machine had gone after step 2
    if how == "auto":  # and before it published a model on main
        repository = hub.repositories[REPO]
        repository.branches["main"] = next(iter(repository.commits))
    address = {"branch": f"hf://{REPO}@{branches[0]}", "newest": f"hf://{REPO}", "auto": "auto"}[how]
    second = train(*push, "--resume_from_checkpoint", address, output_dir=tmp_path / "second")
    assert losses(second) == losses(first)
    assert (second / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    assert branches_of(hub) == branches


def test_a_branch_from_the_hub_goes_on_with_other_data(train, hub, tmp_path, other):
    """It is a new run, whose log and card are of its own data."""
    train(*PUSH, *SAVE, "--hub_strategy", "checkpoint", output_dir=tmp_path / "first")
    address = f"hf://{REPO}@{branches_of(hub)[-1]}"
    options = ["--max_steps", 6, "--resume_from_checkpoint", address, "--dataset_dir", other]
    branch = train(*options, output_dir=tmp_path / "branch")
    summary = json.loads((branch / "summary.json").read_text())
    assert [(of["source"], of["step"]) for of in summary["stages"]] == [("other text", 0), ("a.jsonl", 4)]
    assert [event["step"] for event in read_events(branch, "eval")] == [4, 6]
    assert f"content_sha256    {summary['stages'][1]['content_sha256']}" in (branch / "README.md").read_text()


def test_files_that_have_arrived_are_not_downloaded_again(run, train, hub, tmp_path):
    """By the same command, after a download that was cut off."""
    assert open_uploads(run, "--hub_strategy", "checkpoint").finish(4)
    hub.fail("GET .*/resolve/.*/optimizer.pt", 500, times=None)
    resume = ["--resume_from_checkpoint", f"hf://{REPO}", "--output_dir", tmp_path / "second"]
    with pytest.raises(UserError, match="cannot be read .*run the same command again"):
        train(*resume)
    hub.heal()
    hub.requests.clear()
    train(*resume)
    loaded = [path for method, path, _, _ in hub.requests if method == "GET" and "/resolve/" in path]
    assert any("optimizer.pt" in path for path in loaded) and not any("model.safetensors" in path for path in loaded)


def test_auto_starts_fresh_on_an_empty_hub(train, hub, capsys):
    train(*PUSH, *SAVE, "--hub_strategy", "checkpoint", "--resume_from_checkpoint", "auto")
    assert "the run starts at step 0" in capsys.readouterr().out and STEPS[1] in steps_of(hub)


def test_auto_does_not_start_over_while_the_hub_is_away(train, hub):
    """A checkpoint may be there."""
    HfApi().create_repo(REPO)
    hub.fail("/refs", 503, times=None)
    with pytest.raises(UserError, match="the checkpoint on the Hub cannot be read .status 503"):
        train(*PUSH, "--hub_strategy", "checkpoint", "--resume_from_checkpoint", "auto")


def test_what_cannot_be_resumed(run, train, hub, tmp_path):
    """One sentence, before a model is built, that names a checkpoint that can be resumed. The folder stays free."""
    assert open_uploads(run, "--hub_strategy", "checkpoint").finish(4)
    for address, words in (
        (f"hf://{REPO}@step-3", f"revision step-3 of .* has no training state .* hf://{REPO}@{BRANCHES[1]}"),
        (f"hf://{REPO}@main", f"revision main of .* has no training state .* hf://{REPO}@{BRANCHES[1]}"),
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
    with pytest.raises(UserError, match="is damaged"):
        train("--resume_from_checkpoint", f"hf://{REPO}", output_dir=tmp_path / "second")


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("fault", [401, 403, 500, "drop"])
def test_what_could_not_be_uploaded_is_listed_and_repeated(run, hub, capsys, fault):
    """Each folder is tried twice and named, with the command that uploads the rest, as push_to_hub.py does."""
    hub.fail(r"POST .*/(preupload|commit)", fault, times=None)
    assert not open_uploads(run, "--hub_strategy", "checkpoint").finish(4)
    printed = capsys.readouterr().out
    assert printed.count("failed and will be repeated") == 1
    assert all(f"not uploaded: {name} (" in printed for name in ("step-000002", "step-000004", "final"))
    assert f"to upload what is missing:\n    python scripts/push_to_hub.py {run}\n" in printed
    hub.heal()
    options = ["--hub_model_id", REPO, "--hub_strategy", "checkpoint", "--hub_license", "mit"]
    assert run_script("scripts/push_to_hub.py", run, *options) == ""
    assert branches_of(hub) == BRANCHES and "license: mit" in hub.files(REPO)["README.md"].decode()
    assert hub.files(REPO, BRANCHES[1])["optimizer.pt"] == (run / "checkpoint-4" / "optimizer.pt").read_bytes()


def test_a_run_whose_model_is_not_on_the_hub_exits_with_1(train, hub, capsys):
    """It trains to its end with a Hub that fails from the first upload on, and says what is missing."""
    hub.fail("POST .*/commit", 500, times=None)
    with pytest.raises(SystemExit) as end:
        train(*PUSH, *SAVE)
    printed = capsys.readouterr().out
    assert end.value.code == 1 and "eval_loss:" in printed and "not uploaded: final" in printed


def test_the_final_model_goes_first(run, hub):
    """A disk may be deleted before the training state has arrived; what fails later does not hold it up."""
    hub.fail(r"POST .*/commit/incomplete", 500, times=None)
    assert not open_uploads(run, "--hub_strategy", "checkpoint").finish(4)
    assert hub.files(REPO)["model.safetensors"] == (run / "model.safetensors").read_bytes()


def test_the_checkpoint_of_the_last_step_waits_for_the_final_model(train, hub, monkeypatch):
    """Also if it is on disk before the loop ends."""
    save = CheckpointSaver.save
    monkeypatch.setattr(CheckpointSaver, "save", lambda self, state: (save(self, state), self.wait()))
    train(*PUSH, "--save_steps", "4", "--hub_strategy", "checkpoint")
    commits = [path for method, path, _, _ in hub.requests if "/commit/" in path]
    assert len(commits) > 1 and commits[0].endswith("/commit/main")


def test_a_normal_end_has_no_deadline(run, hub, monkeypatch, capsys):
    """It says what it waits for."""
    monkeypatch.setattr(uploads_room, "REPORT_SECONDS", 0.3)
    hub.fail("POST .*/commit", 1.5, times=1)
    assert open_uploads(run).finish(4)
    assert capsys.readouterr().out.count(f"still uploading to {REPO}: final, step-000002, step-000004") >= 2


@pytest.mark.parametrize("fault", [429, 409, 500, "drop", "cut", "lose", 0.3])
def test_a_passing_fault_costs_nothing(run, hub, capsys, fault):
    """An upload that fails once is repeated, and the end is as if nothing had happened."""
    hub.fail(r"/commit|/preupload|lfs", fault, times=1)
    assert open_uploads(run, "--hub_strategy", "all_checkpoints").finish(4)
    assert branches_of(hub) == BRANCHES and "not uploaded" not in capsys.readouterr().out


def test_a_storage_error_names_its_cause(run, hub, capsys):
    hub.fail("PUT /lfs-storage", 507, times=None)
    assert not open_uploads(run).finish()
    assert "507" in capsys.readouterr().out


def test_uploads_do_not_hold_up_training(train, hub, capsys):
    """While one hangs, the run trains, saves, and drops what a newer checkpoint replaces; the newest arrives."""
    hub.fail("POST .*/commit", 3.0, times=1)
    output_dir = train(*PUSH, "--save_steps", "1", "--max_steps", "12", "--save_total_limit", "2")
    seconds = [event["train_seconds"] for event in read_events(output_dir, "train")]
    assert seconds[-1] < 3.0
    found = branches_of(hub)
    assert found[-1].startswith("step-000012") and 2 <= len(found) < 12  # the first began during training
    assert f"replaced before upload: {12 - len(found)} (all: " in capsys.readouterr().out


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


@pytest.mark.parametrize("ending", ["seconds", "SIGTERM", "SIGUSR1", "SIGHUP"])
def test_an_upload_that_hangs_is_given_up(run, hub, monkeypatch, capsys, ending):
    """In time, or when the process is told to leave; the command that uploads the rest is printed."""
    healed = threading.Event()
    monkeypatch.setattr(uploads_room, "upload", lambda *args: healed.wait())
    uploads, started_at = open_uploads(run), time.monotonic()
    seconds, name = (1.0, "SIGTERM") if ending == "seconds" else (60.0, ending)
    with StopSignals() as signals, signal_when(lambda: time.monotonic() > started_at + 1, name):
        assert not uploads.finish(4, seconds, lambda: ending != "seconds" and signals.count > 0)
    assert time.monotonic() - started_at < 20
    healed.set()
    uploads.thread.join()  # or it would go on in the next test
    printed = capsys.readouterr().out
    reason = "not finished in time" if ending == "seconds" else "interrupted by a signal"
    assert f"({reason})" in printed and "to upload what is missing:\n" in printed


@pytest.mark.parametrize("pattern", ["POST .*/commit/", f"GET /api/models/{REPO}$"])
def test_a_server_that_hangs_is_a_failure(run, hub, monkeypatch, pattern):
    """The client itself would wait forever; for some requests, it asks for that (2.4)."""
    monkeypatch.setattr(hub_room, "TIMEOUT_SECONDS", 1.5)
    hub_room.prepare_client()
    hub.fail(pattern, 60.0, times=1)
    started_at = time.monotonic()
    assert open_uploads(run).finish() and time.monotonic() - started_at < 20


@pytest.mark.parametrize("pattern", ["POST /api/validate-yaml", f"GET /api/models/{REPO}$"])
def test_a_server_that_hangs_does_not_hold_the_start(train, hub, monkeypatch, pattern):
    """From the first request, which checks the license, to the one that asks whose the repository is."""
    monkeypatch.setattr(hub_room, "TIMEOUT_SECONDS", 0.5)
    hub.fail(pattern, 60.0)
    started_at = time.monotonic()
    train(*PUSH)
    assert time.monotonic() - started_at < 30 and "model.safetensors" in hub.files(REPO)


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
        ({}, "status 403"),  # a token that may only read
        ({"HF_HUB_OFFLINE": "1"}, "offline mode is on"),
    ],
)
def test_a_run_that_could_not_publish_does_not_start(train, hub, monkeypatch, tmp_path, change, words):
    """It ends in one sentence before anything is written, also if the repository exists: creating it then succeeds."""
    HfApi().create_repo(REPO)
    if not change:
        hub.fail("auth-check/write", 403, times=None)
    for name, value in change.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", os.environ["HF_HUB_OFFLINE"] == "1")
    with pytest.raises(UserError, match=words):
        train(*PUSH)
    assert not list((tmp_path / "run").glob("[!.]*"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hub_private_repo"], "someone/tiny is public; make it private"),
        (["--hub_license", "MIT"], "refuses --hub_license or --hub_language .*MIT"),
        *((["--hub_model_id", name], "cannot be the name of") for name in ("tiny", "a/b/c", "a/ti ny", "a/..")),
    ],
)
def test_options_that_the_hub_would_refuse(train, hub, options, words):
    if "--hub_license" in options and hub_version.startswith("1."):
        pytest.skip("before version 2, the client asks huggingface.co about licenses, whatever the endpoint")
    HfApi().create_repo(REPO)
    with pytest.raises(UserError, match=words):
        train(*PUSH, *options)


def test_a_hub_that_is_away_at_the_start(train, hub, capsys):
    """That is a warning: it is back when the first upload is due."""
    hub.fail("POST /api/repos/create", 503, times=1)
    train(*PUSH)
    assert "warning: the Hub cannot be used now (status 503" in capsys.readouterr().out
    assert "model.safetensors" in hub.files(REPO)
