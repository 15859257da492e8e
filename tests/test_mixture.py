"""A mixture has the shares of its weights, is exact to resume, and reports each dataset."""

import itertools
import shutil
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import BLOCK_SIZE, make_documents, read_events, run_script, train_tokenizer
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from recipe.charts import save_loss_chart
from recipe.data.batches import TrainOrder, example_rows
from recipe.data.mixture import open_datasets, order_of, split_examples, whole_shares
from recipe.data.packed import open_packed_dataset
from recipe.data.prepare import prepare_dataset
from recipe.data.source import TextSource
from recipe.data.tokenizer import read_tokenizer
from recipe.errors import UserError
from recipe.publish.public import public_events
from recipe.run.log import RunLog

WEIGHTS = ["--dataset_weights", 0.3, 0.7]
RUN = ["--max_steps", 8, "--eval_steps", 4, "--save_steps", 2, "--max_eval_samples", 10]


@pytest.fixture
def both(dataset_dir, other):
    return ["--dataset_dir", dataset_dir, other]


# ------------------------------------------------------------------ order


@pytest.mark.parametrize("weights", [[0.3, 0.7], [1, 1, 1], [5, 3, 1, 1], [0.001, 0.999], [0.9, *[0.1 / 19] * 19]])
@pytest.mark.parametrize("first", [0, 123_456_789_012])
def test_any_thousand_examples_have_the_shares(weights, first):
    """Within one percent; every example of each dataset follows the one before it."""
    examples = np.arange(first, first + 20_000)
    datasets, numbers = split_examples(examples, whole_shares(weights))
    for index, weight in enumerate(weights):
        own = datasets == index
        windows = np.convolve(own, np.ones(1000, dtype=int), mode="valid")
        assert abs(windows / 1000 - weight / sum(weights)).max() <= 0.01
        assert (np.diff(numbers[own]) == 1).all()
        assert first or numbers[own][0] == 0
    parts = [split_examples(part, whole_shares(weights)) for part in np.array_split(examples, 7)]
    assert np.array_equal(np.concatenate([of for of, _ in parts]), datasets)


def test_each_dataset_keeps_its_own_order(dataset_dir, other):
    """Without replacement, and a dataset that ends starts its next epoch."""
    mixture = open_datasets([dataset_dir, other], BLOCK_SIZE, [0.3, 0.7])
    sizes = [len(open_packed_dataset(folder, BLOCK_SIZE).train) for folder in (dataset_dir, other)]
    order = TrainOrder(len(mixture.train), 5, 8, 4, parts=order_of(mixture))
    rows = np.concatenate(list(itertools.islice(order, 200)))
    own = rows < sizes[0]
    for found, size in ((rows[own], sizes[0]), (rows[~own] - sizes[0], sizes[1])):
        assert np.array_equal(found, example_rows(np.arange(len(found)), size, 5))
    assert len(rows[~own]) > 2 * sizes[1]  # two epochs and more
    expected = open_packed_dataset(other, BLOCK_SIZE).train[np.array([0, sizes[1] - 1])]
    assert np.array_equal(mixture.train[np.array([sizes[0], sum(sizes) - 1])], expected)


def test_without_weights_the_shares_follow_the_rows(dataset_dir, other):
    """So all end their first epoch together."""
    mixture = open_datasets([dataset_dir, other], BLOCK_SIZE, None)
    rows = next(iter(TrainOrder(1, 5, 1, len(mixture.train), parts=order_of(mixture))))
    assert sorted(rows.tolist()) == list(range(len(mixture.train)))


# ------------------------------------------------------------------ runs


def weights_of(run):
    return (run / "model.safetensors").read_bytes()


def test_the_only_weight_is_the_dataset_alone(train, tmp_path, dataset_dir, both):
    """Byte for byte; a dataset of weight 0 is only evaluated."""
    alone = train(*RUN)
    run = train(*RUN, *both, "--dataset_weights", 1, 0, output_dir=tmp_path / "both")
    assert weights_of(run) == weights_of(alone)
    losses, expected = ([e["loss"] for e in read_events(folder, "eval")] for folder in (run, alone))
    assert losses == expected
    other = read_events(run, "eval")[-1]["mixture"]["other"]
    assert other["num_rows"] > 0 and other["loss"] != losses[-1]


