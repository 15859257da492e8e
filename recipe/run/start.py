"""The start of a run: carries out what recipe/run/decide.py decides. Only this part changes anything."""

import contextlib
import copy
import dataclasses
import gc
import os
import shutil
import textwrap
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import set_seed
from torch import nn
from transformers import AutoConfig

from recipe.checkpoint import CheckpointContents, RunState, clean_checkpoints, load_checkpoint
from recipe.config import CONFIG_NAME, PATHS, TrainConfig, write_config
from recipe.data.batches import TrainBatches, TrainOrder, read_rows
from recipe.data.cache import Known, prepare_text
from recipe.data.mixture import open_datasets, order_of
from recipe.data.packed import PackedDataset, encoding_of, metadata_of
from recipe.data.stream import open_stream, read_stream
from recipe.data.tokenizer import count_ids
from recipe.disk import write_file
from recipe.hardware.accelerator import find_machine, measure_open, parallelize
from recipe.hardware.choices import OF_A_MACHINE, combine, describe_choices
from recipe.hardware.devices import device_of
from recipe.hardware.memory import measure_usable_bytes
from recipe.hardware.processes import (
    check_same_run,
    gather,
    host_group,
    largest_of_processes,
    on_all_processes,
    on_main_process,
    start_processes,
    wait_on_host,
)
from recipe.hardware.sharding import USE_FSDP
from recipe.hardware.trial import try_micro_batch
from recipe.launcher import count_local_processes
from recipe.metrics import METRICS_NAME
from recipe.model.build import build_model_config, model_options, translate_dropout
from recipe.model.files import check_tokenizer, new_files, tuned_files
from recipe.model.loss import LanguageModelingLoss
from recipe.model.own_code import own_code
from recipe.model.size import padded_vocab_size
from recipe.model.weights import load_pretrained, names_of_transformers_4
from recipe.optim.optimizers import check_optimizer
from recipe.publish.download import download_checkpoint
from recipe.publish.hub import DOWNLOAD_NAME, create_repository, refuse_own_code
from recipe.run.decide import (
    ORIGIN_NAME,
    DataFacts,
    ModelFacts,
    Run,
    Start,
    decide_run,
    decide_start,
    is_over,
    recorded_options,
    run_identity,
)
from recipe.run.folder import drop_events_after, release_output_dirs
from recipe.run.look import claim_folder, look, read_evaluations
from recipe.run.record import read_starts
from recipe.run.stop import leave_preparation, resumable


@contextlib.contextmanager
def restored_process() -> Iterator[None]:
    """Leave the Python process as it was, also after an error: a notebook trains again with other options."""
    gc.collect()  # what an earlier run has left after an error
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch_options = torch.utils.deterministic
    fill = torch_options.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    num_threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    fsdp = os.environ.get(USE_FSDP)
    try:
        with leave_preparation():
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
        torch_options.fill_uninitialized_memory = fill  # pyright: ignore[reportAttributeAccessIssue]
        torch.set_num_threads(num_threads)
        torch.set_float32_matmul_precision(precision)
        torch.compiler.reset()  # frees the graphs, and with them the model
        gc.unfreeze()
        gc.enable()
    gc.collect()  # not after an error: the launcher's SIGTERM would come before it is reported


def open_run(requested: TrainConfig, recipe: str, notes: Sequence[str]) -> Start:
    """Find the processes, claim the run's folder, look around, decide where the run starts, and act on it.

    notes: lines to print. Raises `UserError` for options that cannot work, before text is prepared for hours.
    """
    sharding = start_processes()
    state = PartialState()
    own = find_machine(device_of(state), state.num_processes, sharding=sharding)
    # Machines may have the same files in different places.
    check_same_run({key: value for key, value in vars(requested).items() if key not in PATHS})
    check_same_run({key: value for key, value in vars(own).items() if key not in OF_A_MACHINE})
    machine = combine(gather(own))

    def begin() -> Start:
        folder = claim_folder(requested, recipe)
        start = decide_start(requested, recipe, look(requested, folder, machine))
        for note in notes:
            print(textwrap.fill(f"note: {note}", 80, subsequent_indent="  "), flush=True)
        act_on(start)
        return start

    start = dataclasses.replace(on_main_process(begin), requested=requested)
    on_all_processes(lambda: check_libraries(start, device_of(state)))
    return start


def check_libraries(start: Start, device: torch.device) -> None:
    """Raise `UserError` for what would fail after the text has been prepared: optimizer, model, tokenizer."""
    requested = start.requested
    check_optimizer(requested, device)
    model_config = build_model_config(requested, 1, 0, start.base_model)
    if requested.push_to_hub:
        refuse_own_code(model_config.model_type)
    if start.base_model is None:
        check_tokenizer(requested.tokenizer_name, model_config.model_type)


