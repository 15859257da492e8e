"""Checkpoints, and the model in a run's folder: written in the background, verified, pruned and loaded.

`checkpoint-<step>/` is a model folder (`from_pretrained` loads model and tokenizer) with the training state and a
manifest of SHA-256. It appears under its name only when it is complete and on disk. Nothing in it is executed: it
holds JSON, safetensors and what `torch.load(weights_only=True)` reads. The run's own folder is a model folder, too;
the header of its weights names their step and validation loss.
"""

import copy
import gc
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from accelerate import Accelerator
from accelerate.utils.operations import recursively_apply
from huggingface_hub.utils.sha import sha_fileobj
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from recipe.config import TrainConfig
from recipe.disk import can_map, flush, remove, replaced, write_file
from recipe.environment import describe_environment
from recipe.errors import UserError, short_reason
from recipe.hardware.devices import get_rng_state, set_rng_state
from recipe.hardware.processes import gather, on_main_process
from recipe.metrics import CURVE_NAME, SUMMARY_NAME, with_nan
from recipe.model.weights import (
    WEIGHTS_NAME,
    copy_weights,
    full_tensor,
    load_weights,
    read_header,
    shard_like,
    write_model,
)
from recipe.optim.guard import UpdateGuard
from recipe.optim.schedule import Schedule

STATE_VERSION = 1  # of training_state.json
STATE_NAME = "training_state.json"
OPTIMIZER_NAME = "optimizer.pt"
RNG_NAME = "rng.pt"
MANIFEST_NAME = "manifest.json"
LARGEST_NUMBER = 2**63  # of what training_state.json counts
NEEDED = (STATE_NAME, OPTIMIZER_NAME, RNG_NAME, WEIGHTS_NAME)  # without which no checkpoint is whole


@dataclass(frozen=True)
class Stage:
    """A part of a run that trains on the same data. A run that branches into another folder may change its data."""

    block_size: int  # tokens per example
    content_sha256: str = ""  # of the data
    step: int = 0  # optimizer steps before this stage
    examples: int = 0  # trained on before this stage
    tokens: int = 0  # trained on before this stage


@dataclass
class RunState:
    """Everything that changes during a run, except model, optimizer and random generators."""

    run_id: str = ""  # random; identifies the run to trackers and the Hub, also after a resume
    step: int = 0  # optimizer steps done
    examples: int = 0  # trained on, in all stages
    seconds: float = 0.0  # wall time over all starts; `max_minutes` limits it
    setup_seconds: float = 0.0  # the part of `seconds` before the first step
    progress: float = 0.0  # from 0 to 1
    decay_start: int | None = None  # the step before which `warmup_stable_decay` did not decay yet
    patience_start: int = 0  # the step after which evaluations count for `early_stopping_patience`
    position: Sequence[int] | None = None  # in streamed text: a window, and an example in it
    initial: dict[str, Any] = field(default_factory=dict)  # the evaluation before the first step of the stage
    losses: dict[str, float] = field(default_factory=dict)  # validation losses of this stage; keys: steps as text
    train_seconds: float = 0.0  # without evaluation and saving
    memory: dict[str, Any] = field(default_factory=dict)  # micro-batch, ..., which a resumed run keeps if they fit
    hardware: dict[str, Any] = field(default_factory=dict)  # precision, compilation, ..., which a resumed run keeps
    stages: list[Stage] = field(default_factory=list)  # the last one is current
    # Not in checkpoints:
    saved_step: int | None = None  # of the newest checkpoint in the run's folder, maybe still being written
    evaluations: dict[int, dict[str, Any]] = field(default_factory=dict)  # by step; they may name private datasets

    @property
    def stage(self) -> Stage:
        return self.stages[-1]

    @property
    def loss(self) -> float:
        """The validation loss of this step, which has been evaluated. Infinite if it is not finite."""
        return self.losses[str(self.step)]

    @property
    def stage_examples(self) -> int:
        """Examples trained on in this stage: the position in its packed dataset."""
        return self.examples - self.stage.examples

    @property
    def tokens(self) -> int:
        """Tokens trained on, in all stages."""
        return self.stage.tokens + self.stage_examples * self.stage.block_size

    def begin_stage(self, block_size: int, content_sha256: str) -> None:
        """Switch to other data, from its first example."""
        tokens = self.tokens if self.stages else 0
        self.stages = [*self.stages, Stage(block_size, content_sha256, self.step, self.examples, tokens)]
        self.position = None

    def add_evaluation(self, values: dict[str, Any]) -> None:
        """Add the evaluation of this step. A loss that is not finite counts as infinite."""
        self.evaluations[self.step] = values
        if self.step > 0:
            self.losses[str(self.step)] = values["loss"] if math.isfinite(values["loss"]) else math.inf
        if self.step == self.stage.step:
            # Of the run's first evaluation, without compilation: a time-limited run reserves as much for its end, and
            # its progress must never fall.
            seconds = self.initial.get("seconds", values.get("warm_seconds", values["seconds"]))
            ignored = ("sample", "mixture", "warm_seconds")
            self.initial = {key: value for key, value in values.items() if key not in ignored} | {"seconds": seconds}
            # The number per dataset, as `max_eval_samples` counts.
            self.initial["num_rows"] = max(part["num_rows"] for part in values.get("mixture", {"": values}).values())


