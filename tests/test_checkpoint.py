"""Checkpoints are complete, load as models, and resume a run exactly; other runs and folders are safe."""

import json
import re
import shlex
import shutil
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import yaml
from conftest import BLOCK_SIZE, TINY, read_events
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.checkpoint import STATE_NAME, CheckpointSaver, list_checkpoints, seal_checkpoint
from recipe.data import batches
from recipe.data.batches import example_rows
from recipe.errors import UserError
from recipe.publish.public import count_tokens

LATEST = ["--resume_from_checkpoint", "latest"]


@pytest.fixture(scope="module")
def saved(train_shared):
    """The folder of a run with checkpoint-2 and checkpoint-4."""
    return train_shared("--save_steps", 2)


@pytest.fixture
def run_dir(tmp_path, saved):
    return Path(shutil.copytree(saved, tmp_path / "run"))


def test_each_checkpoint_is_a_model_folder(saved):
    """`from_pretrained` loads model and tokenizer, they agree, and the model generates only real tokens."""
    assert [p.name for p in list_checkpoints(saved)] == ["checkpoint-2", "checkpoint-4"]
    for folder in [*list_checkpoints(saved), saved]:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert model.config.vocab_size == len(tokenizer) == 500
        assert model.config.eos_token_id == tokenizer.eos_token_id
        assert tokenizer.model_max_length == model.config.n_positions == BLOCK_SIZE
        ids = model.generate(torch.ones(8, 1, dtype=torch.long), max_new_tokens=30, temperature=100.0, top_k=0)
        assert ids.max() < 500
        assert all(path.stat().st_mode & 0o044 for path in folder.iterdir())  # others may read


def test_a_checkpoint_holds_the_state_of_its_own_step(train, tmp_path, monkeypatch):
    """Training changes weights and moments while they are written."""
    written = CheckpointSaver._write

    def write_late(*arguments):
        time.sleep(0.5)  # the two steps until the next save are made meanwhile
        return written(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointSaver, "_write", write_late)
        late = train("--save_steps", "2", output_dir=tmp_path / "late")
    resume = ["--save_steps", "2", "--resume_from_checkpoint", late / "checkpoint-2"]
    resumed = train(*resume, output_dir=tmp_path / "resumed")
    assert (resumed / "model.safetensors").read_bytes() == (late / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "extra",
    [
        ["--per_device_train_batch_size", "32"],
        ["--config_overrides", f"{TINY[1]},resid_pdrop=0.1,attn_pdrop=0.1", "--per_device_train_batch_size", "16"],
    ],
)
def test_resume_is_exact(train, tmp_path, dataset, extra):
    """A stopped and resumed run has the losses, norms, weights and optimizer of an uninterrupted one, bit for bit."""
    options = ["--max_steps", "10", "--save_steps", "1", "--global_batch_size", "128", *extra]
    assert 2 * len(dataset.train) < 10 * 128  # passes two ends of an epoch
    whole = train(*options, output_dir=tmp_path / "whole")
    expected = torch.load(whole / "checkpoint-10" / "optimizer.pt", weights_only=True)
    for stop_at in (1, 5, 9):
        resumed = Path(shutil.copytree(whole, tmp_path / str(stop_at)))
        for checkpoint in list_checkpoints(resumed)[stop_at:]:
            shutil.rmtree(checkpoint)
        train(*options, *LATEST, output_dir=resumed)
        for key in ("step", "loss", "grad_norm", "learning_rate", "tokens_seen"):
            found, uninterrupted = ([event[key] for event in read_events(run, "train")] for run in (resumed, whole))
            assert found == uninterrupted, key
        assert (whole / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()
        found = torch.load(resumed / "checkpoint-10" / "optimizer.pt", weights_only=True)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert read_initial(resumed) == read_initial(whole)


def test_a_checkpoint_with_the_earlier_name_of_the_first_evaluation(train, run_dir):
    """Its run resumes, and so does one whose summary has that name."""
    for path in (run_dir / "checkpoint-2" / STATE_NAME, run_dir / "summary.json"):
        content = json.loads(path.read_text())
        expected = content["initial"]["loss"]
        content["untrained"] = content.pop("initial")
        path.write_text(json.dumps(content))
    (run_dir / "checkpoint-2" / "manifest.json").unlink()
    seal_checkpoint(run_dir / "checkpoint-2")
    train("--save_steps", "2", "--resume_from_checkpoint", run_dir)  # only prints its results again
    shutil.rmtree(run_dir / "checkpoint-4")
    train("--save_steps", "2", "--resume_from_checkpoint", run_dir)
    assert read_initial(run_dir)["loss"] == expected


def read_initial(output_dir):
    return json.loads((output_dir / "summary.json").read_text())["initial"]


def test_resume_in_another_folder_and_of_a_finished_run(train, tmp_path, run_dir, capsys):
    """A checkpoint can be resumed in another folder; a finished run only evaluates and exports again."""
    other = train("--resume_from_checkpoint", run_dir / "checkpoint-2", output_dir=tmp_path / "other")
    assert [e["step"] for e in read_events(other, "train")] == [3, 4]
    before, summary = (run_dir / "model.safetensors").read_bytes(), (run_dir / "summary.json").read_text()
    assert before == (other / "model.safetensors").read_bytes()
    train("--save_steps", "2", "--resume_from_checkpoint", run_dir)
    assert "all 4 steps are done" in capsys.readouterr().out
    assert (run_dir / "model.safetensors").read_bytes() == before
    assert [e["step"] for e in read_events(run_dir, "train")] == [1, 2, 3, 4]
    assert (run_dir / "summary.json").read_text() == summary


def test_save_total_limit(train):
    """The newest checkpoints stay; a partial one and other folders are neither counted nor found."""
    output_dir = train("--max_steps", "7", "--save_steps", "2", "--save_total_limit", "2")
    assert [p.name for p in list_checkpoints(output_dir)] == ["checkpoint-6", "checkpoint-7"]
    (output_dir / ".checkpoint-9.partial").mkdir()
    (output_dir / "checkpoint-best").mkdir()
    assert [p.name for p in list_checkpoints(output_dir)] == ["checkpoint-6", "checkpoint-7"]


def test_what_may_change_on_resume(train, run_dir):
    """Micro-batch, logging and saving are not part of a run's identity."""
    shutil.rmtree(run_dir / "checkpoint-4")
    train("--save_steps", "1", "--per_device_train_batch_size", "1", "--logging_steps", "2", *LATEST)
    assert [p.name for p in list_checkpoints(run_dir)] == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]


