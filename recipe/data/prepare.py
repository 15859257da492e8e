"""Prepare a packed dataset from a text source.

Processes tokenize units into a hidden folder inside the dataset's folder. When all units are done, the files move up,
metadata.json last. Finished units are never repeated: a kill loses one unit per process, and the jobs of an array
write to the same folder.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from recipe.arguments import shell_command
from recipe.config import SPLITS
from recipe.data.cut import TRAIN, Unit
from recipe.data.encode import SAMPLE_CHARACTERS, choose_encoder
from recipe.data.files import describe_files, kind_of
from recipe.data.packed import COUNTS, FORMAT_VERSION, check_splits, dataset_info, read_metadata
from recipe.data.read import ReadReport, list_units, read_sample, read_train_texts, read_unit
from recipe.data.source import TextSource
from recipe.data.tokenizer import (
    SPELLS_BYTES,
    TextTokenizer,
    describe_vocabulary,
    open_tokenizer,
    special_tokens,
    steps_of,
    tokenizer_sha256,
    train_tokenizer,
)
from recipe.data.units import Job, UnitTokenizer, UnitWorkers
from recipe.disk import lock
from recipe.environment import count_cpus
from recipe.errors import UserError
from recipe.progress import progress_target

TRAINED_PREFIX = "bpe "  # in the inputs, the prefix of a tokenizer that is trained on the text
LOCK_NAME, COMPLETE_NAME, METADATA_NAME = ".lock", ".complete", "metadata.json"
PARTS = (*SPLITS, "tokenizer", "dataset_dict.json", METADATA_NAME)  # in the order in which they move up
HASH = "[0-9a-f]" * 12
WORTH_A_WARNING = 0.01  # share of the tokens that are unknown text, or padding
SAME_BYTES = 0.001  # share of a text's bytes by which those of its ids may differ, besides one for each document
say = functools.partial(print, flush=True)


@dataclass(frozen=True)
class Target:
    """The dataset to prepare."""

    source: TextSource
    directory: Path
    inputs: dict[str, Any]  # from `inputs_of`
    overwrite: bool  # whether it may replace another packed dataset
    started_at: float = field(default_factory=time.perf_counter)

    @property
    def partial(self) -> Path:
        """The folder of the preparation: inside `directory`, because the parent of a mount point may be read-only."""
        return self.directory / f".{fingerprint_of(self.inputs)[:12]}.partial"


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

    tokenizer: the prefix of its template begins each document (see `without_template`). Without a tokenizer, trains a
    byte-level BPE of up to tokenizer_vocab_size tokens. share: the units to prepare here; the result is None while
    others are missing. max_bytes: prepare about this much text, from units spread over the source. overwrite: replace
    another packed dataset. Raises `UserError` for bad input, and if `directory` holds anything else.
    """
    source = source.read_with(len(tokenizer or ()))
    inputs = inputs_of(source, tokenizer, tokenizer_vocab_size, max_bytes)
    target = Target(source, directory, inputs, overwrite)
    if (existing := _find_existing(target)) is not None:
        return existing
    units, failure = [], None
    if not is_made_from(directory / COMPLETE_NAME, inputs, source):  # else a killed process left only the move
        tokenizer, units = claim_dataset(target, tokenizer, tokenizer_vocab_size, max_bytes)
        try:
            tokenize(target, tokenizer, units, share, num_workers or count_cpus())
        except UserError as error:  # meanwhile, another process may have completed the dataset
            failure = error
    return finish(target, tokenizer, len(units), failure)


def inputs_of(
    source: TextSource, tokenizer: TextTokenizer | None, tokenizer_vocab_size: int | None, max_bytes: int | None
) -> dict[str, Any]:
    """Return all that determines a prepared dataset."""
    made_with = tokenizer_sha256(tokenizer) if tokenizer else f"{TRAINED_PREFIX}{tokenizer_vocab_size}"
    inputs = {"format_version": FORMAT_VERSION, "tokenizer": made_with, "max_bytes": max_bytes, **source.inputs}
    if tokenizer and tokenizer.prefix:
        inputs["document_prefix"] = tokenizer.prefix
    return inputs


