"""Prepare a packed dataset from a text source, for scripts/prepare_data.py and recipe/train.py.

Units are tokenized in parallel into a hidden folder beside the dataset, which takes the dataset's name when all are
done. What is finished is never repeated: a killed preparation loses one unit per process, and the jobs of an array
write to the same folder.
"""

import argparse
import contextlib
import dataclasses
import functools
import glob
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import as_completed
from pathlib import Path

import numpy as np
from tqdm import tqdm

from recipe.config import TEXT_OPTIONS, TrainConfig
from recipe.data.encode import SAMPLE_CHARACTERS, choose_encoder
from recipe.data.packed import FORMAT_VERSION, PackedDataset, dataset_info, open_packed_dataset
from recipe.data.read import SPLITS, ReadReport, Text, read_unit
from recipe.data.source import TextSource, Unit, describe_files, name_of_text
from recipe.data.tokenizer import (
    TextTokenizer,
    describe_vocabulary,
    read_tokenizer,
    save_tokenizer,
    tokenizer_sha256,
    train_tokenizer,
)
from recipe.data.units import COUNTS, Job, UnitTokenizer, UnitWorkers
from recipe.environment import count_cpus
from recipe.errors import UserError
from recipe.progress import progress_target

TOKENIZER_CHARACTERS = 2_000_000_000  # the most that a tokenizer is trained on
HEAD_BYTES = 50_000_000  # prepared before streaming, for the tokenizer and the validation rows

say = functools.partial(print, flush=True)


def prepare_dataset(
    source: TextSource,
    directory: Path,
    block_size: int,
    tokenizer: TextTokenizer | None,
    tokenizer_vocab_size: int | None = None,
    overwrite: bool = False,
    num_workers: int | None = None,
    share: slice = slice(None),
    max_bytes: int | None = None,
) -> PackedDataset | None:
    """Prepare `directory`, or open it if it was prepared from the same input, tokenizer and options.

    Without a tokenizer, trains a byte-level BPE of up to tokenizer_vocab_size tokens. share: the units to prepare
    here; the result is None while others are missing. max_bytes: prepare about this much text, from units spread over
    the source. Raises `UserError` for bad input, and if `directory` holds anything else; `overwrite` replaces another
    packed dataset, and nothing else.
    """
    options = options_id(source, block_size, tokenizer, tokenizer_vocab_size, max_bytes)
    identity = {"options_sha256": options, "fingerprint": sha256_of([options, source.content_id or ""])}
    if (existing := _open_existing(source, directory, identity, overwrite)) is not None:
        return existing
    started_at = time.perf_counter()
    for files in (source.files, source.held_out_files):
        if text := describe_files(files):
            say(text)
    units = select_units(source.units(), max_bytes)
    partial = directory.with_name(f".{directory.name}-{identity['fingerprint'][:12]}.partial")
    try:
        tokenizer = save_once(partial, source, units, tokenizer, tokenizer_vocab_size, block_size)
    except OSError as error:
        raise UserError(f"cannot write the dataset {directory}: {error.strerror or error}") from error
    missing = list(missing_units(partial, units))
    mine = [number for number in range(len(units))[share] if number in missing]
    if len(missing) < len(units):
        say(f"{len(units) - len(missing):,} of {len(units):,} units are done")
    job = Job(source, str(partial), str(partial / "tokenizer"), block_size)
    failure = None
    try:
        if mine:
            tokenize_units(job, tokenizer, units, mine, num_workers or count_cpus())
    except UserError as error:
        failure = error
    if mine and (existing := _open_existing(source, directory, identity, overwrite)) is not None:
        # Another process has prepared the same dataset, and may have renamed the folder before this one wrote to it.
        shutil.rmtree(partial, ignore_errors=True)
        return existing
    if failure:
        raise failure
    if (left := len(list(missing_units(partial, units)))) and partial.is_dir():
        say(f"{left:,} of {len(units):,} units are not done yet")
        return None
    metadata = finish(job, tokenizer, directory, len(units), identity, overwrite)
    seconds = time.perf_counter() - started_at
    documents, tokens, num_bytes = (sum(of[key] for of in metadata["splits"].values()) for key in COUNTS[:3])
    rate = f" ({num_bytes / 1e6 / seconds:.1f} MB/s)" if len(mine) == len(units) else ""
    say(f"packed into {directory} in {seconds:.1f} s{rate}: {documents:,} documents, {tokens:,} tokens")
    return open_packed_dataset(directory, block_size)


