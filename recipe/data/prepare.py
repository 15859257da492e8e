"""Prepare a packed dataset from a text source, for scripts/prepare_data.py and recipe/train.py."""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from recipe.config import TEXT_OPTIONS, TrainConfig
from recipe.data.documents import Piece, hash64
from recipe.data.encoder import build_encoder, encode_pieces, join_pieces
from recipe.data.files import ReadReport, name_of_text
from recipe.data.packed import FORMAT_VERSION, PackedDataset, open_packed_dataset
from recipe.data.text import TextSource
from recipe.data.tokenizer import (
    TextTokenizer,
    describe_vocabulary,
    read_tokenizer,
    tokenizer_sha256,
    train_tokenizer,
)
from recipe.data.writer import PackedWriter
from recipe.environment import count_cpus
from recipe.errors import UserError
from recipe.progress import PreparationProgress

COMMIT_BYTES = 32_000_000  # text between two commits: a killed process loses at most this much work
HEAD_CHARACTERS = 50_000_000  # of a streamed text: for its tokenizer, its validation rows and its identity
SLICE_CHARACTERS = 10_000
SAMPLE_CHARACTERS = 1_000_000  # to choose the encoder and check its ids against the tokenizer's

say = functools.partial(print, flush=True)


def prepare_dataset(
    source: TextSource,
    directory: Path,
    block_size: int,
    tokenizer: TextTokenizer | None,
    tokenizer_vocab_size: int | None = None,
    overwrite: bool = False,
    num_workers: int | None = None,
) -> PackedDataset:
    """Prepare `directory`, or open it if it was prepared from the same input, tokenizer and options.

    Without a tokenizer, trains a byte-level BPE of up to tokenizer_vocab_size tokens. Raises `UserError` for bad
    input, and if `directory` holds anything else; `overwrite` replaces another packed dataset, and nothing else.
    """
    fingerprint = fingerprint_of(source, block_size, tokenizer, tokenizer_vocab_size)
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        made_from = None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            made_from = json.loads((directory / "metadata.json").read_text())["fingerprint"]
        if made_from == fingerprint:
            with contextlib.suppress(UserError) if overwrite else contextlib.nullcontext():  # it may be damaged
                opened = open_packed_dataset(directory, block_size)
                say(f"{directory} is already prepared from this input")
                return opened
        elif made_from is None and not (directory / "metadata.json").is_file():
            raise UserError(f"{directory} exists and is not a packed dataset; choose another folder")
        elif not overwrite:
            different = "was prepared from different text or options, or with a different tokenizer"
            raise UserError(f"{directory} {different}; pass --overwrite to replace it or choose another folder")
    if tokenizer is None:
        started_at = time.perf_counter()
        tokenizer = train_tokenizer(source.train_texts(), tokenizer_vocab_size)
        size = describe_vocabulary(tokenizer, tokenizer_vocab_size)
        say(f"trained a byte-level BPE of {size} in {time.perf_counter() - started_at:.1f} s")
    started_at = time.perf_counter()
    try:
        num_workers = num_workers or count_cpus()
        metadata, num_bytes = _pack(source, directory, fingerprint, block_size, tokenizer, overwrite, num_workers)
    except OSError as error:
        kept = f"the finished part is kept in {directory.parent}, and the same command resumes it"
        raise UserError(f"cannot write the dataset {directory}: {error.strerror or error}; {kept}") from error
    seconds = time.perf_counter() - started_at
    documents, tokens = (sum(of[key] for of in metadata["splits"].values()) for key in ("documents", "tokens"))
    if duplicates := metadata["source"]["duplicates_of_validation"]:
        say(f"warning: {duplicates:,} training documents also occur in the validation text")
    rate = f"({num_bytes / 1e6 / seconds:.1f} MB/s)"
    say(f"packed into {directory} in {seconds:.1f} s {rate}: {documents:,} documents, {tokens:,} tokens")
    return open_packed_dataset(directory, block_size)


def _pack(
    source: TextSource,
    directory: Path,
    fingerprint: str,
    block_size: int,
    tokenizer: TextTokenizer,
    overwrite: bool,
    num_workers: int,
) -> tuple[dict, int]:
    """Encode and write the text, with commits from which a killed preparation resumes.

    Returns the metadata, and the number of bytes of text that this process prepared.
    """
    report = ReadReport()
    encode, how, pieces = open_pieces(source, tokenizer, report)
    say(f"token ids: {how}, threads: {num_workers}")
    # A tokenizer that was just trained must equal that of the interrupted run, or its rows are useless; and another
    # encoder may count the pieces of the text differently.
    identity = hashlib.sha256(f"{fingerprint} {tokenizer_sha256(tokenizer)} {how}".encode()).hexdigest()
    with contextlib.closing(PackedWriter(directory, identity, block_size, len(tokenizer), overwrite)) as writer:
        num_bytes_done = sum(split.counts["bytes"] for split in writer.splits.values())
        if writer.pieces_done:
            say(f"resuming after the first {num_bytes_done / 1e6:,.1f} MB, prepared by an interrupted run")
        if source.has_validation:
            pieces = count_duplicates(pieces, report)
            if source.shard_index:  # separate validation text goes into the first shard only
                pieces = (piece for piece in pieces if piece.split == "train")
        pieces = itertools.islice(pieces, writer.pieces_done, None)
        uncommitted = 0
        with PreparationProgress(source.num_bytes, num_bytes_done) as progress:
            for num_pieces, _, batch in encode_pieces(encode, pieces, num_workers):
                for split, ids, ends, num_bytes in batch:
                    writer.splits[split].add(ids, num_bytes, ends)
                    uncommitted += num_bytes
                    progress.add(len(ends), num_bytes, len(ids))
                writer.pieces_done += num_pieces
                if uncommitted >= COMMIT_BYTES:
                    writer.commit()
                    uncommitted = 0
        for reason in report.skipped[:10]:
            say(f"skipped: {reason}")
        if report.skipped:
            say(f"files with errors: {len(report.skipped):,}; the text before the first error in each is kept")
        if source.document_separator is not None and not report.num_separators:
            say(f"warning: --document_separator {source.document_separator!r} has no effect: no .txt file contains it")
        found = {"skipped_files": len(report.skipped), "duplicates_of_validation": report.duplicates_of_validation}
        shard = {"shard": [source.shard_index, source.num_shards], "whole_sha256": source.whole_sha256}
        num_bytes = sum(split.counts["bytes"] for split in writer.splits.values()) - num_bytes_done
        about = {"source": source.describe() | found, "fingerprint": fingerprint, **shard}
        return writer.finish(tokenizer, about), num_bytes


