"""The record of a run: one dictionary, made once, of which its table, log, summary, card and trackers show parts.

recipe/publish/public.py lists what is published of it.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from recipe.arguments import shell_command
from recipe.checkpoint import RunState
from recipe.config import STANDARD_LIBRARY, hub_id
from recipe.data.packed import COUNTS
from recipe.data.prepare import TRAINED_PREFIX
from recipe.environment import describe_environment, find_commit
from recipe.metrics import read_events
from recipe.model.size import count_exported_parameters, count_flops_per_token
from recipe.run.decide import Run

NAMED_FILES = 5  # a shell may expand a pattern to thousands


def describe_run(run: Run, device: torch.device, model: PreTrainedModel, state: RunState) -> dict[str, Any]:
    """Return what the run is: the content of its `start` event. device: of this process."""
    config = run.config
    metadata = run.data.metadata
    shape = model.config
    resume = run.start.resume
    tokenizer_id = hub_id(metadata.get("tokenizer") or config.tokenizer_name)
    base_model_id = hub_id(config.model_name_or_path)
    starts = read_starts(resume.path) if resume else []
    if resume:  # a local model may be gone by now; the run of the checkpoint knew it when it began
        first = starts[0] if starts else {}
        base_model_id = first.get("base_model_id")
        tokenizer_id = first.get("data", {}).get("tokenizer_id")
    data = describe_data(metadata) | {
        "tokenizer_sha256": metadata["tokenizer_sha256"],
        "tokenizer_id": tokenizer_id,  # if it is on the Hub
        "is_own_tokenizer": metadata.get("inputs", {}).get("tokenizer", "").startswith(TRAINED_PREFIX),
    }
    if config.streaming:  # only the head of the training text has been counted
        data["splits"].pop("train")
    names = (
        "seed",
        "mixed_precision",
        "dynamo_backend",
        "attn_implementation",
        "optim",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
    )
    return {
        "recipe": run.start.recipe,
        "command": shell_command(*sys.argv),
        "commit": find_commit(),
        "num_processes": run.start.machine.num_processes,
        **{name: getattr(config, name) for name in names},
        "data": data,
        "architecture": type(model).__name__,
        "num_parameters": count_exported_parameters(model, run.model.config.vocab_size),
        "n_layer": shape.num_hidden_layers,
        "n_head": shape.num_attention_heads,
        "n_embd": shape.hidden_size,
        "n_positions": shape.max_position_embeddings,
        "vocab_size": run.model.config.vocab_size,
        "flops_per_token": count_flops_per_token(shape, model.num_parameters(), config.block_size),
        "is_chat": run.model.is_chat,
        "base_model": config.model_name_or_path,
        "base_model_id": base_model_id,  # if it is on the Hub
        "environment": describe_environment(device),
        "stages": describe_stages(state, data, starts),
    }


def describe_stages(state: RunState, data: dict[str, Any], starts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the parts of the run with the same data, and the steps and tokens before each.

    data: of the current one. starts: events; the newest names the other stages.
    """
    newest = starts[-1] if starts else {}
    texts = list(newest.get("stages") or [newest.get("data", {})])
    texts += [{}] * len(state.stages)  # not known without the log of the checkpoint's run
    texts = [*texts[: len(state.stages) - 1], data]
    return [
        {
            "source": text.get("source", "other text"),
            "dataset_id": text.get("dataset_id"),
            "content_sha256": stage.content_sha256,
            "step": stage.step,
            "tokens": stage.tokens,
        }
        for stage, text in zip(state.stages, texts, strict=True)
    ]


def read_starts(checkpoint: Path) -> list[dict[str, Any]]:
    """Return the start events of a checkpoint's run: in the folder that it is in, or downloaded with it."""
    events = read_events(checkpoint) or read_events(checkpoint.parent)
    return [event for event in events if event["event"] == "start"]


def describe_data(metadata: dict[str, Any], share: float = 1.0) -> dict[str, Any]:
    """Return where a dataset comes from, its counts and its hash; for a mixture, also of each of its datasets.

    metadata: the dataset's. share: of the training examples.
    """
    source = metadata["source"]
    is_on_hub = bool(source.get("dataset_revision"))  # and not a local folder with a name of the same form
    dataset_id = hub_id(source.get("dataset_name")) if is_on_hub else None
    if source.get("dataset_name") == STANDARD_LIBRARY:
        dataset_id = STANDARD_LIBRARY
    parts = {name: describe_data(part, part["share"]) for name, part in metadata.get("mixture", {}).items()}
    mixed = ", ".join(f"{100 * part['share']:.3g}% {name}" for name, part in parts.items())
    return {
        "source": mixed or describe_source(source),
        "dataset_id": dataset_id,  # if it is on the Hub, or the demo's
        "dataset_config_name": source.get("dataset_config_name") if is_on_hub else None,
        "validation_split_percentage": source.get("validation_split_percentage"),
        "splits": {split: {key: part[key] for key in (*COUNTS, "rows")} for split, part in metadata["splits"].items()},
        "content_sha256": metadata["content_sha256"],
        "share": share,
        "mixture": parts,
    }


def describe_source(source: dict[str, Any]) -> str:
    """Return the dataset's name, or the names of its text files. source: of the metadata of a packed dataset."""
    if name := source.get("dataset_name"):
        return ", ".join(filter(None, [name, source.get("dataset_config_name")]))
    files = [Path(file).name for file in source.get("train_files") or ["unknown"]]
    more = [f"and {len(files) - NAMED_FILES:,} more files"] if len(files) > NAMED_FILES else []
    return ", ".join(files[:NAMED_FILES] + more)
