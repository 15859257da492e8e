"""How long a run is, how much of it goes into evaluation, and what may change when it is resumed."""

import json
import shutil
import time

import pytest
import torch
import yaml
from conftest import BLOCK_SIZE, read_events
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import recipe.hardware.host_memory
import recipe.run.plan
import recipe.train
from recipe.command_line import load_config
from recipe.errors import UserError
from recipe.run.plan import StepBudget, count_eval_rows, fit_max_steps, resolve_max_steps


def config_of(*argv: str):
    return load_config(["--dataset_dir", "DIR", *map(str, argv)])[0]


@pytest.mark.parametrize("recipe_name", ["demo", "gpt2_124m", "gpt2_355m", "gpt2_774m", "gpt2_1558m"])
def test_evaluation_costs_two_percent_by_default(recipe_name):
    """All evaluations of a recipe together cost at most 2% of its training, at 0.4 of a trained row for each row."""
    config = load_config(["--config", recipe_name, *([] if recipe_name == "demo" else ["--dataset_dir", "DIR"])])[0]
    rows = count_eval_rows(config, 10**9, rows_per_forward=8)
    num_evaluations = 1 + len({*range(config.eval_steps, config.max_steps + 1, config.eval_steps), config.max_steps})
    share = num_evaluations * rows * 0.4 / (config.max_steps * config.global_batch_size)
    assert 0.015 < share <= 0.02
    assert rows % 8 == 0


def test_a_short_run_evaluates_one_forward():
    assert count_eval_rows(config_of("--max_steps", 1), 1000, rows_per_forward=8) == 8
    assert count_eval_rows(config_of("--max_steps", 1), 5, rows_per_forward=8) == 5


@pytest.mark.parametrize(("typed", "expected"), [("all", 1000), ("7", 7), ("2000", 1000)])
def test_max_eval_samples(typed, expected):
    assert count_eval_rows(config_of("--max_eval_samples", typed), 1000, 8) == expected


def test_the_last_evaluation_can_be_exact(train, dataset):
    """A sample on the way, and all rows at the end; the log says how many."""
    output_dir = train("--eval_steps", "2", "--max_eval_samples", "3", "--exact_final_eval")
    assert [e["num_rows"] for e in read_events(output_dir, "eval")] == [3, 3, len(dataset.splits["validation"])]


