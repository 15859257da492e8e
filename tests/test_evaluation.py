"""The validation loss is the exact mean over the rows, and bits per byte count text alone, for any batch size."""

import json
import math

import evaluate
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import BLOCK_SIZE, make_documents, read_events, reset_accelerate, run_script
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.command_line import load_config
from recipe.data.tokenizer import count_token_bytes
from recipe.evaluation.perplexity import LanguageModelingMetric
from recipe.evaluation.text import evaluate_text, read_text
from recipe.evaluation.validation import Validation, evaluate_rows
from recipe.model.loss import LanguageModelingLoss


def score_slowly(model, tokenizer, rows: np.ndarray) -> dict[str, float]:
    """Independent: the stock model, one row at a time, torch's cross-entropy, in float64.

    A character of a byte-level token stands for a byte.
    """
    losses, num_bytes = [], []
    with torch.no_grad():
        for row in torch.from_numpy(rows):
            logits = model(input_ids=row[None, :-1]).logits[0, :, : len(tokenizer)]
            losses += F.cross_entropy(logits.double(), row[1:], reduction="none").tolist()
            tokens = tokenizer.convert_ids_to_tokens(row[1:].tolist())
            num_bytes += [0 if token == tokenizer.eos_token else len(token) for token in tokens]
    text_nats = sum(loss for loss, size in zip(losses, num_bytes, strict=True) if size)
    loss = sum(losses) / len(losses)
    return {
        "loss": loss,
        "perplexity": math.exp(loss),
        "bits_per_byte": text_nats / math.log(2) / sum(num_bytes),
    }


@pytest.fixture(scope="module")
def run(train_shared):
    return train_shared("--max_steps", "2", "--max_eval_samples", "all")


@pytest.fixture(scope="module")
def model(run):
    return AutoModelForCausalLM.from_pretrained(run).eval()


@pytest.fixture(scope="module")
def tokenizer(run):
    return AutoTokenizer.from_pretrained(run)


@pytest.fixture(scope="module")
def expected(model, tokenizer, dataset):
    """The exact scores over the validation split."""
    return score_slowly(model, tokenizer, dataset.validation[np.arange(len(dataset.validation))])


@pytest.mark.parametrize("batch_size", [1, 3, 1000])
def test_the_mean_is_exact_for_any_batch_size(model, expected, dataset, batch_size):
    """Batch sizes that do not divide the split return the mean over its rows too, and training mode comes back."""
    assert len(dataset.validation) % 3 != 0
    reset_accelerate()
    module = LanguageModelingLoss(model, 500)
    config = load_config(["--dataset_dir", str(dataset.directory), "--max_eval_samples", "all"])[0]
    validation = Validation(config, Accelerator(cpu=True), module, dataset, 4)
    validation.batch_size = batch_size
    result = validation.run()
    assert module.training and module.model.training
    assert {key: result[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    assert result["loss"] == pytest.approx(expected["loss"], abs=1e-6)


def test_rows_a_text_and_a_subset_have_the_same_bits_per_byte(model, tokenizer, tmp_path):
    """The direct computation's. Rows score separators of documents too, which counts for the loss alone."""
    reset_accelerate()
    Accelerator(cpu=True)
    rows, texts = [], []
    for document in make_documents(40, seed=3):
        ids = tokenizer(document)["input_ids"][: BLOCK_SIZE - 1]
        if len(ids) == BLOCK_SIZE - 1 and tokenizer(tokenizer.decode(ids))["input_ids"] == ids:
            rows.append([tokenizer.eos_token_id, *ids, tokenizer.eos_token_id])
            texts.append({"text": tokenizer.decode(ids)})
    assert len(rows) > 5
    rows = np.array(rows)
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    module = LanguageModelingLoss(model, len(tokenizer)).eval()
    token_bytes = torch.from_numpy(count_token_bytes(tokenizer))
    for num_rows in (len(rows), 4):
        found = evaluate_rows(module, token_bytes, rows, num_rows, 3).scores()
        scored = rows[np.arange(num_rows) * len(rows) // num_rows]
        assert found == pytest.approx(score_slowly(model, tokenizer, scored), rel=1e-5)
    expected = score_slowly(model, tokenizer, rows)
    text = read_text(str(tmp_path / "text.jsonl"), tokenizer)
    found = evaluate_text(model, tokenizer, text, BLOCK_SIZE, BLOCK_SIZE, 100)
    assert found["bits_per_byte"] == pytest.approx(expected["bits_per_byte"], rel=1e-5)
    assert found["num_bytes"] == sum(len(text["text"].encode()) for text in texts)
    assert found["loss"] == pytest.approx(score_slowly(model, tokenizer, rows[:, :-1])["loss"], rel=1e-5)
    assert found["loss"] != pytest.approx(expected["loss"], rel=1e-5)


def test_the_saved_model_has_the_reported_loss(run, expected):
    """The last evaluation is that of the saved model, and the first is that of an untrained one."""
    evaluations = read_events(run, "eval")
    assert [e["step"] for e in evaluations] == [0, 2]
    assert evaluations[-1]["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert evaluations[-1]["bits_per_byte"] == pytest.approx(expected["bits_per_byte"], rel=1e-5)
    assert evaluations[0]["loss"] == pytest.approx(math.log(500), abs=0.1)


def test_the_metric_adds_up_batches():
    """It sums first and divides once; an infinite perplexity replaces an overflow."""
    metric = LanguageModelingMetric()
    result = metric.compute(predictions=[30.0, 10.0], references=[15, 5], text_nats=36.0, num_bytes=72)
    assert result == {"loss": 2.0, "perplexity": math.exp(2), "bits_per_byte": pytest.approx(0.5 / math.log(2))}
    overflow = metric.compute(predictions=[1e6], references=[1], text_nats=1e6, num_bytes=1)
    assert overflow["perplexity"] == math.inf


def test_a_home_folder_that_cannot_be_written(run, tmp_path, monkeypatch):
    """evaluate would create its cache there."""
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", "/proc/none")
    output = tmp_path / "found.json"
    (tmp_path / "a.txt").write_text("the cat sat")
    arguments = ["--text_file", tmp_path / "a.txt", "--output_file", output]
    assert not run_script("scripts/evaluate_model.py", "--model", run, *arguments)
    assert json.loads(output.read_text())["texts"]
