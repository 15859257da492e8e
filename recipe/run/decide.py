"""What a run does, and when: pure functions of frozen facts, which tests/refuse/test_decide.py tests as a table.

`decide_start`: which checkpoint the run begins with, whether it continues that run, and what is refused before text is
prepared. `decide_run`: its length, its schedule, and what every `auto` means here. `decide_turn`: whether to save, to
evaluate or to end before the next step. recipe/run/look.py finds the facts, and recipe/run/start.py acts.
"""

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedConfig

from recipe.arguments import shell_command
from recipe.checkpoint import RunState, SavedState
from recipe.config import CONFIG_NAME, IDENTITY_OPTIONS, OPTIONS, SCHEDULE_OPTIONS, TrainConfig
from recipe.errors import UserError
from recipe.hardware.accelerator import check_trackers
from recipe.hardware.choices import Choice, Facts, apply_choices, check_sharded, choose, settle
from recipe.hardware.memory import Memory, MemoryPlan, choose_plan, micro_batch_sizes
from recipe.hardware.probe import Measured
from recipe.model.build import model_options
from recipe.model.size import count_parameters, count_training_flops
from recipe.optim.schedule import LONGEST_WARMUP, Schedule, list_changes, plan_schedule
from recipe.publish.hub import MainBranch, publishes_training_state, refuse_another

ORIGIN_NAME = ".resumed_from"  # in output_dir: the checkpoint with which its run began
CLOSING_SECONDS = 3.0  # for the last checkpoint, the export and the curve
EPOCHS_WITHOUT_BEST = 2.0  # after which a validation loss may rise again
EVALUATIONS = 40  # that look for the best model; more would take longer than a short run on a tiny text
# What may change in a branch. A change begins a new stage.
DATA_IDENTITY = ("dataset", "streamed_text", "streaming", "dataset_weights", "block_size")


# ------------------------------------------------------------------ facts


@dataclass(frozen=True)
class Folder:
    """An output folder as it is found."""

    path: Path  # as the command spells it
    place: str  # where that is, the same for each spelling
    steps: tuple[int, ...] = ()  # of its checkpoints, ascending
    run_id: str | None = None  # of the newest
    results: tuple[str, ...] = ()  # files of a finished run
    logs: tuple[str, ...] = ()  # its log, if a step is in it
    replaced: tuple[str, ...] = ()  # files of something else that a run would replace
    origin: str | None = None  # what ORIGIN_NAME says: a place, or an address on the Hub
    in_use: bool = False  # by another process

    @property
    def leftovers(self) -> list[str]:
        """What an earlier run left of value: nothing, if it ended before its first log line."""
        return [*(f"checkpoint-{step}" for step in self.steps), *self.results, *self.logs]


@dataclass(frozen=True)
class NamedCheckpoint:
    """The checkpoint or run folder that the command names, or that the run in the output folder began with."""

    text: str  # as it is spelled: a path, or hf://user/name@BRANCH
    place: str  # where that is
    folder: str = ""  # the place of the folder that the checkpoints are in
    steps: tuple[int, ...] = ()  # of the checkpoints, ascending
    run_id: str | None = None  # of the newest
    beside: tuple[int, ...] = ()  # the steps of the checkpoints in its parent folder, if it has none
    is_gone: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has been verified."""

    path: Path  # where it is, or will be when it is downloaded
    fault: str | None = None  # why it cannot be used
    saved: SavedState | None = None  # None if there is a fault
    repo_id: str | None = None  # the repository that holds it, if it is on the Hub
    branch: str = ""


@dataclass(frozen=True)
class Surroundings:
    """All that decides how a run starts, besides its options."""

    facts: Facts  # processes, device, launcher
    folder: Folder
    named: NamedCheckpoint | None = None
    checkpoints: tuple[Checkpoint, ...] = ()  # to resume from, newest first; the search ends at the first intact one
    main_branch: MainBranch | None = None  # of the repository to publish to; None if it is new or cannot be asked
    trackers: tuple[str, ...] = ()  # that are installed
    typed_options: frozenset[str] = frozenset()  # the names of the options on the command line


@dataclass(frozen=True)
class DataFacts:
    """What a run needs to know of its dataset."""

    num_rows: int  # of the training split
    num_bytes: int = 0  # of the same
    is_packed: bool = True  # and not the user's own object
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class ModelFacts:
    """The model that a run trains."""

    config: PreTrainedConfig  # with the vocabulary that is saved
    padded: PreTrainedConfig  # with the vocabulary that is trained
    saved: PreTrainedConfig | None = None  # of the checkpoint
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)  # to export, besides config and weights
    notes: tuple[str, ...] = ()  # what the run changes in the model that it starts from, and what its export lacks


# ------------------------------------------------------------------ start


@dataclass(frozen=True)
class Start:
    """How a run starts."""

    requested: TrainConfig
    recipe: str  # its name
    surroundings: Surroundings
    resume: Checkpoint | None = None  # to begin with
    continues: bool = False  # whether it continues the checkpoint's run; else a new run begins with it
    origin: str | None = None  # for ORIGIN_NAME
    says: tuple[str, ...] = ()

    @property
    def facts(self) -> Facts:
        return self.surroundings.facts

    @property
    def output_dir(self) -> Path:
        return self.surroundings.folder.path

    @property
    def saved(self) -> SavedState | None:
        return self.resume.saved if self.resume else None

    @property
    def is_branch(self) -> bool:
        """Whether this is a new run from a checkpoint elsewhere, named by this command or the folder's first one."""
        is_of_hub = self.resume is not None and self.resume.repo_id is not None
        return not self.continues or (is_of_hub and self.surroundings.named is not None)

    @property
    def source(self) -> str | Path | None:
        """The model that sets shape and tokenizer. A resumed run takes its checkpoint: the original may be gone."""
        named = self.requested.model_name_or_path
        return self.resume.path if self.resume and named else named