def _open_existing(
    source: TextSource, directory: Path, identity: dict[str, str], overwrite: bool
) -> PackedDataset | None:
    """Return a dataset that is already prepared. Raises `UserError` for other content that must not be replaced."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return None
    try:
        metadata = json.loads((directory / "metadata.json").read_text())
        made_from = {key: metadata[key] for key in identity}
    except (OSError, ValueError, KeyError, TypeError):
        if not (directory / "metadata.json").is_file():
            raise UserError(f"{directory} exists and is not a packed dataset; choose another folder") from None
        made_from = {}
    is_same = made_from == identity
    if source.content_id is None and made_from.get("options_sha256") == identity["options_sha256"]:
        say(f"the Hub does not say whether its files have changed; using {directory}")
        is_same = True
    if is_same:
        with contextlib.suppress(UserError) if overwrite else contextlib.nullcontext():  # it may be damaged
            opened = open_packed_dataset(directory)
            say(f"{directory} is already prepared from this input")
            return opened
    elif not overwrite:
        different = "was prepared from different text or options, or with a different tokenizer"
        raise UserError(f"{directory} {different}; pass --overwrite to replace it or choose another folder")
    return None


def options_id(
    source: TextSource,
    block_size: int,
    tokenizer: TextTokenizer | None,
    tokenizer_vocab_size: int | None,
    max_bytes: int | None,
) -> str:
    """Hash what determines a packed dataset except the content of the source."""
    made_with = tokenizer_sha256(tokenizer) if tokenizer else f"bpe {tokenizer_vocab_size}"
    return sha256_of([f"{FORMAT_VERSION} {block_size} {max_bytes}", source.options_sha256, made_with])


# ------------------------------------------------------------------ the steps of a preparation


def select_units(units: list[Unit], max_bytes: int | None) -> list[Unit]:
    """Return all units; with max_bytes, some of each split, spread evenly, with about that much text."""
    if max_bytes is None:
        return units
    separate = [unit for unit in units if unit.parts[0].split == "validation"]
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
    block_size: int,
) -> TextTokenizer:
    """Save the tokenizer beside the units, and train it first if there is none. Returns it."""
    folder, started_at = partial / "tokenizer", time.perf_counter()
    if folder.is_dir():
        return tokenizer or read_tokenizer(str(folder))
    partial.mkdir(parents=True, exist_ok=True)
    if trained := tokenizer is None:
        tokenizer = train_tokenizer(read_train_texts(source, units), tokenizer_vocab_size)
        size = describe_vocabulary(tokenizer, tokenizer_vocab_size)
        say(f"trained a byte-level BPE of {size} in {time.perf_counter() - started_at:.1f} s")
    scratch = Path(tempfile.mkdtemp(prefix=".tokenizer-", dir=partial))
    save_tokenizer(tokenizer, scratch, block_size)
    scratch.chmod(partial.stat().st_mode)
    try:
        os.rename(scratch, folder)
    except OSError:  # another job of the array was faster
        shutil.rmtree(scratch)
    return read_tokenizer(str(folder)) if trained else tokenizer


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


def read_train_texts(source: TextSource, units: list[Unit]) -> Iterator[str]:
    """Yield the training text, to train a tokenizer; of a large source, the beginning of each unit."""
    read_sample(source, units)  # raises if there is no text
    limit = TOKENIZER_CHARACTERS // len(units)
    for unit in units:
        characters = 0
        for document in read_unit(source, unit, ReadReport()):
            if not isinstance(document.text, str):
                name = source.text_column_name
                raise UserError(f"column '{name}' is already tokenized; pass its --tokenizer_name")
            if document.split == "train":
                yield document.text[: limit - characters]
            characters += len(document.text)
            if characters >= limit:
                break


def read_sample(source: TextSource, units: list[Unit]) -> list[str]:
    """Return the first documents, to check the encoder. Raises `UserError` if the first units hold no text."""
    texts: list[Text] = []
    report = ReadReport()
    for unit in units if len(units) < 4 else units[:: len(units) // 4]:
        characters = 0
        for document in read_unit(source, unit, report):
            texts.append(document.text)
            characters += len(document.text)
            if characters >= SAMPLE_CHARACTERS:
                break
        if texts:
            return [text for text in texts if isinstance(text, str)]
    where = source.dataset_name or ", ".join(source.train_files[:3])
    reason = "it is empty or contains only whitespace"
    if report.skipped:
        reason = f"files that cannot be read: {len(report.skipped):,}; the first: {report.skipped[0]}"
    if report.columns:
        reason = f"it has no column '{source.text_column_name}'; pass --text_column_name with one of "
        reason += ", ".join(report.columns)
    raise UserError(f"there is no text in {where}: {reason}")


def tokenize_units(
    job: Job, tokenizer: TextTokenizer, units: list[Unit], numbers: list[int], num_workers: int
) -> None:
    """Tokenize the units with these numbers, in this process if it is only one."""
    num_workers = min(num_workers, len(numbers))
    workers = UnitWorkers(job, num_workers) if len(numbers) > 1 else None  # they start during the check below
    with contextlib.closing(workers) if workers else contextlib.nullcontext():
        encoder, how = choose_encoder(tokenizer, read_sample(job.source, units))
        say(f"token ids: {how}; units: {len(numbers):,}, processes: {num_workers}")
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


def finish(
    job: Job, tokenizer: TextTokenizer, directory: Path, num_units: int, identity: dict[str, str], overwrite: bool
) -> dict:
    """Write the metadata of finished units and give the dataset its name. Returns the metadata.

    Another process may do the same at the same time: the result is equal, and the first one wins. Raises `UserError`
    if a split does not fill a row.
    """
    partial, source = Path(job.folder), job.source.describe()
    try:
        summaries = [json.loads((partial / "units" / f"{k:05d}.json").read_text()) for k in range(num_units)]
        report = ReadReport()
        for summary in summaries:
            report.add(ReadReport(**summary["report"]))
        splits = {split: add_up([summary["splits"][split] for summary in summaries]) for split in SPLITS}
        print_report(job.source, report)
        try:
            check_counts(splits, job.block_size, source["validation_split_percentage"])
        except UserError:
            shutil.rmtree(partial)
            raise
        metadata = {
            "format_version": FORMAT_VERSION,
            "block_size": job.block_size,
            "vocab_size": len(tokenizer),
            "eos_token_id": tokenizer.eos_token_id,
            "tokenizer_sha256": tokenizer_sha256(tokenizer),
            "content_sha256": sha256_of(splits[split]["rows_sha256"] for split in SPLITS),
            **identity,
            "source": source
            | {"skipped_files": len(report.skipped), "blank_rows": report.num_blank}
            | {"rows_without_column": report.num_without_column},
            "splits": splits,
        }
        for split in SPLITS:
            write_index(partial / split, split, splits[split], job.block_size, len(tokenizer))
        (partial / "dataset_dict.json").write_text(json.dumps({"splits": list(SPLITS)}))
        for path in partial.glob(".tokenizer-*"):
            shutil.rmtree(path)
        written = partial / f".metadata-{os.getpid()}.json"
        written.write_text(json.dumps(metadata, indent=2) + "\n")
        os.replace(written, partial / "metadata.json")
        replaced = directory.with_name(f".{directory.name}.replaced")
        if directory.is_dir() and (overwrite or not any(directory.iterdir())):
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(directory, replaced)
        os.rename(partial, directory)
        shutil.rmtree(directory / "units")
        # What was interrupted with other options, and what was replaced.
        for path in (*directory.parent.glob(f".{glob.escape(directory.name)}-{'[0-9a-f]' * 12}.partial"), replaced):
            shutil.rmtree(path, ignore_errors=True)
    except FileNotFoundError:  # another process has renamed the folder
        return open_packed_dataset(directory).metadata
    except OSError as error:
        raise UserError(f"cannot write the dataset {directory}: {error.strerror or error}") from error
    return metadata


def add_up(units: list[dict]) -> dict:
    """Add up the counts of the units of a split; join their chunks, hashes and files."""
    seen = functools.reduce(np.bitwise_or, (np.frombuffer(bytes.fromhex(unit["seen"]), np.uint8) for unit in units))
    return {
        **{key: sum(unit[key] for unit in units) for key in COUNTS},
        "used_ids": int(np.unpackbits(seen).sum()),
        "rows_sha256": sha256_of(unit["rows_sha256"] for unit in units),
        "file_bytes": {name: size for unit in units for name, size in unit["file_bytes"].items()},
        "chunks": [chunk for unit in units for chunk in unit["chunks"]],
    }


def write_index(directory: Path, split: str, counts: dict, block_size: int, vocab_size: int) -> None:
    """Write the files by which `datasets` finds a split's rows, and remove what killed processes have left."""
    for path in directory.glob(".[0-9]*"):
        path.unlink(missing_ok=True)
    state: dict = {"_data_files": [{"filename": name} for name in counts["file_bytes"]], "_split": split}
    state |= {"_fingerprint": counts["rows_sha256"][:16], "_output_all_columns": False}
    state |= {"_format_columns": None, "_format_kwargs": {}, "_format_type": None}
    (directory / "state.json").write_text(json.dumps(state, indent=2))
    (directory / "dataset_info.json").write_text(json.dumps(dataset_info(block_size, vocab_size)))


