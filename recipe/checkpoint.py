"""Checkpoints: written in the background, verified, pruned and loaded.

`checkpoint-<step>/` is a model folder (`from_pretrained` loads model and tokenizer) with the training state and a
manifest of SHA-256. `best/` is the model folder with the lowest validation loss, without a training state. Both appear
under their names only when they are complete and on disk. Nothing in them is executed: they hold JSON, safetensors and
what `torch.load(weights_only=True)` reads.
"""

import contextlib
import copy
import gc
import hashlib
import io
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.operations import recursively_apply
from huggingface_hub.utils.sha import sha_fileobj
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from recipe.config import CONFIG_NAME, TrainConfig, save_config
from recipe.disk import can_map, flush, link_or_copy, remove
from recipe.environment import describe_environment
from recipe.errors import UserError, short_reason
from recipe.hardware.devices import get_rng_state, set_rng_state
from recipe.hardware.processes import gather, on_main_process
from recipe.model.files import write_files
from recipe.model.weights import WEIGHTS_NAME, copy_weights, full_tensor, load_weights, shard_like, write_model
from recipe.optim.guard import UpdateGuard
from recipe.optim.schedule import Schedule

STATE_VERSION = 1  # of training_state.json
STATE_NAME, OPTIMIZER_NAME = "training_state.json", "optimizer.pt"
RNG_NAME, MANIFEST_NAME = "rng.pt", "manifest.json"
BEST_NAME, VALUES_NAME = "best", "best.json"  # the folder of the best model, and the file with its evaluation


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
    position: Sequence[int] | None = None  # in streamed text, see `Position` in recipe/data/stream.py
    initial: dict[str, Any] = field(default_factory=dict)  # the evaluation before the first step of the stage
    losses: dict[str, float] = field(default_factory=dict)  # validation losses of this stage; keys: steps as text
    train_seconds: float = 0.0  # without evaluation and saving
    memory: dict[str, Any] = field(default_factory=dict)  # `MemoryPlan.choices`, which a resumed run keeps if they fit
    hardware: dict[str, Any] = field(default_factory=dict)  # `describe_choices` of recipe/hardware/choices.py
    stages: list[Stage] = field(default_factory=list)  # the last one is current
    # Not in checkpoints:
    saved_step: int | None = None  # of the newest checkpoint in the run's folder, maybe still being written
    evaluations: dict[int, dict[str, Any]] = field(default_factory=dict)  # by step; they may name private datasets

    @property
    def stage(self) -> Stage:
        return self.stages[-1]

    @property
    def stage_examples(self) -> int:
        """Examples trained on in this stage: the position in its packed dataset."""
        return self.examples - self.stage.examples

    @property
    def tokens(self) -> int:
        """Tokens trained on, in all stages."""
        return self.stage.tokens + self.stage_examples * self.stage.block_size

    def begin_stage(self, block_size: int, content_sha256: str) -> None:
        """Switch to other data, from its first example. Losses on the old data no longer count."""
        tokens = self.tokens if self.stages else 0
        self.stages = [*self.stages, Stage(block_size, content_sha256, self.step, self.examples, tokens)]
        self.position, self.losses, self.evaluations, self.patience_start = None, {}, {}, self.step

    def add_evaluation(self, values: dict[str, Any]) -> None:
        """Add the evaluation of this step. A loss that is not finite counts as infinite."""
        self.evaluations[self.step] = values
        if self.step > 0:
            self.losses[str(self.step)] = values["loss"] if math.isfinite(values["loss"]) else math.inf
        if self.step == self.stage.step:
            self.initial = {key: value for key, value in values.items() if key not in ("sample", "mixture")}
            # The number per dataset, as `max_eval_samples` counts.
            self.initial["num_rows"] = max(part["num_rows"] for part in values.get("mixture", {"": values}).values())


SAVED = tuple(name for name in RunState.__dataclass_fields__ if name not in ("saved_step", "evaluations"))


@dataclass(frozen=True)
class SavedState:
    """What training_state.json says."""

    state: RunState
    schedule: Schedule
    identity: dict[str, Any]  # what else a run that resumes must share: `run_identity` of recipe/run/decide.py
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
        Path(path).touch() if is_resumable else Path(path).unlink(missing_ok=True)


