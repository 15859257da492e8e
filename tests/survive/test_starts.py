"""A run that resumes is the run that was stopped, except for what its user changes; a branch is a new run."""

import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import yaml
from faults import AUTO, at_call, die, send
from helpers import BLOCK_SIZE, list_steps, read_events, read_weights, stock_loss, values_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import recipe.train
from recipe.data import batches
from recipe.data.batches import example_rows


def read_config(run):
    return yaml.safe_load((run / "training_config.yaml").read_text())


def own_options(run, **changes):
    """Return the options that resume a run by its own recipe, some values of which have changed."""
    path = run.parent / "recipe.yaml"
    path.write_text(yaml.safe_dump(read_config(run) | changes))
    return ["--config", path, "--output_dir", run, *AUTO]


# ------------------------------------------------------------------ what may change when a run resumes


def test_a_typed_batch_continues_with_the_next_examples(train, finished):
    """Two of four steps have a batch of 6 instead of 4. The log counts the tokens."""
    shutil.rmtree(finished / "checkpoint-4")
    with mock.patch.object(batches, "example_rows", side_effect=example_rows) as fetch:
        run = train(*AUTO, "--global_batch_size", 6)
    fetched = np.concatenate([call.args[0] for call in fetch.call_args_list])
    assert fetched[:12].tolist() == list(range(8, 20))
    assert [tokens / BLOCK_SIZE for tokens in values_of(run, "tokens_seen")] == [4, 8, 14, 20]


def test_only_later_steps_follow_a_changed_schedule(train, finished, capsys):
    """A change may be typed or in a recipe. The log has what changed; other changes are said, and nothing else."""
    before = values_of(finished, "loss")
    others = ["--matmul_precision", "highest", "--mixed_precision", "bf16"]
    train(*own_options(finished, learning_rate=0.002), "--max_steps", 8, *others, alone=True)
    shown = capsys.readouterr().out
    assert "from step 5, learning_rate is 0.002 instead of 0.003" in shown
    assert "from fp32 to bf16 at step 4" in shown
    assert "matmul_precision is highest; the run's recorded options have high" in shown
    assert shown.count("recorded options have") == 2
    events = read_events(finished, "train")
    assert [event["loss"] for event in events[:4]] == before
    rates = [event["learning_rate"] for event in events[4:]]
    assert rates == pytest.approx([0.002 * (8 - step) / 6 for step in range(4, 8)])
    (record,) = read_events(finished, "schedule")
    assert record["step"] == 4
    assert record["changes"] == {"learning_rate": [0.003, 0.002], "max_steps": [4, 8]}


def test_a_changed_schedule_without_a_step_is_not_recorded(train, finished):
    """The weights are those of the old options. Where they are published is recorded."""
    before = read_config(finished)
    changed = ["--learning_rate", 0.001, "--global_batch_size", 8, "--matmul_precision", "highest"]
    train(*AUTO, "--save_steps", 2, *changed, "--hub_model_id", "a/b")
    assert not read_events(finished, "schedule")
    assert read_config(finished) == before | {"hub_model_id": "a/b"}