SAVED = tuple(name for name in RunState.__dataclass_fields__ if name not in ("saved_step", "evaluations"))


@dataclass(frozen=True)
class SavedState:
    """What training_state.json says."""

    state: RunState
    schedule: Schedule
    identity: dict[str, Any]  # what else a run that resumes must share: data, tokenizer, model, options
    mixed_precision: str
    num_processes: int
    scaler: dict[str, Any] | None


@dataclass
class CheckpointContents:
    """What a checkpoint holds besides `RunState`: all that a run changes on its devices."""

    accelerator: Accelerator  # gradient scaler, random generators
    model: PreTrainedModel  # padded, not wrapped
    model_config: PreTrainedConfig  # not padded
    files: dict[str, bytes]  # of the model's folder, besides config and weights
    optimizer: torch.optim.Optimizer
    guard: UpdateGuard


def mark_resumable(is_resumable: bool) -> None:
    """Create or remove the file RESUMABLE_FILE, which tells a job script whether its command would continue the run.

    Exit codes cannot tell, because launchers turn them all into 1. Every complete checkpoint creates the file, so it
    survives a later kill. A deliberate end of the run removes it.
    """
    if path := os.environ.get("RESUMABLE_FILE"):
        if is_resumable:
            Path(path).touch()
        else:
            Path(path).unlink(missing_ok=True)


def checkpoint_dir(output_dir: Path, step: int) -> Path:
    return output_dir / f"checkpoint-{step}"


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Return the folders that are named like a checkpoint, oldest first.

    A checkpoint whose replacement was interrupted by a kill has its hidden name until `clean_checkpoints` runs.
    """
    paths = {}
    for path in sorted(output_dir.glob("*checkpoint-*")):  # a hidden name comes before the other
        name = re.fullmatch(r"checkpoint-(\d+)|\.checkpoint-(\d+)\.replaced", path.name)
        if name and path.is_dir():
            paths[int(name[1] or name[2])] = path
    return [paths[step] for step in sorted(paths)]


def checkpoint_step(directory: Path) -> int:
    return int(re.sub(r"\D", "", directory.name))


# ------------------------------------------------------------------ verify


def seal_checkpoint(directory: Path) -> None:
    """Flush every file to disk, and write the manifest that `why_damaged` checks."""
    paths = sorted(path for path in directory.iterdir() if path.name != MANIFEST_NAME)
    with ThreadPoolExecutor() as pool:  # the disk and the cores work at the same time; the page cache has the bytes
        hashes = list(pool.map(_flush_and_hash, paths))
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256} for path, sha256 in zip(paths, hashes, strict=True)
    }
    manifest = {"environment": describe_environment(torch.device("cpu")), "files": files}
    write_file(directory / MANIFEST_NAME, json.dumps(manifest, indent=2) + "\n")


def why_damaged(directory: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None if every byte is as it was written."""
    try:
        files = json.loads((directory / MANIFEST_NAME).read_text())["files"]
        for name, expected in (dict.fromkeys(NEEDED) | files).items():
            path = directory / name
            if expected is None or path.parent != directory or not path.is_file():
                return f"{name} is missing"
            size = path.stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes instead of {expected['bytes']}"
            if _sha256(path) != expected["sha256"]:
                return f"{name} has changed: its SHA-256 differs"
    except FileNotFoundError:
        return f"{MANIFEST_NAME} is missing"
    except Exception as error:  # not JSON, other JSON, or a disk that cannot be read
        return f"{MANIFEST_NAME} cannot be used: {short_reason(error)}"
    return None


