"""The start of a run: its processes, folder, data and length, what `auto` means here, and its state."""

import contextlib
import copy
import dataclasses
import gc
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import set_seed
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from recipe.checkpoint import RunState, Trained, find_checkpoint, load_checkpoint, read_state
from recipe.config import TrainConfig
from recipe.data.batches import TrainBatches, TrainOrder, read_rows
from recipe.data.cache import prepare_text
from recipe.data.mixture import open_datasets, order_of
from recipe.data.packed import PackedDataset, encoding_of, metadata_of
from recipe.data.stream import open_stream, read_stream
from recipe.data.tokenizer import count_ids
from recipe.errors import UserError
from recipe.evaluation.tasks import load_tasks
from recipe.hardware.accelerator import build_accelerator, check_trackers, find_facts, measure_open, parallelize
from recipe.hardware.choices import (
    Choice,
    apply_choices,
    check_sharded,
    choose,
    describe_choices,
    settle,
)
from recipe.hardware.memory import MemoryPlan, micro_batch_sizes, plan_device, try_micro_batch
from recipe.hardware.processes import (
    check_same_run,
    gather,
    host_group,
    on_all_processes,
    on_main_process,
    start_processes,
    wait_on_host,
)
from recipe.hardware.sharding import USE_FSDP, Sharding
from recipe.model.build import build_model_config, model_options, translate_dropout
from recipe.model.files import new_files, tuned_files
from recipe.model.loss import LanguageModelingLoss
from recipe.model.size import count_parameters, count_training_flops, padded_vocab_size
from recipe.model.weights import load_pretrained
from recipe.optim.optimizers import check_optimizer
from recipe.publish.download import fetch_checkpoint
from recipe.publish.hub import DOWNLOAD_NAME, check_hub, check_owner
from recipe.run.folder import choose_output_dir, release_output_dirs
from recipe.run.resume import (
    check_identity,
    choose_start,
    keep_warmup,
    origin_of,
    record_origin,
    resolve_length,
    run_identity,
)

CLOSING_SECONDS = 3.0  # for the last checkpoint, the export and the curve


@contextlib.contextmanager
def restored_process() -> Iterator[None]:
    """Leave the Python process as it was, also after an error: a notebook trains again with other options."""
    gc.collect()  # what an earlier run has left after an error
    deterministic, torch_options = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic
    fill, num_threads = torch_options.fill_uninitialized_memory, torch.get_num_threads()
    precision, fsdp = torch.get_float32_matmul_precision(), os.environ.get(USE_FSDP)
    try:
        yield
        PartialState().destroy_process_group()  # not after an error, when the other processes may not take part
    finally:
        if fsdp is not None:
            os.environ[USE_FSDP] = fsdp
        AcceleratorState._reset_state(reset_partial_state=True)  # Accelerate 1.15 has no public way
        GradientState._reset_state()
        host_group.cache_clear()
        release_output_dirs()
        torch.use_deterministic_algorithms(deterministic)
        torch_options.fill_uninitialized_memory = fill
        torch.set_num_threads(num_threads)
        torch.set_float32_matmul_precision(precision)
        torch.compiler.reset()  # frees the graphs, and with them the model
        gc.unfreeze()
        gc.enable()
    gc.collect()  # not after an error: the launcher's SIGTERM would come before it is reported


@dataclass(frozen=True)
class Start:
    """What is known before the data: the processes, the folder, and the checkpoint to resume from."""

    processes: PartialState
    sharding: Sharding | None  # None: every process has the whole model
    output_dir: Path
    resume_dir: Path | None  # the checkpoint that the run continues
    run_id: str | None  # the checkpoint's; None if this is a new run
    source: str | Path | None  # the model that sets shape and tokenizer


