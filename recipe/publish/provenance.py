"""The sections of a model card that say where the model comes from: data, training, recipe, reproduction."""

import math
from collections.abc import Sequence
from typing import Any

from recipe.command_line import CONFIGS_DIR, load_yaml
from recipe.config import IDENTITY_OPTIONS, OPTIONS, STANDARD_LIBRARY
from recipe.environment import describe_machine
from recipe.publish.facts import RunFacts
from recipe.publish.markdown import command_block, fence, plain, table
from recipe.publish.public import public_name, public_option

PACKAGES = ("torch", "transformers", "accelerate", "python", "cuda")
PRECISIONS = {"bf16": "bf16 autocast, fp32 weights", "fp16": "fp16 autocast, fp32 weights", "no": "fp32"}
SIZES = (
    ("num_processes", "process", "es"),
    ("gradient_accumulation_steps", "micro-batch", "es"),
    ("per_device_train_batch_size", "sequence", "s"),
)
# Always in the table of options; others only if they differ from the published recipe.
SHOWN_OPTIONS = (
    *("max_steps", "global_batch_size", "block_size", "optim", "learning_rate", "lr_scheduler_type"),
    *("lr_scheduler_kwargs", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm", "seed"),
)
SHAPE = ("n_layer", "n_head", "n_embd")  # what config_overrides sets and the run records
SOURCE_OPTIONS = ("dataset_name", "dataset_config_name", "model_name_or_path", "tokenizer_vocab_size")


def describe_data(facts: RunFacts) -> str:
    data = facts.data
    if not data:
        return ""
    splits, text = data["splits"], f"The text comes from {name_source(data)}."
    if percentage := data["validation_split_percentage"]:
        text += f" {percentage:g}% of it was held out for validation."
    if "train" not in splits:
        text += (
            " It was streamed, so the size of the training text is not known; the first hash is that of its beginning."
        )
    if data["tokenizer"]:
        text += f" The tokenizer is that of {plain(data['tokenizer'])}."
    elif facts.options["tokenizer_vocab_size"]:
        text += " The tokenizer, a byte-level BPE, was trained on the training text."
    counts, labels = ("documents", "tokens", "bytes", "rows"), {"train": "training"}
    rows = [[labels.get(name, name), *(f"{found[key]:,}" for key in counts)] for name, found in splits.items()]
    hashes = "\n".join(f"{key:16}  {data[key]}" for key in ("content_sha256", "tokenizer_sha256"))
    return f"## Data\n\n{text}\n\n{table(['', *counts], rows, 'right')}\n{fence(hashes, 'text')}"


def describe_training(facts: RunFacts) -> str:
    starts, rows = facts.of_kind("start"), {}
    last = starts[-1] if starts else {}
    if starts:
        rows["hardware"] = plain(", then ".join(dict.fromkeys(map(_hardware, starts))))  # each machine once
    if seconds := facts.newest("train").get("train_seconds"):
        rows["time"] = _duration(seconds)
        counts = {start["num_processes"] for start in starts if "cuda" in start["environment"]}
        if len(counts) == 1 and (count := counts.pop()) > 1:
            rows["time"] += f" ({seconds * count / 3600:,.1f} GPU hours)"
    if rate := facts.typical("tokens_per_second"):
        rows["speed"] = f"{rate:,.0f} tokens/s"
        if mfu := facts.typical("mfu"):
            rows["speed"] += f", {mfu:.1%} of the hardware's peak (MFU)"
    rows["length"] = f"{facts.step:,} steps, {facts.tokens_seen:,} tokens"
    if facts.epochs:
        rows["length"] += f", {facts.epochs:.2f} epochs"
    if starts:
        backend, environment = last["dynamo_backend"], last["environment"]
        compiled = "not compiled" if backend == "no" else f"compiled with {backend}"
        rows["precision"] = f"{PRECISIONS.get(last['mixed_precision'], last['mixed_precision'])}; {compiled}"
        sizes = (f"{last[key]:,} {word}" + ending * (last[key] != 1) for key, word, ending in SIZES)
        rows["each step"] = " x ".join(sizes)
        rows["versions"] = ", ".join(f"{name} {environment[name]}" for name in PACKAGES if name in environment)
    return "## Training\n\n" + table(["", ""], [[key, plain(value)] for key, value in rows.items()])


def describe_recipe(facts: RunFacts) -> str:
    """Show the options that determine the result. Those that differ from the published recipe are marked."""
    recipe, published = facts.start.get("recipe"), published_options(facts)
    run = _comparable(facts.options, facts)
    standard = _comparable(published, facts) if published else run
    names = [*SHOWN_OPTIONS, *SOURCE_OPTIONS, *IDENTITY_OPTIONS, *sorted({*run, *standard} - {*OPTIONS})]
    rows, defaults = [], _comparable({name: option.default for name, option in OPTIONS.items()}, facts)
    for name in dict.fromkeys(names):
        value, usual = (_cell(name, options.get(name)) for options in (run, standard))
        if value != usual:
            rows.append([f"`{name}`", f"**{value}**", usual])
        elif name in SHOWN_OPTIONS or (not published and value != _cell(name, defaults.get(name))):
            rows.append([f"`{name}`", value, ""])
    if any(usual for _, _, usual in rows):
        text = f"Values in bold differ from the published recipe `{recipe}`, whose values are on the right."
        shown = table(["option", "this run", f"`{recipe}`"], rows)
    else:
        text = f"These options are those of the published recipe `{recipe}`." if published else ""
        shown = table(["option", "value"], [row[:2] for row in rows])
    if minutes := facts.options["max_minutes"]:
        text += f" The run was limited to {minutes:g} minutes."
    for event in facts.of_kind("schedule"):
        changes = ", ".join(
            f"`{key}` is {_cell(key, now)} instead of {_cell(key, before)}"
            for key, (before, now) in event["changes"].items()
        )
        text += f" From step {event['step'] + 1:,} on, {changes}."
    return "## Recipe\n\n" + (f"{text.strip()}\n\n" if text else "") + shown


def describe_reproduction(facts: RunFacts, resumable_branches: Sequence[str]) -> str:
    start, text = facts.start, ""
    if start:
        text = command_block(start["command"]) + f"\nThis ran gpt2-recipe {start['environment']['gpt2_recipe']}"
        if commit := start["commit"]:
            text += f" at commit `{commit.rstrip('+')}`" + ", with uncommitted changes," * commit.endswith("+")
        text += f" on {start['num_processes']} process{'es' * (start['num_processes'] > 1)} with seed {start['seed']}."
        if facts.options["dataset_dir"]:
            text += " The packed dataset must have the hashes above."
        if resumed := [f"{event['step']:,}" for event in facts.of_kind("start")[1:]]:
            text += f" The run was resumed after step {', '.join(resumed)}."
        text += " "
    text += "All options are in `training_config.yaml`, all logged numbers in `metrics.jsonl`.\n"
    if resumable_branches and (model := facts.options["hub_model_id"]):
        data = " --dataset_dir DIR" * bool(facts.options["dataset_dir"])
        text += "\nThe branches also hold the state of the training. To resume from one:\n\n" + command_block(
            f"accelerate launch recipe/train.py --config training_config.yaml{data} "
            f"--resume_from_checkpoint hf://{model}@{resumable_branches[-1]} --output_dir runs/resumed"
        )
    return f"## How to reproduce it\n\n{text}"


def name_source(data: dict[str, Any]) -> str:
    """Return the name of the text, with a link if it is on the Hub. data: of the start event."""
    if data["source"] == STANDARD_LIBRARY:
        return "the documentation and sources of the Python standard library"
    if dataset := data["dataset_id"]:
        config = data["dataset_config_name"]
        return f"[{dataset}](https://huggingface.co/datasets/{dataset})" + (f" ({plain(config)})" if config else "")
    return plain(data["source"])


def name_base_model(facts: RunFacts) -> str | None:
    """Return the model that the run started from, with a link if it is on the Hub; None for random weights."""
    if model := facts.start.get("base_model_id"):
        return f"[{model}](https://huggingface.co/{model})"
    name = facts.start.get("base_model") or facts.options["model_name_or_path"]
    return plain(public_name(name)) if name else None


def published_options(facts: RunFacts) -> dict[str, Any] | None:
    """Return all options of the published recipe that the run started from, or None if it started from another."""
    recipe = facts.start.get("recipe")
    if not recipe or not (CONFIGS_DIR / f"{recipe}.yaml").is_file():
        return None
    return {name: option.default for name, option in OPTIONS.items()} | load_yaml(recipe)


def _comparable(options: dict[str, Any], facts: RunFacts) -> dict[str, Any]:
    """Return options with the overrides of the model as options of their own, and all lengths in steps."""
    shape = {key: value for key, value in facts.start.get("model", {}).items() if key in SHAPE}
    flat = {**options, **shape, **(options["config_overrides"] or {})}  # a base model may set the shape
    rows, epochs = facts.data.get("splits", {}).get("train", {}).get("rows"), options["num_train_epochs"]
    if epochs and rows:
        flat["max_steps"] = max(1, math.ceil(epochs * rows / facts.options["global_batch_size"]))
    if flat["warmup_steps"] < 1 and flat["max_steps"]:
        flat["warmup_steps"] = round(flat["warmup_steps"] * flat["max_steps"])
    return flat


def _cell(name: str, value: Any) -> str:
    """Format an option."""
    if isinstance(value, dict):
        return ", ".join(f"{plain(key)}={_cell(key, item)}" for key, item in value.items())
    if isinstance(value, bool) or value is None:
        return "-" if value is None else str(value).lower()
    if isinstance(value, (int, float)):
        return f"{int(value):,}" if value == int(value) and name != "seed" else f"{value:g}"
    return plain(public_option(name, value))


def _hardware(start: dict[str, Any]) -> str:
    machine, num_processes = describe_machine(start["environment"]), start["num_processes"]
    if "cuda" in start["environment"]:
        return f"{num_processes} x {machine}"
    return machine + (f" ({num_processes} processes)" if num_processes > 1 else "")


def _duration(seconds: float) -> str:
    unit, name = (1, "seconds") if seconds < 120 else (60, "minutes") if seconds < 7200 else (3600, "hours")
    return f"{seconds / unit:,.{int(unit == 3600)}f} {name}"
