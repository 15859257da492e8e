"""What a run prints, records and sends to trackers, and what it never shows."""

import io
import json
import math
import re
import shutil
import traceback
import types
from functools import partial
from unittest import mock

import pytest
from accelerate import Accelerator
from faults import AUTO
from helpers import BLOCK_SIZE, ONE_STEP, list_steps, read_events, read_summary, values_of

import recipe.train
from recipe.checkpoint import RunState, Stage
from recipe.command_line import load_config
from recipe.metrics import find_train_loss, has_begun_to_diverge
from recipe.metrics import read_events as read_metrics
from recipe.progress import LineStream
from recipe.run.decide import count_epochs
from recipe.run.end import compare_with_expected
from recipe.run.log import RunLog, describe_progress, describe_seen
from recipe.run.look import default_name, read_evaluations

TENSORBOARD = ["--report_to", "tensorboard"]


def find_logged(run, name):
    """Return steps and values that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "gpt2-recipe")).Reload().Scalars(name)
    return [(event.step, event.value) for event in events]


# ------------------------------------------------------------------ what is printed


def test_the_terminal_shows_the_numbers_of_the_log(train, capsys):
    """An evaluation between two log lines has the mean training loss since the last one.

    The closing lines have the form `key: value`. Each evaluation has a sample; the last one is shown.
    """
    run = train("--max_steps", 6, "--logging_steps", 4, "--eval_steps", 3, "--sample_prompt", "cat")
    printed = capsys.readouterr().out
    first, second, third, fourth = values_of(run, "loss")  # of 1, 2, 1 and 2 steps
    evaluations = read_events(run, "eval")
    means = [event["train_loss"] for event in evaluations[1:]]
    assert means == pytest.approx([(first + 2 * second) / 3, (third + 2 * fourth) / 3])
    assert f"train {means[0]:.4f}, validation {evaluations[1]['loss']:.4f}, " in printed
    samples = [event["text"] for event in read_events(run, "sample")]
    assert list_steps(run, "sample") == [0, 3, 6] and f"'cat':\n    {samples[-1]}\n" in printed
    found = dict(re.findall(r"^(\w+): +(\S+)$", printed.partition("\n---\n")[2], re.MULTILINE))
    summary = read_summary(run)
    assert (int(found["steps"]), int(found["tokens"]), found["model"]) == (6, 6 * 4 * BLOCK_SIZE, str(run))
    for key, value, tolerance in (
        ("initial_loss", summary["initial"]["loss"], 1e-4),
        ("eval_loss", summary["eval_loss"], 1e-4),
        ("perplexity", summary["perplexity"], 0.01),
        ("bits_per_byte", summary["bits_per_byte"], 1e-4),
        ("tokens_per_second", summary["tokens_per_second"], 1),
        ("train_seconds", summary["train_seconds"], 0.1),
        ("total_seconds", summary["wall_seconds"], 0.1),
        ("peak_memory_gb", summary["peak_memory_bytes"] / 1e9, 0.01),
    ):
        assert float(found[key]) == pytest.approx(value, abs=tolerance), key


def test_a_log_line_has_what_a_run_needs_to_be_watched():
    values = {"loss": 3.9123, "learning_rate": 6e-4, "grad_norm": 0.5, "step_ms": 93.2, "tokens_per_second": 5.25e5}
    values |= {"skipped_steps": 0, "share_waiting_for_data": 0.01, "mfu": None}
    values |= {"memory_bytes": 12e9, "peak_memory_bytes": 36e9}
    shown = "loss 3.912, lr 6.0e-04, norm 0.50, 93 ms, 525k tok/s, 30% of 40 GB, peak 90%"
    assert ", ".join(describe_progress(values, 40 * 10**9)) == shown
    more = {"epoch": 2.51, "skipped_steps": 3, "share_waiting_for_data": 0.12, "mfu": 0.45, "loss_scale": 65536.0}
    shown = describe_progress(values | more, 40 * 10**9)
    assert {"epoch 2.5", "skipped updates 3", "12% waiting for data", "45% MFU", "scale 65,536"} <= {*shown}


@pytest.mark.parametrize(
    ("examples", "mixture", "expected"),
    [
        (250, False, "128k tokens + 10.2k of validation = 138k; 20 documents; epoch 0.25 (1.0 h)"),
        (2500, False, "80 documents; epoch 2.50 (1.0 h)"),  # every document is seen once, and then again
        (250, True, "20 documents; epoch 0.05 of a, 0.20 of b"),
    ],
)
def test_tokens_documents_and_hours_are_those_counted_by_hand(examples, mixture, expected):
    """A quarter of 1,000 rows has a quarter of the documents; a mixture has those of each dataset."""
    metadata = {"splits": {"train": {"rows": 1000, "documents": 80}}}
    if mixture:
        metadata["mixture"] = {name: metadata | {"share": share} for name, share in (("a", 0.2), ("b", 0.8))}
    counting = partial(count_epochs, metadata, streaming=False)
    config = types.SimpleNamespace(block_size=512)
    data = types.SimpleNamespace(metadata=metadata)
    run = types.SimpleNamespace(config=config, data=data, count_epochs=counting)
    evaluations = {0: {"num_rows": 10}, 5: {"num_rows": 10}}
    state = RunState(examples=examples, evaluations=evaluations, stages=[Stage(512)])
    assert describe_seen(run, state, 512000 / 3600).endswith(expected)


def test_log_files_get_lines_instead_of_a_redrawn_bar():
    stream = io.StringIO()
    lines = LineStream(stream)
    for text in ("\rtrain  10%", "\rtrain  20%", "\n"):
        lines.write(text)
    assert stream.getvalue() == "train  10%\ntrain  20%\n"


def test_a_run_is_named_after_its_text_or_else_after_its_recipe(dataset_dir):
    names = {
        (): "demo",
        ("--train_file", "x/my notes.txt.gz"): "my-notes",
        ("--train_file", "t/**/*.txt"): "text",
        ("--train_file=-r.txt",): "r",
        ("--dataset_dir", str(dataset_dir)): dataset_dir.name,
        ("--config", "gpt2_124m", "--dataset_dir", str(dataset_dir)): "gpt2_124m",
        ("--dataset_name", "me/corpus"): "corpus",
    }
    assert {argv: default_name(*load_config([*argv])[:2]) for argv in names} == names


# ------------------------------------------------------------------ trackers


def test_tensorboard_shows_the_numbers_of_the_log_after_a_resume(train):
    """Steps that an earlier start made after the checkpoint are gone. The folder of the options is made once."""
    run = train(*TENSORBOARD, "--save_steps", 2, "--max_steps", 8)
    folders = [path for path in (run / "gpt2-recipe").iterdir() if path.is_dir()]
    for number in (4, 6, 8):
        shutil.rmtree(run / f"checkpoint-{number}")
    train(*TENSORBOARD, *AUTO, "--max_steps", 5)
    assert list_steps(run) == [1, 2, 3, 4, 5]
    for event, key in (("train", "loss"), ("eval", "perplexity")):
        expected = [(line["step"], pytest.approx(line[key])) for line in read_events(run, event)]
        assert find_logged(run, f"{event}/{key}") == expected
    assert [path for path in (run / "gpt2-recipe").iterdir() if path.is_dir()] == folders


def test_trackers_identify_a_run_and_its_resumption(train, tmp_path, monkeypatch):
    """A resumed run has the same id and name; another run has another id. Their config says what was run on what."""
    calls, configs = [], []

    def init_trackers(self, project_name, init_kwargs):
        calls.append((project_name, init_kwargs))
        self.trackers = [mock.Mock(store_init_configuration=configs.append)]

    monkeypatch.setattr(Accelerator, "init_trackers", init_trackers)
    options = [*TENSORBOARD, "--save_steps", 1, *ONE_STEP]
    train(*options, output_dir=tmp_path / "a")
    train(*options, *AUTO, output_dir=tmp_path / "a")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    train(*options, "--mixed_precision", "auto", "--run_name", "second", output_dir=tmp_path / "b")
    assert [project for project, _ in calls] == ["gpt2-recipe", "gpt2-recipe", "mine"]
    assert [config["mixed_precision"] for config in configs] == ["no", "no", "bf16"]
    assert all(config["n_layer"] == 2 and config["num_parameters"] > 0 and config["device"] for config in configs)
    a, again, b = (options["wandb"] for _, options in calls)
    assert a == again and (a["name"], a["resume"]) == ("a", "allow")
    assert b["id"] != a["id"] and b["name"] == "second"
    assert [options["trackio"]["resume"] for _, options in calls] == ["never", "allow", "never"]


# ------------------------------------------------------------------ what the log says of a run


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([(5, 5), (4, 4), (3, 4.1), (2, 4.2), (1, 4.3)], True),
        ([(5, 5), (4, 4), (3, 4.1), (2, 4.2), (1, 4.1)], False),  # it falls again
        ([(4, 4), (3, 4.1), (3.5, 4.2), (3, 4.3)], False),  # training rises, too
        ([(4, 4), (3, 4.1), (2, 4.2), (1, 4.3), (0.5, 4.4)], False),  # said before
        ([(4, 4), (3, 4.1), (2, 4.2), (1, None)], False),  # not finite
    ],
)
def test_a_run_diverges_when_validation_rises_three_times_while_training_falls(losses, expected):
    events = [{"event": "eval", "loss": 9.0}]  # before the first step
    events += [{"event": "eval", "train_loss": train, "loss": validation} for train, validation in losses]
    assert has_begun_to_diverge(events) == expected


def test_a_line_of_the_log_that_no_run_has_written_is_ignored(tmp_path):
    """A folder may come from somebody else."""
    lines = ['{"event": "train", "step": 1e999}', '{"event": "eval", "step": "x"}', '{"step": 1}', "[]"]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"event": "train", "step": 3}']))
    assert read_metrics(tmp_path) == [{"event": "train", "step": 3}]
    (tmp_path / "metrics.jsonl").write_text(
        '{"event": "eval", "step": 4, "loss": "abc"}\n{"event": "eval", "step": 2}'
    )
    assert read_evaluations(tmp_path) == {}


EXPECTED = {"value": 3.28, "tolerance": 0.15, "tokens": 3200, "dataset": "me/corpus", "source": "three seeds"}
PUBLISHED = {"content_sha256": "abc"}


@pytest.mark.parametrize(
    ("loss", "num_tokens", "source", "more", "verdict"),
    [
        (3.42, 3200, "me/corpus", {}, "as expected"),
        (3.5, 3200, "me/corpus", {}, "0.22 higher"),
        (3.0, 3100, "me/corpus", {}, "0.28 lower"),
        (math.nan, 3200, "me/corpus", {}, "not finite"),
        (3.42, 3200, "data/corpus/a.txt", {}, "as expected"),  # a part of the path that was typed
        (3.42, 3200, "runs/my-corpus/10BT", {}, None),
        (3.42, 3520, "me/corpus", {}, None),
        # The recipe of a published run always gets an answer.
        (3.42, 3200, "my/text", PUBLISHED, "as expected"),
        (3.42, 3200, "me/corpus", {"content_sha256": "d"}, "other text, so the two do not compare"),
        (3.42, 3520, "my/text", PUBLISHED, "3,520 instead of 3,200 tokens, so the two do not compare"),
    ],
)
def test_the_loss_is_compared_with_the_recipes_for_its_dataset_and_length(loss, num_tokens, source, more, verdict):
    config = types.SimpleNamespace(expected_loss=EXPECTED | more)
    text = {"train_files": [source]} if source.startswith(("data/", "runs/")) else {"dataset_name": source}
    found = compare_with_expected(config, {"source": text, "content_sha256": "abc"}, num_tokens, loss)
    assert found is None if verdict is None else verdict in found


def test_a_run_whose_loss_is_not_finite_ends_with_its_results(train, monkeypatch, capsys):
    """A run that was killed after its last evaluation, or is repeated, ends the same way."""
    evaluation = RunLog.record_evaluation

    def diverge(log, state, values):
        evaluation(log, state, values | {"loss": math.nan, "perplexity": math.nan} if state.step == 4 else values)

    monkeypatch.setattr(RunLog, "record_evaluation", diverge)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(recipe.train, "finish_run", mock.Mock(side_effect=KeyboardInterrupt))
        train("--save_steps", 2)
    for _ in range(2):
        run = train("--save_steps", 2, *AUTO)
        printed = capsys.readouterr().out
        assert re.search(r"^eval_loss: +nan$", printed, re.MULTILINE)
        assert "--learning_rate" in printed.partition("\n---\n")[2]
        assert "  generate " not in printed and "  longer " not in printed
    summary = json.loads((run / "summary.json").read_text(), parse_constant=pytest.fail)
    assert summary["eval_loss"] is None and summary["initial"]["loss"] > 0


def test_no_secret_leaves_the_environment(train, monkeypatch, tmp_path, capfd):
    """Tokens appear neither in the files of a run, nor on the screen, nor in the traceback of a crash."""
    canary = "hf_CANARY0123456789abcdefghijklmnopqr"
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, canary)
    monkeypatch.setattr(RunLog, "end", mock.Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError) as crash:
        train("--save_steps", 2, *TENSORBOARD, real=True)
    assert canary not in "".join(traceback.format_exception(crash.value)) + "".join(capfd.readouterr())
    files = {path.relative_to(tmp_path / "run"): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {"summary.json", "README.md", "metrics.jsonl"} <= {path.name for path in files}
    assert any("tfevents" in path.name for path in files)
    assert [path for path, content in files.items() if canary.encode() in content] == []


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([("start", 0, 0.0), ("train", 1, 9.0), ("eval", 1, 9.0)], None),
        ([("train", 1, 9.0), ("eval", 1, 9.0), ("train", 4, 5.0), ("sample", 4, 0.0)], 5.0),
        # Each line counts as often as it has steps, after a resume those since it.
        ([("train", 1, 9.0), ("eval", 1, 9.0), ("train", 4, 5.0), ("start", 6, 0), ("train", 7, 1.0)], 16 / 4),
        ([("start", 1000, 0.0), ("train", 1001, 9.0), ("train", 1004, 1.0)], 12 / 4),  # of another folder
        ([("train", 1, 9.0), ("train", 2, None)], 9.0),  # it was NaN
    ],
)
def test_the_mean_training_loss_is_that_of_the_steps_since_the_last_evaluation(lines, expected):
    events = [{"event": event, "step": step, "loss": loss} for event, step, loss in lines]
    assert find_train_loss(events) == (None if expected is None else pytest.approx(expected))