@dataclass(frozen=True)
class Run(Start):
    """All that is decided before the model is built."""

    started_at: float  # time.perf_counter, when the text is prepared, from where `max_minutes` counts
    accelerator: Accelerator
    recipe: str
    config: TrainConfig  # with every `auto` resolved for this machine, except the micro-batch, which `plan` has
    typed: TrainConfig  # the same as typed, with the length in steps; the output folder records it
    num_train_epochs: float | None  # as given, instead of a number of steps
    choices: dict[str, Choice]  # the reasons, by label
    plan: MemoryPlan
    model_config: PreTrainedConfig  # with the vocabulary that is saved, without padding
    metadata: dict[str, Any]  # the dataset's
    identity: dict[str, Any]  # what a resumed run must share with its checkpoint
    changes: dict[str, tuple]  # to the checkpoint's schedule: {option: (before, now)}
    files: dict[str, bytes]  # of the exported model, besides config and weights
    notes: list[str]  # what the run changes in the model that it starts from

    @property
    def vocab_size(self) -> int:
        """Without padding."""
        return self.model_config.vocab_size

    @property
    def grad_accum(self) -> int:
        """Micro-batches per step and process."""
        return self.config.global_batch_size // (self.plan.micro_batch_size * self.accelerator.num_processes)


def open_run(config: TrainConfig, recipe: str) -> Start:
    """Find the processes, lock the output folder, and find the checkpoint to resume from.

    Raises `UserError` for options that cannot work, before text is prepared for hours.
    """
    sharding = start_processes()
    output_dir = on_main_process(lambda: choose_output_dir(config, recipe))
    on_main_process(lambda: check_hub(config))
    check_trackers(config)
    resume_dir = on_main_process(lambda: find_start(config, output_dir))
    run_id = read_state(resume_dir)["run_id"] if resume_dir and is_same_run(resume_dir, output_dir) else None
    on_main_process(lambda: check_owner(config, run_id))
    # A resumed run takes the shape from its checkpoint: the model that it started from may be gone.
    source = resume_dir if resume_dir and config.model_name_or_path else config.model_name_or_path
    processes = PartialState()
    micro_batch_sizes(config, processes.num_processes, processes.device.type)
    facts = find_facts(processes.device, processes.num_processes)
    settle(config, facts)
    if sharding is not None:
        check_sharded(config, facts)
    check_optimizer(config, processes.device)
    build_model_config(config, 1, 0, source)
    load_tasks(config.eval_tasks)  # reports a wrong file before text is prepared
    return Start(processes, sharding, output_dir, resume_dir, run_id, source)


def find_start(config: TrainConfig, output_dir: Path) -> Path | None:
    """Return the checkpoint that the run resumes from, downloaded if it is on the Hub; None for a new run."""
    named, start = config.resume_from_checkpoint, choose_start(config, output_dir)
    resume_dir = find_checkpoint(output_dir, fetch_checkpoint(config, start, output_dir))
    record_origin(config, output_dir, resume_dir)
    here = [str(path.absolute()) for path in (output_dir, resume_dir or output_dir)]
    if start == "latest" and named not in ("auto", "latest") and origin_of(config) not in here:
        print(f"{output_dir} continues {named} already; to start from there again, choose another --output_dir")
    return resume_dir


def open_dataset(config: TrainConfig, start: Start) -> PackedDataset:
    """Open the packed dataset; the main process prepares text first.

    To train on a dataset of your own, return it here. It needs `train` and `validation`, each with a length and
    indexed by int64 [n] for int64 [n, block_size + 1], and a `tokenizer` of Transformers.
    """
    if config.dataset_name and config.dataset_revision is None and start.resume_dir:  # the Hub may have a newer one
        revision = read_state(start.resume_dir)["identity"].get("dataset_revision")
        config = dataclasses.replace(config, dataset_revision=revision)
    directories = on_main_process(lambda: prepare_text(config, start.source))
    return on_all_processes(lambda: open_datasets(directories, config.block_size, config.dataset_weights))


