"""Prepare a packed dataset from a text source.

Processes tokenize units into a hidden folder inside the dataset's folder. When all units are done, the files move up,
metadata.json last. Finished units are never repeated: a kill loses one unit per process, and the jobs of an array
write to the same folder. Token files of other programs are read once and used in place.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from recipe.arguments import shell_command
from recipe.config import SPLITS
from recipe.data.cut import TRAIN, Unit
from recipe.data.encode import SAMPLE_CHARACTERS, choose_encoder
from recipe.data.files import describe_files, kind_of, name_splits
from recipe.data.pack import Encoding, Job, UnitTokenizer, UnitWorkers
from recipe.data.packed import COUNTS, FORMAT_VERSION, add_known, check_splits, read_metadata
from recipe.data.read import (
    REPLACED,
    SEPARATORS,
    SHOWN_ERRORS,
    SMALL_SHARE,
    Report,
    list_units,
    read_sample,
    read_train_texts,
)
from recipe.data.source import TextSource
from recipe.data.tokenizer import (
    added_ids,
    count_ids,
    end_of_text,
    load_tokenizer,
    save_tokenizer,
    spells_bytes,
    tokenizer_sha256,
    train_tokenizer,
    unknown_id,
)
from recipe.disk import lock
from recipe.environment import count_cpus
from recipe.errors import UserError, plural
from recipe.progress import progress_target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TRAINED_PREFIX = "bpe "  # in the inputs, the prefix of a tokenizer that is trained on the text
LOCK_NAME = ".lock"
COMPLETE_NAME = ".complete"
METADATA_NAME = "metadata.json"
PARTS = re.compile(rf"({'|'.join(SPLITS)})-\d+\.bin|tokenizer|{re.escape(METADATA_NAME)}")  # of a packed dataset
WORTH_A_WARNING = 0.01  # share of unknown tokens, or of characters that are none
LARGE_VALIDATION = 3  # times the percentage that is held out
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
    tokenizer: "PreTrainedTokenizerFast | None",
    tokenizer_vocab_size: int | None = None,
    overwrite: bool = False,
    num_workers: int | None = None,
    share: slice = slice(None),
    num_units: int | None = None,
) -> dict[str, Any] | None:
    """Prepare `directory`, unless it was prepared from the same inputs. Returns its metadata.

    tokenizer: what its template puts in front of a text begins each document. Without a tokenizer, trains a byte-level
    BPE of up to tokenizer_vocab_size tokens. share: the units to prepare here; the result is None while others are
    missing. num_units: prepare only so many units of the training text, spread over the source. overwrite: replace
    another packed dataset. Raises `UserError` for bad input, and if `directory` holds anything else.
    """
    source = source.for_tokenizer(tokenizer)
    inputs = inputs_of(source, tokenizer, tokenizer_vocab_size, num_units)
    target = Target(source, directory, inputs, overwrite)
    if (existing := _find_existing(target)) is not None:
        return existing
    units = []
    failure = None
    try:
        # If the dataset is complete there, a process was killed before it had moved the files.
        if not is_made_from(directory / COMPLETE_NAME, inputs, source):
            tokenizer, units = claim_dataset(target, tokenizer, tokenizer_vocab_size, num_units)
            try:
                tokenize(target, tokenizer, units, share, num_workers or count_cpus())
            except UserError as error:  # meanwhile, another process may have completed the dataset
                failure = error
        return finish(target, tokenizer, len(units), failure)
    except OSError as error:
        raise UserError(f"cannot prepare the dataset {directory}: {error.strerror or error}") from error


def inputs_of(
    source: TextSource,
    tokenizer: "PreTrainedTokenizerFast | None",
    tokenizer_vocab_size: int | None,
    num_units: int | None,
) -> dict[str, Any]:
    """Return all that determines a prepared dataset."""
    made_with = tokenizer_sha256(tokenizer) if tokenizer else f"{TRAINED_PREFIX}{tokenizer_vocab_size}"
    inputs = {"format_version": FORMAT_VERSION, "tokenizer": made_with, "num_units": num_units, **source.inputs}
    prefix = added_ids(tokenizer)[0] if tokenizer else []
    if prefix:
        inputs["document_prefix"] = prefix
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
    directory = target.directory
    inputs = target.inputs
    if not (directory / METADATA_NAME).is_file():
        others = [path for path in directory.glob("[!.]*") if path.name != "lost+found"]  # which file systems create
        if directory.is_file() or (others and not (directory / COMPLETE_NAME).exists()):
            raise UserError(f"{directory} exists and is not a packed dataset; choose another folder")
        return None
    if is_made_from(directory, inputs, target.source):
        with contextlib.suppress(UserError) if target.overwrite else contextlib.nullcontext():  # it may be damaged
            metadata = read_metadata(directory)
            unknown = ""
            if inputs["content"] is None:
                unknown = " (the Hub does not say whether its files have changed)"
            say(f"{directory} is already prepared{unknown}")
            return metadata
    elif not target.overwrite:
        different = "was prepared from different text or options, or with a different tokenizer"
        raise UserError(f"{directory} {different}; pass --overwrite to replace it or choose another folder")
    return None


# ------------------------------------------------------------------ claim: say what is read, keep the tokenizer


def claim_dataset(
    target: Target,
    tokenizer: "PreTrainedTokenizerFast | None",
    tokenizer_vocab_size: int | None,
    num_units: int | None,
) -> tuple["PreTrainedTokenizerFast", list[Unit]]:
    """Print what is read, and create the preparation's folder with the tokenizer. Returns tokenizer and units."""
    source = target.source
    for files in (source.files, source.held_out_files):
        if text := describe_files(files):
            say(text)
    if warning := name_splits(source.files.paths):
        say(warning)
    if source.commit:
        say(f"{source.dataset_name} at commit {source.commit}")
    if source.splits_lines:
        say("warning: each line of the dataset's .txt files is a document; --train_file reads whole files")
    units = [] if source.is_tokenized else list_units(source)
    if units and all(part.hold_out == TRAIN for unit in units for part in unit.parts):
        read_sample(source, units)  # raises if there is no text
        remedy = "pass a --validation_file, or a --document_separator that occurs in the text"
        raise UserError(f"{source.name} has no two different documents, one of them for validation; {remedy}")
    units = select_units(units, num_units)
    return keep_tokenizer(target.partial, source, units, tokenizer, tokenizer_vocab_size), units