def act_on(start: Start) -> None:
    """Clean up after killed processes, create the Hub repository, download the checkpoint and record the origin."""
    folder = start.output_dir
    requested = start.requested
    resume = start.resume
    clean_checkpoints(folder)
    create_repository(requested)
    for line in start.says:
        print(line, flush=True)
    if resume is not None and resume.repo_id is not None:
        is_auto = requested.resume_from_checkpoint == "auto"
        download_checkpoint(resume.repo_id, resume.branch, resume.path, is_auto)
    if start.origin is None:
        (folder / ORIGIN_NAME).unlink(missing_ok=True)
    else:
        write_file(folder / ORIGIN_NAME, start.origin + "\n")


def open_dataset(start: Start) -> PackedDataset:
    """Open the packed dataset; the main process prepares text first.

    To train on a dataset of your own, return it here. It needs `train` and `validation`, each with a length and
    indexed by int64 [n] for int64 [n, block_size + 1], and a `tokenizer` of Transformers.
    """
    config = start.requested
    known = None
    if start.resume is not None and start.saved is not None:
        identity = start.saved.identity
        known = Known(start.resume.path, identity.get("dataset", ""), identity.get("streamed_text"))
        if config.dataset_name and config.dataset_revision is None:  # the Hub may have a newer one
            names = {event.get("data", {}).get("dataset_id") for event in read_starts(start.resume.path)}
            if not start.is_branch or not names or config.dataset_name in names:
                config = dataclasses.replace(config, dataset_revision=identity.get("dataset_revision"))
    directories = on_main_process(lambda: prepare_text(config, start.base_model, known))
    return on_all_processes(lambda: open_datasets(directories, config.block_size, config.dataset_weights))


def resolve_run(start: Start, dataset: Any) -> Run:
    """Measure what is not known yet, and decide what the run does on this machine."""
    started_at = time.perf_counter()
    requested = start.requested
    device = device_of(PartialState())
    metadata = metadata_of(dataset)
    model = on_all_processes(lambda: describe_model(start, dataset))
    data = DataFacts(len(dataset.train), metadata)
    check_same_run({"rows": data.num_rows, **run_identity(requested, metadata, model.config)})
    num_local = count_local_processes(start.machine.num_processes)
    usable = int(-largest_of_processes(-measure_usable_bytes(device, num_local))[0])

    def decide() -> Run:
        return decide_run(start, data, model, usable, measure_open(requested, start.machine, device, model.padded))

    run = on_main_process(decide)
    own_paths = {name: getattr(requested, name) for name in PATHS}
    return dataclasses.replace(
        run, start=start, config=dataclasses.replace(run.config, **own_paths), started_at=started_at
    )


def describe_model(start: Start, dataset: Any) -> ModelFacts:
    """Return the model to train, the files to export with it, and how it differs from one that the run starts from."""
    requested = start.requested
    source = start.base_model
    tokenizer = dataset.tokenizer
    vocab_size = count_ids(tokenizer)
    num_base = count_ids(tokenizer, with_added_tokens=False)
    config = build_model_config(
        requested, vocab_size, tokenizer.eos_token_id, source, num_base, tokenizer.bos_token_id
    )
    saved = load_pretrained(AutoConfig, start.resume.path) if start.resume else None
    if saved is not None and saved.max_position_embeddings > config.max_position_embeddings:
        config.max_position_embeddings = saved.max_position_embeddings  # of a branch with shorter rows
    padded = copy.deepcopy(config)
    padded.vocab_size = padded_vocab_size(config.vocab_size, requested.pad_vocab_to_multiple_of)
    is_chat = bool(tokenizer.chat_template)
    is_readable = names_of_transformers_4(config) is not None
    lacks = () if is_readable else ("Transformers 4 cannot read the exported rotary embeddings",)
    if source is None:
        return ModelFacts(config, padded, saved, new_files(tokenizer, config) | own_code(config), is_chat, lacks)
    own_tokenizer = start.resume or requested.tokenizer_name == requested.model_name_or_path
    tokenizer_source = source if own_tokenizer else requested.tokenizer_name or source
    files, notes = tuned_files(source, tokenizer_source, config, **encoding_of(metadata_of(dataset)))
    own = load_pretrained(AutoConfig, source)
    num_known = own.vocab_size
    if own.eos_token_id != config.eos_token_id:  # it had none, or another
        notes.append(f"the end of text is the tokenizer's id {config.eos_token_id}, not {own.eos_token_id}")
    num_new = config.vocab_size - num_known
    if num_new > 0:
        notes.append(f"the vocabulary grows from {num_known:,} by {num_new:,} tokens, which start as the mean of all")
    elif num_new < 0:
        notes.append(f"the vocabulary shrinks from {num_known:,} to the tokenizer's {config.vocab_size:,} tokens")
    _, missing = translate_dropout(requested.config_overrides or {}, model_options(config.model_type))
    if missing:
        notes.append(f"{config.model_type} has no counterpart of {', '.join(missing)}, which have no effect")
    return ModelFacts(config, padded, saved, files | own_code(config), is_chat, (*notes, *lacks))


