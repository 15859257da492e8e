"""The best model is kept and exported, and a run whose loss no longer falls ends as a finished run."""

import json
import shutil
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from conftest import read_events
from transformers import AutoModelForCausalLM

from recipe.checkpoint import CheckpointSaver, RunState, list_checkpoints, why_damaged
from recipe.errors import UserError
from recipe.run.log import RunLog

RESULTS = ("model.safetensors", "summary.json", "README.md")
LOSSES = {0: 9.0, 2: 3.0, 4: 2.0, 6: 2.5, 8: 2.25, 10: 2.0, 12: 1.0}
OVERFITS = [*("--max_steps", 12, "--eval_steps", 2, "--save_steps", 3, "--save_total_limit", 1)]
OVERFITS += ["--load_best_model_at_end", "true", "--early_stopping_patience", 3]


@pytest.fixture(autouse=True)
def losses(monkeypatch):
    """Let each evaluation return the loss of LOSSES for its step."""
    note = RunState.add_evaluation

    def replace(state, values):
        values["loss"] = LOSSES[state.step]
        note(state, values)

    monkeypatch.setattr(RunState, "add_evaluation", replace)


def check(output_dir, printed):
    assert [path.name for path in list_checkpoints(output_dir)] == ["checkpoint-10"]
    exported, best, last = (output_dir / name / "model.safetensors" for name in ("", "best", "checkpoint-10"))
    assert exported.read_bytes() == best.read_bytes() != last.read_bytes()
    assert "lowest validation loss 2.0000 at step 4 of 10 (" in printed and " epochs): exported\n" in printed
    summary = json.loads((output_dir / "summary.json").read_text())
    assert (summary["step"], summary["exported_step"], summary["eval_loss"]) == (10, 4, 2.0)
    assert "best_step:         4\n" in printed and "stopping early: 3 evaluations" in printed
    card = (output_dir / "README.md").read_text()
    assert "The run had 10 steps. This is its model with the lowest validation loss, after 4." in card
    assert "intermediate checkpoint" not in card
    assert [event["step"] for event in read_events(output_dir, "eval")] == [0, 2, 4, 6, 8, 10]


def test_the_steps_of_a_tracker_never_decrease(train, monkeypatch):
    """wandb drops what is logged at an earlier step. The end of a run is logged at its last step."""
    logged = []
    monkeypatch.setattr(Accelerator, "log", lambda self, values, step: logged.append((step, values)))
    output_dir = train(*OVERFITS)
    assert [step for step, _ in logged] == sorted(step for step, _ in logged)
    step, values = logged[-1]
    assert (step, values["end/exported_step"], values["end/last_step"]) == (10, 4, 10)
    assert [event["step"] for event in read_events(output_dir, "end")] == [4]  # the model's, for its card


def test_the_best_model_is_kept_and_exported(train, capsys):
    """Between two checkpoints. An equal loss is no new lowest one. The same command again changes nothing."""
    output_dir = train(*OVERFITS)
    check(output_dir, capsys.readouterr().out)
    before = {path: path.read_bytes() for path in output_dir.glob("*") if path.name in RESULTS}
    train(*OVERFITS, "--resume_from_checkpoint", "auto")
    assert {path: path.read_bytes() for path in before} == before
    assert "stopped early after 10 steps" in capsys.readouterr().out


@pytest.mark.parametrize("killed_at", [5, 7, 9])
def test_a_resumed_run_remembers_the_best_one(train, capsys, killed_at):
    log_train = RunLog.train

    def die(log, state):
        log_train(log, state)
        if state.step == killed_at:
            raise UserError("killed")

    save = CheckpointSaver.save  # a real kill ends the thread that writes and prunes, too
    at_once = mock.patch.object(CheckpointSaver, "save", lambda self, state: (save(self, state), self.wait()))
    with at_once, mock.patch.object(RunLog, "train", die), pytest.raises(UserError, match="killed"):
        train(*OVERFITS)
    check(train(*OVERFITS, "--resume_from_checkpoint", "auto"), capsys.readouterr().out)


def test_a_branch_of_a_run_that_was_stopped_early_trains(train, tmp_path):
    """Its patience counts from the branch, or from a change of the schedule in the same folder."""
    stopped = train(*OVERFITS, "--save_steps", 2, "--save_total_limit", 5)
    branch = train(*OVERFITS, "--resume_from_checkpoint", stopped / "checkpoint-4", output_dir=tmp_path / "branch")
    longer = [*OVERFITS, "--learning_rate", 0.001, "--resume_from_checkpoint"]
    again = train(*longer, stopped / "checkpoint-10", output_dir=tmp_path / "again")
    assert [e["step"] for e in read_events(branch, "train")] == [5, 6, 7, 8, 9, 10, 11, 12]
    assert [e["step"] for e in read_events(again, "train")] == [11, 12]
    train(*longer, "auto")
    assert [e["step"] for e in read_events(stopped, "train")][-2:] == [11, 12]