def plan_run(start: Start, typed: TrainConfig, recipe: str, dataset: Any) -> Run:
    """Resolve the length of the run and every `auto`.

    Raises `UserError` if the processes, or the run and its checkpoint, do not belong together.
    """
    started_at = time.perf_counter()
    device, num_processes, resume_dir = start.processes.device, start.processes.num_processes, start.resume_dir
    content = read_state(resume_dir) if resume_dir is not None else None
    num_train_epochs = typed.num_train_epochs
    typed = resolve_length(typed, len(dataset.train), content)
    if not isinstance(dataset, PackedDataset) and (typed.streaming or typed.data_placement != "mmap"):
        raise UserError("--streaming and --data_placement require a packed dataset")
    earlier, changes, run_id = None, {}, start.run_id
    if content is not None:
        typed = keep_warmup(typed, content)
        earlier = content["memory"] if content["num_processes"] == num_processes else None
    tokenizer, metadata = dataset.tokenizer, metadata_of(dataset)
    if typed.dataset_name:  # training_config.yaml then names what was read
        typed = dataclasses.replace(typed, dataset_revision=metadata["source"].get("dataset_revision"))
    vocab_size, num_base = count_ids(tokenizer), count_ids(tokenizer, with_added_tokens=False)
    ends = tokenizer.eos_token_id, start.source, num_base, tokenizer.bos_token_id
    model_config = build_model_config(typed, vocab_size, *ends)
    files, notes = collect_files(start, typed, tokenizer, metadata, model_config)
    typed = dataclasses.replace(typed, model_type=model_config.model_type)
    identity = run_identity(typed, metadata, model_config)
    check_same_run(identity)
    if resume_dir is not None:
        changes = check_identity(typed, identity, resume_dir)
        if run_id and not is_same_run(resume_dir, start.output_dir, changes):
            run_id = None
            note = "with another schedule or batch, this is a new run: "
            if typed.resume_from_checkpoint == "auto":  # which starts over with --hub_overwrite
                note += f"resume from hf://{typed.hub_model_id} and "
            on_main_process(lambda: check_owner(typed, None, note))
    padded = copy.deepcopy(model_config)
    padded.vocab_size = padded_vocab_size(model_config.vocab_size, typed.pad_vocab_to_multiple_of)
    total_flops = count_training_flops(typed, padded, count_parameters(padded))
    facts = find_facts(device, num_processes, total_flops=total_flops, kept=content["hardware"] if content else {})
    choices = choose(typed, facts, on_main_process(lambda: measure_open(typed, facts, device, padded)))
    config = apply_choices(typed, choices, start.sharding)
    accelerator = build_accelerator(config, start.output_dir, choices)
    if start.sharding is not None:
        choices = {"layout": Choice("FSDP", start.sharding.describe()), **choices}
    if typed.max_eval_samples == "auto" and resume_dir is not None:  # an extended run evaluates the same rows
        config = dataclasses.replace(config, max_eval_samples=content["initial"].get("num_rows", "auto"))
    data_bytes = dataset.train.num_bytes if config.data_placement == "device" else 0
    plan = plan_device(config, padded, accelerator, start.output_dir, earlier, data_bytes, start.sharding)
    return Run(
        **vars(dataclasses.replace(start, run_id=run_id)),
        started_at=started_at,
        accelerator=accelerator,
        recipe=recipe,
        config=plan.apply(config),
        typed=typed,
        num_train_epochs=num_train_epochs,
        choices=choices,
        plan=plan,
        model_config=model_config,
        metadata=metadata,
        identity=identity,
        changes=changes,
        files=files,
        notes=notes,
    )


def collect_files(
    start: Start, config: TrainConfig, tokenizer: Any, metadata: dict[str, Any], model_config: PreTrainedConfig
) -> tuple[dict[str, bytes], list[str]]:
    """Return the files of the exported model, and what the run changes in the model that it starts from."""
    if start.source is None:
        return new_files(tokenizer, model_config), []
    own_tokenizer = start.resume_dir or config.tokenizer_name == config.model_name_or_path
    tokenizer_source = start.source if own_tokenizer else config.tokenizer_name
    files, notes = tuned_files(start.source, tokenizer_source, model_config, **encoding_of(metadata))
    own = load_pretrained(AutoConfig, start.source)
    num_known = own.vocab_size
    if own.eos_token_id != model_config.eos_token_id:  # it had none, or another
        notes.append(f"the end of text is the tokenizer's id {model_config.eos_token_id}, not {own.eos_token_id}")
    if (num_new := model_config.vocab_size - num_known) > 0:
        notes.append(f"the vocabulary grows from {num_known:,} by {num_new:,} tokens, which start as the mean of all")
    elif num_new < 0:
        notes.append(
            f"the vocabulary shrinks from {num_known:,} to the tokenizer's {model_config.vocab_size:,} tokens"
        )
    overrides = config.config_overrides or {}
    if missing := translate_dropout(overrides, model_options(model_config.model_type))[1]:
        notes.append(f"{model_config.model_type} has no counterpart of {', '.join(missing)}, which have no effect")
    return files, notes