def _flush_and_hash(path: Path) -> str:
    flush(path)
    return _sha256(path)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return sha_fileobj(file).hex()


# ------------------------------------------------------------------ load


def read_state(directory: Path) -> SavedState:
    """Read training_state.json. Raises `UserError` if it cannot be used."""
    try:
        content = json.loads((directory / STATE_NAME).read_text())
        if content.get("version") != STATE_VERSION:
            raise UserError(f"it has version {content.get('version')}, not {STATE_VERSION}")
        content["stages"] = [Stage(**stage) for stage in content["stages"]]
        state = RunState(**{name: content[name] for name in SAVED})
        schedule = Schedule(**content["schedule"])
        saved = SavedState(
            state=state,
            schedule=schedule,
            identity=content["identity"],
            mixed_precision=content["mixed_precision"],
            num_processes=content["num_processes"],
            scaler=content["scaler"],
        )
        check_types(saved, state, schedule, *state.stages)
        return saved
    except Exception as error:  # missing, not JSON, or of another version
        raise _damaged(directory, error) from error


def check_types(*records: Any) -> None:
    """Raise `ValueError` unless the fields of dataclasses have their types: a checkpoint may be a stranger's."""
    for record in records:
        for name, hint in get_type_hints(type(record)).items():
            value = getattr(record, name)
            hints = get_args(hint) if isinstance(hint, UnionType) else [hint]
            kinds = [get_origin(kind) or kind for kind in hints]
            if float in kinds:
                kinds.append(int)
            numbers = list(value.values()) if name in ("losses", "initial") and isinstance(value, dict) else []
            is_valid = isinstance(value, tuple(kinds)) and all(isinstance(n, (int, float, NoneType)) for n in numbers)
            numbers += [value]
            if any(isinstance(n, (int, float)) and (n < 0 or LARGEST_NUMBER < n < math.inf) for n in numbers):
                is_valid = False
            if not is_valid or (name == "losses" and not all(map(str.isdigit, value))):
                raise ValueError(f"{name} is {value!r}")


def load_checkpoint(directory: Path, contents: CheckpointContents) -> RunState:
    """Load a checkpoint into `contents`. Returns the run's state."""
    loaded = read_state(directory)
    optimizer = contents.optimizer
    device = contents.accelerator.device
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    try:
        load_weights(contents.model, directory, contents.model_config.vocab_size)
        # Mapped, so that processes of a machine share it. Not where the optimizer keeps it: on a CPU, without shards.
        is_mapped = device.type != "cpu" or isinstance(parameters[0], DTensor)
        is_mapped = is_mapped and can_map(directory / OPTIMIZER_NAME)
        saved = torch.load(directory / OPTIMIZER_NAME, map_location="cpu", weights_only=True, mmap=is_mapped)
        for index, values in saved["optimizer"]["state"].items():
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and value.shape == parameters[index].shape:
                    values[key] = shard_like(parameters[index], value)
        options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        optimizer.load_state_dict(saved["optimizer"])
        for group, own in zip(optimizer.param_groups, options, strict=True):
            group.update(own)  # this run's rate, decay and betas, not the checkpoint's
        contents.guard.counts = saved["guard"].to(device)
        if contents.accelerator.scaler is not None and loaded.scaler:
            contents.accelerator.scaler.load_state_dict(loaded.scaler)
        rng = torch.load(directory / RNG_NAME, weights_only=True)
        if contents.accelerator.process_index in rng:  # additional processes keep their fresh seed
            set_rng_state(rng[contents.accelerator.process_index], device)
    except Exception as error:  # a file of another version or shape: each reader raises its own
        raise _damaged(directory, error) from error
    return loaded.state


def _damaged(directory: Path, error: Exception) -> UserError:
    reason = error if isinstance(error, UserError) else short_reason(error)
    return UserError(f"{directory} cannot be used ({reason}); resume from another checkpoint")


# ------------------------------------------------------------------ save