def decide_start(requested: TrainConfig, recipe: str, surroundings: Surroundings) -> Start:
    """Decide where the run starts. Raises `UserError` for what cannot work, before text is prepared for hours."""
    folder = surroundings.folder
    if folder.in_use:
        remedy = "wait for it to end, or choose another --output_dir"
        raise UserError(f"{folder.path} is in use by another process; {remedy}")
    source = choose_source(requested, folder, surroundings.named)
    check_folder(requested, folder, surroundings.named, source)
    resume, says = choose_checkpoint(requested, surroundings, source)
    continues = resume is not None and source in ("own", "hub")
    if requested.push_to_hub and surroundings.main_branch is not None:
        saved = resume.saved if resume is not None and continues else None
        refuse_another(requested, surroundings.main_branch, saved.state.run_id if saved else None)
    check_trackers(requested, surroundings.trackers)
    fit_warmup(requested, requested.max_steps, surroundings.typed_options)  # raises an error for a typed one,
    micro_batch_sizes(requested, surroundings.facts)  # this for what does not divide the batch,
    settle(requested, surroundings.facts)  # and this for what does not work on the device
    check_sharded(requested, surroundings.facts)
    origin = folder.origin if surroundings.named is None else surroundings.named.place
    return Start(requested, recipe, surroundings, resume, continues, origin if resume else None, says)


def choose_source(
    requested: TrainConfig, folder: Folder, named: NamedCheckpoint | None
) -> Literal["new", "own", "named", "hub"]:
    """Return which checkpoints the run may begin with: none, those in its folder, the named one or the Hub's.

    A command can be repeated: the run begins at the checkpoint that the command names until its folder has newer ones.
    Raises `UserError` if the run cannot begin there.
    """
    asked, newest = requested.resume_from_checkpoint, folder.steps[-1] if folder.steps else None
    if asked is None:
        return "new"
    if asked == "latest" or (asked == "auto" and newest is not None):
        return "own"
    if asked == "auto" and named is not None:  # what the folder says
        if named.is_gone:
            remedy = f"restore it, or delete {folder.path / ORIGIN_NAME} to start at step 0"
            raise UserError(f"the run in {folder.path} began with {named.text}, which is gone; {remedy}")
        return "hub" if named.text.startswith("hf://") else "named"
    if asked == "auto" or named is None:  # no checkpoint elsewhere; --hub_overwrite is for a new run
        return "hub" if publishes_training_state(requested) and not requested.hub_overwrite else "new"
    if newest is not None:
        is_this_run = named.folder == folder.place or (named.run_id is not None and named.run_id == folder.run_id)
        is_newest = is_this_run and (named.place == folder.place or named.steps[-1:] == (newest,))
        if is_newest or folder.origin == named.place:
            return "own"
        if is_this_run and max(named.steps, default=0) < newest:
            start = Path(named.text).name
            remedy = f"pass auto to continue from there, or another --output_dir to start from {start}"
            raise UserError(f"{folder.path} contains newer checkpoints, up to checkpoint-{newest}; {remedy}")
        if is_this_run:
            remedy = f"move it to {folder.path} and pass auto, or choose another --output_dir"
            raise UserError(
                f"{named.text} is of the same run as checkpoint-{newest} in {folder.path}, but newer; {remedy}"
            )
    return "hub" if named.text.startswith("hf://") else "named"


