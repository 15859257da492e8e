"""What a run prints, records and sends to trackers."""

import io
import json
import math
import re
import shutil
import types
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from accelerate import Accelerator
from conftest import make_documents, read_events, run_script

import recipe.evaluation.generation
import recipe.evaluation.scoring
import recipe.run.log
import recipe.train
from recipe.command_line import CONFIGS_DIR, load_config
from recipe.errors import UserError
from recipe.progress import LineStream
from recipe.publish.public import write_public_files
from recipe.run.end import compare_with_expected
from recipe.run.log import RunLog
from recipe.run.look import default_name


def test_log_files_get_lines_instead_of_a_redrawn_bar():
    stream = io.StringIO()
    lines = LineStream(stream)
    for text in ("\rtrain  10%", "\rtrain  20%", "\n"):
        lines.write(text)
    assert stream.getvalue() == "train  10%\ntrain  20%\n"


def test_trackers_get_the_numbers_of_the_log(train):
    """TensorBoard holds the losses of metrics.jsonl."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output_dir = train("--report_to", "tensorboard")
    events = EventAccumulator(str(output_dir / "gpt2-recipe")).Reload()
    logged = [(e.step, e.value) for e in events.Scalars("train/loss")]
    assert logged == [(e["step"], pytest.approx(e["loss"])) for e in read_events(output_dir, "train")]
    assert events.Scalars("eval/perplexity")


def test_tensorboard_shows_the_steps_of_the_log_after_a_resume(train):
    """Not those that an earlier start made after the checkpoint. The folder of the options is made once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = ["--report_to", "tensorboard", "--save_steps", 2, "--resume_from_checkpoint", "auto"]
    output_dir = train(*options, "--max_steps", 8)
    folders = [path for path in (output_dir / "gpt2-recipe").iterdir() if path.is_dir()]
    for number in (4, 6, 8):
        shutil.rmtree(output_dir / f"checkpoint-{number}")
    train(*options, "--max_steps", 5)
    events = EventAccumulator(str(output_dir / "gpt2-recipe")).Reload()
    logged = [event["step"] for event in read_events(output_dir, "train")]
    assert [event.step for event in events.Scalars("train/loss")] == logged == [1, 2, 3, 4, 5]
    assert [path for path in (output_dir / "gpt2-recipe").iterdir() if path.is_dir()] == folders


def test_trackers_identify_a_run_and_its_resumption(train, tmp_path, monkeypatch):
    """A resumed run has the same id and name; another run has another id. Their config says what was run on what."""
    calls, configs = [], []

    def init_trackers(self, project_name, init_kwargs):
        assert project_name == ("mine" if len(calls) == 2 else "gpt2-recipe")
        calls.append(init_kwargs)
        self.trackers = [mock.Mock(store_init_configuration=configs.append)]

    monkeypatch.setattr(Accelerator, "init_trackers", init_trackers)
    options = ["--report_to", "tensorboard", "--save_steps", "1", "--max_steps", "1"]
    train(*options, output_dir=tmp_path / "a")
    train(*options, "--resume_from_checkpoint", "auto", output_dir=tmp_path / "a")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    train(*options, "--mixed_precision", "auto", "--run_name", "second", output_dir=tmp_path / "b")
    assert len(configs) == 3
    for config in configs:
        assert (config["n_layer"], config["n_embd"], config["num_parameters"] > 0) == (2, 32, True)
        assert (config["mixed_precision"], config["dynamo_backend"]) in (("no", "no"), ("bf16", "no"))
        assert config["device"] and config["per_device_train_batch_size"] == 4
    a, b, c = calls
    assert a["wandb"] == b["wandb"] and (a["wandb"]["name"], a["wandb"]["resume"]) == ("a", "allow")
    assert c["wandb"]["id"] != a["wandb"]["id"] and c["wandb"]["name"] == "second"
    assert [options["trackio"]["resume"] for options in (a, b, c)] == ["never", "allow", "never"]


def test_samples_are_logged_and_the_last_one_is_shown(train, capsys):
    """There is one for each evaluation; the same weights and the same run give the same text."""
    output_dir = train("--max_steps", "2", "--sample_prompt", "the cat")
    samples = {event["step"]: event["text"] for event in read_events(output_dir, "sample")}
    assert list(samples) == [0, 2] and all(text.startswith("the cat") for text in samples.values())
    shown = capsys.readouterr().out.partition("A sample for the prompt 'the cat':\n")[2]
    assert "".join(line.removeprefix("    ") for line in shown.splitlines(True)).startswith(samples[2])


