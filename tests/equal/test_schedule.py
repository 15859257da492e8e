"""Learning rates match Transformers' schedules, and a run limited by time ends on time."""

import dataclasses
import re
import shlex
import time
from types import SimpleNamespace

import pytest
import torch
from helpers import BLOCK_SIZE, PLAIN, TINY, read_summary, values_of
from tiny_runs import STABLE, start_from
from transformers import get_scheduler

import recipe.evaluation.validation
import recipe.train
from recipe.checkpoint import CheckpointSaver, RunState
from recipe.command_line import load_config
from recipe.config import CHOICES
from recipe.model.loss import LanguageModelingLoss
from recipe.optim.schedule import learning_rate_scale, plan_schedule
from recipe.run.decide import measure_progress

CASES = [  # each with the last multiple of its peak rate
    ("constant", "", 1),
    ("constant_with_warmup", "", 1),
    ("linear", "", 0),
    ("cosine", "", 0),
    ("cosine_with_min_lr", "min_lr_rate=0.1", 0.1),
    ("cosine_with_min_lr", "min_lr=1e-4", 1 / 6),
    ("warmup_stable_decay", "num_decay_steps=20,decay_type=linear", 0),
    ("warmup_stable_decay", "num_decay_steps=50,decay_type=cosine,min_lr_ratio=0.1", 0.1),
    ("warmup_stable_decay", "num_decay_steps=30,decay_type=1-sqrt", 0),
]
ALL_CASES = pytest.mark.parametrize(("kind", "arguments", "end"), CASES)


def config_of(kind, *argv, arguments=""):
    options = ["--lr_scheduler_type", kind, *map(str, argv)]
    if arguments:
        options += ["--lr_scheduler_kwargs", arguments]
    return load_config(["--config", "gpt2_124m", "--dataset_dir", "DIR", *options])[0]


def rates_of(config):
    """Return the multiples of the peak rate in a run of max_steps."""
    schedule = plan_schedule(config, 1)
    examples = range(0, schedule.num_examples, config.global_batch_size)
    return [learning_rate_scale(schedule, n, n / schedule.num_examples) for n in examples]


def rates_of_transformers(config):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=config.learning_rate)
    lengths = config.warmup_steps, config.max_steps
    scheduler = get_scheduler(config.lr_scheduler_type, optimizer, *lengths, config.lr_scheduler_kwargs)
    rates = []
    for _ in range(config.max_steps):
        rates.append(scheduler.get_last_lr()[0] / config.learning_rate)
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 10])
@ALL_CASES
def test_the_schedules_are_those_of_transformers(kind, arguments, end, warmup):
    """Every update has the rate that `get_scheduler` has for it under the same name and arguments."""
    config = config_of(kind, "--max_steps", 100, "--warmup_steps", warmup, arguments=arguments)
    assert rates_of(config) == pytest.approx(rates_of_transformers(config), abs=1e-12)


def test_every_schedule_is_compared_with_transformers():
    assert {kind for kind, _, _ in CASES} == {*CHOICES["lr_scheduler_type"]}


def test_the_default_schedule_ends_at_a_tenth():
    """As GPT-3's, whose cosine Transformers has only with an argument."""
    config = config_of("cosine_with_min_lr", "--max_steps", 100, "--warmup_steps", 0)
    bare = dataclasses.replace(config, lr_scheduler_kwargs=None)
    assert learning_rate_scale(plan_schedule(bare, 1), 100, 1.0) == pytest.approx(0.1)


@pytest.mark.parametrize(("warmup", "arguments"), [(10, ""), (0.1, ""), (10, "num_decay_steps=0.2")])
def test_lengths_below_1_are_shares_and_the_last_fifth_decays_by_default(warmup, arguments):
    expected = [*(k / 10 for k in range(10)), *[1] * 70, *(k / 20 for k in range(20, 0, -1))]
    config = config_of(STABLE[1], "--max_steps", 100, "--warmup_steps", warmup, arguments=arguments)
    assert rates_of(config) == pytest.approx(expected)


# ------------------------------------------------------------------ a limit of time

SETUP, COMPILATION, EVALUATION, EXPORT = 10.0, 5.0, 3.0, 2.0  # seconds on the clock of these tests
LIMITED = [*TINY, *PLAIN, "--global_batch_size", 4, "--logging_steps", 1, "--learning_rate", 0.003]
LIMITED += ["--warmup_steps", 6, "--eval_steps", 100, "--save_steps", 8]


@ALL_CASES
@pytest.mark.parametrize("warmup", [0.1, 50])
@pytest.mark.parametrize("num_steps", [7, 400])
def test_any_machine_reaches_the_peak_and_the_end(kind, arguments, end, warmup, num_steps):
    """If only the time is limited, the warm-up takes at most a fifth of it, and the last rate is the final one."""
    arguments = re.sub("num_decay_steps=(..)", r"num_decay_steps=0.\1", arguments)  # a share: there are no steps
    config = config_of(kind, "--max_minutes", 5, "--warmup_steps", warmup, arguments=arguments)
    schedule = plan_schedule(config, 1)
    batch = config.global_batch_size
    rates = [learning_rate_scale(schedule, step * batch, step / num_steps) for step in range(num_steps + 1)]
    peak = rates.index(max(rates))
    assert rates[peak] > 0.85
    assert peak / num_steps <= 0.2 + 1 / num_steps
    assert rates[-1] == pytest.approx(end)