def check_folder(requested: TrainConfig, folder: Folder, named: NamedCheckpoint | None, source: str) -> None:
    """Raise `UserError` if the folder holds another run, or other files that a run would replace."""
    # A run that ended before its first checkpoint is the same; a finished one is not, as its model could be anyone's.
    is_same = requested.resume_from_checkpoint == "auto" or (named is not None and named.place == folder.origin)
    if folder.leftovers and source != "own" and (folder.results or not is_same):
        options = {"config": folder.path / CONFIG_NAME, "output_dir": folder.path, "resume_from_checkpoint": "auto"}
        resume = f"resume it ({shell_command(**options)}), " if folder.steps else ""
        raise UserError(
            f"{folder.path} contains another run ({', '.join(folder.leftovers[:3])}); {resume}"
            "delete the folder, or choose another --output_dir"
        )
    if folder.replaced:
        files = ", ".join(folder.replaced)
        raise UserError(
            f"{folder.path} contains files that a run would replace ({files}); choose another --output_dir"
        )


def choose_checkpoint(
    requested: TrainConfig, surroundings: Surroundings, source: str
) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """Return the newest intact checkpoint, or None for a new run, and the lines to print.

    Raises `UserError` if all of them are damaged or missing: a run never silently starts over.
    """
    asked, folder, named = requested.resume_from_checkpoint, surroundings.folder, surroundings.named
    intact = [checkpoint for checkpoint in surroundings.checkpoints if checkpoint.fault is None]
    faults = [f"{checkpoint.path}: {checkpoint.fault}" for checkpoint in surroundings.checkpoints if checkpoint.fault]
    if intact:
        says = [f"skipping {fault}" for fault in faults]
        if intact[0].repo_id:
            says.append(f"resuming from {intact[0].repo_id}, revision {intact[0].branch}, on the Hub")
        if source == "own" and named is not None and named.folder != folder.place and asked != "auto":
            start = f"{folder.path} continues {named.text} already"
            says.append(f"{start}; to start from there again, choose another --output_dir")
        return intact[0], tuple(says)
    if faults:
        remedy = "choose another one, or start over in another --output_dir"
        raise UserError(f"found no valid checkpoint to resume from ({'; '.join(faults)}); {remedy}")
    if asked is None:
        return None, ()
    if source == "new" or (source == "hub" and asked == "auto"):
        return None, (f"no checkpoint in {folder.path}: the run starts at step 0",)
    if named is None:
        raise UserError(f"there is no checkpoint in {folder.path}; pass auto, which needs none")
    known = ", ".join(f"checkpoint-{step}" for step in named.beside) or "none"
    raise UserError(f"there is no checkpoint in {named.text}; {Path(named.text).parent} has {known}")


# ------------------------------------------------------------------ run


@dataclass(frozen=True, kw_only=True)
class Run(Start):
    """All that is decided before the model is built."""

    started_at: float = 0.0  # this process's perf_counter() when the text was ready; `max_minutes` counts from there
    config: TrainConfig  # with every `auto` resolved for this machine, except the micro-batch, which `plan` has
    schedule: Schedule
    choices: dict[str, Choice]  # the reasons, by label
    plan: MemoryPlan
    model: ModelFacts
    metadata: dict[str, Any]  # the dataset's
    identity: dict[str, Any]  # what a run that resumes must share with its checkpoint
    begins_stage: bool  # the data are not the checkpoint's
    changes: dict[str, tuple]  # to the checkpoint's schedule: {option: (before, now)}

    @property
    def grad_accum(self) -> int:
        """Micro-batches per step and process."""
        return self.config.global_batch_size // (self.plan.micro_batch_size * self.facts.num_processes)

    def count_epochs(self, stage_examples: int) -> dict[str, float]:
        return count_epochs(self.metadata, stage_examples, self.config.streaming)


