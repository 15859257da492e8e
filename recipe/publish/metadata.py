"""The metadata of a model card, as the Hub's specification wants it (huggingface/hub-docs, modelcard.md)."""

from collections.abc import Iterator
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from recipe.publish.facts import RunFacts
from recipe.publish.markdown import is_finite
from recipe.publish.public import public_name

# Task of the recipe -> dataset of the Hub, its name on a page, and the number of its examples.
TASKS = {
    "hellaswag": ("Rowan/hellaswag", "HellaSwag", 10_042),
    "lambada": ("EleutherAI/lambada_openai", "LAMBADA", 5_153),
}
LOSSES = {"loss": "Loss", "perplexity": "Perplexity", "bits_per_byte": "Bits per byte"}
NOT_SCORES = ("num_examples", "seconds", "stderr")


def card_metadata(facts: RunFacts) -> ModelCardData:
    """Return the metadata. Fields without a value are absent; results that are not finite are omitted."""
    results, data_id = list(_results(facts)), facts.data.get("dataset_id")
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        license=facts.options["hub_license"],
        language=facts.options["hub_language"],
        datasets=[data_id] if data_id else None,
        base_model=facts.start.get("base_model_id"),
        tags=[facts.options["model_type"], "gpt2-recipe"],
        model_name=facts.name if results else None,
        eval_results=results or None,
    )


def scores_of(task: dict[str, Any]) -> dict[str, float]:
    """Return the scores of a task without what else was recorded about its evaluation."""
    return {key: value for key, value in task.items() if is_finite(value) and not key.endswith(NOT_SCORES)}


def _results(facts: RunFacts) -> Iterator[EvalResult]:
    evaluation, data = facts.newest("eval"), facts.data
    if evaluation.get("step") == facts.step:  # the scores of an earlier step are not this model's
        name = f"{data.get('source', 'held-out text')}, validation split"
        options = {"dataset_config": data.get("dataset_config_name"), "dataset_split": "validation"}
        yield from _losses(evaluation, data.get("dataset_id") or "text", name, **options)
    for text in facts.texts:
        name = public_name(str(text.get("name", "text")))
        yield from _losses(text, name, name)
    for task, values in facts.tasks.items():
        dataset, name, size = TASKS.get(task, (task, task, None))
        if (count := values.get("num_examples")) != size and count is not None:
            name += f" ({count:,} examples)"  # the score of a part is not that of the task
        for score, value in scores_of(values).items():
            yield EvalResult("text-generation", dataset, name, score, value, metric_name=f"{name} {score}")


def _losses(values: dict[str, Any], dataset: str, name: str, **options: str | None) -> Iterator[EvalResult]:
    for key, label in LOSSES.items():
        if is_finite(values.get(key)):
            yield EvalResult("text-generation", dataset, name, key, values[key], metric_name=label, **options)
