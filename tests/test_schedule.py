"""The phases of warmup_stable_decay, and runs that are extended or branch from before the decay."""

import json
import re
import shlex

import pytest
from conftest import read_events

from recipe.command_line import load_config
from recipe.errors import UserError
from recipe.optim.schedule import compute_learning_rates, count_warmup_steps, find_branch_step
from recipe.run.branch import extend_command
from recipe.run.plan import keep_warmup

STABLE = ["--lr_scheduler_type", "warmup_stable_decay"]


def config_of(*argv):
    return load_config(["--dataset_dir", "DIR", *STABLE, "--learning_rate", "1", *map(str, argv)])[0]


def test_the_last_fifth_decays_linearly_to_zero():
    """Ten steps of warm-up, 70 at the peak, and 20 that fall by a twentieth each; the last update is not wasted."""
    rates = compute_learning_rates(config_of("--max_steps", 100, "--warmup_steps", 10))
    assert rates == pytest.approx([*(k / 10 for k in range(10)), *[1] * 70, *(k / 20 for k in range(20, 0, -1))])


def test_explicit_arguments_replace_the_defaults():
    """A cosine over half of the steps, to a tenth."""
    arguments = "num_decay_steps=0.5,decay_type=cosine,min_lr_ratio=0.1"
    config = config_of("--max_steps", 100, "--warmup_steps", 10, "--lr_scheduler_kwargs", arguments)
    rates = compute_learning_rates(config)
    assert rates[49:51] == [1, 1] and rates[75] == pytest.approx(0.55) and 0.1 < rates[99] < 0.102
    assert find_branch_step(config) == 50
    other = config_of("--max_steps", 100, "--warmup_steps", 10, "--lr_scheduler_kwargs", "num_decay_steps=30")
    assert compute_learning_rates(other)[85] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--warmup_steps", 90, "--max_steps", 100, "--lr_scheduler_kwargs", "num_decay_steps=20"],
            "90 warm-up steps and 20 decay steps exceed max_steps, 100",
        ),
        (["--lr_scheduler_kwargs", "num_decay_steps=50", "--max_minutes", 5], "with max_minutes, .* must be a share"),
        (["--lr_scheduler_kwargs", "num_stable_steps=3", "--max_minutes", 5], "num_stable_steps unset"),
        (["--lr_scheduler_kwargs", "num_stable_steps=0.5"], "num_stable_steps must be a number of steps, got 0.5"),
        (["--lr_scheduler_kwargs", "num_decay_steps=2.5"], "a share of max_steps below 1, got 2.5"),
        (["--lr_scheduler_kwargs", "num_decay_steps=-3"], "below 1, got -3"),
        (["--lr_scheduler_kwargs", "num_decay_steps=abc"], "num_decay_steps"),
    ],
)
def test_phases_that_do_not_fit(arguments, expected):
    with pytest.raises(UserError, match=expected):
        compute_learning_rates(config_of(*arguments))


@pytest.mark.parametrize("warmup", [0.25, 0.5, 10])
def test_a_share_is_at_most_what_the_warmup_leaves(warmup):
    """The decay starts at the peak, right after the warm-up, however short the run is."""
    for steps in range(1, 60):
        arguments = ["--max_steps", steps, "--warmup_steps", warmup, "--lr_scheduler_kwargs", "num_decay_steps=0.75"]
        config = config_of(*arguments)
        rates, num_warmup = compute_learning_rates(config), count_warmup_steps(config)
        assert len(rates) == steps and rates[:num_warmup] == sorted(rates[:num_warmup])
        assert rates[num_warmup:] == sorted(rates[num_warmup:], reverse=True) and max(rates) <= 1
        assert find_branch_step(config) == steps - min(int(0.75 * steps), max(0, steps - num_warmup))


@pytest.fixture(scope="module")
def stable(train_shared):
    """A run of 20 steps, of which four decay, with checkpoints 7, 14, 16 and 20."""
    return train_shared(*STABLE, "--max_steps", "20", "--save_steps", "7")


def test_the_last_step_before_the_decay_is_saved(stable, train, capsys):
    """Also with a limit, which counts the newest ones; other schedules and runs without checkpoints save nothing."""
    names = {path.name for path in stable.glob("checkpoint-*")}
    assert names == {"checkpoint-7", "checkpoint-14", "checkpoint-16", "checkpoint-20"}
    limited = train(*STABLE, "--max_steps", "20", "--save_steps", "1", "--save_total_limit", "2")
    names = {path.name for path in limited.glob("checkpoint-*")}
    assert names == {"checkpoint-16", "checkpoint-19", "checkpoint-20"}
    capsys.readouterr()
    resume = ["--max_steps", "20", "--resume_from_checkpoint", limited / "checkpoint-19"]
    train(*STABLE, *resume, output_dir=limited.with_name("resumed"))
    assert "jumps" not in capsys.readouterr().out, "the schedule does not change"
    assert not [*train(*STABLE, "--max_steps", "5", "--overwrite").glob("checkpoint-*")]


