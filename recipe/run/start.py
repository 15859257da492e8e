"""The start of a run: its processes, folder, data and length, what `auto` means here, and its state."""

import copy
import dataclasses
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import set_seed
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from recipe.checkpoint import RunState, find_checkpoint, load_checkpoint, read_state
from recipe.config import TrainConfig
from recipe.data.batches import TrainBatches, TrainOrder, read_rows
from recipe.data.packed import PackedDataset, metadata_of, open_packed_dataset
from recipe.data.prepare import open_dataset_for
from recipe.data.stream import open_stream, read_stream
from recipe.errors import UserError
from recipe.evaluation.tasks import load_tasks
from recipe.hardware.accelerator import Choice, build_accelerator, resolve_hardware
from recipe.hardware.memory import MemoryPlan, micro_batch_sizes, plan_device, try_micro_batch
from recipe.hardware.processes import (
    check_same_run,
    gather,
    on_all_processes,
    on_main_process,
    start_processes,
    wait_on_host,
)
from recipe.model.build import build_model_config
from recipe.model.size import count_parameters, count_training_flops, padded_vocab_size
from recipe.optim.guard import UpdateGuard
from recipe.optim.optimizers import check_optimizer
from recipe.publish.download import fetch_checkpoint
from recipe.publish.hub import DOWNLOAD_NAME, check_hub, check_owner
from recipe.run.folder import choose_output_dir
from recipe.run.resume import check_identity, keep_warmup, resolve_length, run_identity

CLOSING_SECONDS = 3.0  # for the last checkpoint, the export and the curve


@dataclass
class Run:
    """What is known of a run before its model is built. `open_run` sets the first part, `plan_run` the second."""

    recipe: str
    config: TrainConfig  # as the output folder records it
    accelerator: Accelerator
    output_dir: Path
    resume_dir: Path | None  # the checkpoint that it continues
    run_id: str | None  # the checkpoint's; None if this is a new run
    source: str | Path | None  # the model that sets shape and tokenizer
    started_at: float  # time.perf_counter at the start of the program

    hardware: TrainConfig = None  # the config with every `auto` resolved for this machine
    choices: dict[str, Choice] = None  # the reasons, by label
    plan: MemoryPlan = None
    model_config: PreTrainedConfig = None
    metadata: dict[str, Any] = None  # the dataset's
    vocab_size: int = 0  # without padding
    identity: dict[str, Any] = field(default_factory=dict)  # what a resumed run must share with its checkpoint
    changes: dict[str, tuple] = field(default_factory=dict)  # to the checkpoint's schedule: {option: (before, now)}

    @property
    def grad_accum(self) -> int:
        """Micro-batches per step and process."""
        return self.config.global_batch_size // (self.plan.micro_batch_size * self.accelerator.num_processes)


def open_run(config: TrainConfig, recipe: str, started_at: float) -> Run:
    """Find the processes, lock the output folder, configure the hardware, and find the checkpoint to resume from.

    Raises `UserError` for options that cannot work, before text is prepared for hours.
    """
    start_processes()
    output_dir = on_main_process(lambda: choose_output_dir(config, recipe))
    on_main_process(lambda: check_hub(config))
    accelerator = build_accelerator(config, output_dir)
    resume_dir = on_main_process(lambda: find_checkpoint(output_dir, fetch_checkpoint(config, output_dir)))
    run_id = read_state(resume_dir)["run_id"] if resume_dir and is_same_run(resume_dir, output_dir) else None
    on_main_process(lambda: check_owner(config, run_id))
    # A resumed run takes the shape from its checkpoint: the model that it started from may be gone.
    source = resume_dir if resume_dir and config.model_name_or_path else config.model_name_or_path
    micro_batch_sizes(config, accelerator.num_processes, accelerator.device.type)
    check_optimizer(config, accelerator.device)
    build_model_config(config, 1, 0, source)
    load_tasks(config.eval_tasks)  # reports a wrong file before text is prepared
    return Run(recipe, config, accelerator, output_dir, resume_dir, run_id, source, started_at)


