"""Write the model card of a run, at any of its steps, from the files that the run left.

Another process may write it, while the run continues. The template card.md.jinja formats the public part of
metrics.jsonl and training_config.yaml (recipe/publish/public.py), and the scores in evaluation.json.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.utils.sha import sha_fileobj
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from recipe.charts import name_parts, save_loss_chart
from recipe.config import DEFAULTS, STANDARD_LIBRARY, is_missing
from recipe.environment import describe_machine
from recipe.errors import printable, short_reason
from recipe.metrics import (
    CARD_NAME,
    CURVE_NAME,
    count_stage_tokens,
    count_tokens,
    measure_speed,
)
from recipe.model.weights import WEIGHTS_NAME
from recipe.publish.public import public_events, public_options, read_options

EVALUATION_NAME = "evaluation.json"  # written by scripts/evaluate_model.py
SHOWN_SAMPLES = 3
LM_EVAL = "https://github.com/EleutherAI/lm-evaluation-harness"
NOT_SCORES = ("num_examples", "total_examples", "version")  # the other numbers of a task
SIGNATURE = re.compile(r"^card_sha256: (\w+)\n", re.MULTILINE)  # in a card's metadata: the hash of the rest
LOSSES = {"loss": "loss", "perplexity": "perplexity", "bits_per_byte": "bits per byte"}


def write_model_card(
    run_dir: Path,
    step: int,
    directory: Path | None = None,
    *,
    revision: str | None = None,
    earlier: Sequence[str] = (),
    resumable: str | None = None,
    hub_options: dict[str, Any] | None = None,
) -> None:
    """Write README.md and loss_curve.png into `directory` (default: run_dir) for the model after `step` steps.

    revision: branch of the Hub repository that holds this card, if it is not main. earlier: branches of earlier
    checkpoints, oldest first. resumable: the branch of the newest published training state. hub_options: replace
    those of training_config.yaml. If the card in `directory` is this run's and was edited, it stays.
    """
    directory = directory or run_dir
    directory.mkdir(parents=True, exist_ok=True)
    values = collect_values(run_dir, step, directory, hub_options or {})
    # The curve shows the whole run, although the best model may be of an earlier step.
    draw_curve(public_events(run_dir, values["last_step"]), values["name"], directory / CURVE_NAME)
    values |= {"revision": revision, "earlier": earlier, "resumable": resumable}
    values["curve"] = CURVE_NAME if (directory / CURVE_NAME).is_file() else None
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, trim_blocks=True, undefined=jinja2.ChainableUndefined)
    environment.filters |= {"plain": plain, "fence": fence, "number": number, "json": json.dumps, "repr": repr}
    environment.filters["machine"] = describe_machine
    text = environment.get_template("card.md.jinja").render(values)
    path = directory / CARD_NAME
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    path.write_text(sign(ModelCard(re.sub(r"\n{3,}", "\n\n", text)), before), encoding="utf-8")


def sign(card: ModelCard, before: str) -> str:
    """Return a card with the hash of itself, by which an edit shows; or the edited card before it, with new results.

    The hash of an edited card never fits again, so it stays until somebody deletes the hash. A page without a run's id
    is its owner's and stays as it is; another run's card does not stay.
    """
    if before:
        edited = ModelCard(before, ignore_metadata_errors=True)
        signature = SIGNATURE.search(before)
        if edited.data.get("run_id") is None:
            return before
        if signature and signature[1] != short_hash(before) and edited.data.get("run_id") == card.data.get("run_id"):
            for key in ("step", "model_name", "eval_results"):
                edited.data[key] = card.data.get(key)
            print(f"the edited {CARD_NAME} stays, with the results of step {card.data['step']:,}", flush=True)
            return str(edited)
    return str(card).replace("\n---\n", f"\ncard_sha256: {short_hash(str(card))}\n---\n", 1)


def short_hash(text: str) -> str:
    return hashlib.sha256(SIGNATURE.sub("", text, count=1).encode()).hexdigest()[:16]


def collect_values(run_dir: Path, step: int, directory: Path, hub_options: dict[str, Any]) -> dict[str, Any]:
    """Return what the template shows: the public part of the log and the options, and the scores of this step."""
    events = public_events(run_dir, step)
    starts, train_events, evaluations, samples, changes = (
        [event for event in events if event["event"] == kind]
        for kind in ("start", "train", "eval", "sample", "schedule")
    )
    requested = read_options(run_dir) | hub_options
    shown = public_options(run_dir, events, step, requested.get("hub_model_id"))
    options: dict[str, Any] = DEFAULTS | shown
    start = starts[0] if starts else {}  # the first one describes the run; a resumed run starts again
    data = start.get("data", {})
    rows = data.get("splits", {}).get("train", {}).get("rows")
    model_id = requested.get("hub_model_id") or run_dir.absolute().name
    name = model_id.rpartition("/")[2]
    samples = [sample for sample in samples if sample["step"] > 0]  # the first is of the untrained model
    evaluation = evaluations[-1] if evaluations and evaluations[-1]["step"] == step else {}
    ends = [event for event in events if event["event"] == "end" and event["step"] == step]
    is_demo = data.get("dataset_id") == STANDARD_LIBRARY
    names = name_parts(events)
    mixture = data.get("mixture", {})
    results = list(list_losses(evaluation, data, "the mixture" if mixture else None))
    for key, part in mixture.items():
        results += list_losses(evaluation.get("mixture", {}).get(key, {}), part, names[key])
    results += list_scores(read_tasks(run_dir, step, directory))
    dataset_ids = [dataset_hub_id(part) for part in (data, *mixture.values())]
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        license=requested.get("hub_license"),
        language=requested.get("hub_language"),
        datasets=[dataset_id for dataset_id in dataset_ids if dataset_id] or None,
        base_model=start.get("base_model_id"),
        tags=[options["model_type"], "gpt2-recipe"],
        model_name=name if results else None,
        eval_results=results or None,
        # By these two, an upload knows whose model this is, and whether its own is newer.
        run_id=starts[-1].get("run_id") if starts else None,
        step=step,
    )
    last = train_events[-1] if train_events else None
    num_tokens = count_tokens(step, events, options["block_size"])
    speed = measure_speed(events)
    stages = count_stage_tokens(start.get("stages") or [{"tokens": 0}], num_tokens)
    phases = {start["step"]: start for start in starts}  # a start may have ended before its first step
    return {
        "metadata": metadata.to_yaml(),
        "name": name,
        "model_id": model_id,
        "step": step,
        "options": options,
        "events": events,
        "start": start,
        "starts": starts,
        "changes": changes,
        "data": data,
        "results": results,
        "is_published": bool(requested.get("hub_model_id")),
        "is_final": step == options["max_steps"] or bool(ends),
        "last_step": ends[-1].get("last_step", step) if ends else step,
        "is_demo": is_demo,
        "is_stock": start.get("architecture") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
        "phases": phases.values(),
        "resumes": [step for step in phases if step > 0],
        "has_base": bool(requested.get("model_name_or_path")),
        "evaluation": evaluation,
        "prompt": samples[-1]["prompt"] if samples else options["sample_prompt"] or "The",
        "samples": samples[-SHOWN_SAMPLES:],
        "needed": [name for name, value in shown.items() if is_missing(value)],
        "tokens": num_tokens,
        "stages": stages if len(stages) > 1 else (),
        "stage_tokens": stages[-1]["tokens"],
        "parts": [(names[key], part) for key, part in mixture.items()],
        # A streamed text has no rows, and each dataset of a mixture has its own epochs.
        "epochs": stages[-1]["tokens"] / options["block_size"] / rows if rows and not mixture else None,
        "train_seconds": last["train_seconds"] if last else None,
        "speed": speed,
        "mfu": speed / last["tokens_per_second"] * (last["mfu"] or 0) if last else None,
    }


def read_tasks(run_dir: Path, step: int, directory: Path) -> dict[str, dict[str, Any]]:
    """Read the scores of the weights in `directory`, as evaluate_model.py has written them. The texts stay private.

    If a task was scored several times, the newest scores on the most examples count. The files hold the SHA-256 of
    their weights, so the scores of a copied or extended run never apply to other ones.
    """
    tasks: dict[str, dict[str, Any]] = {}
    digest = weights_sha256(directory)
    for folder in (run_dir, run_dir / f"checkpoint-{step}"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # missing, or of another program
            for evaluation in json.loads((folder / EVALUATION_NAME).read_text(encoding="utf-8")):
                if evaluation["weights_sha256"] != digest:
                    continue
                for task, values in evaluation["tasks"].items():
                    if task not in tasks or values["num_examples"] >= tasks[task]["num_examples"]:
                        tasks[task] = values
    return tasks


def weights_sha256(folder: Path) -> str | None:
    """Return the SHA-256 of a model's weights, or None if the folder holds none in one file.

    The header does not count: the exported model's names its loss, a checkpoint's does not.
    """
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        return None
    with open(path, "rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        return sha_fileobj(file).hex()


def dataset_hub_id(data: dict[str, Any]) -> str | None:
    """Return the text's Hub id, if it has one. data: of a start event, or of one dataset of its mixture."""
    return None if data.get("dataset_id") == STANDARD_LIBRARY else data.get("dataset_id")


