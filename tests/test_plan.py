"""The length of a run, the share of its evaluations, and what may change when it resumes."""

import dataclasses
import json
import math
import shutil
import time
import types

import numpy as np
import pytest
import torch
import yaml
from conftest import BLOCK_SIZE, PLAIN, TINY, read_events
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import recipe.run.accumulation
import recipe.run.plan
import recipe.train
from recipe.command_line import load_config
from recipe.errors import UserError
from recipe.evaluation.validation import Validation
from recipe.hardware.choices import choose_dynamo_backend
from recipe.hardware.host_memory import FreedMemory
from recipe.optim.schedule import compute_learning_rates
from recipe.run.plan import (
    StepBudget,
    count_eval_rows,
    find_consent,
    fit_max_steps,
    keep_chosen_steps,
    resolve_max_steps,
    shorten,
)


def config_of(*argv: str):
    return load_config(["--dataset_dir", "DIR", *map(str, argv)])[0]


@pytest.mark.parametrize("recipe_name", ["demo", "gpt2_124m", "gpt2_355m", "gpt2_774m", "gpt2_1558m"])
def test_evaluation_costs_two_percent_by_default(recipe_name):
    """All evaluations of a recipe cost at most 2% of its training if an evaluated row costs 0.4 of a trained one."""
    config = load_config(["--config", recipe_name, *([] if recipe_name == "demo" else ["--dataset_dir", "DIR"])])[0]
    rows = count_eval_rows(config, 10**9, rows_per_forward=8)
    num_evaluations = 1 + len({*range(config.eval_steps, config.max_steps + 1, config.eval_steps), config.max_steps})
    share = num_evaluations * rows * 0.4 / (config.max_steps * config.global_batch_size)
    assert 0.015 < share <= 0.02
    assert rows % 8 == 0


def test_a_short_run_evaluates_one_forward_pass():
    assert count_eval_rows(config_of("--max_steps", 1), 1000, rows_per_forward=8) == 8
    assert count_eval_rows(config_of("--max_steps", 1), 5, rows_per_forward=8) == 5


@pytest.mark.parametrize(("typed", "expected"), [("all", 1000), ("7", 7), ("2000", 1000)])
def test_max_eval_samples(typed, expected):
    assert count_eval_rows(config_of("--max_eval_samples", typed), 1000, 8) == expected


def test_epochs_become_steps(train, dataset, dataset_dir, tmp_path):
    """Half an epoch is rounded up to whole steps, which the folder's config records."""
    options = ["--dataset_dir", dataset_dir, "--output_dir", tmp_path / "run", *TINY, *PLAIN, "--save_steps", "0"]
    output_dir = train(*options, "--num_train_epochs", "0.5", "--global_batch_size", "4", alone=True)
    recorded = json.loads((output_dir / "summary.json").read_text())["step"]
    assert recorded == math.ceil(len(dataset.splits["train"]) * 0.5 / 4)
    content = yaml.safe_load((output_dir / "training_config.yaml").read_text())
    assert content["max_steps"] == recorded and "num_train_epochs" not in content


@pytest.mark.parametrize(("epochs", "rows", "expected"), [(1, 100, 25), (1, 101, 26), (0.001, 100, 1), (2.5, 10, 7)])
def test_a_partial_step_counts_as_a_step(epochs, rows, expected):
    config = config_of("--num_train_epochs", epochs, "--global_batch_size", 4)
    assert resolve_max_steps(config, rows).max_steps == expected


