"""Checkpoints: save, seal, verify, find, load, prune.

`checkpoint-<step>/` is a model folder (`from_pretrained` loads model and tokenizer) with the training state beside
the weights. It is written under a hidden name, flushed to disk, sealed with a manifest of every file's size and
SHA-256, and renamed; the file `latest` names the newest. Position in the data is `step` alone
(recipe/data/batches.py), of a streamed text also where to read it (recipe/data/streaming.py).
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from recipe.config import TrainConfig, UserError
from recipe.data.tokenizer import save_tokenizer
from recipe.manifest import MANIFEST_NAME, fsync, seal_checkpoint, short_reason, why_damaged
from recipe.model import OVERRIDES, copy_weights, load_weights, write_model
from recipe.optim import GuardedUpdate

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


class CheckpointSaver:
    """Saves in the background: training waits only for the copy of its state in host memory (12 bytes a parameter).

    A checkpoint that is still being written when the next one is due is waited for.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        output_dir: Path,
        identity: dict,
        model: PreTrainedModel,
        model_config: PreTrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        update: GuardedUpdate,
        save_total_limit: int | None,
        on_failure: Callable[[str], None],
    ) -> None:
        """identity: what a resumed run must agree with, see `read_state`. on_failure: told why one was not written."""
        self.accelerator, self.output_dir, self.identity = accelerator, output_dir, identity
        self.model, self.model_config, self.tokenizer, self.update = model, model_config, tokenizer, update
        self.save_total_limit, self.on_failure = save_total_limit, on_failure
        self.thread = ThreadPoolExecutor(1)
        self.writing: Future | None = None
        self.last_saved: int | None = None  # the step of the newest one that was asked for

    def save(self, state: RunState) -> Path:
        """Copy the state, on all processes, and begin to write it, on the main one. Returns the folder it will be."""
        rng = gather_object([_rng_state()])
        final = checkpoint_dir(self.output_dir, state.step)
        self.last_saved = state.step
        if self.accelerator.is_main_process:
            self.wait()
            scaler = self.accelerator.scaler
            content = {
                "step": state.step,
                "untrained": state.untrained,
                "train_seconds": state.train_seconds,
                "position": state.position,
                "loss_sum": state.loss_sum,
                "num_losses": state.num_losses,
                "num_processes": self.accelerator.num_processes,
                "scaler": scaler.state_dict() if scaler is not None else None,
                "identity": self.identity,
            }
            weights, optimizer = copy_weights(self.model, self.model_config), _to_host(self.update.state_dict())
            self.writing = self.thread.submit(self._write, final, content, weights, optimizer, rng)
        return final

    def report(self) -> None:
        """Say now if the checkpoint that was being written has failed, and not when the next one is due."""
        if self.writing is not None and self.writing.done():
            self.wait()

    def wait(self) -> bool:
        """Wait for the checkpoint that is being written. Returns whether it is on disk."""
        writing, self.writing = self.writing, None
        if writing is None:
            return True
        try:
            warning = writing.result()
        except Exception as error:  # a full disk, a file system that went away: the run need not
            name = checkpoint_dir(self.output_dir, self.last_saved).name
            self.on_failure(f"{name} not written: {short_reason(error)}; what was saved before is as it was")
            return False
        if warning:
            print(f"warning: {warning}", flush=True)
        return True

    def _write(self, final: Path, content: dict, weights: dict, optimizer: dict, rng: list[dict]) -> str | None:
        """Returns what went wrong after the checkpoint was complete."""
        partial = final.with_name(f".{final.name}.partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            write_model(self.model, self.model_config, weights, partial)
            save_tokenizer(self.tokenizer, partial, self.model_config.n_positions)
            for name, tensors in ((OPTIMIZER_NAME, optimizer), (RNG_NAME, dict(enumerate(rng)))):
                with open(partial / name, "wb") as file:  # whose errors say what they are; torch's own writer's do not
                    torch.save(tensors, file)
            (partial / STATE_NAME).write_text(json.dumps(content, indent=2) + "\n")
            seal_checkpoint(partial, {key: content[key] for key in ("step", "position", "identity")})
            _remove(final)  # a run that resumed from an earlier one meets its old checkpoints again
            os.rename(partial, final)
            fsync(self.output_dir)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        try:
            written = self.output_dir / f".{LATEST_NAME}"
            written.write_text(final.name + "\n")
            fsync(written)
            os.replace(written, self.output_dir / LATEST_NAME)
            if self.save_total_limit is not None:  # newer ones are not of this sitting, and may be damaged
                all_of_them = list_checkpoints(self.output_dir)
                older = all_of_them[: all_of_them.index(final)]
                for old in older[: -(self.save_total_limit - 1) or None]:
                    _remove(old)
        except OSError as error:
            return f"{final.name} is written, but what comes after it failed: {short_reason(error)}"
        return None


def export_model(
    model: PreTrainedModel, model_config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, output_dir: Path
) -> None:
    """Put the final model into the run's folder, each file at once. Raises `UserError` if it cannot be written."""
    partial = output_dir / ".checkpoint-final.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        write_model(model, model_config, copy_weights(model, model_config), partial)
        save_tokenizer(tokenizer, partial, model_config.n_positions)
        for path in partial.iterdir():
            fsync(path)
            os.replace(path, output_dir / path.name)
        partial.rmdir()
    except Exception as error:  # a full disk: safetensors, tokenizers and the file system each raise their own
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"the final model could not be written to {output_dir}: {short_reason(error)}; when that is mended, the "
            "same command with --resume_from_checkpoint auto writes it"
        ) from error


def _remove(directory: Path) -> None:
    """Remove a checkpoint: first its name, so that a process killed in between leaves no half of one."""
    if directory.exists():
        hidden = directory.with_name(f".{directory.name}.removed.partial")
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(directory, hidden)
        shutil.rmtree(hidden)


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
    update: GuardedUpdate,
) -> RunState:
    """Put a checkpoint into model, optimizer, scaler and random generators. Returns the run's state.

    Nothing in a checkpoint is executed: JSON, safetensors and `torch.load(weights_only=True)`.
    """
    content = read_state(directory, identity)
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
    )


def _short(value: object) -> str:
    return value[:12] if isinstance(value, str) and len(value) == 64 else repr(value)  # a SHA-256


def _damaged(directory: Path, error: Exception) -> UserError:
    return UserError(f"{directory} is damaged ({short_reason(error)}); resume from another checkpoint")


def _to_host(value: object) -> object:
    """A copy in host memory of a state dict's tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _to_host(item) for key, item in value.items()}
    return [_to_host(item) for item in value] if isinstance(value, list) else value


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