@dataclass
class CheckpointSaver:
    """Saves in the background. Training waits only while its state is copied into host memory.

    The copies take 12 bytes per parameter, and 4 for a model alone. If the previous checkpoint is not on disk when the
    next one is due, training waits for it too.
    """

    output_dir: Path
    config: TrainConfig
    schedule: Schedule
    identity: dict[str, Any]  # what a resumed run must share with the checkpoint
    contents: CheckpointContents
    on_failure: Callable[[str, Exception], None]  # gets what could not be written, in the thread that writes
    on_saved: Callable[[Path, int], None]  # gets each complete checkpoint and its step, before older ones are pruned
    on_timed: Callable[[float], None]  # gets the seconds that it took, from the copy to the disk
    has_exported: bool = False  # whether the model in the folder, if there is one, is this run's
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    pending: Future[bool] | None = None  # a checkpoint, the newest one
    pending_export: Future[None] | None = None  # the model in the run's folder

    @property
    def keeps_best(self) -> bool:
        return self.config.load_best_model_at_end == "true"

    def save(self, state: RunState) -> None:
        """Copy the state on all processes and start to write it on the main one, unless it is on disk already."""
        if self.finish(state):  # waits without the time limit that the collectives below have
            return
        gc.collect()  # garbage collection is off during training
        started_at = time.perf_counter()
        contents = self.contents
        accelerator = contents.accelerator
        rng = dict(enumerate(gather(get_rng_state(accelerator.device))))
        state.saved_step = state.step
        # Tensor by tensor, so that no device holds more than one whole tensor at a time.
        weights = copy_weights(contents.model, contents.model_config, accelerator.is_main_process)
        optimizer = {"optimizer": contents.optimizer.state_dict(), "guard": contents.guard.counts}
        optimizer = recursively_apply(self._copy, optimizer)
        if accelerator.is_main_process:
            content = {
                "version": STATE_VERSION,
                **copy.deepcopy({name: getattr(state, name) for name in SAVED}),
                "stages": [asdict(stage) for stage in state.stages],
                "mixed_precision": accelerator.mixed_precision,
                "num_processes": accelerator.num_processes,
                "scaler": accelerator.scaler.state_dict() if accelerator.scaler is not None else None,
                "identity": self.identity,
                "schedule": asdict(self.schedule),
            }
            self.pending = self.thread.submit(self._try_to_write, started_at, content, weights, optimizer, rng)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Copy a tensor, which may be sharded over the processes, into the host memory of the main process."""
        tensor = full_tensor(tensor.detach())
        return tensor.to("cpu", copy=True) if self.contents.accelerator.is_main_process else None

    def finish(self, state: RunState) -> bool:
        """Make all processes wait for what is being written. Returns whether the state's step is on disk."""
        if not on_main_process(self.wait):
            state.saved_step = None
        return state.saved_step == state.step

    def wait(self) -> bool:
        """Wait for what is being written. Returns whether the checkpoint, if there was one, is on disk."""
        checkpoint, self.pending = self.pending, None
        self._wait_for_export()
        return checkpoint is None or checkpoint.result()

    def _try_to_write(self, started_at: float, content: dict, *parts: dict) -> bool:
        """Write, and report a failure: a full disk must not end the run. Returns whether the checkpoint is on disk."""
        final = checkpoint_dir(self.output_dir, content["step"])
        try:
            self._write(final, content, *parts)
        except Exception as error:  # of the system, safetensors or torch
            self.on_failure(final.name, error)
            return False
        try:
            mark_resumable(True)
            self.on_timed(time.perf_counter() - started_at)
            self.on_saved(final, content["step"])
            self._prune(content)
        except OSError as error:
            self.on_failure(f"what follows {final.name} (upload copy, pruning)", error)
        return True

    def _write(self, final: Path, content: dict, weights: dict, optimizer: dict, rng: dict) -> None:
        contents = self.contents
        with replaced(final) as folder:
            folder.mkdir()
            header = {"step": str(content["step"])}
            write_model(contents.model, contents.model_config, contents.files, weights, folder, header)
            torch.save(optimizer, folder / OPTIMIZER_NAME)
            torch.save(rng, folder / RNG_NAME)
            write_file(folder / STATE_NAME, json.dumps(content, indent=2) + "\n")
            seal_checkpoint(folder)

    def _prune(self, content: dict) -> None:
        if self.config.save_total_limit is not None:
            steps = [checkpoint_step(path) for path in list_checkpoints(self.output_dir)]
            for step in list_pruned(steps, content["step"], content["decay_start"], self.config.save_total_limit):
                remove_checkpoint(checkpoint_dir(self.output_dir, step))

    # ------------------------------------------------------------------ the model in the run's folder

    def export(self, state: RunState, is_last: bool = False) -> None:
        """Write the model of an evaluated step into the run's folder, if it belongs there.

        In the background, if the best model is kept and this one has the lowest loss. At the end of the run, it waits,
        and raises `UserError` if that fails.
        """
        if not is_last and (state.step == 0 or not self.keeps_best):
            return
        if not on_main_process(lambda: self._belongs_there(state)):
            return
        keep = self.contents.accelerator.is_main_process
        weights = copy_weights(self.contents.model, self.contents.model_config, keep)
        if keep:
            self.pending_export = self.thread.submit(self._export, state.step, state.loss, weights)
        if is_last:
            on_main_process(lambda: self.pending_export and self.pending_export.result())

    def _belongs_there(self, state: RunState) -> bool:
        self._wait_for_export()
        exported = read_exported(self.output_dir) if self.has_exported else None
        if exported == (state.step, state.loss):
            return False
        if exported is None or exported[0] >= state.step:  # the latter: from before a resume
            return True
        return not self.keeps_best or state.loss < exported[1]

    def _wait_for_export(self) -> None:
        export, self.pending_export = self.pending_export, None
        try:
            if export is not None:
                export.result()
        except UserError as error:
            self.on_failure("a model with a lower loss", error)  # a later evaluation may try again

    def _export(self, step: int, loss: float, weights: dict[str, torch.Tensor]) -> None:
        contents = self.contents
        header = {"step": str(step), "eval_loss": repr(loss)}
        try:
            write_model(contents.model, contents.model_config, contents.files, weights, self.output_dir, header)
            self.has_exported = True
            for name in (SUMMARY_NAME, CURVE_NAME):  # of an earlier model, like the card, which may have been edited
                (self.output_dir / name).unlink(missing_ok=True)
        except Exception as error:  # a full disk: safetensors and the file system each raise their own
            problem = f"the model could not be written to {self.output_dir}: {short_reason(error)}"
            newest = [f"continues from {path.name}" for path in list_checkpoints(self.output_dir)[-1:]]
            how = newest[0] if newest else "starts at step 0: there is no checkpoint"
            remedy = f"fix that; then the same command with --resume_from_checkpoint auto {how}"
            raise UserError(f"{problem}; {remedy}") from error


