"""scripts/evaluate_model.py: a sliding window over any text, one sentence for each mistake."""

import json
import math
import shutil
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import BLOCK_SIZE, ROOT, launch, make_documents, read_events, run_script
from huggingface_hub import errors
from torch.nn import functional as F
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from recipe.data.tokenizer import load_tokenizer
from recipe.errors import UserError
from recipe.evaluation.report import describe_results
from recipe.evaluation.sliding_window import cut_windows, read_validation_split
from recipe.model.weights import load_pretrained

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
    """Each token but the first of a sequence is a target of one window, which stays within the sequence and has at
    most `context` inputs."""
    lengths = [2, 9, 10, 50, 3]
    starts = np.cumsum([0, *lengths])
    scored = []
    for begin, end, count in cut_windows(starts, context, stride):
        sequence = np.searchsorted(starts, begin, side="right")
        assert starts[sequence - 1] <= begin < end - count < end <= starts[sequence] and end - begin <= context + 1
        scored += range(end - count, end)
    assert scored == [token for token in range(starts[-1]) if token not in starts]


def test_disjoint_windows_repeat_the_evaluation_of_the_run(train, dataset):
    """With stride = context, the validation split of the run's dataset has the run's exact final loss."""
    run = train("--max_eval_samples", "all", "--max_steps", "2")
    assert not run_script(SCRIPT, "--model", run, "--dataset_dir", dataset.directory, "--stride", BLOCK_SIZE)
    (found,) = json.loads((run / "evaluation.json").read_text())["texts"]
    expected = read_events(run, "eval")[-1]
    assert found["num_tokens"] == len(dataset.splits["validation"]) * BLOCK_SIZE
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert found["bits_per_byte"] == pytest.approx(expected["bits_per_byte"], rel=1e-4)
    assert found["bits_per_character"] is None and found["name"] == "dataset validation"


def test_two_processes_find_the_same(evaluate, model_dir, text_file, tmp_path):
    """The windows and examples are divided, so that each process has some, and the results are equal."""
    many = tmp_path / "many.jsonl"
    many.write_text(LAMBADA.read_text() * 4)  # more than the 32 examples that go to a process at a time
    arguments = ["--text_file", text_file, "--tasks", f"lambada={many}", "--batch_size", "1"]
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
    pairs = [(expected["texts"][0], found["texts"][0]), (expected["tasks"]["lambada"], found["tasks"]["lambada"])]
    for left, right in pairs:
        assert left.keys() == right.keys()
        for key in left.keys() - {"seconds", "name", "source"}:
            assert right[key] == pytest.approx(left[key], rel=1e-5), key
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
    assert {"torch", "device", "lm_eval"} & results["environment"].keys() >= {"torch", "device"}


def test_the_table_shows_what_is_unknown_as_a_dash():
    """Sizes without a source have no number."""
    scores = {"acc": 0.5, "acc_stderr": None, "perplexity": math.inf, "perplexity_stderr": None, "num_examples": 1}
    results = {
        "model": "m",
        "revision": "r",
        "num_parameters": 1,
        "texts": [],
        "tasks": {"lambada": scores},
        "harness": {},
    }
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
        ("--model small", "nothing to evaluate; pass --dataset_dir, --text_file, --tasks or --harness"),
        ("--model empty --text_file a.txt", "there is no model in empty"),
        ("--model ./gone --text_file a.txt", "there is no folder ./gone"),
        ("--model user/na--me --text_file a.txt", "it is neither a folder nor a valid Hub id, such as user/name"),
        ("--model user/name --text_file a.txt", "it is neither a folder nor in the cache, and HF_HUB_OFFLINE forbids"),
        ("--model small --revision x --text_file a.txt", "--revision applies to a Hub id, but small is a folder"),
        ("--model small --text_file gone.txt", "there is no file gone.txt"),
        ("--model small --text_file blank.txt", "there is no text in blank.txt"),
        ("--model small --text_file a.txt --stride 0", "stride must be from 1 to 32, the context of small, got 0"),
        ("--model small --text_file a.txt --stride 33", "stride must be from 1 to 32"),
        ("--model small --text_file a.txt --batch_size 0", "batch_size must be at least 1, got 0"),
        ("--model small --dataset_dir gone", "there is no dataset gone"),
        ("--model small --tasks lambda", "unknown task 'lambda'; did you mean lambada?"),
        ("--model small --tasks lambada=blank.txt", "blank.txt is empty"),
        ("--model more --text_file a.txt", "the tokenizer in more has 500 tokens, its model only 400"),
        ("--model bert --text_file a.txt", "model_type bert is not supported: "),
        ("--model small --text_file a.txt --output_file no/f.json", "pass the name of a file in an existing folder"),
    ],
)
def test_mistakes_are_one_sentence_before_a_model_is_built(tmp_path, monkeypatch, model_dir, arguments, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("the cat")
    (tmp_path / "blank.txt").write_text(" \n ")
    for name, changes in (("small", {}), ("more", {"vocab_size": 400}), ("bert", {"model_type": "bert"})):
        shutil.copytree(model_dir, tmp_path / name)
        (tmp_path / name / "model.safetensors").unlink()
        config = json.loads((tmp_path / name / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps(config | changes))
    error = run_script(SCRIPT, *arguments.split())
    assert error.startswith("error: ") and expected in error and "\n" not in error


def test_a_dataset_of_another_tokenizer_is_refused(dataset, tmp_path):
    (tmp_path / "a.txt").write_text("some other words " * 50)
    assert not run_script("scripts/train_tokenizer.py", "--train_file", tmp_path / "a.txt", "--vocab_size", "260",
                          "--output_dir", tmp_path / "other")  # fmt: skip
    with pytest.raises(UserError, match="was tokenized with another tokenizer than the model's"):
        read_validation_split(dataset, load_tokenizer(str(tmp_path / "other")))


def test_the_harness_is_an_optional_extra(model_dir, monkeypatch):
    """Without lm-eval, the message names the extra."""
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    monkeypatch.setitem(__import__("sys").modules, "lm_eval.tasks", None)
    error = run_script(SCRIPT, "--model", model_dir, "--harness", "piqa,arc_easy")
    assert 'run pip install -e ".[lm_eval]"' in error and "\n" not in error


def hub_error(kind: str) -> Exception:
    """Return what the Hub's client raises, wrapped as Transformers wraps it."""
    cause = getattr(errors, kind)("long text", response=mock.Mock(headers={}))
    error = OSError("user/name is not a local folder and is not a valid model identifier ...")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("RevisionNotFoundError", "cannot load a model from 'user/name': it has no revision 'step-7'"),
        ("RepositoryNotFoundError", "the Hub has no such model, or it is private"),
        ("GatedRepoError", "access to it is restricted"),
    ],
)
def test_what_the_hub_refuses_is_one_short_sentence(kind, expected):
    class Auto:
        @staticmethod
        def from_pretrained(*_, **__):
            raise hub_error(kind)

    with pytest.raises(UserError, match=expected):
        load_pretrained(Auto, "user/name", revision="step-7")
