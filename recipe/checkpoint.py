"""Checkpoints: save, find, load, prune.

`checkpoint-<step>/` is a model folder (`from_pretrained` loads model and tokenizer) with the training state beside
the weights. It is written under another name and renamed when every process has written its part, so a folder with
the final name is complete. Position in the data is `step` alone (recipe/data/batches.py).
"""

import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from recipe.config import TrainConfig, UserError
from recipe.data.tokenizer import save_tokenizer
from recipe.model import OVERRIDES, load_weights, save_model

STATE_NAME = "training_state.json"
OPTIMIZER_NAME = "optimizer.pt"


@dataclass
class RunState:
    """All that changes during a run and is not in the model, the optimizer or the schedule."""

    step: int = 0  # optimizer steps done
    untrained: dict[str, float] = field(default_factory=dict)  # evaluation before the first step
    train_seconds: float = 0.0  # spent training, over all sittings
    position: tuple[int, int] | None = None  # in a streamed text, see recipe/data/streaming.py


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
        "label_smoothing_factor",
        "pad_vocab_to_multiple_of",
        "streaming",
        "shuffle_buffer_size",
    )
    return {
        "dataset": dataset_metadata["content_sha256"],
        "streamed_file_bytes": dataset_metadata["source"].get("file_bytes"),
        "tokenizer": dataset_metadata["tokenizer_sha256"],
        **{name: getattr(config, name) for name in fields},
        **{name: getattr(model_config, name) for name in ("vocab_size", "n_positions", *OVERRIDES)},
    }


def checkpoint_dir(output_dir: Path, step: int) -> Path:
    return output_dir / f"checkpoint-{step}"


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [p for p in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name) and p.is_dir()]
    return sorted(found, key=lambda p: int(p.name.rpartition("-")[2]))


def save_checkpoint(
    accelerator: Accelerator,
    output_dir: Path,
    state: RunState,
    identity: dict,
    model: PreTrainedModel,
    model_config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    save_total_limit: int | None,
) -> Path:
    """Write `checkpoint-<step>` from all processes, then remove the oldest beyond `save_total_limit`.

    identity: what a resumed run must agree with, see `load_checkpoint`.
    """
    final = checkpoint_dir(output_dir, state.step)
    partial = final.with_name(f".{final.name}.partial")
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_model(model, model_config, partial)
        save_tokenizer(tokenizer, partial, model_config.n_positions)
        torch.save(optimizer.state_dict(), partial / OPTIMIZER_NAME)
        content = {
            "step": state.step,
            "untrained": state.untrained,
            "train_seconds": state.train_seconds,
            "position": state.position,
            "num_processes": accelerator.num_processes,
            "scheduler": scheduler.state_dict(),
            "scaler": accelerator.scaler.state_dict() if accelerator.scaler is not None else None,
            "identity": identity,
        }
        (partial / STATE_NAME).write_text(json.dumps(content, indent=2) + "\n")
    accelerator.wait_for_everyone()
    torch.save(_rng_state(), partial / f"rng-{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        for path in partial.iterdir():
            _fsync(path)
        shutil.rmtree(final, ignore_errors=True)  # a run that resumed earlier meets its old checkpoints again
        os.rename(partial, final)
        _fsync(output_dir)
        if save_total_limit is not None:
            for old in [p for p in list_checkpoints(output_dir) if p != final][: -(save_total_limit - 1) or None]:
                shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return final


def find_checkpoint(output_dir: Path, resume_from_checkpoint: str) -> Path:
    """The folder to resume from. Raises `UserError` if it is not there: a run never starts over silently."""
    if resume_from_checkpoint == "latest":
        checkpoints = list_checkpoints(output_dir)
        if not checkpoints:
            raise UserError(f"--resume_from_checkpoint latest: there is no checkpoint in {output_dir}")
        return checkpoints[-1]
    directory = Path(resume_from_checkpoint)
    if list_checkpoints(directory):  # the folder of a run
        return list_checkpoints(directory)[-1]
    if not (directory / STATE_NAME).is_file():
        raise UserError(f"--resume_from_checkpoint: {directory} is not a checkpoint (no {STATE_NAME})")
    return directory


def read_state(directory: Path, identity: dict) -> dict:
    """The JSON part of a checkpoint. Raises `UserError` listing what differs if it is of another run."""
    try:
        content = json.loads((directory / STATE_NAME).read_text())
        saved = dict(content["identity"])
        _run_state(content)
    except Exception as error:  # not there, not JSON, or JSON of another shape
        raise _damaged(directory, error) from error
    differences = [
        f"{key} {_short(saved.get(key))} -> {_short(identity.get(key))}"
        for key in sorted({*saved, *identity})
        if saved.get(key) != identity.get(key)
    ]
    if differences:
        raise UserError(
            f"{directory} was made with other options: {'; '.join(differences)}; go on with the run's own "
            "(--config training_config.yaml of its folder), or start a new run"
        )
    return content


def load_checkpoint(
    accelerator: Accelerator,
    directory: Path,
    identity: dict,
    model: PreTrainedModel,
    vocab_size: int,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
) -> RunState:
    """Put a checkpoint into model, optimizer, schedule, scaler and random generators. Returns the run's state.

    Nothing in a checkpoint is executed: JSON, safetensors and `torch.load(weights_only=True)`.
    """
    content = read_state(directory, identity)
    try:
        load_weights(model, directory, vocab_size)
        optimizer.load_state_dict(torch.load(directory / OPTIMIZER_NAME, map_location="cpu", weights_only=True))
        scheduler.load_state_dict(content["scheduler"])
        if accelerator.scaler is not None and content["scaler"]:
            accelerator.scaler.load_state_dict(content["scaler"])
        rng_path = directory / f"rng-{accelerator.process_index}.pt"
        if rng_path.is_file():  # absent on processes beyond the number that saved: they keep their fresh seed
            _restore_rng(torch.load(rng_path, weights_only=True))
    except Exception as error:  # a file that is missing, cut short or changed: each reader raises its own
        raise _damaged(directory, error) from error
    return _run_state(content)


def _run_state(content: dict) -> RunState:
    position = content["position"]
    return RunState(
        int(content["step"]),
        dict(content["untrained"]),
        float(content["train_seconds"]),
        position and (int(position[0]), int(position[1])),
    )


def _short(value: object) -> str:
    return value[:12] if isinstance(value, str) and len(value) == 64 else repr(value)  # a SHA-256


def _damaged(directory: Path, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:150]
    return UserError(f"{directory} is damaged ({type(error).__name__}: {reason}); resume from another checkpoint")


def _rng_state() -> dict[str, torch.Tensor]:
    """Torch's generators; nothing in a run draws from Python's or numpy's."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_rng(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