def list_losses(evaluation: dict[str, Any], data: dict[str, Any], name: str | None = None) -> Iterator[EvalResult]:
    """Yield the validation results of this step, for the model-index and the table.

    data: of the start event, or of one dataset of its mixture, which has this name.
    """
    dataset = dataset_hub_id(data)
    label = f"{name or dataset or 'held-out text'}, validation split"
    config_name = data.get("dataset_config_name") or (None if dataset else name)  # results of one config are one entry
    for key, metric in LOSSES.items():
        if evaluation.get(key) is not None:
            split = {"dataset_config": config_name, "dataset_split": "validation"}
            value = round(evaluation[key], 4)
            yield EvalResult("text-generation", dataset or "text", label, key, value, metric_name=metric, **split)


def list_scores(tasks: dict[str, dict[str, Any]]) -> Iterator[EvalResult]:
    """Yield the scores of lm-eval's tasks on their own examples; those on local files cannot be repeated by others.

    The label counts the examples, because a part's score is not the task's score.
    """
    for task, values in tasks.items():
        if dataset := values.get("dataset"):
            label = f"{task} ({values['num_examples']:,} of {values['total_examples']:,} examples)"
            source = f"lm-eval {values['lm_eval']}, task version {values['version']}"
            for name, score in scores_of(values).items():
                result = EvalResult(
                    "text-generation", dataset, label, name, round(score, 4), metric_name=f"{task} {name}"
                )
                result.source_name = source
                result.source_url = LM_EVAL
                yield result


