"""What a run prints at its start and end, and summary.json."""

import re
import shlex
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from recipe.checkpoint.load import RunState, precision_of
from recipe.config import STANDARD_LIBRARY, TrainConfig
from recipe.data.packed import PackedDataset
from recipe.environment import describe_device, describe_environment, find_commit
from recipe.hardware.choices import Choice
from recipe.hardware.devices import peak_memory_bytes
from recipe.model.size import count_exported_parameters
from recipe.optim.schedule import count_warmup_steps
from recipe.publish.facts import split_scores
from recipe.publish.public import describe_source, hub_id, public_command, public_name
from recipe.run.accumulation import Accumulation
from recipe.run.branch import describe_jump, extend_command, find_branch_point
from recipe.run.meter import StepMeter
from recipe.run.output_dir import launch_command

MANY_EPOCHS = 100
SAME_LENGTH = 0.05  # share of the tokens by which a run may differ from the one that it is compared with


def describe_run(
    config: TrainConfig,
    recipe: str,
    output_dir: Path,
    resume_dir: Path | None,
    choices: dict[str, Choice],
    model: PreTrainedModel,
    accumulation: Accumulation,
    eval_rows: int,
) -> dict[str, str]:
    """Return the table printed before the first step: {label: text}. eval_rows: validation rows per evaluation."""
    dataset, accelerator = accumulation.dataset, accumulation.accelerator
    device, num_processes = accelerator.device, accelerator.num_processes
    tokens_per_step = config.global_batch_size * config.block_size
    num_train_rows, num_validation_rows = (len(dataset.splits[split]) for split in ("train", "validation"))
    devices = describe_device(device)
    if device.type == "cpu":
        processes = f"{_plural(num_processes, 'process', 'es')} of " if num_processes > 1 else ""
        devices += f", {processes}{_plural(torch.get_num_threads(), 'thread')}"
    elif num_processes > 1:
        devices = f"{num_processes} x {devices}"
    data = f"{dataset.directory}: {num_train_rows:,} training rows of {config.block_size:,} tokens"
    length = f", {config.max_steps * config.global_batch_size / num_train_rows:.2f} epochs"
    if config.streaming:
        data = f"streamed, shuffled over {config.shuffle_buffer_size:,} rows of {config.block_size:,} tokens"
        length = ""
    shown = {label: f"{choice.value}: {choice.reason}" for label, choice in choices.items()}
    if device.type == "cuda" and config.tf32:
        shown["precision"] += "; TF32 for fp32 matmuls"
    if config.deterministic:
        shown["precision"] += "; deterministic algorithms"
    return {
        "recipe": f"{recipe}, output in {output_dir}" + (f", resumed from {resume_dir}" if resume_dir else ""),
        "device": devices,
        **shown,
        "model": f"{type(model).__name__}, {model.num_parameters():,} parameters, vocabulary {dataset.vocab_size:,}"
        + (f" padded to {model.config.vocab_size:,}" if model.config.vocab_size > dataset.vocab_size else "")
        + f", {model.config.max_position_embeddings:,} positions"
        + (f", weights from {config.model_name_or_path}" if config.model_name_or_path and not resume_dir else ""),
        "data": f"{data}; {eval_rows:,} of {num_validation_rows:,} validation rows per evaluation",
        "batch": f"{config.global_batch_size} sequences ({tokens_per_step:,} tokens) per step: "
        f"{_plural(num_processes, 'process', 'es')} x "
        f"{_plural(accumulation.num_micro_batches, 'micro-batch', 'es')} x "
        f"{_plural(accumulation.micro_batch_size, 'sequence')}",
        "optimizer": f"{config.optim}, learning rate {config.learning_rate:g}"
        + (f", and {config.muon_learning_rate:g} for Muon's matrices" if config.optim == "muon" else ""),
        "run": _describe_length(config, length),
        **({"hub": f"{config.hub_model_id}, {config.hub_strategy}"} if config.push_to_hub else {}),
    }


def _describe_length(config: TrainConfig, epochs: str) -> str:
    """Return the length of the run and of its warm-up. epochs: the same length in other words."""
    limit = "" if config.max_minutes is None else f"{config.max_minutes:g} minute{'s' * (config.max_minutes != 1)}"
    if config.is_open_ended:
        return f"as many steps as fit into {limit}"
    num_tokens = config.max_steps * config.global_batch_size * config.block_size
    text = f"{_plural(config.max_steps, 'step')} = {num_tokens:,} tokens{epochs}, "
    text += _plural(count_warmup_steps(config), "warm-up step")
    return text + (f"; fewer if they take longer than {limit}" if limit else "")


