"""The options of a training run, each declared once, and the rules between them.

recipe/command_line.py fills a `TrainConfig` from a recipe file and the command line. This module does not import
torch, so programs that do not need it start at once.
"""

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml

from recipe.disk import write_file
from recipe.errors import UserError, quote

STANDARD_LIBRARY = "python_standard_library"  # the demo's corpus, a dataset_name that needs no download
SPLITS = ("train", "validation")
DATA_SOURCES = ("dataset_dir", "train_file", "dataset_name")
LENGTHS = ("max_steps", "num_train_epochs", "max_minutes")
ONLY_OF_THE_HUB = (
    "--streaming is for a --dataset_name of the Hub that does not fit on the disk; omit it: text on this machine is "
    "prepared once, and takes two bytes a token"
)
# The arguments of schedules, and the schedule that takes each; the names are Transformers'.
SCHEDULE_ARGUMENTS: dict[str, str] = {
    **dict.fromkeys(("min_lr_rate", "min_lr"), "cosine_with_min_lr"),
    **dict.fromkeys(("num_decay_steps", "decay_type", "min_lr_ratio"), "warmup_stable_decay"),
}
DECAY_TYPES = ("linear", "cosine", "1-sqrt")
EXPECTED_LOSS = ("value", "tolerance", "tokens", "dataset", "source")  # nats, nats, number, Hub id, text
CONFIG_NAME = "training_config.yaml"  # a run's options, in its folder and, if it is published, on the Hub
MISSING = "???"  # OmegaConf's mark
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
ADDRESS = re.compile(r"hf://(?:models/)?([^@/]+/[^@/]+)/?(?:@(.+))?")  # of a run on the Hub: hf://user/name@BRANCH

# Who may see an option, and what may change it. One without such a mark is private: it is never published, and a
# stranger's recipe may not set it.
PUBLIC = "public"  # a number, boolean or choice, or a mapping that the model or the schedule checks
IDENTITY = "identity"  # public, and a resumed run must have the same value
SCHEDULE = "schedule"  # public, part of the schedule
OF_HUB = "of the Hub"  # how to read a dataset; published only if the dataset is on the Hub
NEEDED = "needed"  # what a repetition of the run needs; published as a Hub id or as MISSING, never as a path
RESULT = "result"  # measured by the run, not typed by its author
# And what else it may be.
TEXT = "text"  # how train_file and dataset_name are read
PATH = "path"  # a folder, file or pattern, in which `~` is the home folder; some may be an id of the Hub instead


def option(default: Any, text: str, *marks: str, **more: Any) -> Any:
    """Declare an option with its default, its help and its marks.

    more: `at_least`, `above` and `below` bound a number; `alone` is what the name without a value sets; `example` is
    for messages about a mapping; `aliases` are names of TrainingArguments, {name: (what false sets, what true sets)};
    `section` begins one in --help.
    """
    return dataclasses.field(default=default, metadata={"help": text, "marks": marks, **more})