def test_the_closing_lines_can_be_grepped(train, capsys):
    """`key: value` lines repeat summary.json, after everything else that the run prints about its results."""
    output_dir = train("--max_steps", "2")
    printed = capsys.readouterr().out.partition("\n---\n")[2]
    found = dict(re.findall(r"^(\w+): +(\S+)$", printed, re.MULTILINE))
    summary = json.loads((output_dir / "summary.json").read_text())
    assert (int(found["steps"]), int(found["tokens"])) == (2, 2 * 4 * 32) and found["model"] == str(output_dir)
    for key, value in (
        ("initial_loss", summary["initial"]["loss"]),
        ("eval_loss", summary["eval_loss"]),
        ("perplexity", summary["perplexity"]),
        ("bits_per_byte", summary["bits_per_byte"]),
        ("tokens_per_second", summary["tokens_per_second"]),
        ("train_seconds", summary["train_seconds"]),
        ("total_seconds", summary["wall_seconds"]),
        ("peak_memory_gb", summary["peak_memory_bytes"] / 1e9),
    ):
        assert float(found[key]) == pytest.approx(value, rel=1e-3, abs=0.5 if "per_second" in key else 0.06), key


def test_a_long_evaluation_shows_its_progress(train, monkeypatch, capsys):
    monkeypatch.setattr(recipe.evaluation.scoring, "SILENT_SECONDS", 0.0)
    train("--max_steps", "1", "--max_eval_samples", "all")
    assert "evaluating" in capsys.readouterr().err


def test_default_run_names(dataset_dir):
    """A run is named after the user's text, or else after its recipe."""
    names = {
        (): "demo",
        ("--train_file", "x/my notes.txt.gz"): "my-notes",
        ("--train_file", "t/**/*.txt"): "text",
        ("--train_file=-r.txt",): "r",
        ("--dataset_dir", str(dataset_dir)): dataset_dir.name,
        ("--config", "gpt2_124m", "--dataset_dir", str(dataset_dir)): "gpt2_124m",
        ("--dataset_name", "me/corpus"): "corpus",
    }
    assert {argv: default_name(*load_config([*argv])) for argv in names} == names


def test_a_missing_tracker_is_an_error(train):
    """Accelerate would ignore it silently."""
    with pytest.raises(UserError, match="aim is not installed; run pip install aim"):
        train("--report_to", "aim")
    with pytest.raises(UserError, match="unknown tracker 'tracki'; choose from .*trackio"):
        train("--report_to", "tracki")


def test_lines_fit_into_80_columns(train, dataset_dir, capsys, monkeypatch):
    """Everything that the program prints fits, except for long folder names."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(recipe.evaluation.validation, "sample_text", lambda *args, **kwargs: "a sample")
    output_dir = train("--max_steps", "1", "--save_steps", "1")
    printed = capsys.readouterr().out.replace(str(output_dir), "runs/demo").replace(str(dataset_dir), "data")
    assert "--resume_from_checkpoint" in printed
    assert [line for line in printed.splitlines() if len(line) > 80] == []


EXPECTED = {"value": 3.28, "tolerance": 0.15, "tokens": 3200, "dataset": "me/corpus", "source": "three seeds"}


@pytest.mark.parametrize(
    ("loss", "num_tokens", "source", "more", "verdict"),
    [
        (3.42, 3200, "data/corpus/a.txt", {}, "3.420, as expected."),
        (3.5, 3200, "me/corpus", {}, "3.500, 0.22 higher."),
        (3.0, 3100, "me/corpus", {}, "3.000, 0.28 lower."),
        (3.42, 3200, "runs/corpus/sample/10BT", {}, "3.420, as expected."),  # a part of the path that was typed
        (3.42, 3200, "runs/corpus/sample/*.parquet", {}, "3.420, as expected."),
        (3.42, 3200, "runs/my-corpus/10BT", {}, None),
        (math.nan, 3200, "me/corpus", {}, "nan, not finite."),
        (3.42, 3200, "me/corpus-2", {}, None),
        (3.42, 3520, "me/corpus", {}, None),
        (3.42, 3200, "my/text", {"content_sha256": "abc"}, "3.420, as expected."),
        (3.42, 3200, "me/corpus", {"content_sha256": "d"}, "3.420, after other text, so the two do not compare."),
        (
            3.42,
            3520,
            "my/text",
            {"content_sha256": "abc"},
            "3.420, after 3,520 instead of 3,200 tokens, so the two do",
        ),
    ],
)
def test_the_loss_is_compared_with_the_recipes(loss, num_tokens, source, more, verdict):
    """If dataset and length are the recipe's. The recipe of a published run always gets an answer."""
    config = types.SimpleNamespace(expected_loss=EXPECTED | more)
    text = {"train_files": [source]} if source.startswith(("data/", "runs/")) else {"dataset_name": source}
    found = compare_with_expected(config, {"source": text, "content_sha256": "abc"}, num_tokens, loss)
    known = "Expected validation loss on me/corpus: 3.28 +/- 0.15 (three seeds). This run: "
    assert found is None if verdict is None else found.startswith(known + verdict)