def checkpoint_dir(output_dir: Path, step: int) -> Path:
    return output_dir / f"checkpoint-{step}"


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Return the folders that are named like a checkpoint, oldest first.

    A checkpoint whose replacement was interrupted by a kill has its hidden name until `clean_checkpoints` runs.
    """
    paths = {}
    for path in sorted(output_dir.glob("*checkpoint-*")):  # a hidden name comes before the other
        if (name := re.fullmatch(r"checkpoint-(\d+)|\.checkpoint-(\d+)\.replaced", path.name)) and path.is_dir():
            paths[int(name[1] or name[2])] = path
    return [paths[step] for step in sorted(paths)]


def checkpoint_step(directory: Path) -> int:
    return int(re.sub(r"\D", "", directory.name))


# ------------------------------------------------------------------ verify


def seal_checkpoint(directory: Path, known: dict[str, str] | None = None) -> None:
    """Write the manifest that `why_damaged` checks, and flush every file to disk. known: {file name: SHA-256}."""
    files = {}
    for path in sorted(directory.iterdir()):
        flush(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": (known or {}).get(path.name) or _sha256(path)}
    manifest = {"environment": describe_environment(torch.device("cpu")), "files": files}
    (directory / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n")
    flush(directory / MANIFEST_NAME)
    flush(directory)


def why_damaged(directory: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None if every byte is as it was written."""
    try:
        files = json.loads((directory / MANIFEST_NAME).read_text())["files"]
        for name, expected in files.items():
            path = directory / name
            if not path.is_file():
                return f"{name} is missing"
            if (size := path.stat().st_size) != expected["bytes"]:
                return f"{name} has {size} bytes instead of {expected['bytes']}"
            if _sha256(path) != expected["sha256"]:
                return f"{name} has changed: its SHA-256 differs"
    except FileNotFoundError:
        return f"{MANIFEST_NAME} is missing"
    except Exception as error:  # not JSON, other JSON, or a disk that cannot be read
        return f"{MANIFEST_NAME} cannot be used: {short_reason(error)}"
    return None


def read_best(output_dir: Path, run_id: str) -> dict[str, Any]:
    """Return step and evaluation of the model in BEST_NAME, or {} if that is not this run's."""
    with contextlib.suppress(OSError, ValueError, KeyError):  # there is none, or it cannot be read
        values = json.loads((output_dir / BEST_NAME / VALUES_NAME).read_text())
        if values.pop("run_id") == run_id:
            return values
    return {}


def restore_best(output_dir: Path, state: RunState) -> None:
    """Make BEST_NAME hold the best model up to the state's step. Without one, remove the folder.

    The model is missing after a kill during its write, and too new after a resume from an earlier step.
    """
    best, folder = read_best(output_dir, state.run_id), output_dir / BEST_NAME
    if best and (fault := why_damaged(folder)):
        print(f"warning: {folder} is damaged ({fault})", flush=True)
        best = {}
    if not best or best["step"] > state.step:
        shutil.rmtree(folder, ignore_errors=True)
        best = {}
    steps = [step for path in list_checkpoints(output_dir) if (step := checkpoint_step(path)) in state.evaluations]
    for step in sorted(steps, key=lambda step: state.evaluations[step]["loss"]):
        source, values = checkpoint_dir(output_dir, step), {"step": step, **state.evaluations[step]}
        if not values["loss"] < best.get("loss", math.inf):
            return
        if why_damaged(source) is None:
            with replaced(folder) as partial:
                for path in source.iterdir():
                    if path.name not in (STATE_NAME, OPTIMIZER_NAME, RNG_NAME, MANIFEST_NAME):
                        link_or_copy(path, partial / path.name)
                seal_best(partial, state.run_id, values)
            return


def seal_best(directory: Path, run_id: str, values: dict[str, Any]) -> None:
    """Write the evaluation of a best model beside it, then the manifest. values: its step and evaluation."""
    (directory / VALUES_NAME).write_text(json.dumps({"run_id": run_id, **values}) + "\n")
    seal_checkpoint(directory)


def _flush_and_hash(path: Path) -> str:
    flush(path)
    return _sha256(path)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return sha_fileobj(file).hex()


