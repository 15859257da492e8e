"""The first commands of a user: the demo, own text, and what the programs print to be typed next."""

import json
import os
import re
import shlex
from pathlib import Path
from unittest import mock

import pytest
from helpers import PLAIN, TINY, default_arguments, launch, list_steps, make_documents, read_summary, run_script
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.evaluation.validation import Validation


def test_the_first_run_needs_no_arguments(train, tmp_path, monkeypatch):
    """The demo prepares a corpus, and trains a tokenizer and a model, which learns; it ends with the next commands.

    The checkpoint to resume from is the last one before the decay. A second run uses the same data, in a folder of its
    own.
    """
    short = ["--max_steps", "20", "--max_eval_samples", "8"]
    result = launch(short, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr
    assert "20/20" in result.stderr and "tok/s" in result.stderr  # the progress bar
    run = tmp_path / "runs" / "demo"
    summary = read_summary(run)
    assert summary["eval_loss"] < summary["initial"]["loss"] - 1.3
    model = AutoModelForCausalLM.from_pretrained(run)
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(run))
    closing = result.stdout.partition("\n---\n")[2]
    resume = "--resume_from_checkpoint runs/demo/checkpoint-"
    for part in ("scripts/generate_text.py --model runs/demo", resume, "--train_file TEXT.txt", "GPT-2 124M"):
        assert part in closing
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("train-*.bin")}
    monkeypatch.chdir(tmp_path)
    train("--max_steps", "1", "--max_eval_samples", "8", alone=True)
    assert (tmp_path / "runs" / "demo-2" / "summary.json").is_file()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("train-*.bin")} == before != {}


def test_from_own_text_to_a_sample(train, tmp_path, monkeypatch, capsys):
    """The scripts lead from text to a model, and train.py prepares the same rows from the same text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("\n".join(make_documents(400)), encoding="utf-8")
    text, tokenizer = ["--train_file", "a.txt"], ["--tokenizer_name", "tok"]
    assert not run_script("scripts/train_tokenizer.py", *text, "--vocab_size", 400, "--output_dir", "tok")
    assert len(AutoTokenizer.from_pretrained("tok")) == 400
    assert not run_script("scripts/prepare_data.py", *text, *tokenizer, "--output_dir", "packed")
    command = capsys.readouterr().out.splitlines()[-1].partition("recipe/train.py ")[2].split()
    small = [*TINY, *PLAIN, "--max_steps", "1", "--global_batch_size", "4"]
    prepared = []
    for name, arguments in {"run": command, "direct": [*text, *tokenizer]}.items():
        train(*arguments, *small, "--output_dir", name, alone=True)
        prepared.append(read_summary(Path(name))["dataset_content_sha256"])
    assert prepared[0] == prepared[1]
    capsys.readouterr()
    sample = ["--model", "run", "--prompt", "the cat", "--num_samples", 2, "--max_new_tokens", 9]
    assert not run_script("scripts/generate_text.py", *sample)
    assert capsys.readouterr().out.count("the cat") >= 2


# ---------------------------------------------------------------- what is printed can be typed


@pytest.mark.parametrize("limit", [[], ["--max_minutes", 5]])
def test_printed_commands_run_as_printed(train, tmp_path, monkeypatch, capsys, dataset_dir, limit):
    """The run is in a folder whose name a shell would split, with a prompt that looks like an option."""
    monkeypatch.chdir(tmp_path)
    options = ["--dataset_dir", dataset_dir, "--output_dir", "my [v2] run", "--sample_prompt=-x $HOME", *TINY, *PLAIN]
    options += ["--global_batch_size", 4, "--warmup_steps", 1, "--save_steps", 1, "--max_eval_samples", 4]
    length = ["--num_train_epochs", 0.03, *limit]
    options += length
    with mock.patch("recipe.run.decide.measure_progress", lambda schedule, state: state.step / schedule.max_steps):
        train(*options, alone=True)
        printed = capsys.readouterr().out
        (generate,) = re.findall(r"^  generate   python (.*)$", printed, re.MULTILINE)
        assert not run_script(*shlex.split(generate), "--max_new_tokens", 4)
        assert capsys.readouterr().out.startswith("-x $HOME")
        longer = re.search(r"^  longer     repeat your command with\n +(.*) \\\n +(.*)$", printed, re.MULTILINE)
        names = {text for text in shlex.split(longer[2]) if text.startswith("--")}
        assert names - {"--output_dir"} == {text for text in length if str(text).startswith("--")}
        train(*options, *shlex.split(f"{longer[1]} {longer[2]}"), alone=True)
        summaries = sorted(Path().glob("my*/summary.json"), key=os.path.getmtime)
        before, after = (json.loads(path.read_text())["step"] for path in summaries)
        assert abs(after - 2 * before) <= 1  # epochs end with a part of a step


@pytest.mark.parametrize("at", ["__init__", "run"])  # before the loop, and in its first evaluation
def test_ctrl_c_before_the_first_step_promises_no_checkpoint(train, tmp_path, dataset_dir, monkeypatch, capsys, at):
    """The run exits with 130; the same command starts again, and the log holds no first try."""
    with monkeypatch.context() as patch:
        patch.setattr(Validation, at, mock.Mock(side_effect=KeyboardInterrupt))
        assert run_script("recipe/train.py", *default_arguments(dataset_dir, tmp_path / "run", TINY)) == "130"
    printed = capsys.readouterr().err
    assert printed.endswith("interrupted\n") and "Traceback" not in printed
    assert not list(tmp_path.glob("run/checkpoint-*"))
    assert list_steps(train(), "eval") == [0, 4]