def test_steps_that_fit_into_the_time():
    """Steps, evaluations and the end fit into the time left: at most max_steps, at least one more."""
    config = config_of("--max_steps", 1000, "--eval_steps", 100)
    times = {"step_seconds": 0.5, "eval_seconds": 2.0}
    chosen = fit_max_steps(config, step=10, seconds_left=110, **times)
    needed = (chosen - 10) * 0.5 + (chosen // 100 + 1) * 2.0 + recipe.run.plan.CLOSING_SECONDS
    assert 100 < needed <= 110
    assert fit_max_steps(config, 10, 10_000, **times) == 1000
    assert fit_max_steps(config, 10, -5, **times) == 11


def choices_of(budget, now, step_seconds) -> dict[int, int | None]:
    """Let twelve steps pass on the clock `now`, the first of which compiles. Returns the budget's answers."""
    answers = {}
    for step in range(1, 13):
        now[0] += 100.0 if step == 1 else step_seconds
        answers[step] = budget.choose(step)
    return answers


def test_the_time_limit_counts_from_the_start_of_the_program(monkeypatch):
    """The first, slow steps do not count as the speed, and the time before the loop is already spent."""
    now = [1000.0]
    monkeypatch.setattr(recipe.run.plan, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    config = config_of("--max_minutes", 10, "--eval_steps", 0, "--max_eval_samples", 1)
    budget = StepBudget(config, started_at=800.0, first_step=0, eval_rows=5120)
    answers = choices_of(budget, now, step_seconds=1.0)
    chosen = answers.pop(10)
    final_evaluation = 5120 / config.global_batch_size * 0.4
    spent = 200 + 109  # before the loop, and in its first ten steps
    assert chosen == pytest.approx(10 + 600 - spent - recipe.run.plan.CLOSING_SECONDS - final_evaluation, abs=1.1)
    assert set(answers.values()) == {None}


def test_the_main_process_chooses_the_number_of_steps(monkeypatch):
    """The clocks of several processes differ, and their numbers of steps must not."""
    monkeypatch.setattr(recipe.run.plan, "on_main_process", lambda choose: (choose(), "the main process's")[1])
    budget = StepBudget(config_of("--max_steps", 99, "--max_minutes", 10), time.perf_counter(), 0, 1)
    assert [budget.choose(step) for step in range(1, 12)] == [*[None] * 9, "the main process's", None]


LIMITED = ["--max_steps", "200", "--max_minutes", "5", "--save_steps", "6", "--eval_steps", "0",
           "--per_device_eval_batch_size", "1"]  # fmt: skip


@pytest.fixture(scope="module")
def limited(train_shared):
    """A run whose time limit shortened it from 200 to 15 steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe.run.plan, "fit_max_steps", lambda *args: 15)
        return train_shared(*LIMITED, "--lr_scheduler_type", "cosine")


def test_a_shortened_run_records_its_length(limited):
    assert [e["step"] for e in read_events(limited, "train")][-1] == 15
    assert read_events(limited, "max_minutes")[0]["max_steps"] == 15
    assert yaml.safe_load((limited / "training_config.yaml").read_text())["max_steps"] == 15


def test_a_shortened_run_evaluates_fewer_rows(limited):
    """2% of 200 steps of 4 rows pay for 20 rows in each of two evaluations, and 2% of 15 steps for one."""
    assert [e["num_rows"] for e in read_events(limited, "eval")] == [20, 1]


@pytest.mark.parametrize("checkpoint", ["checkpoint-12", "checkpoint-15"])
def test_resuming_keeps_the_chosen_length(train, limited, monkeypatch, checkpoint):
    """The same command resumes to the same model and evaluation, whatever the speed is now."""
    monkeypatch.setattr(recipe.run.plan, "fit_max_steps", lambda *args: 40)
    resumed = train(*LIMITED, "--lr_scheduler_type", "cosine", "--resume_from_checkpoint", limited / checkpoint)
    assert (resumed / "model.safetensors").read_bytes() == (limited / "model.safetensors").read_bytes()
    assert json.loads((resumed / "summary.json").read_text())["eval_rows"] == 1


def test_typed_steps_override_the_chosen_length(limited):
    """A time limit does not: the command that started the run resumes it."""
    limit = config_of("--max_steps", 20, "--max_minutes", 9)
    kept = keep_chosen_steps(limit, limited / "checkpoint-12", {"max_steps", "max_minutes"})
    assert (kept.max_steps, kept.max_minutes) == (15, None)
    assert keep_chosen_steps(config_of("--max_steps", 20), limited / "checkpoint-12", {"max_steps"}).max_steps == 20


def test_a_run_killed_after_the_choice_resumes_by_its_own_config(train, limited, tmp_path):
    """The checkpoint saved with the choice and the folder's config agree."""
    output_dir = tmp_path / "run"
    shutil.copytree(limited, output_dir, ignore=shutil.ignore_patterns("checkpoint-12", "checkpoint-15", ".lock"))
    assert (output_dir / "checkpoint-10").is_dir()  # all that a SIGKILL after step 10 leaves
    config = output_dir / "training_config.yaml"
    train("--config", config, "--output_dir", output_dir, "--resume_from_checkpoint", "auto", alone=True)
    assert (output_dir / "model.safetensors").read_bytes() == (limited / "model.safetensors").read_bytes()
    assert [e["step"] for e in read_events(output_dir, "train")] == list(range(1, 16))


def test_the_schedule_ends_with_the_chosen_length(limited):
    """After the choice, the learning rate falls to its minimum at the last step. Earlier steps keep theirs."""
    rates = [e["learning_rate"] for e in read_events(limited, "train")]
    options = ["--learning_rate", 0.003, "--lr_scheduler_type", "cosine"]
    full, short = (
        compute_learning_rates(config_of("--max_steps", steps, "--warmup_steps", warmup, *options))
        for steps, warmup in ((200, 2), (15, 2))
    )
    assert rates == pytest.approx([*full[:10], *short[10:]])


# ------------------------------------------------------------------ a time limit without a number of steps


def test_a_typed_time_limit_replaces_the_number_of_steps_of_the_recipe(tmp_path):
    """Steps or epochs from the same place as the limit stay its upper bound."""
    steps = {"max_steps": 30, "warmup_steps": 5}
    recipes = {"steps": steps, "epochs": {"num_train_epochs": 2}, "both": steps | {"max_minutes": 3}}
    recipes["limit"] = {"max_minutes": 3}
    found = {}
    for name, content in recipes.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"dataset_dir": "DIR", **content}))
        for typed in ([], ["--max_minutes", "9"], ["--max_minutes", "9", "--max_steps", "40"]):
            config = load_config(["--config", str(path), *typed])[0]
            bound = None if config.is_open_ended else config.num_train_epochs or config.max_steps
            found[name, len(typed)] = (bound, config.max_minutes)
    assert found == {
        **{("steps", 0): (30, None), ("steps", 2): (None, 9), ("steps", 4): (40, 9)},
        **{("epochs", 0): (2, None), ("epochs", 2): (None, 9), ("epochs", 4): (40, 9)},
        **{("both", 0): (30, 3), ("both", 2): (None, 9), ("both", 4): (40, 9)},
        **{("limit", 0): (None, 3), ("limit", 2): (None, 9), ("limit", 4): (40, 9)},
    }
    epochs = config_of("--num_train_epochs", 2, "--max_minutes", 9)
    assert (epochs.num_train_epochs, epochs.max_minutes, epochs.is_open_ended) == (2, 9, False)