class HashingFile(io.BufferedWriter):
    """Hashes and flushes what `torch.save` writes: every byte once, in order (torch 2.13)."""

    def __init__(self, path: Path, helper: ThreadPoolExecutor, flushing: Future) -> None:
        """helper: flushes the file in the background. flushing: the task before the first flush."""
        super().__init__(io.FileIO(path, "w"))
        self.path, self.helper, self.flushing, self.sha256 = path, helper, flushing, hashlib.sha256()

    def write(self, data: memoryview) -> int:
        written = super().write(data)
        if self.flushing.done():
            self.flushing.result()  # Linux reports a failed write to one flush only
            self.flushing = self.helper.submit(flush, self.path)
        self.sha256.update(data)
        return written

    def hash(self) -> str:
        self.flushing.result()
        return self.sha256.hexdigest()


# ------------------------------------------------------------------ load


def read_state(directory: Path) -> SavedState:
    """Read training_state.json. Raises `UserError` if it cannot be used."""
    try:
        content = json.loads((directory / STATE_NAME).read_text())
        if content.get("version") != STATE_VERSION:
            raise UserError(f"it has version {content.get('version')}, not {STATE_VERSION}")
        content["stages"] = [Stage(**stage) for stage in content["stages"]]
        state, schedule = RunState(**{name: content[name] for name in SAVED}), Schedule(**content["schedule"])
        rest = (content[name] for name in ("identity", "mixed_precision", "num_processes", "scaler"))
        return SavedState(state, schedule, *rest)
    except Exception as error:  # missing, not JSON, or of another version
        raise _damaged(directory, error) from error


