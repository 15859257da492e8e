"""From a text source to a packed dataset: the one path behind scripts/prepare_data.py and recipe/train.py."""

import argparse
import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from recipe.config import TrainConfig, UserError
from recipe.data.packed import PackedDataset, open_packed_dataset, write_packed_dataset
from recipe.data.text import TextSource
from recipe.data.tokenizer import encode_documents, load_tokenizer, tokenizer_sha256, train_tokenizer

say = functools.partial(print, flush=True)


def prepare_dataset(
    source: TextSource,
    directory: Path,
    block_size: int,
    tokenizer: PreTrainedTokenizerBase | None,
    tokenizer_vocab_size: int | None = None,
    overwrite: bool = False,
) -> PackedDataset:
    """Prepare `directory`, or open it if the same input, tokenizer and options made it before.

    Without a tokenizer a byte-level BPE of tokenizer_vocab_size is trained on the training documents.
    Raises `UserError` for bad input, and if `directory` holds anything else; `overwrite` replaces another packed
    dataset, once the new one is complete, and nothing but that.
    """
    fingerprint = fingerprint_of(source, block_size, tokenizer, tokenizer_vocab_size)
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        made_from = _fingerprint_in(directory)
        if made_from == fingerprint:
            say(f"{directory} is already prepared from this input")
            return open_packed_dataset(directory, block_size)
        if made_from is None:
            raise UserError(f"{directory} exists and is not a packed dataset; name another folder")
        if not overwrite:
            raise UserError(
                f"{directory} was made from other input; pass --overwrite to replace it, or another folder"
            )
    if tokenizer is None:
        started_at = time.perf_counter()
        training_text = (text for split, text in source.splits() if split == "train")
        tokenizer = train_tokenizer(training_text, tokenizer_vocab_size)
        say(f"trained a byte-level BPE of {len(tokenizer):,} tokens in {time.perf_counter() - started_at:.1f} s")
    started_at = time.perf_counter()
    encoded = _report_progress(encode_documents(tokenizer, source.splits()))
    metadata = write_packed_dataset(directory, encoded, tokenizer, block_size, source.describe(), fingerprint)
    seconds = time.perf_counter() - started_at
    for split, counts in metadata["splits"].items():
        say(
            f"{split}: {counts['documents']:,} documents, {counts['bytes']:,} bytes, {counts['tokens']:,} tokens, "
            f"{counts['rows']:,} rows"
        )
    total_bytes = sum(counts["bytes"] for counts in metadata["splits"].values())
    say(f"packed into {directory} in {seconds:.1f} s ({total_bytes / 1e6 / seconds:.1f} MB/s)")
    return open_packed_dataset(directory, block_size)


def fingerprint_of(
    source: TextSource, block_size: int, tokenizer: PreTrainedTokenizerBase | None, tokenizer_vocab_size: int | None
) -> str:
    """SHA-256 of all that decides a packed dataset: text, tokenizer (or the size of the one to train), row length."""
    identity = tokenizer_sha256(tokenizer) if tokenizer else f"bpe {tokenizer_vocab_size}"
    return hashlib.sha256(f"{source.fingerprint} {identity} {block_size}".encode()).hexdigest()


SOURCE_FIELDS = (
    "train_file",
    "validation_file",
    "dataset_name",
    "dataset_config_name",
    "text_column_name",
    "validation_split_percentage",
)


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a script the source options of recipe/train.py, under the same names and with the same defaults."""
    for field in dataclasses.fields(TrainConfig):
        if field.name in SOURCE_FIELDS:
            kwargs = {"nargs": "+"} if field.name.endswith("_file") else {}
            kwargs["type"] = float if isinstance(field.default, float) else str
            parser.add_argument(f"--{field.name}", default=field.default, help=field.metadata["help"], **kwargs)


def source_from(config: TrainConfig | argparse.Namespace) -> TextSource:
    """The text source that a run's fields, or a script's arguments, name. Raises `UserError` if it is not there."""
    return TextSource(
        train_files=tuple(config.train_file or ()),
        validation_files=tuple(config.validation_file or ()),
        dataset_name=config.dataset_name,
        dataset_config_name=config.dataset_config_name,
        text_column_name=config.text_column_name,
        validation_split_percentage=config.validation_split_percentage,
    )


def open_dataset_for(config: TrainConfig) -> PackedDataset:
    """The run's dataset: `dataset_dir` as it is, or the text prepared in `cache_dir`, once for all runs.

    Raises `UserError` if `tokenizer_name` is given and is not the one the dataset was made with.
    """
    if config.dataset_dir is not None:
        dataset = open_packed_dataset(Path(config.dataset_dir), config.block_size)
        if config.tokenizer_name is not None:
            asked_for = tokenizer_sha256(load_tokenizer(config.tokenizer_name))
            if asked_for != dataset.metadata["tokenizer_sha256"]:
                raise UserError(
                    f"{config.dataset_dir} was made with another tokenizer than {config.tokenizer_name}; "
                    "prepare it with that one, or leave --tokenizer_name out"
                )
        return dataset
    source = source_from(config)
    tokenizer = load_tokenizer(config.tokenizer_name) if config.tokenizer_name else None
    fingerprint = fingerprint_of(source, config.block_size, tokenizer, config.tokenizer_vocab_size)
    name = Path(config.dataset_name or config.train_file[0]).stem
    directory = Path(config.cache_dir) / f"{name}-{fingerprint[:12]}"
    return prepare_dataset(source, directory, config.block_size, tokenizer, config.tokenizer_vocab_size)


def _fingerprint_in(directory: Path) -> str | None:
    """What a packed dataset was made from, or None if the folder holds none."""
    try:
        return str(json.loads((directory / "metadata.json").read_text())["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _report_progress(encoded: Iterator, every_seconds: float = 10) -> Iterator:
    started_at = said_at = time.perf_counter()
    num_documents = num_bytes = num_tokens = 0
    for split, document_bytes, ids in encoded:
        num_documents, num_bytes, num_tokens = num_documents + 1, num_bytes + document_bytes, num_tokens + len(ids)
        now = time.perf_counter()
        if now - said_at >= every_seconds:
            said_at = now
            megabytes_per_second = num_bytes / 1e6 / (now - started_at)
            say(f"  {num_documents:,} documents, {num_tokens:,} tokens, {megabytes_per_second:.1f} MB/s")
        yield split, document_bytes, ids
