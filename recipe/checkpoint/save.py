"""Saving in the background: the state is copied, and written while training goes on. Also the model at the end."""

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from recipe.checkpoint.load import (
    LATEST_NAME,
    OPTIMIZER_NAME,
    RNG_NAME,
    STATE_NAME,
    RunState,
    checkpoint_dir,
    list_checkpoints,
)
from recipe.checkpoint.manifest import fsync, seal_checkpoint, short_reason
from recipe.config import TrainConfig, save_config
from recipe.data.tokenizer import save_tokenizer
from recipe.hardware.processes import on_main_process
from recipe.model.weights import copy_weights, write_model
from recipe.optim.guard import GuardedUpdate

CONFIG_NAME = "training_config.yaml"


class CheckpointSaver:
    """Saves in the background: training waits only for the copy of its state in host memory (12 bytes a parameter).

    A checkpoint that is still being written when the next one is due is waited for.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        output_dir: Path,
        config: TrainConfig,
        identity: dict,
        model: PreTrainedModel,
        model_config: PreTrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        update: GuardedUpdate,
        on_failure: Callable[[str], None],
    ) -> None:
        """identity: what a resumed run must agree with, see `read_state`. on_failure: told why one was not written."""
        self.accelerator, self.output_dir, self.config, self.identity = accelerator, output_dir, config, identity
        self.model, self.model_config, self.tokenizer, self.update = model, model_config, tokenizer, update
        self.on_failure = on_failure
        self.thread = ThreadPoolExecutor(1)
        self.writing: Future | None = None
        self.last_saved: int | None = None  # the step of the newest one that was asked for

    def set_schedule(self, config: TrainConfig) -> None:
        """Follow a new number of steps. training_config.yaml follows with the next checkpoint, which it must match."""
        self.config = config
        self.identity |= {"max_steps": config.max_steps, "warmup_steps": config.warmup_steps}
        if not config.save_steps and self.accelerator.is_main_process:
            record_config(self.output_dir, config)

    def save(self, state: RunState) -> Path:
        """Copy the state, on all processes, and begin to write it, on the main one. Returns the folder it will be.

        Raises `UserError` if the checkpoint before could not be written and the run is to stop for that.
        """
        on_main_process(self.wait)  # a slow disk: the others must not wait in a device collective, which gives up
        rng = gather_object([_rng_state()])
        final = checkpoint_dir(self.output_dir, state.step)
        self.last_saved = state.step
        if self.accelerator.is_main_process:
            scaler = self.accelerator.scaler
            content = {
                "step": state.step,
                "untrained": state.untrained,
                "train_seconds": state.train_seconds,
                "position": state.position,
                "loss_sum": state.loss_sum,
                "num_losses": state.num_losses,
                "steps_chosen": state.steps_chosen,
                "eval_rows": state.eval_rows,
                "mixed_precision": self.accelerator.mixed_precision,
                "num_processes": self.accelerator.num_processes,
                "scaler": scaler.state_dict() if scaler is not None else None,
                "identity": self.identity,
            }
            weights, optimizer = copy_weights(self.model, self.model_config), _to_host(self.update.state_dict())
            self.writing = self.thread.submit(self._write, final, self.config, content, weights, optimizer, rng)
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

    def _write(
        self, final: Path, config: TrainConfig, content: dict, weights: dict, optimizer: dict, rng: list[dict]
    ) -> str | None:
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
            record_config(self.output_dir, config)
            if self.config.save_total_limit is not None:  # newer ones are not of this sitting, and may be damaged
                all_of_them = list_checkpoints(self.output_dir)
                older = all_of_them[: all_of_them.index(final)]
                for old in older[: -(self.config.save_total_limit - 1) or None]:
                    _remove(old)
        except OSError as error:
            return f"{final.name} is written, but what comes after it failed: {short_reason(error)}"
        return None


def record_config(directory: Path, config: TrainConfig) -> None:
    """Replace training_config.yaml atomically."""
    save_config(config, directory / f".{CONFIG_NAME}")
    os.replace(directory / f".{CONFIG_NAME}", directory / CONFIG_NAME)


def _remove(directory: Path) -> None:
    """Remove a checkpoint: first its name, so that a process killed in between leaves no half of one."""
    if directory.exists():
        hidden = directory.with_name(f".{directory.name}.removed.partial")
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(directory, hidden)
        shutil.rmtree(hidden)


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
