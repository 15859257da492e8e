"""Prepare a packed dataset from a text source.

Units are tokenized in parallel into a hidden folder inside the dataset's. When all are done, its files move up,
metadata.json last. What is finished is never repeated: a killed preparation loses one unit per process, and the jobs
of an array write to the same folder.
"""

import contextlib
import functools
import glob
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from recipe.config import SPLITS
from recipe.data.encode import choose_encoder
from recipe.data.files import describe_files
from recipe.data.packed import COUNTS, FORMAT_VERSION, check_splits, dataset_info, read_metadata
from recipe.data.read import ReadReport, read_sample, read_train_texts
from recipe.data.source import TextSource, Unit
from recipe.data.tokenizer import (
    TextTokenizer,
    describe_vocabulary,
    read_tokenizer,
    tokenizer_sha256,
    train_tokenizer,
)
from recipe.data.units import Job, UnitTokenizer, UnitWorkers
from recipe.disk import lock, move
from recipe.environment import count_cpus
from recipe.errors import UserError
from recipe.progress import progress_target

TRAINED = "bpe "  # begins what stands for the tokenizer among the inputs if it is trained on the text
LOCK_NAME, COMPLETE_NAME, METADATA_NAME = ".lock", ".complete", "metadata.json"
PARTS = (*SPLITS, "tokenizer", "dataset_dict.json", METADATA_NAME)  # in the order in which they take their place
HASH = "[0-9a-f]" * 12
say = functools.partial(print, flush=True)


def prepare_dataset(
    source: TextSource,
    directory: Path,
    tokenizer: TextTokenizer | None,
    tokenizer_vocab_size: int | None = None,
    overwrite: bool = False,
    num_workers: int | None = None,
    share: slice = slice(None),
    max_bytes: int | None = None,
) -> dict[str, Any] | None:
    """Prepare `directory`, unless it was prepared from the same inputs. Returns its metadata.

    Without a tokenizer, trains a byte-level BPE of up to tokenizer_vocab_size tokens. share: the units to prepare
    here; the result is None while others are missing. max_bytes: prepare about this much text, from units spread over
    the source. Raises `UserError` for bad input, and if `directory` holds anything else; `overwrite` replaces another
    packed dataset, and nothing else.
    """
    inputs = inputs_of(source, tokenizer, tokenizer_vocab_size, max_bytes)
    if (directory / COMPLETE_NAME).exists():  # a process was killed, or is at it
        with locked(directory):
            finish_replacement(directory)
    if (existing := _find_existing(source, directory, inputs, overwrite)) is not None:
        return existing
    started_at = time.perf_counter()
    for files in (source.files, source.held_out_files):
        if text := describe_files(files):
            say(text)
    if source.commit:
        say(f"{source.dataset_name} at commit {source.commit}")
    units = select_units(source.units(), max_bytes)
    partial = partial_folder(directory, inputs)
    try:
        tokenizer = save_once(partial, source, units, tokenizer, tokenizer_vocab_size)
    except OSError as error:
        raise UserError(f"cannot write the dataset {directory}: {error.strerror or error}") from error
    missing = set(missing_units(partial, units))
    mine = [number for number in range(len(units))[share] if number in missing]
    if len(missing) < len(units):
        say(f"{len(units) - len(missing):,} of {len(units):,} units are done")
    job = Job(source, str(partial), str(partial / "tokenizer"))
    failure = None
    try:
        if mine:
            tokenize_units(job, tokenizer, units, mine, num_workers or count_cpus())
    except UserError as error:
        failure = error
    with locked(directory):
        finish_replacement(directory)
        if (existing := _find_existing(source, directory, inputs, overwrite)) is not None:
            # Another process was faster. It may have moved the files before this one wrote its own.
            shutil.rmtree(partial, ignore_errors=True)
            return existing
        if failure:
            raise failure
        if left := len(list(missing_units(partial, units))):
            say(f"{left:,} of {len(units):,} units are not done yet")
            return None
        metadata = summarize(job, tokenizer, len(units), inputs)
        replace_dataset(partial, directory)
    seconds = time.perf_counter() - started_at
    documents, tokens, num_bytes = (sum(of[key] for of in metadata["splits"].values()) for key in COUNTS)
    rate = f" ({num_bytes / 1e6 / seconds:.1f} MB/s)" if len(mine) == len(units) else ""
    say(f"packed into {directory} in {seconds:.1f} s{rate}: {documents:,} documents, {tokens:,} tokens")
    return read_metadata(directory)


