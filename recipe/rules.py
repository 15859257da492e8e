"""The rules of the options: bounds, what requires or excludes what, and which names exist elsewhere.

recipe/config.py applies them. They are checked before torch is imported.
"""

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any

from recipe.errors import UserError, did_you_mean

PROFILED_STEPS = 3
DATA_SOURCES = ("dataset_dir", "train_file", "dataset_name")
TEXT_OPTIONS = (  # how train_file and dataset_name are read
    "validation_file",
    "dataset_config_name",
    "dataset_split",
    "text_column_name",
    "document_separator",
    "validation_split_percentage",
    "skip_bad_files",
)
EVAL_TASKS = ("hellaswag", "lambada")
EXPECTED_LOSS = ("value", "tolerance", "tokens", "dataset", "source")  # nats, nats, number, Hub id, text
# Those of transformers.SchedulerType, whose module imports torch, that depend on steps alone. A test compares them.
SCHEDULES = (
    "linear cosine cosine_with_restarts polynomial constant constant_with_warmup inverse_sqrt cosine_with_min_lr "
    "cosine_warmup_with_min_lr warmup_stable_decay"
)
# The licenses that the Hub accepts on a model card (huggingface/hub-docs, repositories-licenses.md, August 2026).
LICENSES = (
    "apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m "
    "afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 "
    "cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 "
    "cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 "
    "cdla-permissive-1.0 cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl "
    "gpl gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr "
    "mpl-2.0 odc-by odbl openmdw-1.0 openmdw-1.1 openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl "
    "lgpl-lr deepfloyd-if-license fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 "
    "grok2-community gemma unknown"
)


def check_bounds(option: dataclasses.Field, value: Any) -> None:
    """Raise `UserError` if a value is outside the bounds declared next to its option."""
    bounds = option.metadata
    if value == "" or (isinstance(value, list) and "" in value):
        raise UserError(f"{option.name} must not be empty; omit it to use the default")
    if "words" in bounds and isinstance(value, str):
        is_valid = value in bounds["words"]
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        is_valid = bounds.get("at_least", -math.inf) <= value < bounds.get("below", math.inf)
        is_valid = is_valid and value > bounds.get("above", -math.inf)
    else:
        return
    if not is_valid:
        names = {"at_least": "at least", "above": "greater than", "below": "less than"}
        limits = " and ".join(f"{words} {bounds[name]}" for name, words in names.items() if name in bounds)
        raise UserError(f"{option.name} must be {' or '.join([*bounds.get('words', ()), limits])}, got {value!r}")


