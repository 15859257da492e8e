"""Validation and scripts/evaluate_model.py: exact means over rows, and a sliding window over any text."""

import json
import math
import subprocess
import sys
import tempfile
from importlib.metadata import version
from unittest import mock

import evaluate as evaluate_library
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from helpers import (
    BLOCK_SIZE,
    ONE_STEP,
    TWO_STEPS,
    make_documents,
    read_events,
    reset_accelerate,
    run_script,
    write_task,
)
from hub_repository import File, Repository
from small_model import save_small_model
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel

from recipe.command_line import load_config
from recipe.data.packed import PackedSplit
from recipe.evaluation.perplexity import LanguageModelingMetric
from recipe.evaluation.tasks import score_tasks
from recipe.evaluation.text import choose_context
from recipe.evaluation.validation import Validation
from recipe.model.loss import LanguageModelingLoss
from recipe.publish.card import weights_sha256

SCRIPT = "scripts/evaluate_model.py"


@pytest.fixture
def evaluate(tmp_path):
    """Run the script. Returns the results that it has written."""

    def run(model, *arguments: object) -> dict:
        output = tmp_path / "found.json"
        output.unlink(missing_ok=True)
        assert not run_script(SCRIPT, "--model", model, "--output_file", output, *arguments)
        return json.loads(output.read_text())[-1]

    return run


# ------------------------------------------------------------------ validation rows


@pytest.fixture(scope="module")
def run(train_shared):
    return train_shared(*TWO_STEPS, "--max_eval_samples", "all")


