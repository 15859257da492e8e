"""Write checkpoints in the background while training continues, and prune old ones."""

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils.operations import recursively_apply
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from recipe.checkpoint.load import (
    OPTIMIZER_NAME,
    RNG_NAME,
    STATE_NAME,
    RunState,
    checkpoint_dir,
    list_checkpoints,
    step_of,
)
from recipe.checkpoint.manifest import fsync, seal_checkpoint
from recipe.config import TrainConfig, save_config
from recipe.data.tokenizer import save_tokenizer
from recipe.errors import short_reason
from recipe.hardware.processes import gather, on_main_process
from recipe.model.weights import copy_weights, write_model
from recipe.optim.guard import GuardedUpdate
from recipe.optim.schedule import find_branch_step

CONFIG_NAME = "training_config.yaml"


@dataclass
class CheckpointSaver:
    """Saves in the background: training waits only for the copy of its state in host memory (12 bytes per parameter).

    If the previous checkpoint is not on disk when the next one is due, training waits for it too.
    """

    accelerator: Accelerator
    output_dir: Path
    config: TrainConfig
    identity: dict  # from `run_identity`
    model: PreTrainedModel
    model_config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    update: GuardedUpdate
    on_failure: Callable[[str], None]  # gets the reason if a checkpoint could not be written
    on_success: Callable[[Path, int], None]  # gets each complete checkpoint and its step, before older ones are pruned
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    writing: Future | None = None
    last_saved: int | None = None  # the step of the newest checkpoint, which may still be in progress

    def set_schedule(self, config: TrainConfig) -> None:
        """Use a new number of steps. The next checkpoint also writes training_config.yaml, so that the two agree."""
        self.config = config
        self.identity = self.identity | {"max_steps": config.max_steps, "warmup_steps": config.warmup_steps}
        if not config.save_steps and self.accelerator.is_main_process:
            record_config(self.output_dir, config)

    def save(self, state: RunState) -> Path:
        """Copy the state on all processes and start to write it on the main one. Returns the checkpoint's folder."""
        on_main_process(self.wait)  # the others would time out in a device collective if the disk is slow
        rng_state = {"cpu": torch.get_rng_state()}  # a run draws nothing from Python's or numpy's generators
        if torch.cuda.is_available():
            rng_state["cuda"] = torch.cuda.get_rng_state()
        rng = gather(rng_state)
        final = checkpoint_dir(self.output_dir, state.step)
        self.last_saved = state.step
        if self.accelerator.is_main_process:
            scaler = self.accelerator.scaler
            content = {
                **asdict(state),
                "mixed_precision": self.accelerator.mixed_precision,
                "max_minutes": self.config.max_minutes,
                "num_processes": self.accelerator.num_processes,
                "scaler": scaler.state_dict() if scaler is not None else None,
                "identity": self.identity,
            }
            weights = copy_weights(self.model, self.model_config)
            optimizer = recursively_apply(lambda t: t.detach().to("cpu", copy=True), self.update.state_dict())
            self.writing = self.thread.submit(self._write, final, self.config, content, weights, optimizer, rng)
        return final

    def report(self) -> None:
        """Report a failed checkpoint as soon as it is known, instead of when the next one is due."""
        if self.writing is not None and self.writing.done():
            self.wait()

    def wait(self) -> bool:
        """Wait for the checkpoint that is in progress. Returns whether it is on disk."""
        writing, self.writing = self.writing, None
        if writing is None:
            return True
        try:
            warning = writing.result()
        except Exception as error:  # for example a full disk
            name = checkpoint_dir(self.output_dir, self.last_saved).name
            self.on_failure(f"{name} could not be written: {short_reason(error)}; earlier checkpoints are unchanged")
            return False
        if warning:
            print(f"warning: {warning}", flush=True)
        return True

    def _write(
        self, final: Path, config: TrainConfig, content: dict, weights: dict, optimizer: dict, rng: list[dict]
    ) -> str | None:
        """Write under a hidden name, seal, rename and prune. Returns a warning if only the last part failed."""
        partial = final.with_name(f".{final.name}.partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            write_model(self.model, self.model_config, weights, partial)
            save_tokenizer(self.tokenizer, partial, self.model_config.max_position_embeddings)
            for name, tensors in ((OPTIMIZER_NAME, optimizer), (RNG_NAME, dict(enumerate(rng)))):
                with open(partial / name, "wb") as file:  # its errors name the reason; torch's own writer's do not
                    torch.save(tensors, file)
            (partial / STATE_NAME).write_text(json.dumps(content, indent=2) + "\n")
            seal_checkpoint(partial, {key: content[key] for key in ("step", "position", "identity")})
            _remove(final)  # a run that resumed from an earlier checkpoint replaces its old ones
            os.rename(partial, final)
            fsync(self.output_dir)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        try:
            record_config(self.output_dir, config)
            self.on_success(final, content["step"])
            if config.save_total_limit is not None:  # newer checkpoints are from before a resume, and may be damaged
                checkpoints = list_checkpoints(self.output_dir)
                branch_step = find_branch_step(config)  # from which the run can be extended
                older = [path for path in checkpoints[: checkpoints.index(final)] if step_of(path) != branch_step]
                for old in older[: -(config.save_total_limit - 1) or None]:
                    _remove(old)
        except OSError as error:
            return f"{final.name} is complete, but what follows a save failed: {short_reason(error)}"
        return None


def record_config(directory: Path, config: TrainConfig) -> None:
    """Replace training_config.yaml atomically."""
    save_config(config, directory / f".{CONFIG_NAME}")
    os.replace(directory / f".{CONFIG_NAME}", directory / CONFIG_NAME)


def _remove(directory: Path) -> None:
    """Remove a checkpoint. Hide it first, so that a process killed in between does not leave half of one."""
    if directory.exists():
        hidden = directory.with_name(f".{directory.name}.removed.partial")
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(directory, hidden)
        shutil.rmtree(hidden)