def test_a_typed_global_batch_size_changes_the_batch(train, run_dir, tmp_path, capsys):
    """The run continues with the next examples and records the change; without consent, it names the option."""
    shutil.rmtree(run_dir / "checkpoint-4")
    options = yaml.safe_load((run_dir / "training_config.yaml").read_text()) | {"global_batch_size": 6}
    (tmp_path / "six.yaml").write_text(yaml.safe_dump(options))
    with pytest.raises(UserError, match="global_batch_size 4 -> 6; pass --global_batch_size 6 to continue"):
        train("--config", tmp_path / "six.yaml", "--output_dir", run_dir, *LATEST, alone=True)
    fetched = []
    with mock.patch.object(batches, "example_rows", lambda k, n, seed: fetched.append(k) or example_rows(k, n, seed)):
        train(*LATEST, "--global_batch_size", 6, "--eval_steps", 3, "--save_steps", 2)
    assert np.concatenate(fetched)[:12].tolist() == list(range(8, 20))
    assert "from step 3, global_batch_size is 6 instead of 4" in capsys.readouterr().out
    assert [e["changes"] for e in read_events(run_dir, "schedule")] == [{"global_batch_size": [4, 6]}]
    for kind, expected in (("train", [4, 8, 14, 20]), ("eval", [0, 14, 20])):
        assert [e["tokens_seen"] / BLOCK_SIZE for e in read_events(run_dir, kind)] == expected
    tokens = [count_tokens(step, read_events(run_dir, "start"), BLOCK_SIZE) for step in range(5)]
    assert tokens == [BLOCK_SIZE * n for n in (0, 4, 8, 14, 20)]
    assert f"Length: 4 steps, {20 * BLOCK_SIZE:,} tokens" in (run_dir / "README.md").read_text()
    train(*LATEST, "--global_batch_size", 8)  # too late: no step has this batch
    assert "global_batch_size: 6\n" in (run_dir / "training_config.yaml").read_text()
    printed = capsys.readouterr().out
    assert "all 4 steps are done" in printed and f"4 steps = {20 * BLOCK_SIZE} tokens" in printed


def test_a_folder_with_another_run_is_refused(train, run_dir):
    """Nothing in it changes, and the options that the message suggests resume the run with its own options."""
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"contains another run .*resume_from_checkpoint auto") as caught:
        train("--seed", "5")
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
    train(*shlex.split(re.search(r"resume it \((.*?)\)", str(caught.value))[1]), alone=True)


def test_an_output_dir_below_a_file(train, tmp_path):
    """The error names what is not a folder."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write to output_dir .*file/run"):
        train(output_dir=tmp_path / "file" / "run")