def read_exported(output_dir: Path) -> tuple[int, float] | None:
    """Return the step and the validation loss of the model in a run's folder; None if there is none."""
    header = read_header(output_dir)
    try:
        return int(header["step"]), float(header["eval_loss"])
    except (KeyError, ValueError):  # none, or another program's
        return None


def read_summary(output_dir: Path, run_id: str) -> dict[str, Any]:
    """Return the results in a run's folder, those of its model; {} if there are none, or of another run or model."""
    try:
        summary = with_nan(json.loads((output_dir / SUMMARY_NAME).read_text()))
        exported = read_exported(output_dir)
        is_current = summary["run_id"] == run_id and exported is not None and summary["exported_step"] == exported[0]
    except (OSError, ValueError, KeyError, AttributeError):
        return {}
    return summary if is_current else {}


def list_pruned(steps: Sequence[int], saved: int, decay_start: int | None, limit: int) -> list[int]:
    """Return the steps of the checkpoints to delete after the one at step `saved`. steps: of all, ascending.

    Keeps the newest `limit`, and the checkpoint before the decay, from which the run can be extended. Checkpoints
    after `saved` are left over from before a resume and may be damaged: they are neither counted nor deleted.
    """
    older = [step for step in steps if step < saved and step != decay_start]
    return older[: -(limit - 1) or None]


def remove_checkpoint(directory: Path) -> None:
    """Remove a checkpoint. Hide it first, so that a process killed in between does not leave half of one."""
    if directory.exists():
        hidden = directory.with_name(f".{directory.name}.removed.partial")
        shutil.rmtree(hidden, ignore_errors=True)
        remove(directory, hidden)


def clean_checkpoints(output_dir: Path) -> None:
    """Restore or remove what is left of a process that was killed while saving."""
    for path in output_dir.glob(".*.replaced"):
        final = output_dir / path.stem[1:]
        if not final.exists():
            path.rename(final)
    for path in (*output_dir.glob(".*.partial"), *output_dir.glob(".*.replaced")):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