def test_the_warm_up_is_at_most_a_fifth_of_the_chosen_steps():
    """A share stays a share, and a run that the limit does not shorten keeps its warm-up."""
    for warmup, chosen, expected in ((50, 1000, 50), (50, 250, 50), (50, 100, 20), (50, 3, 0), (0.3, 100, 0.3)):
        config = shorten(config_of("--max_minutes", 5, "--warmup_steps", warmup), chosen)
        assert (config.max_steps, config.warmup_steps, config.max_minutes) == (chosen, expected, None)
    bounded = config_of("--max_minutes", 5, "--max_steps", 100, "--warmup_steps", 50)
    assert shorten(bounded, 100).warmup_steps == 50 and shorten(bounded, 99).warmup_steps == 19


def test_nothing_takes_the_provisional_number_of_steps_for_the_run():
    """The first evaluation is that of a short run, and a CPU compiles only if the limit leaves the time for it."""
    config = config_of("--max_minutes", 4, "--eval_steps", 250, "--global_batch_size", 8)
    assert count_eval_rows(config, 10**9, rows_per_forward=8) == 0.02 * 1000 * 8 / 0.4 / 5
    assert choose_dynamo_backend(config, torch.device("cpu"), 1e20).reason.endswith("too short to pay for compiling")
    longer = dataclasses.replace(config, max_minutes=20.0)
    assert not choose_dynamo_backend(longer, torch.device("cpu"), 1e20).reason.endswith(
        "too short to pay for compiling"
    )