def test_a_changed_schedule_is_recorded_before_its_first_checkpoint(train, finished, dataset, monkeypatch):
    """As steps, with which the folder's own config resumes the killed run from the checkpoint before.

    Another kind of schedule takes other arguments.
    """
    typed = ["--num_train_epochs", 8 / len(dataset.train) * 4, "--lr_scheduler_type", "cosine_with_min_lr"]
    typed += ["--lr_scheduler_kwargs", "min_lr_rate=0.5"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        at_call(patch, recipe.train, "StopSignals", 1, die)
        train(*own_options(finished, lr_scheduler_kwargs=None), *typed, alone=True)
    content = read_config(finished)
    assert content["max_steps"] == 8 and "num_train_epochs" not in content
    train(*own_options(finished), alone=True)
    (record,) = read_events(finished, "schedule")
    assert record["changes"].keys() == {"max_steps", "lr_scheduler_type", "lr_scheduler_kwargs"}
    assert list_steps(finished) == list(range(1, 9))


# ------------------------------------------------------------------ branches: a checkpoint of another folder


@pytest.mark.parametrize(
    ("place", "end"),
    [
        ("open_dataset", die),
        ("decide_turn", die),  # before the first step
        ("build_profiler", send),  # SIGTERM comes while the first step compiles, say
    ],
)
@pytest.mark.parametrize("again", ["auto", "the same"])
def test_a_branch_that_ends_before_its_first_step_continues(train, finished, tmp_path, monkeypatch, place, end, again):
    """A branch does not start over at step 0, whether `auto` or the same command resumes it, and has its own log."""
    branch = tmp_path / "branch"
    start = finished / "checkpoint-2"
    with monkeypatch.context() as patch, pytest.raises((SystemExit, KeyboardInterrupt)):
        at_call(patch, recipe.train, place, 1, end)
        train("--resume_from_checkpoint", start, output_dir=branch)
    assert (branch / "checkpoint-2").is_dir() == (end is send)
    train("--resume_from_checkpoint", "auto" if again == "auto" else start, "--save_steps", 1, output_dir=branch)
    assert list_steps(branch) == [3, 4]
    assert read_weights(branch) == read_weights(finished)


@pytest.mark.parametrize(
    "options",
    [
        ["run/checkpoint-4", "--output_dir", "link"],
        ["other/best"],  # a link to the checkpoint; the run's own folder is the output
    ],
)
def test_one_folder_by_two_names_is_one_run(train, finished, tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    Path("other").mkdir()
    Path("link").symlink_to("run")
    Path("other", "best").symlink_to("../run/checkpoint-4")
    train(*own_options(finished)[:2], "--max_steps", 5, "--resume_from_checkpoint", *options, alone=True)
    assert list_steps(finished) == [1, 2, 3, 4, 5]
    assert len({event["run_id"] for event in read_events(finished, "start")}) == 1
    assert [path.name for path in Path("other").iterdir()] == ["best"]


def test_a_copied_checkpoint_begins_a_run_with_a_folder_and_an_id_of_its_own(train, finished, tmp_path, monkeypatch):
    """Nothing is written beside the copy, as if that were the folder of a run."""
    home = tmp_path / "home"
    shutil.copytree(finished / "checkpoint-2", home / "mybest")
    monkeypatch.chdir(tmp_path)
    train(*own_options(finished)[:2], "--run_name", "mine", "--resume_from_checkpoint", home / "mybest", alone=True)
    assert [path.name for path in home.iterdir()] == ["mybest"]
    assert list_steps(Path("runs/mine")) == [3, 4] and read_weights(Path("runs/mine")) == read_weights(finished)
    ids = [{event["run_id"] for event in read_events(run, "start")} for run in (Path("runs/mine"), finished)]
    assert ids[0].isdisjoint(ids[1])


def test_options_of_the_optimizer_that_a_branch_changes_are_said_and_take_effect(train, finished, tmp_path, capsys):
    branch = ["--resume_from_checkpoint", finished / "checkpoint-2", "--save_steps", 1]
    changed = ["--weight_decay", 0.6, "--adam_beta1", 0.5, "--max_grad_norm", 1e-3]
    run = train(*branch, *changed, output_dir=tmp_path / "branch")
    shown = capsys.readouterr().out
    assert "from step 3, weight_decay is 0.6 instead of 0.1" in shown
    assert "from step 3, max_grad_norm is 0.001 instead of 1\n" in shown
    assert values_of(run, "clipped_share") == [1.0, 1.0]
    saved = torch.load(run / "checkpoint-3" / "optimizer.pt", weights_only=True)["optimizer"]
    groups = [(group["weight_decay"], *group["betas"]) for group in saved["param_groups"]]
    assert sorted(groups) == [(0.0, 0.5, 0.95), (0.6, 0.5, 0.95)]


# ------------------------------------------------------------------ existing weights


@pytest.fixture
def base(four_steps, tmp_path):
    """A model to start from: a copy of a finished run."""
    return shutil.copytree(four_steps, tmp_path / "base", ignore=shutil.ignore_patterns("checkpoint-*", ".lock"))


@pytest.fixture
def fine_tune(train, base, tmp_path):
    """Train on a model, whose shape may not be overridden; dropout may."""

    def run(*arguments, source=base, output_dir=tmp_path / "tuned"):
        overrides = ["--block_size", BLOCK_SIZE, "--config_overrides", "resid_pdrop=0.0"]
        return train("--model_name_or_path", source, *arguments, output_dir=output_dir, shape=overrides)

    return run


def test_a_run_resumes_bit_for_bit_without_the_model_that_it_started_from(fine_tune, base, tmp_path, monkeypatch):
    """The name of a model that is gone may look like one of the Hub, and would be published."""
    monkeypatch.chdir(tmp_path)
    Path("some").mkdir()
    base.rename("some/base")
    tuned = fine_tune("--save_steps", 2, source="some/base")
    Path("some").rename("gone")
    resume = ["--resume_from_checkpoint", tuned / "checkpoint-2"]
    branch = fine_tune(*resume, source="some/base", output_dir=tmp_path / "branch")
    assert read_weights(branch) == read_weights(tuned)
    for run in (tuned, branch):
        (start,) = read_events(run, "start")
        assert start["base_model_id"] is start["data"]["tokenizer_id"] is None


def test_a_model_of_another_trainer_trains_in_fp32_from_the_loss_that_it_has(fine_tune, base, dataset):
    """The stock model and torch's cross-entropy give that of step 0. Training lowers it.

    The file is fp16, with more rows than the tokenizer has tokens, and a buffer that only old GPT-2 files have.
    """
    model = AutoModelForCausalLM.from_pretrained(base).half().float()
    model.save_pretrained(base)
    expected = stock_loss(base, dataset.validation[np.arange(len(dataset.validation))])
    model.resize_token_embeddings(640)
    model.half().save_pretrained(base)
    weights = load_file(base / "model.safetensors")
    weights["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    tuned = fine_tune("--max_eval_samples", "all")
    first, last = values_of(tuned, "loss", "eval")
    assert first == pytest.approx(expected, abs=1e-5)
    assert last < first
    config = AutoModelForCausalLM.from_pretrained(tuned).config
    assert (config.vocab_size, config.dtype) == (500, torch.float32)
    assert {tensor.dtype for tensor in load_file(tuned / "model.safetensors").values()} == {torch.float32}