def check_rules(config: Any) -> None:
    """Raise `UserError` for options that require or exclude each other."""

    def require(ok: object, message: str) -> None:
        if not ok:
            raise UserError(message)

    given = [f"--{name}" for name in DATA_SOURCES if getattr(config, name) is not None]
    sources = "--dataset_dir (a packed dataset), --train_file and --dataset_name (text to prepare)"
    require(len(given) == 1, f"pass exactly one of {sources}; found {' and '.join(given) or 'none'}")
    if config.dataset_dir is not None:
        changed = [name for name in TEXT_OPTIONS if getattr(config, name) != getattr(type(config), name)]
        reason = "cannot be combined with --dataset_dir, whose text is already prepared"
        require(not changed, f"--{', --'.join(changed)} {reason}")
        require(not config.streaming, "--streaming requires --train_file or --dataset_name, not --dataset_dir")
    elif not config.tokenizer_name and not config.tokenizer_vocab_size:
        raise UserError("preparing text requires --tokenizer_name DIR_OR_ID, or --tokenizer_vocab_size N to train one")
    if config.streaming:
        default = config.data_placement == "mmap" and not config.dataloader_num_workers
        require(default, "--streaming builds batches itself; remove --data_placement and --dataloader_num_workers")
        known = config.num_train_epochs is None
        require(known, "--num_train_epochs requires a prepared dataset, not --streaming; pass --max_steps")
    if config.dataloader_num_workers:
        place = config.data_placement
        require(place == "mmap", f"--dataloader_num_workers requires --data_placement mmap, got {place}")
    schedule, known = config.lr_scheduler_type, SCHEDULES.split()
    hint = f"{did_you_mean(schedule, known)} (one of {', '.join(known)})"
    require(schedule in known, f"unknown lr_scheduler_type '{schedule}'; {hint}")
    warmup = config.warmup_steps
    is_valid = warmup < 1 or warmup == int(warmup)
    require(is_valid, f"warmup_steps must be an integer, or a fraction of max_steps below 1, got {warmup}")
    resumes = config.resume_from_checkpoint
    if resumes in ("latest", "auto"):
        message = f"--resume_from_checkpoint {resumes} requires the --output_dir of the run to resume"
        require(config.output_dir is not None, message)
    if config.overwrite:
        require(not resumes, "--overwrite deletes what --resume_from_checkpoint needs; pass only one of them")
    if config.eval_only:
        model = config.model_name_or_path or resumes
        require(model, "--eval_only requires a model: --model_name_or_path (a run, a checkpoint or a Hub id)")
        on_hub = (resumes or "").startswith("hf://")
        require(not on_hub, "--eval_only evaluates a model on the Hub with --model_name_or_path user/name")
    parse_tasks(config.eval_tasks)
    if config.expected_loss is not None:
        found, numbers = config.expected_loss, EXPECTED_LOSS[:3]
        is_valid = set(found) == set(EXPECTED_LOSS) and isinstance(found["dataset"], str)
        is_valid = is_valid and all(isinstance(found[key], (int, float)) and found[key] > 0 for key in numbers)
        expected = f"{', '.join(EXPECTED_LOSS)}, of which the first three are positive numbers"
        require(is_valid, f"expected_loss must have {expected}; got {found}")
    if config.push_to_hub:
        require(config.hub_model_id, "--push_to_hub requires --hub_model_id user/name")
    check_license(config.hub_license)
    check_languages(config.hub_language or ())
    if config.profile is not None and not resumes:
        last = config.max_steps - PROFILED_STEPS
        message = f"--profile {config.profile} profiles {PROFILED_STEPS} steps, but max_steps is {config.max_steps}"
        require(config.profile <= last, f"{message}; pass at most --profile {max(1, last)}")
    try:
        config.sample_prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError("sample_prompt is not valid UTF-8 text") from error


def parse_tasks(given: list[str] | None) -> dict[str, str | None]:
    """`["hellaswag=val.jsonl,lambada"]` -> {"hellaswag": "val.jsonl", "lambada": None}; None stands for the Hub.

    Raises `UserError` for an unknown or repeated task.
    """
    tasks: dict[str, str | None] = {}
    for item in ",".join(given or []).split(",") if given else []:
        name, has_file, path = item.strip().partition("=")
        if name not in EVAL_TASKS:
            hint = did_you_mean(name, EVAL_TASKS, otherwise="separate tasks with commas")
            raise UserError(f"unknown task '{name}'; {hint} (tasks: {', '.join(EVAL_TASKS)})")
        if name in tasks:
            raise UserError(f"the task {name} is given twice; pass it once")
        if has_file and not path:
            raise UserError(f"the task {name} has an empty file name; pass {name}=FILE.jsonl")
        tasks[name] = path or None
    return tasks


def check_license(license_id: str | None) -> None:
    """Raise `UserError` for a license that the Hub would refuse."""
    if license_id == "other":  # the Hub then requires a name and a text, which a run does not have
        raise UserError("hub_license other needs a name and a text; omit it and edit the card on the Hub instead")
    known = LICENSES.split()
    if license_id is not None and license_id not in known:
        listed = "the identifiers are listed at https://huggingface.co/docs/hub/repositories-licenses"
        hint = did_you_mean(license_id.lower(), known, otherwise=listed)
        raise UserError(f"the Hub knows no license '{license_id}'; {hint}")


def check_languages(codes: Iterable[str]) -> None:
    """Raise `UserError` for what cannot be a language of the Hub."""
    for code in codes:
        if not re.fullmatch(r"[a-z]{2,3}|multilingual|code", code):
            expected = "an ISO 639 code of two or three lower-case letters, as in --hub_language en de"
            raise UserError(f"hub_language must be {expected}, multilingual or code, got '{code}'")
