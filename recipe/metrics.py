"""What a run measures: one event per line in metrics.jsonl, its results in summary.json; and sums of events.

An event is a JSON object with `event` ("start", "train", "eval", "sample", "schedule", "end"), `step`, and its values,
such as `loss` (nats per token), `tokens_seen` or `step_ms`.
"""

import itertools
import json
import math
from pathlib import Path
from typing import Any

METRICS_NAME = "metrics.jsonl"
SUMMARY_NAME = "summary.json"
CARD_NAME = "README.md"
CURVE_NAME = "loss_curve.png"
RISES = 3  # evaluations in a row with a higher validation loss and a lower training loss


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Read the events of metrics.jsonl, without lines that a kill or a full disk cut off."""
    events = []
    path = run_dir / METRICS_NAME
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    for line in lines:
        try:
            event = json.loads(line)
            events.append(event | {"event": str(event["event"]), "step": int(event["step"])})
        except (ValueError, KeyError, TypeError, OverflowError):
            continue
    return events


def count_tokens(step: int, events: list[dict[str, Any]], block_size: int) -> int:
    """Return the tokens seen after `step` steps. A run that resumes may change its batch."""
    starts = [event for event in events if event["event"] == "start" and event["step"] <= step]
    start = starts[-1] if starts else {}
    sizes = ("num_processes", "gradient_accumulation_steps", "per_device_train_batch_size")
    per_step = math.prod(start.get(size, 0) for size in sizes) * block_size
    return start.get("tokens_seen", 0) + (step - start.get("step", 0)) * per_step


def count_stage_tokens(stages: list[dict[str, Any]], num_tokens: int) -> list[dict[str, Any]]:
    """Return the stages of a start event with their own tokens, in place of those before them.

    num_tokens: of the whole run.
    """
    edges = itertools.pairwise([*(stage["tokens"] for stage in stages), num_tokens])
    return [stage | {"tokens": after - before} for stage, (before, after) in zip(stages, edges, strict=True)]


def measure_speed(events: list[dict[str, Any]]) -> float:
    """Return the tokens per second of all laps but the first of each start, which includes its compilation.

    A lap ends with a line of the log. 0 without any.
    """
    laps = [event for event in events if event["event"] in ("start", "train")]
    pairs = [pair for pair in itertools.pairwise(laps) if all(event["event"] == "train" for event in pair)]
    tokens = sum(after["tokens_seen"] - before["tokens_seen"] for before, after in pairs)
    seconds = sum(after["train_seconds"] - before["train_seconds"] for before, after in pairs)
    if seconds > 0:
        return tokens / seconds
    only = [lap["tokens_per_second"] for lap in laps if lap["event"] == "train"]
    return only[-1] if only else 0.0


def has_begun_to_diverge(events: list[dict[str, Any]]) -> bool:
    """Return whether the last evaluation is the third in a row in which validation rose while training fell.

    events: the lines of metrics.jsonl. False if this happened before, so that a run says it once.
    """
    evaluations = [event for event in events if event["event"] == "eval" and "train_loss" in event]
    pairs = list(itertools.pairwise((event["train_loss"], event["loss"]) for event in evaluations))
    apart = [None not in (*a, *b) and b[0] < a[0] and b[1] > a[1] for a, b in pairs]
    times = [all(apart[i : i + RISES]) for i in range(len(apart) - RISES + 1)]
    return times[-1:] == [True] and sum(times) == 1


def find_train_loss(events: list[dict[str, Any]]) -> float | None:
    """Return the mean training loss since the last evaluation, including steps before a resume; None without steps.

    events: the lines of metrics.jsonl. Each has the mean since the previous line or the start. A line that is not
    finite does not count, because one of its steps was skipped.
    """
    total = 0.0
    num_steps = 0
    last = 0
    for event in events:
        if event["event"] == "eval":
            total = 0.0
            num_steps = 0
        elif event["event"] == "start":
            last = event["step"]
        elif event["event"] == "train":
            count = event["step"] - last
            last = event["step"]
            if event["loss"] is not None:
                total += count * event["loss"]
                num_steps += count
    return total / num_steps if num_steps else None


def without_nan(values: Any) -> Any:
    """Return JSON-like values with None in place of each number that JSON does not have, at any depth."""
    if isinstance(values, dict):
        return {key: without_nan(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [without_nan(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def with_nan(values: dict[str, Any]) -> dict[str, Any]:
    """Undo `without_nan`: return the values with NaN in place of None, at any depth."""
    restored = {}
    for key, value in values.items():
        if isinstance(value, dict):
            restored[key] = with_nan(value)
        else:
            restored[key] = math.nan if value is None else value
    return restored
