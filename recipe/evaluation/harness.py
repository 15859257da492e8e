"""Run tasks of EleutherAI's lm-evaluation-harness (the optional extra lm_eval) on a loaded model."""

import functools
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from recipe.errors import UserError, did_you_mean, one_line


@functools.cache
def open_tasks(names: tuple[str, ...]) -> Any:
    """Download the data of tasks, and return lm-eval's task manager. names: tasks, groups and .yaml files.

    Raises `UserError` if lm-eval is not installed, does not know a task, or cannot load its data.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError(f'--harness requires lm-eval ({one_line(error)}); run pip install -e ".[lm_eval]"') from error
    manager = TaskManager()
    for name in names:
        if not name.endswith(".yaml") and name not in manager.all_tasks:
            hint = did_you_mean(name, manager.all_tasks, otherwise="`lm_eval ls tasks` lists all")
            raise UserError(f"lm-eval has no task '{name}'; {hint}")
    try:
        manager.load(list(names))
    except Exception as error:  # the Hub client, datasets and lm-eval raise various errors
        raise UserError(f"lm-eval cannot load {', '.join(names)}: {one_line(error)}") from error
    return manager


def run_harness(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    names: tuple[str, ...],
    batch_size: int,
    limit: int | None = None,
) -> dict[str, dict[str, float]]:
    """Return {task: {score: value}}, as lm-eval 0.4 names them. limit: only the first examples of each task."""
    manager = open_tasks(names)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    options = {"limit": limit, "log_samples": False, "bootstrap_iters": 1000}
    found = simple_evaluate(lm, tasks=list(names), task_manager=manager, **options)["results"]
    return {
        task: {key.removesuffix(",none"): value for key, value in scores.items() if isinstance(value, (int, float))}
        for task, scores in found.items()
    }
