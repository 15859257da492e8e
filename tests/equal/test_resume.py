"""Resumed runs equal uninterrupted ones, branches equal runs planned that way, and stages train on new data."""

import json
import re
import shlex
import shutil
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import (
    BLOCK_SIZE,
    TINY,
    make_documents,
    needs_bitsandbytes,
    read_summary,
    read_weights,
    stock_loss,
    values_of,
)
from tiny_runs import STABLE, options_of, start_from

from recipe.checkpoint import list_checkpoints, read_state
from recipe.data.batches import example_rows
from recipe.data.packed import open_packed_dataset
from recipe.errors import UserError
from recipe.run.log import RunLog


@pytest.mark.parametrize(
    ("optim", "shape"),
    [
        ("muon", TINY),
        pytest.param("adamw_bnb_8bit", TINY, marks=needs_bitsandbytes),
        ("muon", options_of("llama", "attention_dropout=0.1")),
    ],
)
def test_a_stopped_and_resumed_run_has_the_bits_of_an_uninterrupted_one(train, tmp_path, optim, shape):
    """Losses, weights and moments are equal for each optimizer and for other model types, with dropout."""
    options = ["--optim", optim, "--max_steps", "6", "--save_steps", "3"]
    whole = train(*options, output_dir=tmp_path / "whole", shape=shape)
    resumed = shutil.copytree(whole, tmp_path / "resumed")
    shutil.rmtree(list_checkpoints(resumed)[-1])
    (resumed / "model.safetensors").unlink()
    train(*options, "--resume_from_checkpoint", "auto", output_dir=resumed, shape=shape)
    assert values_of(resumed, "step") == [1, 2, 3, 4, 5, 6]
    assert values_of(resumed, "loss") == values_of(whole, "loss")
    assert read_weights(resumed) == read_weights(whole)
    states = [torch.load(run / "checkpoint-6" / "optimizer.pt", weights_only=True) for run in (resumed, whole)]
    torch.testing.assert_close(*states, rtol=0, atol=0)


# ------------------------------------------------------------------ extensions and branches


@pytest.fixture(scope="module")
def stable(train_shared):
    """A run of 20 steps, of which four decay, with checkpoints 7, 14, 16 and 20."""
    return train_shared(*STABLE, "--max_steps", "20", "--save_steps", "7")


def test_the_options_that_a_finished_run_prints_extend_it(train, stable, tmp_path, capsys):
    """Added to its command, they train twice as long, from before the decay, into another folder."""
    run = shutil.copytree(stable, tmp_path / "run", ignore=shutil.ignore_patterns(".lock"))
    command = [*STABLE, "--max_steps", "20", "--save_steps", "7", "--resume_from_checkpoint", "auto"]
    train(*command, output_dir=run)
    (options,) = re.findall(r"your command with\n +(.*)", capsys.readouterr().out.replace("\\\n", " "))
    train(*command, *shlex.split(options), output_dir=run)
    planned = train(*STABLE, "--max_steps", "40", output_dir=tmp_path / "planned")
    assert read_weights(tmp_path / "run-40") == read_weights(planned)


# ------------------------------------------------------------------ stages: a branch with other data

RUN = ["--max_steps", 12, "--save_steps", 4, "--eval_steps", 3]
BASE_STEP = 6  # saved at the end of the base run; a branch saves after two steps
BASE_TOKENS = BASE_STEP * 4 * BLOCK_SIZE


@pytest.fixture(scope="module")
def base(train_shared):
    """A run on the usual dataset. The stages begin in its middle."""
    return train_shared(*RUN, "--max_steps", BASE_STEP)


@pytest.fixture
def train_stage(base, train, tmp_path, other):
    """Go on from the base run with the other dataset."""

    def run(*options, name="stage"):
        start = [*start_from(base, BASE_STEP), "--dataset_dir", other]
        return train(*RUN, *start, *options, output_dir=tmp_path / name)

    return run


def die_at(step):
    log_train = RunLog.record_steps

    def die(log, state):
        log_train(log, state)
        if state.step == step:
            raise UserError("killed")

    return mock.patch.object(RunLog, "record_steps", die)


