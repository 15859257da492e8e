"""The table printed at the start and the text printed at the end."""

import shlex
import textwrap
from pathlib import Path

import torch
from transformers import PreTrainedModel

from recipe.config import STANDARD_LIBRARY, TrainConfig
from recipe.data.packed import PackedDataset
from recipe.environment import describe_device
from recipe.hardware.choices import Choice
from recipe.model.size import count_parameters
from recipe.optim.optimizers import count_warmup_steps
from recipe.run.output_dir import (
    launch_command,
    resume_command,
)


def describe_evaluation(what: str, values: dict[str, float]) -> str:
    return (
        f"{what}: validation loss {values['loss']:.4f}, perplexity {values['perplexity']:,.2f}, "
        f"{values['bits_per_byte']:.4f} bits per byte"
    )


def describe_run(
    config: TrainConfig,
    recipe: str,
    output_dir: Path,
    resume_dir: Path | None,
    device: torch.device,
    choices: dict[str, Choice],
    model: PreTrainedModel,
    dataset: PackedDataset,
    batch: tuple[int, int, int],
    eval_rows: int,
) -> dict[str, str]:
    """The table printed before the first step. batch: processes, micro-batches of each, rows of each."""
    num_processes, accumulation_steps, micro_batch_size = batch
    tokens_per_step = config.global_batch_size * config.block_size
    num_train_rows, num_validation_rows = (len(dataset.splits[split]) for split in ("train", "validation"))
    devices = describe_device(device)
    if device.type == "cpu":
        threads = _plural(torch.get_num_threads(), "thread")
        devices += f", {_plural(num_processes, 'process', 'es')} of {threads}" if num_processes > 1 else f", {threads}"
    elif num_processes > 1:
        devices = f"{num_processes} x {devices}"
    data = f"{dataset.directory}: {num_train_rows:,} training rows of {config.block_size} tokens"
    if config.streaming:
        data = f"streamed, shuffled over {config.shuffle_buffer_size:,} rows of {config.block_size} tokens"
    epochs = config.max_steps * config.global_batch_size / num_train_rows
    shown = {label: f"{choice.value}: {choice.reason}" for label, choice in choices.items()}
    if device.type == "cuda" and config.tf32:
        shown["precision"] += "; TF32 for what stays fp32"
    if config.deterministic:
        shown["precision"] += "; deterministic algorithms"
    return {
        "recipe": f"{recipe}, results in {output_dir}" + (f", resumed from {resume_dir}" if resume_dir else ""),
        "device": devices,
        **shown,
        "model": f"{type(model).__name__}, {count_parameters(model):,} parameters, vocabulary {dataset.vocab_size:,}"
        + (f" padded to {model.config.vocab_size:,}" if model.config.vocab_size > dataset.vocab_size else "")
        + f", {model.config.n_positions} positions"
        + (f", weights from {config.model_name_or_path}" if config.model_name_or_path and not resume_dir else ""),
        "data": f"{data}; {eval_rows:,} of {num_validation_rows:,} validation rows in an evaluation",
        "batch": f"{config.global_batch_size} sequences = {tokens_per_step:,} tokens a step = "
        f"{_plural(num_processes, 'process', 'es')} x {_plural(accumulation_steps, 'micro-batch', 'es')} x "
        f"{_plural(micro_batch_size, 'sequence')}",
        "run": f"{_plural(config.max_steps, 'step')} = {config.max_steps * tokens_per_step:,} tokens"
        + ("" if config.streaming else f", {epochs:.2f} epochs")
        + f", {_plural(count_warmup_steps(config), 'step')} of warm-up"
        + (f"; fewer if they take longer than {config.max_minutes:g} minutes" if config.max_minutes else ""),
    }


def _plural(count: int, word: str, ending: str = "s") -> str:
    return f"{count:,} {word}" + (ending if count != 1 else "")


def closing_words(
    config: TrainConfig, output_dir: Path, untrained: dict, trained: dict, share_outside_training: float | None
) -> str:
    """What was reached, where the model is, and the commands that may come next; the sample follows."""
    folder, prompt = shlex.quote(str(output_dir)), shlex.quote(config.sample_prompt)
    before, after = ("before", "after") if config.model_name_or_path else ("untrained", "trained")
    columns = {before: untrained, after: trained} if untrained else {after: trained}
    lines = ["", " " * 14 + "".join(f"{name:>15}" for name in columns)]
    for key in ("loss", "perplexity", "bits_per_byte"):
        lines.append(f"{key.replace('_', ' '):14}" + "".join(f"{values[key]:>15,.3f}" for values in columns.values()))
    if share_outside_training is not None:
        lines += ["", f"{share_outside_training:.1%} of the time went into evaluating and saving."]
    lines += [
        "",
        f"The model is in {output_dir}, in Hugging Face format. Next:",
        "",
        *_wrap_command("generate", f"python scripts/generate_text.py --model {folder} --prompt {prompt}"),
    ]
    if config.save_steps:
        longer = f"{resume_command(output_dir)} --max_steps {2 * config.max_steps} --change_schedule"
        lines += _wrap_command("train on", longer)
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


def _wrap_command(label: str, command: str) -> list[str]:
    """A command in lines of 80 columns that a shell reads as one."""
    indent = {"initial_indent": f"  {label:10} ", "subsequent_indent": " " * 15}
    lines = textwrap.wrap(command, 78, break_long_words=False, break_on_hyphens=False, **indent)
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]
