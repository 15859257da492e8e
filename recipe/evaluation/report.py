"""The results of scripts/evaluate_model.py as a table of at most 80 columns, and as JSON."""

import contextlib
import json
import math
import textwrap
from pathlib import Path
from typing import Any

from recipe.errors import UserError
from recipe.evaluation.reference import LM_EVAL, PAPER, REFERENCES, SIZES, find_reference
from recipe.model.weights import WEIGHTS_NAME
from recipe.publish.facts import EVALUATION_NAME

WIDTH = 80
SCORES = ("acc", "acc_norm", "perplexity")


def describe_results(results: dict[str, Any]) -> str:
    """Return the table: the texts, then the task scores beside those of OpenAI's models."""
    revision = f", revision {results['revision']}" if results["revision"] else ""
    lines = [f"{results['model']}{revision}: {results['num_parameters']:,} parameters"]
    if texts := results["texts"]:
        lines += ["", f"{'text':24}{'tokens':>12}{'loss':>9}{'perplexity':>13}{'bits/byte':>11}{'bits/char':>11}"]
        for text in texts:
            characters = text.get("bits_per_character")
            last = "-" if characters is None else f"{characters:.4f}"
            lines.append(
                f"{_fit(text['name'], 23):24}{text['num_tokens']:>12,}{text['loss']:>9.4f}"
                f"{text['perplexity']:>13,.2f}{text['bits_per_byte']:>11.4f}{last:>11}"
            )
        lines.append(f"context {texts[0]['context']:,} tokens, stride {texts[0]['stride']:,}")
    if results["tasks"]:
        lines += ["", *_task_lines(results["tasks"])]
    if results["harness"]:
        lines += ["", f"{'lm-eval':36}{'score':24}{'value':>10}{'stderr':>10}"]
        for task, scores in results["harness"].items():
            for name, value in scores.items():
                if "_stderr" not in name and name not in ("alias", "sample_len"):
                    error = scores.get(name.replace(",", "_stderr,") if "," in name else f"{name}_stderr")
                    lines.append(f"{_fit(task, 35):36}{_fit(name, 23):24}{_number(value):>10}{_number(error):>10}")
    return "\n".join(lines)


def _task_lines(tasks: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line per score, and the sources of the reference scores."""
    lines = [f"{'':21}{'this model':>14}{'':13}{'GPT-2 of OpenAI':>29}"]
    lines.append(f"{'task':21}{'score':>8}{'stderr':>8}{'examples':>10}" + "".join(f"{size:>8}" for size in SIZES))
    for task, scores in tasks.items():
        for name in (name for name in SCORES if name in scores):
            reference = find_reference(task, LM_EVAL, name)
            own = f"{_number(scores[name]):>8}{_number(scores[f'{name}_stderr']):>8}{scores['num_examples']:>10,}"
            lines.append(f"{task + ' ' + name:21}{own}" + _reference_columns(reference))
        for name in SCORES:
            if reference := find_reference(task, PAPER, name):
                lines.append(f"{task + ' ' + name + '*':21}{'':26}" + _reference_columns(reference))
    sources = [f"{r.task} {'/'.join(next(iter(r.scores.values())))} {_mark(r.scoring)}{r.source}" for r in REFERENCES
               if r.task in tasks]  # fmt: skip
    starred = f"; * {PAPER}, not comparable" if any(r.scoring == PAPER for r in REFERENCES if r.task in tasks) else ""
    text = f"Zero-shot, by the rules of lm-eval{starred}. Sources: {'; '.join(sources)}."
    return [*lines, *textwrap.wrap(text, WIDTH, break_on_hyphens=False, break_long_words=False)]


def _mark(scoring: str) -> str:
    return "* " if scoring == PAPER else ""


def _reference_columns(values: dict[str, float]) -> str:
    return "".join(f"{_number(values.get(size)):>8}" for size in SIZES)


def _number(value: float | None) -> str:
    """Return a number in at most 7 characters, or a dash."""
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) < 1 else f"{value:.2f}" if abs(value) < 10_000 else f"{value:.1e}"


def _fit(name: str, width: int) -> str:
    return name if len(name) <= width else f"{name[: width - 3]}..."


def choose_output_file(model: str, output_file: str | None) -> Path | None:
    """Return where to write the JSON: evaluation.json in the model's folder by default; None for a Hub id.

    Raises `UserError` if the folder of output_file does not exist.
    """
    if output_file is None:
        return Path(model) / EVALUATION_NAME if Path(model).is_dir() else None
    path = Path(output_file)
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"cannot write {path}: pass the name of a file in an existing folder as --output_file")
    return path


def write_results(results: dict[str, Any], path: Path) -> None:
    """Write valid JSON: numbers that are not finite become null.

    Results that the file already has of the same model stay, unless these replace them.
    """
    weights = path.with_name(WEIGHTS_NAME)
    if path.is_file() and weights.is_file() and path.stat().st_mtime >= weights.stat().st_mtime:
        with contextlib.suppress(ValueError, KeyError, TypeError):  # not a file of this program
            old, names = json.loads(path.read_text(encoding="utf-8")), [text["name"] for text in results["texts"]]
            kept = [text for text in old["texts"] if text["name"] not in names]
            merged = {key: old[key] | results[key] for key in ("tasks", "harness")}
            results = {**results, **merged, "texts": kept + results["texts"]}
    text = json.dumps(_finite(results), indent=2, allow_nan=False, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