def print_report(source: TextSource, report: ReadReport) -> None:
    """Say what was found in the text that is not in the dataset."""
    for reason in report.skipped[:10]:
        say(f"skipped: {reason}")
    if report.skipped:
        say(f"files with errors: {len(report.skipped):,}; the text before the first error in each is kept")
    if report.num_blank:
        say(f"rows without text (null, empty or blank): {report.num_blank:,}")
    if report.num_without_column:
        missing, names = f"{report.num_without_column:,}", ", ".join(report.columns)
        say(f"warning: rows without a column '{source.text_column_name}': {missing} (they have {names})")
    if source.document_separator is not None and not report.num_separators:
        say(f"warning: --document_separator {source.document_separator!r} has no effect: no text file contains it")


def sha256_of(hexdigests: Iterable[str]) -> str:
    return hashlib.sha256("".join(hexdigests).encode()).hexdigest()


def check_counts(counts: dict[str, dict], block_size: int, held_out: float | None) -> None:
    """Raise `UserError` if a split has no rows, naming the options that would provide some.

    held_out: validation_split_percentage, or None if the validation text is separate.
    """
    short = next((split for split in SPLITS if not counts[split]["rows"]), None)
    if short is None:
        return
    tokens, documents = counts[short]["tokens"], counts["train"]["documents"]
    found = f"the {short} text has {tokens:,} tokens, fewer than one row of block_size + 1 = {block_size + 1:,}"
    remedies = ["more text"]
    if tokens > 16:  # a model learns nothing from shorter rows
        remedies.append(f"--block_size {2 ** ((tokens - 1).bit_length() - 1)}")
    if held_out and short == "validation":
        found += f" ({held_out:g}% of {documents + counts[short]['documents']:,} documents are held out)"
        remedies += ["a larger --validation_split_percentage", "a --validation_file"]
        if documents == 1:
            remedies.append("a --document_separator that occurs in the text")
    raise UserError(f"{found}; pass {' or '.join(remedies)}")


