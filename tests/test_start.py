"""The start of a run: what may change when it resumes, where a branch starts, and existing weights."""

import json
import logging
import os
import re
import shutil
import signal
from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import torch
import yaml
from conftest import BLOCK_SIZE, read_events
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import recipe.train
from recipe.checkpoint import seal_checkpoint
from recipe.errors import UserError

RESUME = ["--resume_from_checkpoint", "auto"]


@pytest.fixture(scope="module")
def four_steps(train_shared):
    """A finished run with checkpoints 2 and 4."""
    return train_shared("--save_steps", "2")


@pytest.fixture
def finished(four_steps, tmp_path):
    """A copy of the finished run, in the folder that `train` uses."""
    return shutil.copytree(four_steps, tmp_path / "run", ignore=shutil.ignore_patterns(".lock"))


def own_recipe(run, **changes):
    """Return the options that resume a run by its own recipe, some values of which have changed."""
    path = run.parent / "recipe.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load((run / "training_config.yaml").read_text()) | changes))
    return [*RESUME, "--config", path, "--output_dir", run]


# ------------------------------------------------------------------ what may change when a run resumes


def test_a_checkpoint_that_lacks_an_option_had_its_default(train, finished):
    """Runs from before an option was added, by a user here or by a later Transformers to a config, can be resumed."""
    checkpoint = finished / "checkpoint-4"
    state, config = (json.loads((checkpoint / f"{name}.json").read_text()) for name in ("training_state", "config"))
    del state["identity"]["label_smoothing_factor"]
    del state["identity"]["scale_attn_by_inverse_layer_idx"], config["scale_attn_by_inverse_layer_idx"]
    (checkpoint / "training_state.json").write_text(json.dumps(state))
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / "manifest.json").unlink()
    seal_checkpoint(checkpoint)
    train(*RESUME, "--max_steps", "5")
    with pytest.raises(UserError, match="label_smoothing_factor 0.0 -> 0.1"):
        train(*RESUME, "--max_steps", "6", "--label_smoothing_factor", "0.1")


def test_a_changed_schedule_keeps_the_past_and_is_recorded(train, finished, capsys):
    """Whether typed or in a recipe. Only later steps follow the new schedule, and the folder records what changed."""
    before = [e["loss"] for e in read_events(finished, "train")]
    recipe = own_recipe(finished, learning_rate=0.002, save_steps=4)
    train(*recipe, "--max_steps", "8", alone=True)
    assert "from step 5, learning_rate is 0.002 instead of 0.003" in capsys.readouterr().out
    events = read_events(finished, "train")
    assert [e["loss"] for e in events[:4]] == before
    assert [e["learning_rate"] for e in events[4:]] == pytest.approx([0.002 * (8 - k) / 6 for k in range(4, 8)])
    (record,) = read_events(finished, "schedule")
    changes = {"learning_rate": [0.003, 0.002], "max_steps": [4, 8]}
    assert record == {"event": "schedule", "step": 4, "changes": changes}
    # The changed run resumes by its own recipe, also from the checkpoint before the change.
    shutil.rmtree(finished / "checkpoint-8")
    train(*own_recipe(finished), alone=True)
    assert read_events(finished, "train")[-1]["step"] == 8


def test_a_changed_schedule_without_a_step_is_not_recorded(train, finished, capsys):
    """The weights are those of the old one. What does not change them is recorded."""
    before = yaml.safe_load((finished / "training_config.yaml").read_text())
    train(*RESUME, "--save_steps", "2", "--learning_rate", "0.001", "--hub_model_id", "a/b")
    assert "all 4 steps are done" in capsys.readouterr().out and not read_events(finished, "schedule")
    after = yaml.safe_load((finished / "training_config.yaml").read_text())
    assert after == before | {"hub_model_id": "a/b"}


def test_changed_epochs_are_recorded_as_steps(train, finished, dataset):
    """With another schedule, which takes other arguments."""
    typed = ["--num_train_epochs", 8 / len(dataset.train) * 4, "--lr_scheduler_type", "cosine_with_min_lr"]
    recipe = own_recipe(finished, lr_scheduler_kwargs=None)
    train(*recipe, *typed, "--lr_scheduler_kwargs", "min_lr_rate=0.5", alone=True)
    (record,) = read_events(finished, "schedule")
    assert record["changes"].keys() == {"max_steps", "lr_scheduler_type", "lr_scheduler_kwargs"}
    assert read_events(finished, "train")[-1]["step"] == 8
    content = yaml.safe_load((finished / "training_config.yaml").read_text())
    assert content["max_steps"] == 8 and "num_train_epochs" not in content