@dataclass(frozen=True)
class TrainConfig:
    """One training run. Names follow `TrainingArguments` 5.x and `run_clm.py` wherever they have one.

    The type of a field says what is read: the words of a `Literal`, numbers, a boolean, text, a list, or a mapping.
    """

    output_dir: str | None = option(
        None, "Output folder. Default: the first unused of runs/NAME, runs/NAME-2, ...", PATH, section="Run"
    )
    run_name: str | None = option(None, "Name for trackers and the default output_dir.")
    seed: int = option(1337, "Seed of the initial weights and of the data order.", IDENTITY, at_least=0, below=2**31)

    dataset_dir: list[str] | None = option(
        None,
        "Packed dataset written by scripts/prepare_data.py, or several to mix.",
        NEEDED,
        PATH,
        section="Data: pass exactly one of dataset_dir, train_file and dataset_name",
    )
    dataset_weights: list[float] | None = option(
        None, "Share of each dataset_dir in the training examples. Default: by its rows.", IDENTITY, at_least=0
    )
    train_file: list[str] | None = option(
        None,
        "Text: .txt, .md, .jsonl, .json, .csv, .parquet (also .gz, .zst, .bz2, .xz), folders, globs; or packed "
        "tokens: .bin of nanoGPT and llm.c.",
        NEEDED,
        PATH,
    )
    validation_file: list[str] | None = option(
        None, "Validation text. Default: part of the training documents.", NEEDED, TEXT, PATH
    )
    dataset_name: str | None = option(
        None, f"Hub id or local folder of a dataset to prepare, or {STANDARD_LIBRARY}.", NEEDED, PATH
    )
    dataset_config_name: str | None = option(None, "Configuration of dataset_name.", OF_HUB, TEXT)
    dataset_revision: str | None = option(None, "Branch, tag or commit on the Hub. Default: the newest.", OF_HUB, TEXT)
    dataset_split: str = option("train", "Split of dataset_name that holds the training documents.", OF_HUB, TEXT)
    document_separator: str | None = option(None, r"Separates documents within .txt files, e.g. '\n\n'.", NEEDED, TEXT)
    parse_special_tokens: bool = option(False, "Encode special tokens in a text as their ids.", PUBLIC, TEXT)
    preprocessing_num_workers: int | None = option(
        None, "Processes that tokenize. Default: one per core.", PUBLIC, at_least=1
    )
    text_column_name: str = option("text", "Column that holds the text.", OF_HUB, TEXT)
    validation_split_percentage: float = option(
        5.0, "Percentage of documents to hold out for validation.", PUBLIC, TEXT, above=0, below=100
    )
    tokenizer_name: str | None = option(
        None, "Tokenizer folder or Hub id. Default: train one on the training text.", NEEDED, PATH
    )
    tokenizer_vocab_size: int | None = option(None, "Size of the tokenizer to train.", PUBLIC, at_least=257)
    cache_dir: str = option("runs/data", "Folder for datasets prepared from train_file or dataset_name.", PATH)
    streaming: bool = option(False, "Tokenize a dataset of the Hub while training, not before.", IDENTITY)
    block_size: int = option(1024, "Tokens per row (sequence length).", IDENTITY, at_least=1)
    dataloader_num_workers: int = option(0, "Processes that build batches; 0: the main one.", PUBLIC, at_least=0)

    model_name_or_path: str | None = option(
        None, "Model to start from (folder or Hub id). Default: random weights.", NEEDED, PATH, section="Model"
    )
    model_type: str | None = option(
        None, "Transformers model type, a dense causal decoder. Default: that of model_name_or_path, or gpt2.", PUBLIC
    )
    config_overrides: dict[str, Any] | None = option(
        None, "Model config: n_layer=4,n_embd=128, or JSON.", PUBLIC, example="n_layer=4,n_embd=128"
    )
    pad_vocab_to_multiple_of: int = option(128, "Pad the vocabulary, in training only.", IDENTITY, at_least=1)
    attn_implementation: Literal["auto", "sdpa", "eager"] = option(
        "auto", "sdpa: flash kernels; eager: matmuls.", PUBLIC
    )
    activation_checkpointing: Literal["auto", "true", "false"] = option(
        "auto",
        "Recompute activations in backward; auto: on when the run needs it to fit.",
        PUBLIC,
        alone="true",
        aliases={"gradient_checkpointing": ("false", "true")},
    )
    loss_chunks: int | Literal["auto"] = option(
        "auto", "Compute the loss in this many chunks, to save memory.", PUBLIC, at_least=1
    )
    label_smoothing_factor: float = option(0.0, "Label smoothing.", IDENTITY, at_least=0, below=1)

    global_batch_size: int = option(
        512,
        "Sequences per optimizer step, over all devices.",
        PUBLIC,
        at_least=1,
        section="Batch: the recipe fixes the global batch, the hardware fixes the micro-batch",
    )
    per_device_train_batch_size: int | Literal["auto"] = option(
        "auto", "Sequences per forward pass (micro-batch); auto: the fastest that fits.", PUBLIC, at_least=1
    )
    gradient_accumulation_steps: int | None = option(
        None, "Micro-batches per step (derived); with a micro-batch, both set the global batch.", PUBLIC, at_least=1
    )

    max_steps: int | None = option(19073, "Optimizer steps.", SCHEDULE, at_least=1, section="Optimizer and schedule")
    num_train_epochs: float | None = option(None, "Passes over the data, instead of max_steps.", PUBLIC, above=0)
    max_minutes: float | None = option(
        None,
        "Time limit of the run, from when its text is prepared; the schedule follows it. Steps or epochs are then an "
        "upper bound.",
        SCHEDULE,
        above=0,
    )
    optim: Literal["adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "muon"] = option(
        "adamw_torch_fused", "AdamW (fused, torch's choice, or in 8 bits), or Muon for the hidden matrices.", IDENTITY
    )
    learning_rate: float = option(6e-4, "Peak learning rate.", SCHEDULE, above=0)
    lr_scheduler_type: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr", "warmup_stable_decay"
    ] = option("cosine_with_min_lr", "Shape of the learning rate over the run.", SCHEDULE)
    lr_scheduler_kwargs: dict[str, Any] | None = option(
        None,
        "Arguments of the schedule, instead of the recipe's: NAME=VALUE,NAME=VALUE or JSON. For cosine_with_min_lr: "
        "min_lr_rate (0.1, a share of the peak) or min_lr. For warmup_stable_decay: num_decay_steps (0.2; below 1, a "
        f"share of the run), decay_type ({', '.join(DECAY_TYPES)}), min_lr_ratio (0).",
        SCHEDULE,
        example="min_lr_rate=0.1",
    )
    warmup_steps: float = option(715, "Linear warm-up steps; below 1, a fraction of max_steps.", SCHEDULE, at_least=0)
    weight_decay: float = option(
        0.1, "Weight decay of matrices and embeddings; muon: of its matrices.", IDENTITY, at_least=0
    )
    adam_beta1: float = option(0.9, "AdamW beta1.", IDENTITY, at_least=0, below=1)
    adam_beta2: float = option(0.95, "AdamW beta2.", IDENTITY, at_least=0, below=1)
    adam_epsilon: float = option(1e-8, "AdamW epsilon.", IDENTITY, above=0)
    max_grad_norm: float = option(
        1.0, "Clip the global gradient norm at this value; 0 disables clipping.", IDENTITY, at_least=0
    )

    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = option(
        "auto",
        "Precision of autocast; no: fp32.",
        PUBLIC,
        section="Precision, compilation, kernels (auto: the launcher, then the hardware)",
        aliases={"bf16": ("no", "bf16"), "fp16": ("no", "fp16")},
    )
    matmul_precision: Literal["highest", "high", "medium"] = option(
        "high", "CUDA's fp32 products: as they are, in TF32 or in bf16.", PUBLIC, aliases={"tf32": ("highest", "high")}
    )
    dynamo_backend: Literal["auto", "no", "inductor", "inductor_regional", "aot_eager", "eager"] = option(
        "auto",
        "torch.compile backend; no: not compiled; inductor_regional: one graph for all blocks instead of one for the "
        "model, which compiles in half the time. Its mode is the launcher's --dynamo_mode.",
        PUBLIC,
    )
    bf16_residual: bool = option(False, "Keep the residual stream in bf16; requires bf16 mixed precision.", PUBLIC)
    deterministic: bool = option(
        False, "Make CUDA runs repeat exactly (slower). CPU runs do, except with max-autotune.", PUBLIC
    )

    logging_steps: int = option(
        10, "Steps between log lines.", PUBLIC, at_least=1, section="Logging, evaluation and checkpoints"
    )
    eval_steps: int | Literal["auto"] = option(
        "auto",
        "Steps between evaluations; 0: only at the start and the end. auto: 200; if the best model is kept, more "
        "often: each epoch, or 10 to 40 times in a run.",
        PUBLIC,
        at_least=0,
    )
    max_eval_samples: int | Literal["auto", "all"] = option(
        "auto",
        "Validation rows per evaluation, of each dataset; auto: as many as take 2% of the run's time, and the same "
        "when it resumes.",
        PUBLIC,
        at_least=1,
    )
    expected_loss: dict[str, Any] | None = option(
        None,
        "Loss to compare with at the end: value, tolerance, tokens, ...",
        RESULT,
        example="value=3.28,tolerance=0.05,tokens=1e10,dataset=ID,source=TEXT",
    )
    save_steps: int = option(1000, "Steps between checkpoints; 0 saves none.", PUBLIC, at_least=0)
    save_total_limit: int | None = option(
        None, "Keep the newest N checkpoints and the one before the decay. Default: all.", PUBLIC, at_least=1
    )
    load_best_model_at_end: Literal["auto", "true", "false"] = option(
        "auto",
        "Export the model with the lowest validation loss, at each evaluation that finds one; auto: if the run sees "
        "its data more than twice, or an unknown number of times.",
        PUBLIC,
        alone="true",
    )
    early_stopping_patience: int | None = option(
        None, "End after this many evaluations in a row without a new lowest validation loss.", PUBLIC, at_least=1
    )
    resume_from_checkpoint: str | None = option(
        None,
        "A checkpoint, a run's folder, hf://user/name@BRANCH, or auto: the newest checkpoint in output_dir, else the "
        "newest on the Hub if this run publishes its training state, else none.",
        PATH,
    )
    report_to: list[str] | None = option(None, "Trackers: trackio, tensorboard, wandb, ...")
    profile: int | None = option(None, "Profile 3 steps after N steps; without N, after 10.", at_least=1, alone=10)

    sample_prompt: str | None = option(
        None,
        "Prompt of the samples, which are published with the model. With a chat template, it is a user's turn. "
        "Default: The; of a chat, Hello!",
        section="Publishing",
    )
    push_to_hub: bool = option(False, "Upload the model to the Hub.")
    hub_model_id: str | None = option(None, "Hub repository: user/name.")
    hub_strategy: Literal["end", "every_save", "checkpoint", "all_checkpoints"] = option(
        "every_save",
        "Upload the final model (end), also each checkpoint's model (every_save), and the training state of the "
        "newest (checkpoint) or of all (all_checkpoints).",
    )
    hub_overwrite: bool = option(
        False, "Publish into a repository that holds another run or model: main is replaced, other branches stay."
    )
    hub_private_repo: bool | None = option(
        None, "Whether the Hub repository is private. Default: as its owner's settings say."
    )
    hub_license: str | None = option(None, "License of the model on its card: mit, apache-2.0, ...")
    hub_language: list[str] | None = option(None, "Languages of the text on the card, as ISO 639 codes: en de ...")

    def __post_init__(self):
        trackers = (self.report_to or [])[::-1]
        if "none" in trackers:  # as in Trainer; it cancels the trackers before it
            object.__setattr__(self, "report_to", trackers[: trackers.index("none")][::-1] or None)
        if self.model_name_or_path and self.tokenizer_name is None:
            object.__setattr__(self, "tokenizer_name", self.model_name_or_path)
        for name in OPTIONS:  # also of a config that code makes, or changes with `replace`
            check_value(name, getattr(self, name))
        check_rules(self)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.block_size


