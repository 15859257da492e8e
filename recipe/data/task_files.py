"""HellaSwag and LAMBADA, from a local file of their public schema or from the Hub -> examples.

The texts are made as EleutherAI's lm-evaluation-harness 0.4 makes them, so that scores can be compared.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from recipe.errors import UserError, one_line


class Example(NamedTuple):
    """A context, its possible continuations (without the space in between), and the index of the correct one."""

    context: str
    choices: list[str]
    label: int


class Source(NamedTuple):
    """Where a task is on the Hub, in files that need no loading script, and how a row becomes an example."""

    hub_id: str
    config: str | None
    split: str
    columns: dict[str, type | tuple[type, ...]]  # those that are read, of the local file as well
    to_example: Callable[[dict], Example]


def hellaswag_example(row: dict) -> Example:
    """Return the topic and the beginning of a scene, and its four endings."""
    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return Example(_without_markup(context), list(map(_without_markup, row["endings"])), int(row["label"]))


def lambada_example(row: dict) -> Example:
    """Return a passage without its last word, and that word."""
    *context, word = row["text"].split(" ")
    return Example(" ".join(context), [word], 0)


def _without_markup(text: str) -> str:
    """Remove what HellaSwag's WikiHow texts keep of the pages: titles and brackets."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


_HELLASWAG_COLUMNS = {"activity_label": str, "ctx_a": str, "ctx_b": str, "endings": list, "label": (int, str)}
SOURCES = {
    "hellaswag": Source("Rowan/hellaswag", None, "validation", _HELLASWAG_COLUMNS, hellaswag_example),
    "lambada": Source("EleutherAI/lambada_openai", "default", "test", {"text": str}, lambada_example),
}


@functools.cache
def read_examples(task: str, path: str | None) -> list[Example]:
    """Read a task from a .jsonl file, or from the Hub if there is no path. Raises `UserError` for another schema."""
    source = SOURCES[task]
    where = path or source.hub_id
    rows = _read_jsonl(path) if path else _read_hub(source)
    examples = [_check(task, source, row, f"{where}, row {number}") for number, row in enumerate(rows, start=1)]
    if not examples:
        raise UserError(f"{where} is empty; the task {task} needs at least one example")
    return examples


def _check(task: str, source: Source, row: Any, where: str) -> Example:
    found = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
    if not isinstance(row, dict) or not all(isinstance(row.get(key), kind) for key, kind in source.columns.items()):
        expected = f"expected {', '.join(source.columns)}, as in the files of {source.hub_id}"
        raise UserError(f"{where} is no {task} example: it has {found}; {expected}")
    try:
        example = source.to_example(row)
    except (ValueError, AttributeError) as error:  # an empty label; an ending that is not text
        raise UserError(f"{where} is no {task} example: {one_line(error)}") from error
    if not 0 <= example.label < len(example.choices):
        raise UserError(f"{where}: label {example.label} is not one of its {len(example.choices)} endings")
    return example


def _read_jsonl(path: str) -> Iterator[dict]:
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except ValueError as error:
                        raise UserError(f"{path}, line {number} is not JSON: {one_line(error)}") from error
    except FileNotFoundError as error:
        raise UserError(f"there is no task file {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {one_line(error)}") from error


def _read_hub(source: Source) -> Iterable[dict]:
    import datasets  # not at the top, because training on a packed dataset does not need it

    try:
        return datasets.load_dataset(source.hub_id, source.config, split=source.split)
    except Exception as error:  # the Hub client, datasets and the file system raise various errors
        task = next(name for name, known in SOURCES.items() if known is source)
        remedy = f"pass {task}=FILE.jsonl to read a local file"
        raise UserError(f"cannot download {source.hub_id}: {one_line(error)}; {remedy}") from error