def test_epochs_become_steps(train, dataset):
    """Half an epoch, rounded up to whole steps; the folder records the steps."""
    output_dir = train_epochs(train, "0.5")
    steps = -(-len(dataset.splits["train"]) // 2 // 4)
    assert json.loads((output_dir / "summary.json").read_text())["step"] == pytest.approx(steps, abs=1)
    content = yaml.safe_load((output_dir / "training_config.yaml").read_text())
    assert content["max_steps"] == json.loads((output_dir / "summary.json").read_text())["step"]
    assert "num_train_epochs" not in content


def train_epochs(train, epochs: str):
    """`train` passes --max_steps, which would exclude --num_train_epochs."""
    import sys

    real = recipe.train.load_config

    def without_steps():
        i = sys.argv.index("--max_steps")
        return real([*sys.argv[1:i], *sys.argv[i + 2 :], "--num_train_epochs", epochs])

    recipe.train.load_config = without_steps
    try:
        return train()
    finally:
        recipe.train.load_config = real


@pytest.mark.parametrize(("epochs", "rows", "expected"), [(1, 100, 25), (1, 101, 26), (0.001, 100, 1), (2.5, 10, 7)])
def test_a_partial_step_counts(epochs, rows, expected):
    config = config_of("--num_train_epochs", epochs, "--global_batch_size", 4)
    assert resolve_max_steps(config, rows).max_steps == expected


def test_steps_that_fit_into_the_time():
    """Steps, evaluations and the closing fit into what is left; at most max_steps, at least those that are done."""
    config = config_of("--max_steps", 1000, "--eval_steps", 100)
    times = {"step_seconds": 0.5, "eval_seconds": 2.0, "final_eval_seconds": 5.0}
    chosen = fit_max_steps(config, step=10, seconds_left=110, **times)
    needed = (chosen - 10) * 0.5 + chosen // 100 * 2.0 + 5.0 + recipe.run.plan.CLOSING_SECONDS
    assert 100 < needed <= 110
    assert fit_max_steps(config, 10, 10_000, **times) == 1000
    assert fit_max_steps(config, 10, -5, **times) == 11


def test_the_speed_is_that_of_the_timed_steps(monkeypatch):
    """The first steps, with their compiling, do not count."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    config = config_of("--max_steps", 10_000, "--max_minutes", 10, "--eval_steps", 0)
    budget = StepBudget(config, started_at=0.0, first_step=0, eval_rows=1, final_eval_rows=5120)
    answers = {}
    for step in range(1, 13):
        now[0] += 100.0 if step == 1 else 1.0
        answers[step] = budget.choose(step)
    chosen = answers.pop(10)
    final_evaluation = 5120 / config.global_batch_size * 0.4
    assert chosen == pytest.approx(10 + 600 - 109 - recipe.run.plan.CLOSING_SECONDS - final_evaluation, abs=1.1)
    assert set(answers.values()) == {None}


LIMITED = ["--max_steps", "200", "--max_minutes", "5", "--save_steps", "6", "--eval_steps", "0"]


def test_a_chosen_length_is_kept_on_resume(train, tmp_path, monkeypatch):
    """The choice is in the checkpoint and in the folder's config: a resume by the same command gives the same run."""
    monkeypatch.setattr(recipe.run.plan, "fit_max_steps", lambda *args: 15)
    monkeypatch.setattr(recipe.train, "STARTED_AT", time.perf_counter())
    through = train(*LIMITED, output_dir=tmp_path / "through")
    assert [e["step"] for e in read_events(through, "train")][-1] == 15
    assert read_events(through, "max_minutes")[0]["max_steps"] == 15
    assert yaml.safe_load((through / "training_config.yaml").read_text())["max_steps"] == 15
    monkeypatch.setattr(recipe.run.plan, "fit_max_steps", lambda *args: 40)  # another speed must not matter any more
    for checkpoint in ("checkpoint-12", "checkpoint-15"):
        resumed = train(
            *LIMITED, "--resume_from_checkpoint", through / checkpoint, output_dir=tmp_path / f"from-{checkpoint}"
        )
        assert (resumed / "model.safetensors").read_bytes() == (through / "model.safetensors").read_bytes()


def test_the_schedule_ends_with_the_chosen_length(train, monkeypatch):
    """After the choice the learning rate falls to its minimum at the last step, and before it nothing changes."""
    monkeypatch.setattr(recipe.train, "STARTED_AT", time.perf_counter())
    monkeypatch.setattr(recipe.run.plan, "fit_max_steps", lambda *args: 30)
    rates = [e["learning_rate"] for e in read_events(train(*LIMITED, "--lr_scheduler_type", "cosine"), "train")]
    options = ["--learning_rate", 0.003, "--lr_scheduler_type", "cosine"]
    full, short = (
        recipe.train.compute_learning_rates(config_of("--max_steps", steps, "--warmup_steps", warmup, *options))
        for steps, warmup in ((200, 2), (30, 2 / 200))  # the warm-up keeps its share
    )
    assert rates == pytest.approx([*full[:10], *short[10:]])


def test_another_schedule_needs_to_be_asked_for(train):
    """A longer run is refused with the option that allows it; data and batch stay refused with it."""
    output_dir = train("--save_steps", "4")
    resume = ["--resume_from_checkpoint", "auto"]
    with pytest.raises(UserError, match="max_steps 4 -> 8; add --change_schedule"):
        train(*resume, "--max_steps", "8")
    with pytest.raises(UserError, match="seed 1337 -> 1; pass the run's own options"):
        train(*resume, "--max_steps", "8", "--seed", "1", "--change_schedule")
    with pytest.raises(UserError, match="has done 4 steps"):
        train(*resume, "--max_steps", "3", "--change_schedule")
    with pytest.raises(UserError, match="--change_schedule is for a run that is resumed"):
        train("--change_schedule", "--overwrite")
    assert [e["step"] for e in read_events(output_dir, "train")] == [1, 2, 3, 4]


def test_a_changed_schedule_leaves_the_past_and_is_recorded(train, tmp_path):
    """Steps before it are as they were; those after it follow the new schedule; the folder says what changed."""
    resume = ["--resume_from_checkpoint", "auto", "--save_steps", "4", "--lr_scheduler_type", "linear"]
    output_dir = train("--save_steps", "4", "--lr_scheduler_type", "linear")
    before = [e["loss"] for e in read_events(output_dir, "train")]
    train(*resume, "--max_steps", "8", "--learning_rate", "0.002", "--change_schedule")
    events = read_events(output_dir, "train")
    assert [e["loss"] for e in events[:4]] == before
    assert [e["learning_rate"] for e in events[4:]] == pytest.approx([0.002 * (8 - k) / 6 for k in range(4, 8)])
    (record,) = read_events(output_dir, "schedule")
    assert record == {
        "event": "schedule",
        "step": 4,
        "changes": {"learning_rate": [0.003, 0.002], "max_steps": [4, 8]},
    }
    content = yaml.safe_load((output_dir / "training_config.yaml").read_text())
    assert (content["max_steps"], content["learning_rate"]) == (8, 0.002)
    assert "change_schedule" not in content
    # The next resume is that of the changed run, and needs nothing special, whichever checkpoint it finds.
    shutil.rmtree(output_dir / "checkpoint-8")
    train(*resume, "--max_steps", "8", "--learning_rate", "0.002")


def test_a_finished_run_offers_to_train_longer(train, capsys):
    """The closing words name a command that does something."""
    train("--save_steps", "4")
    printed = " ".join(capsys.readouterr().out.replace("\\\n", " ").split())
    assert "--max_steps 8 --change_schedule" in printed
    train("--save_steps", "4", "--resume_from_checkpoint", "auto")
    assert "all 4 steps are done" in capsys.readouterr().out


def test_the_share_of_time_outside_training(train):
    """In the log and in the summary: what evaluating and saving took of the loop's time."""
    output_dir = train("--eval_steps", "1", "--save_steps", "1", "--max_eval_samples", "all")
    summary = json.loads((output_dir / "summary.json").read_text())
    assert 0.1 < summary["share_outside_training"] < 1
    assert all(0 <= e["share_outside_training"] < 1 for e in read_events(output_dir, "train"))


def test_another_precision_is_not_taken_silently(train, capsys):
    train("--save_steps", "2", "--max_steps", "2")
    train("--max_steps", "4", "--change_schedule", "--resume_from_checkpoint", "auto", "--mixed_precision", "bf16")
    assert "the precision changes from no to bf16 at step 2" in capsys.readouterr().out


# ------------------------------------------------------------------ starting from existing weights


def fine_tune(train, source, *arguments, output_dir):
    """`train` gives a shape, which the model's own replaces: only dropout may be overridden."""
    return train(
        "--model_name_or_path", source, "--config_overrides", "resid_pdrop=0.0", *arguments, output_dir=output_dir
    )


@pytest.fixture
def base(tmp_path, monkeypatch, train):
    """A finished run, and `train` without the shape of TINY in its arguments."""
    finished = train("--save_steps", "4", output_dir=tmp_path / "base")
    monkeypatch.setattr("conftest.TINY", [])
    return finished


def test_training_starts_from_existing_weights(train, base, tmp_path, dataset):
    """At step 0 the model is the one that was given, its vocabulary padded; then it is trained on."""
    tuned = fine_tune(train, base, "--max_eval_samples", "all", output_dir=tmp_path / "tuned")
    first, last = (e["loss"] for e in read_events(tuned, "eval"))
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    assert first == pytest.approx(stock_loss(model, dataset), abs=1e-5) and last < first
    config = AutoModelForCausalLM.from_pretrained(tuned).config
    assert (config.n_layer, config.n_embd, config.vocab_size, config.n_positions) == (2, 32, 500, BLOCK_SIZE)


def stock_loss(model, dataset) -> float:
    """Independent: the stock model on all validation rows."""
    import numpy as np
    import torch

    split = dataset.splits["validation"]
    rows = torch.from_numpy(split[np.arange(len(split))])
    with torch.no_grad():
        logits = model(input_ids=rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


def test_a_fine_tuned_run_resumes_without_its_source(train, base, tmp_path):
    """Bit for bit, and from the checkpoint alone: the model it started from may be gone."""
    arguments = ["--save_steps", "2", "--max_steps", "6"]
    through = fine_tune(train, base, *arguments, output_dir=tmp_path / "through")
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    resumed = fine_tune(
        train, base, *arguments, "--resume_from_checkpoint", through / "checkpoint-2", output_dir=tmp_path / "resumed"
    )
    assert (resumed / "model.safetensors").read_bytes() == (through / "model.safetensors").read_bytes()


def test_a_model_with_a_padded_vocabulary(train, base, tmp_path):
    """Rows beyond the tokenizer's, as other trainers export them, are left behind."""
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(640)
    model.save_pretrained(tmp_path / "padded")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "padded" / name).write_bytes((base / name).read_bytes())
    tuned = fine_tune(train, tmp_path / "padded", output_dir=tmp_path / "tuned")
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
def test_what_cannot_be_started_from(train, base, tmp_path, arguments, expected):
    with pytest.raises(UserError, match=expected):
        fine_tune(train, base, *arguments, output_dir=tmp_path / "tuned")


def test_eval_only_evaluates_all_rows_and_leaves_nothing(train, base, tmp_path, dataset, capsys):
    """The loss of the stock model over the whole split, from a folder and from a checkpoint."""
    expected = stock_loss(AutoModelForCausalLM.from_pretrained(base).eval(), dataset)
    capsys.readouterr()
    fine_tune(train, base, "--eval_only", output_dir=tmp_path / "none")
    assert f"validation loss {expected:.4f}" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()
    with pytest.raises(UserError, match="--eval_only needs a model"):
        train("--eval_only")


def test_the_rows_of_an_evaluation_are_kept_on_resume(train, tmp_path):
    """Another batch size, which another number of processes may bring, must not change what is compared."""
    first = train("--save_steps", "2", "--per_device_eval_batch_size", "7", output_dir=tmp_path / "a")
    resumed = train(
        "--resume_from_checkpoint", first / "checkpoint-2", "--per_device_eval_batch_size", "3",
        output_dir=tmp_path / "b",
    )  # fmt: skip
    assert {e["num_rows"] for run in (first, resumed) for e in read_events(run, "eval")} == {7}


def test_a_run_that_left_nothing_leaves_its_folder_free(train, tmp_path, monkeypatch):
    """Interrupted in its first evaluation, the same command starts again; nothing of the first try is in the log."""
    real = recipe.train.evaluate_model

    def interrupted(*args):
        real(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe.train, "evaluate_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(output_dir=tmp_path / "run")
    monkeypatch.setattr(recipe.train, "evaluate_model", real)
    events = read_events(train(output_dir=tmp_path / "run"), "eval")
    assert [e["step"] for e in events] == [0, 4]


def test_a_run_killed_after_the_choice_resumes_by_its_own_config(train, tmp_path, monkeypatch):
    """The checkpoint that is saved with the choice and the folder's config agree."""
    monkeypatch.setattr(recipe.train, "STARTED_AT", time.perf_counter())
    monkeypatch.setattr(recipe.run.plan, "fit_max_steps", lambda *args: 15)
    through = train(*LIMITED, output_dir=tmp_path / "run")
    for name in ("checkpoint-12", "checkpoint-15"):  # all that a SIGKILL after step 10 would not have left
        shutil.rmtree(through / name)
    expected = (through / "model.safetensors").read_bytes()
    train(*LIMITED, "--resume_from_checkpoint", "auto", output_dir=through)
    assert (through / "model.safetensors").read_bytes() == expected
    assert [e["step"] for e in read_events(through, "train")][-1] == 15


def test_a_time_limit_does_not_change_a_run_that_has_begun(train):
    train("--max_steps", "12", "--save_steps", "12")
    with pytest.raises(UserError, match="--max_minutes would change the schedule"):
        train("--max_steps", "12", "--max_minutes", "9", "--resume_from_checkpoint", "auto")


def test_another_schedule_from_an_earlier_checkpoint_needs_its_own_folder(train, tmp_path):
    """Else the checkpoints of the schedule as it was would be taken for the run's newest."""
    first = train("--save_steps", "2", output_dir=tmp_path / "run")
    branch = ["--resume_from_checkpoint", first / "checkpoint-2", "--max_steps", "3", "--change_schedule"]
    with pytest.raises(UserError, match=r"holds newer checkpoints of the old schedule \(checkpoint-4\)"):
        train(*branch, output_dir=first)
    assert [e["step"] for e in read_events(train(*branch, output_dir=tmp_path / "branch"), "train")] == [3]


def test_eval_only_needs_a_checkpoint_where_it_is_told_to_look(train, tmp_path):
    """Random weights are never evaluated for want of a checkpoint; a checkpoint's schedule does not matter."""
    with pytest.raises(UserError, match="--eval_only: there is no checkpoint in"):
        train("--eval_only", "--resume_from_checkpoint", "auto", output_dir=tmp_path / "none")
    first = train("--save_steps", "4", output_dir=tmp_path / "run")
    train("--eval_only", "--resume_from_checkpoint", first, "--max_steps", "9", output_dir=tmp_path / "none")


@pytest.mark.parametrize("break_it", ["tokenizer", "weights", "vocabulary"])
def test_an_incomplete_model_is_refused(train, base, tmp_path, break_it):
    """Without tokenizer files Transformers makes an empty tokenizer; missing weights it draws at random."""
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


def test_a_half_precision_model_is_trained_in_fp32(train, base, tmp_path):
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.float16).save_pretrained(tmp_path / "half")
    for path in base.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "half")
    tuned = fine_tune(train, tmp_path / "half", output_dir=tmp_path / "tuned")
    assert {tensor.dtype for tensor in load_file(tuned / "model.safetensors").values()} == {torch.float32}


def test_freed_memory_is_looked_at_after_every_step_and_evaluated_batch(train, monkeypatch, dataset):
    calls = []
    monkeypatch.setattr(recipe.hardware.host_memory.FreedMemory, "give_back", lambda self: calls.append(1))
    train("--max_eval_samples", "all", "--per_device_eval_batch_size", "16")
    assert len(calls) == 4 + 2 * -(-len(dataset.splits["validation"]) // 16)
