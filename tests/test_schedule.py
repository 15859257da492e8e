"""The learning rate: Transformers' schedules, runs limited by time, and runs that are extended or branch."""

import dataclasses
import json
import re
import shlex
import shutil
import time

import pytest
import torch
from conftest import PLAIN, TINY, read_events
from transformers import get_scheduler

import recipe.run.end
import recipe.train
from recipe.command_line import load_config
from recipe.config import SCHEDULES
from recipe.model.loss import LanguageModelingLoss
from recipe.optim.schedule import learning_rate_scale, plan_schedule

STABLE = ["--lr_scheduler_type", "warmup_stable_decay", "--lr_scheduler_kwargs", "num_decay_steps=0.2"]


def config_of(*argv):
    return load_config(["--config", "gpt2_124m", "--dataset_dir", "DIR", *map(str, argv)])[0]


def rates_of(config):
    """Return the multiples of the peak rate in a run of max_steps."""
    schedule = plan_schedule(config, 1)
    examples = range(0, schedule.num_examples, config.global_batch_size)
    return [learning_rate_scale(schedule, n, n / schedule.num_examples) for n in examples]


# ------------------------------------------------------------------ shapes

CASES = [
    *((kind, "") for kind in ("constant", "constant_with_warmup", "linear", "cosine")),
    *(("cosine_with_min_lr", text) for text in ("min_lr_rate=0.1", "min_lr=1e-4")),
    ("warmup_stable_decay", "num_decay_steps=20,decay_type=linear"),
    ("warmup_stable_decay", "num_decay_steps=50,decay_type=cosine,min_lr_ratio=0.1"),
    ("warmup_stable_decay", "num_decay_steps=30,decay_type=1-sqrt"),
]


@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize(("kind", "arguments"), CASES)
def test_the_schedules_are_those_of_transformers(kind, arguments, warmup):
    """Every update has the rate that `get_scheduler` has for it under the same name and arguments."""
    options = ["--lr_scheduler_kwargs", arguments] if arguments else []
    config = config_of("--lr_scheduler_type", kind, "--max_steps", 100, "--warmup_steps", warmup, *options)
    assert rates_of(config) == pytest.approx(rates_of_transformers(config), abs=1e-12)
    assert {kind for kind, _ in CASES} == set(SCHEDULES)


def test_the_default_schedule_ends_at_a_tenth():
    """As GPT-3's, whose cosine Transformers has only with an argument."""
    config = config_of("--lr_scheduler_type", "cosine_with_min_lr", "--max_steps", 100, "--warmup_steps", 0)
    bare = dataclasses.replace(config, lr_scheduler_kwargs=None)
    assert learning_rate_scale(plan_schedule(bare, 1), 100, 1.0) == pytest.approx(0.1)


def rates_of_transformers(config) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=config.learning_rate)
    scheduler = get_scheduler(
        config.lr_scheduler_type, optimizer, config.warmup_steps, config.max_steps, config.lr_scheduler_kwargs
    )
    rates = []
    for _ in range(config.max_steps):
        rates.append(scheduler.get_last_lr()[0] / config.learning_rate)
        optimizer.step()
        scheduler.step()
    return rates


def test_shares_and_defaults():
    """Warm-up and decay below 1 are shares of the steps; by default, the last fifth decays linearly to zero."""
    expected = [*(k / 10 for k in range(10)), *[1] * 70, *(k / 20 for k in range(20, 0, -1))]
    for warmup, arguments in ((10, []), (0.1, []), (10, ["--lr_scheduler_kwargs", "num_decay_steps=0.2"])):
        config = config_of(*STABLE, "--max_steps", 100, "--warmup_steps", warmup, *arguments)
        assert rates_of(config) == pytest.approx(expected)