def _flat(kind: Any) -> list[Any]:
    """`int | Literal["auto"] | None` -> [int, "auto", NoneType]; `list[float]` -> [list, float]."""
    inner = [part for argument in get_args(kind) for part in _flat(argument)]
    origin = get_origin(kind)
    if origin in (list, dict):
        return [origin, *inner]
    return inner or [kind]


OPTIONS = {field.name: field for field in dataclasses.fields(TrainConfig)}
DEFAULTS: dict[str, Any] = {name: field.default for name, field in OPTIONS.items()}
TYPES = {name: _flat(field.type) for name, field in OPTIONS.items()}
# The type of a value, or of each value of a list.
KINDS = {name: next((kind for kind in (bool, int, float) if kind in types), str) for name, types in TYPES.items()}
CHOICES = {name: [word for word in types if isinstance(word, str)] for name, types in TYPES.items()}
LISTS = {name for name, types in TYPES.items() if list in types}
MAPPINGS = {name for name, types in TYPES.items() if dict in types}
ALIASES = {alias: name for name, field in OPTIONS.items() for alias in field.metadata.get("aliases", ())}


def marked(*marks: str) -> tuple[str, ...]:
    """Return the names of the options with one of these marks, in order."""
    return tuple(name for name, field in OPTIONS.items() if {*marks} & {*field.metadata["marks"]})


