"""scripts/evaluate_model.py: a sliding window over any text, one sentence for each mistake."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from conftest import BLOCK_SIZE, ROOT, launch, make_documents, read_events, run_script
from torch.nn import functional as F
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from recipe.evaluation.report import describe_results
from recipe.evaluation.text import cut_windows

SCRIPT = "scripts/evaluate_model.py"
LAMBADA = ROOT / "tests" / "lambada_sample.jsonl"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tokenizer_dir):
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    eos = tokenizer.eos_token_id
    size = {"n_positions": BLOCK_SIZE, "n_layer": 2, "n_head": 2, "n_embd": 32, "initializer_range": 0.5}
    config = GPT2Config(vocab_size=len(tokenizer), bos_token_id=eos, eos_token_id=eos, **size)
    directory = tmp_path_factory.mktemp("private") / "small"
    GPT2LMHeadModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("secret") / "text.jsonl"
    documents = [*make_documents(3, seed=5), "a", "the mat <|endoftext|> is text here"]
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents), encoding="utf-8")
    return path


@pytest.fixture
def evaluate(model_dir, tmp_path, capsys):
    """Run the script. Returns its JSON and what it printed."""

    def run(*arguments: object) -> tuple[dict, str]:
        output = tmp_path / "found.json"
        assert not run_script(SCRIPT, "--model", model_dir, "--output_file", output, *arguments)
        return json.loads(output.read_text()), capsys.readouterr().out

    return run


def one_token_at_a_time(model_dir, text_file, context: int, stride: int) -> tuple[float, int, int, int]:
    """Independent: the loss of each token of each document by torch's cross-entropy, in float64.

    Token number t of a document (from 0) is scored in window max(0, ceil((t + 1 - context) / stride)), which ends
    with its last target and holds the `context` tokens before that.
    """
    model, tokenizer = GPT2LMHeadModel.from_pretrained(model_dir).eval(), AutoTokenizer.from_pretrained(model_dir)
    total, num_tokens, texts = 0.0, 0, [json.loads(line)["text"] for line in text_file.read_text().splitlines()]
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


@pytest.mark.parametrize(("stride", "batch_size"), [(1, 3), (7, 1), (16, 100), (BLOCK_SIZE, 2)])
def test_perplexity_equals_a_plain_loop(evaluate, model_dir, text_file, stride, batch_size):
    """All scores and counts, for any stride and batch size. The end-of-text token in a text is plain text."""
    results, _ = evaluate("--text_file", text_file, "--stride", stride, "--batch_size", batch_size)
    total, tokens, num_bytes, characters = one_token_at_a_time(model_dir, text_file, BLOCK_SIZE, stride)
    (found,) = results["texts"]
    assert found["loss"] == pytest.approx(total / tokens, abs=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / num_bytes, abs=1e-4)
    assert found["bits_per_character"] == pytest.approx(total / math.log(2) / characters, abs=1e-4)
    counts = [found[f"num_{unit}"] for unit in ("documents", "tokens", "bytes", "characters")]
    assert counts == [5, tokens, num_bytes, characters] and num_bytes > characters
    assert (found["stride"], found["context"]) == (stride, BLOCK_SIZE)


def test_the_default_stride_is_half_of_the_context(evaluate, text_file):
    results, _ = evaluate("--text_file", text_file)
    assert results["texts"][0]["stride"] == BLOCK_SIZE // 2


@pytest.mark.parametrize(("context", "stride"), [(8, 1), (8, 3), (8, 8), (1, 1)])
def test_every_token_is_scored_once(context, stride):
    """Each token but the first of a document is a target of one window, which has at most `context` inputs."""
    for length in (2, 9, 10, 50, 3):
        scored = []
        for ids, num_targets in cut_windows(np.arange(length), context, stride):
            assert num_targets < len(ids) <= context + 1 and np.array_equal(ids, np.arange(ids[0], ids[0] + len(ids)))
            scored += ids[-num_targets:].tolist()
        assert scored == list(range(1, length))


def test_the_rows_of_a_dataset_repeat_the_evaluation_of_the_run(train, dataset):
    """The validation rows of the run's dataset have the run's exact final scores."""
    run = train("--max_eval_samples", "all", "--max_steps", "2")
    assert not run_script(SCRIPT, "--model", run, "--dataset_dir", dataset.directory)
    (found,) = json.loads((run / "evaluation.json").read_text())["texts"]
    expected = read_events(run, "eval")[-1]
    assert found["num_tokens"] == len(dataset.validation) * BLOCK_SIZE
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert found["bits_per_byte"] == pytest.approx(expected["bits_per_byte"], rel=1e-5)
    assert found["bits_per_character"] is None and found["name"] == "dataset validation"


def test_two_processes_find_the_same(evaluate, model_dir, text_file, dataset_dir, tmp_path):
    """The windows, rows and examples are divided, so that each process has some, and the results are equal."""
    many = tmp_path / "many.jsonl"
    many.write_text(LAMBADA.read_text() * 4)  # more than the 32 examples that go to a process at a time
    arguments = ["--text_file", text_file, "--dataset_dir", dataset_dir, "--tasks", f"lambada={many}"]
    arguments += ["--batch_size", "1"]
    expected, _ = evaluate(*arguments)
    output = tmp_path / "two.json"
    result = launch(
        ["--model", model_dir, "--output_file", output, *arguments],
        cwd=tmp_path,
        launcher=("--multi_gpu", "--num_processes", "2"),
        program=ROOT / SCRIPT,
        ACCELERATE_USE_CPU="true",
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(output.read_text())
    assert (expected["num_processes"], found["num_processes"]) == (1, 2)
    pairs = [*zip(expected["texts"], found["texts"], strict=True)]
    pairs.append((expected["tasks"]["lambada"], found["tasks"]["lambada"]))
    for left, right in pairs:
        assert left.keys() == right.keys()
        numbers = {key: value for key, value in left.items() if isinstance(value, (int, float)) and key != "seconds"}
        assert {key: right[key] for key in numbers} == pytest.approx(numbers, rel=1e-5)
    assert result.stdout.count("bits/byte") == 1


def test_the_report(evaluate, model_dir, text_file):
    """The table has at most 80 columns; it and the JSON name files and the model without their folders."""
    results, printed = evaluate("--text_file", text_file, "--tasks", f"lambada={LAMBADA}")
    assert max(map(len, printed.partition("written to")[0].splitlines())) <= 80
    assert results["model"] == "small" and results["texts"][0]["name"] == "text.jsonl"
    assert results["tasks"]["lambada"]["source"] == "lambada_sample.jsonl"
    content = json.dumps(results)
    assert str(model_dir.parent) not in content and str(text_file.parent) not in content
    assert "GPT-2 of OpenAI" in printed and "0.3256" in printed and "issue 2159" in printed
    assert {"torch", "device"} <= results["environment"].keys()


def test_the_table_shows_what_is_unknown_as_a_dash():
    """Sizes without a source have no number."""
    scores = {"acc": 0.5, "acc_stderr": None, "perplexity": math.inf, "perplexity_stderr": None, "num_examples": 1}
    results = {"model": "m", "revision": "r", "num_parameters": 1, "texts": [], "tasks": {"lambada": scores}}
    line = next(line for line in describe_results(results).splitlines() if line.startswith("lambada acc "))
    assert line.split() == ["lambada", "acc", "0.5000", "-", "1", "0.3256", "-", "-", "0.5121"]


def test_a_folder_that_cannot_be_written_does_not_lose_the_results(model_dir, text_file, capsys, monkeypatch):
    """The table is printed with a warning."""

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("recipe.evaluation.report.write_results", refuse)
    assert not run_script(SCRIPT, "--model", model_dir, "--text_file", text_file)
    printed = capsys.readouterr().out
    assert "bits/byte" in printed and "warning: could not write" in printed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--model small", "nothing to evaluate; pass --dataset_dir, --text_file or --tasks"),
        ("--model empty --text_file a.txt", "there is no model in empty"),
        ("--model ./gone --text_file a.txt", "there is no folder ./gone"),
        ("--model user/na--me --text_file a.txt", "cannot load a model from 'user/na--me'"),
        ("--model user/name --text_file a.txt", "cannot load a model from 'user/name'"),
        ("--model small --revision x --text_file a.txt", "--revision selects a branch of a Hub model"),
        ("--model small --text_file gone.txt", "gone.txt"),
        ("--model small --text_file blank.txt", "there is no text in blank.txt"),
        ("--model small --text_file a.txt --stride 0", "stride must be from 1 to 32, the context of small, got 0"),
        ("--model small --text_file a.txt --stride 33", "stride must be from 1 to 32"),
        ("--model small --text_file a.txt --batch_size 0", "batch_size must be at least 1, got 0"),
        ("--model small --dataset_dir gone", "there is no dataset gone"),
        ("--model small --tasks lambda", "unknown task 'lambda'; did you mean lambada?"),
        ("--model small --tasks lambada=blank.txt", "blank.txt is empty"),
        ("--model more --text_file a.txt", "the tokenizer in more has 500 tokens, its model only 400"),
        ("--model small --text_file a.txt --output_file no/f.json", "pass a file in an existing folder"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, monkeypatch, model_dir, arguments, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("the cat")
    (tmp_path / "blank.txt").write_text(" \n ")
    for name, changes in (("small", {}), ("more", {"vocab_size": 400})):
        shutil.copytree(model_dir, tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps(config | changes))
    error = run_script(SCRIPT, *arguments.split())
    assert error.startswith("error: ") and expected in error and "\n" not in error


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, "was tokenized with another tokenizer than the model's"), ({"n_positions": 16}, "has rows of 32 tokens")],
)
def test_a_dataset_of_another_model_is_refused(model_dir, dataset, tmp_path, changes, expected):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    if not changes:
        tokenizer.add_tokens("another")
    size = {"n_positions": 32, "n_layer": 1, "n_head": 1, "n_embd": 8} | changes
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **size)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert expected in run_script(SCRIPT, "--model", tmp_path, "--dataset_dir", dataset.directory)
