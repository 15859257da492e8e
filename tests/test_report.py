"""What a run shows and records."""

import io
import time

import pytest
import torch
from accelerate import Accelerator
from conftest import read_events

import recipe.evaluation.generation
import recipe.evaluation.validation
import recipe.train
from recipe.command_line import load_config
from recipe.errors import UserError
from recipe.progress import LineStream
from recipe.run.meter import Throughput
from recipe.run.output_dir import _default_name


def test_a_log_file_gets_lines_instead_of_a_redrawn_bar():
    stream = io.StringIO()
    lines = LineStream(stream)
    for text in ("\rtrain  10%", "\rtrain  20%", "\n"):
        lines.write(text)
    assert stream.getvalue() == "train  10%\ntrain  20%\n"


def test_trackers_get_the_numbers_of_the_log(train):
    """TensorBoard holds the losses of metrics.jsonl."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output_dir = train("--report_to", "tensorboard", "--project", "mine")
    events = EventAccumulator(str(output_dir / "mine")).Reload()
    logged = [(e.step, e.value) for e in events.Scalars("train/loss")]
    assert logged == [(e["step"], pytest.approx(e["loss"])) for e in read_events(output_dir, "train")]
    assert events.Scalars("eval/perplexity")


def test_trackers_get_project_name_id_and_resume(train, tmp_path, monkeypatch):
    """Accelerate takes the project first; a resumed run is the same run to a tracker, and another run is not."""
    calls = []

    def init_trackers(self, project, config=None, init_kwargs=None):
        calls.append((project, init_kwargs))

    monkeypatch.setattr(Accelerator, "init_trackers", init_trackers)
    options = ["--report_to", "tensorboard", "--save_steps", "2", "--max_steps", "2"]
    train(*options, output_dir=tmp_path / "a")
    resume = ["--resume_from_checkpoint", "auto", "--change_schedule", "--report_to", "tensorboard"]
    train(*resume, output_dir=tmp_path / "a")
    train(*options, "--project", "mine", "--run_name", "second", output_dir=tmp_path / "b")
    (first, a), (again, b), (other, c) = calls
    assert (first, again, other) == ("gpt2-recipe", "gpt2-recipe", "mine")
    assert a["wandb"] == b["wandb"] and (a["wandb"]["name"], a["wandb"]["resume"]) == ("a", "allow")
    assert c["wandb"]["id"] != a["wandb"]["id"] and c["wandb"]["name"] == "second"
    assert [options["trackio"]["resume"] for options in (a, b, c)] == ["never", "allow", "never"]


def test_a_sample_that_fails_is_a_warning(train, monkeypatch, capsys):
    """Everything is on disk and published before the sample, which needs memory for a second model."""
    done = []

    def out_of_memory(model_dir, *args, **kwargs):
        done.append("sample")
        assert (model_dir / "model.safetensors").is_file() and (model_dir / "summary.json").is_file()
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(recipe.evaluation.generation, "generate_texts", out_of_memory)
    monkeypatch.setattr(recipe.train, "push_to_hub", lambda *args: done.append("push") or "published")
    train("--push_to_hub", "--hub_model_id", "someone/tiny")
    assert "warning: no sample could be generated: OutOfMemoryError: no memory is left" in capsys.readouterr().out
    assert done == ["push", "sample"]


def test_evaluating_shows_its_progress(train, monkeypatch, capsys):
    """A long evaluation says that it is one."""
    monkeypatch.setattr(recipe.evaluation.validation, "SILENT_SECONDS", 0.0)
    train("--max_eval_samples", "all")
    assert "evaluating" in capsys.readouterr().err


def test_a_run_is_named_after_its_text(dataset_dir):
    """The user's own text gives the name; the demo's and a recipe's runs are named after the recipe."""
    names = {
        (): "demo",
        ("--train_file", "my notes.txt"): "my-notes",
        ("--dataset_dir", str(dataset_dir)): dataset_dir.name,
        ("--config", "gpt2_124m", "--dataset_dir", str(dataset_dir)): "gpt2_124m",
        ("--dataset_name", "me/corpus"): "corpus",
    }
    assert {argv: _default_name(*load_config([*argv])) for argv in names} == names


def test_a_tracker_that_is_not_installed_is_an_error(train):
    with pytest.raises(UserError, match="aim is not installed; pip install aim"):
        train("--report_to", "aim")
    with pytest.raises(UserError, match="there is no tracker 'tracki'; known are .*trackio"):
        train("--report_to", "tracki")


def test_lines_fit_a_terminal_of_80_columns(train, dataset_dir, capsys, monkeypatch):
    """All that the program itself prints, folders with long names aside."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(recipe.train, "sample_from", lambda *args, **kwargs: "a sample")
    output_dir = train("--save_steps", "4")
    printed = capsys.readouterr().out.replace(str(output_dir), "runs/demo").replace(str(dataset_dir), "data")
    assert "--resume_from_checkpoint" in printed
    assert [line for line in printed.splitlines() if len(line) > 80] == []


def test_throughput_stops_for_what_is_not_training(monkeypatch):
    """The clock runs in training only, and the total leaves out the first lap, with its compilation."""
    now = iter([0.0, 10.0, 50.0, 52.0, 53.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    throughput = Throughput()
    assert throughput.tokens_per_second == 0
    assert throughput.lap(1000) == 10 and throughput.tokens_per_second == 100
    throughput.resume()  # 40 seconds of evaluation
    assert (throughput.lap(4000), throughput.lap(5000)) == (2, 1)
    assert throughput.tokens_per_second == 3000
