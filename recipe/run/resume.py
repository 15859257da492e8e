"""What a run is, and what may change when it resumes or branches from one of its checkpoints."""

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from recipe.arguments import typed_names
from recipe.checkpoint import list_checkpoints, read_state, step_of
from recipe.config import IDENTITY_OPTIONS, OPTIONS, SCHEDULE_OPTIONS, TrainConfig
from recipe.errors import UserError
from recipe.model.build import model_options
from recipe.optim.schedule import count_warmup_steps, learning_rate_scale
from recipe.run.folder import resume_command

LENGTH = ("max_steps", "num_train_epochs", "max_minutes")


def resolve_length(config: TrainConfig, num_train_rows: int) -> TrainConfig:
    """Turn `num_train_epochs` into steps; a last, partial step counts as one."""
    if config.num_train_epochs is None:
        return config
    max_steps = max(1, math.ceil(config.num_train_epochs * num_train_rows / config.global_batch_size))
    return dataclasses.replace(config, max_steps=max_steps, num_train_epochs=None)


def keep_warmup(config: TrainConfig, content: dict[str, Any]) -> TrainConfig:
    """Keep a warm-up that is over: a share of a new length would repeat it. content: from `read_state`."""
    earlier = with_schedule_of(config, content["identity"])
    num_steps = count_warmup_steps(earlier)
    if config.warmup_steps < 1 and num_steps <= content["step"] and count_warmup_steps(config) != num_steps:
        return dataclasses.replace(config, warmup_steps=num_steps)
    return config


def with_schedule_of(config: TrainConfig, identity: dict[str, Any]) -> TrainConfig:
    return dataclasses.replace(config, **{name: identity[name] for name in SCHEDULE_OPTIONS}, num_train_epochs=None)


def run_identity(config: TrainConfig, metadata: dict[str, Any], model_config: PreTrainedConfig) -> dict[str, Any]:
    """Return what a resumed run must share with its checkpoint: data (metadata: of the dataset), model and options."""
    return {
        "dataset": metadata["content_sha256"],
        "streamed_text": metadata["fingerprint"] if config.streaming else None,
        "tokenizer": metadata["tokenizer_sha256"],
        **{name: getattr(config, name) for name in IDENTITY_OPTIONS},
        "vocab_size": model_config.vocab_size,
        "n_positions": model_config.max_position_embeddings,
        **{name: getattr(model_config, name) for name in model_options(model_config.model_type)},
    }


def check_identity(
    config: TrainConfig, identity: dict[str, Any], resume_dir: Path, output_dir: Path
) -> dict[str, tuple]:
    """Return what a resumed run changes in its schedule: {option: (before, now)}.

    What is typed on the command line is consent to a change of the schedule, and a recipe that has changed is not.
    Raises `UserError` for other differences.
    """
    content = read_state(resume_dir)
    # An option that was added since then had its default.
    saved = {name: OPTIONS[name].default for name in IDENTITY_OPTIONS} | content["identity"]
    pairs = {key: (saved.get(key), identity.get(key)) for key in sorted({*saved, *identity})}
    changes = {key: (before, now) for key, (before, now) in pairs.items() if before != now}
    if refused := changes.keys() - find_consent(typed_names(sys.argv[1:])):
        listed = "; ".join(f"{key} {_short(changes[key][0])} -> {_short(changes[key][1])}" for key in sorted(refused))
        remedy = "pass the run's own options (--config training_config.yaml of its folder), or start a new run"
        if refused <= {"dataset", "streamed_text"}:
            remedy = "its text has changed; pass the text as it was, or start a new run"
        if refused <= set(SCHEDULE_OPTIONS):
            remedy = "type the option on the command line to resume with its new value, or " + remedy
        raise UserError(f"{resume_dir} belongs to a run with other options: {listed}; {remedy}")
    newer = [path.name for path in list_checkpoints(resume_dir.parent) if step_of(path) > content["step"]]
    if changes and newer and output_dir.absolute() == resume_dir.parent.absolute():
        remedy = "choose another --output_dir for the run with the new schedule"
        raise UserError(
            f"{resume_dir.parent} contains newer checkpoints of the old schedule ({', '.join(newer)}); {remedy}"
        )
    if config.max_steps is not None and config.max_steps < content["step"]:
        step = content["step"]
        raise UserError(f"{resume_dir} is at step {step} already; pass a larger --max_steps, or an earlier checkpoint")
    return changes


def find_consent(typed: set[str]) -> set[str]:
    """Return the options of the schedule that may change: what was typed, and what follows from it."""
    consent = typed & set(SCHEDULE_OPTIONS)
    if typed & set(LENGTH):
        consent |= {"max_steps", "max_minutes", "warmup_steps"}
    return consent | ({"lr_scheduler_kwargs"} if "lr_scheduler_type" in typed else set())


def describe_jump(config: TrainConfig, resume_dir: Path, progress: float) -> str | None:
    """Return a warning if a changed length or schedule makes the learning rate jump. progress: of this run, now."""
    content = read_state(resume_dir)
    step, start = content["step"], content["decay_start"]
    before = learning_rate_scale(with_schedule_of(config, content["identity"]), step, content["progress"])
    now = learning_rate_scale(config, step, progress)
    if math.isclose(before, now, rel_tol=0.05):
        return None
    found = resume_dir.parent / f"checkpoint-{start}"
    remedy = f"; resume from {found}, before the decay, into another --output_dir" if found.is_dir() else ""
    return f"warning: the learning rate jumps from {before:.3g} to {now:.3g} of its peak{remedy}"


def extend_command(config: TrainConfig, output_dir: Path, decay_start: int | None, step: int) -> str | None:
    """Return the command that makes a finished run twice as long; None if only the end of a decay is left."""
    checkpoints = list_checkpoints(output_dir)
    if decay_start is None:
        return f"{resume_command(output_dir)} --max_steps {2 * step}" if checkpoints else None
    before = output_dir / f"checkpoint-{decay_start}"
    if not before.is_dir():
        return None
    directory = output_dir.absolute() if output_dir.name == "" else output_dir  # "." has no name
    command = resume_command(output_dir, before, directory.with_name(f"{directory.name}-{2 * step}"))
    repository = f" --hub_model_id {config.hub_model_id}-{2 * step}" if config.push_to_hub else ""
    return f"{command}{repository} --max_steps {2 * step}"


def _short(value: object) -> str:
    return value[:12] if isinstance(value, str) and len(value) == 64 else repr(value)  # a SHA-256
