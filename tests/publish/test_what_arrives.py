"""What a run publishes: the model, its branches, a recipe that repeats it, and nothing private."""

import json
import shutil
from functools import partial
from unittest import mock

import pytest
import safetensors.torch
import torch
import yaml
from helpers import ROOT, TINY, default_arguments, launch, read_events, read_summary, read_words, run_script
from hub_runs import BRANCHES, PUSH, REPO, SAVE, STATE, branches_of, files_in, open_uploads
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.checkpoint import CheckpointSaver, RunState
from recipe.command_line import load_config
from recipe.config import IDENTITY_OPTIONS, MISSING, OPTIONS, PUBLIC_OPTIONS, SCHEDULE_OPTIONS
from recipe.errors import UserError
from recipe.publish.card import weights_sha256
from recipe.publish.hub import TRAINING_FILES, branch_name
from recipe.publish.public import public_events, public_options
from recipe.publish.uploads import HubUploads

MODEL = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
WRITTEN = {"README.md", "loss_curve.png", "training_config.yaml", "metrics.jsonl"}


def test_the_final_model_arrives_byte_for_byte(train, hub):
    output_dir = train(*PUSH, *SAVE, "--hub_strategy", "end", "--hub_private_repo")
    sent, local = hub.files(REPO), files_in(output_dir)
    assert set(sent) == MODEL | WRITTEN and branches_of(hub) == []
    assert {name: sent[name] for name in MODEL} == {name: local[name] for name in MODEL}
    assert hub.repositories[REPO].private
    assert not list((output_dir / ".hub").iterdir())


def test_nothing_private_is_in_any_request(train, hub, dataset_dir, tmp_path, monkeypatch):
    """The names of the folder, datasets, tokenizer and environment hold the word "canary".

    A second upload has canaries in all options that take text, too, and in more keys of the log. The token is in one
    header only.
    """
    canaries = tmp_path / "canary-user" / "canary-project"
    shutil.copytree(dataset_dir, canaries / "canary-data")
    shutil.copytree(dataset_dir / "tokenizer", canaries / "canary" / "tokenizer")
    path = canaries / "canary-data" / "metadata.json"
    metadata = json.loads(path.read_text()) | {"tokenizer": "canary/tokenizer"}
    source = {"train_files": ["/canary/a.txt"], "dataset_name": "canary/x", "dataset_config_name": "canary"}
    path.write_text(json.dumps(metadata | {"source": metadata["source"] | source}))
    shutil.copytree(canaries / "canary-data", canaries / "more" / "canary-2")
    for name in ("HF_CANARY", "WANDB_PROJECT", "USER", "HOSTNAME", "SLURM_JOB_NAME"):
        monkeypatch.setenv(name, "canary")
    monkeypatch.chdir(canaries)
    options = ["--dataset_dir", canaries / "canary-data", canaries / "more" / "canary-2", "--run_name", "canary"]
    options += ["--cache_dir", "/canary/cache", "--tokenizer_name", "canary/tokenizer", "--report_to", "tensorboard"]
    run = train(*PUSH, *SAVE, *options, "--hub_strategy", "all_checkpoints", output_dir=canaries / "canary-run")
    text = yaml.safe_load((run / "training_config.yaml").read_text())
    for name, option in OPTIONS.items():
        is_public = name in PUBLIC_OPTIONS or name.startswith(("hub_", "sample"))
        if "str" in str(option.type) and not is_public:
            text[name] = ["canary"] if "list" in str(option.type) else "canary/canary"
    (run / "training_config.yaml").write_text(yaml.safe_dump(text))
    log = (run / "metrics.jsonl").read_text()
    assert "canary" in log
    for key in ('{"event"', '"data": {'):
        log = log.replace(key, key.replace("{", '{"canary": "canary", '))
    (run / "metrics.jsonl").write_text(log)
    (run / "notes-canary.txt").write_text("canary")
    (canaries / "id_rsa").write_text("canary")
    (run / "chat_template.jinja").symlink_to(canaries / "id_rsa")
    own = {"texts": [{"name": "canary.txt", "loss": 1.0}], "tasks": {"canary": {"acc": 0.5, "num_examples": 9}}}
    (run / "evaluation.json").write_text(json.dumps([own | {"weights_sha256": weights_sha256(run)}]))
    config = load_config(["--dataset_dir", "x", "--block_size", "32", "--global_batch_size", "4", *PUSH]).config
    uploads = HubUploads(config, read_events(run, "start")[0]["run_id"], run, print, keeps_all=True)
    uploads.add(run / "checkpoint-4", 4)
    assert uploads.finish(4) and len(branches_of(hub)) == 2
    for method, path, headers, body in hub.requests:
        token = headers.pop("authorization", "")
        sent = (path + json.dumps(headers)).encode() + body
        assert token in ("", f"Bearer {hub.token}") and hub.token.encode() not in sent
        assert b"canary" not in sent, f"{method} {path}"
    for branch in hub.branches(REPO):  # some of it was sent in base64
        assert not [name for name, content in hub.files(REPO, branch).items() if b"canary" in content]