def inputs_of(
    source: TextSource, tokenizer: TextTokenizer | None, tokenizer_vocab_size: int | None, max_bytes: int | None
) -> dict[str, Any]:
    """Return all that determines a prepared dataset."""
    made_with = tokenizer_sha256(tokenizer) if tokenizer else f"{TRAINED}{tokenizer_vocab_size}"
    return {"format_version": FORMAT_VERSION, "tokenizer": made_with, "max_bytes": max_bytes, **source.inputs}


def fingerprint_of(inputs: dict[str, Any]) -> str:
    """Hash the inputs. The fingerprint identifies a prepared dataset, and names its folder in a cache."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def is_made_from(directory: Path, inputs: dict[str, Any], source: TextSource) -> bool:
    """Return whether a dataset was prepared from these inputs; of a Hub out of reach, the content is not known."""
    metadata = {}
    with contextlib.suppress(OSError, ValueError):
        metadata = json.loads((directory / METADATA_NAME).read_text())
    if inputs["content"] is not None:
        return metadata.get("fingerprint") == fingerprint_of(inputs)
    has_revision = source.dataset_revision in (None, metadata.get("source", {}).get("dataset_revision"))
    return has_revision and metadata.get("inputs", {}) | {"content": None} == inputs


def _find_existing(
    source: TextSource, directory: Path, inputs: dict[str, Any], overwrite: bool
) -> dict[str, Any] | None:
    """Return the metadata of a dataset that is prepared. Raises `UserError` for what must not be replaced."""
    if not (directory / METADATA_NAME).is_file():
        others = [path for path in directory.glob("[!.]*") if path.name != "lost+found"]  # of a disk's own
        if directory.is_file() or (others and not (directory / COMPLETE_NAME).exists()):
            raise UserError(f"{directory} exists and is not a packed dataset; choose another folder")
        return None
    if is_made_from(directory, inputs, source):
        with contextlib.suppress(UserError) if overwrite else contextlib.nullcontext():  # it may be damaged
            metadata = read_metadata(directory)
            unknown = " (the Hub does not say whether its files have changed)" * (inputs["content"] is None)
            say(f"{directory} is already prepared{unknown}")
            return metadata
    elif not overwrite:
        different = "was prepared from different text or options, or with a different tokenizer"
        raise UserError(f"{directory} {different}; pass --overwrite to replace it or choose another folder")
    return None


# ------------------------------------------------------------------ the steps of a preparation


def select_units(units: list[Unit], max_bytes: int | None) -> list[Unit]:
    """Return all units; with max_bytes, some of each split, spread evenly, with about that much text."""
    if max_bytes is None:
        return units
    separate = [unit for unit in units if unit.parts[0].rule == "validation"]
    selected = []
    for some in (separate, [unit for unit in units if unit not in separate]):
        mean = sum(unit.num_bytes for unit in some) / max(1, len(some)) or max_bytes / 4  # unknown on the Hub
        count = min(len(some), max(1, round(max_bytes / mean)))
        selected += [some[(i + 1) * len(some) // count - 1] for i in range(count)]
    return selected


def save_once(
    partial: Path,
    source: TextSource,
    units: list[Unit],
    tokenizer: TextTokenizer | None,
    tokenizer_vocab_size: int | None,
) -> TextTokenizer:
    """Save the tokenizer beside the units, and train it first if there is none. Returns it."""
    folder, started_at = partial / "tokenizer", time.perf_counter()
    if folder.is_dir():
        return tokenizer or read_tokenizer(str(folder))
    partial.mkdir(parents=True, exist_ok=True)
    if tokenizer is None:
        tokenizer = train_tokenizer(read_train_texts(source, units), tokenizer_vocab_size)
        size = describe_vocabulary(tokenizer, tokenizer_vocab_size)
        say(f"trained a byte-level BPE of {size} in {time.perf_counter() - started_at:.1f} s")
    scratch = partial / f".tokenizer-{secrets.token_hex(4)}"
    tokenizer.save_pretrained(scratch)
    try:
        os.rename(scratch, folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(scratch)  # another job of the array was faster
    return tokenizer


def missing_units(partial: Path, units: list[Unit]) -> Iterator[int]:
    """Yield the numbers of the units that are not finished, or whose files a power cut has shortened."""
    for number in range(len(units)):
        try:
            splits = json.loads((partial / "units" / f"{number:05d}.json").read_text())["splits"]
            sizes = {
                partial / split / name: size for split in SPLITS for name, size in splits[split]["file_bytes"].items()
            }
            is_done = all(path.stat().st_size == size for path, size in sizes.items())
        except (OSError, ValueError):
            is_done = False
        if not is_done:
            yield number


def tokenize_units(
    job: Job, tokenizer: TextTokenizer, units: list[Unit], numbers: list[int], num_workers: int
) -> None:
    """Tokenize the units with these numbers, in this process if it is only one."""
    num_workers = min(num_workers, len(numbers))
    workers = UnitWorkers(job, num_workers) if len(numbers) > 1 else None  # they start during the check below
    with contextlib.closing(workers) if workers else contextlib.nullcontext():
        encoder, how = choose_encoder(tokenizer, read_sample(job.source, units))
        say(f"token ids: {how}\nunits: {len(numbers):,}, processes: {num_workers}")
        if workers is None:
            UnitTokenizer(job)(numbers[0], units[numbers[0]], encoder)
            return
        num_bytes = sum(units[number].num_bytes for number in numbers) or None
        options = {"unit": "B", "unit_scale": True, "dynamic_ncols": True, **progress_target()}
        with tqdm(desc="prepare", total=num_bytes, **options) as progress:
            submitted = {workers.submit(number, units[number], encoder): units[number] for number in numbers}
            for future in as_completed(submitted):
                splits = future.result()["splits"].values()
                progress.update(submitted[future].num_bytes or sum(of["bytes"] for of in splits))


def summarize(job: Job, tokenizer: TextTokenizer, num_units: int, inputs: dict[str, Any]) -> dict[str, Any]:
    """Write the metadata of finished units, and the files by which `datasets` finds them. Returns the metadata.

    Raises `UserError` if a split is empty.
    """
    partial, source = Path(job.folder), job.source.describe()
    summaries = [json.loads((partial / "units" / f"{k:05d}.json").read_text()) for k in range(num_units)]
    report = ReadReport()
    for summary in summaries:
        report.add(ReadReport(**summary["report"]))
    splits = {split: add_up([summary["splits"][split] for summary in summaries]) for split in SPLITS}
    print_report(job.source, report)
    metadata = {
        "format_version": FORMAT_VERSION,
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "content_sha256": sha256_of(splits[split]["content_sha256"] for split in SPLITS),
        "fingerprint": fingerprint_of(inputs),
        "inputs": inputs,
        "source": source
        | {"skipped_documents": report.num_skipped, "blank_rows": report.num_blank}
        | {"rows_without_column": report.num_without_column},
        "splits": splits,
    }
    try:
        check_splits(metadata, 1)
    except UserError:
        shutil.rmtree(partial)
        raise
    for split in SPLITS:
        write_index(partial / split, split, splits[split], len(tokenizer))
    (partial / "dataset_dict.json").write_text(json.dumps({"splits": list(SPLITS)}))
    for path in partial.glob(".tokenizer-*"):
        shutil.rmtree(path)
    (partial / METADATA_NAME).write_text(json.dumps(metadata, indent=2) + "\n")
    return metadata


def add_up(units: list[dict]) -> dict:
    """Add up the counts of the units of a split; join their chunks, hashes and files."""
    seen = functools.reduce(np.bitwise_or, (np.frombuffer(bytes.fromhex(unit["seen"]), np.uint8) for unit in units))
    return {
        **{key: sum(unit[key] for unit in units) for key in COUNTS},
        "used_ids": int(np.unpackbits(seen).sum()),
        "content_sha256": sha256_of(unit["content_sha256"] for unit in units),
        "file_bytes": {name: size for unit in units for name, size in unit["file_bytes"].items()},
        "chunks": [chunk for unit in units for chunk in unit["chunks"]],
    }


def write_index(directory: Path, split: str, counts: dict, vocab_size: int) -> None:
    """Write the files by which `datasets` finds a split's ids, and remove what killed processes have left."""
    for path in directory.glob(".[0-9]*"):
        path.unlink(missing_ok=True)
    state: dict = {"_data_files": [{"filename": name} for name in counts["file_bytes"]], "_split": split}
    state |= {"_fingerprint": counts["content_sha256"][:16], "_output_all_columns": False}
    state |= {"_format_columns": None, "_format_kwargs": {}, "_format_type": None}
    (directory / "state.json").write_text(json.dumps(state, indent=2))
    (directory / "dataset_info.json").write_text(json.dumps(dataset_info(vocab_size)))