def open_dataset(config: TrainConfig, source: str | Path | None) -> PackedDataset:
    """Open the packed dataset; the main process prepares text first. source: the model whose tokenizer is used.

    To train on a dataset of your own, return it here. It needs `train` and `validation`, each with a length and
    indexed by int64 [n] for int64 [n, block_size + 1], and a `tokenizer` of Transformers.
    """
    directory = on_main_process(lambda: open_dataset_for(config, source).directory)
    return on_all_processes(lambda: open_packed_dataset(directory, config.block_size))


def plan_run(run: Run, dataset: Any) -> None:
    """Resolve the length of the run and every `auto`.

    Raises `UserError` if the processes, or the run and its checkpoint, do not belong together.
    """
    config, earlier, accelerator = resolve_length(run.config, len(dataset.train)), None, run.accelerator
    if not isinstance(dataset, PackedDataset) and (config.streaming or config.data_placement != "mmap"):
        raise UserError("--streaming and --data_placement require a packed dataset")
    if run.resume_dir is not None:
        content = read_state(run.resume_dir)
        config = keep_warmup(config, content)
        earlier = content["memory"] if content["num_processes"] == accelerator.num_processes else None
    tokenizer, run.metadata = dataset.tokenizer, metadata_of(dataset)
    run.config, run.vocab_size = config, len(tokenizer)
    run.model_config = build_model_config(config, run.vocab_size, tokenizer.eos_token_id, run.source)
    run.identity = run_identity(config, run.metadata, run.model_config)
    check_same_run(run.identity)
    if run.resume_dir is not None:
        run.changes = check_identity(config, run.identity, run.resume_dir, run.output_dir)
        if run.run_id and not is_same_run(run.resume_dir, run.output_dir, run.changes):
            run.run_id = None
            note = "with another schedule, this is a new run: "
            if config.resume_from_checkpoint == "auto":  # which starts over with --hub_overwrite
                note += f"resume from hf://{config.hub_model_id} and "
            on_main_process(lambda: check_owner(config, None, note))
    padded = copy.deepcopy(run.model_config)
    padded.vocab_size = padded_vocab_size(run.vocab_size, config.pad_vocab_to_multiple_of)
    total_flops = count_training_flops(config, padded, count_parameters(padded))
    hardware, run.choices = resolve_hardware(config, accelerator.device, total_flops)
    data_bytes = dataset.train.num_bytes if config.data_placement == "device" else 0
    run.plan = plan_device(hardware, padded, accelerator, run.output_dir, earlier, data_bytes)
    run.hardware = run.plan.apply(hardware)


def prepare(run: Run, module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, AcceleratedOptimizer]:
    """Let Accelerate wrap module and optimizer. On a GPU, a trial step confirms that the plan's micro-batch fits."""
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]  # the schedule multiplies it
    wait_on_host()  # a machine may need long to download a model
    module, optimizer = run.accelerator.prepare(module, optimizer)
    module.train()
    size = try_micro_batch(run.accelerator, module, optimizer.optimizer, run.plan.micro_batch_size, run.hardware)
    run.plan = dataclasses.replace(run.plan, micro_batch_size=size)
    run.accelerator.gradient_accumulation_steps = run.grad_accum
    return module, optimizer


def load_state(run: Run, model: PreTrainedModel, optimizer: AcceleratedOptimizer, guard: UpdateGuard) -> RunState:
    """Seed the random generators, and load the checkpoint into everything that changes; or start a new run."""
    set_seed(run.config.seed, device_specific=True)  # from here on, dropout differs between processes
    state = RunState()
    if run.resume_dir is not None:
        parts = model, run.vocab_size, optimizer.optimizer, guard
        state = on_all_processes(lambda: load_checkpoint(run.accelerator, run.resume_dir, *parts))
    state.run_id = run.run_id or gather(uuid.uuid4().hex[:12])[0]
    state.memory = run.plan.choices
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
        first_step=0 if config.streaming else state.step,  # a stream's position already points to the next step
        process_index=accelerator.process_index,
        num_processes=accelerator.num_processes,
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
    shares = [state.step / config.max_steps] if config.max_steps else []
    if config.max_minutes:
        reserved = CLOSING_SECONDS + 2 * state.untrained.get("seconds", 0.0)  # save, evaluate, export
        available = 60 * config.max_minutes - reserved - state.setup_seconds
        shares.append((state.seconds - state.setup_seconds) / max(1.0, available))
    return min(1.0, max(shares))