OPEN_ENDED = ["--config_overrides", "n_layer=2,n_head=2,n_embd=32,resid_pdrop=0.1", "--block_size", BLOCK_SIZE, *PLAIN,
              "--global_batch_size", 4, "--logging_steps", 1, "--learning_rate", 0.003, "--warmup_steps", 16,
              "--eval_steps", 50, "--save_steps", 6]  # fmt: skip


def test_a_time_limited_run_equals_one_with_its_number_of_steps(train, dataset_dir, tmp_path, monkeypatch):
    """Bit for bit, with more steps than the recipe has, and from every resume, whatever the speed is then."""
    recipe_file = tmp_path / "recipe.yaml"
    recipe_file.write_text(yaml.safe_dump({"dataset_dir": str(dataset_dir), "max_steps": 20}))
    options = ["--config", recipe_file, *OPEN_ENDED, "--lr_scheduler_type", "warmup_stable_decay"]
    runs = {name: tmp_path / name for name in ("given", "chosen", "before", "after")}
    train(*options, "--max_steps", "80", "--output_dir", runs["given"], alone=True)
    monkeypatch.setattr(recipe.run.plan, "fit_max_steps", lambda *args: 80)
    options += ["--max_minutes", "5"]
    train(*options, "--output_dir", runs["chosen"], alone=True)
    resume = "--resume_from_checkpoint", runs["chosen"] / "checkpoint-6"
    train(*options, *resume, "--output_dir", runs["before"], alone=True)
    monkeypatch.setattr(recipe.run.plan, "fit_max_steps", lambda *args: 40)
    resume = "--resume_from_checkpoint", runs["chosen"] / "checkpoint-36"
    train(*options, *resume, "--output_dir", runs["after"], alone=True)
    assert len({(path / "model.safetensors").read_bytes() for path in runs.values()}) == 1
    assert [e["step"] for e in read_events(runs["chosen"], "max_minutes")] == [10]
    assert [e["step"] for e in read_events(runs["before"], "max_minutes")] == [16]
    assert not read_events(runs["after"], "max_minutes")


@pytest.fixture(scope="module")
def four_steps(train_shared):
    """A finished run with checkpoints 2 and 4."""
    return train_shared("--save_steps", "2")


@pytest.fixture
def finished(four_steps, tmp_path):
    """A copy of the finished run of four steps, in the folder that `train` uses."""
    return shutil.copytree(four_steps, tmp_path / "run", ignore=shutil.ignore_patterns(".lock"))


RESUME = ["--resume_from_checkpoint", "auto"]


def recipe_of(run, **changes):
    """Return the options that resume a run by its own recipe, some values of which have changed."""
    path = run.parent / "recipe.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load((run / "training_config.yaml").read_text()) | changes))
    return [*RESUME, "--config", path, "--output_dir", run]


def test_only_typed_options_change_the_schedule(train, finished):
    """A changed recipe is refused; other data or batches are always refused."""
    for change, expected in (({"learning_rate": 0.002}, "0.003 -> 0.002"), ({"max_steps": 8}, "4 -> 8")):
        with pytest.raises(UserError, match=f"{[*change][0]} {expected}; type the option on the command line"):
            train(*recipe_of(finished, **change), alone=True)
    with pytest.raises(UserError, match="seed 1337 -> 1; "):
        train(*RESUME, "--max_steps", "8", "--seed", "1")
    with pytest.raises(UserError, match="is at step 4 already"):
        train(*RESUME, "--max_steps", "3")
    assert [e["step"] for e in read_events(finished, "train")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("muon_learning_rate output_dir", "muon_learning_rate"),
        ("warmup_steps seed", "warmup_steps"),
        ("num_train_epochs", "max_steps warmup_steps"),
        ("max_minutes learning_rate", "max_steps warmup_steps learning_rate"),
        ("lr_scheduler_type", "lr_scheduler_type lr_scheduler_kwargs"),
    ],
)
def test_what_a_typed_option_may_change(typed, expected):
    """Itself, and what follows from it."""
    assert find_consent(set(typed.split())) == set(expected.split())


