"""What of a run may be published: names without the folders of the machine, and copies of its records.

Paths are reduced to their last part, because folders tell the names of users, projects and machines. Addresses (URLs,
hf://) and Hub ids are public and stay.
"""

import json
import math
import re
import shlex
from collections.abc import Iterable
from pathlib import Path, PureWindowsPath
from typing import Any

import yaml

from recipe.checkpoint import CONFIG_NAME

METRICS_NAME, SUMMARY_NAME = "metrics.jsonl", "summary.json"
NAMED_FILES = 5  # a shell may expand a pattern to thousands
# Options that hold local paths, whether they exist on this machine or not. Others may hold a path or a Hub id.
PATH_OPTIONS = ("config", "dataset_dir", "train_file", "validation_file")
VERBATIM_OPTIONS = ("sample_prompt", "document_separator")
# The author's own folders, repository and trackers: whoever repeats the run has others.
OWN_OPTIONS = ("output_dir", "cache_dir", "run_name", "report_to", "push_to_hub")
# An absolute path in a text: after a space, a quote or a sign, so that neither `a/b` nor `https://a/b` contains one.
PATH_IN_TEXT = re.compile(r"(?<![\w./:\\~-])(?:~?/|[A-Za-z]:[\\/]|\\\\|file://)[^\s'\",;]+")


def public_name(name: str) -> str:
    """Return a Hub id or an address as it is, and a folder's name without its path, even of another machine."""
    if is_address(name):
        return re.sub(r"//[^/@\s]*@", "//", name)  # an address may contain a password
    path = Path(name).expanduser()
    is_local = path.exists() or path.is_absolute() or name.startswith((".", "~")) or len(path.parts) > 2
    return last_part(name) if is_local or "\\" in name else name


def hub_id(name: str | None) -> str | None:
    """Return the id of a dataset or model of the Hub, user/name, or None for a local or built-in one."""
    return name if name and name.count("/") == 1 and not is_address(name) and public_name(name) == name else None


def describe_source(source: dict[str, Any]) -> str:
    """Return the dataset's name, or the names of its text files. source: of the metadata of a packed dataset."""
    if name := source.get("dataset_name"):
        return ", ".join(filter(None, [public_name(name), source.get("dataset_config_name")]))
    files = [last_part(file) for file in source.get("train_files") or ["unknown"]]
    more = [f"and {len(files) - NAMED_FILES:,} more files"] if len(files) > NAMED_FILES else []
    return ", ".join(files[:NAMED_FILES] + more)


def last_part(name: str) -> str:
    """Return the last part of a path of any system; `*.txt` of a pattern."""
    if is_address(name):
        return public_name(name)
    path = name.removeprefix("file://")
    if path.rstrip("/") in (".", "..") or path.endswith("/.."):
        return Path(path).resolve().name
    return PureWindowsPath(path).name or path.strip("/\\") or "folder"  # PureWindowsPath accepts both slashes


def is_address(name: str) -> bool:
    """Return whether a name is an address, such as https://... and hf://..., and not a path."""
    return "://" in name and not name.startswith("file:")


def public_option(name: str, value: Any) -> Any:
    """Return the value of an option without local paths."""
    if isinstance(value, list):
        return [public_option(name, item) for item in value]
    if not isinstance(value, str) or name in VERBATIM_OPTIONS:
        return value
    if name == "eval_tasks":  # NAME=FILE,NAME=FILE
        pairs = (item.partition("=") for item in value.split(","))
        return ",".join(f"{task}={last_part(file)}" if file else task for task, _, file in pairs)
    return last_part(value) if name in PATH_OPTIONS else public_name(value)


def is_own_option(name: str) -> bool:
    """Return whether an option concerns only the author of the run, not whoever repeats it."""
    return name in OWN_OPTIONS or name.startswith("hub_")


def public_command(argv: Iterable[str]) -> str:
    """Return the command of a run as a reader types it. argv: the program's, which may start with its full path."""
    _, *words = argv
    option, shown = "", []
    for word in words:
        if match := re.fullmatch(r"--([\w-]+)(?:=(.*))?", word, re.DOTALL):
            option = match[1].replace("-", "_")
        if is_own_option(option):
            continue
        if match:
            shown.append(word if match[2] is None else f"--{match[1]}={public_option(option, match[2])}")
        else:
            shown.append(public_option(option, word))
    return f"accelerate launch {shlex.join(['recipe/train.py', *shown])}"


def read_events(run_dir: Path, step: int | None = None) -> list[dict[str, Any]]:
    """Read the events of metrics.jsonl, up to a step, without lines that a kill or a full disk cut off.

    A resumed run starts again at its checkpoint's step: that start is part of what follows the step.
    """
    path, events = run_dir / METRICS_NAME, []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            event = json.loads(line)
            kind, at = event["event"], int(event["step"])
        except (ValueError, KeyError, TypeError):
            continue
        is_later_start = kind == "start" and events and at == step
        if step is None or (at <= step and not is_later_start):
            events.append(event)
    return events


def split_scores(evaluation: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the scores of each task in an eval event, whose keys are TASK_SCORE and TASK_num_examples."""
    tasks = [key.removesuffix("_num_examples") for key in evaluation if key.endswith("_num_examples")]
    return {
        task: {key.removeprefix(f"{task}_"): value for key, value in evaluation.items() if key.startswith(f"{task}_")}
        for task in sorted(tasks)
    }


def read_options(run_dir: Path) -> dict[str, Any]:
    """Read training_config.yaml; {} if there is none."""
    path = run_dir / CONFIG_NAME
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {} if path.is_file() else {}


def write_public_files(run_dir: Path, directory: Path, step: int) -> None:
    """Write public copies of training_config.yaml, metrics.jsonl and summary.json, if the run has them.

    step: of the model that they describe; later events are omitted, and so is the summary of another step.
    """
    if options := read_options(run_dir):
        shown = {name: public_option(name, value) for name, value in options.items() if not is_own_option(name)}
        (directory / CONFIG_NAME).write_text(yaml.safe_dump(shown, sort_keys=False), encoding="utf-8")
    if events := read_events(run_dir, step):
        lines = (json.dumps(public_value(event), allow_nan=False) + "\n" for event in events)
        (directory / METRICS_NAME).write_text("".join(lines), encoding="utf-8")
    if (path := run_dir / SUMMARY_NAME).is_file():
        summary = json.loads(path.read_text(encoding="utf-8"))
        if step == summary["step"]:
            summary["command"] = public_command(shlex.split(summary["command"]))
            text = json.dumps(public_value(summary), indent=2, allow_nan=False)
            (directory / SUMMARY_NAME).write_text(text + "\n", encoding="utf-8")


def public_value(value: Any) -> Any:
    """Remove paths from the texts of a record, except samples, and numbers that JSON does not have."""
    if isinstance(value, dict):
        if value.get("event") == "sample":
            return value
        return {key: public_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [public_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return PATH_IN_TEXT.sub(lambda path: last_part(path[0]), value) if isinstance(value, str) else value