TEXT_OPTIONS, SCHEDULE_OPTIONS, IDENTITY_OPTIONS, PATHS = map(marked, (TEXT, SCHEDULE, IDENTITY, PATH))
PUBLIC_OPTIONS = marked(PUBLIC, IDENTITY, SCHEDULE)


def hub_id(name: str | None) -> str | None:
    """Return the id of a dataset or model of the Hub, user/name, or None for a local folder or anything else."""
    return name if name and HUB_ID.fullmatch(name) and not Path(name).exists() else None


def is_missing(value: object) -> bool:
    """Return whether a published recipe withholds a value, or one item of a list of datasets."""
    return value == MISSING or (isinstance(value, list) and MISSING in value)


def may_come_from_hub(name: str, value: Any) -> bool:
    """Return whether a stranger's recipe may set an option to this value."""
    if name not in marked(NEEDED):
        return name in (*PUBLIC_OPTIONS, *marked(OF_HUB, RESULT))
    if name in LISTS:
        items = value if isinstance(value, list) else [value]
        return all(item == MISSING for item in items)
    return value in (MISSING, STANDARD_LIBRARY) or (isinstance(value, str) and hub_id(value) is not None)


def write_config(config: TrainConfig, path: Path) -> None:
    """Write the options so that `--config PATH` repeats the run in this folder or another.

    `hub_overwrite`, the consent to overwrite another run on the Hub, holds once, so it is not written.
    """
    values = {key: value for key, value in dataclasses.asdict(config).items() if value is not None}
    for key in ("output_dir", "resume_from_checkpoint", "hub_overwrite"):
        values.pop(key, None)
    write_file(path, yaml.safe_dump(values, sort_keys=False))


