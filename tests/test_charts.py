"""The README's charts, read back from the pixels, and the script that draws them."""

import json
import runpy
import sys
from unittest import mock

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image, ImageColor

from recipe.benchmark import charts
from recipe.benchmark.charts import save_ladder_chart
from recipe.publish.curve import DARK, LIGHT, save_loss_chart

RATES = {"bottom": 1_000, "bf16": 3_000, "compile": 4_000}
ENVIRONMENT = {"device": "Intel(R) Xeon(R) Processor", "num_cpus": 2}
TRAIN = [{"event": "train", "step": i, "tokens_seen": i * 64, "loss": 5 - i / 10} for i in range(1, 21)]
EVAL = [{"event": "eval", "step": i, "loss": 5 - i / 10, "perplexity": 9.0, "num_rows": 3} for i in (0, 10, 20)]


def ran(name: str, rate: float, **more) -> dict:
    return {"name": name, "what": name, "tokens_per_second": rate, "step_ms": 1e6 / rate, **more}


@pytest.fixture
def results() -> dict:
    ladder = [ran(name, rate) for name, rate in RATES.items()]
    ladder.insert(1, {"name": "tf32", "what": "TF32", "not_run": "no TF32"})
    extras = [ran("larger batch", 5_000, kept=True), ran("tuned", 2_000), {"name": "x", "what": "x", "not_run": "x"}]
    return {
        "setting": "demo: 1.1 M parameters, 8 rows",
        "environment": ENVIRONMENT,
        "ladder": ladder,
        "extras": extras,
    }


def is_color(path, color: str) -> np.ndarray:
    """Where the image has exactly this color: bool [height, width]."""
    return (np.asarray(Image.open(path).convert("RGB")) == ImageColor.getrgb(color)).all(-1)


def bar_lengths(path, color: str) -> list[int]:
    """Pixels in each horizontal bar of this color, from top to bottom."""
    lengths = is_color(path, color).sum(1)
    edges = np.flatnonzero(np.diff((lengths > 10).astype(int), prepend=0, append=0))
    return [int(lengths[start:stop].max()) for start, stop in edges.reshape(-1, 2)]


def test_every_rung_that_ran_has_a_bar_of_its_length(results, tmp_path):
    """Rungs that did not run have none, and an extra that was not kept is gray."""
    save_ladder_chart(results, tmp_path / "l.png")
    kept = bar_lengths(tmp_path / "l.png", LIGHT["blue"])
    assert [round(5_000 * length / kept[-1], -2) for length in kept] == [*RATES.values(), 5_000]
    assert len(bar_lengths(tmp_path / "l.png", LIGHT["gray"])) == 1


@pytest.mark.parametrize("num_rungs", [0, 3, 20])
def test_a_ladder_of_any_length_fills_a_png_of_the_stated_width(num_rungs, results, tmp_path):
    ladder = [ran(f"rung {i} with a long name", 1e6 * (i + 1)) for i in range(num_rungs)]
    save_ladder_chart({**results, "ladder": ladder, "extras": []}, tmp_path / "l.png", dark=True)
    image = Image.open(tmp_path / "l.png")
    assert (image.format, image.width) == ("PNG", 1140)
    assert len(bar_lengths(tmp_path / "l.png", DARK["blue"])) == num_rungs


@pytest.mark.parametrize(("dark", "colors"), [(False, LIGHT), (True, DARK)])
def test_a_chart_has_the_opaque_background_of_its_page(dark, colors, tmp_path):
    save_loss_chart([*TRAIN, *EVAL], tmp_path / "c.png", "title", dark)
    assert np.asarray(Image.open(tmp_path / "c.png"))[..., 3].min() == 255
    assert is_color(tmp_path / "c.png", colors["page"]).mean() > 0.8


@pytest.mark.parametrize("events", [TRAIN, EVAL, [*EVAL, *TRAIN], [{**TRAIN[0], "loss": None}, *TRAIN[1:]], []])
def test_a_loss_chart_shows_what_was_recorded(events, tmp_path):
    """A run without evaluation, without a log line, or with a loss that was not finite still draws."""
    save_loss_chart(events, tmp_path / "c.png", "title")
    plot = np.s_[140:, :800]  # without header and legend
    for color, event in (("orange", "train"), ("blue", "eval")):
        assert is_color(tmp_path / "c.png", LIGHT[color])[plot].any() == any(e["event"] == event for e in events)


def test_the_script_imports_a_run_and_draws_every_chart_for_both_pages(results, tmp_path, monkeypatch, capsys):
    run, folder = tmp_path / "run", tmp_path / "results"
    run.mkdir()
    folder.mkdir()
    (folder / "ladder_cpu.json").write_text(json.dumps(results))
    (run / "metrics.jsonl").write_text("\n".join(json.dumps({**e, "grad_norm": 1}) for e in [*EVAL, *TRAIN]))
    monkeypatch.setattr(sys, "argv", ["draw_charts.py", "--demo_run", str(run), "--results_dir", str(folder)])
    with pytest.raises(SystemExit, match=r"no summary\.json"):
        runpy.run_path(str(ROOT / "scripts/draw_charts.py"), run_name="__main__")
    (run / "summary.json").write_text(json.dumps({"wall_seconds": 120, "environment": ENVIRONMENT}))
    runpy.run_path(str(ROOT / "scripts/draw_charts.py"), run_name="__main__")
    names = {"ladder_cpu.png", "ladder_cpu_dark.png", "demo_cpu.png", "demo_cpu_dark.png"}
    assert {path.name for path in folder.glob("*.png")} == names
    assert len(capsys.readouterr().out.split()) == len(names)
    lines = [json.loads(line) for line in (folder / "demo_cpu.jsonl").read_text().splitlines()]
    assert [{k: v for k, v in event.items() if k != "num_rows"} for event in [*EVAL, *TRAIN]] == lines


def test_the_committed_charts_can_be_drawn_again():
    """The demo's events end where its summary does, and each result file has a chart for either page."""
    folder = ROOT / "scripts" / "benchmarks"
    events = [json.loads(line) for line in (folder / "demo_cpu.jsonl").read_text().splitlines()]
    last = [event for event in events if event["event"] == "eval"][-1]
    summary = json.loads((folder / "demo_cpu.json").read_text())
    assert (last["step"], last["loss"]) == (summary["step"], summary["eval_loss"])
    for path in (folder / "demo_cpu.json", *folder.glob("ladder_*.json")):
        for suffix in (".png", "_dark.png"):
            assert Image.open(path.with_name(path.stem + suffix)).width == 1140


def test_the_size_of_a_large_model_is_on_the_chart(monkeypatch, tmp_path):
    """Its thousands have a comma, which does not end the number."""
    drawn = mock.Mock(side_effect=InterruptedError)
    monkeypatch.setattr(charts, "open_chart", drawn)
    setting = "gpt2_1558m: 1,557.6 M parameters, 8 rows of 1,024 tokens per step"
    with pytest.raises(InterruptedError):
        save_ladder_chart({"setting": setting, "environment": {"cuda": "13", "device": "H200"}}, tmp_path / "l.png")
    assert drawn.call_args.args[2] == "H200, 1,557.6 M parameters"