def fingerprint_of(inputs: dict[str, Any]) -> str:
    """Hash the inputs. The fingerprint identifies a prepared dataset, and names its folder in a cache."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def is_made_from(directory: Path, inputs: dict[str, Any], source: TextSource) -> bool:
    """Return whether a dataset was prepared from these inputs. Without the Hub, the content is not compared."""
    metadata = {}
    with contextlib.suppress(OSError, ValueError):
        metadata = json.loads((directory / METADATA_NAME).read_text())
    if not metadata:
        return False
    if metadata.get("fingerprint") == fingerprint_of(inputs):
        return True
    if inputs["content"] is not None:
        return False
    made_from = {**metadata.get("inputs", {}), "content": None}
    made_from_revision = metadata.get("source", {}).get("dataset_revision")
    return made_from == inputs and source.dataset_revision in (None, made_from_revision)


def _find_existing(target: Target) -> dict[str, Any] | None:
    """Return the metadata of a prepared dataset, else None. Raises `UserError` if the folder must not be replaced."""
    directory, inputs = target.directory, target.inputs
    if not (directory / METADATA_NAME).is_file():
        others = [path for path in directory.glob("[!.]*") if path.name != "lost+found"]  # of a disk's own
        if directory.is_file() or (others and not (directory / COMPLETE_NAME).exists()):
            raise UserError(f"{directory} exists and is not a packed dataset; choose another folder")
        return None
    if is_made_from(directory, inputs, target.source):
        with contextlib.suppress(UserError) if target.overwrite else contextlib.nullcontext():  # it may be damaged
            metadata = read_metadata(directory)
            unknown = " (the Hub does not say whether its files have changed)" * (inputs["content"] is None)
            say(f"{directory} is already prepared{unknown}")
            return metadata
    elif not target.overwrite:
        different = "was prepared from different text or options, or with a different tokenizer"
        raise UserError(f"{directory} {different}; pass --overwrite to replace it or choose another folder")
    return None


# ------------------------------------------------------------------ claim: say what is read, keep the tokenizer


def claim_dataset(
    target: Target, tokenizer: TextTokenizer | None, tokenizer_vocab_size: int | None, max_bytes: int | None
) -> tuple[TextTokenizer, list[Unit]]:
    """Print what is read, and create the preparation's folder with the tokenizer. Returns tokenizer and units."""
    source = target.source
    for files in (source.files, source.held_out_files):
        if text := describe_files(files):
            say(text)
    if source.commit:
        say(f"{source.dataset_name} at commit {source.commit}")
    units = list_units(source)
    if all(part.hold_out == TRAIN for unit in units for part in unit.parts):
        read_sample(source, units)  # raises if there is no text
        remedy = "pass a --validation_file, or a --document_separator that occurs in the text"
        raise UserError(f"{source.name} has no two different documents, one of them for validation; {remedy}")
    units = select_units(source, units, max_bytes)
    try:
        return save_tokenizer(target.partial, source, units, tokenizer, tokenizer_vocab_size), units
    except OSError as error:
        raise UserError(f"cannot write the dataset {target.directory}: {error.strerror or error}") from error


