"""Write the model card of a run, at any of its steps, from the files that the run left.

It may be written while the run continues, and by another process. The text is in card.md.jinja; this module reads
metrics.jsonl, training_config.yaml and evaluation.json, and formats what the template shows.
"""

import contextlib
import json
import math
import re
import shlex
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.utils.sha import sha_fileobj

from recipe.config import OPTIONS, STANDARD_LIBRARY
from recipe.environment import describe_machine
from recipe.errors import short_reason
from recipe.model.weights import WEIGHTS_NAME
from recipe.publish.curve import save_loss_chart
from recipe.publish.public import hub_id, public_name, read_events, read_options, split_scores

CARD_NAME, CURVE_NAME = "README.md", "loss_curve.png"
EVALUATION_NAME = "evaluation.json"  # written by scripts/evaluate_model.py
SHOWN_SAMPLES, SAMPLE_CHARACTERS, SAMPLE_WIDTH = 3, 400, 90
# Task of the recipe -> dataset of the Hub, its name on a page, and the number of its examples.
TASKS = {
    "hellaswag": ("Rowan/hellaswag", "HellaSwag", 10_042),
    "lambada": ("EleutherAI/lambada_openai", "LAMBADA", 5_153),
}
LOSSES = {"loss": ("Loss", ".4f"), "perplexity": ("Perplexity", ",.2f"), "bits_per_byte": ("Bits per byte", ".4f")}
NOT_SCORES = ("num_examples", "seconds", "stderr")
VERSIONS = ("torch", "transformers", "accelerate", "python", "cuda")
PRECISIONS = {"bf16": "bf16 autocast, fp32 weights", "fp16": "fp16 autocast, fp32 weights", "no": "fp32"}


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
    those of training_config.yaml.
    """
    directory, events = directory or run_dir, read_events(run_dir, step)
    options = {name: option.default for name, option in OPTIONS.items()} | read_options(run_dir) | (hub_options or {})
    name = (options["hub_model_id"] or run_dir.absolute().name).rpartition("/")[2]
    directory.mkdir(parents=True, exist_ok=True)
    _draw_curve(events, step, name, directory / CURVE_NAME)
    # A resumed run is started from its folder, whose name is not that of a recipe: the first start describes the run.
    start = next((event for event in events if event["event"] == "start"), {})
    data, model = start.get("data") or {}, start.get("model") or {}
    evaluations, saved = _of_kind(events, "eval"), read_evaluation(run_dir, step)
    evaluated = bool(evaluations) and evaluations[-1]["step"] == step
    task_scores = (split_scores(evaluations[-1]) if evaluated else {}) | saved.get("tasks", {})
    texts = saved.get("texts", [])
    tokens = step * options["global_batch_size"] * options["block_size"]
    rows = data.get("splits", {}).get("train", {}).get("rows")  # not known of a streamed text
    epochs = step * options["global_batch_size"] / rows if rows else None
    starts = _of_kind(events, "start")
    commit, max_steps = start.get("commit") or "", options["max_steps"]
    model_id = options["hub_model_id"] or name
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        license=options["hub_license"],
        language=options["hub_language"],
        datasets=[data["dataset_id"]] if data.get("dataset_id") else None,
        base_model=start.get("base_model_id"),
        tags=[options["model_type"], "gpt2-recipe"],
        **_results(name, evaluations[-1] if evaluated else {}, data, task_scores, texts),
        # By these two a run recognizes what it has published, see recipe/publish/hub.py.
        run_id=starts[-1].get("run_id") if starts else None,
        step=step,
    )
    values = {
        "metadata": metadata.to_yaml(),
        "name": name,
        "kind": "GPT-2" if options["model_type"] == "gpt2" else code(options["model_type"]),
        "package": f"gpt2-recipe {start['environment']['gpt2_recipe']}" if start else "gpt2-recipe",
        "step": step,
        "length": f" of {max_steps:,}" if max_steps else "",
        "is_final": step == max_steps or step in [event["step"] for event in _of_kind(events, "end")],
        "tokens": tokens,
        "model": model,
        "base": _name_base_model(start, options),
        "data": data,
        "source": _name_source(data),
        "evaluated": evaluated,
        "scores": _score_table(evaluations),
        "start_note": " (base model)" if _name_base_model(start, options) else " (untrained)",
        "tasks": list(_task_rows(task_scores)),
        "texts": [
            {"name": public_name(str(text.get("name", "text")))}
            | {key: number(text.get(key), style) for key, (_, style) in LOSSES.items()}
            for text in texts
        ],
        "num_rows": _describe_rows(evaluations, data),
        "block_size": options["block_size"],
        "has_curve": (directory / CURVE_NAME).is_file(),
        "curve_name": CURVE_NAME,
        "model_id": model_id,
        "is_published": bool(options["hub_model_id"]),
        "prompt": options["sample_prompt"],
        "revision": revision,
        "earlier": _shorten([code(branch) for branch in earlier]),
        "samples": _choose_samples(_of_kind(events, "sample")),
        "trains_tokenizer": options["tokenizer_vocab_size"],
        "training": _describe_training(events, options, step, tokens, epochs),
        "command": fence(_wrap_command(start["command"]), "bash") if start else None,
        "needs_dataset": options["dataset_dir"],
        "commit": commit.rstrip("+"),
        "is_changed": commit.endswith("+"),
        "processes": plural(start.get("num_processes", 1), "process", "es"),
        "resumed_at": ", ".join(f"{event['step']:,}" for event in starts[1:]),
        "changes": list(dict.fromkeys(_describe_changes(events))),  # a start that was killed recorded them, too
        "resume_command": _resume_command(model_id, options, resumable, step) if resumable else None,
        "languages": ", ".join(code(language) for language in options["hub_language"] or []),
        "ratio": tokens / model["num_parameters"] if model else None,
        "epochs": epochs,
    }
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, trim_blocks=True, undefined=jinja2.ChainableUndefined)
    environment.filters |= {"plain": plain, "code": code, "fence": fence, "commas": commas, "quoted": quoted}
    text = environment.get_template("card.md.jinja").render(values)
    ModelCard(re.sub(r"\n{3,}", "\n\n", text)).save(directory / CARD_NAME)


def read_evaluation(run_dir: Path, step: int) -> dict[str, Any]:
    """Read evaluation.json of the model after `step` steps; {} if there is none.

    It belongs to the weights whose SHA-256 it holds, so a copied or extended run cannot lend its scores to others.
    """
    folders = [run_dir / f"checkpoint-{step}"]
    if not any(event["step"] > step for event in read_events(run_dir)):
        folders.append(run_dir)  # this is the final model
    for folder in folders:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # missing, or of another program
            content = json.loads((folder / EVALUATION_NAME).read_text(encoding="utf-8"))
            if content["weights_sha256"] == weights_sha256(folder):
                return content
    return {}


def weights_sha256(folder: Path) -> str | None:
    """Return the SHA-256 of a model's weights, or None if the folder holds none in one file."""
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        return None
    with open(path, "rb") as file:
        return sha_fileobj(file).hex()