def prepare(run: Run, loss: LanguageModelingLoss) -> nn.Module:
    """Return the module to train: compiled, with autocast, and in all processes the same."""
    wait_on_host()  # a machine may need long to download a model
    return parallelize(loss, run.config, run.accelerator, run.sharding).train()


def confirm_plan(run: Run, module: nn.Module, optimizer: torch.optim.Optimizer) -> Run:
    """Register the optimizer. On a GPU, a trial step confirms that the plan's micro-batch fits, or makes it smaller.

    The loop uses the optimizer itself. Accelerate's wrapper, which `prepare` registers, unscales gradients.
    """
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]  # the schedule multiplies it
    run.accelerator.prepare(optimizer)
    size = try_micro_batch(run.accelerator, module, optimizer, run.plan.micro_batch_size, run.config)
    return dataclasses.replace(run, plan=dataclasses.replace(run.plan, micro_batch_size=size))


def load_state(run: Run, trained: Trained) -> RunState:
    """Seed the random generators, and load the checkpoint into everything that changes; or start a new run."""
    set_seed(run.config.seed, device_specific=True)  # from here on, dropout differs between processes
    state = RunState()
    if run.resume_dir is not None:
        state = on_all_processes(lambda: load_checkpoint(run.resume_dir, trained))
    state.run_id = run.run_id or gather(uuid.uuid4().hex[:12])[0]
    state.memory = run.plan.choices
    state.hardware = describe_choices(run.choices, run.accelerator.device.type)
    return state


def is_same_run(resume_dir: Path, output_dir: Path, changes: dict[str, tuple] | None = None) -> bool:
    """Return whether a run continues that of a checkpoint: in its folder, or from the Hub with its schedule."""
    found, folder = resume_dir.parent.absolute(), output_dir.absolute()
    return found == folder or (found == folder / DOWNLOAD_NAME and not changes)


def open_batches(run: Run, dataset: Any, state: RunState) -> TrainBatches:
    """Open the training data at the state's position."""
    config, accelerator, size = run.config, run.accelerator, run.plan.micro_batch_size
    order = TrainOrder(
        num_rows=len(dataset.train),
        seed=config.seed,
        global_batch_size=config.global_batch_size,
        micro_batch_size=size,
        first_example=0 if config.streaming else state.examples,  # a stream's position is `state.position`
        process_index=accelerator.process_index,
        num_processes=accelerator.num_processes,
        parts=order_of(dataset) if isinstance(dataset, PackedDataset) else (),
    )
    if config.streaming:
        stream = open_stream(config, dataset, accelerator.process_index, gather)
        batches = read_stream(stream, order, state.position or (0, 0))
    else:
        place = config.dataloader_num_workers, config.data_placement
        batches = read_rows(dataset.train, order, accelerator.device, *place)
    return TrainBatches(batches, accelerator.device)


def measure_progress(config: TrainConfig, state: RunState) -> float:
    """Return the share of the run's steps, or of its time for steps, that is used up: from 0 to 1."""
    if state.step == 0:
        state.setup_seconds = state.seconds
        return 0.0
    if state.has_stalled(config.early_stopping_patience):
        return 1.0
    shares = [state.step / config.max_steps] if config.max_steps else []
    if config.max_minutes:
        reserved = CLOSING_SECONDS + 2 * state.initial.get("seconds", 0.0)  # save, evaluate, export
        available = 60 * config.max_minutes - reserved - state.setup_seconds
        shares.append((state.seconds - state.setup_seconds) / max(1.0, available))
    return min(1.0, max(shares))