def describe_start(
    config: TrainConfig,
    recipe: str,
    choices: dict[str, Choice],
    model: PreTrainedModel,
    accumulation: Accumulation,
) -> dict[str, Any]:
    """Return what the start event of metrics.jsonl records for the model card. It contains no local path."""
    dataset, accelerator, metadata = accumulation.dataset, accumulation.accelerator, accumulation.dataset.metadata
    counts = ("documents", "tokens", "bytes", "rows")
    splits = {split: {key: found[key] for key in counts} for split, found in metadata["splits"].items()}
    source, shape = metadata["source"], model.config
    if config.streaming:  # only the head of the training text has been counted
        splits.pop("train")
    return {
        "recipe": recipe,
        "command": public_command(sys.argv),
        "commit": find_commit(),
        "seed": config.seed,
        "data": {
            "source": describe_source(source),
            "dataset_id": hub_id(source.get("dataset_name")),
            "dataset_config_name": source.get("dataset_config_name"),
            "validation_split_percentage": source.get("validation_split_percentage"),
            "duplicates_of_validation": source.get("duplicates_of_validation"),
            "splits": splits,
            "content_sha256": metadata["content_sha256"],
            "tokenizer_sha256": metadata["tokenizer_sha256"],
            "tokenizer": public_name(config.tokenizer_name) if config.tokenizer_name else None,
        },
        "model": {
            "architecture": type(model).__name__,
            "num_parameters": count_exported_parameters(model, dataset.vocab_size),
            "n_layer": shape.num_hidden_layers,
            "n_head": shape.num_attention_heads,
            "n_embd": shape.hidden_size,
            "n_positions": shape.max_position_embeddings,
            "vocab_size": dataset.vocab_size,
        },
        "base_model": public_name(config.model_name_or_path) if config.model_name_or_path else None,
        "base_model_id": hub_id(config.model_name_or_path),
        "num_processes": accelerator.num_processes,
        "mixed_precision": choices["precision"].value,
        "dynamo_backend": choices["dynamo"].value,
        "per_device_train_batch_size": accumulation.micro_batch_size,
        "gradient_accumulation_steps": accumulation.num_micro_batches,
        "environment": describe_environment(accelerator.device),
    }


def find_warnings(
    config: TrainConfig, resume_dir: Path | None, precision: Choice, dataset: PackedDataset, step: int
) -> list[str]:
    """Return what a user would want to know before the run starts."""
    found = []
    if resume_dir is not None and (before := precision_of(resume_dir)) not in (None, precision.value):
        found.append(f"warning: the precision changes from {before} to {precision.value} at step {step:,}")
    if resume_dir is not None and step == config.max_steps:
        branch_point = find_branch_point(config, resume_dir.parent)
        before = f"resume from {branch_point}, before the decay, into another --output_dir, and " * bool(branch_point)
        found.append(
            f"all {step:,} steps are done; this run only evaluates and exports the model again. To train longer, "
            f"{before}add --max_steps {2 * step}"
        )
    elif resume_dir is not None and (jump := describe_jump(config, resume_dir, step)):
        found.append(jump)
    if config.hub_model_id and not config.push_to_hub:
        found.append("warning: --hub_model_id alone uploads nothing; add --push_to_hub")
    epochs = config.max_steps * config.global_batch_size / len(dataset.splits["train"])
    if not (config.streaming or config.is_open_ended) and epochs > MANY_EPOCHS:
        found.append(f"warning: {epochs:,.0f} epochs over so little text: the model will memorize it")
    return found


def describe_evaluation(what: str, values: dict[str, float]) -> str:
    """Return one line with the results of an evaluation, and one more for each task."""
    line = (
        f"{what}: validation loss {values['loss']:.4f}, perplexity {values['perplexity']:,.2f}, "
        f"{values['bits_per_byte']:.4f} bits per byte"
    )
    for task, scores in split_scores(values).items():
        names = [name for name in ("acc", "acc_norm", "perplexity") if name in scores]
        shown = ", ".join(f"{name} {scores[name]:{'.4g' if scores[name] > 1 else '.4f'}}" for name in names)
        line += f"\n  {task}: {shown} ({_plural(scores['num_examples'], 'example')})"
    return line


def compare_with_expected(config: TrainConfig, metadata: dict[str, Any], loss: float) -> str | None:
    """Return a sentence that compares the final loss with the recipe's, or None if the run is another one.

    metadata: of the dataset. It is the expected one if the last part of its name occurs in the names of the source.
    """
    expected, num_tokens = config.expected_loss, config.max_steps * config.global_batch_size * config.block_size
    if expected is None:
        return None
    name = re.escape(expected["dataset"].rpartition("/")[2])
    if not re.search(rf"{name}(?![\w-])", str(metadata["source"])):  # fineweb-edu is not fineweb
        return None
    if abs(num_tokens / expected["tokens"] - 1) > SAME_LENGTH:
        return None
    difference, tolerance = loss - expected["value"], expected["tolerance"]
    verdict = (
        "as expected"
        if abs(difference) <= tolerance
        else f"{abs(difference):.2f} " + ("lower" if difference < 0 else "higher")
    )
    known = f"{expected['value']:g} +/- {tolerance:g} ({expected['source']})"
    return f"Expected validation loss on {expected['dataset']}: {known}. This run: {loss:.3f}, {verdict}."


