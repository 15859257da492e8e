"""What a model card states about a run at one of its steps, read from the files that the run left."""

import contextlib
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.config import OPTIONS
from recipe.model.weights import WEIGHTS_NAME
from recipe.publish.public import read_events, read_options

EVALUATION_NAME = "evaluation.json"  # written by scripts/evaluate_model.py


@dataclass(frozen=True)
class RunFacts:
    """A run up to a step. Older runs lack start events, new ones evaluations: whatever is unknown is empty.

    events: of metrics.jsonl, up to the step. options: of training_config.yaml, with the defaults that it omits.
    tasks: {name: {score: value, "num_examples": n}}. texts: [{"name", "loss", "perplexity", "bits_per_byte"}].
    """

    name: str
    step: int
    events: list[dict[str, Any]]
    options: dict[str, Any]
    tasks: dict[str, dict[str, Any]]
    texts: list[dict[str, Any]]

    @property
    def is_final(self) -> bool:
        """Whether the run ended with this step."""
        ends = [event["step"] for event in self.of_kind("end")]
        return self.step in ends or self.step == self.options["max_steps"]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def newest(self, kind: str) -> dict[str, Any]:
        return next(reversed(self.of_kind(kind)), {})

    @property
    def start(self) -> dict[str, Any]:
        """The first start: a resumed run is started from its folder, whose name is not that of a recipe."""
        return next(iter(self.of_kind("start")), {})

    @property
    def data(self) -> dict[str, Any]:
        return self.start.get("data") or {}

    @property
    def tokens_seen(self) -> int:
        return self.step * self.options["global_batch_size"] * self.options["block_size"]

    @property
    def epochs(self) -> float | None:
        """Passes over the training rows; None if their number is not known, as in a streamed text."""
        rows = self.data.get("splits", {}).get("train", {}).get("rows")
        return self.step * self.options["global_batch_size"] / rows if rows else None

    def typical(self, key: str) -> float | None:
        """Return the median of a number in the log lines, except for the first, which includes compilation."""
        values = [event[key] for event in self.of_kind("train") if event.get(key) is not None]
        return statistics.median(values[1:] or values) if values else None


def read_facts(run_dir: Path, step: int, hub_options: dict[str, Any] | None = None) -> RunFacts:
    """Read what a run left on disk, also while it continues. hub_options: replace those of training_config.yaml."""
    events = read_events(run_dir, step)
    options = {name: option.default for name, option in OPTIONS.items()} | read_options(run_dir) | (hub_options or {})
    name = (options["hub_model_id"] or run_dir.absolute().name).rpartition("/")[2]
    evaluated = next((event for event in reversed(events) if event["event"] == "eval" and event["step"] == step), {})
    saved = read_evaluation(run_dir, step)
    tasks, texts = saved.get("tasks"), saved.get("texts")
    tasks = {k: v for k, v in tasks.items() if isinstance(v, dict)} if isinstance(tasks, dict) else {}
    texts = [text for text in texts if isinstance(text, dict)] if isinstance(texts, list) else []
    return RunFacts(name, step, events, options, split_scores(evaluated) | tasks, texts)


def split_scores(evaluation: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the scores of each task in an eval event, whose keys are TASK_SCORE and TASK_num_examples."""
    tasks = sorted(key.removesuffix("_num_examples") for key in evaluation if key.endswith("_num_examples"))
    scores: dict[str, dict[str, Any]] = {task: {} for task in tasks}
    for key, value in evaluation.items():
        if owners := [task for task in tasks if key.startswith(f"{task}_")]:
            task = max(owners, key=len)
            scores[task][key.removeprefix(f"{task}_")] = value
    return scores


def read_evaluation(run_dir: Path, step: int) -> dict[str, Any]:
    """Read evaluation.json of the model of this step. Returns {} if there is none, or if the model is newer."""
    paths = [run_dir / EVALUATION_NAME, run_dir / f"checkpoint-{step}" / EVALUATION_NAME]
    if paths[0].is_file() and any(event["step"] > step for event in read_events(run_dir)):
        del paths[0]  # that of the final model
    for path in paths:
        weights = path.with_name(WEIGHTS_NAME)
        if path.is_file() and weights.is_file() and path.stat().st_mtime >= weights.stat().st_mtime:
            with contextlib.suppress(ValueError):  # cut off, or being written
                content = json.loads(path.read_text(encoding="utf-8"))
                if isinstance(content, dict):
                    return content
    return {}
