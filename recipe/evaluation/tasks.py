"""Zero-shot scores of tasks, by EleutherAI's lm-evaluation-harness (lm-eval): the program behind published numbers."""

import importlib.metadata
import importlib.util
import logging
from pathlib import Path
from typing import Any

from accelerate import PartialState

from recipe.errors import UserError, did_you_mean, short_reason

BOOTSTRAP_SAMPLES = 100  # for the error of a score that has no formula for it, such as a perplexity


def check_tasks(tasks: list[str]) -> None:
    """Raise `UserError` unless lm-eval is installed and knows the tasks: names, or .yaml files in its format."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError('--tasks needs lm-eval; run pip install -e ".[eval]"')
    files = [task for task in tasks if task.endswith((".yaml", ".yml"))]
    for file in files:
        if not Path(file).is_file():
            raise UserError(f"there is no file {file}")
    names = set(tasks) - set(files)
    if names:
        from lm_eval.tasks import TaskManager  # takes seconds

        known = TaskManager().all_tasks
        for name in names - set(known):
            otherwise = "`lm-eval ls tasks` lists all; for examples of your own, pass a task.yaml in its format"
            raise UserError(f"lm-eval has no task '{name}'; {did_you_mean(name, known, otherwise=otherwise)}")


def score_tasks(model: str, tasks: list[str], limit: int | None, **options: Any) -> dict[str, dict[str, Any]]:
    """Return {task: its scores, their standard errors, num_examples, version, and lm_eval's version}.

    model: folder or Hub id, which lm-eval loads in every process; they divide the examples. limit: examples per task.
    options: further arguments of lm-eval's model, such as `batch_size`. A task with examples from the Hub has their
    `dataset`, of `total_examples`. The result is the main process's; {} on others. Raises `UserError`.
    """
    import lm_eval

    evaluate: Any = lm_eval.simple_evaluate

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # one warning for each example that is cut off
    try:
        found = evaluate(
            "hf",
            {"pretrained": model, **options},
            tasks=tasks,
            device=str(PartialState().device),
            limit=limit,
            bootstrap_iters=BOOTSTRAP_SAMPLES,
            log_samples=False,
        )
    except Exception as error:  # a task without its examples, a model that lm-eval cannot load, ...
        reason = short_reason(error)
        if isinstance(error, AssertionError) and not str(error):  # how lm-eval 0.4.13 says it
            reason = "an answer is longer than the model's context"
        raise UserError(f"lm-eval could not score {', '.join(tasks)}: {reason}") from error
    return {name: _select(found, name) for name in found["configs"]} if found else {}


def _select(found: Any, name: str) -> dict[str, Any]:
    """Return what is kept of a task. lm-eval's keys are like `acc,none`: a metric and the filter of the answers."""
    values = found["results"][name]
    config = found["configs"][name]
    counts = found["n-samples"][name]
    numbers = {key: value for key, value in values.items() if "," in key and isinstance(value, (int, float))}
    scores: dict[str, Any] = {key.removesuffix(",none"): value for key, value in numbers.items()}
    scores["num_examples"] = counts["effective"]
    scores["version"] = found["versions"][name]
    scores["lm_eval"] = importlib.metadata.version("lm_eval")
    if "data_files" not in (config.get("dataset_kwargs") or {}):
        scores["dataset"] = config["dataset_path"]
        scores["total_examples"] = counts["original"]
    return scores
