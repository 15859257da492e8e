"""Draw the loss curve of a run. Other charts have the same frame.

A chart is a PNG file, 1,140 pixels wide, with an opaque background; shown 380 pixels wide, as on a phone, its type is
11 pixels high. matplotlib is imported when a chart is drawn, because that takes half a second.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WIDTH = 7.6  # inches
HEADER = 0.95  # inches
DPI = 150
COLORS = {  # GitHub's own
    "page": "#ffffff",
    "text": "#1f2328",
    "muted": "#59636e",
    "grid": "#e4e8ec",
    "blue": "#0969da",
    "orange": "#d15704",
    "gray": "#b9c1ca",
}
LINE_STYLES = ("-", "--", ":", "-.")


def name_parts(events: list[dict[str, Any]]) -> dict[str, str]:
    """Return {key in a run's events: name to show} for the datasets of a mixture. The name is an id, else the key."""
    start = next((event for event in events if event["event"] == "start"), {})
    return {key: part.get("dataset_id") or key for key, part in start.get("data", {}).get("mixture", {}).items()}


def save_loss_chart(events: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw training and validation loss over the tokens seen. events: the lines of a run's metrics.jsonl.

    The losses of the first 2% of the tokens are cut off if they would take more than half of the height.
    """

    def points_of(chosen: list[dict[str, Any]]) -> list[tuple[float, float]]:
        return [(event["tokens_seen"], event["loss"]) for event in chosen if event["loss"] is not None]

    evaluations = [event for event in events if event["event"] == "eval"]
    train = points_of([event for event in events if event["event"] == "train"])
    validation = points_of(evaluations)
    dots = {"marker": "o", "markersize": max(4, min(13, 260 / max(1, len(validation)))), "linestyle": ""}
    last = max(train + validation, default=(1, 0))[0]
    losses = [loss for _, loss in train + validation]
    later = [loss for tokens, loss in train + validation if tokens > 0.02 * last]
    with open_chart(path, title, "loss in nats per token, over tokens seen", 4.2) as axes:
        if later and max(losses) - min(losses) > 2 * (max(later) - min(later)) > 0:
            margin = 0.06 * (max(later) - min(later))
            highest = max(later) + margin
            axes.set_ylim(min(losses) - margin, highest)
            train = [point for point in train if point[1] <= highest]
            validation = [point for point in validation if point[1] <= highest]
        for name, points, style in (
            ("training", train, {"color": COLORS["orange"], "linewidth": 2.5 if len(train) < 500 else 1.2}),
            ("validation", validation, {"color": COLORS["blue"], **dots}),
        ):
            x = [tokens for tokens, _ in points]
            y = [loss for _, loss in points]
            axes.plot(x, y, label=name, clip_on=False, zorder=3, **style)
        for number, (key, name) in enumerate(name_parts(events).items()):
            points = points_of([e | {"loss": e["mixture"][key]["loss"]} for e in evaluations if "mixture" in e])
            points = [point for point in points if point[1] <= axes.get_ylim()[1]]
            style = {"color": COLORS["muted"], "linestyle": LINE_STYLES[number % 4], "linewidth": 2}
            if points:
                axes.plot(*zip(*points, strict=True), label=name.rpartition("/")[2], **style)
        end = events[-1]["step"] if events[-1]["event"] == "end" else None  # of the best model, if that is earlier
        best = points_of([event for event in evaluations if event["step"] == end])
        newest = (validation or train)[-1:]
        for tokens, loss in best or newest:
            label_point(axes, f"{loss:.2f}", tokens, loss, (11, 0) if best in ([], newest) else (-18, 20))
        axes.set_xlim(0, 1.12 * last)  # room for the label
        axes.grid(axis="y")
        axes.legend(loc="best", frameon=False, labelcolor="linecolor", handlelength=0.8)


@contextmanager
def open_chart(path: Path, title: str, subtitle: str, height: float, columns: int = 1) -> Iterator[Any]:
    """Yield empty axes, then write the file.

    height: of the axes, in inches. columns: more than one give an array of axes side by side, with the same y axis.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    style: dict[Any, Any] = {"font.size": 16, "text.color": COLORS["text"], "grid.color": COLORS["grid"]}
    style["axes.axisbelow"] = True
    with rc_context(style):
        height += HEADER
        layout = ConstrainedLayoutEngine(rect=(0.015, 0.01, 0.97, 1 - HEADER / height))
        figure = Figure((WIDTH, height), DPI, facecolor=COLORS["page"], layout=layout)
        figure.text(0.02, 1 - 0.2 / height, title, size=19, weight="bold", va="top")
        figure.text(0.02, 1 - 0.58 / height, subtitle, color=COLORS["muted"], va="top")
        subplots = figure.subplots(1, columns, sharey=True, subplot_kw={"facecolor": COLORS["page"]})
        for axes in figure.axes:
            axes.spines[:].set_visible(False)
            axes.tick_params(length=0, colors=COLORS["muted"])
            axes.locator_params(axis="x", nbins=4)
            axes.xaxis.set_major_formatter(_short)
        yield subplots
        figure.savefig(path, format="png", pil_kwargs={"optimize": True})


def label_point(axes: Any, text: str, x: float, y: float, offset: tuple[int, int] = (11, 0)) -> None:
    """Write beside a point, on top of the grid. offset: in points."""
    box = {"facecolor": axes.get_facecolor(), "edgecolor": "none", "pad": 1}
    axes.annotate(text, (x, y), offset, textcoords="offset points", weight="bold", va="center_baseline", bbox=box)


def _short(number: float, _position: float) -> str:
    unit, name = next((u for u in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if number >= u[0]), (1, ""))
    return f"{number / unit:g}{name}"