def count_epochs(metadata: dict[str, Any], num_examples: int, streaming: bool = False) -> dict[str, float]:
    """Return {name of a dataset: epochs in this many examples}. Outside a mixture, the name is "".

    {} for a stream, whose number of rows is not known. metadata: of the dataset.
    """
    if streaming:
        return {}
    parts = metadata.get("mixture") or {"": {**metadata, "share": 1.0}}
    return {
        name: part["share"] * num_examples / part["splits"]["train"]["rows"]
        for name, part in parts.items()
        if part["share"] > 0
    }


def keeps_best(option: str, num_examples: int | None, metadata: dict[str, Any], streaming: bool) -> bool:
    """Return whether the run keeps the model with the lowest validation loss.

    num_examples: of the present data, at most; None if only the time is limited.
    """
    if option != "auto":
        return option == "true"
    epochs = {} if num_examples is None else count_epochs(metadata, num_examples, streaming)
    return max(epochs.values(), default=math.inf) > EPOCHS_WITHOUT_BEST


def decide_run(
    start: Start,
    data: DataFacts,
    model: ModelFacts,
    memory: Memory,
    rates: Measured | None = None,
) -> Run:
    """Resolve the length of the run and every `auto`. Raises `UserError` if run and checkpoint do not belong together.

    rates: measured on this machine for the choices that `settle` leaves open.
    """
    requested, saved = start.requested, start.saved
    state = saved.state if saved else RunState()
    if not data.is_packed and (requested.streaming or requested.data_placement != "mmap"):
        raise UserError("--streaming and --data_placement require a packed dataset")
    before = saved.schedule if saved else None
    identity = run_identity(requested, data.metadata, model.config)
    differing = list_differences(start, identity, model) if saved else {}
    begins_stage = start.is_branch and not differing.keys().isdisjoint(DATA_IDENTITY)
    stage_start = 0 if not state.stages else state.examples if begins_stage else state.stage.examples
    position = state.step, state.examples, before, state.progress, stage_start
    num_steps = plan_schedule(requested, data.num_rows, *position).max_steps
    fitted = fit_warmup(requested, num_steps, start.surroundings.typed_options)
    schedule = plan_schedule(fitted, data.num_rows, *position)
    changes = check_identity(start, differing, schedule) if saved else {}
    if begins_stage and measure_progress(schedule, state) >= 1:
        remedy = "pass a larger --max_steps or --max_minutes, or an earlier checkpoint"
        raise UserError(f"no step of the run is left for the new data; {remedy}")
    continues = start.continues and not ((changes or begins_stage) and start.resume and start.resume.repo_id)
    if start.continues and not continues and requested.push_to_hub and start.surroundings.main_branch is not None:
        note = "with other data, another schedule or another batch, this is a new run: "
        if requested.resume_from_checkpoint == "auto":  # which starts over with --hub_overwrite
            note += f"resume from hf://{requested.hub_model_id} and "
        refuse_another(requested, start.surroundings.main_branch, None, note)

    config = dataclasses.replace(  # what the data and the model have resolved
        requested,
        max_steps=schedule.max_steps,
        num_train_epochs=None,
        warmup_steps=schedule.warmup_steps,
        model_type=model.config.model_type,
        dataset_revision=data.metadata["source"].get("dataset_revision") if requested.dataset_name else None,
    )
    total_flops = count_training_flops(config, model.padded, count_parameters(model.padded))
    facts = dataclasses.replace(start.facts, total_flops=total_flops, kept=state.hardware)
    choices = choose(config, facts, rates)
    config = apply_choices(config, choices, facts)
    max_examples = None if schedule.num_examples is None else schedule.num_examples - stage_start
    keep_best = keeps_best(config.load_best_model_at_end, max_examples, data.metadata, config.streaming)
    config = dataclasses.replace(config, load_best_model_at_end="true" if keep_best else "false")
    if keep_best and max_examples and not config.streaming:  # a stream does not know its epochs
        count = min(max(count_epochs(data.metadata, max_examples).values()), EVALUATIONS)
        period = max(1, int(max_examples / count / config.global_batch_size))
        config = dataclasses.replace(config, eval_steps=min(config.eval_steps, period))
    if facts.sharding is not None:
        choices = {"layout": Choice("FSDP", facts.sharding.describe()), **choices}
    if config.max_eval_samples == "auto" and saved:  # an extended run evaluates the same rows
        config = dataclasses.replace(config, max_eval_samples=state.initial.get("num_rows", "auto"))
    earlier = state.memory if saved and saved.num_processes == facts.num_processes else None
    plan = choose_plan(config, model.padded, facts, memory, earlier, data.num_bytes)
    return Run(
        **vars(dataclasses.replace(start, continues=continues)),
        config=plan.apply(config),
        schedule=schedule,
        choices=choices,
        plan=plan,
        model=model,
        metadata=data.metadata,
        identity=identity,
        begins_stage=begins_stage,
        changes=changes,
    )


