"""Stages: a branch may train on other data, starting with their first example, and it resumes exactly."""

import json
import shutil
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import BLOCK_SIZE, make_documents, read_events
from transformers import AutoModelForCausalLM

from recipe.checkpoint import read_state, seal_checkpoint
from recipe.data.batches import TrainOrder, example_rows
from recipe.data.packed import open_packed_dataset
from recipe.errors import UserError
from recipe.run.log import RunLog

RUN = ["--max_steps", 12, "--save_steps", 4, "--eval_steps", 3]
BASE_STEP = 6  # saved at the end of the base run; a branch saves after two steps


@pytest.fixture(scope="module")
def base(train_shared):
    """A run on the usual dataset. The branches begin in its middle."""
    return train_shared(*RUN, "--max_steps", BASE_STEP)


@pytest.fixture
def branch(base, train, tmp_path, other):
    """Go on from the base run with the other dataset."""

    def run(*options, name="branch", folder=other):
        start = ["--resume_from_checkpoint", base / f"checkpoint-{BASE_STEP}"]
        return train(*RUN, *start, "--dataset_dir", folder, *options, output_dir=tmp_path / name)

    return run


def weights_of(run):
    return (run / "model.safetensors").read_bytes()


def die_at(step):
    log_train = RunLog.train

    def die(log, state):
        log_train(log, state)
        if state.step == step:
            raise UserError("killed")

    return mock.patch.object(RunLog, "train", die)


