"""The validation loss is the exact mean over the rows, for any batch size."""

import math

import evaluate
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import BLOCK_SIZE, ROOT, read_events, reset_accelerate
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from recipe.command_line import load_config
from recipe.evaluation.perplexity import LanguageModelingMetric, LastWordMetric, MultipleChoiceMetric
from recipe.evaluation.validation import Validation
from recipe.model.loss import LanguageModelingLoss


def mean_loss(model, rows: np.ndarray) -> float:
    """Independent: the stock model, one row at a time, torch's cross-entropy, in float64."""
    total = 0.0
    with torch.no_grad():
        for row in torch.from_numpy(rows):
            logits = model(input_ids=row[None, :-1]).logits[0]
            total += F.cross_entropy(logits.double(), row[1:], reduction="sum").item()
    return total / (len(rows) * BLOCK_SIZE)


@pytest.fixture(scope="module")
def run(train_shared):
    return train_shared("--max_steps", "2", "--max_eval_samples", "all")


@pytest.fixture(scope="module")
def model(run):
    return AutoModelForCausalLM.from_pretrained(run).eval()


@pytest.fixture(scope="module")
def expected(model, dataset):
    """The exact loss over the validation split."""
    split = dataset.splits["validation"]
    return mean_loss(model, split[np.arange(len(split))])


@pytest.mark.parametrize("batch_size", [1, 3, 1000])
def test_the_mean_is_exact_for_any_batch_size(model, expected, dataset, batch_size):
    """Batch sizes that do not divide the split return the mean over its rows too, and training mode comes back."""
    assert len(dataset.splits["validation"]) % 3 != 0
    reset_accelerate()
    module = LanguageModelingLoss(model, 500)
    config = load_config(["--dataset_dir", str(dataset.directory), "--max_eval_samples", "all"])[0]
    validation = Validation(config, Accelerator(cpu=True), module, dataset, 4)
    validation.batch_size = batch_size
    result = validation.run()
    assert module.training and module.model.training
    assert result["loss"] == pytest.approx(expected, abs=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    counts = dataset.metadata["splits"]["validation"]
    expected_bits = expected / math.log(2) * counts["tokens"] / counts["bytes"]
    assert result["bits_per_byte"] == pytest.approx(expected_bits, rel=1e-5)


def test_the_saved_model_has_the_reported_loss(run, expected):
    """The last evaluation is the loss of the saved model, and the first is that of an untrained one."""
    evaluations = read_events(run, "eval")
    assert [e["step"] for e in evaluations] == [0, 2]
    assert evaluations[-1]["loss"] == pytest.approx(expected, abs=1e-6)
    assert evaluations[0]["loss"] == pytest.approx(math.log(500), abs=0.1)


def test_the_metric_adds_up_processes():
    """It sums first and divides once; an infinite perplexity replaces an overflow."""
    metric = LanguageModelingMetric(keep_in_memory=True)
    result = metric.compute(predictions=[30.0, 10.0], references=[15, 5], tokens_per_byte=0.5)
    assert result == {"loss": 2.0, "perplexity": math.exp(2), "bits_per_byte": pytest.approx(1 / math.log(2))}
    assert metric.compute(predictions=[1e6], references=[1], tokens_per_byte=1)["perplexity"] == math.inf


def test_the_metric_counts_characters_if_asked():
    """Bits per character come from the tokens per character."""
    metric = LanguageModelingMetric(keep_in_memory=True)
    result = metric.compute(predictions=[8.0], references=[4], tokens_per_byte=0.25, tokens_per_character=0.5)
    assert result["bits_per_character"] == pytest.approx(1 / math.log(2)) == 2 * result["bits_per_byte"]


def test_the_metrics_of_the_tasks():
    """Multiple choice, in total and per character; the last word, with the error of its perplexity."""
    choices = MultipleChoiceMetric(keep_in_memory=True).compute(
        predictions=[[-3.0, -4.0], [-3.0, -4.0], [-2.0, -1.0]], references=[0, 1, 1], lengths=[[1, 2], [1, 2], [5, 1]]
    )
    assert choices["acc"] == pytest.approx(2 / 3) and choices["acc_norm"] == pytest.approx(1 / 3)
    assert choices["acc_stderr"] == pytest.approx(math.sqrt(2 / 3 * 1 / 3 / 2))
    words = LastWordMetric(keep_in_memory=True).compute(predictions=[-1.0, -3.0], references=[True, False])
    expected = {"acc": 0.5, "acc_stderr": 0.5, "perplexity": math.exp(2), "perplexity_stderr": math.exp(2)}
    assert words == pytest.approx(expected)
    alone = LastWordMetric(keep_in_memory=True).compute(predictions=[-1e6], references=[False])
    assert alone == {"acc": 0.0, "acc_stderr": None, "perplexity": math.inf, "perplexity_stderr": None}


def test_a_home_folder_that_cannot_be_written(train, monkeypatch):
    """evaluate would create its cache there."""
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", "/proc/none")
    tasks = ["--eval_tasks", f"lambada={ROOT / 'tests' / 'lambada_sample.jsonl'}"]
    assert "lambada_acc" in read_events(train("--max_steps", "1", *tasks), "eval")[-1]