def build_summary(
    accelerator: Accelerator,
    state: RunState,
    evaluation: dict[str, float],
    meter: StepMeter,
    choices: dict[str, Choice],
    accumulation: Accumulation,
    model: PreTrainedModel,
) -> dict[str, Any]:
    """Return the content of summary.json."""
    dataset = accumulation.dataset
    return {
        "step": state.step,
        "tokens_seen": state.step * meter.tokens_per_step,
        "eval_loss": evaluation["loss"],
        "perplexity": evaluation["perplexity"],
        "bits_per_byte": evaluation["bits_per_byte"],
        "eval_rows": evaluation["num_rows"],
        "tasks": split_scores(evaluation),
        "untrained": state.untrained,
        "tokens_per_second": meter.tokens_per_second,
        "seconds_to_first_step": meter.seconds_to_first_step,
        "peak_memory_bytes": peak_memory_bytes(accelerator.device),
        "train_seconds": state.train_seconds,
        "wall_seconds": time.perf_counter() - meter.started_at,
        "share_outside_training": meter.share_outside_training,
        "num_parameters": count_exported_parameters(model, dataset.vocab_size),
        "num_processes": accelerator.num_processes,
        "mixed_precision": choices["precision"].value,
        "dynamo_backend": choices["dynamo"].value,
        "per_device_train_batch_size": accumulation.micro_batch_size,
        "dataset_content_sha256": dataset.metadata["content_sha256"],
        "command": shlex.join(sys.argv),
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "environment": describe_environment(accelerator.device),
    }


def closing_words(
    config: TrainConfig,
    output_dir: Path,
    untrained: dict[str, Any],
    trained: dict[str, Any],
    meter: StepMeter,
    metadata: dict[str, Any],
) -> str:
    """Return the results, the location of the model, and the commands that may come next. metadata: of the dataset."""
    folder, prompt = shlex.quote(str(output_dir)), shlex.quote(config.sample_prompt)
    before, after = ("before", "after") if config.model_name_or_path else ("untrained", "trained")
    columns = {before: untrained, after: trained} if untrained else {after: trained}
    lines = ["", " " * 14 + "".join(f"{name:>15}" for name in columns)]
    for key in ("loss", "perplexity", "bits_per_byte"):
        lines.append(f"{key.replace('_', ' '):14}" + "".join(f"{values[key]:>15,.3f}" for values in columns.values()))
    if compared := compare_with_expected(config, metadata, trained["loss"]):
        lines += ["", *textwrap.wrap(compared, 80, break_on_hyphens=False)]
    if trained["sample"] is not None:
        sample = (f"    {line}" for line in trained["sample"].splitlines())
        lines += ["", f"A sample for the prompt {config.sample_prompt!r}:", *sample]
    if meter.laps:
        lines += ["", f"Evaluation and saving took {meter.share_outside_training:.1%} of the wall-clock time."]
    lines += [
        "",
        f"The model is in {output_dir}, in Hugging Face format. Next:",
        "",
        *_wrap_command("generate", f"python scripts/generate_text.py --model {folder} --prompt {prompt}"),
    ]
    if config.save_steps and (command := extend_command(config, output_dir)):
        lines += _wrap_command("continue", command)
    if config.dataset_name == STANDARD_LIBRARY:
        lines += [
            *_wrap_command("your text", f"{launch_command()} --train_file TEXT.txt"),
            "  GPT-2 124M python scripts/prepare_data.py --dataset_name HUB_ID \\",
            "               --tokenizer_name openai-community/gpt2 --output_dir DIR",
            "             accelerate launch \\",
            "               --config_file accelerate_configs/single_gpu.yaml \\",
            "               recipe/train.py --config gpt2_124m --dataset_dir DIR",
        ]
    return "\n".join(lines)


def _plural(count: int, word: str, ending: str = "s") -> str:
    return f"{count:,} {word}" + (ending if count != 1 else "")


def _wrap_command(label: str, command: str) -> list[str]:
    """Wrap a command at 80 columns, between options, so that a shell still reads it as one."""
    first, *options = command.split(" --")
    lines = [f"  {label:10} {first}"]
    for option in options:
        if len(lines[-1]) + len(option) > 74:
            lines[-1] += " \\"
            lines.append(" " * 14)
        lines[-1] += f" --{option}"
    return lines