def open_pieces(
    source: TextSource, tokenizer: TextTokenizer, report: ReadReport | None = None, start: dict | None = None
) -> tuple[Callable, str, Iterator[Piece]]:
    """Return the encoder for a text, its description, and the pieces of the text for it."""
    pieces = source.pieces(report, tokenizer.eos_token_id, start)
    sample, characters = deque(), 0
    while characters < SAMPLE_CHARACTERS and (piece := next(pieces, None)):
        sample.append(piece)
        characters += len(piece.text)
    slices = [  # short, because tokenizers needs hundreds of bytes of memory per token
        Piece(piece.split, piece.text[start : start + SLICE_CHARACTERS], piece.ends)
        for piece in sample
        for start in range(0, min(len(piece.text), SAMPLE_CHARACTERS), SLICE_CHARACTERS)
    ]
    encode, how, takes_parts = build_encoder(tokenizer, slices)

    def sample_first() -> Iterator[Piece]:
        while sample:
            yield sample.popleft()  # frees its memory
        yield from pieces

    return encode, how, sample_first() if takes_parts else join_pieces(sample_first())


def fingerprint_of(
    source: TextSource, block_size: int, tokenizer: TextTokenizer | None, tokenizer_vocab_size: int | None
) -> str:
    """Hash what determines a packed dataset: text, tokenizer (or the size of the one to train), row length."""
    identity = tokenizer_sha256(tokenizer) if tokenizer else f"bpe {tokenizer_vocab_size}"
    return hashlib.sha256(f"{FORMAT_VERSION} {source.fingerprint} {identity} {block_size}".encode()).hexdigest()


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
    if options["document_separator"]:  # a shell passes \n as two characters
        for escaped, character in (("\\n", "\n"), ("\\t", "\t"), ("\\r", "\r")):
            options["document_separator"] = options["document_separator"].replace(escaped, character)
    return TextSource(tuple(config.train_file or ()), tuple(options.pop("validation_file") or ()), **options)


def open_dataset_for(config: TrainConfig, source: str | Path | None = None) -> PackedDataset:
    """Open the run's dataset: `dataset_dir`, or the text prepared once for all runs in `cache_dir`.

    source: the model that the run starts from, which may be a checkpoint of `model_name_or_path`; it holds the same
    tokenizer. Raises `UserError` if `tokenizer_name` is not the tokenizer that made the dataset.
    """
    if source is not None and config.tokenizer_name == config.model_name_or_path:
        config = dataclasses.replace(config, tokenizer_name=str(source))
    tokenizer = read_tokenizer(config.tokenizer_name) if config.tokenizer_name else None
    if config.dataset_dir is not None:
        dataset = open_packed_dataset(Path(config.dataset_dir), config.block_size)
        if tokenizer is not None and tokenizer_sha256(tokenizer) != dataset.metadata["tokenizer_sha256"]:
            remedy = "prepare it with that tokenizer, or omit --tokenizer_name"
            if config.tokenizer_name == config.model_name_or_path:
                remedy = f"prepare it with --tokenizer_name {config.tokenizer_name}, the model's tokenizer"
            made = f"was made with another tokenizer than {config.tokenizer_name}"
            raise UserError(f"{config.dataset_dir} {made}; {remedy}")
        return dataset
    text = source_from(config)
    if config.streaming:
        text = dataclasses.replace(text, head_characters=HEAD_CHARACTERS)
        say("streaming: preparing only the validation text and the head of the training text")
    fingerprint = fingerprint_of(text, config.block_size, tokenizer, config.tokenizer_vocab_size)
    name = name_of_text(config.dataset_name or config.train_file[0])
    return prepare_dataset(
        text,
        Path(config.cache_dir) / f"{name}-{fingerprint[:12]}",
        config.block_size,
        tokenizer,
        config.tokenizer_vocab_size,
        overwrite=True,  # the name identifies the content: an existing dataset that cannot be opened is damaged
        num_workers=config.preprocessing_num_workers,
    )


def count_duplicates(pieces: Iterable[Piece], report: ReadReport) -> Iterator[Piece]:
    """Pass pieces on and count training documents that the validation text, which comes first, also holds."""
    hashes, starts = set(), True
    for piece in pieces:
        if starts:
            if piece.split == "validation":
                hashes.add(hash64(piece.text))
            elif hash64(piece.text) in hashes:
                report.duplicates_of_validation += 1
        starts = piece.ends
        yield piece