def test_a_changed_schedule_keeps_the_past_and_is_recorded(train, finished, capsys):
    """Only the steps after it follow the new schedule, and the folder records what changed."""
    before = [e["loss"] for e in read_events(finished, "train")]
    recipe = recipe_of(finished, learning_rate=0.002, save_steps=4)
    train(*recipe, "--max_steps", "8", "--learning_rate", "0.002", alone=True)
    assert "from step 5, learning_rate is 0.002 instead of 0.003" in capsys.readouterr().out
    events = read_events(finished, "train")
    assert [e["loss"] for e in events[:4]] == before
    assert [e["learning_rate"] for e in events[4:]] == pytest.approx([0.002 * (8 - k) / 6 for k in range(4, 8)])
    (record,) = read_events(finished, "schedule")
    changes = {"learning_rate": [0.003, 0.002], "max_steps": [4, 8]}
    assert record == {"event": "schedule", "step": 4, "changes": changes}
    # The changed run resumes by its own recipe, also from the checkpoint before the change.
    shutil.rmtree(finished / "checkpoint-8")
    train(*recipe_of(finished), alone=True)
    assert read_events(finished, "train")[-1]["step"] == 8


def test_a_finished_run_offers_to_train_longer(train, finished, capsys):
    train(*RESUME, "--save_steps", "2")
    printed = " ".join(capsys.readouterr().out.replace("\\\n", " ").split())
    assert "all 4 steps are done" in printed and printed.count("--max_steps 8") == 2


def test_the_share_of_time_outside_training(train):
    """Log and summary record the share of the loop's time that evaluating and saving took."""
    output_dir = train("--eval_steps", "1", "--save_steps", "1", "--max_eval_samples", "all")
    summary = json.loads((output_dir / "summary.json").read_text())
    assert 0.1 < summary["share_outside_training"] < 1
    assert all(0 <= e["share_outside_training"] < 1 for e in read_events(output_dir, "train"))


def test_a_change_of_precision_is_reported(train, finished, capsys):
    train(*RESUME, "--max_steps", "5", "--mixed_precision", "bf16")
    assert "the precision changes from no to bf16 at step 4" in capsys.readouterr().out


# ------------------------------------------------------------------ starting from existing weights


def fine_tune(train, source, *arguments, output_dir):
    """Train on an existing model, whose shape may not be overridden; dropout may."""
    overrides = ["--block_size", BLOCK_SIZE, "--config_overrides", "resid_pdrop=0.0"]
    return train("--model_name_or_path", source, *arguments, output_dir=output_dir, shape=overrides)


@pytest.fixture
def base(four_steps, tmp_path):
    """A model to start from: a copy of the finished run."""
    return shutil.copytree(four_steps, tmp_path / "base", ignore=shutil.ignore_patterns("checkpoint-*", ".lock"))


def test_training_starts_from_existing_weights(train, base, tmp_path, dataset):
    """At step 0 the model has the loss of the stock model. Its vocabulary is padded during training only."""
    tuned = fine_tune(train, base, "--max_eval_samples", "all", output_dir=tmp_path / "tuned")
    first, last = (e["loss"] for e in read_events(tuned, "eval"))
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    assert first == pytest.approx(stock_loss(model, dataset), abs=1e-5) and last < first
    config = AutoModelForCausalLM.from_pretrained(tuned).config
    assert (config.n_layer, config.n_embd, config.vocab_size, config.n_positions) == (2, 32, 500, BLOCK_SIZE)