def test_a_stage_begins_with_the_first_example_of_its_data(base, branch, other, capsys):
    """Its first loss is that of the base model on the first rows of the new order; steps and schedule go on."""
    run = branch()
    rows = open_packed_dataset(other, BLOCK_SIZE).train
    rows = torch.from_numpy(rows[example_rows(np.arange(4), len(rows), 1337)])
    model = AutoModelForCausalLM.from_pretrained(base / f"checkpoint-{BASE_STEP}").eval()
    with torch.no_grad():
        logits = model(input_ids=rows[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()
    events = read_events(run, "train")
    assert events[0]["loss"] == pytest.approx(expected, abs=1e-5)
    assert [event["step"] for event in events] == [7, 8, 9, 10, 11, 12]
    assert events[-1]["tokens_seen"] == 12 * 4 * BLOCK_SIZE
    assert [event["step"] for event in read_events(run, "eval")] == [6, 9, 12]
    shown = " ".join(capsys.readouterr().out.split())
    tokens = f"{BASE_STEP * 4 * BLOCK_SIZE:,} tokens"
    assert f"stages corpus.jsonl from step 0, {tokens}; a.jsonl from step {BASE_STEP}, 0 tokens" in shown


@pytest.mark.parametrize("options", [[], ["--dataset_weights", 0.3, 0.7]])
def test_a_stage_that_is_killed_is_exact(branch, tmp_path, dataset_dir, options, other):
    """Before its first checkpoint and after, the same command continues it."""
    folders = ["--dataset_dir", dataset_dir] if options else []  # a mixture of both
    expected = branch(*folders, *options)
    for step in (7, 10):
        with die_at(step), pytest.raises(UserError, match="killed"):
            branch(*folders, *options, name="killed")
    run = branch(*folders, *options, name="killed")
    assert weights_of(run) == weights_of(expected)
    assert [e["loss"] for e in read_events(run, "eval")] == [e["loss"] for e in read_events(expected, "eval")]
    again = branch(*folders, *options, "--resume_from_checkpoint", "auto", name="killed")
    assert weights_of(again) == weights_of(expected)


def test_the_stages_are_recorded(branch, other, dataset_dir):
    """With another batch and shorter rows, tokens are summed by stage; no name of a folder or file is published."""
    run = branch("--block_size", BLOCK_SIZE // 2, "--global_batch_size", 2, "--load_best_model_at_end")
    tokens = BASE_STEP * 4 * BLOCK_SIZE
    summary = json.loads((run / "summary.json").read_text())
    assert summary["tokens_seen"] == tokens + 6 * 2 * BLOCK_SIZE // 2
    assert [(of["step"], of["tokens"]) for of in summary["stages"]] == [(0, tokens), (BASE_STEP, 6 * BLOCK_SIZE)]
    assert [of["source"] for of in summary["stages"]] == ["corpus.jsonl", "a.jsonl"]
    assert read_events(run, "eval")[-1]["epoch"] == pytest.approx(12 / len(open_rows(other, BLOCK_SIZE // 2)))
    assert json.loads((run / "config.json").read_text())["n_positions"] == BLOCK_SIZE
    state = read_state(run / "checkpoint-12").state
    assert [stage.block_size for stage in state.stages] == [BLOCK_SIZE, BLOCK_SIZE // 2]
    assert set(state.losses) == {"6", "9"}  # the losses of the base run are of other text
    card = (run / "README.md").read_text()
    assert f"| 1 | text that is not published | 0 | {tokens:,} |" in card
    assert f"| 2 | text that is not published | {BASE_STEP} | {6 * BLOCK_SIZE:,} |" in card
    assert "corpus.jsonl" not in card and "a.jsonl" not in card


def open_rows(folder, block_size):
    return open_packed_dataset(folder, block_size).train


def test_the_text_of_a_stage_is_packed_with_the_tokenizer_of_its_run(train, tmp_path, monkeypatch, capsys):
    """Which was trained on the first text. The same command again does not train another."""
    monkeypatch.chdir(tmp_path)
    for name, seed in (("first", 1), ("second", 2)):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(make_documents(60, seed)))
    options = [*RUN, "--tokenizer_vocab_size", 400, "--document_separator", r"\n\n", "--block_size", 32]
    options += ["--config_overrides", "n_layer=1,n_head=2,n_embd=32", "--global_batch_size", 4, "--warmup_steps", 2]
    options += ["--logging_steps", 1]
    first = [*options, "--train_file", "first.txt", "--max_steps", 3, "--output_dir", "base"]
    train("--config", "gpt2_124m", *first, alone=True)
    branch = ["--config", "gpt2_124m", *options, "--train_file", "second.txt", "--output_dir", "branch"]
    branch += ["--resume_from_checkpoint", "base/checkpoint-3"]
    with die_at(7), pytest.raises(UserError, match="killed"):
        train(*branch, alone=True)
    train(*branch, alone=True)
    tokenizers = [(tmp_path / name / "tokenizer.json").read_bytes() for name in ("base", "branch")]
    assert tokenizers[0] == tokenizers[1]
    assert len(list((tmp_path / "runs" / "data").iterdir())) == 2
    stages = json.loads((tmp_path / "branch" / "summary.json").read_text())["stages"]
    assert [stage["source"] for stage in stages] == ["first.txt", "second.txt"]
    shutil.rmtree(tmp_path / "runs")  # the same text again, with a tokenizer that is already there, is no new stage
    longer = ["--config", "gpt2_124m", *first, "--max_steps", 6, "--resume_from_checkpoint", "base/checkpoint-3"]
    train(*longer, "--output_dir", "longer", alone=True)
    assert len(json.loads((tmp_path / "longer" / "summary.json").read_text())["stages"]) == 1


def test_other_data_in_the_same_folder_are_refused(train, tmp_path, base, other):
    """The message names the branch."""
    shutil.copytree(base, tmp_path / "run")
    with pytest.raises(
        UserError, match=r"pass its data .* in another --output_dir with --resume_from_checkpoint .*/checkpoint-6"
    ):
        train(*RUN, "--resume_from_checkpoint", "auto", "--dataset_dir", other)


def test_a_checkpoint_of_an_earlier_version_keeps_its_rows(base, tmp_path, train, other):
    """They began at the same places in every epoch. Its stages read as today."""
    checkpoint = shutil.copytree(base / f"checkpoint-{BASE_STEP}", tmp_path / "old" / f"checkpoint-{BASE_STEP}")
    content = json.loads((checkpoint / "training_state.json").read_text())
    del content["stages"]
    (checkpoint / "training_state.json").write_text(json.dumps(content))
    (checkpoint / "manifest.json").unlink()
    seal_checkpoint(checkpoint)
    shifts = []
    for name, options in (("same", []), ("stage", ["--dataset_dir", other])):
        with mock.patch("recipe.run.start.TrainOrder", wraps=TrainOrder) as order:
            run = train(*RUN, "--resume_from_checkpoint", checkpoint, *options, output_dir=tmp_path / name)
        shifts.append(order.call_args.kwargs["shift_below"])
        assert json.loads((run / "summary.json").read_text())["tokens_seen"] == 12 * 4 * BLOCK_SIZE
    assert shifts == [1, BLOCK_SIZE]
