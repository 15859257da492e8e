"""What a run starts from, and what may change when it continues one of its checkpoints."""

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from recipe.arguments import typed_names
from recipe.checkpoint import list_checkpoints, read_state
from recipe.config import IDENTITY_OPTIONS, OPTIONS, SCHEDULE_OPTIONS, TrainConfig
from recipe.errors import UserError
from recipe.model.build import model_options
from recipe.optim.schedule import count_warmup_steps, learning_rate_scale

ORIGIN_NAME = ".resumed_from"  # in output_dir: the checkpoint with which its run began


def choose_start(config: TrainConfig, output_dir: Path) -> str | None:
    """Return where the run in output_dir starts: `latest` (of its own checkpoints), a folder, hf://..., or None.

    The same command can be given again and again: the checkpoint that it names is where the run starts until it has
    newer ones. `auto` comes back if there is nothing to start from. Raises `UserError` if the run cannot start there.
    """
    named, own = config.resume_from_checkpoint, list_checkpoints(output_dir)
    if named in (None, "latest"):
        return named
    origin = read_origin(output_dir)
    if named == "auto":
        if not own and origin and not origin.startswith("hf://") and not Path(origin).exists():
            remedy = f"restore it, or delete {output_dir / ORIGIN_NAME} to start at step 0"
            raise UserError(f"the run in {output_dir} began with {origin}, which is gone; {remedy}")
        return "latest" if own else origin or "auto"
    found, here = Path(named).absolute(), output_dir.absolute()
    if own and (origin == origin_of(config) or found in (here, own[-1].absolute())):
        return "latest"
    if own and found.parent == here:
        remedy = f"pass auto to continue from there, or another --output_dir to start from {found.name}"
        raise UserError(f"{output_dir} contains newer checkpoints, up to {own[-1].name}; {remedy}")
    return named


def origin_of(config: TrainConfig) -> str:
    """Return the checkpoint that the command names, independent of the working directory."""
    named = config.resume_from_checkpoint
    return named if named.startswith("hf://") else str(Path(named).absolute())


def read_origin(output_dir: Path) -> str | None:
    path = output_dir / ORIGIN_NAME
    return path.read_text().strip() if path.is_file() else None


def record_origin(config: TrainConfig, output_dir: Path, resume_dir: Path | None) -> None:
    """Record the checkpoint that the command names, so that `auto` finds it; a new run has none."""
    if resume_dir is None:
        (output_dir / ORIGIN_NAME).unlink(missing_ok=True)
    elif config.resume_from_checkpoint not in ("auto", "latest"):
        (output_dir / ORIGIN_NAME).write_text(f"{origin_of(config)}\n")


def resolve_length(config: TrainConfig, num_train_rows: int, content: dict[str, Any] | None = None) -> TrainConfig:
    """Turn `num_train_epochs` into steps; a last, partial step counts as one.

    content: from `read_state`; the steps so far may have had another batch.
    """
    if config.num_train_epochs is None:
        return config
    num_examples = config.num_train_epochs * num_train_rows
    if content is not None:
        num_examples += content["step"] * config.global_batch_size - content["examples"]
    max_steps = max(1, math.ceil(num_examples / config.global_batch_size))
    return dataclasses.replace(config, max_steps=max_steps, num_train_epochs=None)


def keep_warmup(config: TrainConfig, content: dict[str, Any]) -> TrainConfig:
    """Keep a warm-up that is over: a share of a new length would repeat it. content: from `read_state`."""
    num_steps = count_warmup_steps(with_schedule_of(config, content))
    if config.warmup_steps < 1 and num_steps <= content["step"] and count_warmup_steps(config) != num_steps:
        return dataclasses.replace(config, warmup_steps=num_steps)
    return config


def with_schedule_of(config: TrainConfig, content: dict[str, Any]) -> TrainConfig:
    """Return the config with the schedule and the batch of a checkpoint. content: from `read_state`."""
    schedule = {name: content["identity"][name] for name in ("global_batch_size", *SCHEDULE_OPTIONS)}
    return dataclasses.replace(config, **schedule, num_train_epochs=None)


