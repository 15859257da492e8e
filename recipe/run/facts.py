"""What a run is: one record, which the start table, the start event, summary.json, the card and the trackers show."""

import dataclasses
import sys
from dataclasses import asdict, dataclass, field
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
from recipe.publish.public import stage_tokens
from recipe.run.decide import Run

NAMED_FILES = 5  # a shell may expand a pattern to thousands


@dataclass(frozen=True)
class DatasetFacts:
    """Where a dataset comes from, its counts and its hash. recipe/publish/public.py lists what is published."""

    source: str  # its name, or the names of its text files
    dataset_id: str | None  # if it is on the Hub, or the demo's
    dataset_config_name: str | None
    validation_split_percentage: float | None
    splits: dict[str, dict[str, int | None]]  # split -> its counts of documents, tokens, bytes and rows
    content_sha256: str
    share: float = 1.0  # of the training examples
    mixture: dict[str, "DatasetFacts"] = field(default_factory=dict)  # its datasets, by name
    tokenizer_sha256: str | None = None
    tokenizer_id: str | None = None  # if it is on the Hub
    is_own_tokenizer: bool = False  # trained on the text


@dataclass(frozen=True)
class ModelShape:
    """The model that a run exports."""

    architecture: str
    num_parameters: int
    n_layer: int
    n_head: int
    n_embd: int
    n_positions: int
    vocab_size: int


@dataclass(frozen=True)
class StageFacts:
    """A part of a run with the same data."""

    source: str  # as in DatasetFacts
    dataset_id: str | None  # as in DatasetFacts
    content_sha256: str
    step: int  # optimizer steps before this stage
    tokens: int  # trained on before this stage


@dataclass(frozen=True)
class RunFacts:
    """The content of every `start` event of a run, apart from what only one start knows."""

    recipe: str
    command: str
    commit: str | None
    seed: int
    data: DatasetFacts
    model: ModelShape
    flops_per_token: int
    base_model: str | None
    base_model_id: str | None  # if it is on the Hub
    num_processes: int
    mixed_precision: str
    dynamo_backend: str
    attn_implementation: str
    optim: str
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    environment: dict[str, str | int | None]
    stages: list[StageFacts]


def collect_facts(run: Run, device: torch.device, model: PreTrainedModel, state: RunState) -> RunFacts:
    """Return what the run is. device: of this process."""
    config, metadata, shape = run.config, run.metadata, model.config
    tokenizer_id = hub_id(metadata.get("tokenizer") or config.tokenizer_name)
    base_model_id = hub_id(config.model_name_or_path)
    starts = read_starts(run.resume.path) if run.resume else []
    if run.resume:  # a local model may be gone by now; the run of the checkpoint knew it when it began
        first = starts[0] if starts else {}
        base_model_id, tokenizer_id = first.get("base_model_id"), first.get("data", {}).get("tokenizer_id")
    data = dataclasses.replace(
        describe_data(metadata),
        tokenizer_sha256=metadata["tokenizer_sha256"],
        tokenizer_id=tokenizer_id,
        is_own_tokenizer=metadata.get("inputs", {}).get("tokenizer", "").startswith(TRAINED_PREFIX),
    )
    if config.streaming:  # only the head of the training text has been counted
        data.splits.pop("train")
    return RunFacts(
        recipe=run.recipe,
        command=shell_command(*sys.argv),
        commit=find_commit(),
        seed=config.seed,
        data=data,
        model=ModelShape(
            architecture=type(model).__name__,
            num_parameters=count_exported_parameters(model, run.model.config.vocab_size),
            n_layer=shape.num_hidden_layers,
            n_head=shape.num_attention_heads,
            n_embd=shape.hidden_size,
            n_positions=shape.max_position_embeddings,
            vocab_size=run.model.config.vocab_size,
        ),
        flops_per_token=count_flops_per_token(shape, model.num_parameters(), config.block_size),
        base_model=config.model_name_or_path,
        base_model_id=base_model_id,
        num_processes=run.facts.num_processes,
        mixed_precision=config.mixed_precision,
        dynamo_backend=config.dynamo_backend,
        attn_implementation=config.attn_implementation,
        optim=config.optim,
        per_device_train_batch_size=run.plan.micro_batch_size,
        gradient_accumulation_steps=run.grad_accum,
        environment=describe_environment(device),
        stages=describe_stages(state, data, starts),
    )


def describe_stages(state: RunState, data: DatasetFacts, starts: list[dict[str, Any]]) -> list[StageFacts]:
    """Return the stages of the run. data: of the current one. starts: events; the newest names the other stages."""
    newest = starts[-1] if starts else {}
    texts = [*(newest.get("stages") or [newest.get("data", {})]), *({} for _ in state.stages)][: len(state.stages) - 1]
    return [
        StageFacts(
            text.get("source", "other text"), text.get("dataset_id"), stage.content_sha256, stage.step, stage.tokens
        )
        for stage, text in zip(state.stages, [*texts, asdict(data)], strict=True)
    ]


def read_starts(checkpoint: Path) -> list[dict[str, Any]]:
    """Return the start events of a checkpoint's run: in the folder that it is in, or downloaded with it."""
    events = read_events(checkpoint) or read_events(checkpoint.parent)
    return [event for event in events if event["event"] == "start"]


def describe_data(metadata: dict[str, Any], share: float = 1.0) -> DatasetFacts:
    """Return where a dataset comes from, and its counts and hash; for a mixture, also of each of its datasets."""
    source = metadata["source"]
    is_on_hub = bool(source.get("dataset_revision"))  # and not a local folder with a name of the same form
    dataset_id = hub_id(source.get("dataset_name")) if is_on_hub else None
    if source.get("dataset_name") == STANDARD_LIBRARY:
        dataset_id = STANDARD_LIBRARY
    parts = {name: describe_data(part, part["share"]) for name, part in metadata.get("mixture", {}).items()}
    mixed = ", ".join(f"{100 * part.share:.3g}% {name}" for name, part in parts.items())
    return DatasetFacts(
        source=mixed or describe_source(source),
        dataset_id=dataset_id,
        dataset_config_name=source.get("dataset_config_name") if is_on_hub else None,
        validation_split_percentage=source.get("validation_split_percentage"),
        splits={split: {key: part[key] for key in (*COUNTS, "rows")} for split, part in metadata["splits"].items()},
        content_sha256=metadata["content_sha256"],
        share=share,
        mixture=parts,
    )


def describe_source(source: dict[str, Any]) -> str:
    """Return the dataset's name, or the names of its text files. source: of the metadata of a packed dataset."""
    if name := source.get("dataset_name"):
        return ", ".join(filter(None, [name, source.get("dataset_config_name")]))
    files = [Path(file).name for file in source.get("train_files") or ["unknown"]]
    more = [f"and {len(files) - NAMED_FILES:,} more files"] if len(files) > NAMED_FILES else []
    return ", ".join(files[:NAMED_FILES] + more)


def list_stages(facts: RunFacts, state: RunState) -> list[dict[str, Any]]:
    """Return the stages of the run with the tokens of each."""
    stages = [asdict(stage) for stage in facts.stages]
    return [stage | {"tokens": own} for stage, own in zip(stages, stage_tokens(stages, state.tokens), strict=True)]
