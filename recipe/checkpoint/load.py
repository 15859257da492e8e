"""Find, verify and load checkpoints. `recipe/checkpoint/save.py` writes and prunes them.

`checkpoint-<step>/` is a model folder (`from_pretrained` loads model and tokenizer) with the training state. `step`
gives the position in a packed dataset (recipe/data/batches.py); `position`, in a streamed text.
"""

import dataclasses
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedConfig, PreTrainedModel

from recipe.checkpoint.manifest import MANIFEST_NAME, why_damaged
from recipe.config import SCHEDULE_OPTIONS, TrainConfig
from recipe.errors import UserError, short_reason
from recipe.model.build import model_options
from recipe.model.weights import load_weights
from recipe.optim.guard import GuardedUpdate

STATE_NAME = "training_state.json"
OPTIMIZER_NAME = "optimizer.pt"
RNG_NAME = "rng.pt"
# The options that make a run the same run. Hardware, logging and saving may differ.
IDENTITY_OPTIONS = (
    *SCHEDULE_OPTIONS,
    *("seed", "block_size", "global_batch_size", "streaming", "shuffle_buffer_size", "pad_vocab_to_multiple_of"),
    *("optim", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    "label_smoothing_factor",
)


@dataclass
class RunState:
    """Everything that changes during a run, except model, optimizer and random generators."""

    step: int = 0  # optimizer steps done
    untrained: dict[str, float] = field(default_factory=dict)  # the evaluation before the first step
    train_seconds: float = 0.0  # time spent training, over all resumes
    position: Sequence | None = None  # in streamed text, see `Position` in recipe/data/windows.py
    loss_sum: float = 0.0  # over the steps since the last log line
    num_losses: int = 0
    steps_chosen: bool = False  # `max_minutes` has set the number of steps
    eval_rows: int = 0  # rows per evaluation that `max_eval_samples auto` chose; 0: not chosen yet
    memory_choices: dict[str, Any] = field(default_factory=dict)  # of `MemoryPlan`


STATE_FIELDS = [f.name for f in dataclasses.fields(RunState)]


def run_identity(config: TrainConfig, dataset_metadata: dict, model_config: PreTrainedConfig) -> dict:
    """Return what a resumed run must share with its checkpoint: data, model, batch and schedule.

    Muon's learning rate is None for other optimizers.
    """
    irrelevant = ("muon_learning_rate",) if config.optim != "muon" else ()
    return {
        "dataset": dataset_metadata["content_sha256"],
        "streamed_text": dataset_metadata["fingerprint"] if config.streaming else None,
        "tokenizer": dataset_metadata["tokenizer_sha256"],
        **{name: None if name in irrelevant else getattr(config, name) for name in IDENTITY_OPTIONS},
        "vocab_size": model_config.vocab_size,
        "n_positions": model_config.max_position_embeddings,
        **{name: getattr(model_config, name) for name in model_options(model_config.model_type)},
    }


def with_schedule_of(config: TrainConfig, identity: dict) -> TrainConfig:
    """Return the config with the schedule of a checkpoint. identity: the checkpoint's."""
    schedule = {name: identity[name] for name in SCHEDULE_OPTIONS}
    schedule["muon_learning_rate"] = schedule["muon_learning_rate"] or config.muon_learning_rate  # None without Muon
    return dataclasses.replace(config, **schedule, num_train_epochs=None, max_minutes=None)


def checkpoint_dir(output_dir: Path, step: int) -> Path:
    return output_dir / f"checkpoint-{step}"


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Return the folders that are named like a checkpoint, oldest first."""
    found = [p for p in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name) and p.is_dir()]
    return sorted(found, key=step_of)


def newest_checkpoint(output_dir: Path, last_step: int) -> Path | None:
    """Return the newest checkpoint that is not later than a step, or None."""
    return next((path for path in reversed(list_checkpoints(output_dir)) if step_of(path) <= last_step), None)


def step_of(directory: Path) -> int:
    return int(directory.name.rpartition("-")[2])


def remove_partial_checkpoints(output_dir: Path) -> None:
    """Remove what is left of a process that was killed while saving."""
    for path in output_dir.glob(".checkpoint-*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def find_checkpoint(output_dir: Path, resume_from_checkpoint: str | None) -> Path | None:
    """Return the newest valid checkpoint (for `auto`, `latest` or a run's folder), or the one that is named.

    Returns None without `resume_from_checkpoint`, and for `auto` if there is no checkpoint. Prints a line for each
    damaged one. Raises `UserError` if no valid one is left: a run never starts over silently.
    """
    if resume_from_checkpoint is None:
        return None
    directory = output_dir if resume_from_checkpoint in ("auto", "latest") else Path(resume_from_checkpoint)
    candidates = list_checkpoints(directory)
    if not candidates:
        if resume_from_checkpoint == "auto":
            print(f"no checkpoint in {directory}: the run starts at step 0", flush=True)
            return None
        if not any((directory / name).is_file() for name in (STATE_NAME, MANIFEST_NAME)):
            raise UserError(f"there is no checkpoint in {directory}; --resume_from_checkpoint auto starts a new run")
    reasons = []
    for candidate in reversed(candidates or [directory]):
        if (reason := why_damaged(candidate)) is None:
            return candidate
        reasons.append(f"{candidate}: {reason}")
        print(f"skipping {reasons[-1]}", flush=True)
    remedy = "choose another one, or start over with --overwrite or another --output_dir"
    raise UserError(f"found no valid checkpoint to resume from ({'; '.join(reasons)}); {remedy}")


def read_state(directory: Path) -> dict:
    """Return training_state.json: `RunState`'s fields, mixed_precision, scaler and identity (see `run_identity`)."""
    try:
        added = {"steps_chosen": False, "eval_rows": 0, "memory_choices": {}}  # older checkpoints lack these fields
        content = added | json.loads((directory / STATE_NAME).read_text())
        if missing := {*STATE_FIELDS, "identity"} - content.keys():
            raise KeyError(", ".join(sorted(missing)))
    except Exception as error:  # missing, not JSON, or other JSON
        raise _damaged(directory, error) from error
    return content


def precision_of(directory: Path) -> str | None:
    """Return the mixed precision of the run that wrote a checkpoint, or None if the checkpoint does not say."""
    return read_state(directory).get("mixed_precision")


def check_identity(directory: Path, identity: dict, may_change: set[str], output_dir: Path) -> dict[str, tuple]:
    """Return what differs between a checkpoint and the run that resumes it: {option: (before, now)}.

    may_change: options of the schedule, which the remaining steps follow. Raises `UserError` for other differences.
    """
    content = read_state(directory)
    saved = content["identity"]
    pairs = {key: (saved.get(key), identity.get(key)) for key in sorted({*saved, *identity})}
    changes = {key: (before, now) for key, (before, now) in pairs.items() if before != now}
    if refused := set(changes) - may_change:
        listed = "; ".join(f"{key} {_short(changes[key][0])} -> {_short(changes[key][1])}" for key in sorted(refused))
        remedy = "pass the run's own options (--config training_config.yaml of its folder), or start a new run"
        if refused <= set(SCHEDULE_OPTIONS):
            remedy = "type the option on the command line to resume with its new value, or " + remedy
        raise UserError(f"{directory} belongs to a run with other options: {listed}; {remedy}")
    newer = [path.name for path in list_checkpoints(directory.parent) if step_of(path) > content["step"]]
    if changes and newer and output_dir.absolute() == directory.parent.absolute():
        remedy = "choose another --output_dir for the run with the new schedule"
        raise UserError(
            f"{directory.parent} contains newer checkpoints of the old schedule ({', '.join(newer)}); {remedy}"
        )
    if identity["max_steps"] < content["step"]:
        raise UserError(f"{directory} is at step {content['step']} already; pass a --max_steps that is not smaller")
    return changes


def load_checkpoint(
    accelerator: Accelerator, directory: Path, model: PreTrainedModel, vocab_size: int, update: GuardedUpdate
) -> RunState:
    """Load a checkpoint into model, optimizer, scaler and random generators. Returns the run's state.

    Executes nothing in a checkpoint: it reads JSON, safetensors and `torch.load(weights_only=True)`.
    """
    content = read_state(directory)
    try:
        load_weights(model, directory, vocab_size)
        update.load_state_dict(torch.load(directory / OPTIMIZER_NAME, map_location="cpu", weights_only=True))
        if accelerator.scaler is not None and content["scaler"]:
            accelerator.scaler.load_state_dict(content["scaler"])
        rng = torch.load(directory / RNG_NAME, weights_only=True)
        if accelerator.process_index in rng:  # additional processes keep their fresh seed
            state = rng[accelerator.process_index]
            torch.set_rng_state(state["cpu"])
            if "cuda" in state and torch.cuda.is_available():
                torch.cuda.set_rng_state(state["cuda"])
    except Exception as error:  # a file of another version or shape: each reader raises its own
        raise _damaged(directory, error) from error
    return RunState(**{name: content[name] for name in STATE_FIELDS})


def _short(value: object) -> str:
    return value[:12] if isinstance(value, str) and len(value) == 64 else repr(value)  # a SHA-256


def _damaged(directory: Path, error: Exception) -> UserError:
    return UserError(f"{directory} is damaged ({short_reason(error)}); resume from another checkpoint")
