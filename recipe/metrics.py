"""What a run measures, in its folder: one event per line in metrics.jsonl, and its results in summary.json.

An event is a JSON object with `event` ("start", "train", "eval", "sample", "schedule", "end"), `step`, and its values,
such as `loss` (nats per token), `tokens_seen` or `step_ms`.
"""

import json
import math
from pathlib import Path
from typing import Any

from recipe.config import EVAL_TASKS

METRICS_NAME, SUMMARY_NAME = "metrics.jsonl", "summary.json"
SCORES = ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "perplexity", "perplexity_stderr", "num_examples")


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Read the events of metrics.jsonl, without lines that a kill or a full disk cut off."""
    path, events = run_dir / METRICS_NAME, []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            event = json.loads(line)
            events.append(event | {"event": str(event["event"]), "step": int(event["step"])})
        except (ValueError, KeyError, TypeError):
            continue
    return events


def read_summary(run_dir: Path, run_id: str) -> dict[str, Any]:
    """Return the results in a folder, which are those of their `step`, or {} if they are not this run's."""
    path = run_dir / SUMMARY_NAME
    summary = with_nan(json.loads(path.read_text())) if path.is_file() else {}
    return summary if summary.get("run_id") == run_id else {}


def split_scores(evaluation: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the scores of each task in an eval event, whose keys are TASK_SCORE and TASK_num_examples."""
    return {
        task: {score: evaluation[f"{task}_{score}"] for score in SCORES if f"{task}_{score}" in evaluation}
        for task in sorted(EVAL_TASKS)
        if f"{task}_num_examples" in evaluation
    }


def without_nan(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values as JSON has them: a number that is not finite becomes None, at any depth."""
    finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}
    return {key: without_nan(v) if isinstance(v, dict) else v for key, v in finite.items()}


def with_nan(values: dict[str, Any]) -> dict[str, Any]:
    """Undo `without_nan`: return the values with NaN in place of None, at any depth."""
    return {
        key: with_nan(value) if isinstance(value, dict) else math.nan if value is None else value
        for key, value in values.items()
    }
