"""The public part of a run: options listed in recipe/config.py, keys of its log listed here. The rest stays private.

The model card, training_config.yaml and metrics.jsonl on the Hub are made from what these functions return, and from
nothing else. Texts are public only if they cannot be a user's path or name: versions, hashes, Hub ids, and the samples
with their prompt.
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from recipe.config import (
    CONFIG_NAME,
    HUB_ID,
    MISSING,
    NEEDED,
    OF_HUB,
    PUBLIC_OPTIONS,
    SCHEDULE_OPTIONS,
    STANDARD_LIBRARY,
    marked,
)
from recipe.metrics import METRICS_NAME, read_events, without_nan

REPEAT_TOLERANCE = 0.05  # nats: three standard deviations of the difference between two seeds, where they were largest

SAMPLE = ("prompt", "text")
PUBLIC_EVENTS = ("start", "train", "eval", "sample", "schedule", "end")
# In these events, at any depth. Each value is a number, a version, a hash, a Hub id, or holds such values. A text is a
# short printable line, because the log may be a stranger's.
# fmt: off
PUBLIC_KEYS = {
    "event", "step", "run_id", "commit", "seed", "base_model_id", "flops_per_token",
    "mixed_precision", "precision_before", "dynamo_backend", "attn_implementation", "optim",
    "num_processes", "per_device_train_batch_size", "gradient_accumulation_steps",
    "data", "dataset_id", "dataset_config_name", "tokenizer_id", "is_own_tokenizer", "validation_split_percentage",
    "content_sha256", "tokenizer_sha256", "splits", "train", "validation", "documents", "tokens", "bytes", "rows",
    "architecture", "num_parameters", "n_layer", "n_head", "n_embd", "n_positions", "vocab_size", "is_chat",
    "environment", "gpt2_recipe", "python", "torch", "transformers", "accelerate", "datasets", "tokenizers",
    "cuda", "cudnn", "device", "num_cpus", "platform",
    "epoch", "stages",
    "loss", "learning_rate", "learning_rate_group_0", "grad_norm", "clipped_share", "loss_scale", "tokens_seen",
    "step_ms", "tokens_per_second", "mfu", "train_seconds", "skipped_steps", "share_waiting_for_data",
    "memory_bytes", "peak_memory_bytes", "train_loss",
    "perplexity", "bits_per_byte", "num_rows", "seconds", "mixture", "share",
    *SAMPLE,
    "last_step",  # of the run; its final model may be of an earlier step
    "changes", "global_batch_size", *SCHEDULE_OPTIONS,
}
# fmt: on

NESTED = (
    "data",
    "splits",
    "train",
    "validation",
    "environment",
    "mixture",
    "changes",
    "lr_scheduler_kwargs",
    "stages",
)
LINE = r".{1,200}"
FORMS = {  # of texts that a card shows as code or in links
    **dict.fromkeys(("run_id", "commit", "content_sha256", "tokenizer_sha256", "architecture"), r"[\w+]{1,64}"),
    **dict.fromkeys(("base_model_id", "dataset_id", "tokenizer_id"), rf"{HUB_ID.pattern}|{STANDARD_LIBRARY}"),
}


def is_public(key: str, value: Any) -> bool:
    """Return whether a key is listed, and its value can be shown."""
    if key not in PUBLIC_KEYS or isinstance(value, (dict, list)) != (key in NESTED):
        return False
    if not isinstance(value, str) or key in SAMPLE:
        return True
    return value.isprintable() and re.fullmatch(FORMS.get(key, LINE), value) is not None


def listed(values: Any) -> dict[str, Any]:
    """Return the public values; a number that JSON does not have becomes None."""
    public = {key: value for key, value in values.items() if is_public(key, value)} if isinstance(values, dict) else {}
    for key, value in public.items():
        if key == "mixture":  # its keys are names of folders
            public[key] = {f"dataset {number}": listed(part) for number, part in enumerate(value.values(), 1)}
        elif key == "changes":  # {option: [old, new]}
            pairs = {name: pair for name, pair in value.items() if isinstance(pair, list)}
            public[key] = {name: pair for name, pair in pairs.items() if all(is_public(name, each) for each in pair)}
        elif isinstance(value, dict) and key != "lr_scheduler_kwargs":
            public[key] = listed(value)
        elif key == "stages":
            public[key] = [listed(stage) for stage in value]
    return without_nan(public)


def public_events(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """Return the public part of the events up to a step.

    A resumed run logs a second start at its checkpoint's step. That start belongs to the steps after it.
    """
    events: list[dict[str, Any]] = []
    for event in read_events(run_dir):
        is_later_start = event["event"] == "start" and bool(events)
        last_step = step - 1 if is_later_start else step
        if event["event"] not in PUBLIC_EVENTS or event["step"] > last_step:
            continue
        public = listed(event)
        if is_later_start:
            public |= {"base_model_id": None, "data": {}}  # the first start knew which names are of the Hub
        events.append(public)
    return events


def public_options(
    run_dir: Path, events: list[dict[str, Any]], step: int, repo_id: str | None = None
) -> dict[str, Any]:
    """Return the public options of a run: a recipe that repeats it, with MISSING for what is not public.

    events: from `public_events`; they say which names were Hub ids when the run began. step: of the model; the recipe
    of a final model holds the expected loss. repo_id: the repository, which has the tokenizer.
    """
    options = read_options(run_dir)
    shown = {name: value for name, value in options.items() if name in PUBLIC_OPTIONS}
    start = next((event for event in events if event["event"] == "start"), {})
    data = start.get("data", {})
    names = {"model_name_or_path": start.get("base_model_id"), "tokenizer_name": data.get("tokenizer_id")}
    names["dataset_name"] = data.get("dataset_id")
    shown |= {name: value for name, value in names.items() if value and value == options.get(name)}
    if "dataset_name" in shown:
        shown |= {name: value for name, value in options.items() if name in marked(OF_HUB)}
    shown |= {name: MISSING for name in marked(NEEDED) if options.get(name) and name not in shown}
    if "dataset_dir" in shown:
        shown["dataset_dir"] = [MISSING] * len(options["dataset_dir"])
        shown.pop("tokenizer_vocab_size", None)  # the datasets have their tokenizer
    if repo_id and (shown.get("tokenizer_name") == MISSING or "dataset_dir" in shown):
        shown["tokenizer_name"] = repo_id
    end, evaluation = (
        next((event for event in reversed(events) if event["event"] == kind and event["step"] == step), {})
        for kind in ("end", "eval")
    )
    is_one_run = all(event["event"] != "schedule" and len(event.get("stages", ())) < 2 for event in events)
    # No options repeat a run of several stages or schedules.
    if is_one_run and "tokens_seen" in end and evaluation.get("loss") is not None:
        if shown.pop("max_minutes", None):  # another machine would make other steps in the same time
            shown["max_steps"] = end["last_step"]
            shown.pop("num_train_epochs", None)
        shown["expected_loss"] = {
            "value": round(evaluation["loss"], 3),
            "tolerance": REPEAT_TOLERANCE,
            "tokens": end["tokens_seen"],
            "dataset": data.get("dataset_id") or "the author's text",
            "source": f"hf://{repo_id}" if repo_id else "the run itself",
            "content_sha256": data.get("content_sha256"),
        }
    return shown


def write_public_files(run_dir: Path, directory: Path, step: int, repo_id: str) -> None:
    """Write the public training_config.yaml and metrics.jsonl of the model after `step` steps."""
    events = public_events(run_dir, step)
    text = yaml.safe_dump(public_options(run_dir, events, step, repo_id), sort_keys=False)
    (directory / CONFIG_NAME).write_text(text, encoding="utf-8")
    lines = (json.dumps(event, allow_nan=False) + "\n" for event in events)
    (directory / METRICS_NAME).write_text("".join(lines), encoding="utf-8")


def read_options(run_dir: Path) -> dict[str, Any]:
    """Read training_config.yaml; {} if there is none."""
    path = run_dir / CONFIG_NAME
    if not path.is_file():
        return {}
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}