def run_identity(config: TrainConfig, metadata: dict[str, Any], model_config: PreTrainedConfig) -> dict[str, Any]:
    """Return what a resumed run must share with its checkpoint: data (metadata: of the dataset), model and options."""
    return {
        "dataset": metadata["content_sha256"],
        "dataset_revision": metadata["source"].get("dataset_revision"),
        "streamed_text": metadata["fingerprint"] if config.streaming else None,
        "tokenizer": metadata["tokenizer_sha256"],
        **{name: getattr(config, name) for name in IDENTITY_OPTIONS},
        "dataset_weights": [round(of["share"], 9) for of in metadata.get("mixture", {}).values()] or None,
        **_model_identity(model_config),
    }


def _model_identity(model_config: PreTrainedConfig) -> dict[str, Any]:
    shape = {"vocab_size": model_config.vocab_size, "n_positions": model_config.max_position_embeddings}
    return shape | {name: getattr(model_config, name) for name in model_options(model_config.model_type)}


def check_identity(config: TrainConfig, identity: dict[str, Any], resume_dir: Path) -> dict[str, tuple]:
    """Return what a resumed run changes: {option: (before, now)} of the schedule, and the global batch if it is typed.

    Raises `UserError` for other differences.
    """
    content = read_state(resume_dir)
    # An option that was added since then had its default; so had one of the model, in a later Transformers.
    model = _model_identity(AutoConfig.from_pretrained(resume_dir))
    saved = {name: OPTIONS[name].default for name in IDENTITY_OPTIONS} | content["identity"] | model
    changes = {key: (saved.get(key), now) for key, now in sorted(identity.items()) if saved.get(key) != now}
    changes.pop("dataset_revision", None)  # its rows count
    if refused := changes.keys() - {*SCHEDULE_OPTIONS, *typed_batch()}:
        listed = "; ".join(f"{key} {_short(changes[key][0])} -> {_short(changes[key][1])}" for key in sorted(refused))
        remedy = "pass the run's own options (--config training_config.yaml of its folder), or start a new run"
        if refused <= {"dataset", "streamed_text"}:
            remedy = "its text, or the order of its datasets, has changed; pass them as they were, or start a new run"
        if refused == {"global_batch_size"}:
            remedy = f"pass --global_batch_size {changes['global_batch_size'][1]} to continue with another batch"
        raise UserError(f"{resume_dir} belongs to a run with other options: {listed}; {remedy}")
    if config.max_steps is not None and config.max_steps < content["step"]:
        step = content["step"]
        remedy = "pass a larger --max_steps, or an earlier checkpoint and another --output_dir"
        raise UserError(f"{resume_dir} is at step {step} already; {remedy}")
    return changes


def typed_batch() -> set[str]:
    """Return {"global_batch_size"} if the command line sets it, which is consent to change it in a resumed run."""
    typed = typed_names(sys.argv[1:])
    is_typed = "global_batch_size" in typed
    is_typed |= {"per_device_train_batch_size", "gradient_accumulation_steps"} <= typed
    return {"global_batch_size"} if is_typed else set()


def describe_jump(config: TrainConfig, resume_dir: Path, progress: float) -> str | None:
    """Return what a changed schedule does to the next learning rate, if it does. progress: of this run, now."""
    content = read_state(resume_dir)
    earlier = with_schedule_of(config, content)
    before = earlier.learning_rate * learning_rate_scale(earlier, content["step"], content["progress"])
    now = config.learning_rate * learning_rate_scale(config, content["step"], progress)
    return None if math.isclose(before, now) else f"the learning rate goes from {before:.3g} to {now:.3g}"


def _short(value: object) -> str:
    return value[:12] if isinstance(value, str) and len(value) == 64 else repr(value)  # a SHA-256