@pytest.mark.parametrize(("step", "max_steps"), [(16, 30), (7, 10), (14, 18)])
def test_branches_equal_runs_that_were_planned_so(train, stable, tmp_path, step, max_steps):
    """A longer run and two earlier decays from one stable run, bit for bit."""
    planned = train(*STABLE, "--max_steps", max_steps, output_dir=tmp_path / "planned")
    resume = ["--resume_from_checkpoint", stable / f"checkpoint-{step}"]
    branch = train(*STABLE, *resume, "--max_steps", max_steps, output_dir=tmp_path / "branch")
    assert (branch / "model.safetensors").read_bytes() == (planned / "model.safetensors").read_bytes()
    rates = [[e["learning_rate"] for e in read_events(run, "train")] for run in (planned, branch)]
    assert rates[0][step:] == rates[1]


def test_the_command_that_a_run_ends_with_extends_it(train, stable, tmp_path):
    """Run as printed, it trains twice as long, from before the decay into another folder."""
    command = extend_command(load_config(["--config", str(stable / "training_config.yaml")])[0], stable)
    assert f"--output_dir {stable}-40" in command and f"--resume_from_checkpoint {stable}/checkpoint-16" in command
    words = shlex.split(command)
    words = words[next(i for i, word in enumerate(words) if word.startswith("--resume_from")) :]
    extended = train(*words, output_dir=stable.with_name("run-40"), alone=True)
    planned = train(*STABLE, "--max_steps", "40", output_dir=tmp_path / "planned")
    assert (extended / "model.safetensors").read_bytes() == (planned / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("checkpoint", "max_steps", "expected"),
    [
        ("checkpoint-20", 40, r"old schedule starts at step 16, .* from 0.00075 to 0.003 at step 20; .*checkpoint-16"),
        ("checkpoint-14", 16, r"new schedule starts at step 13, .* from 0.003 to 0.002 at step 14; .*checkpoint-7"),
        ("checkpoint-16", 40, None),
    ],
)
def test_a_jump_of_the_learning_rate_is_reported(train, stable, tmp_path, capsys, checkpoint, max_steps, expected):
    """The warning names the checkpoint to resume from instead."""
    resume = ["--resume_from_checkpoint", stable / checkpoint, "--max_steps", max_steps]
    train(*STABLE, *resume, output_dir=tmp_path / "branch")
    printed = capsys.readouterr().out
    assert ("jumps" in printed) is (expected is not None)
    if expected is not None:
        assert re.search(expected, printed)


def test_a_finished_run_names_the_checkpoint_before_the_decay(train, stable, tmp_path, capsys):
    resume = ["--resume_from_checkpoint", stable / "checkpoint-20"]
    train(*STABLE, *resume, "--max_steps", "20", output_dir=tmp_path / "again")
    assert f"resume from {stable / 'checkpoint-16'}, before the decay" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("max_steps", "warmup", "typed_steps", "typed_warmup", "expected"),
    [
        (20, 0.1, 20, 0.1, 0.1),
        (20, 0.1, 400, 0.1, 2),
        (400, 2, 400, 0.1, 2),  # the same command again
        (20, 0.1, 400, 50, 50),
    ],
)
def test_a_warm_up_that_is_over_stays_over(tmp_path, max_steps, warmup, typed_steps, typed_warmup, expected):
    """A tenth of 20 steps was 2 steps; of 400 it would be 40, and the learning rate would fall at step 7."""
    identity = {"max_steps": max_steps, "warmup_steps": warmup, "learning_rate": 1.0, "lr_scheduler_type": STABLE[1]}
    state = {"step": 7, "identity": identity | {"lr_scheduler_kwargs": None, "muon_learning_rate": None}}
    fields = {"untrained": {}, "train_seconds": 0.0, "position": None, "loss_sum": 0.0, "num_losses": 0}
    (tmp_path / "training_state.json").write_text(json.dumps(state | fields))
    config = config_of("--max_steps", typed_steps, "--warmup_steps", typed_warmup)
    assert keep_warmup(config, tmp_path).warmup_steps == expected