def load_checkpoint(directory: Path, contents: CheckpointContents) -> RunState:
    """Load a checkpoint into `contents`. Returns the run's state."""
    loaded, optimizer, device = read_state(directory), contents.optimizer, contents.accelerator.device
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
        rates = [group["initial_lr"] for group in optimizer.param_groups]
        optimizer.load_state_dict(saved["optimizer"])
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["initial_lr"] = rate  # this run's, not the checkpoint's
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

    The copies take 12 bytes per parameter, and 4 for a best model. If the previous checkpoint is not on disk when the
    next one is due, training waits for it too.
    """

    output_dir: Path
    config: TrainConfig
    schedule: Schedule
    identity: dict[str, Any]  # what a resumed run must share with the checkpoint
    contents: CheckpointContents
    on_failure: Callable[[str, Exception], None]  # gets what could not be written, in the thread that writes
    on_saved: Callable[[Path, int], None]  # gets each complete checkpoint and its step, before older ones are pruned
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    pending_checkpoint: Future[bool] | None = None  # a checkpoint
    pending_best: Future[None] | None = None  # the best model

    def save(self, state: RunState) -> None:
        """Copy the state on all processes and start to write it on the main one, unless it is on disk already."""
        if self.finish(state):  # waits without the time limit that the collectives below have
            return
        gc.collect()  # garbage collection is off during training
        accelerator, contents = self.contents.accelerator, self.contents
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
            self.pending_checkpoint = self.thread.submit(self._try_to_write, content, weights, optimizer, rng)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Copy a tensor, which may be sharded over the processes, into the host memory of the main process."""
        tensor = full_tensor(tensor.detach())
        return tensor.to("cpu", copy=True) if self.contents.accelerator.is_main_process else None

    def keep_best(self, state: RunState) -> None:
        """If this step's evaluation has the lowest loss, copy the weights and start to write them to BEST_NAME."""
        if self.config.load_best_model_at_end != "true" or state.step == 0:
            return
        contents, values = self.contents, {"step": state.step, **state.evaluations[state.step]}
        if values["loss"] < on_main_process(lambda: self._best_loss(state.run_id)):
            keep = contents.accelerator.is_main_process
            weights = copy_weights(contents.model, contents.model_config, keep)
            if keep:
                self.pending_best = self.thread.submit(self._try_to_keep, state.run_id, values, weights)

    def _best_loss(self, run_id: str) -> float:
        """Return the loss of the model in BEST_NAME, after a write in progress, so that copies do not pile up."""
        if self.pending_best is not None:
            self.pending_best.result()
        return read_best(self.output_dir, run_id).get("loss", math.inf)

    def _try_to_keep(self, run_id: str, values: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        try:
            with replaced(self.output_dir / BEST_NAME) as folder:
                write_model(self.contents.model, self.contents.model_config, weights, folder)
                write_files(self.contents.files, folder)
                seal_best(folder, run_id, values)
        except Exception as error:  # of the system or safetensors
            self.on_failure(BEST_NAME, error)  # a later evaluation tries again

    def finish(self, state: RunState) -> bool:
        """Make all processes wait for what is being written. Returns whether the state's step is on disk."""
        if not on_main_process(self.wait):
            state.saved_step = None
        return state.saved_step == state.step

    def wait(self) -> bool:
        """Wait for what is being written. Returns whether the checkpoint, if there was one, is on disk."""
        checkpoint, self.pending_checkpoint = self.pending_checkpoint, None
        best, self.pending_best = self.pending_best, None
        if best is not None:
            best.result()
        return checkpoint is None or checkpoint.result()

    def _try_to_write(self, content: dict, *parts: dict) -> bool:
        """Write, and report a failure: a full disk must not end the run. Returns whether the checkpoint is on disk."""
        final = checkpoint_dir(self.output_dir, content["step"])
        try:
            self._write(final, content, *parts)
        except Exception as error:  # of the system, safetensors or torch
            self.on_failure(final.name, error)
            return False
        try:
            mark_resumable(True)
            self.on_saved(final, content["step"])
            self._prune(content)
        except OSError as error:
            self.on_failure(f"what follows {final.name} (upload copy, pruning)", error)
        return True

    def _write(self, final: Path, content: dict, weights: dict, optimizer: dict, rng: dict) -> None:
        contents = self.contents
        with replaced(final) as folder, ThreadPoolExecutor(1) as helper:  # keeps the disk busy
            write_model(contents.model, contents.model_config, weights, folder)
            hashing = helper.submit(_flush_and_hash, folder / WEIGHTS_NAME)
            write_files(contents.files, folder)
            hashes = {}
            for name, tensors in ((OPTIMIZER_NAME, optimizer), (RNG_NAME, rng)):
                with HashingFile(folder / name, helper, hashing) as file:
                    torch.save(tensors, file)
                hashes[name] = file.hash()
            (folder / STATE_NAME).write_text(json.dumps(content, indent=2) + "\n")
            seal_checkpoint(folder, {WEIGHTS_NAME: hashing.result(), **hashes})

    def _prune(self, content: dict) -> None:
        if self.config.save_total_limit is not None:
            steps = [checkpoint_step(path) for path in list_checkpoints(self.output_dir)]
            for step in list_pruned(steps, content["step"], content["decay_start"], self.config.save_total_limit):
                remove_checkpoint(checkpoint_dir(self.output_dir, step))


@contextlib.contextmanager
def replaced(final: Path) -> Iterator[Path]:
    """Yield a hidden folder to fill and seal. It then replaces `final`; after an error, `final` stays as it is."""
    partial, before = (final.with_name(f".{final.name}.{word}") for word in ("partial", "replaced"))
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if final.exists():  # a checkpoint of the same step, damaged or of another schedule
            os.rename(final, before)  # after a kill, `clean_checkpoints` restores it
        os.rename(partial, final)
        flush(final.parent)
    except BaseException:
        clean_checkpoints(final.parent)
        raise
    shutil.rmtree(before, ignore_errors=True)


def list_pruned(steps: Sequence[int], saved: int, decay_start: int | None, limit: int) -> list[int]:
    """Return the steps of the checkpoints to delete after the one at step `saved`. steps: of all, ascending.

    Keeps the newest `limit`, and the checkpoint before the decay, from which the run can be extended. Checkpoints
    after `saved` are left over from before a resume and may be damaged: they are neither counted nor deleted.
    """
    older = [step for step in steps if step < saved and step != decay_start]
    return older[: -(limit - 1) or None]


def record_config(directory: Path, config: TrainConfig) -> None:
    """Replace training_config.yaml atomically."""
    save_config(config, directory / f".{CONFIG_NAME}")
    os.replace(directory / f".{CONFIG_NAME}", directory / CONFIG_NAME)


def remove_checkpoint(directory: Path) -> None:
    """Remove a checkpoint. Hide it first, so that a process killed in between does not leave half of one."""
    if directory.exists():
        hidden = directory.with_name(f".{directory.name}.removed.partial")
        shutil.rmtree(hidden, ignore_errors=True)
        remove(directory, hidden)


def clean_checkpoints(output_dir: Path) -> None:
    """Restore or remove what is left of a process that was killed while saving."""
    for path in output_dir.glob(".*.replaced"):
        if not (final := output_dir / path.stem[1:]).exists():
            path.rename(final)
    for path in (*output_dir.glob(".*.partial"), *output_dir.glob(".*.replaced")):
        shutil.rmtree(path, ignore_errors=True)
