"""What a run does, and when: pure functions of frozen facts, which tests/refuse/test_decide.py tests as a table.

`decide_start`: which checkpoint the run begins with, whether it continues that run, and what is refused before text is
prepared. `decide_run`: its length, its schedule, and what every `auto` means here. `decide_turn`: whether to save, to
evaluate or to end before the next step. recipe/run/look.py finds the facts, and recipe/run/start.py acts.
"""

import dataclasses
import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from recipe.arguments import shell_command
from recipe.checkpoint import RunState, SavedState
from recipe.config import CONFIG_NAME, DEFAULTS, IDENTITY_OPTIONS, PATHS, SCHEDULE_OPTIONS, TrainConfig
from recipe.errors import UserError
from recipe.hardware.accelerator import check_trackers
from recipe.hardware.choices import Choice, Machine, apply_choices, check_sharded, choose, settle
from recipe.hardware.memory import MemoryPlan, choose_plan, micro_batch_sizes
from recipe.hardware.probe import Measured
from recipe.model.build import model_options
from recipe.model.size import count_parameters, count_training_flops
from recipe.optim.schedule import LONGEST_WARMUP, Schedule, list_changes, plan_schedule
from recipe.publish.hub import MainBranch, publishes_training_state, refuse_another

ORIGIN_NAME = ".resumed_from"  # in output_dir: the checkpoint with which its run began
CLOSING_SECONDS = 3.0  # for the last checkpoint, the export and the curve
EPOCHS_WITHOUT_BEST = 2.0  # after which a validation loss may rise again
EVAL_STEPS = 200  # between evaluations, with `eval_steps auto`
# Also with `auto`: the evaluations that look for the best model, at least and at most; more would take longer than a
# short run on a tiny text.
EVALUATIONS = (10, 40)
# What begins a new stage when it changes. Only a branch, a run that begins with the checkpoint of another, may do so.
DATA_IDENTITY = ("dataset", "streamed_text", "streaming", "dataset_weights", "block_size")
FIXED = ("optim", "pad_vocab_to_multiple_of")  # of IDENTITY_OPTIONS: the saved tensors depend on them
RESOLVED = ("num_train_epochs", "model_type", "dataset_revision")  # by the run, in its training_config.yaml


# ------------------------------------------------------------------ facts


@dataclass(frozen=True)
class Folder:
    """An output folder as it is found."""

    path: Path  # as the command spells it
    place: str  # where that is, the same for each spelling
    steps: tuple[int, ...] = ()  # of its checkpoints, ascending
    left: tuple[str, ...] = ()  # what else of value a run has left: a model, a log with a step, results
    has_ended: bool = False  # that run
    replaced: tuple[str, ...] = ()  # files of something else that a run would replace
    origin: str | None = None  # what ORIGIN_NAME says: a place, or an address on the Hub