def test_a_stage_begins_with_the_first_example_of_its_data(base, train_stage, other):
    """The first loss is the base model's loss on the first rows of the new order. Steps and schedule continue."""
    run = train_stage()
    rows = open_packed_dataset(other, BLOCK_SIZE).train
    rows = rows[example_rows(np.arange(4), len(rows), 1337)]
    expected = stock_loss(base / f"checkpoint-{BASE_STEP}", rows)
    assert values_of(run, "loss")[0] == pytest.approx(expected, abs=1e-5)
    assert values_of(run, "step") == [7, 8, 9, 10, 11, 12]
    assert values_of(run, "tokens_seen")[-1] == 12 * 4 * BLOCK_SIZE
    assert values_of(run, "step", "eval") == [6, 9, 12]


@pytest.mark.parametrize("options", [[], ["--dataset_weights", 0.3, 0.7]])
def test_a_stage_that_is_killed_is_continued_exactly_by_the_same_command(train_stage, dataset_dir, options):
    """Before its first checkpoint and after; also if its data is a mixture with the base run's."""
    mixture = ["--dataset_dir", dataset_dir, *options] if options else []
    expected = train_stage(*mixture)
    for step in (7, 10):
        with die_at(step), pytest.raises(UserError, match="killed"):
            train_stage(*mixture, name="killed")
    run = train_stage(*mixture, name="killed")
    assert read_weights(run) == read_weights(expected)
    assert values_of(run, "loss", "eval") == values_of(expected, "loss", "eval")
    again = train_stage(*mixture, "--resume_from_checkpoint", "auto", name="killed")
    assert read_weights(again) == read_weights(expected)


def test_summary_and_card_list_the_stages_without_names_of_files(train_stage, other):
    """Tokens are counted per stage, even if batch and row length change. The card names no folder or file."""
    run = train_stage("--block_size", BLOCK_SIZE // 2, "--global_batch_size", 2, "--load_best_model_at_end")
    summary = read_summary(run)
    assert summary["tokens_seen"] == BASE_TOKENS + 6 * 2 * BLOCK_SIZE // 2
    stages = [(of["step"], of["tokens"], of["source"]) for of in summary["stages"]]
    assert stages == [(0, BASE_TOKENS, "corpus.jsonl"), (BASE_STEP, 6 * BLOCK_SIZE, "a.jsonl")]
    num_rows = len(open_packed_dataset(other, BLOCK_SIZE // 2).train)
    assert values_of(run, "epoch", "eval")[-1] == pytest.approx(12 / num_rows)
    assert json.loads((run / "config.json").read_text())["n_positions"] == BLOCK_SIZE
    state = read_state(run / "checkpoint-12").state
    assert [stage.block_size for stage in state.stages] == [BLOCK_SIZE, BLOCK_SIZE // 2]
    assert set(state.losses) == {"6", "9"}  # the losses of the base run are of other text
    card = (run / "README.md").read_text()
    assert f"| 0 | {BASE_TOKENS:,} |" in card
    assert f"| {BASE_STEP} | {6 * BLOCK_SIZE:,} |" in card
    assert "corpus.jsonl" not in card
    assert "a.jsonl" not in card


def test_the_text_of_a_stage_is_packed_with_the_tokenizer_of_its_run(train, tmp_path, monkeypatch):
    """Which was trained on the first text. The same command again does not train another.

    With that tokenizer, the first text is no new stage, though what was prepared of it is gone.
    """
    monkeypatch.chdir(tmp_path)
    options = ["--config", "gpt2_124m", *RUN, "--tokenizer_vocab_size", 400, "--document_separator", r"\n\n"]
    options += ["--config_overrides", "n_layer=1,n_head=2,n_embd=32", "--block_size", 32, "--global_batch_size", 4]
    options += ["--warmup_steps", 2, "--logging_steps", 1]

    def train_text(name, *more):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(make_documents(60, seed=len(name))))
        train(*options, "--train_file", f"{name}.txt", *more, alone=True)

    train_text("first", "--max_steps", 3, "--output_dir", "base")
    branch = ["second", *start_from(tmp_path / "base", 3), "--output_dir", "branch"]
    with die_at(7), pytest.raises(UserError, match="killed"):
        train_text(*branch)
    train_text(*branch)
    tokenizers = [(tmp_path / name / "tokenizer.json").read_bytes() for name in ("base", "branch")]
    assert tokenizers[0] == tokenizers[1]
    assert len(list((tmp_path / "runs" / "data").iterdir())) == 2
    assert [stage["source"] for stage in read_summary(tmp_path / "branch")["stages"]] == ["first.txt", "second.txt"]
    shutil.rmtree(tmp_path / "runs")
    train_text("first", *start_from(tmp_path / "base", 3), "--max_steps", 6, "--output_dir", "longer")
    assert len(read_summary(tmp_path / "longer")["stages"]) == 1