# ---------------------------------------------------------------- a recipe


def test_published_options_are_those_that_a_resumed_run_must_share(run, hub):
    """The file is the run's own, but for its data and its tokenizer, which is the repository's."""
    assert open_uploads(run).finish(4)
    public = hub.files(REPO)["training_config.yaml"]
    own, found = yaml.safe_load((run / "training_config.yaml").read_text()), yaml.safe_load(public)
    assert found.pop("dataset_dir") == [MISSING]
    assert found.pop("tokenizer_name") == REPO
    assert found.pop("expected_loss")["tokens"] == 4 * 4 * 32
    assert found.items() <= own.items()
    (run / "public.yaml").write_bytes(public)
    config = load_config(["--config", str(run / "public.yaml"), "--dataset_dir", *own["dataset_dir"]]).config
    first = load_config(["--config", str(run / "training_config.yaml")]).config
    for name in (*IDENTITY_OPTIONS, "global_batch_size", *SCHEDULE_OPTIONS):
        assert name in PUBLIC_OPTIONS
        assert getattr(config, name) == getattr(first, name)


def test_the_published_length_of_a_run_that_was_limited_by_time_is_its_steps(run):
    """Not the step of its best model."""
    options = yaml.safe_load((run / "training_config.yaml").read_text()) | {"max_minutes": 5, "max_steps": None}
    (run / "training_config.yaml").write_text(yaml.safe_dump(options))
    events = public_events(run, 4)
    next(event for event in events if event["event"] == "end")["last_step"] = 9
    assert public_options(run, events, 4)["max_steps"] == 9


def test_the_address_of_a_published_run_repeats_it(train, hub, jsonl_file, tokenizer_dir, tmp_path, capsys):
    """The card has the command. The author's text is compared by content: its name and place do not matter."""
    options = ["--config", "demo", "--max_minutes", "5", *PUSH, "--train_file", jsonl_file, "--cache_dir", tmp_path]
    options += ["--tokenizer_name", tokenizer_dir, *TINY, "--global_batch_size", "4", "--warmup_steps", "0"]
    options += ["--validation_split_percentage", "20", "--max_eval_samples", "3"]  # needed to repeat it
    first, again = tmp_path / "first", tmp_path / "again"
    with mock.patch("recipe.run.decide.measure_progress", lambda _, state: state.step / 6):  # of the five minutes
        train(*options, "--output_dir", first, alone=True)
    card = hub.files(REPO)["README.md"].decode()
    assert f"accelerate launch recipe/train.py --config hf://{REPO} --train_file TRAIN_FILE\n" in card
    capsys.readouterr()
    text = ["--train_file", shutil.copy(jsonl_file, tmp_path / "mine.jsonl"), "--cache_dir", tmp_path / "cache"]
    train("--config", f"hf://{REPO}", *text, "--output_dir", again, alone=True)
    printed = read_words(capsys)
    assert f"(hf://{REPO}). This run: " in printed
    assert ", as expected." in printed
    for key, expected in (("step", 6), ("eval_loss", read_summary(first)["eval_loss"])):
        assert read_summary(first)[key] == read_summary(again)[key] == expected
    for gone in (f"hf://{REPO}@gone", "hf://someone/gone"):
        with pytest.raises(UserError, match=r"training_config.yaml .*gone"):
            train("--config", gone, alone=True)


def test_a_run_that_is_extended_publishes_its_newest_model_not_the_one_of_its_earlier_end(run, hub):
    """It was interrupted before it exported that one. Its results are those of step 2."""
    summary = read_summary(run) | {"step": 2, "exported_step": 2}
    (run / "summary.json").write_text(json.dumps(summary))
    tensors = safetensors.torch.load_file(run / "checkpoint-2" / "model.safetensors")
    metadata = {"format": "pt", "step": "2", "eval_loss": str(summary["eval_loss"])}
    safetensors.torch.save_file(tensors, run / "model.safetensors", metadata)
    assert not run_script("scripts/push_to_hub.py", run, "--hub_model_id", REPO)
    assert "step: 4" in hub.files(REPO)["README.md"].decode()
    assert hub.files(REPO)["model.safetensors"] == (run / "checkpoint-4" / "model.safetensors").read_bytes()


# ---------------------------------------------------------------- main and branches