@dataclass(frozen=True)
class Named:
    """What the command names as the beginning, or, for `auto`, the recorded origin of a folder without checkpoints."""

    text: str  # as it is spelled: a path, or hf://user/name@BRANCH
    place: str  # where that is
    is_gone: bool = False
    beside: tuple[int, ...] = ()  # the steps of the checkpoints in the folder around it


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has been verified."""

    path: Path  # where it is, or will be when it is downloaded
    fault: str | None = None  # why it cannot be used
    saved: SavedState | None = None  # None if there is a fault
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of its run, if its folder is here
    repo_id: str | None = None  # the repository that holds it, if it is on the Hub
    branch: str = ""


@dataclass(frozen=True)
class Surroundings:
    """All that decides how a run starts, besides its options."""

    machine: Machine  # processes, device, launcher
    folder: Folder
    named: Named | None = None
    checkpoints: tuple[Checkpoint, ...] = ()  # to begin with, newest first; the search ends at the first intact one
    main_branch: MainBranch | None = None  # of the repository to publish to; None if it is new or cannot be asked
    trackers: tuple[str, ...] = ()  # that are installed
    typed_options: frozenset[str] = frozenset()  # the names of the options on the command line


@dataclass(frozen=True)
class DataFacts:
    """What a run needs to know of its dataset."""

    num_rows: int  # of the training split
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class ModelFacts:
    """The model that a run trains."""

    config: PreTrainedConfig  # with the vocabulary that is saved
    padded: PreTrainedConfig  # with the vocabulary that is trained
    saved: PreTrainedConfig | None = None  # of the checkpoint
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)  # to export, besides config and weights
    is_chat: bool = False  # the tokenizer has a chat template
    notes: tuple[str, ...] = ()  # what the run changes in the model that it starts from, and what its export lacks


# ------------------------------------------------------------------ start


@dataclass(frozen=True)
class Start:
    """How a run starts."""

    requested: TrainConfig
    recipe: str  # its name
    surroundings: Surroundings
    machine: Machine  # with the choices of the checkpoint
    resume: Checkpoint | None = None  # to begin with
    continues: bool = False  # whether it continues the checkpoint's run; else a new run begins with it
    origin: str | None = None  # for ORIGIN_NAME
    says: tuple[str, ...] = ()

    @property
    def output_dir(self) -> Path:
        return self.surroundings.folder.path

    @property
    def typed_options(self) -> frozenset[str]:
        return self.surroundings.typed_options

    @property
    def saved(self) -> SavedState | None:
        return self.resume.saved if self.resume else None

    @property
    def is_branch(self) -> bool:
        """Whether options may change, because this is a new run, or may become one: one that names the Hub."""
        is_of_hub = self.resume is not None and self.resume.repo_id is not None
        return not self.continues or (is_of_hub and self.surroundings.named is not None)

    @property
    def base_model(self) -> str | Path | None:
        """The model that sets shape and tokenizer. A resumed run takes its checkpoint: the original may be gone."""
        named = self.requested.model_name_or_path
        return self.resume.path if self.resume and named else named


def decide_start(requested: TrainConfig, recipe: str, surroundings: Surroundings) -> Start:
    """Decide where the run starts. Raises `UserError` for what cannot work, before text is prepared for hours."""
    folder = surroundings.folder
    named = surroundings.named
    check_folder(requested, folder, named)
    resume, says = choose_checkpoint(requested, surroundings)
    # The Hub's checkpoint is this run's only in the repository to which this run publishes, whatever its id says.
    is_own = bool(folder.steps) or (resume and requested.push_to_hub and resume.repo_id == requested.hub_model_id)
    continues = resume is not None and bool(is_own)
    saved = resume.saved if resume else None
    if requested.push_to_hub and surroundings.main_branch is not None:
        refuse_another(requested, surroundings.main_branch, saved.state.run_id if saved and continues else None)
    check_trackers(requested, surroundings.trackers)
    machine = dataclasses.replace(surroundings.machine, kept=saved.state.hardware if saved else {})
    # Each of these raises an error for what cannot work: a typed warm-up that is too long, a micro-batch that does not
    # divide the batch, and what the device or shards do not support.
    fit_warmup(requested, requested.max_steps, surroundings.typed_options)
    micro_batch_sizes(requested, machine)
    settle(requested, machine)
    check_sharded(requested, machine)
    origin = folder.origin
    if not folder.steps:
        origin = find_origin(resume) if named else None
    return Start(requested, recipe, surroundings, machine, resume, continues, origin, says)


def find_origin(resume: Checkpoint | None) -> str | None:
    """Return the place of the checkpoint with which a run begins, as the newest one of a folder may change."""
    if resume is None or resume.repo_id is None:
        return os.path.realpath(resume.path) if resume else None
    return f"hf://{resume.repo_id}@{resume.branch}"


def check_folder(requested: TrainConfig, folder: Folder, named: Named | None) -> None:
    """Raise `UserError` if the run may not begin in this folder.

    If the folder has checkpoints, the command has to name it, its newest checkpoint or its origin, or pass `auto`; so
    a command can be repeated. If not, it may hold what is left of a run that ended before its first checkpoint.
    """
    newest = os.path.join(folder.place, f"checkpoint-{folder.steps[-1]}") if folder.steps else None
    origin = folder.origin or ""
    holder = origin.partition("@")[0] if origin.startswith("hf://") else os.path.dirname(origin)  # or the run in it
    own = (folder.place, newest, folder.origin, holder)
    is_same = requested.resume_from_checkpoint == "auto" or (named is not None and named.place in own)
    other = "choose another --output_dir" + (f" to begin with {named.text}" if named else "")
    if folder.steps and not is_same:
        config = folder.path / CONFIG_NAME
        again = shell_command(config=config, output_dir=folder.path, resume_from_checkpoint="auto")
        what = f"{folder.path} contains a run, up to {os.path.basename(str(newest))}"
        raise UserError(f"{what}; continue it ({again}), delete the folder, or {other}")
    if not folder.steps and folder.has_ended and is_same:
        raise UserError(f"the run in {folder.path} has ended, and left no checkpoint; delete the folder, or {other}")
    if not folder.steps and folder.left and not is_same:
        raise UserError(f"{folder.path} contains another run ({folder.left[0]}); delete the folder, or {other}")
    if folder.replaced:
        files = ", ".join(folder.replaced)
        raise UserError(
            f"{folder.path} contains files that a run would replace ({files}); choose another --output_dir"
        )


def choose_checkpoint(requested: TrainConfig, surroundings: Surroundings) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """Return the newest intact checkpoint, or None for a new run, and the lines to print.

    Raises `UserError` if all of them are damaged or missing: a run never silently starts over.
    """
    folder = surroundings.folder
    named = surroundings.named
    intact = [checkpoint for checkpoint in surroundings.checkpoints if checkpoint.fault is None]
    faults = [f"{checkpoint.path}: {checkpoint.fault}" for checkpoint in surroundings.checkpoints if checkpoint.fault]
    if intact:
        says = [f"skipping {fault}" for fault in faults]
        if intact[0].repo_id:
            says.append(f"resuming from {intact[0].repo_id}, revision {intact[0].branch}, on the Hub")
        if folder.steps and named is not None and not named.place.startswith(folder.place):
            start = f"{folder.path} continues {named.text} already"
            says.append(f"{start}; to start from there again, choose another --output_dir")
        return intact[0], tuple(says)
    if faults:
        remedy = "choose another one, or start over in another --output_dir"
        raise UserError(f"found no valid checkpoint to resume from ({'; '.join(faults)}); {remedy}")
    if named is not None and requested.resume_from_checkpoint == "auto" and named.is_gone:
        remedy = f"restore it, or delete {folder.path / ORIGIN_NAME} to start at step 0"
        raise UserError(f"the run in {folder.path} began with {named.text}, which is gone; {remedy}")
    if named is not None:
        remedy = "--model_name_or_path starts from a model alone"
        if named.beside:
            known = ", ".join(f"checkpoint-{step}" for step in named.beside)
            remedy = f"{Path(named.text).parent} has {known}"
        raise UserError(f"there is no checkpoint in {named.text}; {remedy}")
    if requested.resume_from_checkpoint is None:
        return None, ()
    return None, (f"no checkpoint in {folder.path}: the run starts at step 0",)


def resumes_from_its_repository(requested: TrainConfig) -> bool:
    """Return whether `auto` looks on the Hub, for a folder that says nothing. `hub_overwrite` is for a new run."""
    is_auto = requested.resume_from_checkpoint == "auto"
    return is_auto and publishes_training_state(requested) and not requested.hub_overwrite


# ------------------------------------------------------------------ run


@dataclass(frozen=True, kw_only=True)
class Run:
    """All that is decided before the model is built."""

    start: Start
    started_at: float = 0.0  # this process's perf_counter() when the text was ready; `max_minutes` counts from there
    config: TrainConfig  # with every `auto` resolved for this machine
    schedule: Schedule
    choices: dict[str, Choice]  # the reasons, by label
    plan: MemoryPlan  # the estimate
    model: ModelFacts
    data: DataFacts
    identity: dict[str, Any]  # what a run that resumes must share with its checkpoint
    continues: bool  # the checkpoint's run
    begins_stage: bool  # the data, or their order, are not the checkpoint's
    changes: dict[str, tuple]  # to what the checkpoint's run trained with: {option: (before, now)}
    other_changes: dict[str, tuple]  # to its other options

    @property
    def grad_accum(self) -> int:
        """Micro-batches per step and process."""
        return int(self.config.gradient_accumulation_steps or 1)

    def count_epochs(self, stage_examples: int) -> dict[str, float]:
        return count_epochs(self.data.metadata, stage_examples, self.config.streaming)


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
    start: Start, data: DataFacts, model: ModelFacts, usable_bytes: int, rates: Measured | None = None
) -> Run:
    """Resolve the length of the run and every `auto`. Raises `UserError` if run and checkpoint do not belong together.

    usable_bytes: the memory of each process. rates: measured here, for the choices that nothing else decides.
    """
    requested = start.requested
    saved = start.saved
    resume = start.resume
    state = saved.state if saved else RunState()
    identity = run_identity(requested, data.metadata, model.config)
    differing = list_differences(start, identity, model) if saved else {}
    begins_stage = start.is_branch and not differing.keys().isdisjoint((*DATA_IDENTITY, "seed"))
    stage_start = 0
    if state.stages:
        stage_start = state.examples if begins_stage else state.stage.examples
    before = saved.schedule if saved else None
    position = (state.step, state.examples, before, state.progress, stage_start)
    num_steps = plan_schedule(requested, data.num_rows, *position).max_steps
    schedule = plan_schedule(fit_warmup(requested, num_steps, start.typed_options), data.num_rows, *position)
    changes = check_identity(start, differing, schedule) if saved else {}
    if begins_stage and measure_progress(schedule, state) >= 1:
        remedy = "pass a larger --max_steps or --max_minutes, or an earlier checkpoint"
        raise UserError(f"no step of the run is left for the new data; {remedy}")
    continues = start.continues and not ((changes or begins_stage) and resume and resume.repo_id)
    if start.continues and not continues and start.surroundings.main_branch is not None:
        note = "with other data, another schedule or other options, this is a new run: "
        if requested.resume_from_checkpoint == "auto":  # which starts over with --hub_overwrite
            note += f"resume from hf://{requested.hub_model_id} and "
        refuse_another(requested, start.surroundings.main_branch, None, note)

    config = dataclasses.replace(  # what the data and the model have resolved
        requested,
        max_steps=schedule.max_steps,
        num_train_epochs=None,
        warmup_steps=schedule.warmup_steps,
        model_type=model.config.model_type,
        sample_prompt=requested.sample_prompt or ("Hello!" if model.is_chat else "The"),
        dataset_revision=data.metadata["source"].get("dataset_revision") if requested.dataset_name else None,
    )
    total_flops = count_training_flops(config, model.padded, count_parameters(model.padded))
    machine = dataclasses.replace(start.machine, total_flops=total_flops)
    choices = choose(config, machine, rates)
    config = apply_choices(config, choices, machine)
    if machine.sharding is not None:
        choices = {"layout": Choice("FSDP", machine.sharding.describe()), **choices}
    max_examples = None if schedule.num_examples is None else schedule.num_examples - stage_start
    keep_best = keeps_best(config.load_best_model_at_end, max_examples, data.metadata, config.streaming)
    config = dataclasses.replace(config, load_best_model_at_end="true" if keep_best else "false")
    if config.eval_steps == "auto":
        period = choose_eval_steps(config, max_examples, data.metadata, keep_best)
        config = dataclasses.replace(config, eval_steps=period)
    if config.max_eval_samples == "auto" and saved and not begins_stage:  # an extended run evaluates the same rows
        config = dataclasses.replace(config, max_eval_samples=state.initial.get("num_rows", "auto"))
    earlier = state.memory if saved and saved.num_processes == machine.num_processes else None
    plan = choose_plan(config, model.padded, machine, usable_bytes, earlier)
    return Run(
        start=start,
        config=plan.apply(config, machine.num_processes),
        schedule=schedule,
        choices=choices,
        plan=plan,
        model=model,
        data=data,
        identity=identity,
        continues=continues,
        begins_stage=begins_stage,
        changes=changes,
        other_changes=list_other_changes(start) if saved else {},
    )


def choose_eval_steps(config: TrainConfig, num_examples: int | None, metadata: dict[str, Any], keep_best: bool) -> int:
    """Return the steps between evaluations with `auto`.

    num_examples: of the present data, at most; None if only the time is limited. metadata: the dataset's.
    """
    if num_examples is None or not keep_best:
        return EVAL_STEPS
    epochs = count_epochs(metadata, num_examples, config.streaming)  # a stream does not know them
    fewest, most = EVALUATIONS
    count = min(max([fewest, *epochs.values()]), most)
    return max(1, min(EVAL_STEPS, int(num_examples / count / config.global_batch_size)))


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
    before = {name: DEFAULTS[name] for name in IDENTITY_OPTIONS} | start.saved.identity
    if model.saved:
        before |= _model_identity(model.saved)
    names = identity.keys() - {"dataset_revision"}  # the rows count, not the commit
    return {name: (before.get(name), identity[name]) for name in names if before.get(name) != identity[name]}


def list_other_changes(start: Start) -> dict[str, tuple]:
    """Return how the other options differ from those of the checkpoint's run: {name: (before, now)}.

    Compared by its private training_config.yaml, so they include an option that somebody has added.
    """
    assert start.resume is not None
    told = {*SCHEDULE_OPTIONS, *IDENTITY_OPTIONS, *RESOLVED, "global_batch_size", "config_overrides", "push_to_hub"}
    told.update(PATHS)
    before = DEFAULTS | start.resume.options
    return {
        name: (before[name], now)
        for name, now in sorted(vars(start.requested).items())
        if start.resume.options and name not in told and not name.startswith("hub_") and before[name] != now
    }


def may_change_in_branch(name: str) -> bool:
    """Return whether a branch may change a part of the identity: data, optimizer, seed and dropout, but no shape."""
    is_free = name in DATA_IDENTITY or (name in IDENTITY_OPTIONS and name not in FIXED)
    return is_free or name.endswith(("_pdrop", "dropout"))


def check_identity(start: Start, differing: dict[str, tuple], schedule: Schedule) -> dict[str, tuple]:
    """Return what a resumed run changes in its training, apart from its text: {option: (before, now)}.

    differing: from `list_differences`. Raises `UserError` for what may not change: in the run's own folder all but the
    schedule and, if it is typed, the global batch; in a branch, the tokenizer, the shape and the kind of optimizer.
    """
    assert start.resume is not None and start.saved is not None
    where = start.resume.path
    saved = start.saved
    refused = {key: v for key, v in differing.items() if not (start.is_branch and may_change_in_branch(key))}
    changes = list_changes(saved.schedule, schedule, saved.state.examples)
    micro_batch = {"per_device_train_batch_size", "gradient_accumulation_steps"}  # both set the batch
    is_typed = "global_batch_size" in start.typed_options or micro_batch <= start.typed_options
    if not is_typed:  # which is consent to change it
        refused |= {key: values for key, values in changes.items() if key == "global_batch_size"}
    if refused:
        listed = "; ".join(f"{key} {_short(old)} -> {_short(now)}" for key, (old, now) in sorted(refused.items()))
        remedy = "pass the run's own options (--config training_config.yaml of its folder), or start a new run"
        if all(map(may_change_in_branch, refused)):
            remedy = "pass those of the run, its data in the same order, or continue with the new ones in another "
            remedy += f"--output_dir with {shell_command(resume_from_checkpoint=where)}"
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
    text = ("dataset", "streamed_text")
    return changes | {key: values for key, values in sorted(differing.items()) if key not in text}


def _short(value: object) -> str:
    return value[:12] if isinstance(value, str) and len(value) == 64 else repr(value)  # a SHA-256


def recorded_options(run: Run, has_ended: bool) -> TrainConfig:
    """Return the options that repeat the run, for training_config.yaml: the requested ones, with a length in steps.

    has_ended: no step is left to make, so the weights are those of the checkpoint's schedule.
    """
    requested = run.start.requested
    saved = run.start.saved
    schedule = saved.schedule if has_ended and saved else run.schedule
    options = {name: getattr(schedule, name) for name in ("global_batch_size", *SCHEDULE_OPTIONS)}
    resolved = {name: getattr(run.config, name) for name in RESOLVED}
    if has_ended and run.continues:
        resolved |= {name: before for name, (before, _) in run.other_changes.items()}
    if schedule.max_minutes and requested.num_train_epochs:  # other minutes keep this limit
        resolved["num_train_epochs"] = requested.num_train_epochs
        options["max_steps"] = None
    return dataclasses.replace(requested, **options | resolved)


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
    config = run.config
    progress = measure_progress(run.schedule, state)
    is_last = is_over(run, state)
    decay_start = None
    if run.schedule.is_decaying(progress):
        decay_start = state.step if state.decay_start is None else state.decay_start

    def is_due(period: Any) -> bool:  # 0: only at the end
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