def test_a_mixture_is_one_run_wherever_its_rows_are(train, tmp_path, both, capsys):
    """In memory, on the device, in workers, and after a kill, the result is the same, bit for bit."""
    expected = train(*RUN, *both, *WEIGHTS)
    printed = " ".join(capsys.readouterr().out.split())
    assert "30% dataset, 70% other: " in printed and "epochs of other, 2 warm-up steps" in printed
    log_train = RunLog.train

    def die(log, state):
        log_train(log, state)
        if state.step == 5:
            raise UserError("killed")

    with mock.patch.object(RunLog, "train", die), pytest.raises(UserError, match="killed"):
        train(*RUN, *both, *WEIGHTS, output_dir=tmp_path / "killed")
    for name, options in {
        "killed": ["--resume_from_checkpoint", "auto"],
        "ram": ["--data_placement", "ram"],
        "device": ["--data_placement", "device"],
        "workers": ["--dataloader_num_workers", 2],
    }.items():
        run = train(*RUN, *both, *WEIGHTS, *options, output_dir=tmp_path / name)
        assert weights_of(run) == weights_of(expected), name
        assert [e["loss"] for e in read_events(run, "eval")] == [e["loss"] for e in read_events(expected, "eval")]
    with pytest.raises(UserError, match=r"dataset_weights \[0.3, 0.7\] -> \[0.5, 0.5\]"):
        train(*RUN, *both, "--dataset_weights", 0.5, 0.5, "--resume_from_checkpoint", "latest")
    with pytest.raises(UserError, match="pass its data in the same order"):
        train(*RUN, *both[::2], both[1], "--dataset_weights", 0.3, 0.7, "--resume_from_checkpoint", "latest")
    train(*RUN, *both, "--dataset_weights", 3, 7, "--resume_from_checkpoint", "latest")  # the same shares


def test_validation_reports_each_dataset(train, both, dataset_dir, other, capsys):
    """Their losses are those of the stock model on all of their rows; the loss is the weighted mean."""
    run = train(*RUN, *both, *WEIGHTS, "--max_eval_samples", "all")
    model, found = AutoModelForCausalLM.from_pretrained(run).eval(), read_events(run, "eval")[-1]
    for folder in (dataset_dir, other):
        split = open_packed_dataset(folder, BLOCK_SIZE).validation
        rows = torch.from_numpy(split[np.arange(len(split))])
        with torch.no_grad():
            logits = model(input_ids=rows[:, :-1]).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()
        assert found["mixture"][folder.name]["loss"] == pytest.approx(expected, abs=1e-5)
        assert found["mixture"][folder.name]["num_rows"] == len(split)
    for key in ("loss", "bits_per_byte"):
        values = [found["mixture"][folder.name][key] for folder in (dataset_dir, other)]
        assert found[key] == pytest.approx(0.3 * values[0] + 0.7 * values[1])
    loss = found["mixture"]["other"]["loss"]
    assert f"eval_loss/other:   {loss:.4f}" in capsys.readouterr().out
    card = (run / "README.md").read_text()
    assert (
        "tokens of a mixture of 2 datasets" in card and f"| dataset 2, validation split | loss | {loss:.4f} |" in card
    )
    results = {(result.dataset_config, result.metric_type): result for result in ModelCard(card).data.eval_results}
    assert results["dataset 2", "loss"].metric_value == round(loss, 4) and len(results) == 9
    command = "--config training_config.yaml --dataset_dir DATASET_1 DATASET_2\n"
    assert (
        command in card
        and "| dataset 2 | 70% |" in card
        and "other" not in [word.strip("`|") for word in card.split()]
    )
    save_loss_chart(public_events(run, 8), run / "chart.png", "mixture")
    assert (run / "chart.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1], "--dataset_weights must be one number of at least 0 for each --dataset_dir \\(2\\)"),
        ([0, 0], "not all of them 0"),
        ([-1, 2], "at least 0"),
        (["nan", 2], "at least 0"),
    ],
)
def test_weights_that_cannot_work(train, both, weights, expected):
    with pytest.raises(UserError, match=expected):
        train(*both, "--dataset_weights", *weights)


def test_datasets_that_cannot_be_mixed(train, tmp_path, dataset_dir, other):
    with pytest.raises(UserError, match="names the same dataset twice"):
        train("--dataset_dir", other, dataset_dir, other)
    train_tokenizer(make_documents(50, seed=3), 400).save_pretrained(tmp_path / "tokenizer")
    text = TextSource((str(other.parent / "a.jsonl"),))
    prepare_dataset(text, tmp_path / "b", read_tokenizer(str(tmp_path / "tokenizer")))
    with pytest.raises(UserError, match="were made with different tokenizers; prepare both with the same"):
        train("--dataset_dir", dataset_dir, tmp_path / "b")
    shutil.copytree(other, tmp_path / "same" / "other")
    run = train("--dataset_dir", other, tmp_path / "same" / "other")  # named by their paths
    assert list(read_events(run, "eval")[-1]["mixture"]) == [str(other), str(tmp_path / "same" / "other")]


def test_programs_that_take_a_run_name_all_of_its_datasets(train, both, dataset_dir, other, tmp_path, capsys):
    """export_model.py scores the rows of all; the ladder, which would take the first only, refuses."""
    run = train(*both, "--max_steps", 1)
    capsys.readouterr()
    assert not run_script("scripts/export_model.py", "--model", run, "--prune", 0.5, "--output_dir", tmp_path / "out")
    assert f"tokens of {dataset_dir.name}, {other.name} validation." in capsys.readouterr().out
    error = run_script("scripts/run_ladder.py", "--config", run / "training_config.yaml")
    assert "trains on one dataset" in error and "pass one as --dataset_dir" in error