def test_the_best_model_is_on_main(train, hub, monkeypatch):
    """Newer checkpoints that are uploaded before it or after it do not replace it, nor does push_to_hub.py."""
    note = RunState.add_evaluation
    losses = {0: 9.0, 2: 1.0, 4: 2.0}

    def replace(state, values):
        values["loss"] = losses[state.step]
        note(state, values)

    monkeypatch.setattr(RunState, "add_evaluation", replace)
    monkeypatch.setattr("recipe.train.HubUploads", partial(HubUploads, keeps_all=True))
    run = train(*PUSH, *SAVE, "--eval_steps", "2", "--load_best_model_at_end", "true")
    assert len(branches_of(hub)) == 2
    for _ in range(2):
        on_main = safetensors.torch.load(hub.files(REPO)["model.safetensors"])
        saved = safetensors.torch.load_file(run / "checkpoint-2" / "model.safetensors")
        assert on_main.keys() == saved.keys() and all(torch.equal(on_main[name], saved[name]) for name in saved)
        card = hub.files(REPO)["README.md"].decode()
        assert "The run had 4 steps. This is its model with the lowest validation loss, after 2." in card
        assert yaml.safe_load(hub.files(REPO)["training_config.yaml"])["expected_loss"]["value"] == 1.0
        assert not run_script("scripts/push_to_hub.py", run, "--hub_model_id", REPO)


@pytest.mark.parametrize(
    ("strategy", "resumable"), [("every_save", []), ("checkpoint", BRANCHES[1:]), ("all_checkpoints", BRANCHES)]
)
def test_every_checkpoint_is_a_branch_and_has_its_training_state_as_the_strategy_says(run, hub, strategy, resumable):
    """The files are the same bytes, and load by their revision; the log ends with their step.

    The models of older checkpoints stay, and no commit holds their deleted state.
    """
    hub.fail("super-squash", 500, times=1)  # it is repeated, or the deleted state would take up space forever
    assert open_uploads(run, "--hub_strategy", strategy).finish(4)
    assert branches_of(hub) == BRANCHES
    for step, branch in zip((2, 4), BRANCHES, strict=True):
        sent, expected = hub.files(REPO, branch), files_in(run / f"checkpoint-{step}")
        if branch not in resumable:
            expected = {name: content for name, content in expected.items() if name not in TRAINING_FILES}
            commit = hub.repositories[REPO].commits[hub.branches(REPO)[branch]]
            assert strategy == "every_save" or commit.parent is None
        assert {name: content for name, content in sent.items() if name not in WRITTEN} == expected
        promised = strategy == "all_checkpoints"  # else the next checkpoint deletes this state
        assert (b"To continue from" in sent["README.md"]) == promised
        assert f'revision="{branch}"' in sent["README.md"].decode()
        assert max(json.loads(line)["step"] for line in sent["metrics.jsonl"].splitlines()) == step
        model = AutoModelForCausalLM.from_pretrained(REPO, revision=branch)
        assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(REPO, revision=branch)) == 500


def test_a_branch_appears_when_it_is_complete(run, hub):
    """A failed request leaves no branch with half of a checkpoint, and the next upload completes it."""
    for pattern in (r"POST .*/commit/incomplete", r"POST .*/branch/step-000002"):
        hub.fail(pattern, 403, times=None)
        assert not open_uploads(run).finish()
        assert not any(name.startswith("step-000002") for name in hub.branches(REPO))
        hub.heal()
    hub.fail(r"DELETE .*/branch", 403, times=None)
    assert not open_uploads(run).finish()
    hub.heal()
    assert open_uploads(run).finish(4)
    assert branches_of(hub) == BRANCHES  # and none to work on


def test_every_line_of_a_published_run_is_ours(hub, dataset_dir, tmp_path):
    """The client, Transformers and Python's warnings add nothing to the progress bar; lines fit into 80 columns."""
    options = default_arguments(dataset_dir, tmp_path / "run", TINY)
    options += ["--optim", "muon", *SAVE, *STATE]
    launcher = ("--config_file", str(ROOT / "accelerate_configs" / "cpu.yaml"), "--num_cpu_threads_per_process", "2")
    result = launch([*options, *PUSH], tmp_path, launcher, COLUMNS="80")
    assert result.returncode == 0, result.stderr
    printed = result.stdout.replace(str(tmp_path / "run"), "runs/demo").replace(str(dataset_dir), "data")
    assert "--resume_from_checkpoint" in printed
    assert [line for line in printed.splitlines() if len(line) > 80] == []
    assert [line for line in result.stderr.splitlines() if "tok/s" not in line] == []


@pytest.mark.parametrize(
    ("tokens", "name"), [(300, "0.3k"), (819_200, "0.8M"), (99_000_000, "99.0M"), (4_099_932_160, "4.1B")]
)
def test_branches_count_tokens_in_a_unit_that_fits(tokens, name):
    assert branch_name(400, tokens, "abcdef012345") == f"step-000400-{name}-abcdef"


def test_the_checkpoint_of_the_last_step_waits_for_the_final_model(train, hub, monkeypatch):
    """The final model arrives first: a disk may be deleted before all of the training state is on the Hub."""
    save = CheckpointSaver.save
    monkeypatch.setattr(CheckpointSaver, "save", lambda self, state: (save(self, state), self.wait()))
    train(*PUSH, "--save_steps", "4", *STATE)
    commits = [path for _, path, _, _ in hub.requests if "/commit/" in path]
    assert len(commits) > 1
    assert commits[0].endswith("/commit/main")