def fit_warmup(config: TrainConfig, num_steps: int | None, typed_options: Collection[str]) -> TrainConfig:
    """Return the options with a warm-up that ends before the run does, or the learning rate would only rise.

    Raises `UserError` if the warm-up is typed. A time-limited run has its own limit (`LONGEST_WARMUP`).
    """
    has_peak = config.max_minutes is not None or config.lr_scheduler_type == "constant"
    if num_steps is None or has_peak or config.warmup_steps < max(1, num_steps):
        return config
    if "warmup_steps" in typed_options:
        problem = f"--warmup_steps {config.warmup_steps:,.0f} leaves no step of the run's {num_steps:,}"
        raise UserError(f"{problem} for the peak learning rate; pass a smaller number, or a share below 1")
    return dataclasses.replace(config, warmup_steps=LONGEST_WARMUP)


def run_identity(config: TrainConfig, metadata: dict[str, Any], model_config: PreTrainedConfig) -> dict[str, Any]:
    """Return what a resumed run must share with its checkpoint: data (metadata: of the dataset), model and options."""
    return {
        "dataset": metadata["content_sha256"],
        "dataset_revision": metadata["source"].get("dataset_revision"),
        "streamed_text": metadata.get("fingerprint") if config.streaming else None,
        "tokenizer": metadata["tokenizer_sha256"],
        **{name: getattr(config, name) for name in IDENTITY_OPTIONS},
        "dataset_weights": [round(part["share"], 9) for part in metadata.get("mixture", {}).values()] or None,
        **_model_identity(model_config),
    }


def _model_identity(model_config: PreTrainedConfig) -> dict[str, Any]:
    shape = {"vocab_size": model_config.vocab_size, "n_positions": model_config.max_position_embeddings}
    return shape | {name: getattr(model_config, name) for name in model_options(model_config.model_type)}


def list_differences(start: Start, identity: dict[str, Any], model: ModelFacts) -> dict[str, tuple]:
    """Return how a run differs from its checkpoint, apart from the schedule: {name: (before, now)}."""
    assert start.saved is not None
    # An option that is newer than the checkpoint had its default; so had a model's option from a later Transformers.
    before = {name: OPTIONS[name].default for name in IDENTITY_OPTIONS} | start.saved.identity
    before |= _model_identity(model.saved) if model.saved else {}
    names = identity.keys() - {"dataset_revision"}  # the rows count, not the commit
    return {name: (before.get(name), identity[name]) for name in names if before.get(name) != identity[name]}


def check_identity(start: Start, differing: dict[str, tuple], schedule: Schedule) -> dict[str, tuple]:
    """Return what a resumed run changes: {option: (before, now)} of the schedule, and the global batch if it is typed.

    differing: from `list_differences`. Raises `UserError` for a difference that is not allowed; in a branch, the data
    may differ.
    """
    assert start.resume is not None and start.saved is not None
    where, saved = start.resume.path, start.saved
    refused = {key: values for key, values in differing.items() if not (start.is_branch and key in DATA_IDENTITY)}
    changes = list_changes(saved.schedule, schedule, saved.state.examples)
    micro_batch = {"per_device_train_batch_size", "gradient_accumulation_steps"}  # both set the batch
    typed_options = start.surroundings.typed_options
    if not ("global_batch_size" in typed_options or micro_batch <= typed_options):  # which is consent to change it
        refused |= {key: value for key, value in changes.items() if key == "global_batch_size"}
    if refused:
        listed = "; ".join(f"{key} {_short(old)} -> {_short(now)}" for key, (old, now) in sorted(refused.items()))
        remedy = "pass the run's own options (--config training_config.yaml of its folder), or start a new run"
        if refused.keys() <= set(DATA_IDENTITY):
            how = f"train on the new data in another --output_dir with {shell_command(resume_from_checkpoint=where)}"
            remedy = f"pass its data in the same order, and its --block_size, or {how}"
        if "tokenizer" in refused:
            remedy = f"prepare the text with the tokenizer of the run, {shell_command(tokenizer_name=where)}"
        if "n_positions" in refused:
            remedy = f"pass --block_size {refused['n_positions'][0]}, the model's number of positions, or less"
        if refused.keys() == {"global_batch_size"}:
            remedy = f"pass --global_batch_size {schedule.global_batch_size} to continue with another batch"
        raise UserError(f"{where} belongs to a run with other options: {listed}; {remedy}")
    if schedule.max_steps is not None and schedule.max_steps < saved.state.step:
        option = "--num_train_epochs" if start.requested.num_train_epochs else "--max_steps"
        remedy = f"pass a larger {option}, or an earlier checkpoint and another --output_dir"
        raise UserError(f"{where} is at step {saved.state.step} already; {remedy}")
    return changes


