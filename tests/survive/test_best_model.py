"""The model with the lowest validation loss is kept and exported, and a run whose loss no longer falls ends."""

import errno

import pytest
from accelerate import Accelerator
from faults import AUTO, RESULTS, at_call, die, fail_with, name_checkpoints
from helpers import list_steps, read_events, read_summary, read_weights, read_words

import recipe.checkpoint
from recipe.checkpoint import RunState, read_exported
from recipe.optim.guard import UpdateGuard

LOSSES = {0: 9.0, 2: 3.0, 4: 2.0, 6: 2.5, 8: 2.25, 10: 2.0, 12: 1.0}
OVERFITS = ["--max_steps", 12, "--eval_steps", 2, "--save_steps", 3, "--save_total_limit", 1]
OVERFITS += ["--load_best_model_at_end", "true", "--early_stopping_patience", 3]
EIGHT = ["--max_steps", 8, "--eval_steps", 2]
BEST = [*EIGHT, "--load_best_model_at_end", "true"]


@pytest.fixture(autouse=True)
def losses(monkeypatch):
    """Let each evaluation return the loss of LOSSES for its step."""
    note = RunState.add_evaluation

    def replace(state, values):
        values["loss"] = LOSSES[state.step]
        note(state, values)

    monkeypatch.setattr(RunState, "add_evaluation", replace)


def check_stopped_early(run):
    """Assert that a run of OVERFITS ended at step 10, when step 4 was the best; an equal loss is no new lowest one."""
    assert list_steps(run, "eval") == [0, 2, 4, 6, 8, 10]
    assert name_checkpoints(run) == ["checkpoint-10"]
    assert read_weights(run) != read_weights(run / "checkpoint-10")
    assert read_exported(run) == (4, 2.0)
    summary = read_summary(run)
    assert (summary["step"], summary["exported_step"], summary["eval_loss"]) == (10, 4, 2.0)


def test_a_run_ends_when_its_loss_stalls_and_exports_the_best_model(train, monkeypatch, capsys):
    """The lowest loss lies between two checkpoints. The terminal and the card name the exported step.

    A tracker gets the end at the run's last step, not the model's: wandb drops what is logged at an earlier step.
    """
    logged = []
    monkeypatch.setattr(Accelerator, "log", lambda self, values, step: logged.append((step, values)))
    run = train(*OVERFITS)
    check_stopped_early(run)
    steps = [step for step, _ in logged]
    assert steps == sorted(steps)
    assert logged[-1][0] == logged[-1][1]["end/last_step"] == 10
    assert logged[-1][1]["end/exported_step"] == 4 and list_steps(run, "end") == [4]  # for the card of the model
    shown = read_words(capsys)
    assert "2.0000 at step 4 of 10 " in shown and "best_step: 4 " in shown
    assert "validation loss, after 4." in (run / "README.md").read_text()


def test_an_extended_run_without_a_better_model_has_results_of_its_own(train):
    train(*BEST, "--save_steps", 4)
    run = train(*BEST, "--save_steps", 4, "--max_steps", 10, *AUTO)
    summary = read_summary(run)
    assert (summary["step"], summary["exported_step"], summary["tokens_seen"]) == (10, 4, 10 * 4 * 32)


@pytest.mark.parametrize("killed_at", [6, 8, 10])
def test_a_killed_run_that_resumes_remembers_the_best_model(train, monkeypatch, saves_at_once, killed_at):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        at_call(patch, UpdateGuard, "allows", killed_at, die)
        train(*OVERFITS)
    check_stopped_early(train(*OVERFITS, *AUTO))


@pytest.mark.parametrize(
    ("start", "name", "options", "expected"),
    [
        ("checkpoint-4", "branch", [], [5, 6, 7, 8, 9, 10, 11, 12]),
        ("checkpoint-10", "branch", ["--learning_rate", 0.001], [11, 12]),
        ("checkpoint-10", "run", ["--learning_rate", 0.001], [*range(1, 13)]),
    ],
)
def test_patience_counts_from_a_branch_or_a_change_of_the_schedule(train, tmp_path, start, name, options, expected):
    """Either of them trains, though the run itself was stopped early."""
    run = train(*OVERFITS, "--save_steps", 2, "--save_total_limit", 5)
    train(*OVERFITS, *options, "--resume_from_checkpoint", run / start, output_dir=tmp_path / name)
    assert list_steps(tmp_path / name) == expected


def test_a_better_model_that_could_not_be_written_is_named(train, monkeypatch, capsys):
    """What is exported then is the best of the others."""
    at_call(monkeypatch, recipe.checkpoint, "write_model", 2, fail_with(errno.ENOSPC))
    run = train(*BEST)
    shown = read_words(capsys)
    assert "a model with a lower loss could not be written" in shown
    assert read_exported(run) == (8, 2.25)
    assert "2.0000 at step 4 of 8" in shown and "its weights are gone" in shown


def test_a_run_that_begins_again_replaces_the_model_that_the_first_attempt_left(train, monkeypatch):
    """It ended before its first checkpoint; the loss of its model is lower than those that follow."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        at_call(patch, UpdateGuard, "allows", 6, die)
        train(*BEST, "--save_steps", 20)
    for step, loss in [*LOSSES.items()]:
        monkeypatch.setitem(LOSSES, step, loss + 5)
    run = train(*BEST, *AUTO)
    assert read_exported(run) == (4, 7.0)
    assert read_summary(run)["eval_loss"] == 7.0


def test_a_run_that_keeps_only_the_last_model_says_what_it_lost(train, capsys, monkeypatch):
    """The lines name the option that keeps the best one, a lower loss before training, and no longer training."""
    monkeypatch.setitem(LOSSES, 0, 1.5)
    train(*EIGHT)
    shown = read_words(capsys)
    for text in ("2.0000 at step 4 of 8", "2.2500 at step 8", "--load_best_model_at_end true", "1.5000 at step 0"):
        assert text in shown
    assert " longer " not in shown


@pytest.mark.parametrize(("before", "now"), [("false", "false"), ("false", "true"), ("true", "true")])
def test_a_finished_run_stays_as_it_is_whatever_model_is_now_asked_for(train, before, now):
    options = [*EIGHT, "--save_steps", 2, "--load_best_model_at_end"]
    run = train(*options, before)
    results = [(run / name).read_bytes() for name in RESULTS]
    events = read_events(run, "train")
    train(*options, now, *AUTO)
    assert [(run / name).read_bytes() for name in RESULTS] == results
    assert read_events(run, "train") == events
