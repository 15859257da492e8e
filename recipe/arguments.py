"""The command line of the scripts, and the names that no option has. Imports neither torch nor transformers."""

import argparse
import dataclasses
import re
import sys
from typing import Any

from recipe.config import TrainConfig
from recipe.errors import UserError, did_you_mean

OPTIONS = {option.name: option for option in dataclasses.fields(TrainConfig)}
# Options of TrainingArguments, run_clm.py and nanoGPT that have another name here, or no equivalent.
OTHER_NAMES = {
    "bf16": "use --mixed_precision bf16 (the default on hardware that supports it)",
    "fp16": "use --mixed_precision fp16 (the default on a GPU without bf16)",
    "dtype": "use --mixed_precision",
    "do_train": "training is the default; omit this option",
    "do_eval": "evaluation is the default (--eval_steps, --max_eval_samples); --eval_only only evaluates",
    "do_predict": "use --eval_only, or scripts/generate_text.py",
    "eval_strategy": "use --eval_steps N; 0 evaluates only at the start and the end",
    "evaluation_strategy": "use --eval_steps N; 0 evaluates only at the start and the end",
    "eval_interval": "use --eval_steps",
    "eval_iters": "use --max_eval_samples, which counts rows",
    "save_strategy": "use --save_steps N; 0 saves no checkpoints",
    "gradient_checkpointing": "use --activation_checkpointing, its new name in Transformers 5",
    "torch_compile": "use --dynamo_backend inductor",
    "torch_compile_backend": "use --dynamo_backend",
    "torch_compile_mode": "use --dynamo_mode",
    "compile": "use --dynamo_backend inductor, or no",
    "overwrite_output_dir": "use --overwrite",
    "logging_dir": "TensorBoard files are written to --output_dir",
    "log_interval": "use --logging_steps",
    "warmup_ratio": "use --warmup_steps with a value below 1, as in Transformers 5",
    "num_epochs": "use --num_train_epochs",
    "max_iters": "use --max_steps",
    "max_train_samples": "use --max_steps or --num_train_epochs",
    "max_seq_length": "use --block_size",
    "batch_size": "use --global_batch_size (per step) or --per_device_train_batch_size (per forward pass)",
    "train_batch_size": "use --global_batch_size (per step) or --per_device_train_batch_size (per forward pass)",
    "lr": "use --learning_rate",
    "min_lr": "use --lr_scheduler_kwargs min_lr_rate=0.1",
    "model": "use --model_name_or_path",
    "init_from": "use --model_name_or_path or --resume_from_checkpoint",
    "config_name": "use --config_overrides or --model_name_or_path",
    "dropout": "use --config_overrides resid_pdrop=0.1,embd_pdrop=0.1,attn_pdrop=0.1",
    "no_cuda": "use accelerate launch --cpu",
    "use_cpu": "use accelerate launch --cpu",
    "device": "the launcher chooses the device: accelerate launch --cpu, or CUDA_VISIBLE_DEVICES",
    "fsdp": "GPT-2 fits on one device; several devices use DistributedDataParallel",
    "deepspeed": "GPT-2 fits on one device; several devices use DistributedDataParallel",
    "hub_token": "log in with `hf auth login` or set HF_TOKEN; never put a token on a command line",
    "resume": "use --resume_from_checkpoint auto, with --output_dir",
    "load_best_model_at_end": "the final model is the last one; each checkpoint-N can be loaded as a model",
}


class CommandLine(argparse.ArgumentParser):
    """The parser of a script. It accepts `--max-steps` for `--max_steps` and raises `UserError` for mistakes."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_args(self, args: list[str] | None = None, namespace: argparse.Namespace | None = None):
        found, unknown = self.parse_known_args(underscored(sys.argv[1:] if args is None else args), namespace)
        if unknown:
            raise UserError(unknown_option(unknown[0], [action.dest for action in self._actions]))
        return found

    def parse_with_run_options(self) -> tuple[argparse.Namespace, list[str]]:
        """Return the script's options, and those of recipe/train.py as typed. Raises `UserError` for any other."""
        args, options = self.parse_known_args(underscored(sys.argv[1:]))
        for text in options:
            if text.startswith("--") and text[2:].partition("=")[0] not in OPTIONS:
                raise UserError(unknown_option(text, [*vars(args), *OPTIONS]))
        return args, options

    def error(self, message: str) -> None:
        message = re.sub(r"^argument (--\w+)[^:]*: ", r"\1: ", message)
        message = re.sub(r"Truthy value expected: got (.*) but .*", r"must be true or false, got '\1'", message)
        raise UserError(message.replace(": must", " must", 1))


def underscored(argv: list[str]) -> list[str]:
    """`--max-steps=5` -> `--max_steps=5`; values stay as they are."""
    return [re.sub(r"^--[\w-]+(?==|$)", lambda name: "--" + name[0][2:].replace("-", "_"), text) for text in argv]


def typed_names(argv: list[str]) -> set[str]:
    """Return the names of the options on a command line: `["--max-steps=5"]` -> {"max_steps"}."""
    return {text[2:].partition("=")[0] for text in underscored(argv) if text.startswith("--")}


def unknown_option(option: str, names: list[str]) -> str:
    """Return the message for an option that does not exist."""
    if not option.startswith("-"):
        hint = "join several values with commas: n_layer=2,n_head=2" if "=" in option else ""
        return f"unexpected argument '{option}'; {hint or 'pass text as --train_file and a recipe as --config'}"
    name = option.lstrip("-").split("=")[0]
    if (answer := OTHER_NAMES.get(name.replace("-", "_"))) and "config_overrides" in names:
        return f"unknown option --{name}; {answer}"
    return f"unknown option --{name}; {did_you_mean(name, names, '--')}"
