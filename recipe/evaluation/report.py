"""The results of scripts/evaluate_model.py: as a table of at most 80 columns, as JSON, and as a curve."""

import contextlib
import json
from pathlib import Path
from typing import Any

from recipe.charts import COLORS, LINE_STYLES, open_chart
from recipe.disk import write_file
from recipe.errors import UserError
from recipe.metrics import without_nan
from recipe.publish.card import scores_of


def describe_results(results: dict[str, Any]) -> str:
    """Return the table: the texts, then the tasks."""
    revision = f", revision {results['revision']}" if results["revision"] else ""
    lines = [f"{results['model']}{revision}: {results['num_parameters']:,} parameters"]
    if texts := results["texts"]:
        lines += ["", f"{'text':24}{'tokens':>12}{'loss':>9}{'perplexity':>13}{'bits/byte':>11}{'bits/char':>11}"]
        for text in texts:
            bits = [text["bits_per_byte"], text["bits_per_character"]]
            shown = "".join(f"{'-' if value is None else f'{value:.4f}':>11}" for value in bits)
            perplexity = f"{text['perplexity']:,.2f}" if text["perplexity"] < 1e8 else f"{text['perplexity']:.3e}"
            name = shorten(text["name"], 23)
            lines.append(f"{name:24}{text['num_tokens']:>12,}{text['loss']:>9.4f}{perplexity:>13}{shown}")
        windows = sorted({(text["context"], text["stride"], text.get("context_is", "")) for text in texts})
        for context, stride, rule in windows:
            reason = f" ({rule})" if rule else ""
            lines.append(f"context {context:,} tokens{reason}, stride {stride:,}")
    if tasks := results["tasks"]:
        lines += ["", f"{'task':48}{'score':>10}{'stderr':>10}{'examples':>12}"]
        for task, values in tasks.items():
            for name, score in scores_of(values).items():
                metric, comma, answers = name.partition(",")  # how answers are found in a text, unless it is "none"
                error = values.get(f"{metric}_stderr{comma}{answers}")
                numbers = "".join(f"{format_score(value):>10}" for value in (score, error))
                lines.append(f"{shorten(f'{task} {name}', 47):48}{numbers}{values['num_examples']:>12,}")
        lines.append(f"zero-shot unless the task says otherwise, by lm-eval {values['lm_eval']}")
    return "\n".join(lines)


def format_score(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if value < 10_000 else f"{value:.2e}"


def shorten(name: str, width: int) -> str:
    return name if len(name) <= width else f"{name[: width - 3]}..."


def read_evaluations(path: Path) -> list[dict[str, Any]]:
    """Return the evaluations in a file, oldest first; [] if there is none. Raises `UserError` for another file."""
    if not path.is_file():
        return []
    with contextlib.suppress(ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        evaluations = content if isinstance(content, list) else [content]  # one, of an earlier version
        if all(isinstance(each, dict) and "weights_sha256" in each for each in evaluations):
            return evaluations
    raise UserError(f"{path} does not hold evaluations; pass another --output_file")


def append_evaluation(results: dict[str, Any], path: Path) -> None:
    """Append to a file of evaluations. Numbers that are not finite become null."""
    text = json.dumps(without_nan([*read_evaluations(path), results]), indent=2, allow_nan=False, ensure_ascii=False)
    write_file(path, text + "\n")


def draw_scores(evaluations: dict[int, dict[str, Any]], title: str, path: Path) -> None:
    """Draw the scores of a run's checkpoints, {step: results}: accuracies, or without any, losses of texts."""
    accuracies: dict[str, list[tuple[int, float]]] = {}
    losses: dict[str, list[tuple[int, float]]] = {}
    for step, results in evaluations.items():
        for task, values in results["tasks"].items():
            name = next((name for name in ("acc_norm", "acc") if name in values), None)
            if name is not None:
                accuracies.setdefault(f"{task} {name}", []).append((step, values[name]))
        for text in results["texts"]:
            losses.setdefault(text["name"], []).append((step, text["loss"]))
    what = "accuracy" if accuracies else "loss in nats per token"
    with open_chart(path, shorten(title, 40), f"{what}, over steps", 4.2) as axes:
        colors = [COLORS["blue"], COLORS["orange"], COLORS["muted"]]
        for number, (name, points) in enumerate((accuracies or losses).items()):
            style = {"color": colors[number % 3], "linestyle": LINE_STYLES[number % 4]}
            axes.plot(*zip(*points, strict=True), label=shorten(name, 30), marker="o", linewidth=2, **style)
        axes.grid(axis="y")
        axes.legend(loc="best", frameon=False, labelcolor="linecolor")
