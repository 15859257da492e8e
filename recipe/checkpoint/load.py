"""Checkpoints: save, seal, verify, find, load, prune.

`checkpoint-<step>/` is a model folder (`from_pretrained` loads model and tokenizer) with the training state beside
the weights. It is written under a hidden name, flushed to disk, sealed with a manifest of every file's size and
SHA-256, and renamed; the file `latest` names the newest. Position in the data is `step` alone
(recipe/data/batches.py), of a streamed text also where to read it (recipe/data/streaming.py).
"""

import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import PreTrainedConfig, PreTrainedModel

from recipe.checkpoint.manifest import MANIFEST_NAME, short_reason, why_damaged
from recipe.config import SCHEDULE_OPTIONS, TrainConfig
from recipe.errors import UserError
from recipe.model.build import OVERRIDES
from recipe.model.weights import load_weights
from recipe.optim.guard import GuardedUpdate

STATE_NAME = "training_state.json"
OPTIMIZER_NAME = "optimizer.pt"
RNG_NAME = "rng.pt"
LATEST_NAME = "latest"


@dataclass
class RunState:
    """All that changes during a run and is not in the model, the optimizer or the random generators."""

    step: int = 0  # optimizer steps done
    untrained: dict[str, float] = field(default_factory=dict)  # evaluation before the first step
    train_seconds: float = 0.0  # spent training, over all sittings
    position: tuple[int, int] | None = None  # in a streamed text, see recipe/data/streaming.py
    loss_sum: float = 0.0  # of the steps since the last log line
    num_losses: int = 0
    steps_chosen: bool = False  # `max_minutes` has decided how many steps there are
    eval_rows: int = 0  # in an evaluation, as `max_eval_samples auto` chose them; 0: not chosen


def run_identity(config: TrainConfig, dataset_metadata: dict, model_config: PreTrainedConfig) -> dict:
    """What makes it the same run: data, model, batch and schedule. Hardware, logging and saving may differ."""
    fields = (
        "seed",
        "block_size",
        "global_batch_size",
        "max_steps",
        "optim",
        "learning_rate",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
        "spike_sigmas",
        "label_smoothing_factor",
        "pad_vocab_to_multiple_of",
        "streaming",
        "shuffle_buffer_size",
    )
    return {
        "dataset": dataset_metadata["content_sha256"],
        "streamed_text": dataset_metadata["fingerprint"] if config.streaming else None,
        "tokenizer": dataset_metadata["tokenizer_sha256"],
        **{name: getattr(config, name) for name in fields},
        **{name: getattr(model_config, name) for name in ("vocab_size", "n_positions", *OVERRIDES)},
    }