def scores_of(values: dict[str, Any]) -> dict[str, float]:
    """Return the scores of a task, without their errors."""
    numbers = {key: value for key, value in values.items() if isinstance(value, (int, float))}
    return {key: value for key, value in numbers.items() if key not in NOT_SCORES and "_stderr" not in key}


def draw_curve(events: list[dict[str, Any]], name: str, path: Path) -> None:
    """Draw the loss curve. If it cannot be drawn, the card lacks it and a warning is printed."""
    path.unlink(missing_ok=True)  # it may show another step
    if sum(event["event"] == "train" for event in events) < 2:
        return
    try:
        save_loss_chart(events, path, name if len(name) <= 40 else f"{name[:38]}...")
    except Exception as error:  # matplotlib, its fonts and the file system raise various errors
        print(f"warning: the loss curve could not be drawn ({short_reason(error)})", flush=True)
        path.unlink(missing_ok=True)


# ------------------------------------------------------------------ filters: no text can break the structure of a page


def plain(text: object) -> str:
    """Return a text that Markdown shows as it is, in one line."""
    text = "not set" if text is None else " ".join(str(text).split())
    return re.sub(r"([\\`*_{}\[\]<>|#~&$])", r"\\\1", text)


def fence(text: str) -> str:
    """Return a code block that nothing in the text can end."""
    marks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{marks}text\n{printable(text.expandtabs(4))}\n{marks}"


def number(value: object, style: str = ",") -> str:
    """Format a number; a missing one is a dash."""
    return f"{value:{style}}" if isinstance(value, (int, float)) else "-"
