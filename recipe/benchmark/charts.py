"""Draw the README's charts in one style: the ladder, and the loss curve of a run.

They come from the results of run_ladder.py and from the events of a run's metrics.jsonl. Each is a PNG file, 1,140
pixels wide, with an opaque background; shown 380 pixels wide, as on a phone, its type is 11 pixels high. This module
needs matplotlib.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

WIDTH, HEADER, DPI = 7.6, 0.95, 150  # inches, inches, pixels per inch
# GitHub's own colors on its light and its dark pages.
LIGHT = {"page": "#ffffff", "text": "#1f2328", "muted": "#59636e", "grid": "#e4e8ec"}
LIGHT |= {"blue": "#0969da", "orange": "#d15704", "gray": "#b9c1ca"}
DARK = {"page": "#0d1117", "text": "#f0f6fc", "muted": "#9198a1", "grid": "#262c36"}
DARK |= {"blue": "#4493f8", "orange": "#f0883e", "gray": "#8b949e"}
DRAWN = ("event", "step", "tokens_seen", "loss", "perplexity", "bits_per_byte")  # kept of a run's events


def describe_machine(environment: dict[str, Any]) -> str:
    """Return the hardware in a few words: `2 AMD EPYC cores`, `NVIDIA H200`."""
    if "cuda" in environment:
        return environment["device"]
    return f"{environment['num_cpus']} {re.sub(r'[(](R|TM)[)]| Processor| CPU.*', '', environment['device'])} cores"


def save_ladder_chart(results: dict[str, Any], path: Path, dark: bool = False) -> None:
    """Draw a bar per rung that ran: its tokens per second, and how many times as fast as the first rung it is."""
    ladder, extras = ([e for e in results.get(name, []) if "step_ms" in e] for name in ("ladder", "extras"))
    entries = [*ladder, *extras]
    rows = [i + 0.4 * (i >= len(ladder)) for i in range(len(entries))]  # a gap before the extras
    size = results["setting"].rpartition(": ")[2].split(", ")[0]  # "30.0 M parameters"
    subtitle = f"{describe_machine(results['environment'])}, {size}"
    highest = max((entry["tokens_per_second"] for entry in entries), default=1)
    title, height = "Tokens per second, one switch at a time", 0.42 * len(rows) + 0.6
    with _chart(path, title, subtitle, height, dark) as (axes, colors):
        for row, entry in zip(rows, entries, strict=True):
            rate, kept = entry["tokens_per_second"], entry in ladder or entry.get("kept")
            axes.barh(row, rate, height=0.7, color=colors["blue" if kept else "gray"])
            _label(axes, f"{entries[0]['step_ms'] / entry['step_ms']:.2f}×", rate, row)
            if not kept and rate > 0.4 * highest:  # in a shorter bar there is no room
                axes.text(rate, row, "not kept ", ha="right", va="center_baseline", color=DARK["page"])
        axes.set_yticks(rows, [shorten(e["what"], 30, placeholder="…") for e in entries], color=colors["text"])
        axes.set_ylim(max(rows, default=0) + 0.6, -0.6)
        axes.set_xlim(0, 1.28 * highest)  # room for the labels
        axes.grid(axis="x")


def save_loss_chart(events: list[dict[str, Any]], path: Path, title: str, dark: bool = False) -> None:
    """Draw training and validation loss over the tokens seen. events: the lines of a run's metrics.jsonl."""
    tokens_per_step = max((e["tokens_seen"] / e["step"] for e in events if e["event"] == "train"), default=1)
    train, validation = (
        [(e["step"] * tokens_per_step, e["loss"]) for e in events if e["event"] == name and e["loss"] is not None]
        for name in ("train", "eval")
    )
    dots = {"marker": "o", "markersize": 13 if len(validation) < 20 else 7, "linestyle": ""}
    with _chart(path, title, "loss in nats per token, over tokens seen", 4.2, dark) as (axes, colors):
        for name, points, style in (
            ("training", train, {"color": colors["orange"], "linewidth": 2.5}),
            ("validation", validation, {"color": colors["blue"], **dots}),
        ):
            axes.plot(*np.reshape(points, (-1, 2)).T, label=name, clip_on=False, zorder=3, **style)
        for tokens, loss in (validation or train)[-1:]:
            _label(axes, f"{loss:.2f}", tokens, loss)
        axes.set_xlim(0, 1.12 * max(train + validation, default=(1, 0))[0])  # room for the label
        axes.grid(axis="y")
        axes.legend(frameon=False, labelcolor="linecolor", handlelength=0.8)


def import_run(run: Path, stem: Path) -> None:
    """Copy what `save_loss_chart` draws of a run to STEM.jsonl, and its summary to STEM.json."""
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps({key: e[key] for key in DRAWN if key in e}) for e in events if e["event"] in ("train", "eval")]
    stem.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")
    stem.with_suffix(".json").write_bytes((run / "summary.json").read_bytes())


@contextmanager
def _chart(path: Path, title: str, subtitle: str, height: float, dark: bool) -> Iterator[tuple[Any, dict[str, str]]]:
    """Yield empty axes and the colors to draw with, then write the file. height: of the axes, in inches."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    colors = DARK if dark else LIGHT
    style = {"font.size": 16, "text.color": colors["text"], "grid.color": colors["grid"], "axes.axisbelow": True}
    with rc_context(style):
        height += HEADER
        figure = Figure((WIDTH, height), DPI, facecolor=colors["page"], layout="constrained")
        figure.get_layout_engine().set(rect=(0.015, 0.01, 0.97, 1 - HEADER / height))
        figure.text(0.02, 1 - 0.2 / height, title, size=19, weight="bold", va="top")
        figure.text(0.02, 1 - 0.58 / height, subtitle, color=colors["muted"], va="top")
        axes = figure.subplots(subplot_kw={"facecolor": colors["page"]})
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, colors=colors["muted"])
        axes.locator_params(axis="x", nbins=4)
        axes.xaxis.set_major_formatter(_short)
        yield axes, colors
        figure.savefig(path, format="png", pil_kwargs={"optimize": True})


def _label(axes: Any, text: str, x: float, y: float) -> None:
    """Write to the right of a point, on top of the grid."""
    box = {"facecolor": axes.get_facecolor(), "edgecolor": "none", "pad": 1}
    axes.annotate(text, (x, y), (11, 0), textcoords="offset points", weight="bold", va="center_baseline", bbox=box)


def _short(number: float, _position: int) -> str:
    unit, name = next((u for u in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if number >= u[0]), (1, ""))
    return f"{number / unit:g}{name}"