def score_slowly(run, rows: np.ndarray, split: PackedSplit) -> dict[str, float]:
    """Independent: the stock model, one row at a time, torch's cross-entropy, in float64.

    A character of a byte-level token stands for a byte. A separator of documents is no text. Bits per byte are bits
    per token of text, over the bytes of a token in the whole split.
    """
    model = AutoModelForCausalLM.from_pretrained(run).eval()
    tokenizer = AutoTokenizer.from_pretrained(run)
    text = [token for token in split._tokens(0, split.starts[-1]).tolist() if token != tokenizer.eos_token_id]
    bytes_per_token = sum(map(len, tokenizer.convert_ids_to_tokens(text))) / len(text)
    losses = []
    is_text = []
    for row in torch.from_numpy(rows):
        with torch.no_grad():
            logits = model(input_ids=row[None, :-1]).logits[0]
        losses += F.cross_entropy(logits.double(), row[1:], reduction="none").tolist()
        is_text += (row[1:] != tokenizer.eos_token_id).tolist()
    assert not all(is_text)
    nats = sum(loss for loss, is_counted in zip(losses, is_text, strict=True) if is_counted) / sum(is_text)
    loss = sum(losses) / len(losses)
    return {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": nats / math.log(2) / bytes_per_token}


@pytest.fixture(scope="module")
def slow_scores(run, dataset):
    return score_slowly(run, dataset.validation[np.arange(len(dataset.validation))], dataset.validation)


@pytest.mark.parametrize(("num_rows", "batch_size"), [("all", 1), ("all", 3), ("all", 1000), ("10", 3)])
def test_the_mean_is_exact_for_any_number_of_rows_and_batch_size(run, dataset, slow_scores, num_rows, batch_size):
    """A batch size need not divide the rows, which are spread over the split. The training mode comes back."""
    count = len(dataset.validation)
    assert count % 3 != 0
    reset_accelerate()
    module = LanguageModelingLoss(AutoModelForCausalLM.from_pretrained(run), 500).train()
    config = load_config(["--dataset_dir", str(dataset.directory), "--max_eval_samples", num_rows])[0]
    validation = Validation(config, Accelerator(cpu=True), module, dataset)
    validation.batch_size = batch_size
    result = validation.run()
    spread = dataset.validation[np.arange(10) * count // 10]
    expected = slow_scores if num_rows == "all" else score_slowly(run, spread, dataset.validation)
    assert {key: result[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    assert module.training
    assert module.model.training


def test_a_run_reports_the_scores_of_the_model_that_it_saves(run, slow_scores):
    """Before the first step, the scores are those of an untrained model."""
    first, last = read_events(run, "eval")
    assert (first["step"], last["step"]) == (0, 2)
    assert first["loss"] == pytest.approx(math.log(500), abs=0.1)
    assert {key: last[key] for key in slow_scores} == pytest.approx(slow_scores, rel=1e-5)


def test_the_script_finds_the_scores_of_the_run_on_the_same_rows(evaluate, run, dataset, slow_scores, monkeypatch):
    """Without lm-eval, which only tasks need."""
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    (found,) = evaluate(run, "--dataset_dir", dataset.directory)["texts"]
    assert {key: found[key] for key in slow_scores} == pytest.approx(slow_scores, rel=1e-5)
    assert found["num_tokens"] == len(dataset.validation) * BLOCK_SIZE
    assert (found["name"], found["bits_per_character"]) == ("dataset validation", None)


def test_rows_are_as_long_as_in_the_models_run(train, evaluate, dataset, tmp_path):
    """A run with rows shorter than its model's positions, its checkpoint and the script give the same loss."""
    start = train(*ONE_STEP, output_dir=tmp_path / "start")
    options = ["--model_name_or_path", start, "--block_size", 16, *TWO_STEPS, "--max_eval_samples", "all"]
    run = train(*options, "--save_steps", 2, shape=[], output_dir=tmp_path / "run")
    contexts = []
    for folder, *typed in ((run,), (run / "checkpoint-2",), (run, "--context", 8), (start,)):
        (found,) = evaluate(folder, "--dataset_dir", dataset.directory, *typed)["texts"]
        contexts.append(found["context"])
        if found["context"] == 16:
            assert found["loss"] == pytest.approx(read_events(run, "eval")[-1]["loss"], rel=1e-5)
    assert contexts == [16, 16, 8, BLOCK_SIZE]


def test_the_metric_of_the_evaluate_library_leaves_no_folder(monkeypatch, tmp_path):
    """Neither at home nor under a name that other users of the machine share. It sums over all batches."""
    monkeypatch.setattr(evaluate_library.config, "HF_METRICS_CACHE", "/proc/none")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    batches = {"predictions": [30.0, 10.0], "references": [15, 5]}
    result = LanguageModelingMetric().compute(**batches, text_nats=36.0, num_bytes=72)
    assert result == {"loss": 2.0, "perplexity": math.exp(2), "bits_per_byte": pytest.approx(0.5 / math.log(2))}
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------ any text


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("secret") / "text.jsonl"
    documents = [*make_documents(3, seed=5), "a", "the mat <|endoftext|> is text here"]
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents), encoding="utf-8")
    return path


def one_token_at_a_time(model_dir, text_file, context: int, stride: int) -> tuple[float, int, int, int]:
    """Independent: the loss of each token of each document by torch's cross-entropy, in float64.

    Token number t of a document (from 0) is scored in window max(0, ceil((t + 1 - context) / stride)), which ends
    with its last target and holds the `context` tokens before that.
    """
    model = GPT2LMHeadModel.from_pretrained(model_dir).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    total = 0.0
    num_tokens = 0
    texts = [json.loads(line)["text"] for line in text_file.read_text().splitlines()]
    for text in texts:
        ids = tokenizer.encode(text, split_special_tokens=True)
        for t, token in enumerate(ids):
            window = max(0, -(-(t + 1 - context) // stride))
            last = min(context + window * stride, len(ids)) - 1
            seen = [tokenizer.eos_token_id, *ids][max(0, last + 1 - context) : t + 1]
            with torch.no_grad():
                logits = model(torch.tensor([seen])).logits[0, -1].double()
            total += F.cross_entropy(logits, torch.tensor(token)).item()
        num_tokens += len(ids)
    return total, num_tokens, sum(len(text.encode()) for text in texts), sum(map(len, texts))


@pytest.mark.parametrize(("stride", "batch_size"), [(1, 3), (7, 100), (BLOCK_SIZE, 2)])
def test_the_scores_of_a_text_equal_a_plain_loop(evaluate, model_dir, text_file, stride, batch_size):
    """For any stride and batch size. The end-of-text token in a text is plain text."""
    options = ["--text_file", text_file, "--stride", stride, "--batch_size", batch_size]
    (found,) = evaluate(model_dir, *options)["texts"]
    total, tokens, num_bytes, characters = one_token_at_a_time(model_dir, text_file, BLOCK_SIZE, stride)
    assert num_bytes > characters
    assert found["loss"] == pytest.approx(total / tokens, abs=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / num_bytes, abs=1e-4)
    assert found["bits_per_character"] == pytest.approx(total / math.log(2) / characters, abs=1e-4)
    counts = [found[f"num_{unit}"] for unit in ("documents", "tokens", "bytes", "characters")]
    assert counts == [5, tokens, num_bytes, characters]
    assert (found["stride"], found["context"]) == (stride, BLOCK_SIZE)


def test_a_saved_model_is_scored_by_its_own_logits(evaluate, tmp_path, tokenizer_dir):
    """Also if they are capped, which training refuses."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.5}
    shape |= {"final_logit_softcapping": 3.0, "head_dim": 8, "vocab_size": len(tokenizer)}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma2", **shape, **ids)).eval()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    text = "the cat sat on a mat while rain fell"
    (tmp_path / "a.txt").write_text(text)
    found = evaluate(tmp_path / "model", "--text_file", tmp_path / "a.txt")
    ids = tokenizer(text)["input_ids"]
    with torch.no_grad():
        losses = F.cross_entropy(model(torch.tensor([[0, *ids[:-1]]])).logits[0], torch.tensor(ids))
    assert found["texts"][0]["loss"] == pytest.approx(losses.item(), rel=1e-4)


def test_the_context_of_a_model_with_many_positions_is_bounded(model_dir):
    """This holds for texts and rows: the logits of 131,072 positions at once would take 67 GB."""
    assert choose_context(model_dir, 131_072, None)[:2] == (4096, 4096)
    assert choose_context(model_dir, 131_072, 8192)[:2] == (8192, 8192)
    assert choose_context(model_dir, 1024, None)[:2] == (1024, 1024)


# ------------------------------------------------------------------ tasks


def test_tasks_have_the_scores_of_lm_evals_own_command(evaluate, tokenizer_dir, tmp_path):
    """Of its tasks on local examples, and of the first ones only. An answer must fit into the context."""
    model_dir = save_small_model(tmp_path / "model", tokenizer_dir, n_positions=70)
    tasks = [write_task(tmp_path, name) for name in ("hellaswag", "lambada_openai")]
    found = evaluate(model_dir, "--tasks", *tasks)["tasks"]
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu"]
    command += ["--model_args", f"pretrained={model_dir},dtype=float32", "--tasks", ",".join(map(str, tasks))]
    subprocess.run([*command, "--output_path", tmp_path / "out"], check=True, capture_output=True, cwd=tmp_path)
    (path,) = (tmp_path / "out").rglob("*.json")
    expected = json.loads(path.read_text())["results"]
    for task, names in {"own_hellaswag": ("acc", "acc_norm"), "own_lambada": ("acc", "perplexity")}.items():
        for name in names:
            assert found[task][name] == pytest.approx(expected[task][f"{name},none"], rel=1e-5)
            assert found[task][f"{name}_stderr"] >= 0
        assert found[task]["num_examples"] == 20 and "dataset" not in found[task]
    assert evaluate(model_dir, "--tasks", *tasks, "--limit", 5)["tasks"]["own_lambada"]["num_examples"] == 5
    short = save_small_model(tmp_path / "short", tokenizer_dir)
    assert "longer than the model's context" in run_script(SCRIPT, "--model", short, "--tasks", tasks[0])


def test_a_task_on_examples_of_the_hub_names_them():
    config = {"dataset_path": "Rowan/hellaswag", "dataset_kwargs": None}
    counts = {"effective": 9, "original": 10_042}
    scores = {"acc,none": 0.3, "acc_stderr,none": "N/A", "alias": "x"}
    found = {"results": {"hellaswag": scores}, "configs": {"hellaswag": config}, "versions": {"hellaswag": 1.0}}
    with mock.patch("lm_eval.simple_evaluate", lambda *_, **__: found | {"n-samples": {"hellaswag": counts}}):
        (values,) = score_tasks("model", ["hellaswag"], None).values()
    expected = {"acc": 0.3, "num_examples": 9, "total_examples": 10_042, "dataset": "Rowan/hellaswag", "version": 1.0}
    assert values == expected | {"lm_eval": version("lm_eval")}


def test_all_checkpoints_of_a_run_are_scored_and_drawn(train, dataset, tmp_path):
    """Each has the scores that it has alone, beside its weights; rows are as long as in the run."""
    run = train("--save_steps", 2, "--block_size", 16, output_dir=tmp_path / "run")
    options = ["--tasks", write_task(tmp_path, "lambada_openai"), "--dataset_dir", dataset.directory]
    assert not run_script(SCRIPT, "--model", run, "--checkpoints", *options)
    assert (run / "scores.png").read_bytes()[:4] == b"\x89PNG"
    found = [json.loads((run / f"checkpoint-{step}" / "evaluation.json").read_text())[-1] for step in (2, 4)]
    assert found[0]["weights_sha256"] != found[1]["weights_sha256"]
    assert not run_script(SCRIPT, "--model", run, *options)
    (of_run,) = json.loads((run / "evaluation.json").read_text())
    for name in ("weights_sha256", "tasks"):
        assert of_run[name] == found[1][name]
    assert of_run["texts"][0]["loss"] == found[1]["texts"][0]["loss"] and of_run["texts"][0]["context"] == 16


# ------------------------------------------------------------------ the report


def test_a_report_fits_into_80_columns_and_names_files_without_their_folders(
    evaluate, model_dir, text_file, tmp_path, capsys
):
    results = evaluate(model_dir, "--text_file", text_file, "--tasks", write_task(tmp_path, "lambada_openai"))
    printed = capsys.readouterr().out
    assert max(map(len, printed.partition("written to")[0].splitlines())) <= 80
    assert f"{results['tasks']['own_lambada']['perplexity']:.2e}" in printed
    assert (results["model"], results["texts"][0]["name"]) == ("small", "text.jsonl")
    assert results["texts"][0]["stride"] == BLOCK_SIZE // 2  # the default
    for private in (model_dir.parent, text_file.parent):
        assert str(private) not in json.dumps(results)
    assert {"torch", "device"} <= results["environment"].keys()


def test_evaluations_are_appended_beside_the_model_of_a_run(run, tmp_path, capsys):
    """Nothing replaces an earlier one, whatever its texts are called. Each names the weights."""
    for number, text in enumerate(("the cat sat", "on a mat")):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / "a.txt").write_text(text)
        assert not run_script(SCRIPT, "--model", run, "--text_file", tmp_path / f"{number}")
    first, second = json.loads((run / "evaluation.json").read_text())
    assert first["texts"][0]["loss"] != second["texts"][0]["loss"]
    assert first["weights_sha256"] == second["weights_sha256"] == weights_sha256(run)


def test_a_model_of_the_hub_is_known_by_its_commit(model_dir, text_file, evaluate, hub):
    files = {path.name: File(path.read_bytes(), path.suffix == ".safetensors") for path in model_dir.iterdir()}
    repository = hub.repositories["user/name"] = Repository(False)
    commit = repository.write_commit("main", None, "", files)
    assert evaluate("user/name", "--text_file", text_file)["commit"] == commit


def test_nothing_is_written_into_the_folder_of_another_model(evaluate, model_dir, text_file):
    before = sorted(model_dir.iterdir())
    assert not run_script(SCRIPT, "--model", model_dir, "--text_file", text_file)
    evaluate(model_dir, "--text_file", text_file)
    assert sorted(model_dir.iterdir()) == before


def test_a_folder_that_cannot_be_written_does_not_lose_the_results(model_dir, text_file, capsys):
    """The table is printed with a warning, which names the file."""
    found = "/proc/self/a.json"
    assert not run_script(SCRIPT, "--model", model_dir, "--text_file", text_file, "--output_file", found)
    printed = capsys.readouterr().out
    assert "bits/byte" in printed
    assert f"could not write {found}" in printed
