"""Draw the results of run_ladder.py and compare_optimizers.py, and record what the README's loss curve shows."""

import json
from pathlib import Path
from statistics import fmean
from textwrap import shorten
from typing import Any

from recipe.environment import describe_machine
from recipe.publish.curve import DARK, label_point, open_chart

DRAWN = ("event", "step", "tokens_seen", "loss", "perplexity", "bits_per_byte")  # kept of a run's events


def save_ladder_chart(results: dict[str, Any], path: Path, dark: bool = False) -> None:
    """Draw a bar per rung that ran: its tokens per second, and how many times as fast as the first rung it is."""
    ladder, extras = ([e for e in results.get(name, []) if "step_ms" in e] for name in ("ladder", "extras"))
    entries = [*ladder, *extras]
    rows = [i + 0.4 * (i >= len(ladder)) for i in range(len(entries))]  # a gap before the extras
    size = results["setting"].rpartition(": ")[2].split(", ")[0]  # "30.0 M parameters"
    subtitle = f"{describe_machine(results['environment'])}, {size}"
    highest = max((entry["tokens_per_second"] for entry in entries), default=1)
    title, height = "Tokens per second, one switch at a time", 0.42 * len(rows) + 0.6
    with open_chart(path, title, subtitle, height, dark) as (axes, colors):
        for row, entry in zip(rows, entries, strict=True):
            rate, kept = entry["tokens_per_second"], entry in ladder or entry.get("kept")
            axes.barh(row, rate, height=0.7, color=colors["blue" if kept else "gray"])
            label_point(axes, f"{entries[0]['step_ms'] / entry['step_ms']:.2f}×", rate, row)
            if not kept and rate > 0.4 * highest:  # in a shorter bar there is no room
                axes.text(rate, row, "not kept ", ha="right", va="center_baseline", color=DARK["page"])
        axes.set_yticks(rows, [shorten(e["what"], 30, placeholder="…") for e in entries], color=colors["text"])
        axes.set_ylim(max(rows, default=0) + 0.6, -0.6)
        axes.set_xlim(0, 1.28 * highest)  # room for the labels
        axes.grid(axis="x")


def save_optimizer_chart(results: dict[str, Any], path: Path, dark: bool = False, seconds: bool = False) -> None:
    """Draw validation loss over tokens or seconds for AdamW's best schedule and for Muon, at their best rates.

    results: of compare_optimizers.py. seconds: at the speed that was measured for each side.
    """
    rows = {row["side"]: row for row in results["summary"]["rows"]}
    shown = [(rows[results["summary"]["best_adamw"]], "orange"), (rows["muon"], "blue")]
    runs = [run for run in results["runs"].values() if run["max_steps"] == results["max_steps"]]
    parameters, seeds = runs[0]["num_parameters"] / 1e6, min(len(row["losses"]) for row, _ in shown)
    subtitle = (
        f"nats per token, over {'seconds' if seconds else 'tokens seen'}; mean of {seeds} seed{'s' * (seeds > 1)}"
    )
    title = f"Validation loss, {parameters:.1f} M parameters"
    with open_chart(path, title, subtitle, 4.2, dark) as (axes, colors):
        for row, color in shown:
            mine = [r["curve"] for r in runs if (r["side"], r["learning_rate"]) == (row["side"], row["learning_rate"])]
            scale = 1 / row["tokens_per_second"] if seconds else 1
            points = [(point[0][0] * scale, fmean(loss for _, loss in point)) for point in zip(*mine, strict=True)]
            axes.plot(*zip(*points, strict=True), color=colors[color], linewidth=2.5, label=row["what"])
            label_point(axes, f"{points[-1][1]:.2f}", *points[-1])
        axes.set_xlim(0, 1.14 * axes.get_xlim()[1])  # room for the labels
        axes.grid(axis="y")
        axes.legend(frameon=False, labelcolor="linecolor", handlelength=0.8)


def import_run(run: Path, stem: Path) -> None:
    """Copy what `save_loss_chart` draws of a run to STEM.jsonl, and its summary to STEM.json."""
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps({key: e[key] for key in DRAWN if key in e}) for e in events if e["event"] in ("train", "eval")]
    stem.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")
    stem.with_suffix(".json").write_bytes((run / "summary.json").read_bytes())
