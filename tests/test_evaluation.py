"""Validation loss is the exact mean over every row, whatever the batches."""

import math

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import BLOCK_SIZE, read_events, reset_accelerate
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from recipe.data.packed import PackedDataset
from recipe.evaluation.perplexity import LanguageModelingMetric
from recipe.evaluation.validation import evaluate_model
from recipe.model.loss import LanguageModelingLoss


def mean_loss(model, rows: np.ndarray) -> float:
    """Independent: the stock model, one row at a time, torch's cross-entropy, in float64."""
    total = 0.0
    with torch.no_grad():
        for row in torch.from_numpy(rows):
            logits = model(input_ids=row[None, :-1]).logits[0]
            total += F.cross_entropy(logits.double(), row[1:], reduction="sum").item()
    return total / (len(rows) * BLOCK_SIZE)


@pytest.fixture
def run(train):
    return train("--max_steps", "2", "--max_eval_samples", "all")


@pytest.mark.parametrize("batch_size", [1, 3, 1000])
def test_exact_mean_on_any_batch_size(run, dataset, batch_size):
    """Batch sizes that do not divide the split give the mean over its rows, to rounding."""
    model = AutoModelForCausalLM.from_pretrained(run).eval()
    split = dataset.splits["validation"]
    assert len(split) % 3 != 0
    expected = mean_loss(model, split[np.arange(len(split))])
    reset_accelerate()
    result = evaluate_model(Accelerator(cpu=True), LanguageModelingLoss(model, 500), dataset, batch_size, len(split))
    assert result["loss"] == pytest.approx(expected, abs=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    counts = dataset.metadata["splits"]["validation"]
    expected_bits = expected / math.log(2) * counts["tokens"] / counts["bytes"]
    assert result["bits_per_byte"] == pytest.approx(expected_bits, rel=1e-5)


def test_the_saved_model_has_the_reported_loss(run, dataset):
    """The last evaluation of the run is the loss of the folder it leaves, and of the untrained model at the start."""
    model = AutoModelForCausalLM.from_pretrained(run).eval()
    split = dataset.splits["validation"]
    evaluations = read_events(run, "eval")
    assert [e["step"] for e in evaluations] == [0, 2]
    assert evaluations[-1]["loss"] == pytest.approx(mean_loss(model, split[np.arange(len(split))]), abs=1e-6)
    assert evaluations[0]["loss"] == pytest.approx(math.log(500), abs=0.1)


def test_evaluation_leaves_the_module_in_training_mode(run, dataset):
    reset_accelerate()
    module = LanguageModelingLoss(AutoModelForCausalLM.from_pretrained(run), 500)
    evaluate_model(
        Accelerator(cpu=True), module, PackedDataset(dataset.directory, dataset.metadata, dataset.splits), 4, 10
    )
    assert module.training and module.model.training


def test_metric_needs_no_download():
    """Sums over several processes, then one division; infinite perplexity instead of an overflow."""
    metric = LanguageModelingMetric(keep_in_memory=True)
    result = metric.compute(predictions=[30.0, 10.0], references=[15, 5], tokens_per_byte=0.5)
    assert result == {"loss": 2.0, "perplexity": math.exp(2), "bits_per_byte": pytest.approx(1 / math.log(2))}
    assert metric.compute(predictions=[1e6], references=[1], tokens_per_byte=1)["perplexity"] == math.inf