@pytest.mark.parametrize(("kind", "arguments"), CASES)
@pytest.mark.parametrize("warmup", [0.1, 50])
@pytest.mark.parametrize("num_steps", [7, 400])
def test_any_machine_reaches_the_peak_and_the_end(kind, arguments, warmup, num_steps):
    """With a limit of time alone, the warm-up takes at most a fifth of it, and the last rate is that of the end."""
    if "=" in arguments and kind == "warmup_stable_decay":
        arguments = re.sub("num_decay_steps=(..)", r"num_decay_steps=0.\1", arguments)
    options = ["--lr_scheduler_type", kind, "--max_minutes", 5, "--warmup_steps", warmup]
    config = config_of(*options, *(["--lr_scheduler_kwargs", arguments] if arguments else []))
    schedule, batch = plan_schedule(config, 1), config.global_batch_size
    rates = [learning_rate_scale(schedule, step * batch, step / num_steps) for step in range(num_steps + 1)]
    peak = rates.index(max(rates))
    assert rates[peak] > 0.85 and peak / num_steps <= 0.2 + 1 / num_steps
    ends = {"min_lr_rate=0.1": 0.1, "min_lr=1e-4": 1 / 6}
    end = 1 if kind.startswith("constant") else 0.1 if "min_lr_ratio" in arguments else ends.get(arguments, 0)
    assert rates[-1] == pytest.approx(end)


# ------------------------------------------------------------------ a limit of time

SETUP, COMPILATION, EVALUATION, EXPORT = 10.0, 5.0, 3.0, 2.0  # seconds on the clock of these tests
LIMITED = ["--global_batch_size", 4, "--logging_steps", 1, "--learning_rate", 0.003, "--warmup_steps", 6,
           "--eval_steps", 100, "--save_steps", 8]  # fmt: skip


@pytest.fixture
def clock(monkeypatch):
    """A clock that set-up, steps, evaluations and the export advance; a look at it, by 1 µs. Set `step_seconds`."""

    class Clock:
        now, step_seconds = 1000.0, 1.0

        @classmethod
        def read(cls):
            cls.now += 1e-6
            return cls.now

    def slow(function, seconds):
        def run(*args):
            result = function(*args)
            Clock.now += seconds(*args)
            return result

        return run

    seconds_left = [COMPILATION]

    def seconds_of(module, *_):
        extra = seconds_left.pop() if module.training and seconds_left else 0.0
        return Clock.step_seconds + extra if module.training else EVALUATION

    monkeypatch.setattr(time, "perf_counter", Clock.read)
    monkeypatch.setattr(recipe.train, "build_model", slow(recipe.train.build_model, lambda *_: SETUP))
    monkeypatch.setattr(LanguageModelingLoss, "forward", slow(LanguageModelingLoss.forward, seconds_of))
    monkeypatch.setattr(recipe.run.end, "export_model", slow(recipe.run.end.export_model, lambda *_: EXPORT))
    return Clock


@pytest.mark.parametrize("step_seconds", [1.5, 4.0])
def test_a_time_limited_run_ends_on_time_with_its_decay_complete(
    train, clock, dataset_dir, tmp_path, capsys, step_seconds
):
    """On a fast machine or a slow one; resumed, also with twice the time, as it suggests, it continues both."""
    clock.step_seconds = step_seconds
    options = [*TINY, *PLAIN, *LIMITED, *STABLE, "--dataset_dir", dataset_dir]

    def check(output_dir, seconds):
        wall = json.loads((output_dir / "summary.json").read_text())["wall_seconds"]
        assert seconds - 3 * EVALUATION - EXPORT < wall <= seconds + step_seconds, output_dir
        steps = read_events(output_dir, "train")
        rates = [event["learning_rate"] for event in steps]
        assert max(rates) == pytest.approx(0.003) and rates[-1] < 0.003 * 2 * step_seconds / (0.2 * 90)
        decay = sum(a > b for a, b in zip(rates[:-1], rates[1:], strict=True)) * step_seconds
        assert decay == pytest.approx(0.2 * (seconds - SETUP), abs=2 * step_seconds + 2 * EVALUATION)
        return steps

    def run(name, *more):
        return train(*options, *more, "--output_dir", tmp_path / name, output_dir=tmp_path / name, alone=True)

    whole = run("whole", "--max_minutes", 2)
    num_steps = len(check(whole, 120))
    (longer,) = re.findall(r"your command with\n +(.*)", capsys.readouterr().out.replace("\\\n", " "))
    again = run("resumed", "--resume_from_checkpoint", whole / "checkpoint-8", "--max_minutes", 2)
    assert check(again, 120)[-1]["step"] < num_steps
    again = run("longer", "--max_minutes", 2, *shlex.split(longer), "--output_dir", tmp_path / "longer")
    assert check(again, 240)[-1]["step"] > num_steps