def _of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


def _draw_curve(events: list[dict[str, Any]], step: int, name: str, path: Path) -> None:
    """Draw the loss curve. If it cannot be drawn, the card lacks it and a warning is printed."""
    path.unlink(missing_ok=True)  # it may show another step
    if len(_of_kind(events, "train")) < 2:
        return
    title, evaluations = name if len(name) <= 26 else f"{name[:24]}...", _of_kind(events, "eval")
    if evaluations and evaluations[-1]["step"] == step:
        title += f": validation loss {number(evaluations[-1]['loss'], '.3f')}"
    try:
        save_loss_chart(events, path, title)
    except Exception as error:  # matplotlib, its fonts and the file system raise various errors
        print(f"warning: the loss curve could not be drawn ({short_reason(error)})", flush=True)
        path.unlink(missing_ok=True)


# ------------------------------------------------------------------ what the template shows


def _score_table(evaluations: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the losses of the first and the newest evaluation."""
    if not evaluations:
        return None
    columns = [evaluations[0], evaluations[-1]] if len(evaluations) > 1 else evaluations
    rows = [
        (f"validation {label.lower()}", [number(column.get(key), style) for column in columns])
        for key, (label, style) in LOSSES.items()
    ]
    return {"steps": [column["step"] for column in columns], "rows": rows}


def _task_rows(tasks: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    for task, scores in tasks.items():
        for score, value in _scores_of(scores).items():
            yield f"{TASKS.get(task, ('', task))[1]}, {score}", number(value, ",.4f"), commas(scores["num_examples"])


def _scores_of(task: dict[str, Any]) -> dict[str, float]:
    """Return the scores of a task without what else was recorded about its evaluation."""
    return {key: value for key, value in task.items() if is_finite(value) and not key.endswith(NOT_SCORES)}


def _results(
    name: str, evaluation: dict[str, Any], data: dict[str, Any], tasks: dict[str, Any], texts: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return what `ModelCardData` takes for the model-index: the scores of this step, not those of earlier ones."""
    split = {"dataset_config": data.get("dataset_config_name"), "dataset_split": "validation"}
    label = f"{data.get('source', 'held-out text')}, validation split"
    found = [(evaluation, data.get("dataset_id") or "text", label, split)]
    found += [(text, *[public_name(str(text.get("name", "text")))] * 2, {}) for text in texts]
    results = [
        EvalResult("text-generation", dataset, label, key, round(values[key], 4), metric_name=metric, **options)
        for values, dataset, label, options in found
        for key, (metric, _) in LOSSES.items()
        if is_finite(values.get(key))
    ]
    for task, values in tasks.items():
        dataset, label, size = TASKS.get(task, (task, task, None))
        if (count := values["num_examples"]) != size:
            label += f" ({count:,} examples)"  # the score of a part is not that of the task
        for score, value in _scores_of(values).items():
            metric = f"{label} {score}"
            results.append(EvalResult("text-generation", dataset, label, score, round(value, 4), metric_name=metric))
    return {"model_name": name, "eval_results": results} if results else {}


def _describe_rows(evaluations: list[dict[str, Any]], data: dict[str, Any]) -> str | None:
    known = data.get("splits", {}).get("validation", {}).get("rows")
    counts = dict.fromkeys(evaluations[at].get("num_rows") for at in (0, -1)) if evaluations else {}
    used = " and ".join(commas(count) for count in counts if count is not None)
    return f"{used} of {known:,}" if used and known else used or None


def _choose_samples(samples: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Return the steps and texts of the last sample and some before it, without blank lines."""
    count, chosen = min(SHOWN_SAMPLES, len(samples)), []
    for index in range(count):
        sample = samples[round((index + 1) * len(samples) / count) - 1]
        words = "".join(c if c.isprintable() or c == "\n" else " " for c in str(sample["text"]).expandtabs(4))
        shown = words[:SAMPLE_CHARACTERS] + " [...]" * (len(words) > SAMPLE_CHARACTERS)
        lines = [part for line in shown.splitlines() for part in textwrap.wrap(line, SAMPLE_WIDTH)]
        chosen.append((sample["step"], "\n".join(lines)))
    return chosen


def _describe_training(
    events: list[dict[str, Any]], options: dict[str, Any], step: int, tokens: int, epochs: float | None
) -> dict[str, str]:
    starts, laps, rows = _of_kind(events, "start"), _of_kind(events, "train"), {}
    if starts:
        rows["Hardware"] = ", then ".join(dict.fromkeys(map(_hardware, starts)))  # each machine once
    if seconds := laps[-1]["train_seconds"] if laps else 0:
        unit, label = (1, "seconds") if seconds < 120 else (60, "minutes") if seconds < 7200 else (3600, "hours")
        rows["Time"] = f"{seconds / unit:,.1f} {label}"
    if rate := _typical(laps, "tokens_per_second"):
        rows["Speed"] = f"{rate:,.0f} tokens per second"
        if mfu := _typical(laps, "mfu"):
            rows["Speed"] += f", {mfu:.1%} of the hardware's peak (MFU)"
    rows["Length"] = f"{plural(step, 'step')}, {tokens:,} tokens" + (f", {epochs:.2f} epochs" if epochs else "")
    if starts:
        last, environment = starts[-1], starts[-1]["environment"]
        backend = last["dynamo_backend"]
        compiled = "not compiled" if backend == "no" else f"compiled with {backend}"
        schedule = f"learning rate {options['learning_rate']:g}, {options['lr_scheduler_type']}"
        rows["Optimizer"] = f"{options['optim']}, {schedule}"
        rows["Precision"] = f"{PRECISIONS.get(last['mixed_precision'], last['mixed_precision'])}; {compiled}"
        sizes = (
            plural(last["num_processes"], "process", "es"),
            plural(last["gradient_accumulation_steps"], "micro-batch", "es"),
        )
        rows["Each step"] = " x ".join([*sizes, plural(last["per_device_train_batch_size"], "sequence")])
        rows["Versions"] = ", ".join(f"{name} {environment[name]}" for name in VERSIONS if name in environment)
    return rows


def _hardware(start: dict[str, Any]) -> str:
    machine, num_processes = describe_machine(start["environment"]), start["num_processes"]
    if "cuda" in start["environment"]:
        return f"{num_processes} x {machine}"
    return machine + (f" ({num_processes} processes)" if num_processes > 1 else "")


def _typical(laps: list[dict[str, Any]], key: str) -> float | None:
    """Return the median of a number in the log lines, except for the first, which includes compilation."""
    values = [lap[key] for lap in laps if lap.get(key) is not None]
    return statistics.median(values[1:] or values) if values else None


def _describe_changes(events: list[dict[str, Any]]) -> Iterator[str]:
    for event in _of_kind(events, "schedule"):
        changes = (f"{code(key)} is {now} instead of {before}" for key, (before, now) in event["changes"].items())
        yield f"From step {event['step'] + 1:,} on, {', '.join(changes)}."


def _name_source(data: dict[str, Any]) -> str:
    """Return the name of the text, with a link if it is on the Hub. data: of the start event."""
    if data.get("source") == STANDARD_LIBRARY:
        return "the documentation and sources of the Python standard library"
    if dataset := data.get("dataset_id"):
        config = data["dataset_config_name"]
        return f"[{dataset}](https://huggingface.co/datasets/{dataset})" + (f" ({plain(config)})" if config else "")
    return plain(data.get("source", ""))


def _name_base_model(start: dict[str, Any], options: dict[str, Any]) -> str | None:
    """Return the model that the run started from, with a link if it is on the Hub; None for random weights."""
    if model := start.get("base_model_id"):
        return f"[{model}](https://huggingface.co/{model})"
    name = start.get("base_model") or options["model_name_or_path"]
    return plain(public_name(name)) if name else None


def _resume_command(model_id: str, options: dict[str, Any], branch: str, step: int) -> str:
    """Return the commands that continue from a published training state on any machine. A finished run gets longer."""
    local = [name for name in ("dataset_dir", "train_file", "validation_file") if options[name]]
    more = "".join(f" --{name} {name.upper()}" for name in local)
    if options["tokenizer_name"] and not options["dataset_dir"] and hub_id(options["tokenizer_name"]) is None:
        more += f" --tokenizer_name {model_id}"
    if step == options["max_steps"]:
        more += f" --max_steps {2 * step}"
    return fence(
        f"hf download {model_id} training_config.yaml --revision {branch} --local-dir .\n"
        + _wrap_command(
            f"accelerate launch recipe/train.py --config training_config.yaml{more} "
            f"--resume_from_checkpoint hf://{model_id}@{branch} --output_dir runs/resumed"
        ),
        "bash",
    )


def _shorten(names: list[str]) -> str:
    return ", ".join(names if len(names) <= 5 else [*names[:2], "...", names[-1]])


# ------------------------------------------------------------------ Markdown whose structure no text can break


def plain(text: object) -> str:
    """Return a text that Markdown shows as it is, in one line."""
    return re.sub(r"([\\`*_{}\[\]<>|#~&$])", r"\\\1", " ".join(str(text).split()))


def code(text: object) -> str:
    """Return inline code; without the backquotes that would end it."""
    return f"`{' '.join(str(text).replace('`', chr(39)).split())}`"


def fence(text: str, language: str = "text") -> str:
    """Return a code block that nothing in the text can end."""
    marks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{marks}{language}\n{text}\n{marks}"


def quoted(text: str) -> str:
    """Return a Python string."""
    return json.dumps(text, ensure_ascii=False)


def commas(value: int) -> str:
    return f"{value:,}"


def plural(count: int, word: str, ending: str = "s") -> str:
    return f"{count:,} {word}" + ending * (count != 1)


def number(value: object, style: str) -> str:
    """Format a number; one that is missing or not finite is a dash."""
    return f"{value:{style}}" if is_finite(value) else "-"


def is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _wrap_command(command: str, width: int = 90) -> str:
    """Wrap a shell command between its options."""
    lines = [""]
    for word in shlex.split(command):
        if word.startswith("--") and len(lines[-1]) + len(word) > width - 20:
            lines[-1] += "\\"
            lines.append("    ")
        lines[-1] += shlex.quote(word) + " "
    return "\n".join(line.rstrip(" ") for line in lines)
