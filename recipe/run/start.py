"""What a run needs before its model is built: the checks, the dataset, its length and the choices of `auto`."""

import copy
import functools
import uuid
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedConfig

from recipe.checkpoint import RunState, find_checkpoint, read_state
from recipe.config import TrainConfig, parse_tasks
from recipe.data.packed import PackedDataset, metadata_of, open_packed_dataset
from recipe.data.prepare import open_dataset_for
from recipe.data.task_files import read_examples
from recipe.hardware.accelerator import Choice, resolve_hardware
from recipe.hardware.memory import MemoryPlan, micro_batch_sizes, plan_device
from recipe.hardware.processes import check_same_run, gather, on_all_processes, on_main_process
from recipe.model.build import build_model_config
from recipe.model.size import count_parameters, count_training_flops, padded_vocab_size
from recipe.optim.optimizers import check_optimizer
from recipe.publish.download import fetch_checkpoint
from recipe.run.resume import check_identity, resolve_length, resolve_resume, run_identity

CLOSING_SECONDS = 3.0  # for the last checkpoint, the export and the curve


def find_start(
    config: TrainConfig, accelerator: Accelerator, output_dir: Path
) -> tuple[Path | None, str | Path | None]:
    """Return the checkpoint to resume from, and the model that sets the shape; None for a new run or model.

    Raises `UserError` for options that cannot work, before text is prepared for hours.
    """
    resume_dir = on_main_process(lambda: find_checkpoint(output_dir, fetch_checkpoint(config, output_dir)))
    # A resumed run takes the shape from its checkpoint: the model that it started from may be gone.
    source = resume_dir if resume_dir and config.model_name_or_path else config.model_name_or_path
    micro_batch_sizes(config, accelerator.num_processes, accelerator.device.type)
    check_optimizer(config, accelerator.device)
    build_model_config(config, 1, 0, source)
    for task, path in parse_tasks(config.eval_tasks).items():
        on_main_process(functools.partial(read_examples, task, path))
    return resume_dir, source


def open_dataset(config: TrainConfig, source: str | Path | None) -> PackedDataset:
    """Open the packed dataset; the main process prepares text first.

    To train on a dataset of your own, return it here. It needs `train` and `validation`, each with a length and
    indexed by int64 [n] for int64 [n, block_size + 1] (a row starts with the last token of the previous one, or any
    token), and a `tokenizer` of Transformers. source: the model whose tokenizer is used.
    """
    directory = on_main_process(lambda: open_dataset_for(config, source).directory)
    return on_all_processes(lambda: open_packed_dataset(directory, config.block_size))


def resolve_run(
    config: TrainConfig,
    dataset: Any,
    model_config: PreTrainedConfig,
    accelerator: Accelerator,
    output_dir: Path,
    resume_dir: Path | None,
) -> tuple[TrainConfig, TrainConfig, dict[str, Choice], MemoryPlan]:
    """Resolve the length of the run, and what `auto` means on this hardware.

    Returns the config of the run, which its folder records; the same without any `auto`; the choices; the memory plan.
    """
    config, earlier = resolve_length(config, len(dataset.train)), None
    if resume_dir is not None:
        config, content = resolve_resume(config, resume_dir), read_state(resume_dir)
        earlier = content["memory"] if content["num_processes"] == accelerator.num_processes else None
    padded = copy.deepcopy(model_config)
    padded.vocab_size = padded_vocab_size(model_config.vocab_size, config.pad_vocab_to_multiple_of)
    total_flops = count_training_flops(config, padded, count_parameters(padded))
    hardware, choices = resolve_hardware(config, accelerator.device, total_flops)
    plan = plan_device(hardware, padded, accelerator, output_dir, earlier)
    return config, plan.apply(hardware), choices, plan


def check_run(
    config: TrainConfig, dataset: Any, model_config: PreTrainedConfig, output_dir: Path, resume_dir: Path | None
) -> tuple[dict[str, Any], dict[str, tuple]]:
    """Return what the run is, and what it changes in the schedule of the checkpoint: {option: (before, now)}.

    Raises `UserError` if the processes, or the run and the checkpoint, do not belong together.
    """
    identity = run_identity(config, metadata_of(dataset), model_config)
    check_same_run(identity)
    return identity, check_identity(config, identity, resume_dir, output_dir) if resume_dir else {}


def new_state() -> RunState:
    return RunState(run_id=gather(uuid.uuid4().hex[:12])[0])


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
