"""What a run starts from, and what may change when it continues one of its checkpoints."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from recipe.checkpoint import list_checkpoints, read_state
from recipe.config import IDENTITY_OPTIONS, OPTIONS, SCHEDULE_OPTIONS, TrainConfig
from recipe.errors import UserError
from recipe.model.build import model_options
from recipe.optim.schedule import count_warmup_steps, learning_rate_scale

ORIGIN_NAME = ".resumed_from"  # in output_dir: the checkpoint in another place with which its run began


def choose_start(config: TrainConfig, output_dir: Path) -> str | None:
    """Return where the run in output_dir starts: `latest` (of its own checkpoints), a folder, hf://..., or None.

    The same command can be given again and again: a checkpoint in another place is where the run starts until it has
    its own. `auto` comes back if neither is there.
    """
    named, has_own = config.resume_from_checkpoint, bool(list_checkpoints(output_dir))
    if named in (None, "latest"):
        return named
    origin = read_origin(output_dir)
    if named == "auto":
        return "latest" if has_own else origin or "auto"
    is_own = output_dir.absolute() in (Path(named).absolute(), Path(named).absolute().parent)
    return "latest" if has_own and (is_own or origin == origin_of(config)) else named


def origin_of(config: TrainConfig) -> str:
    """Return the checkpoint that the command names, independent of the working directory."""
    named = config.resume_from_checkpoint
    return named if named.startswith("hf://") else str(Path(named).absolute())


def read_origin(output_dir: Path) -> str | None:
    path = output_dir / ORIGIN_NAME
    return path.read_text().strip() if path.is_file() else None


def resolve_length(config: TrainConfig, num_train_rows: int) -> TrainConfig:
    """Turn `num_train_epochs` into steps; a last, partial step counts as one."""
    if config.num_train_epochs is None:
        return config
    max_steps = max(1, math.ceil(config.num_train_epochs * num_train_rows / config.global_batch_size))
    return dataclasses.replace(config, max_steps=max_steps, num_train_epochs=None)


def keep_warmup(config: TrainConfig, content: dict[str, Any]) -> TrainConfig:
    """Keep a warm-up that is over: a share of a new length would repeat it. content: from `read_state`."""
    num_steps = count_warmup_steps(_with_schedule_of(config, content))
    if config.warmup_steps < 1 and num_steps <= content["step"] and count_warmup_steps(config) != num_steps:
        return dataclasses.replace(config, warmup_steps=num_steps)
    return config


def _with_schedule_of(config: TrainConfig, content: dict[str, Any]) -> TrainConfig:
    schedule = {name: content["identity"][name] for name in SCHEDULE_OPTIONS}
    return dataclasses.replace(config, **schedule, num_train_epochs=None)


def run_identity(config: TrainConfig, metadata: dict[str, Any], model_config: PreTrainedConfig) -> dict[str, Any]:
    """Return what a resumed run must share with its checkpoint: data (metadata: of the dataset), model and options."""
    return {
        "dataset": metadata["content_sha256"],
        "streamed_text": metadata["fingerprint"] if config.streaming else None,
        "tokenizer": metadata["tokenizer_sha256"],
        **{name: getattr(config, name) for name in IDENTITY_OPTIONS},
        **_model_identity(model_config),
    }


def _model_identity(model_config: PreTrainedConfig) -> dict[str, Any]:
    shape = {"vocab_size": model_config.vocab_size, "n_positions": model_config.max_position_embeddings}
    return shape | {name: getattr(model_config, name) for name in model_options(model_config.model_type)}


def check_identity(config: TrainConfig, identity: dict[str, Any], resume_dir: Path) -> dict[str, tuple]:
    """Return what a resumed run changes in its schedule: {option: (before, now)}.

    Raises `UserError` for other differences.
    """
    content = read_state(resume_dir)
    # An option that was added since then had its default; so had one of the model, in a later Transformers.
    model = _model_identity(AutoConfig.from_pretrained(resume_dir))
    saved = {name: OPTIONS[name].default for name in IDENTITY_OPTIONS} | content["identity"] | model
    changes = {key: (saved.get(key), now) for key, now in sorted(identity.items()) if saved.get(key) != now}
    if refused := changes.keys() - set(SCHEDULE_OPTIONS):
        listed = "; ".join(f"{key} {_short(changes[key][0])} -> {_short(changes[key][1])}" for key in sorted(refused))
        remedy = "pass the run's own options (--config training_config.yaml of its folder), or start a new run"
        if refused <= {"dataset", "streamed_text"}:
            remedy = "its text has changed; pass the text as it was, or start a new run"
        raise UserError(f"{resume_dir} belongs to a run with other options: {listed}; {remedy}")
    if config.max_steps is not None and config.max_steps < content["step"]:
        step = content["step"]
        raise UserError(f"{resume_dir} is at step {step} already; pass a larger --max_steps, or an earlier checkpoint")
    return changes


def describe_rates(config: TrainConfig, resume_dir: Path, progress: float) -> str:
    """Return what a changed schedule does to the next learning rate. progress: of this run, now."""
    content = read_state(resume_dir)
    before = learning_rate_scale(_with_schedule_of(config, content), content["step"], content["progress"])
    now = learning_rate_scale(config, content["step"], progress)
    return f"the learning rate goes from {before:.3g} to {now:.3g} of its peak"


def _short(value: object) -> str:
    return value[:12] if isinstance(value, str) and len(value) == 64 else repr(value)  # a SHA-256
