"""A run on a mixture is exact to resume, and reports each of its datasets."""

import shutil

import numpy as np
import pytest
from helpers import BLOCK_SIZE, read_events, read_weights, read_words, run_script, stock_loss, values_of
from huggingface_hub import ModelCard

from recipe.charts import save_loss_chart
from recipe.data.packed import open_packed_dataset
from recipe.errors import UserError
from recipe.publish.public import public_events

RUN = ["--max_steps", 8, "--eval_steps", 4, "--save_steps", 2, "--max_eval_samples", "all"]
WEIGHTS = ["--dataset_weights", 0.3, 0.7]


@pytest.fixture(scope="session")
def both(dataset_dir, other):
    return ["--dataset_dir", dataset_dir, other]


@pytest.fixture(scope="session")
def weighted(both):
    return [*RUN, *both, *WEIGHTS]


@pytest.fixture(scope="module")
def mixed(train_shared, other):
    """A run on 30% of the first dataset and 70% of the other."""
    return train_shared(*RUN, "--dataset_dir", other, *WEIGHTS)  # beside the usual dataset


def result_of(run) -> tuple[bytes, list[float]]:
    return read_weights(run), values_of(run, "loss", "eval")


@pytest.mark.parametrize("weights", [{"dataset": 1, "other": 0}, {"other": 0, "dataset": 1}])
def test_the_only_weight_is_the_dataset_alone(train, tmp_path, dataset_dir, other, weights):
    """Byte for byte; a dataset of weight 0 is only evaluated."""
    common = [*RUN, "--max_eval_samples", 10]
    folders = {"dataset": dataset_dir, "other": other}
    alone = train(*common)
    options = ["--dataset_dir", *map(folders.get, weights), "--dataset_weights", *weights.values()]
    run = train(*common, *options, output_dir=tmp_path / "both")
    assert result_of(run) == result_of(alone)
    event = read_events(run, "eval")[-1]
    assert event["mixture"]["other"]["num_rows"] > 0
    assert event["mixture"]["other"]["loss"] != event["loss"]


def test_a_mixture_resumes_only_with_its_datasets_in_their_order(train, weighted, both):
    """Shares of 3 and 7 are those of 0.3 and 0.7."""
    train(*weighted)
    resume = [*RUN, "--resume_from_checkpoint", "auto"]
    with pytest.raises(UserError, match="order"):
        train(*resume, both[0], both[2], both[1], *WEIGHTS)
    train(*resume, *both, "--dataset_weights", 3, 7)


def test_the_losses_of_each_dataset_are_those_of_the_stock_model(mixed, dataset_dir, other):
    """On all of its rows; the loss of the run is the weighted mean."""
    found = read_events(mixed, "eval")[-1]
    for folder in (dataset_dir, other):
        split = open_packed_dataset(folder, BLOCK_SIZE).validation
        expected = stock_loss(mixed, split[np.arange(len(split))])
        assert found["mixture"][folder.name]["loss"] == pytest.approx(expected, abs=1e-5)
        assert found["mixture"][folder.name]["num_rows"] == len(split)
    for key in ("loss", "bits_per_byte"):
        values = [found["mixture"][folder.name][key] for folder in (dataset_dir, other)]
        assert found[key] == pytest.approx(0.3 * values[0] + 0.7 * values[1])


def test_the_card_reports_each_dataset_without_its_name(mixed):
    loss = read_events(mixed, "eval")[-1]["mixture"]["other"]["loss"]
    card = (mixed / "README.md").read_text()
    results = {(result.dataset_config, result.metric_type): result for result in ModelCard(card).data.eval_results}
    assert results["dataset 2", "loss"].metric_value == round(loss, 4) and len(results) == 9
    for part in (f"| dataset 2, validation split | loss | {loss:.4f} |", "| dataset 2 | 70% |"):
        assert part in card
    assert "--config training_config.yaml --dataset_dir DATASET_1 DATASET_2\n" in card
    assert "other" not in [word.strip("`|") for word in card.split()]


def test_the_chart_of_a_mixture_is_drawn(mixed, tmp_path):
    save_loss_chart(public_events(mixed, 8), tmp_path / "chart.png", "mixture")
    assert (tmp_path / "chart.png").stat().st_size > 10_000


def test_a_run_prints_the_shares_and_losses_of_its_datasets(train, weighted, capsys):
    run = train(*weighted)
    printed = read_words(capsys)
    assert "30% dataset, 70% other: " in printed and "epochs of other" in printed
    assert f"eval_loss/other: {read_events(run, 'eval')[-1]['mixture']['other']['loss']:.4f}" in printed


def test_datasets_of_one_name_are_named_by_their_paths(train, tmp_path, other):
    shutil.copytree(other, tmp_path / "same" / "other")
    run = train("--dataset_dir", other, tmp_path / "same" / "other")
    assert list(read_events(run, "eval")[-1]["mixture"]) == [str(other), str(tmp_path / "same" / "other")]


def test_an_export_scores_the_rows_of_all_datasets(mixed, dataset_dir, tmp_path, capsys):
    assert not run_script(
        "scripts/export_model.py", "--model", mixed, "--prune", 0.5, "--output_dir", tmp_path / "out"
    )
    assert f"tokens of {dataset_dir.name}, other validation" in capsys.readouterr().out
