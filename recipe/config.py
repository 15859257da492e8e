"""The options of a training run: their names, defaults, bounds and the rules between them.

recipe/command_line.py fills a `TrainConfig` from a recipe file and the command line. This module does not import
torch, so programs that do not need it start at once.
"""

import dataclasses
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from recipe.disk import write_file
from recipe.errors import UserError, did_you_mean

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
SPLITS = ("train", "validation")
DATA_SOURCES = ("dataset_dir", "train_file", "dataset_name")
TEXT_OPTIONS = (  # how train_file and dataset_name are read
    *("validation_file", "dataset_config_name", "dataset_revision", "dataset_split", "text_column_name"),
    *("document_separator", "validation_split_percentage", "parse_special_tokens"),
)
ONLY_OF_THE_HUB = (
    "--streaming is for a --dataset_name of the Hub that does not fit on the disk; omit it: text on this machine is "
    "prepared once, and takes two bytes a token"
)
MAPPINGS = {  # the options that are dictionaries, with an example for messages
    "config_overrides": "n_layer=4,n_embd=128",
    "lr_scheduler_kwargs": "min_lr_rate=0.1",
    "expected_loss": "value=3.28,tolerance=0.05,tokens=1e10,dataset=ID,source=TEXT",
}
# The schedules and their arguments, by the names of Transformers.
SCHEDULES = {
    "constant": (),
    "constant_with_warmup": (),
    "linear": (),
    "cosine": (),
    "cosine_with_min_lr": ("min_lr_rate", "min_lr"),
    "warmup_stable_decay": ("num_decay_steps", "decay_type", "min_lr_ratio"),
}
DECAY_TYPES = ("linear", "cosine", "1-sqrt")
SCHEDULE_OPTIONS = (
    *("max_steps", "max_minutes", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
)
# A resumed run must have the same values of these. Schedule, batch, hardware, logging and saving may change.
IDENTITY_OPTIONS = (
    *("seed", "block_size", "dataset_weights", "streaming", "pad_vocab_to_multiple_of", "label_smoothing_factor"),
    *("optim", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
)
EVAL_TASKS = ("hellaswag", "lambada")
EXPECTED_LOSS = ("value", "tolerance", "tokens", "dataset", "source")  # nats, nats, number, Hub id, text
CONFIG_NAME = "training_config.yaml"  # a run's options, in its folder and, if it is published, on the Hub
# How an option is published, and whether a stranger's recipe may set it. Options that VISIBILITY does not list are
# private: they are never published, and a recipe from the Hub may not set them.
PUBLIC = "public"  # numbers, booleans, choices, and mappings that the model or the schedule checks
OF_HUB = "of the Hub"  # how to read a dataset; published only if the dataset is on the Hub
NEEDED = "needed"  # what a repetition of the run needs; published as a Hub id or as MISSING, never as a path
RESULT = "result"  # measured by the run, not typed by its author
VISIBILITY = {
    name: visibility
    for visibility, names in {
        NEEDED: (*DATA_SOURCES, "validation_file", "document_separator", "model_name_or_path", "tokenizer_name"),
        OF_HUB: ("dataset_config_name", "dataset_revision", "dataset_split", "text_column_name"),
        RESULT: ("expected_loss",),
        PUBLIC: (
            *("seed", "streaming", "block_size", "data_placement", "dataloader_num_workers"),
            *("preprocessing_num_workers", "dataset_weights", "parse_special_tokens"),
            "validation_split_percentage",
            *("tokenizer_vocab_size", "model_type", "config_overrides", "pad_vocab_to_multiple_of"),
            *("attn_implementation", "activation_checkpointing", "loss_chunks", "label_smoothing_factor"),
            *("global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"),
            *("num_train_epochs", *SCHEDULE_OPTIONS, "optim", "weight_decay"),
            *("adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
            *("mixed_precision", "matmul_precision", "dynamo_backend", "bf16_residual", "deterministic"),
            *("logging_steps", "eval_steps", "max_eval_samples", "save_steps", "save_total_limit"),
            *("load_best_model_at_end", "early_stopping_patience"),
        ),
    }.items()
    for name in names
}
MISSING = "???"  # OmegaConf's mark
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
ADDRESS = re.compile(r"hf://(?:models/)?([^@/]+/[^@/]+)/?(?:@(.+))?")  # of a run on the Hub: hf://user/name@BRANCH


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
    run_name: str | None = _field(None, "Name for trackers and the default output_dir.")
    seed: int = _field(1337, "Seed of the initial weights and of the data order.", at_least=0, below=2**31)

    # --- data
    dataset_dir: list[str] | None = _field(
        None, "Packed dataset written by scripts/prepare_data.py, or several to mix."
    )
    dataset_weights: list[float] | None = _field(
        None, "Shares of the training examples of each dataset_dir. Default: their numbers of rows."
    )
    train_file: list[str] | None = _field(
        None,
        "Text: .txt, .md, .jsonl, .json, .csv, .parquet (also .gz, .zst, .bz2, .xz), folders, globs; or packed "
        "tokens: .bin of nanoGPT and llm.c.",
    )
    validation_file: list[str] | None = _field(None, "Validation text. Default: part of the training documents.")
    dataset_name: str | None = _field(None, f"Hub id or local folder of a dataset to prepare, or {STANDARD_LIBRARY}.")
    dataset_config_name: str | None = _field(None, "Configuration of dataset_name.")
    dataset_revision: str | None = _field(None, "Branch, tag or commit of a Hub dataset. Default: the newest.")
    dataset_split: str = _field("train", "Split of dataset_name that holds the training documents.")
    document_separator: str | None = _field(None, r"Separates documents within .txt files, e.g. '\n\n'.")
    parse_special_tokens: bool = _field(False, "Encode the tokenizer's special tokens in a text as their ids.")
    preprocessing_num_workers: int | None = _field(None, "Processes that tokenize. Default: one per core.", at_least=1)
    text_column_name: str = _field("text", "Column that holds the text.")
    validation_split_percentage: float = _field(5.0, "Percentage of documents to hold out for validation.")
    tokenizer_name: str | None = _field(None, "Tokenizer folder or Hub id. Default: train one on the training text.")
    tokenizer_vocab_size: int | None = _field(None, "Size of the tokenizer to train, at least 257.", at_least=257)
    cache_dir: str = _field("runs/data", "Folder for datasets prepared from train_file or dataset_name.")
    streaming: bool = _field(False, "Tokenize a dataset of the Hub during training instead of preparing it first.")
    block_size: int = _field(1024, "Tokens per row (sequence length).", at_least=1)
    data_placement: Literal["mmap", "ram", "device"] = _field("mmap", "Read packed rows from file, RAM or device.")
    dataloader_num_workers: int = _field(0, "Processes that build batches; 0 uses the main process.", at_least=0)

    # --- model
    model_name_or_path: str | None = _field(None, "Model to start from (folder or Hub id). Default: random weights.")
    model_type: str | None = _field(
        None, "Transformers model type, a dense causal decoder. Default: that of model_name_or_path, or gpt2."
    )
    config_overrides: dict[str, Any] | None = _field(None, "Model config: n_layer=4,n_embd=128, or JSON.")
    pad_vocab_to_multiple_of: int = _field(128, "Pad the vocabulary to a multiple, in training only.", at_least=1)
    attn_implementation: Literal["auto", "sdpa", "eager"] = _field("auto", "sdpa: flash kernels; eager: matmuls.")
    activation_checkpointing: Literal["auto", "true", "false"] = _field(
        "auto", "Recompute activations in backward; auto: on when the run needs it to fit.", nargs="?", const="true"
    )
    loss_chunks: int | str | None = _field(
        "auto",
        "Compute the loss in this many chunks, to save memory.",
        at_least=1,
        words=("auto",),
    )
    label_smoothing_factor: float = _field(0.0, "Label smoothing.", at_least=0, below=1)

    # --- batch
    global_batch_size: int = _field(512, "Sequences per optimizer step, over all devices.", at_least=1)
    per_device_train_batch_size: int | str | None = _field(
        "auto", "Sequences per forward pass (micro-batch); auto: the largest that fits.", at_least=1, words=("auto",)
    )
    gradient_accumulation_steps: int | None = _field(
        None, "Micro-batches per step (derived); typed with the micro-batch, both set the global batch.", at_least=1
    )

    # --- optimizer and schedule
    max_steps: int | None = _field(19073, "Optimizer steps.", at_least=1)
    num_train_epochs: float | None = _field(None, "Passes over the training rows, instead of max_steps.", above=0)
    max_minutes: float | None = _field(
        None, "Time limit of the run, which the schedule follows; steps or epochs are then an upper bound.", above=0
    )
    optim: Literal["adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "muon"] = _field(
        "adamw_torch_fused", "AdamW (fused, torch's choice, or with 8-bit moments), or Muon for the hidden matrices."
    )
    learning_rate: float = _field(6e-4, "Peak learning rate.", above=0)
    lr_scheduler_type: str = _field("cosine_with_min_lr", f"One of {', '.join(SCHEDULES)}.")
    lr_scheduler_kwargs: dict[str, Any] | None = _field(
        None,
        "Arguments of the schedule, as NAME=VALUE,NAME=VALUE or JSON. For cosine_with_min_lr: min_lr_rate (0.1, a "
        "share of the peak) or min_lr. For warmup_stable_decay: num_decay_steps (0.2; below 1, a share of the run), "
        f"decay_type ({', '.join(DECAY_TYPES)}), min_lr_ratio (0).",
    )
    warmup_steps: float = _field(715, "Linear warm-up steps; below 1, a fraction of max_steps.", at_least=0)
    weight_decay: float = _field(0.1, "Weight decay of matrices and embeddings; muon: of its matrices.", at_least=0)
    adam_beta1: float = _field(0.9, "AdamW beta1.", at_least=0, below=1)
    adam_beta2: float = _field(0.95, "AdamW beta2.", at_least=0, below=1)
    adam_epsilon: float = _field(1e-8, "AdamW epsilon.", above=0)
    max_grad_norm: float = _field(1.0, "Clip the global gradient norm at this value; 0 disables clipping.", at_least=0)

    # --- precision, compilation and kernels
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = _field("auto", "Precision of autocast.")
    matmul_precision: Literal["highest", "high", "medium"] = _field(
        "high", "Of the CUDA matrix products that stay in fp32: fp32, TF32 or bf16."
    )
    dynamo_backend: Literal["auto", "no", "inductor", "aot_eager", "eager"] = _field(
        "auto", "torch.compile backend. Its mode is the launcher's --dynamo_mode."
    )
    bf16_residual: bool = _field(False, "Keep the residual stream in bf16; requires bf16 mixed precision.")
    deterministic: bool = _field(
        False, "Make CUDA runs repeat exactly (slower). CPU runs do, except with max-autotune."
    )

    # --- periodic
    logging_steps: int = _field(10, "Steps between log lines.", at_least=1)
    eval_steps: int | str | None = _field(
        "auto",
        "Steps between evaluations; 0: only at the start and the end. auto: 200; if the best model is kept, also each "
        "epoch, but 10 to 40 times in a run.",
        at_least=0,
        words=("auto",),
    )
    max_eval_samples: int | str | None = _field(
        "auto",
        "Validation rows per evaluation, of each dataset; auto: as many as take 2%% of the run's time, and the same "
        "when it resumes.",
        at_least=1,
        words=("auto", "all"),
    )
    expected_loss: dict[str, Any] | None = _field(
        None, "Loss to compare with at the end: value, tolerance, tokens, ..."
    )
    eval_tasks: list[str] | None = _field(
        None, "Tasks to score at each evaluation (1,000 examples): hellaswag, lambada (Hub), or hellaswag=FILE.jsonl."
    )
    save_steps: int = _field(1000, "Steps between checkpoints; 0 saves none.", at_least=0)
    save_total_limit: int | None = _field(
        None, "Keep the newest N checkpoints and the one before the decay. Default: all.", at_least=1
    )
    load_best_model_at_end: Literal["auto", "true", "false"] = _field(
        "auto",
        "Export the model with the lowest validation loss, at each evaluation that finds one; auto: if the run sees "
        "its data more than twice, or an unknown number of times.",
        nargs="?",
        const="true",
    )
    early_stopping_patience: int | None = _field(
        None, "End the run after this many evaluations in a row without a new lowest validation loss.", at_least=1
    )
    resume_from_checkpoint: str | None = _field(
        None,
        "A checkpoint, a run's folder, hf://user/name@BRANCH, or auto: the newest checkpoint in output_dir, else the "
        "newest on the Hub if this run publishes its training state, else none.",
    )
    report_to: list[str] | None = _field(None, "Trackers: trackio, tensorboard, wandb, ...")
    profile: int | None = _field(
        None, "Profile 3 steps after N steps; without N, after 10.", at_least=1, nargs="?", const=10
    )

    # --- publishing
    sample_prompt: str = _field("The", "Prompt of the samples, which are published with the model.")
    push_to_hub: bool = _field(False, "Upload the model to the Hub.")
    hub_model_id: str | None = _field(None, "Hub repository: user/name.")
    hub_strategy: Literal["end", "every_save", "checkpoint", "all_checkpoints"] = _field(
        "every_save",
        "Upload the final model (end), also each checkpoint's model (every_save), and the training state of the "
        "newest (checkpoint) or of all (all_checkpoints).",
    )
    hub_overwrite: bool = _field(
        False, "Publish into a repository that holds another run or model: main is replaced, other branches stay."
    )
    hub_private_repo: bool | None = _field(
        None, "Whether the Hub repository is private. Default: as its owner's settings say.", nargs="?", const=True
    )
    hub_license: str | None = _field(None, "License of the model on its card: mit, apache-2.0, ...")
    hub_language: list[str] | None = _field(None, "Languages of the text on the card, as ISO 639 codes: en de ...")

    def __post_init__(self):
        for name in WORDS:
            if getattr(self, name) is None:
                object.__setattr__(self, name, "all" if name == "max_eval_samples" else "auto")
        if "none" in (trackers := (self.report_to or [])[::-1]):  # as in Trainer; it cancels the trackers before it
            object.__setattr__(self, "report_to", trackers[: trackers.index("none")][::-1] or None)
        if self.model_name_or_path and self.tokenizer_name is None:
            object.__setattr__(self, "tokenizer_name", self.model_name_or_path)
        for option in dataclasses.fields(self):
            check_value(option, getattr(self, option.name))
        check_rules(self)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.block_size

    def hub_options(self) -> dict[str, Any]:
        """Return the options of publishing, which may change after the run."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name.startswith("hub_")}


OPTIONS = {option.name: option for option in dataclasses.fields(TrainConfig)}
# Read before HfArgumentParser replaces the types of the fields.
LITERALS: dict[str, list[Any]] = {  # {option: choices}; an option may also be `Literal[...] | None`
    name: [choice for kind in get_args(option.type) for choice in get_args(kind) or [kind] if choice is not type(None)]
    for name, option in OPTIONS.items()
    if "Literal" in str(option.type)
}
OPTIONAL = {name for name, option in OPTIONS.items() if type(None) in get_args(option.type)}
BOUNDS = {"at_least": -math.inf, "below": math.inf, "above": -math.inf}
LISTS = {name for name, option in OPTIONS.items() if "list" in str(option.type)}
# The type of a value, or of each value of a list.
KINDS = {
    name: next((kind for kind in (bool, int, float) if kind.__name__ in str(option.type)), str)
    for name, option in OPTIONS.items()
}
WORDS = {name for name, option in OPTIONS.items() if "words" in option.metadata}
PATHS = {  # folders, files and patterns; some may be an id of the Hub instead
    *(*DATA_SOURCES, "validation_file", "tokenizer_name", "model_name_or_path"),
    *("output_dir", "cache_dir", "resume_from_checkpoint", "eval_tasks"),
}


def hub_id(name: str | None) -> str | None:
    """Return the id of a dataset or model of the Hub, user/name, or None for a local folder or anything else."""
    return name if name and HUB_ID.fullmatch(name) and not Path(name).exists() else None


def is_missing(value: object) -> bool:
    """Return whether a published recipe withholds a value, or one item of a list of datasets."""
    return value == MISSING or (isinstance(value, list) and MISSING in value)


def may_come_from_hub(name: str, value: Any) -> bool:
    """Return whether a stranger's recipe may set an option to this value."""
    if VISIBILITY.get(name) != NEEDED:
        return name in VISIBILITY
    if name in LISTS:
        return all(item == MISSING for item in (value if isinstance(value, list) else [value]))
    return value in (MISSING, STANDARD_LIBRARY) or (isinstance(value, str) and hub_id(value) is not None)


def write_config(config: TrainConfig, path: Path) -> None:
    """Write the options so that `--config PATH` repeats the run in this folder or another.

    `hub_overwrite`, the consent to overwrite another run on the Hub, holds once, so it is not written.
    """
    values = {key: value for key, value in dataclasses.asdict(config).items() if value is not None}
    for key in ("output_dir", "resume_from_checkpoint", "hub_overwrite"):
        values.pop(key, None)
    write_file(path, yaml.safe_dump(values, sort_keys=False))


def check_value(option: dataclasses.Field, value: Any) -> None:
    """Raise `UserError` for a value that is missing, not among the option's choices or out of its bounds."""
    name, bounds = option.name, option.metadata
    if value == "" or (isinstance(value, list) and "" in value):
        raise UserError(f"{name} must not be empty; omit it to use the default")
    if value is None and name not in OPTIONAL:
        raise UserError(f"{name} has no value; set one, or delete the line")
    if name in LITERALS and value not in (None, *LITERALS[name]):
        raise UserError(f"{name}: invalid choice: {value!r} (choose from {', '.join(map(str, LITERALS[name]))})")
    low, high, above = (bounds.get(key, default) for key, default in BOUNDS.items())
    if value is None or value in bounds.get("words", ()) or not BOUNDS.keys() & bounds.keys():
        return
    if isinstance(value, str) or not (low <= value < high and value > above):  # NaN is in no range
        texts = {"at_least": "at least", "below": "less than", "above": "greater than"}
        limits = " and ".join(f"{text} {bounds[key]}" for key, text in texts.items() if key in bounds)
        raise UserError(f"{name} must be {' or '.join([*bounds.get('words', ()), limits])}, got {value!r}")


def require(ok: object, message: str) -> None:
    if not ok:
        raise UserError(message)


def check_rules(config: TrainConfig) -> None:
    """Raise `UserError` for options that require or exclude each other."""
    named = [f"--{name}" for name in DATA_SOURCES if getattr(config, name) is not None]
    sources = "--dataset_dir (a packed dataset), --train_file and --dataset_name (text to prepare)"
    require(len(named) == 1, f"pass exactly one of {sources}; found {' and '.join(named) or 'none'}")
    if config.dataset_dir is not None:
        changed = [name for name in TEXT_OPTIONS if getattr(config, name) != OPTIONS[name].default]
        reason = "cannot be combined with --dataset_dir, whose text is already prepared"
        require(not changed, f"--{', --'.join(changed)} {reason}")
        require(not config.streaming, "--streaming requires --dataset_name, not --dataset_dir")
    elif not config.tokenizer_name and not config.tokenizer_vocab_size:
        how = "--tokenizer_name DIR_OR_ID (GPT-2's: openai-community/gpt2), or --tokenizer_vocab_size N to train one"
        raise UserError(f"preparing text requires {how}")
    if (weights := config.dataset_weights) is not None:
        count = len(config.dataset_dir or ())
        is_valid = len(weights) == count and all(0 <= weight < math.inf for weight in weights) and sum(weights) > 0
        require(count, "--dataset_weights requires --dataset_dir")
        expected = f"one number of at least 0 for each --dataset_dir ({count}), not all of them 0"
        require(is_valid, f"--dataset_weights must be {expected}; got {' '.join(map(str, weights))}")
    if config.streaming:
        require(config.train_file is None, ONLY_OF_THE_HUB)
        default = config.data_placement == "mmap" and not config.dataloader_num_workers
        require(default, "--streaming builds batches itself; remove --data_placement and --dataloader_num_workers")
        known = config.num_train_epochs is None
        require(known, "--num_train_epochs requires a prepared dataset, not --streaming; pass --max_steps")
    if config.dataloader_num_workers:
        place = config.data_placement
        require(place == "mmap", f"--dataloader_num_workers requires --data_placement mmap, got {place}")
    check_schedule(config)
    resumes = config.resume_from_checkpoint
    if str(resumes).lower() in ("true", "false"):  # Trainer's
        problem = f"--resume_from_checkpoint {resumes} names no folder"
        raise UserError(f"{problem}; pass auto (the newest checkpoint in --output_dir) or a folder, or omit it")
    message = f"--resume_from_checkpoint {resumes} requires the --output_dir of the run to resume"
    require(resumes != "auto" or config.output_dir is not None, message)
    evaluates = config.early_stopping_patience is None or config.eval_steps != 0
    require(evaluates, "--early_stopping_patience requires --eval_steps greater than 0")
    parse_tasks(config.eval_tasks)
    if (loss := config.expected_loss) is not None:
        texts = [loss.get(key) for key in EXPECTED_LOSS[3:]]  # the end of the run prints them
        is_valid = all(isinstance(text, str) and text.isprintable() for text in texts)
        is_valid = is_valid and set(loss) - {"content_sha256"} == set(EXPECTED_LOSS)
        numbers = [loss.get(key) for key in EXPECTED_LOSS[:3]]
        is_valid = is_valid and all(isinstance(number, (int, float)) and number > 0 for number in numbers)
        expected = f"{', '.join(EXPECTED_LOSS)}: three positive numbers, and two printable texts"
        require(is_valid, f"expected_loss must have {expected}; got {loss}")
    require(config.hub_model_id or not config.push_to_hub, "--push_to_hub requires --hub_model_id user/name")
    try:
        config.sample_prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError("sample_prompt is not valid UTF-8 text") from error


def check_schedule(config: TrainConfig) -> None:
    """Raise `UserError` for an unknown schedule, or for arguments that it does not take."""
    kind, arguments = config.lr_scheduler_type, config.lr_scheduler_kwargs or {}
    hint = f"{did_you_mean(kind, SCHEDULES)} (one of {', '.join(SCHEDULES)})"
    require(kind in SCHEDULES, f"unknown lr_scheduler_type '{kind}'; {hint}")
    for name, value in arguments.items():
        if name not in SCHEDULES[kind]:
            others = [f"{other} does" for other, names in SCHEDULES.items() if name in names]
            known = ", ".join(SCHEDULES[kind]) or "no arguments"
            raise UserError(f"lr_scheduler_type {kind} takes no {name}; {(others or [f'it takes {known}'])[0]}")
        is_share = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
        if name == "decay_type":
            require(value in DECAY_TYPES, f"decay_type must be one of {', '.join(DECAY_TYPES)}, got {value!r}")
        elif name == "num_decay_steps":
            is_valid = is_share and (value < 1 or value == int(value))
            require(is_valid, f"num_decay_steps must be a number of steps, or a share below 1, got {value!r}")
        elif name == "min_lr":
            is_valid = is_share and value <= config.learning_rate
            require(is_valid, f"min_lr must be from 0 to learning_rate, got {value!r}")
        else:
            require(is_share and value <= 1, f"{name} must be from 0 to 1, got {value!r}")
    require(not {"min_lr", "min_lr_rate"} <= arguments.keys(), "pass min_lr or min_lr_rate, not both")
    warmup, decay = config.warmup_steps, arguments.get("num_decay_steps", 0)
    is_valid = warmup < 1 or warmup == int(warmup)
    require(is_valid, f"warmup_steps must be an integer, or a fraction of max_steps below 1, got {warmup}")
    if config.max_steps is None and (config.num_train_epochs is None or config.max_minutes is not None):
        known = config.max_minutes is not None
        require(known, "nothing limits the run; pass --max_steps, --num_train_epochs or --max_minutes")
        require(decay < 1, "with max_minutes, num_decay_steps must be a share of the run below 1")
    elif config.num_train_epochs is None and decay >= 1 and warmup >= 1 and warmup + decay > config.max_steps:
        raise UserError(
            f"{warmup:,.0f} warm-up steps and {decay:,} decay steps exceed max_steps, {config.max_steps:,}; lower "
            "warmup_steps, or pass num_decay_steps below 1, a share of the run"
        )


def parse_tasks(items: list[str] | None) -> dict[str, str | None]:
    """`["hellaswag=val.jsonl,lambada"]` -> {"hellaswag": "val.jsonl", "lambada": None}; None stands for the Hub.

    Raises `UserError` for an unknown or repeated task.
    """
    tasks: dict[str, str | None] = {}
    for item in ",".join(items or []).split(",") if items else []:
        name, has_file, path = item.strip().partition("=")
        if name not in EVAL_TASKS:
            hint = did_you_mean(name, EVAL_TASKS, otherwise="separate tasks with commas")
            raise UserError(f"unknown task '{name}'; {hint} (tasks: {', '.join(EVAL_TASKS)})")
        require(name not in tasks, f"the task {name} is given twice; pass it once")
        require(path or not has_file, f"the task {name} has an empty file name; pass {name}=FILE.jsonl")
        tasks[name] = path or None
    return tasks