def test_the_flagship_run_compares_its_loss(train, tmp_path, tokenizer_dir, capsys):
    """The README prepares its text from a folder below one with the dataset's name; the path is not public."""
    folder = tmp_path / "runs" / "fineweb-edu" / "sample" / "10BT"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"text": make_documents(300)}), folder / "000_00000.parquet")
    packed = tmp_path / "packed"
    assert not run_script(
        "scripts/prepare_data.py", "--train_file", folder, "--tokenizer_name", tokenizer_dir, "--output_dir", packed
    )
    known = yaml.safe_load((CONFIGS_DIR / "gpt2_124m.yaml").read_text())["expected_loss"] | {"tokens": 4 * 4 * 32}
    expected = ",".join(f"{key}={value}" for key, value in known.items())
    run = train("--expected_loss", expected, dataset_dir=packed)
    printed = " ".join(capsys.readouterr().out.split())
    assert "Expected validation loss on HuggingFaceFW/fineweb-edu: 3.06 +/- 0.05" in printed
    write_public_files(run, run, 4, "jo/tiny")
    assert "10BT" not in (run / "metrics.jsonl").read_text() + (run / "training_config.yaml").read_text()


def test_a_run_that_diverged_ends_with_its_results(train, monkeypatch, capsys):
    """Also if it was killed after its last evaluation, whose loss the log cannot hold, and when it is repeated."""
    evaluation = RunLog.evaluation

    def diverge(log, state, values):
        evaluation(log, state, values | {"loss": math.nan, "perplexity": math.nan} if state.step == 4 else values)

    monkeypatch.setattr(RunLog, "evaluation", diverge)
    options = ["--save_steps", "2", "--resume_from_checkpoint", "auto"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(recipe.train, "finish_run", mock.Mock(side_effect=KeyboardInterrupt))
        train(*options)
    for _ in range(2):
        run = train(*options)
        printed = capsys.readouterr().out
        assert re.search(r"^eval_loss: +nan$", printed, re.MULTILINE) and "The loss is not finite: start" in printed
        assert "  generate " not in printed and "  longer " not in printed
    summary = json.loads((run / "summary.json").read_text(), parse_constant=pytest.fail)
    assert summary["eval_loss"] is None and summary["initial"]["loss"] > 0


def test_another_model_has_no_expected_loss(tmp_path):
    """A typed option that changes the model drops the recipe's. An incomplete one is an error."""
    recipe_file = tmp_path / "recipe.yaml"
    for content, typed, found in (
        (EXPECTED, ["--max_steps", "9"], EXPECTED),
        (EXPECTED, ["--config_overrides", "n_layer=3"], None),
        ({"value": 3.28}, ["--config_overrides", "n_layer=3"], None),
    ):
        recipe_file.write_text(yaml.safe_dump({"dataset_dir": "DIR", "expected_loss": content}))
        assert load_config(["--config", str(recipe_file), *typed])[0].expected_loss == found
    with pytest.raises(UserError, match="expected_loss must have value, tolerance, tokens, dataset, source"):
        load_config(["--config", str(recipe_file)])