def print_report(source: TextSource, report: ReadReport) -> None:
    """Say what was found in the text that is not in the dataset."""
    for reason in report.errors[:10]:
        say(f"skipped: {reason}")
    if report.num_skipped:
        say(f"documents, or ends of files, that cannot be read: {report.num_skipped:,}")
    if report.num_blank:
        say(f"rows without text (null, empty or blank): {report.num_blank:,}")
    if report.num_without_column:
        missing, names = f"{report.num_without_column:,}", ", ".join(report.columns)
        say(f"warning: rows without a column '{source.text_column_name}': {missing} (they have {names})")
    if source.document_separator is not None and not report.num_separators:
        say(f"warning: --document_separator {source.document_separator!r} has no effect: no text file contains it")


def sha256_of(hexdigests: Iterable[str]) -> str:
    return hashlib.sha256("".join(hexdigests).encode()).hexdigest()


# ------------------------------------------------------------------ the folder of a dataset


def partial_folder(directory: Path, inputs: dict[str, Any]) -> Path:
    """Return the folder in which a dataset is prepared.

    It is in the dataset's own, which may be a mount point: what is beside it could be on a small disk, or read-only.
    """
    digest = fingerprint_of(inputs)[:12]
    older = directory.with_name(f".{directory.name}-{digest}.partial")  # what version 0.1 has begun
    return older if os.path.isdir(older) else directory / f".{digest}.partial"


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Let one process at a time change the dataset in a folder. Raises `UserError` if the folder cannot be written."""
    try:
        held = lock(directory / LOCK_NAME)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # Windows keeps it
                (directory / LOCK_NAME).unlink()  # whoever waits for it notices, and locks another
            if held is not None:
                held.release()
    except OSError as error:
        raise UserError(f"cannot write the dataset {directory}: {error.strerror or error}") from error


def replace_dataset(partial: Path, directory: Path) -> None:
    """Move a complete dataset to its place, and remove what was there, and what was interrupted before."""
    move(partial, directory / COMPLETE_NAME)  # only one process can, even where there are no locks
    finish_replacement(directory)
    others = directory.parent.glob(f".{glob.escape(directory.name)}-{HASH}.partial")  # of version 0.1, as the next
    for path in (*directory.glob(f".{HASH}.partial"), *others, directory.with_name(f".{directory.name}.replaced")):
        shutil.rmtree(path, ignore_errors=True)


def finish_replacement(directory: Path) -> None:
    """Move the files of a complete dataset up, if there is one. The older one loses its metadata.json first."""
    complete = directory / COMPLETE_NAME
    if (complete / METADATA_NAME).exists():
        (directory / METADATA_NAME).unlink(missing_ok=True)
        for name in PARTS:
            if (complete / name).exists():  # else a process that was killed has moved it
                if (directory / name).is_dir():
                    shutil.rmtree(directory / name)
                os.rename(complete / name, directory / name)
    shutil.rmtree(complete, ignore_errors=True)