def stock_loss(model, dataset) -> float:
    """Independent: the stock model on all validation rows."""
    split = dataset.splits["validation"]
    rows = torch.from_numpy(split[np.arange(len(split))])
    with torch.no_grad():
        logits = model(input_ids=rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


def test_a_fine_tuned_run_resumes_without_its_source(train, base, tmp_path):
    """It resumes bit for bit from the checkpoint alone, so the model it started from may be gone."""
    arguments = ["--save_steps", "2"]
    through = fine_tune(train, base, *arguments, output_dir=tmp_path / "through")
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    resumed = fine_tune(
        train, base, *arguments, "--resume_from_checkpoint", through / "checkpoint-2", output_dir=tmp_path / "resumed"
    )
    assert (resumed / "model.safetensors").read_bytes() == (through / "model.safetensors").read_bytes()


def test_padding_of_a_loaded_vocabulary_is_dropped(train, base, tmp_path):
    """Other trainers export models with more rows than the tokenizer has tokens."""
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(640)
    model.save_pretrained(tmp_path / "padded")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "padded" / name).write_bytes((base / name).read_bytes())
    tuned = fine_tune(train, tmp_path / "padded", "--max_steps", "1", output_dir=tmp_path / "tuned")
    assert AutoModelForCausalLM.from_pretrained(tuned).config.vocab_size == 500


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config_overrides", "n_layer=3"], "n_layer cannot differ from the model in"),
        (["--block_size", "64"], "has 32 positions, fewer than block_size 64"),
        (["--model_name_or_path", "no/such/folder"], "there is no folder no/such/folder"),
        (["--model_name_or_path", ""], "must not be empty"),
    ],
)
def test_models_that_training_cannot_start_from(train, base, tmp_path, arguments, expected):
    with pytest.raises(UserError, match=expected):
        fine_tune(train, base, *arguments, output_dir=tmp_path / "tuned")


def test_eval_only_evaluates_all_rows_and_writes_nothing(train, base, tmp_path, dataset, capsys):
    """It prints the stock model's loss over the whole split."""
    expected = stock_loss(AutoModelForCausalLM.from_pretrained(base).eval(), dataset)
    fine_tune(train, base, "--eval_only", output_dir=tmp_path / "none")
    assert f"validation loss {expected:.4f}" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()
    with pytest.raises(UserError, match="--eval_only requires a model"):
        train("--eval_only")


def test_resuming_keeps_the_number_of_evaluation_rows(train, tmp_path):
    """Another batch size, for example because of more processes, must not change what is compared."""
    first = train("--save_steps", "2", "--per_device_eval_batch_size", "7", output_dir=tmp_path / "a")
    resume = ["--resume_from_checkpoint", first / "checkpoint-2", "--per_device_eval_batch_size", "3"]
    resumed = train(*resume, output_dir=tmp_path / "b")
    assert {e["num_rows"] for run in (first, resumed) for e in read_events(run, "eval")} == {7}


def test_a_run_interrupted_before_its_first_step_leaves_its_folder_free(train, monkeypatch):
    """The same command starts again, and the log holds nothing of the first try."""
    run = Validation.run

    def interrupted(self):
        run(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Validation, "run", interrupted)
        train()
    assert [e["step"] for e in read_events(train(), "eval")] == [0, 4]


def test_a_time_limit_of_the_recipe_does_not_change_a_started_run(train, monkeypatch):
    """The error names the option that keeps the schedule. A typed limit changes it."""
    output_dir = train("--max_steps", "12", "--save_steps", "12")
    with pytest.raises(UserError, match="the recipe's max_minutes would change .*add --max_steps 12 to keep it"):
        train(*recipe_of(output_dir, max_minutes=9), alone=True)
    train(*recipe_of(output_dir, max_minutes=9), "--max_steps", "12", alone=True)
    monkeypatch.setattr(recipe.run.plan, "fit_max_steps", lambda *args: 24)
    train(*recipe_of(output_dir), "--max_minutes", "9", alone=True)
    assert [e["step"] for e in read_events(output_dir, "train")] == list(range(1, 25))


def test_a_branch_from_an_earlier_checkpoint_requires_its_own_folder(train, finished, tmp_path):
    """Otherwise checkpoints of the old schedule would count as the run's newest."""
    branch = ["--resume_from_checkpoint", finished / "checkpoint-2", "--max_steps", "3"]
    with pytest.raises(UserError, match=r"\(checkpoint-4\)"):
        train(*branch)
    branched = train(*branch, output_dir=tmp_path / "branch")
    assert [e["step"] for e in read_events(branched, "train")] == [3]


def test_eval_only_requires_a_checkpoint_in_the_folder(train, finished, tmp_path):
    """A missing checkpoint never means random weights. The checkpoint's schedule does not matter."""
    with pytest.raises(UserError, match="--eval_only: there is no checkpoint in"):
        train("--eval_only", "--resume_from_checkpoint", "auto", output_dir=tmp_path / "none")
    train(*recipe_of(finished, max_steps=9), "--eval_only", alone=True)