def select_units(source: TextSource, units: list[Unit], max_bytes: int | None) -> list[Unit]:
    """Return all units, or, with max_bytes, evenly spread units of each split with about that much text.

    For local files without separate validation text, adds a unit with a validation document if none of these has one.
    """
    if max_bytes is None:
        return units
    separate = [unit for unit in units if unit.is_validation]
    selected = []
    for candidates in (separate, [unit for unit in units if unit not in separate]):
        mean_bytes = sum(unit.num_bytes for unit in candidates) / max(1, len(candidates))
        mean_bytes = mean_bytes or max_bytes / 4  # unknown on the Hub
        count = min(len(candidates), max(1, round(max_bytes / mean_bytes)))
        selected += [candidates[(i + 1) * len(candidates) // count - 1] for i in range(count)]
    for unit in () if separate or source.dataset_name else itertools.chain(selected, units):  # mostly the first one
        if any(document.split == "validation" for document in read_unit(source, unit, ReadReport())):
            return selected if unit in selected else [*selected, unit]
    return selected


def save_tokenizer(
    partial: Path,
    source: TextSource,
    units: list[Unit],
    tokenizer: TextTokenizer | None,
    tokenizer_vocab_size: int | None,
) -> TextTokenizer:
    """Save the tokenizer beside the units, and train it first if there is none. Returns it."""
    folder, started_at = partial / "tokenizer", time.perf_counter()
    if folder.is_dir():
        return tokenizer or open_tokenizer(folder)
    partial.mkdir(parents=True, exist_ok=True)
    if tokenizer is None:
        assert tokenizer_vocab_size is not None  # `prepare_dataset` gets one or the other
        say("training a tokenizer; --max_minutes counts from when the text is prepared")
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


# ------------------------------------------------------------------ tokenize: units into files


def tokenize(target: Target, tokenizer: TextTokenizer, units: list[Unit], share: slice, num_workers: int) -> None:
    """Tokenize the units of a share that are missing."""
    missing = set(missing_units(target.partial, len(units)))
    mine = [number for number in range(len(units))[share] if number in missing]
    if len(missing) < len(units):
        say(f"{len(units) - len(missing):,} of {len(units):,} units are done")
    if mine:
        prefix = target.inputs.get("document_prefix", [])
        job = Job(target.source, str(target.partial), str(target.partial / "tokenizer"), prefix)
        tokenize_units(job, tokenizer, units, mine, num_workers)


def missing_units(partial: Path, num_units: int) -> Iterator[int]:
    """Yield the numbers of the units that are not finished, or whose files a power cut has shortened."""
    for number in range(num_units):
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
        sample = read_sample(job.source, units)
        for line in look_for_special_tokens(tokenizer, job.source, sample):
            say(line)
        encoder = "tokenizers"
        if sample:  # else the data holds token ids
            encoder, how = choose_encoder(tokenizer, sample, job.source.parse_special_tokens)
            say(f"token ids: {how}")
        say(f"units: {len(numbers):,}, processes: {num_workers}")
        if workers is None:
            UnitTokenizer(job)(numbers[0], units[numbers[0]], encoder)
            return
        num_bytes = sum(units[number].num_bytes for number in numbers) or None
        options = {"unit": "B", "unit_scale": True, "dynamic_ncols": True, **progress_target()}
        with tqdm(desc="prepare", total=num_bytes, **options) as progress:
            submitted = {workers.submit(number, units[number], encoder): units[number] for number in numbers}
            for future in as_completed(submitted):
                splits = future.result()["splits"].values()
                progress.update(submitted[future].num_bytes or sum(split["bytes"] for split in splits))


def look_for_special_tokens(tokenizer: TextTokenizer, source: TextSource, sample: Sequence[str]) -> Iterator[str]:
    """Yield what to say of special tokens that the text contains."""
    text = "\n".join(sample)[:SAMPLE_CHARACTERS]
    counts = {token: count for token in sorted(special_tokens(tokenizer)) if (count := text.count(token))}
    place = f"in the first {len(text):,} characters"
    if not source.parse_special_tokens and (count := counts.pop(tokenizer.eos_token, 0)):
        option = shell_command(document_separator=tokenizer.eos_token)
        if source.document_separator or not any(kind_of(path) in (".txt", ".md") for path in source.files.paths):
            option = "--parse_special_tokens"  # rows have no separator
        count = f"{tokenizer.eos_token} ({count:,} times {place})"
        yield f"warning: the text contains {count}, packed as characters; if it ends documents, pass {option}"
    if counts:
        listed = ", ".join(f"{token} ({count:,})" for token, count in Counter(counts).most_common(5))
        what = "packed as characters; --parse_special_tokens makes ids of them"
        yield f"special tokens {place}: {listed}, {'made ids' if source.parse_special_tokens else what}"


# ------------------------------------------------------------------ finish: one dataset


def finish(
    target: Target, tokenizer: TextTokenizer | None, num_units: int, failure: UserError | None
) -> dict[str, Any] | None:
    """Complete the dataset if all its units are done. Returns its metadata, or None.

    failure: raised unless another process has completed the dataset.
    """
    directory, partial = target.directory, target.partial
    with locked(directory):
        finish_replacement(directory)
        if (existing := _find_existing(target)) is not None:
            # Another process was faster. It may have moved the files before this one wrote its own.
            shutil.rmtree(partial, ignore_errors=True)
            return existing
        if failure:
            raise failure
        if left := len(list(missing_units(partial, num_units))):
            say(f"{left:,} of {num_units:,} units are not done yet")
            return None
        assert tokenizer is not None  # else the dataset was complete
        metadata = summarize(target, tokenizer, num_units)
        replace_dataset(partial, directory)
    documents, tokens, num_bytes = (sum(split[key] or 0 for split in metadata["splits"].values()) for key in COUNTS)
    seconds = time.perf_counter() - target.started_at
    say(f"packed into {directory} in {seconds:.1f} s ({num_bytes / 1e6 / seconds:.1f} MB/s):")
    say(f"  {documents:,} documents, {tokens:,} tokens")
    return read_metadata(directory)


def summarize(target: Target, tokenizer: TextTokenizer, num_units: int) -> dict[str, Any]:
    """Write the metadata of finished units, and the files that let `datasets` find them. Returns the metadata.

    Raises `UserError` if a split is empty.
    """
    partial = target.partial
    summaries = [json.loads((partial / "units" / f"{k:05d}.json").read_text()) for k in range(num_units)]
    report = ReadReport()
    for summary in summaries:
        report.add(ReadReport(**summary["report"]))
    units = {split: [summary["splits"][split] for summary in summaries] for split in SPLITS}
    splits = {split: total_counts(units[split], tokenizer.token_bytes) for split in SPLITS}
    print_report(target.source, report)
    print_unknown(tokenizer, splits)
    metadata = {
        "format_version": FORMAT_VERSION,
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "content_sha256": sha256_of(splits[split]["content_sha256"] for split in SPLITS),
        "fingerprint": fingerprint_of(target.inputs),
        "inputs": target.inputs,
        "source": target.source.describe()
        | {"skipped_documents": report.num_skipped, "skipped_bytes": report.skipped_bytes}
        | {"blank_rows": report.num_blank, "rows_without_column": report.num_without_column},
        "splits": splits,
    }
    check_splits(metadata, 1)
    for split in SPLITS:
        write_index(partial / split, split, splits[split], len(tokenizer))
    (partial / "dataset_dict.json").write_text(json.dumps({"splits": list(SPLITS)}))
    for path in partial.glob(".tokenizer-*"):
        shutil.rmtree(path)
    (partial / METADATA_NAME).write_text(json.dumps(metadata, indent=2) + "\n")
    return metadata


def total_counts(units: list[dict], token_bytes: np.ndarray) -> dict:
    """Add up the counts of the units of a split; join their chunks, hashes and files.

    token_bytes: from `count_token_bytes`. The bytes of a split are None if those of a used id are unknown, or if those
    of its ids are not those of its text.
    """
    seen = functools.reduce(np.bitwise_or, (np.frombuffer(bytes.fromhex(unit["seen"]), np.uint8) for unit in units))
    is_used = np.unpackbits(seen)[: len(token_bytes)].astype(bool)
    counts = {key: sum(unit.get(key, 0) for unit in units) for key in (*COUNTS, "unknown", "lost")}
    is_known = (token_bytes[is_used] >= 0).all()
    num_bytes = counts["bytes"] + (lost := counts.pop("lost"))  # of the text
    is_same = is_known and abs(lost) <= max(SAME_BYTES * num_bytes, counts["documents"])
    return {
        **counts,
        "bytes": counts["bytes"] if is_same else None,
        "lost_share": lost / max(1, num_bytes) if is_known else 0.0,
        "used_ids": int(is_used.sum()),
        "content_sha256": sha256_of(unit["content_sha256"] for unit in units),
        "file_bytes": {name: size for unit in units for name, size in unit["file_bytes"].items()},
        "chunks": [chunk for unit in units for chunk in unit["chunks"]],
    }


def write_index(directory: Path, split: str, counts: dict, vocab_size: int) -> None:
    """Write the files that let `datasets` find a split's ids, and remove what killed processes have left."""
    for path in directory.glob(".[0-9]*"):
        path.unlink(missing_ok=True)
    state: dict = {"_data_files": [{"filename": name} for name in counts["file_bytes"]], "_split": split}
    state |= {"_fingerprint": counts["content_sha256"][:16], "_output_all_columns": False}
    state |= {"_format_columns": None, "_format_kwargs": {}, "_format_type": None}
    (directory / "state.json").write_text(json.dumps(state, indent=2))
    (directory / "dataset_info.json").write_text(json.dumps(dataset_info(vocab_size)))


def print_report(source: TextSource, report: ReadReport) -> None:
    """Print what reading revealed: skipped text, rows without text, padding, a separator that does not occur."""
    for reason in report.errors[:10]:
        say(f"skipped: {reason}")
    if report.num_skipped:
        size = f" ({report.skipped_bytes:,} bytes)" * (report.skipped_bytes > 0)
        say(f"lines, rows, or ends of files, that cannot be read: {report.num_skipped:,}{size}")
    if report.num_blank:
        say(f"rows without text (null, empty or blank): {report.num_blank:,}")
    if report.num_without_column:
        missing, names = f"{report.num_without_column:,}", ", ".join(report.columns)
        column = source.text_column_name
        column = column if isinstance(column, str) else " ".join(column)
        say(f"warning: rows without a column '{column}': {missing} (they have {names})")
    if report.num_padding > WORTH_A_WARNING * report.num_row_ids:
        problem = f"{report.num_padding:,} of {report.num_row_ids:,} token ids are runs of one id at the ends of rows"
        say(f"warning: {problem}, as padding is; mark it by 0 in a column attention_mask, or remove it")
    if source.document_separator is not None and not report.num_separators:
        say(f"warning: --document_separator {source.document_separator!r} has no effect: no text file contains it")


def print_unknown(tokenizer: TextTokenizer, splits: dict[str, dict]) -> None:
    """Say how much of the text the tokenizer cannot spell."""
    unknown, tokens = (sum(splits[split][key] for split in SPLITS) for key in ("unknown", "tokens"))
    if unknown and (index := tokenizer.unknown_id) is not None:
        token = tokenizer.backend_tokenizer.id_to_token(index)
        warning = "warning: " * (unknown > WORTH_A_WARNING * tokens)
        say(f"{warning}{unknown / tokens:.1%} of the tokens are {token}, text that the tokenizer cannot spell")
    if tokenizer.unknown_id is None and SPELLS_BYTES not in steps_of(tokenizer.backend_tokenizer):
        say("warning: this tokenizer has no token for unknown text, so characters that it does not know are lost")
    if (lost := max(splits[split]["lost_share"] for split in SPLITS)) > 0:
        is_lost = tokenizer.backend_tokenizer.normalizer is None
        how = "lacks or drops" if is_lost else "changes or drops"
        say(f"{'warning: ' * is_lost}{lost:.2%} of the text's bytes are not in its tokens: the tokenizer {how} them")
    if splits["validation"]["bytes"] is None:
        say("this tokenizer does not keep all bytes of the text, so there will be no bits per byte")


def sha256_of(hexdigests: Iterable[str]) -> str:
    return hashlib.sha256("".join(hexdigests).encode()).hexdigest()


# ------------------------------------------------------------------ the folder of a dataset


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
    os.rename(partial, directory / COMPLETE_NAME)  # only one process can, even where there are no locks
    finish_replacement(directory)
    for path in directory.glob(f".{HASH}.partial"):
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
