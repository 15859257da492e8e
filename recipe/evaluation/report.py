"""The results of scripts/evaluate_model.py as a table of at most 80 columns, beside OpenAI's scores, and as JSON."""

import contextlib
import json
import textwrap
from pathlib import Path
from typing import Any

from recipe.metrics import without_nan

SIZES = ("124M", "355M", "774M", "1558M")
# Scores of OpenAI's GPT-2, zero-shot, by the same rules: {task: {score: values of SIZES}}. None: no source known.
REFERENCES = {
    "hellaswag": {"acc": (0.2892, None, None, 0.4004), "acc_norm": (0.3114, None, None, 0.5089)},
    "lambada": {"acc": (0.3256, None, None, 0.5121), "perplexity": (40.0554, None, None, 10.63)},
}
# LAMBADA as OpenAI cleaned and scored it, so not comparable.
OPENAI_LAMBADA = {"acc": (0.4599, 0.5548, 0.6012, 0.6324), "perplexity": (35.13, 15.60, 10.87, 8.63)}
SOURCES = {
    "hellaswag": "hellaswag: karpathy/build-nanogpt, hellaswag.py",
    "lambada": "lambada: EleutherAI/lm-evaluation-harness, issue 2159 (124M), model card of EleutherAI/gpt-j-6b "
    "(1558M); * OpenAI's own text and scoring, not comparable: Radford et al. 2019, Table 3",
}


def describe_results(results: dict[str, Any]) -> str:
    """Return the table: the texts, then the task scores beside OpenAI's."""
    revision = f", revision {results['revision']}" if results["revision"] else ""
    lines = [f"{results['model']}{revision}: {results['num_parameters']:,} parameters"]
    if texts := results["texts"]:
        lines += ["", f"{'text':24}{'tokens':>12}{'loss':>9}{'perplexity':>13}{'bits/byte':>11}{'bits/char':>11}"]
        for text in texts:
            name = text["name"] if len(text["name"]) < 24 else f"{text['name'][:20]}..."
            bits = [text["bits_per_byte"], text["bits_per_character"]]
            shown = "".join(f"{'-' if value is None else f'{value:.4f}':>11}" for value in bits)
            perplexity = f"{text['perplexity']:,.2f}" if text["perplexity"] < 1e8 else f"{text['perplexity']:.3e}"
            lines.append(f"{name:24}{text['num_tokens']:>12,}{text['loss']:>9.4f}{perplexity:>13}{shown}")
        windows = sorted({(text["context"], text["stride"], text.get("context_is", "")) for text in texts})
        for context, stride, rule in windows:
            lines.append(f"context {context:,} tokens{f' ({rule})' * bool(rule)}, stride {stride:,}")
    if tasks := results["tasks"]:
        lines += ["", f"{'':21}{'this model':>14}{'':13}{'GPT-2 of OpenAI':>29}"]
        lines += [f"{'task':21}{'score':>8}{'stderr':>8}{'examples':>10}" + "".join(f"{size:>8}" for size in SIZES)]
        for task, scores in tasks.items():
            for name, reference in REFERENCES[task].items():
                own = f"{_number(scores[name]):>8}{_number(scores[f'{name}_stderr']):>8}{scores['num_examples']:>10,}"
                lines.append(f"{task + ' ' + name:21}{own}" + _columns(reference))
            for name, reference in OPENAI_LAMBADA.items() if task == "lambada" else ():
                lines.append(f"{task + ' ' + name + '*':21}{'':26}" + _columns(reference))
        sources = f"Zero-shot, by the rules of lm-eval. Sources: {'; '.join(SOURCES[task] for task in tasks)}."
        lines += textwrap.wrap(sources, 80, break_on_hyphens=False, break_long_words=False)
    return "\n".join(lines)


def _columns(values: tuple[float | None, ...]) -> str:
    return "".join(f"{_number(value):>8}" for value in values)


def _number(value: float | None) -> str:
    """Return a number in at most 7 characters, or a dash."""
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) < 1 else f"{value:.2f}" if abs(value) < 10_000 else f"{value:.1e}"


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
        names = [text["name"] for text in results["texts"]]
        texts = [text for text in earlier["texts"] if text["name"] not in names] + results["texts"]
        results = {**results, "tasks": earlier["tasks"] | results["tasks"], "texts": texts}
    text = json.dumps(without_nan(results), indent=2, allow_nan=False, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