def require(ok: object, message: str) -> None:
    if not ok:
        raise UserError(message)


def check_value(name: str, value: Any) -> None:
    """Raise `UserError` for a value that is missing, of another type, not a choice, or out of the option's bounds."""
    if value is None:
        require(NoneType in TYPES[name], f"{name} has no value; set one, or delete the line")
    elif isinstance(value, dict):
        require(all(isinstance(key, str) for key in value), f"the keys of {name} must be names, got {quote(value)}")
    else:
        items = value if isinstance(value, list) else [value]
        for item in items:
            require(item != "", f"{name} must not be empty; omit it to use the default")
            if not _is_valid(name, item):
                raise UserError(f"{name} must be {_describe_values(name)}, got {quote(item)}")


def _is_valid(name: str, item: Any) -> bool:
    if isinstance(item, str):
        return item in CHOICES[name] or (KINDS[name] is str and not CHOICES[name])
    bounds = OPTIONS[name].metadata
    is_below = bounds.get("at_least", -math.inf) <= item < bounds.get("below", math.inf)  # NaN is in no range
    return is_below and item > bounds.get("above", -math.inf)


def _describe_values(name: str) -> str:
    """Return what an option may be: `auto or an integer of at least 1`."""
    bounds = OPTIONS[name].metadata
    texts = {"at_least": "of at least", "above": "greater than", "below": "less than"}
    limits = " and ".join(f"{text} {bounds[key]}" for key, text in texts.items() if key in bounds)
    kind = {bool: "true or false", int: "an integer", float: "a number"}.get(KINDS[name])
    values = list(CHOICES[name])
    if kind:
        values.append(f"{kind} {limits}".strip())
    *others, last = values
    return f"{', '.join(others)} or {last}" if others else last