def test_epochs_that_limit_minutes_do_not_stretch_the_warm_up():
    """The warm-up takes 4% of whatever ends the run first, the minutes or the epochs."""
    options = ["--dataset_dir", "d", "--config", "demo", "--num_train_epochs", "6", "--max_minutes", "10"]
    schedule = plan_schedule(load_config(options)[0], 30_000)
    assert schedule.num_examples == 180_000
    for progress, expected in ((0.02, 0.5), (0.04, 1.0), (0.1, 1.0), (0.6, 0.5)):  # from 0.2 on, it decays
        assert learning_rate_scale(schedule, 800, progress) == pytest.approx(expected)


@pytest.fixture
def clock(monkeypatch):
    """A clock that set-up, steps, evaluations and the export advance; a look at it, by 1 µs. Set `step_seconds`.

    An evaluation has nine batches. The first of them compiles, and so does the first step.
    """

    clock = SimpleNamespace(now=1000.0, step_seconds=1.0)
    seconds_left = {True: COMPILATION, False: COMPILATION}

    def read():
        clock.now += 1e-6
        return clock.now

    def slow(function, seconds):
        def run(*args):
            result = function(*args)
            clock.now += seconds(*args)
            return result

        return run

    def seconds_of(module, *_):
        seconds = clock.step_seconds if module.training else EVALUATION / 9
        return seconds + seconds_left.pop(module.training, 0.0)

    monkeypatch.setattr(time, "perf_counter", read)
    monkeypatch.setattr(recipe.evaluation.validation, "CPU_TOKENS", 2 * BLOCK_SIZE)
    monkeypatch.setattr(recipe.train, "build_model", slow(recipe.train.build_model, lambda *_: SETUP))
    monkeypatch.setattr(LanguageModelingLoss, "forward", slow(LanguageModelingLoss.forward, seconds_of))
    monkeypatch.setattr(CheckpointSaver, "_export", slow(CheckpointSaver._export, lambda *_: EXPORT))
    return clock


def assert_ends_on_time(run, seconds, step_seconds):
    """Its decay, a fifth of the time, is complete. Returns the number of steps."""
    assert seconds - 3 * EVALUATION - EXPORT < read_summary(run)["wall_seconds"] <= seconds + step_seconds
    rates = values_of(run, "learning_rate")
    assert max(rates) == pytest.approx(0.003)
    assert rates[-1] < 0.003 * 2 * step_seconds / (0.2 * 90)
    decay = sum(a > b for a, b in zip(rates[:-1], rates[1:], strict=True)) * step_seconds
    assert decay == pytest.approx(0.2 * (seconds - SETUP), abs=2 * step_seconds + 2 * EVALUATION)
    return values_of(run, "step")[-1]


@pytest.mark.parametrize("step_seconds", [1.5, 4.0])
def test_a_time_limited_run_ends_on_time_with_its_decay_complete(
    train, dataset_dir, tmp_path, clock, capsys, step_seconds
):
    """On a fast machine or a slow one; resumed, also with twice the time, as it suggests, it continues both."""
    clock.step_seconds = step_seconds

    def run(name, *options):
        folder = ["--output_dir", tmp_path / name]
        train(*LIMITED, "--dataset_dir", dataset_dir, *STABLE, "--max_minutes", 2, *folder, *options, alone=True)
        return tmp_path / name

    whole = run("whole")
    (longer,) = re.findall(r"your command with\n +(.*)", capsys.readouterr().out.replace("\\\n", " "))
    num_steps = assert_ends_on_time(whole, 120, step_seconds)
    resumed = run("resumed", *start_from(whole, 8))
    assert assert_ends_on_time(resumed, 120, step_seconds) < num_steps
    extended = run("longer", *shlex.split(longer), "--output_dir", tmp_path / "longer")
    assert assert_ends_on_time(extended, 240, step_seconds) > num_steps


def test_the_progress_of_a_time_limited_run_never_falls():
    """What it reserves for its end is that of its first evaluation, without the batch that compiles."""
    schedule = plan_schedule(config_of("linear", "--max_minutes", 1), 1)
    state = RunState()
    shares = []

    def evaluate(seconds, warm_seconds):
        state.add_evaluation({"loss": 1.0, "num_rows": 8, "seconds": seconds, "warm_seconds": warm_seconds})
        state.seconds += seconds
        shares.append(measure_progress(schedule, state))

    state.begin_stage(32, "")
    evaluate(20.0, 1.0)
    state.setup_seconds = state.seconds
    state.step = 10
    shares.append(measure_progress(schedule, state))
    state.seconds += 17.5  # of 60 - 20 - 2 - CLOSING_SECONDS
    shares.append(measure_progress(schedule, state))
    assert shares[-1] == pytest.approx(0.5)
    for number, (seconds, warm_seconds) in enumerate(((9.0, 9.0), (0.1, 0.0))):  # stages on other data
        state.begin_stage(32, str(number))
        evaluate(seconds, warm_seconds)
    assert shares == sorted(shares)