def test_a_better_model_that_is_damaged_is_named(train, capsys):
    output_dir = train(*OVERFITS)
    (output_dir / "best" / "model.safetensors").write_bytes(b"")
    (output_dir / "summary.json").unlink()
    train(*OVERFITS, "--resume_from_checkpoint", "auto")
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{output_dir / 'best'} is damaged (model.safetensors has 0 bytes" in shown
    assert json.loads((output_dir / "summary.json").read_text())["exported_step"] == 10


@pytest.mark.parametrize("saved", [12, 4])
def test_the_best_model_is_found_where_it_is(train, saved):
    """As a checkpoint, where an earlier version left it, or where a kill came before `best/` was written.

    The best model of steps that a resume has dropped is none.
    """
    options = ["--max_steps", 8, "--eval_steps", 2, "--save_steps", 2, "--load_best_model_at_end"]
    output_dir = train(*options)
    best, exported = output_dir / "best", (output_dir / "model.safetensors").read_bytes()
    if saved == 12:
        values = json.loads((best / "best.json").read_text())
        (best / "best.json").write_text(json.dumps(values | {"step": 12, "loss": 0.5}))
    else:
        shutil.rmtree(best)
    for name in RESULTS:
        (output_dir / name).unlink()
    train(*options, "--resume_from_checkpoint", "auto")
    assert json.loads((best / "best.json").read_text())["step"] == 4
    assert (output_dir / "model.safetensors").read_bytes() == exported
    assert why_damaged(best) is None and not (best / "optimizer.pt").exists()


def test_a_run_that_keeps_only_the_last_model_says_what_it_lost(train, capsys):
    output_dir = train("--max_steps", 8, "--eval_steps", 2)
    shown = " ".join(capsys.readouterr().out.split())
    assert "lowest validation loss 2.0000 at step 4 of 8" in shown and "  longer " not in shown
    assert "2.2500 at step 8, which is exported; a run with --load_best_model_at_end true keeps" in shown
    assert not (output_dir / "best").exists()


def test_training_that_made_the_model_worse_is_named(train, capsys, monkeypatch):
    monkeypatch.setitem(LOSSES, 0, 1.5)
    train("--max_steps", 4, "--eval_steps", 2)
    assert "was lower before this training: 1.5000 at step 0" in " ".join(capsys.readouterr().out.split())


def test_a_finished_run_stays_as_it_is(train):
    """Whatever the same command now says of the model to export."""
    options = ["--max_steps", 8, "--eval_steps", 2, "--save_steps", 2]
    output_dir = train(*options)
    before = {name: (output_dir / name).read_bytes() for name in RESULTS}
    train(*options, "--resume_from_checkpoint", "auto")
    assert not (output_dir / "best").exists()
    train(*options, "--load_best_model_at_end", "true", "--resume_from_checkpoint", "auto")
    assert {name: (output_dir / name).read_bytes() for name in RESULTS} == before


def test_a_folder_of_the_users_own_is_not_replaced(train, tmp_path):
    (tmp_path / "run" / "best").mkdir(parents=True)
    with pytest.raises(UserError, match=r"a run would replace \(best\)"):
        train("--load_best_model_at_end", "true")


def test_the_best_model_is_no_checkpoint(train, tmp_path):
    output_dir = train("--max_steps", 4, "--eval_steps", 2, "--load_best_model_at_end", "true")
    with pytest.raises(UserError, match="without a training state; start from it with --model_name_or_path"):
        train("--resume_from_checkpoint", output_dir / "best", output_dir=tmp_path / "b")


def test_the_best_model_needs_no_checkpoint_and_loads(train):
    """In a folder that a killed run has left, too: the model of another run is not this one's best."""
    options = ["--max_steps", 8, "--eval_steps", 2, "--save_steps", 0, "--load_best_model_at_end"]
    output_dir = train(*options)
    assert json.loads((output_dir / "summary.json").read_text())["exported_step"] == 4
    best, exported = (AutoModelForCausalLM.from_pretrained(path) for path in (output_dir / "best", output_dir))
    assert all(torch.equal(a, b) for a, b in zip(best.parameters(), exported.parameters(), strict=True))
    for name in RESULTS:
        (output_dir / name).unlink()
    values = json.loads((output_dir / "best" / "best.json").read_text())
    (output_dir / "best" / "best.json").write_text(json.dumps(values | {"loss": 0.5}))
    train(*options, "--resume_from_checkpoint", "auto")
    assert json.loads((output_dir / "summary.json").read_text())["eval_loss"] == 2.0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--early_stopping_patience 2", "requires --eval_steps"),
        ("--early_stopping_patience 0", "at least 1"),
    ],
)
def test_options_that_cannot_work(train, options, expected):
    with pytest.raises(UserError, match=expected):
        train(*options.split())