def check_rules(config: TrainConfig) -> None:
    """Raise `UserError` for options that require or exclude each other."""
    named = [f"--{name}" for name in DATA_SOURCES if getattr(config, name) is not None]
    sources = "--dataset_dir (a packed dataset), --train_file and --dataset_name (text to prepare)"
    require(len(named) == 1, f"pass exactly one of {sources}; found {' and '.join(named) or 'none'}")
    if config.dataset_dir is not None:
        changed = [name for name in TEXT_OPTIONS if getattr(config, name) != DEFAULTS[name]]
        reason = "cannot be combined with --dataset_dir, whose text is already prepared"
        require(not changed, f"--{', --'.join(changed)} {reason}")
    elif not config.tokenizer_name and not config.tokenizer_vocab_size:
        how = "--tokenizer_name DIR_OR_ID (GPT-2's: openai-community/gpt2), or --tokenizer_vocab_size N to train one"
        raise UserError(f"preparing text requires {how}")
    weights = config.dataset_weights
    if weights is not None:
        require(config.dataset_dir, "--dataset_weights requires --dataset_dir")
        expected = f"one number for each --dataset_dir ({len(config.dataset_dir or ())}), not all of them 0"
        is_valid = len(weights) == len(config.dataset_dir or ()) and sum(weights) > 0
        require(is_valid, f"--dataset_weights must be {expected}; got {' '.join(map(str, weights))}")
    if config.streaming:
        require(config.dataset_name, ONLY_OF_THE_HUB)
        require(not config.dataloader_num_workers, "--streaming builds batches itself; omit --dataloader_num_workers")
        known = config.num_train_epochs is None
        require(known, "--num_train_epochs requires a prepared dataset, not --streaming; pass --max_steps")
    check_schedule(config)
    is_switch = str(config.resume_from_checkpoint).lower() in ("true", "false")  # Trainer's
    require(not is_switch, "--resume_from_checkpoint takes auto (the newest checkpoint in --output_dir) or a folder")
    needs_folder = config.resume_from_checkpoint == "auto" and config.output_dir is None
    require(not needs_folder, "--resume_from_checkpoint auto requires the --output_dir of the run to resume")
    evaluates = config.early_stopping_patience is None or config.eval_steps != 0
    require(evaluates, "--early_stopping_patience requires --eval_steps greater than 0")
    loss = config.expected_loss
    if loss is not None:
        *numbers, dataset, source = (loss.get(key) for key in EXPECTED_LOSS)
        is_valid = isinstance(dataset, str) and isinstance(source, str)
        is_valid = is_valid and all(isinstance(number, (int, float)) and number > 0 for number in numbers)
        is_valid = is_valid and set(loss) - {"content_sha256"} == set(EXPECTED_LOSS)
        expected = f"{', '.join(EXPECTED_LOSS)}: three positive numbers, and two texts"
        require(is_valid, f"expected_loss must have {expected}; got {quote(loss)}")
    require(config.hub_model_id or not config.push_to_hub, "--push_to_hub requires --hub_model_id user/name")


def check_schedule(config: TrainConfig) -> None:
    """Raise `UserError` for arguments that the schedule does not take, or a length that leaves no room for it."""
    kind = config.lr_scheduler_type
    arguments = config.lr_scheduler_kwargs or {}
    for name, value in arguments.items():
        taker = SCHEDULE_ARGUMENTS.get(name)
        if taker != kind:
            known = ", ".join(name for name, takes in SCHEDULE_ARGUMENTS.items() if takes == kind) or "no arguments"
            hint = f"{taker} does" if taker else f"it takes {known}"
            raise UserError(f"lr_scheduler_type {kind} takes no {name}; {hint}")
        if name == "decay_type":
            require(value in DECAY_TYPES, f"decay_type must be one of {', '.join(DECAY_TYPES)}, got {quote(value)}")
            continue
        most = {"num_decay_steps": math.inf, "min_lr": config.learning_rate}.get(name, 1)
        is_valid = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= most
        require(is_valid, f"{name} must be a number from 0 to {most:g}, got {quote(value)}")
    require(not {"min_lr", "min_lr_rate"} <= arguments.keys(), "pass min_lr or min_lr_rate, not both")
    warmup = config.warmup_steps
    decay = arguments.get("num_decay_steps", 0)
    if config.max_steps is None and (config.num_train_epochs is None or config.max_minutes is not None):
        how = (
            "--max_steps or --max_minutes" if config.streaming else "--max_steps, --num_train_epochs or --max_minutes"
        )
        require(config.max_minutes is not None, f"nothing limits the run; pass {how}")
        require(decay < 1, "with max_minutes, num_decay_steps must be a share of the run below 1")
    elif config.num_train_epochs is None and decay >= 1 and warmup >= 1 and warmup + decay > config.max_steps:
        raise UserError(
            f"{warmup:,.0f} warm-up steps and {decay:,} decay steps exceed max_steps, {config.max_steps:,}; lower "
            "warmup_steps, or pass num_decay_steps below 1, a share of the run"
        )