def test_a_kill_before_the_first_checkpoint_of_a_changed_schedule(train, finished, monkeypatch):
    """The folder's own config, in which the change is recorded, resumes the run from the checkpoint before."""
    with monkeypatch.context() as patch:
        patch.setattr(recipe.train, "StopSignals", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(*RESUME, "--max_steps", "8")
    assert yaml.safe_load((finished / "training_config.yaml").read_text())["max_steps"] == 8
    train(*own_recipe(finished), alone=True)
    assert [e["step"] for e in read_events(finished, "train")] == list(range(1, 9))


# ------------------------------------------------------------------ branches: a checkpoint of another folder


def stop_before_the_first_step(patch):
    """SIGTERM comes while the first step compiles, say."""
    patch.setattr(recipe.train, "build_profiler", lambda *_: os.kill(os.getpid(), signal.SIGTERM) or nullcontext())


def die_before_the_data(patch):
    patch.setattr(recipe.train, "open_dataset", mock.Mock(side_effect=KeyboardInterrupt))


def die_before_the_first_step(patch):
    patch.setattr(recipe.train, "decide_turn", mock.Mock(side_effect=KeyboardInterrupt))


@pytest.mark.parametrize("end", [stop_before_the_first_step, die_before_the_data, die_before_the_first_step])
@pytest.mark.parametrize("again", ["auto", "the same"])
def test_a_branch_that_ends_before_its_first_step_continues(
    train, finished, tmp_path, monkeypatch, capsys, end, again
):
    """It does not start over at step 0, whether `auto` or the same command resumes it, with the log of its own."""
    branch, start = tmp_path / "branch", finished / "checkpoint-2"
    with monkeypatch.context() as patch:
        end(patch)
        with pytest.raises((SystemExit, KeyboardInterrupt)):
            train("--resume_from_checkpoint", start, output_dir=branch)
    if end is stop_before_the_first_step:
        assert f"saved in {branch}/checkpoint-2;" in capsys.readouterr().out and (branch / "checkpoint-2").is_dir()
    train("--resume_from_checkpoint", "auto" if again == "auto" else start, "--save_steps", 1, output_dir=branch)
    assert [e["step"] for e in read_events(branch, "train")] == [3, 4]
    assert (branch / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()
    train("--resume_from_checkpoint", start, "--max_steps", 6, "--save_steps", 1, output_dir=branch)
    assert [e["step"] for e in read_events(branch, "train")] == [3, 4, 5, 6]
    run_ids = {e["run_id"] for e in read_events(branch, "start")[-2:]}
    assert len(run_ids) == 1 and run_ids != {e["run_id"] for e in read_events(finished, "start")}


def test_one_folder_by_two_names(train, finished, tmp_path):
    """A link to it, and a path with `..`, are the same folder, whose run continues."""
    (tmp_path / "link").symlink_to(finished)
    named = tmp_path / "other" / ".." / "run" / "checkpoint-4"
    (tmp_path / "other").mkdir()
    train("--resume_from_checkpoint", named, "--max_steps", 5, "--save_steps", 1, output_dir=tmp_path / "link")
    (tmp_path / "other" / "best").symlink_to(finished / "checkpoint-5")  # without --output_dir: the run's own folder
    link = ["--resume_from_checkpoint", tmp_path / "other" / "best"]
    train(*own_recipe(finished)[2:-2], *link, "--max_steps", 6, alone=True)
    assert [e["step"] for e in read_events(finished, "train")] == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["best"]
    assert len({e["run_id"] for e in read_events(finished, "start")}) == 1


def test_a_change_of_precision_is_reported(train, finished, capsys):
    train(*RESUME, "--max_steps", "5", "--mixed_precision", "bf16")
    assert "the precision changes from no to bf16 at step 4" in capsys.readouterr().out


# ------------------------------------------------------------------ existing weights


@pytest.fixture
def base(four_steps, tmp_path):
    """A model to start from: a copy of the finished run."""
    return shutil.copytree(four_steps, tmp_path / "base", ignore=shutil.ignore_patterns("checkpoint-*", ".lock"))


@pytest.fixture
def fine_tune(train, base, tmp_path):
    """Train on a model, whose shape may not be overridden; dropout may."""

    def run(*arguments, source=base, output_dir=tmp_path / "tuned"):
        overrides = ["--block_size", BLOCK_SIZE, "--config_overrides", "resid_pdrop=0.0"]
        return train("--model_name_or_path", source, *arguments, output_dir=output_dir, shape=overrides)

    return run


def test_training_starts_from_existing_weights(fine_tune, base, tmp_path, dataset):
    """At step 0 the model has the loss of the stock model; the run resumes bit for bit without its source."""
    arguments = ["--save_steps", "2", "--max_eval_samples", "all"]
    tuned = fine_tune(*arguments)
    first, last = (e["loss"] for e in read_events(tuned, "eval"))
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    rows = torch.from_numpy(dataset.validation[np.arange(len(dataset.validation))])
    with torch.no_grad():
        logits = model(input_ids=rows[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()
    assert first == pytest.approx(expected, abs=1e-5) and last < first
    config = AutoModelForCausalLM.from_pretrained(tuned).config
    assert (config.n_layer, config.n_embd, config.vocab_size, config.n_positions) == (2, 32, 500, BLOCK_SIZE)
    base.rename(tmp_path / "elsewhere")
    resume = ["--resume_from_checkpoint", tuned / "checkpoint-2"]
    resumed = fine_tune(*arguments, *resume, output_dir=tmp_path / "resumed")
    assert (resumed / "model.safetensors").read_bytes() == (tuned / "model.safetensors").read_bytes()


def test_a_local_model_that_is_gone_is_not_of_the_hub(fine_tune, base, tmp_path, monkeypatch):
    """Its name may look so, and would be published."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some").mkdir()
    base.rename("some/base")
    tuned = fine_tune("--save_steps", "2", source="some/base")
    (tmp_path / "some").rename("gone")
    arguments = ["--resume_from_checkpoint", tuned / "checkpoint-2"]
    for run in (tuned, fine_tune(*arguments, source="some/base", output_dir=tmp_path / "branch")):
        (start,) = read_events(run, "start")
        assert start["base_model_id"] is start["data"]["tokenizer_id"] is None


def test_models_of_other_trainers(fine_tune, base, tmp_path, monkeypatch):
    """More rows than the tokenizer has tokens are dropped, and half-precision weights train in fp32.

    Tensors that no model of today has, as in old GPT-2 files, are dropped without a report.
    """
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float16)
    model.resize_token_embeddings(640)
    model.save_pretrained(tmp_path / "other")
    for path in base.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "other")
    weights = load_file(tmp_path / "other" / "model.safetensors")
    weights["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(weights, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    reported, logger = [], logging.getLogger("transformers.modeling_utils")
    monkeypatch.setattr(logger, "handlers", [mock.Mock(level=0, handle=reported.append)])
    tuned = fine_tune("--max_steps", "1", source=tmp_path / "other")
    assert reported == []
    assert AutoModelForCausalLM.from_pretrained(tuned).config.vocab_size == 500
    assert {tensor.dtype for tensor in load_file(tuned / "model.safetensors").values()} == {torch.float32}


def remove_tokenizer(model_dir):
    for path in model_dir.glob("tokenizer*"):
        path.unlink()


def remove_weight(model_dir):
    weights = load_file(model_dir / "model.safetensors")
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, model_dir / "model.safetensors", metadata={"format": "pt"})


def shrink_vocabulary(model_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    model.resize_token_embeddings(400)
    model.save_pretrained(model_dir)


@pytest.mark.parametrize(
    ("change", "arguments", "expected"),
    [
        (None, "--config_overrides n_layer=3", "n_layer cannot differ from the model in"),
        (None, "--block_size 64", "has 32 positions, fewer than block_size 64"),
        (None, "--model_name_or_path no/such/folder", "there is no folder no/such/folder"),
        # Transformers would build an empty tokenizer, and initialize missing weights at random.
        (remove_tokenizer, "", "there is no tokenizer.json in"),
        (remove_weight, "", "lacks weights: transformer.h.1.mlp.c_fc.weight"),
        (shrink_vocabulary, "", "the tokenizer has 500 tokens, more than the 400 of the model"),
    ],
)
def test_models_that_training_cannot_start_from(fine_tune, base, change, arguments, expected):
    if change is not None:
        change(base)
    with pytest.raises(UserError, match=re.escape(expected)):
        fine_tune(*arguments.split())