def select_units(units: list[Unit], count: int | None) -> list[Unit]:
    """Return all units, or the separate validation text and so many of the others, evenly spread."""
    separate = [unit for unit in units if unit.is_validation]
    others = [unit for unit in units if not unit.is_validation]
    count = min(len(others), count or len(others))
    return separate + [others[(i + 1) * len(others) // count - 1] for i in range(count)]


def keep_tokenizer(
    partial: Path,
    source: TextSource,
    units: list[Unit],
    tokenizer: "PreTrainedTokenizerFast | None",
    tokenizer_vocab_size: int | None,
) -> "PreTrainedTokenizerFast":
    """Save the tokenizer beside the units, and train it first if there is none. Returns it."""
    started_at = time.perf_counter()
    folder = partial / "tokenizer"
    if folder.is_dir():
        return tokenizer or load_tokenizer(str(folder))
    partial.mkdir(parents=True, exist_ok=True)
    if tokenizer is None:
        assert tokenizer_vocab_size is not None  # `prepare_dataset` gets one or the other
        say("training a tokenizer")
        tokenizer = train_tokenizer(read_train_texts(source, units), tokenizer_vocab_size)
        size = f"{count_ids(tokenizer):,} of up to {tokenizer_vocab_size:,} tokens"
        say(f"trained a byte-level BPE of {size} in {time.perf_counter() - started_at:.1f} s")
    scratch = partial / f".tokenizer-{secrets.token_hex(4)}"
    save_tokenizer(tokenizer, scratch)
    try:
        os.rename(scratch, folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(scratch)  # another job of the array was faster
    return tokenizer


# ------------------------------------------------------------------ tokenize: units into files


def tokenize(
    target: Target, tokenizer: "PreTrainedTokenizerFast", units: list[Unit], share: slice, num_workers: int
) -> None:
    """Tokenize the units of a share that are missing, in this process if it is only one."""
    source = target.source
    encoding = Encoding.of(tokenizer)
    missing = set(missing_units(target, len(units)))
    numbers = [number for number in range(len(units))[share] if number in missing]
    if len(missing) < len(units):
        say(f"{len(units) - len(missing):,} of {len(units):,} units are done")
    if not numbers:
        return
    job = Job(source, str(target.partial), encoding)
    num_workers = min(num_workers, len(numbers))
    workers = UnitWorkers(job, num_workers) if len(numbers) > 1 else None  # they start during the check below
    with contextlib.closing(workers) if workers else contextlib.nullcontext():
        sample = read_sample(source, units)
        texts = [text for text in sample if isinstance(text, str)]
        ids = [row for row in sample if not isinstance(row, str)]
        name = "tokenizers"
        encode = None
        if texts:
            for line in look_for_special_tokens(encoding, source, texts):
                say(line)
            name, encode, how = choose_encoder(encoding.tokenizer_json, texts, source.parse_special_tokens)
            say(f"token ids: {how}")
        elif ids:
            for line in look_at_ids(encoding, np.concatenate(ids[:100])):
                say(line)
        say(f"units: {len(numbers):,}, processes: {num_workers}")
        if workers is None:
            UnitTokenizer(job, {name: encode} if encode else {})(numbers[0], units[numbers[0]], name)
            return
        num_bytes = sum(units[number].num_bytes for number in numbers) or None
        options = {"unit": "B", "unit_scale": True, "dynamic_ncols": True, **progress_target()}
        with tqdm(desc="prepare", total=num_bytes, **options) as progress:
            submitted = {workers.submit(number, units[number], name): units[number] for number in numbers}
            for future in as_completed(submitted):
                splits = future.result()["splits"].values()
                progress.update(submitted[future].num_bytes or sum(split["bytes"] or 0 for split in splits))


def missing_units(target: Target, num_units: int) -> Iterator[int]:
    """Yield the numbers of the units that are not finished, or whose files a power cut has shortened."""
    for number in range(num_units):
        try:
            summary = read_summary(target, number)
            id_bytes = np.dtype(summary["type"]).itemsize
            splits = summary["splits"]
            sizes = {split: (target.partial / f"{split}-{number:05d}.bin").stat().st_size for split in splits}
            is_done = all(sizes[split] == id_bytes * counts["tokens"] for split, counts in splits.items())
        except (OSError, ValueError):
            is_done = False
        if not is_done:
            yield number


def read_summary(target: Target, number: int) -> dict[str, Any]:
    return json.loads((target.partial / "units" / f"{number:05d}.json").read_text())


def look_for_special_tokens(encoding: Encoding, source: TextSource, sample: Sequence[str]) -> Iterator[str]:
    """Yield a line for each kind of special token that the text spells: ends of documents, and others."""
    text = "\n".join(sample)[:SAMPLE_CHARACTERS]
    place = f"in the first {len(text):,} characters"
    counts = {token: text.count(token) for token in sorted(encoding.special.values())}
    counts = {token: count for token, count in counts.items() if count > 0}
    end = encoding.special[encoding.end]
    num_ends = 0 if source.parse_special_tokens else counts.pop(end, 0)
    if num_ends > 0:
        option = shell_command(document_separator=end)
        if source.document_separator or not any(kind_of(path) in (".txt", ".md") for path in source.files.paths):
            option = "--parse_special_tokens"  # rows have no separator
        found = f"{end} ({num_ends:,} times {place})"
        yield f"warning: the text contains {found}, packed as characters; if it ends documents, pass {option}"
    if counts:
        listed = ", ".join(f"{token} ({count:,})" for token, count in Counter(counts).most_common(5))
        what = "packed as characters; --parse_special_tokens makes ids of them"
        if source.parse_special_tokens:
            what = "made ids"
        yield f"special tokens {place}: {listed}, {what}"


# ------------------------------------------------------------------ finish: one dataset


def finish(
    target: Target, tokenizer: "PreTrainedTokenizerFast | None", num_units: int, failure: UserError | None
) -> dict[str, Any] | None:
    """Complete the dataset if all its units are done. Returns its metadata, or None.

    failure: raised unless another process has completed the dataset.
    """
    directory = target.directory
    partial = target.partial
    with locked(directory):
        finish_replacement(directory)
        if (existing := _find_existing(target)) is not None:
            # Another process was faster. It may have moved the files before this one wrote its own.
            shutil.rmtree(partial, ignore_errors=True)
            return existing
        if failure:
            raise failure
        num_missing = len(list(missing_units(target, num_units)))
        if num_missing > 0:
            say(f"{num_missing:,} of {num_units:,} units are not done yet")
            return None
        assert tokenizer is not None  # without one, the dataset was complete
        metadata = summarize(target, tokenizer, num_units)
        os.rename(partial, directory / COMPLETE_NAME)  # only one process can, even where there are no locks
        finish_replacement(directory)
        others = [path.name for path in directory.glob(".*.partial")]
        if others:
            say(f"{directory} also holds unfinished preparations, of other text or options: {', '.join(others)}")
    shown = ("documents", "tokens", "bytes")
    documents, tokens, num_bytes = (sum(split[key] or 0 for split in metadata["splits"].values()) for key in shown)
    seconds = time.perf_counter() - target.started_at
    say(f"packed into {directory} in {seconds:.1f} s ({num_bytes / 1e6 / seconds:.1f} MB/s):")
    say(f"  {plural(documents, 'document')}, {tokens:,} tokens")
    return read_metadata(directory)


def summarize(target: Target, tokenizer: "PreTrainedTokenizerFast", num_units: int) -> dict[str, Any]:
    """Write the metadata of finished units, or of token files in place. Returns the metadata.

    Raises `UserError` if a split is empty.
    """
    source = target.source
    report = Report()
    made_with = target.inputs["tokenizer"]  # its hash, if it was not trained here; computing it again takes 0.2 s
    parts = read_token_parts(source, tokenizer) if source.is_tokenized else list_parts(target, num_units, report)
    splits = {}
    for split in SPLITS:
        own = [part for part in parts if part["split"] == split]
        splits[split] = {key: add_known(part[key] for part in own) for key in (*COUNTS, "unknown")}
        splits[split]["content_sha256"] = sha256_of(part["content_sha256"] for part in own)
        splits[split]["stretches"] = [[part["name"], part["start"], part["tokens"]] for part in own if part["tokens"]]
    metadata = {
        "format_version": FORMAT_VERSION,
        "vocab_size": count_ids(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "tokenizer_sha256": tokenizer_sha256(tokenizer) if made_with.startswith(TRAINED_PREFIX) else made_with,
        "content_sha256": sha256_of(splits[split]["content_sha256"] for split in SPLITS),
        "fingerprint": fingerprint_of(target.inputs),
        "inputs": target.inputs,
        "source": source.describe(),
        "report": report,
        "splits": splits,
        "files": {part["name"]: part["file"] for part in parts},
    }
    check_splits(metadata, 1)
    print_report(source, report, sum(split["bytes"] or 0 for split in splits.values()))
    print_counts(source, tokenizer, splits)
    (target.partial / METADATA_NAME).write_text(json.dumps(metadata, indent=2) + "\n")
    return metadata


def list_parts(target: Target, num_units: int, report: Report) -> list[dict[str, Any]]:
    """Return what each file of finished units holds, and complete the report."""
    parts = []
    for number in range(num_units):
        summary = read_summary(target, number)
        report.update(summary["report"])
        for split, counts in summary["splits"].items():
            file = {"type": summary["type"], "bytes": np.dtype(summary["type"]).itemsize * counts["tokens"]}
            parts.append({"split": split, "name": f"{split}-{number:05d}.bin", "start": 0, "file": file, **counts})
    return parts


def read_token_parts(source: TextSource, tokenizer: "PreTrainedTokenizerFast") -> list[dict[str, Any]]:
    """Return what the parts of token files hold.

    Raises `UserError` if the tokenizer does not have an id, or if a training file is a copy of a validation file.
    """
    encoding = Encoding.of(tokenizer)
    parts = []
    paths = [*source.files.paths, *source.held_out_files.paths]
    with ThreadPoolExecutor() as threads:  # for files whose hash was cached; hashing has counted the others
        list(threads.map(source.count_ids, [path for path in paths if path not in source.token_files]))
    held_out = {source.token_files[path]["digest"]: path for path in source.held_out_files.paths}
    for path in paths:
        file = source.token_files[path]
        start = file["start"]
        counts = file["counts"]
        is_train = path in source.files.paths
        if counts[:, -1].any():
            problem = f"contains token ids beyond the tokenizer's {encoding.vocab_size:,} tokens"
            raise UserError(f"{path} {problem}; pass the tokenizer that made it, or little-endian ids")
        if is_train and file["digest"] in held_out:
            raise UserError(f"{path} is a copy of {held_out[file['digest']]}, the validation file")
        described = {key: value for key, value in file.items() if key not in ("start", "counts")}
        splits = SPLITS if is_train else ("validation", "validation")
        for split, own in zip(splits, counts[:, :-1], strict=True):
            held = encoding.describe(own)
            content = sha256_of([f"{file['digest']} {start} {held['tokens']}"])
            place = {"split": split, "name": os.path.abspath(path), "start": start, "file": described}
            parts.append({**place, **held, "content_sha256": content})
            start += (held["tokens"] or 0) * np.dtype(file["type"]).itemsize
    first = source.token_files[paths[0]]
    for line in look_at_ids(encoding, np.fromfile(paths[0], first["type"], 1000, offset=first["start"])):
        say(line)
    say("the token files are used in place, so they must stay where they are")
    return parts


def look_at_ids(encoding: Encoding, ids: np.ndarray) -> Iterator[str]:
    """Yield a warning if ids that others have made are not text."""
    ids = ids[(ids >= 0) & (ids < encoding.vocab_size)]  # others are refused
    text = Tokenizer.from_str(encoding.tokenizer_json).decode(ids.tolist(), skip_special_tokens=False)
    if text.count("\ufffd") > WORTH_A_WARNING * len(text):
        problem = "the first token ids do not stand for UTF-8 text"
        yield f"warning: {problem}; is this their tokenizer, and their byte order little-endian?"


def print_report(source: TextSource, report: Report, num_bytes: int) -> None:
    """Print what reading so many bytes revealed."""
    skipped = [finding for finding in report if finding.startswith("skipped: ")]
    for finding, count in report.items():
        if finding not in {SEPARATORS, *skipped[SHOWN_ERRORS:]}:
            say(finding if finding in skipped else f"{finding}: {count:,}")
    if report[REPLACED] > SMALL_SHARE * num_bytes:
        say("warning: so many are another encoding; convert the files, from Latin-1 for example with iconv -f LATIN1")
    if source.document_separator is not None and not report[SEPARATORS]:
        say(f"warning: --document_separator {source.document_separator!r} has no effect: no text file contains it")


def print_counts(source: TextSource, tokenizer: "PreTrainedTokenizerFast", splits: dict[str, dict]) -> None:
    """Say what is odd about the ids: unknown text, no ends of documents, much text for validation."""
    unknown = sum(splits[split]["unknown"] for split in SPLITS)
    tokens = sum(splits[split]["tokens"] for split in SPLITS)
    index = unknown_id(tokenizer)
    if unknown and index is not None:
        token = tokenizer.backend_tokenizer.id_to_token(index)
        warning = "warning: " if unknown > WORTH_A_WARNING * tokens else ""
        say(f"{warning}{unknown / tokens:.1%} of the tokens are {token}, text that the tokenizer cannot spell")
    if index is None and not spells_bytes(tokenizer.backend_tokenizer):
        say("warning: this tokenizer has no token for unknown text, so characters that it does not know are lost")
    if splits["validation"]["bytes"] is None:
        say("these token ids do not say how long their text was, so there will be no bits per byte")
    if not splits["train"]["documents"]:
        end = f"{tokenizer.eos_token} ({end_of_text(tokenizer)})"
        say(f"warning: the token ids contain no end of text, {end}; is this their tokenizer?")
    held_out = source.validation_split_percentage
    share = 100 * splits["validation"]["tokens"] / tokens
    if not source.has_validation and share > LARGE_VALIDATION * held_out:
        problem = f"{share:.0f}% of the tokens are held out for validation, not {held_out:g}%"
        say(f"warning: {problem}, because a document is never cut; pass a --validation_file of your choice")


def sha256_of(texts: Iterable[str]) -> str:
    return hashlib.sha256("".join(texts).encode()).hexdigest()


# ------------------------------------------------------------------ the folder of a dataset


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Let one process at a time change the dataset in a folder."""
    held = lock(directory / LOCK_NAME)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # Windows keeps it
            (directory / LOCK_NAME).unlink()  # whoever waits for it notices, and locks another
        if held is not None:
            held.release()


def finish_replacement(directory: Path) -> None:
    """Move the files of a complete dataset up, if there is one. The older one loses its metadata.json first."""
    complete = directory / COMPLETE_NAME
    if (complete / METADATA_NAME).exists():
        (directory / METADATA_NAME).unlink(missing_ok=True)
        files = json.loads((complete / METADATA_NAME).read_text())["files"]
        new = {"tokenizer", *(name for name, file in files.items() if "digest" not in file)}  # those are not moved
        for path in directory.iterdir():  # a process that was killed may have moved some of the new ones
            if PARTS.fullmatch(path.name) and (path.name not in new or (complete / path.name).exists()):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name in [*new, METADATA_NAME]:
            if (complete / name).exists():
                os.rename(complete / name, directory / name)
    shutil.rmtree(complete, ignore_errors=True)