def wrap_module(run: Run, accelerator: Accelerator, loss: LanguageModelingLoss) -> nn.Module:
    """Return the module to train: compiled, with autocast, and trained by all processes together."""
    wait_on_host()  # a machine may need long to download a model
    return parallelize(loss, run.config, accelerator, run.start.machine.sharding).train()


def register_optimizer(accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Note the peak rate of each group, which the schedule multiplies. Returns the optimizer.

    The loop uses the optimizer itself. Accelerate unscales gradients through the wrapper that it makes here.
    """
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    accelerator.prepare(optimizer)
    return optimizer


def try_step(run: Run, accelerator: Accelerator, module: nn.Module, optimizer: torch.optim.Optimizer) -> Run:
    """On a GPU, a trial step confirms that the plan's micro-batch fits, or makes it smaller."""
    start = run.start
    plan = run.plan
    with resumable(run):
        size = plan.micro_batch_size
        size = try_micro_batch(accelerator, module, optimizer, size, start.requested, start.machine)
    plan = dataclasses.replace(plan, micro_batch_size=size)
    return dataclasses.replace(run, plan=plan, config=plan.apply(run.config, start.machine.num_processes))


def load_state(run: Run, contents: CheckpointContents) -> RunState:
    """Seed the random generators, and load the checkpoint into everything that changes. Returns the rest."""
    set_seed(run.config.seed, device_specific=True)  # from here on, dropout differs between processes
    state = RunState()
    resume = run.start.resume
    if resume is not None:
        state = on_all_processes(lambda: load_checkpoint(resume.path, contents))
    if "seed" in run.changes:  # of a branch: not only the order of the examples is another
        set_seed(run.config.seed, device_specific=True)
    if not run.continues:
        state.run_id = gather(uuid.uuid4().hex[:12])[0]
        state.losses = {}  # their models are in another folder, and may have been measured on other data
    if not run.continues or run.changes:
        state.patience_start = state.step
    if run.continues and resume is not None and resume.repo_id is None:
        state.saved_step = state.step
    state.memory = run.plan.options
    state.hardware = describe_choices(run.choices, run.start.machine.device_type)
    if resume is None or run.begins_stage:
        state.begin_stage(run.config.block_size, run.data.metadata["content_sha256"])
    state.evaluations = on_main_process(lambda: prepare_folder(run, state))
    if state.step in state.evaluations:  # made after the checkpoint was saved
        state.add_evaluation(state.evaluations[state.step])
    return state


def prepare_folder(run: Run, state: RunState) -> dict[int, dict[str, Any]]:
    """Make the log and the options in the run's folder those of this state. Returns the evaluations of the stage.

    Events after the state's step are dropped, because those steps will be logged again. A download includes its log.
    """
    folder = run.start.output_dir
    resume = run.start.resume
    if resume is not None and resume.repo_id is not None and (resume.path / METRICS_NAME).is_file():
        shutil.copyfile(resume.path / METRICS_NAME, folder / METRICS_NAME)
    else:
        shutil.rmtree(folder / DOWNLOAD_NAME, ignore_errors=True)
    if (folder / METRICS_NAME).exists():
        drop_events_after(folder / METRICS_NAME, -1 if run.begins_stage else state.step or -1)
    evaluations = read_evaluations(folder)
    write_config(recorded_options(run, is_over(run, state)), folder / CONFIG_NAME)
    return evaluations


def open_batches(run: Run, accelerator: Accelerator, dataset: Any, state: RunState) -> TrainBatches:
    """Open the training data at the state's position."""
    config = run.config
    order = TrainOrder(
        num_rows=len(dataset.train),
        seed=config.seed,
        global_batch_size=config.global_batch_size,
        micro_batch_size=run.plan.micro_batch_size,
        first_example=0 if config.streaming else state.stage_examples,  # a stream's position is `state.position`
        process_index=accelerator.process_index,
        num_processes=accelerator.num_processes,
        shift_below=config.block_size if isinstance(dataset, PackedDataset) else 1,
        parts=order_of(dataset) if isinstance(dataset, PackedDataset) else (),
    )
    if config.streaming:
        stream = open_stream(config, dataset, accelerator.process_index, gather)
        batches = read_stream(stream, order, state.position or (0, 0))
    else:
        batches = read_rows(dataset.train, order, accelerator.device, config.dataloader_num_workers)
    return TrainBatches(batches, accelerator.device)