def print_contents(dataset: PackedDataset) -> None:
    """Print what a dataset holds, and the beginning of three rows of train."""
    block_size, splits = dataset.block_size, dataset.metadata["splits"]
    rows = [("", *SPLITS)]
    for label, value in (
        ("documents", lambda of: f"{of['documents']:,}"),
        ("tokens", lambda of: f"{of['tokens']:,}"),
        ("bytes per token", lambda of: f"{of['bytes'] / max(1, of['tokens'] - of['documents']):.2f}"),
        (f"rows of {block_size:,} tokens", lambda of: f"{of['rows']:,}"),
        ("tokens that fill no row", lambda of: f"{1 - of['rows'] * block_size / max(1, of['tokens']):.2%}"),
        ("share of the vocabulary in use", lambda of: f"{of['used_ids'] / dataset.vocab_size:.1%}"),
    ):
        rows.append((label, *(value(splits[split]) for split in SPLITS)))
    for label, *columns in rows:
        say(f"{label:32}" + "".join(f"{column:>16}" for column in columns))
    decode = read_tokenizer(str(dataset.directory / "tokenizer")).backend_tokenizer.decode
    for index in sorted({number * len(dataset.train) // 3 for number in range(3)}):
        text = decode(dataset.train.read_row(index)[:80].tolist(), skip_special_tokens=False)
        say(f"row {index:,}: {text!r}"[:80])


# ------------------------------------------------------------------ the options


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the source options of recipe/train.py to a script, with the same names and defaults."""
    for field in dataclasses.fields(TrainConfig):
        if field.name in ("train_file", "dataset_name", *TEXT_OPTIONS):
            kind: dict = {"type": float if isinstance(field.default, float) else str}
            if isinstance(field.default, bool):
                kind = {"action": "store_true"}
            elif field.name.endswith("_file"):
                kind = {"nargs": "+"}
            help_text = field.metadata["help"].replace("%", "%%")
            parser.add_argument(f"--{field.name}", default=field.default, help=help_text, **kind)


def source_from(config: TrainConfig | argparse.Namespace) -> TextSource:
    """Build the text source of a run's config or a script's arguments. Raises `UserError` if it does not exist."""
    options = {name: getattr(config, name) for name in ("dataset_name", *TEXT_OPTIONS)}
    if not 0 < (percentage := options["validation_split_percentage"]) < 100:
        raise UserError(f"validation_split_percentage must be between 0 and 100, got {percentage}")
    if options["document_separator"]:  # a shell passes \n as two characters
        for escaped, character in (("\\n", "\n"), ("\\t", "\t"), ("\\r", "\r")):
            options["document_separator"] = options["document_separator"].replace(escaped, character)
    source = TextSource(tuple(config.train_file or ()), tuple(options.pop("validation_file") or ()), **options)
    _ = source.files, source.held_out_files  # raises if they do not exist
    return source


def open_dataset_for(config: TrainConfig, model: str | Path | None = None) -> PackedDataset:
    """Open the run's dataset: `dataset_dir`, or the text prepared once for all runs in `cache_dir`.

    model: the one that the run starts from, which may be a checkpoint of `model_name_or_path`; it holds the same
    tokenizer. Raises `UserError` if `tokenizer_name` is not the tokenizer that made the dataset.
    """
    if model is not None and config.tokenizer_name == config.model_name_or_path:
        config = dataclasses.replace(config, tokenizer_name=str(model))
    source = source_from(config) if config.dataset_dir is None else None
    tokenizer = read_tokenizer(config.tokenizer_name) if config.tokenizer_name else None
    if source is None:
        dataset = open_packed_dataset(Path(config.dataset_dir), config.block_size)
        if tokenizer is not None and tokenizer_sha256(tokenizer) != dataset.metadata["tokenizer_sha256"]:
            remedy = "prepare it with that tokenizer, or omit --tokenizer_name"
            if config.tokenizer_name == config.model_name_or_path:
                remedy = f"prepare it with --tokenizer_name {config.tokenizer_name}, the model's tokenizer"
            made = f"was made with another tokenizer than {config.tokenizer_name}"
            raise UserError(f"{config.dataset_dir} {made}; {remedy}")
        return dataset
    max_bytes = HEAD_BYTES if config.streaming else None
    options = options_id(source, config.block_size, tokenizer, config.tokenizer_vocab_size, max_bytes)
    name = f"{name_of_text(config.dataset_name or config.train_file[0])}-{options[:12]}"
    directory = Path(config.cache_dir) / f"{name}-{(source.content_id or 'unknown')[:8]}"
    if source.content_id is None:  # a dataset of the Hub, which is out of reach
        earlier = sorted(Path(config.cache_dir).glob(f"{name}-*/metadata.json"), key=os.path.getmtime)
        directory = earlier[-1].parent if earlier else directory
    if max_bytes:
        say("streaming: preparing only a part of the text, for validation")
    return prepare_dataset(
        source,
        directory,
        config.block_size,
        tokenizer,
        config.tokenizer_vocab_size,
        overwrite=True,  # the name says which content it is, so what cannot be opened is damaged
        num_workers=config.preprocessing_num_workers,
        max_bytes=max_bytes,
    )