def test_a_run_without_time_takes_one_step(train, clock, dataset_dir, tmp_path):
    """Also where steps are limited, too: what comes first ends the run."""
    options = [*TINY, *PLAIN, *LIMITED, "--dataset_dir", dataset_dir]
    for minutes, max_steps, expected in ((0.1, 40, 1), (4, 5, 5)):
        limits = ["--max_minutes", minutes, "--max_steps", max_steps, "--lr_scheduler_type", "linear"]
        folder = tmp_path / str(expected)
        run = train(*options, *limits, "--output_dir", folder, output_dir=folder, alone=True)
        assert read_events(run, "train")[-1]["step"] == expected


# ------------------------------------------------------------------ extension and branches


@pytest.fixture(scope="module")
def stable(train_shared):
    """A run of 20 steps, of which four decay, with checkpoints 7, 14, 16 and 20."""
    return train_shared(*STABLE, "--max_steps", "20", "--save_steps", "7")


def test_epochs_that_limit_minutes_do_not_stretch_the_warm_up():
    """It is a share of what ends the run first: 4% of the minutes, or of the epochs."""
    options = ["--dataset_dir", "d", "--config", "demo", "--num_train_epochs", "6", "--max_minutes", "10"]
    schedule = plan_schedule(load_config(options)[0], 30_000)
    assert schedule.num_examples == 180_000
    for progress, expected in ((0.02, 0.5), (0.04, 1.0), (0.1, 1.0), (0.6, 0.5)):  # from 0.2 on, it decays
        assert learning_rate_scale(schedule, 800, progress) == pytest.approx(expected)


def test_the_last_step_before_the_decay_is_saved(stable, train, tmp_path, capsys):
    """Also with a limit, which counts the newest ones; runs without checkpoints save nothing."""
    names = {path.name for path in stable.glob("checkpoint-*")}
    assert names == {"checkpoint-7", "checkpoint-14", "checkpoint-16", "checkpoint-20"}
    limited = train(*STABLE, "--max_steps", "20", "--save_steps", "1", "--save_total_limit", "2")
    names = {path.name for path in limited.glob("checkpoint-*")}
    assert names == {"checkpoint-16", "checkpoint-19", "checkpoint-20"}
    capsys.readouterr()
    resume = ["--max_steps", "20", "--resume_from_checkpoint", limited / "checkpoint-19"]
    train(*STABLE, *resume, output_dir=limited.with_name("resumed"))
    assert "rate goes" not in capsys.readouterr().out, "the schedule does not change"
    assert not [*train(*STABLE, "--max_steps", "5", output_dir=tmp_path / "none").glob("checkpoint-*")]


@pytest.mark.parametrize(("step", "max_steps"), [(16, 30), (7, 10), (14, 18)])
def test_branches_equal_runs_that_were_planned_so(train, stable, tmp_path, step, max_steps):
    """A longer run and two earlier decays from one stable run, bit for bit."""
    planned = train(*STABLE, "--max_steps", max_steps, output_dir=tmp_path / "planned")
    resume = ["--resume_from_checkpoint", stable / f"checkpoint-{step}"]
    branch = train(*STABLE, *resume, "--max_steps", max_steps, output_dir=tmp_path / "branch")
    assert (branch / "model.safetensors").read_bytes() == (planned / "model.safetensors").read_bytes()
    rates = [[e["learning_rate"] for e in read_events(run, "train")] for run in (planned, branch)]
    assert rates[0][step:] == rates[1]


def test_the_options_that_a_finished_run_prints_extend_it(train, stable, tmp_path, capsys):
    """Added to its command, they train twice as long, from before the decay, into another folder."""
    run = shutil.copytree(stable, tmp_path / "run", ignore=shutil.ignore_patterns(".lock"))
    command = [*STABLE, "--max_steps", "20", "--save_steps", "7", "--resume_from_checkpoint", "auto"]
    train(*command, output_dir=run)
    printed = capsys.readouterr().out.replace("\\\n", " ")
    (options,) = re.findall(r"your command with\n +(.*)", printed)
    assert f"{run}/checkpoint-16" in options and f"--output_dir {run}-40" in options
    train(*command, *shlex.split(options), output_dir=run)
    extended = tmp_path / "run-40"
    rows = {event["num_rows"] for folder in (run, extended) for event in read_events(folder, "eval")}
    assert len(rows) == 1, "of an extended run, `auto` would evaluate others"
    planned = train(*STABLE, "--max_steps", "40", output_dir=tmp_path / "planned")
    assert (extended / "model.safetensors").read_bytes() == (planned / "model.safetensors").read_bytes()