@pytest.mark.parametrize("break_it", ["tokenizer", "weights", "vocabulary"])
def test_incomplete_models_are_refused(train, base, tmp_path, break_it):
    """Transformers would build an empty tokenizer, and initialize missing weights at random."""
    if break_it == "tokenizer":
        for path in base.glob("tokenizer*"):
            path.unlink()
        expected = "there is no tokenizer.json in"
    elif break_it == "weights":
        weights = load_file(base / "model.safetensors")
        del weights["transformer.h.1.mlp.c_fc.weight"]
        save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
        expected = "lacks weights: transformer.h.1.mlp.c_fc.weight"
    else:
        model = AutoModelForCausalLM.from_pretrained(base)
        model.resize_token_embeddings(400)
        model.save_pretrained(base)
        expected = "the tokenizer has 500 tokens, more than the 400 of the model"
    with pytest.raises(UserError, match=expected):
        fine_tune(train, base, output_dir=tmp_path / "tuned")


def test_a_half_precision_model_trains_in_fp32(train, base, tmp_path):
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.float16).save_pretrained(tmp_path / "half")
    for path in base.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "half")
    tuned = fine_tune(train, tmp_path / "half", "--max_steps", "1", output_dir=tmp_path / "tuned")
    assert {tensor.dtype for tensor in load_file(tuned / "model.safetensors").values()} == {torch.float32}


def test_freed_memory_is_returned_after_every_step_and_evaluated_batch(train, monkeypatch, dataset):
    calls = []
    monkeypatch.setattr(FreedMemory, "give_back", lambda self: calls.append(1))
    train("--max_eval_samples", "all", "--per_device_eval_batch_size", "16")
    assert len(calls) == 4 + 2 * -(-len(dataset.splits["validation"]) // 16)


def test_a_time_limited_run_resumes_before_its_steps_are_chosen(limited, tmp_path):
    """Interrupted again and again, a run may pass the timed steps without a choice; its own limit is still valid."""
    checkpoint = tmp_path / "checkpoint-12"
    checkpoint.mkdir()
    state = json.loads((limited / "checkpoint-12" / "training_state.json").read_text())
    config = config_of("--max_steps", 200, "--max_minutes", 5)
    for max_minutes, typed, is_allowed in ((5.0, set(), True), (None, {"max_minutes"}, True), (None, set(), False)):
        state |= {"steps_chosen": False, "max_minutes": max_minutes}
        (checkpoint / "training_state.json").write_text(json.dumps(state))
        if is_allowed:
            assert keep_chosen_steps(config, checkpoint, typed) == config
        else:
            with pytest.raises(UserError, match="the recipe's max_minutes would change the schedule"):
                keep_chosen_steps(config, checkpoint, typed)


def test_a_shortened_run_without_checkpoints_records_its_length(train, monkeypatch):
    """The folder's config repeats the run."""
    monkeypatch.setattr(recipe.train, "STARTED_AT", time.perf_counter())
    monkeypatch.setattr(recipe.run.plan, "fit_max_steps", lambda *args: 12)
    output_dir = train(*LIMITED, "--save_steps", "0")
    assert yaml.safe_load((output_dir / "training_config.yaml").read_text())["max_steps"] == 12


def test_eval_only_honors_max_eval_samples(train, finished, tmp_path, capsys):
    """The number of rows is printed."""
    options = ["--max_eval_samples", "3", "--resume_from_checkpoint", finished]
    train("--eval_only", *options, output_dir=tmp_path / "none")
    assert ", 3 rows: validation loss" in capsys.readouterr().out


def test_data_that_cannot_be_opened_leaves_no_folder(train, tmp_path, monkeypatch):
    """The data is opened before the output folder exists and before the first evaluation."""

    def fail(*args):
        raise UserError("there is no training text to stream")

    monkeypatch.setattr(recipe.run.accumulation, "build_batches", fail)
    with pytest.raises(UserError, match="no training text"):
        train(output_dir=tmp_path / "new")
    assert not (tmp_path / "new").exists()
