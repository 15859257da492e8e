"""What a run shows and records."""

import io
import time

import pytest
from conftest import read_events

import recipe.train
from recipe.config import UserError
from recipe.metrics import Throughput
from recipe.progress import LineStream


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


def test_a_tracker_that_is_not_installed_is_an_error(train):
    with pytest.raises(UserError, match="'aim' is not a tracker that is installed here"):
        train("--report_to", "aim")


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
