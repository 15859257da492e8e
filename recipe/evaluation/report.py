"""The results of scripts/evaluate_model.py: as a table of at most 80 columns, as JSON, and as a curve."""

import contextlib
import json
from pathlib import Path
from typing import Any

from recipe.charts import LINE_STYLES, open_chart
from recipe.checkpoint import checkpoint_step, list_checkpoints
from recipe.metrics import without_nan
from recipe.publish.card import EVALUATION_NAME, scores_of


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
            lines.append(f"context {context:,} tokens{f' ({rule})' * bool(rule)}, stride {stride:,}")
    if tasks := results["tasks"]:
        lines += ["", f"{'task':48}{'score':>10}{'stderr':>10}{'examples':>12}"]
        for task, values in tasks.items():
            for name, score in scores_of(values).items():
                metric, comma, answers = name.partition(",")  # how answers are found in a text, unless it is "none"
                error = values.get(f"{metric}_stderr{comma}{answers}")
                numbers = "".join(f"{format_score(value):>10}" for value in (score, error))
                lines.append(f"{shorten(f'{task} {name}', 47):48}{numbers}{values['num_examples']:>12,}")
        lines += [f"zero-shot unless the task says otherwise, by lm-eval {values['lm_eval']}"]
    return "\n".join(lines)


def format_score(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if value < 10_000 else f"{value:.2e}"


def shorten(name: str, width: int) -> str:
    return name if len(name) <= width else f"{name[: width - 3]}..."


def read_results(path: Path, identity: dict[str, str | None]) -> dict[str, Any] | None:
    """Return the results in a file if they are of this model, else None.

    identity: the SHA-256 of the model's weights, and its commit on the Hub.
    """
    with contextlib.suppress(ValueError, KeyError, TypeError):  # not a file of this program
        results = json.loads(path.read_text(encoding="utf-8"))
        if any(identity.values()) and {key: results[key] for key in identity} == identity:
            return results
    return None


def save_results(results: dict[str, Any], earlier: dict[str, Any] | None, path: Path) -> None:
    """Write valid JSON: numbers that are not finite become null. earlier: results that these add to, or replace."""
    if earlier:
        hashes = [text["content_sha256"] for text in results["texts"]]
        texts = [text for text in earlier["texts"] if text.get("content_sha256") not in hashes] + results["texts"]
        results = {**results, "tasks": earlier["tasks"] | results["tasks"], "texts": texts}
    text = json.dumps(without_nan(results), indent=2, allow_nan=False, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def draw_scores(run_dir: Path) -> Path:
    """Draw the scores of a run's checkpoints over its steps: accuracies, or without any, losses. Returns the file."""
    accuracies: dict[str, list[tuple[int, float]]] = {}
    losses: dict[str, list[tuple[int, float]]] = {}
    for checkpoint in list_checkpoints(run_dir):
        with contextlib.suppress(OSError, ValueError):  # it has not been evaluated
            results = json.loads((checkpoint / EVALUATION_NAME).read_text(encoding="utf-8"))
            step = checkpoint_step(checkpoint)
            for task, values in results["tasks"].items():
                if "acc" in values:
                    accuracies.setdefault(task, []).append((step, values["acc"]))
            for text in results["texts"]:
                losses.setdefault(text["name"], []).append((step, text["loss"]))
    path, what = run_dir / "scores.png", "accuracy" if accuracies else "loss in nats per token"
    with open_chart(path, shorten(run_dir.absolute().name, 40), f"{what}, over steps", 4.2) as (axes, colors):
        for number, (name, points) in enumerate((accuracies or losses).items()):
            style = {"color": colors[("blue", "orange", "muted")[number % 3]], "linestyle": LINE_STYLES[number % 4]}
            axes.plot(*zip(*points, strict=True), label=shorten(name, 30), marker="o", linewidth=2, **style)
        axes.grid(axis="y")
        axes.legend(loc="best", frameon=False, labelcolor="linecolor")
    return path