def checkpoint_dir(output_dir: Path, step: int) -> Path:
    return output_dir / f"checkpoint-{step}"


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Folders with the name of a checkpoint, oldest first."""
    found = [p for p in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name) and p.is_dir()]
    return sorted(found, key=lambda p: int(p.name.rpartition("-")[2]))


def remove_partial_checkpoints(output_dir: Path) -> None:
    """Remove what a process that was killed while saving has left."""
    for path in output_dir.glob(".checkpoint-*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def find_checkpoint(output_dir: Path, resume_from_checkpoint: str | None) -> Path | None:
    """The checkpoint to resume from: the newest that verifies, for `auto` and `latest`, or the one that is named.

    None only for no wish to resume, and for `auto` where there is no checkpoint. Says which ones it passes over, and
    raises `UserError` if none is left: a run never starts over silently.
    """
    if resume_from_checkpoint is None:
        return None
    directory = output_dir if resume_from_checkpoint in ("auto", "latest") else Path(resume_from_checkpoint)
    candidates = list_checkpoints(directory)
    if not candidates and resume_from_checkpoint == "auto":
        print(f"no checkpoint in {directory}: the run begins at step 0", flush=True)
        return None
    if not candidates and resume_from_checkpoint == "latest":
        raise UserError(f"--resume_from_checkpoint latest: there is no checkpoint in {output_dir}")
    if not candidates and not any((directory / name).is_file() for name in (STATE_NAME, MANIFEST_NAME)):
        raise UserError(f"--resume_from_checkpoint: {directory} is not a checkpoint (no {MANIFEST_NAME})")
    reasons = []
    for candidate in reversed(candidates or [directory]):
        reason = why_damaged(candidate)
        if reason is None:
            return candidate
        reasons.append(f"{candidate}: {reason}")
        print(f"passing over {reasons[-1]}", flush=True)
    raise UserError(
        f"no checkpoint to resume from is whole ({'; '.join(reasons)}); name another one, or start anew with "
        "--overwrite or another --output_dir"
    )


def read_state(directory: Path) -> dict:
    """The JSON part of a checkpoint."""
    try:
        content = json.loads((directory / STATE_NAME).read_text())
        content["identity"] = dict(content["identity"])
        _run_state(content)
    except Exception as error:  # not there, not JSON, or JSON of another shape
        raise _damaged(directory, error) from error
    return content


def precision_of(directory: Path) -> str | None:
    """The mixed precision of the run that wrote a checkpoint; None for one that does not say."""
    return read_state(directory).get("mixed_precision")


def check_identity(directory: Path, identity: dict, change_schedule: bool, output_dir: Path) -> dict[str, tuple]:
    """What differs between a checkpoint and the run that resumes it: {option: (before, now)}.

    Raises `UserError` for a difference, but for the schedule's where `change_schedule` allows it: the past stays as
    it was, the steps to come follow the new schedule.
    """
    content = read_state(directory)
    saved = content["identity"]
    changes = {
        key: (saved.get(key), identity.get(key))
        for key in sorted({*saved, *identity})
        if saved.get(key) != identity.get(key)
    }
    refused = set(changes) - set(SCHEDULE_OPTIONS if change_schedule else ())
    if refused:
        listed = "; ".join(f"{key} {_short(changes[key][0])} -> {_short(changes[key][1])}" for key in sorted(refused))
        remedy = "pass the run's own options (--config training_config.yaml of its folder), or start a new run"
        if refused <= set(SCHEDULE_OPTIONS):
            remedy = "add --change_schedule to continue with these, or " + remedy
        raise UserError(f"{directory} was made with other options: {listed}; {remedy}")
    newer = [path.name for path in list_checkpoints(directory.parent) if path.name != directory.name]
    newer = [name for name in newer if int(name.rpartition("-")[2]) > content["step"]]
    if changes and newer and output_dir.absolute() == directory.parent.absolute():
        raise UserError(
            f"{directory.parent} holds checkpoints of the schedule as it was ({', '.join(newer)}); give the run with "
            "another schedule its own --output_dir"
        )
    if identity["max_steps"] < content["step"]:
        raise UserError(f"{directory} has done {content['step']} steps; max_steps must not be less")
    return changes


def load_checkpoint(
    accelerator: Accelerator,
    directory: Path,
    model: PreTrainedModel,
    vocab_size: int,
    update: GuardedUpdate,
) -> RunState:
    """Put a checkpoint into model, optimizer, scaler and random generators. Returns the run's state.

    Nothing in a checkpoint is executed: JSON, safetensors and `torch.load(weights_only=True)`.
    """
    content = read_state(directory)
    try:
        load_weights(model, directory, vocab_size)
        update.load_state_dict(torch.load(directory / OPTIMIZER_NAME, map_location="cpu", weights_only=True))
        if accelerator.scaler is not None and content["scaler"]:
            accelerator.scaler.load_state_dict(content["scaler"])
        rng = torch.load(directory / RNG_NAME, weights_only=True)
        if accelerator.process_index in rng:  # beyond the number of processes that saved they keep their fresh seed
            _restore_rng(rng[accelerator.process_index])
    except Exception as error:  # a file of another version or shape: each reader raises its own
        raise _damaged(directory, error) from error
    return _run_state(content)


def _run_state(content: dict) -> RunState:
    position = content["position"]
    return RunState(
        int(content["step"]),
        dict(content["untrained"]),
        float(content["train_seconds"]),
        position and (int(position[0]), int(position[1])),
        float(content["loss_sum"]),
        int(content["num_losses"]),
        bool(content.get("steps_chosen", False)),  # older checkpoints lack these two
        int(content.get("eval_rows", 0)),
    )


def _short(value: object) -> str:
    return value[:12] if isinstance(value, str) and len(value) == 64 else repr(value)  # a SHA-256


def _damaged(directory: Path, error: Exception) -> UserError:
    return UserError(f"{directory} is damaged ({short_reason(error)}); resume from another checkpoint")


def _restore_rng(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