def _short(value: object) -> str:
    return value[:12] if isinstance(value, str) and len(value) == 64 else repr(value)  # a SHA-256


def recorded_options(run: Run, has_ended: bool) -> TrainConfig:
    """Return the options that repeat the run, for training_config.yaml: the requested ones, with a length in steps.

    has_ended: no step is left to make, so the weights are those of the checkpoint's schedule.
    """
    schedule = run.saved.schedule if has_ended and run.saved else run.schedule
    options = {name: getattr(schedule, name) for name in ("global_batch_size", *SCHEDULE_OPTIONS)}
    resolved = {name: getattr(run.config, name) for name in ("num_train_epochs", "model_type", "dataset_revision")}
    if schedule.max_minutes and run.requested.num_train_epochs:  # other minutes keep this limit
        resolved["num_train_epochs"], options["max_steps"] = run.requested.num_train_epochs, None
    return dataclasses.replace(run.requested, **options | resolved)


# ------------------------------------------------------------------ turn


@dataclass(frozen=True)
class Turn:
    """What the loop does before the next step."""

    progress: float  # of the run, from 0 to 1
    decay_start: int | None  # for the state
    save: bool
    evaluate: bool
    end: bool  # instead of the step


def decide_turn(run: Run, state: RunState, stop: bool) -> Turn:
    """Decide what comes before the next step. stop: a signal has arrived.

    A step is saved before it is evaluated, so a run that is killed during an evaluation loses only that evaluation,
    not the steps since the previous checkpoint.
    """
    config, progress = run.config, measure_progress(run.schedule, state)
    is_last = is_over(run, state)
    decay_start = None
    if run.schedule.is_decaying(progress):
        decay_start = state.step if state.decay_start is None else state.decay_start

    def is_due(period: int) -> bool:  # 0: only at the end
        return is_last or (period > 0 and state.step % period == 0)

    saves = config.save_steps > 0 and (is_due(config.save_steps) or state.step == decay_start)
    is_first = state.step == state.stage.step
    evaluate = (is_first or is_due(config.eval_steps)) and not stop and state.step not in state.evaluations
    return Turn(
        progress=progress,
        decay_start=decay_start,
        save=state.step > 0 and (stop or (saves and state.step != state.saved_step)),
        evaluate=evaluate,
        end=stop or (is_last and not evaluate),
    )


def is_over(run: Run, state: RunState) -> bool:
    """Return whether no step is left to make."""
    stalled = has_stalled(state, run.config.early_stopping_patience)
    return measure_progress(run.schedule, state) >= 1 or (state.step > 0 and stalled)


def measure_progress(schedule: Schedule, state: RunState) -> float:
    """Return the share of the run's examples, or of its time for steps, that is used up: from 0 to 1."""
    if state.step == 0:
        return 0.0
    shares = [state.examples / schedule.num_examples] if schedule.num_examples else []
    if schedule.max_minutes:
        shares.append(time_share(schedule, state))
    return min(1.0, max(shares))


def time_share(schedule: Schedule, state: RunState) -> float:
    """Return the share of the minutes for steps that is used up; above 1 if they are over."""
    reserved = CLOSING_SECONDS + 2 * state.initial.get("seconds", 0.0)  # save, evaluate, export
    available = 60 * (schedule.max_minutes or math.inf) - reserved - state.setup_seconds
    return (state.seconds - state.setup_seconds) / max(1.0, available)


def has_stalled(state: RunState, patience: int | None) -> bool:
    """Return whether none of the last `patience` evaluations since `patience_start` had a new lowest loss."""
    if patience is None:
        return False
    losses = [loss for step, loss in state.losses.items() if int(step) > state.patience_start]
    return bool(losses) and len(losses) - 1 - losses.index(min(losses)) >= patience
