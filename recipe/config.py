"""The options of a training run: their names, defaults, bounds and the rules between them.

recipe/command_line.py fills a `TrainConfig` from a recipe file and the command line. This module does not import
torch, so mistakes are reported at once.
"""

import contextlib
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from recipe.rules import check_bounds, check_rules

# The first option of each section and the section's heading in --help.
SECTIONS = {
    "output_dir": "Run",
    "dataset_dir": "Data: pass exactly one of dataset_dir, train_file and dataset_name",
    "model_name_or_path": "Model",
    "global_batch_size": "Batch: the recipe fixes the global batch, the hardware fixes the micro-batch",
    "max_steps": "Optimizer and schedule",
    "mixed_precision": "Precision, compilation, kernels (auto: the launcher, then the hardware)",
    "logging_steps": "Logging, evaluation and checkpoints",
    "sample_prompt": "Publishing",
}
STANDARD_LIBRARY = "python_standard_library"  # the demo's corpus, a dataset_name that needs no download
SCHEDULE_OPTIONS = (
    *("max_steps", "learning_rate", "muon_learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
)


def most_steps(max_minutes: float) -> int:
    """Return max_steps of a run that only `max_minutes` limits: more than fit into it, at 1,000 per second.

    A million at most, because the table of learning rates takes 2 seconds per million.
    """
    return min(10**6, max(10**4, int(max_minutes * 60_000)))


def _field(default: Any, text: str, **metadata: Any) -> Any:
    """Declare an option with its default, its help and its bounds.

    metadata: `at_least`, `above` and `below` bound a number; `words` are the strings that may replace it; `nargs`
    and `const` go to argparse.
    """
    return field(default=default, metadata={"help": text, **metadata})


@dataclass(frozen=True)
class TrainConfig:
    """One training run. Names follow `TrainingArguments` 5.x and `run_clm.py` wherever they have one."""

    # --- run
    output_dir: str | None = _field(None, "Output folder. Default: the first unused of runs/NAME, runs/NAME-2, ...")
    overwrite: bool = _field(False, "Delete the previous run's checkpoints and results from output_dir first.")
    run_name: str | None = _field(None, "Name for trackers, the default output_dir and the model card.")
    seed: int = _field(1337, "Seed of the initial weights and of the data order.", at_least=0, below=2**31)

    # --- data
    dataset_dir: str | None = _field(None, "Packed dataset written by scripts/prepare_data.py.")
    train_file: list[str] | None = _field(
        None, "Text: .txt, .jsonl, .json, .csv, .parquet, .wet (also .gz, .zst), folders, globs."
    )
    validation_file: list[str] | None = _field(None, "Validation text. Default: part of the training documents.")
    dataset_name: str | None = _field(None, f"Hub id or local folder of a dataset to prepare, or {STANDARD_LIBRARY}.")
    dataset_config_name: str | None = _field(None, "Configuration of dataset_name.")
    dataset_split: str = _field("train", "Split of dataset_name that holds the training documents.")
    document_separator: str | None = _field(None, r"Separates documents within .txt files, e.g. '\n\n'.")
    skip_bad_files: bool = _field(False, "Skip and count unreadable files instead of stopping at the first.")
    preprocessing_num_workers: int | None = _field(None, "Tokenizer threads. Default: all cores.", at_least=1)
    text_column_name: str = _field("text", "Column that holds the text (jsonl, json, csv, parquet, dataset_name).")
    validation_split_percentage: float = _field(5.0, "Percentage of documents to hold out for validation.")
    tokenizer_name: str | None = _field(None, "Tokenizer folder or Hub id. Default: train one on the training text.")
    tokenizer_vocab_size: int | None = _field(None, "Size of the tokenizer to train, at least 257.", at_least=257)
    cache_dir: str = _field("runs/data", "Folder for datasets prepared from train_file or dataset_name.")
    streaming: bool = _field(False, "Tokenize and pack the text during training instead of preparing it first.")
    shuffle_buffer_size: int = _field(10_000, "Rows in the shuffle window of a streamed text.", at_least=1)
    block_size: int = _field(1024, "Tokens per row (sequence length); default with dataset_dir: its own.", at_least=1)
    data_placement: Literal["mmap", "ram", "device"] = _field(
        "mmap", "Read packed rows from the file (mmap), from host memory (ram) or from the device."
    )
    dataloader_num_workers: int = _field(0, "Processes that build batches; 0 uses the main process.", at_least=0)

    # --- model
    model_name_or_path: str | None = _field(None, "Model to start from (folder or Hub id). Default: random weights.")
    model_type: str = _field("gpt2", "Transformers model type: gpt2, or another dense causal decoder.")
    config_overrides: dict | str | None = _field(None, "Model config: n_layer=4,n_embd=128, or JSON.")
    pad_vocab_to_multiple_of: int = _field(128, "Pad the vocabulary to a multiple, in training only.", at_least=1)
    attn_implementation: Literal["auto", "sdpa", "eager"] = _field("auto", "sdpa: flash kernels; eager: matmuls.")
    activation_checkpointing: Literal["auto", "true", "false"] = _field(
        "auto",
        "Recompute activations in backward: saves memory, costs time. auto: on when the run needs it to fit.",
        nargs="?",
        const="true",
    )
    loss_chunks: int | str | None = _field(
        "auto",
        "Compute the loss in this many chunks: saves memory where the step is not compiled for CUDA, costs time.",
        at_least=1,
        words=("auto",),
    )
    label_smoothing_factor: float = _field(0.0, "Label smoothing.", at_least=0, below=1)

    # --- batch
    global_batch_size: int = _field(512, "Sequences per optimizer step, over all devices.", at_least=1)
    per_device_train_batch_size: int | str | None = _field(
        "auto", "Sequences per forward pass (micro-batch); auto: the largest that fits.", at_least=1, words=("auto",)
    )
    per_device_eval_batch_size: int | None = _field(
        None,
        "Sequences per forward pass in evaluation. Default: 2,048 tokens on a CPU, the micro-batch on a GPU.",
        at_least=1,
    )
    gradient_accumulation_steps: int | None = _field(None, "Micro-batches per step. Default: derived.", at_least=1)

    # --- optimizer and schedule
    max_steps: int = _field(19073, "Optimizer steps.", at_least=1)
    num_train_epochs: float | None = _field(None, "Passes over the training rows, instead of max_steps.", above=0)
    max_minutes: float | None = _field(
        None,
        "Time limit of the whole run; its steps and schedule are fitted to the speed of the first ones. Steps or "
        "epochs passed with it are an upper bound.",
        above=0,
    )
    optim: Literal["auto", "adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "muon"] = _field(
        "auto",
        "AdamW: one fused kernel, torch's own choice, or 8-bit moments (bitsandbytes). muon: Muon for the hidden "
        "matrices, fused AdamW for the rest. auto: fused, and 8-bit where nothing else fits a GPU.",
    )
    learning_rate: float = _field(
        6e-4, "Peak learning rate; with Muon, that of embeddings, biases and LayerNorm.", above=0
    )
    muon_learning_rate: float = _field(2e-3, "Peak learning rate of Muon's matrices.", above=0)
    lr_scheduler_type: str = _field("cosine_with_min_lr", "Any Transformers schedule that depends on steps alone.")
    lr_scheduler_kwargs: dict | str | None = _field(None, "Arguments of the schedule: min_lr_rate=0.1, or JSON.")
    warmup_steps: float = _field(715, "Linear warm-up steps; below 1, a fraction of max_steps.", at_least=0)
    weight_decay: float = _field(
        0.1, "Weight decay of matrices and embeddings; with Muon, of its matrices.", at_least=0
    )
    adam_beta1: float = _field(0.9, "AdamW beta1.", at_least=0, below=1)
    adam_beta2: float = _field(0.95, "AdamW beta2.", at_least=0, below=1)
    adam_epsilon: float = _field(1e-8, "AdamW epsilon.", above=0)
    max_grad_norm: float = _field(1.0, "Clip the global gradient norm at this value; 0 disables clipping.", at_least=0)

    # --- precision, compilation and kernels
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = _field("auto", "Precision of autocast.")
    tf32: bool = _field(True, "Use TF32 for the CUDA matrix products that stay in fp32.")
    dynamo_backend: Literal["auto", "no", "inductor", "aot_eager", "eager"] = _field("auto", "torch.compile backend.")
    dynamo_mode: Literal[
        "auto", "default", "lite", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
    ] = _field("auto", "torch.compile mode. auto: the launcher's. On CUDA, some require one micro-batch per step.")
    bf16_residual: bool = _field(False, "Keep the residual stream in bf16; requires bf16 mixed precision.")
    deterministic: bool = _field(False, "Repeat CUDA runs exactly (slower); CPU runs do without max-autotune.")

    # --- periodic
    logging_steps: int = _field(10, "Steps between log lines.", at_least=1)
    eval_steps: int = _field(250, "Steps between evaluations; 0 evaluates only at the start and the end.", at_least=0)
    max_eval_samples: int | str | None = _field(
        "auto",
        "Validation rows per evaluation; auto: all evaluations take about 2%% of the run.",
        at_least=1,
        words=("auto", "all"),
    )
    expected_loss: dict | str | None = _field(
        None,
        "Validation loss to compare the end of the run with: value, tolerance, tokens, dataset and source.",
    )
    eval_only: bool = _field(False, "Only evaluate model_name_or_path or a checkpoint; auto uses all rows.")
    eval_tasks: list[str] | None = _field(
        None, "Tasks to score at each evaluation: hellaswag, lambada (from the Hub), or hellaswag=FILE.jsonl."
    )
    max_eval_task_seconds: float = _field(30.0, "Time limit per task and evaluation, in seconds.", above=0)
    save_steps: int = _field(1000, "Steps between checkpoints; 0 saves none.", at_least=0)
    save_total_limit: int | None = _field(
        None, "Keep the newest N checkpoints, and the one before the decay. Default: all.", at_least=1
    )
    resume_from_checkpoint: str | None = _field(
        None,
        "Checkpoint: a folder, hf://user/name@BRANCH, latest (the newest valid one in output_dir) or auto (the same, "
        "else the newest on the Hub if this run publishes its training state, else start fresh).",
    )
    report_to: list[str] | None = _field(None, "Trackers: trackio, tensorboard, wandb, ...")
    profile: int | None = _field(
        None,
        "Profile 3 steps after step N; without N, after step 10.",
        at_least=1,
        nargs="?",
        const=10,
    )

    # --- publishing
    sample_prompt: str = _field("The", "Prompt of the sample printed at the end.")
    push_to_hub: bool = _field(False, "Upload the model to the Hub.")
    hub_model_id: str | None = _field(None, "Hub repository: user/name.")
    hub_strategy: Literal["end", "every_save", "checkpoint", "all_checkpoints"] = _field(
        "every_save",
        "Upload the final model (end), each checkpoint's model, as a branch (every_save), and the training state of "
        "the newest (checkpoint) or of all (all_checkpoints), from which hf://user/name@BRANCH resumes.",
    )
    hub_private_repo: bool = _field(False, "Create the Hub repository as private.")
    hub_license: str | None = _field(None, "License of the model on its card: mit, apache-2.0, ...")
    hub_language: list[str] | None = _field(None, "Languages of the text on the card, as ISO 639 codes: en de ...")

    def __post_init__(self):
        self._fill_in()
        for option in dataclasses.fields(self):
            check_bounds(option, getattr(self, option.name))
        check_rules(self)

    @property
    def is_open_ended(self) -> bool:
        """Whether the number of steps is not known yet: only `max_minutes` limits it."""
        return self.max_minutes is not None and self.max_steps == most_steps(self.max_minutes)

    def hub_options(self) -> dict[str, Any]:
        """Return the options of publishing, which may change after the run."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name.startswith("hub_")}

    def _fill_in(self) -> None:
        """Normalize values that have two spellings, and derive the tokenizer from the model."""
        for name in ("per_device_train_batch_size", "loss_chunks", "max_eval_samples"):
            value = getattr(self, name)
            with contextlib.suppress(ValueError, OverflowError):  # "auto", nan, inf
                if isinstance(value, str) and float(value) == int(float(value)):
                    object.__setattr__(self, name, int(float(value)))
        if self.loss_chunks is None:
            object.__setattr__(self, "loss_chunks", "auto")
        if self.report_to == ["none"]:  # Hugging Face's spelling
            object.__setattr__(self, "report_to", None)
        if self.model_name_or_path and self.tokenizer_name is None:
            object.__setattr__(self, "tokenizer_name", self.model_name_or_path)


def save_config(config: TrainConfig, path: Path) -> None:
    """Write the options so that `--config PATH` repeats the run in this folder or another."""
    values = {key: value for key, value in dataclasses.asdict(config).items() if value is not None}
    for key in ("output_dir", "overwrite", "resume_from_checkpoint"):
        values.pop(key, None)
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
