"""From a text source to a packed dataset: the one path behind scripts/prepare_data.py and recipe/train.py."""

import argparse
import dataclasses
import functools
import hashlib
import itertools
import json
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from recipe.config import TEXT_OPTIONS, TrainConfig
from recipe.data.documents import Piece, hash64
from recipe.data.encoder import EncodePieces, build_encoder, encode_pieces, whole_documents
from recipe.data.files import ReadReport
from recipe.data.packed import FORMAT_VERSION, PackedDataset, open_packed_dataset
from recipe.data.packing import PackedWriter
from recipe.data.text import TextSource, name_of_text
from recipe.data.tokenizer import describe_vocabulary, load_tokenizer, tokenizer_sha256, train_tokenizer
from recipe.environment import count_cpus
from recipe.errors import UserError
from recipe.progress import PreparationProgress

COMMIT_BYTES = 32_000_000  # text between two commits: what is lost at most when the process is killed
HEAD_CHARACTERS = 50_000_000  # of a streamed text, for its tokenizer, its validation rows and its identity
SLICE_CHARACTERS = 10_000
SAMPLE_CHARACTERS = 1_000_000  # by which the encoder is chosen, and has to prove that it gives the tokenizer's ids

say = functools.partial(print, flush=True)


def prepare_dataset(
    source: TextSource,
    directory: Path,
    block_size: int,
    tokenizer: PreTrainedTokenizerBase | None,
    tokenizer_vocab_size: int | None = None,
    overwrite: bool = False,
    num_workers: int | None = None,
) -> PackedDataset:
    """Prepare `directory`, or open it if the same input, tokenizer and options made it before.

    Without a tokenizer, a byte-level BPE of tokenizer_vocab_size, or as many tokens as the text gives, is trained on
    the training documents.
    Raises `UserError` for bad input, and if `directory` holds anything else; `overwrite` replaces another packed
    dataset, once the new one is complete, and nothing but that.
    """
    fingerprint = fingerprint_of(source, block_size, tokenizer, tokenizer_vocab_size)
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        made_from = _fingerprint_in(directory)
        if made_from == fingerprint:
            try:
                opened = open_packed_dataset(directory, block_size)
                say(f"{directory} is already prepared from this input")
                return opened
            except UserError:  # damaged since then
                if not overwrite:
                    raise
        elif made_from is None and not (directory / "metadata.json").is_file():
            raise UserError(f"{directory} exists and is not a packed dataset; name another folder")
        elif not overwrite:
            raise UserError(
                f"{directory} was made from other text, options or another tokenizer; "
                "pass --overwrite to replace it, or another folder"
            )
    if tokenizer is None:
        started_at = time.perf_counter()
        tokenizer = train_tokenizer(source.train_texts(), tokenizer_vocab_size)
        size = describe_vocabulary(tokenizer, tokenizer_vocab_size)
        say(f"trained a byte-level BPE of {size} in {time.perf_counter() - started_at:.1f} s")
    started_at = time.perf_counter()
    metadata = _pack(source, directory, fingerprint, block_size, tokenizer, overwrite, num_workers or count_cpus())
    _summarize(directory, metadata, time.perf_counter() - started_at)
    return open_packed_dataset(directory, block_size)


def _pack(
    source: TextSource,
    directory: Path,
    fingerprint: str,
    block_size: int,
    tokenizer: PreTrainedTokenizerBase,
    overwrite: bool,
    num_workers: int,
) -> dict:
    """Encode and write, committing now and then; killed at any moment and called again it goes on from there."""
    report = ReadReport()
    encode, how, pieces = open_pieces(source, tokenizer, report)
    say(f"token ids: {how}, {_count(num_workers, 'thread')}")
    # A tokenizer that was trained just now must be the one of the interrupted run, or its rows are of no use.
    identity = hashlib.sha256(f"{fingerprint} {tokenizer_sha256(tokenizer)}".encode()).hexdigest()
    duplicates = {"duplicates_of_validation": 0}
    try:
        writer = PackedWriter(directory, identity, block_size, len(tokenizer), overwrite)
        try:
            if writer.pieces_done:
                say(f"resuming after the first {writer.num_bytes_done / 1e6:,.1f} MB, prepared by an interrupted run")
            done, uncommitted = writer.pieces_done, 0
            if source.has_validation:
                pieces = count_duplicates(pieces, duplicates)
                if source.shard_index:  # the first shard alone holds validation text that is given as a whole
                    pieces = (piece for piece in pieces if piece.split == "train")
            pieces = itertools.islice(pieces, writer.pieces_done, None)
            with PreparationProgress(source.num_bytes, writer.num_bytes_done) as progress:
                for num_pieces, batch in encode_pieces(encode, pieces, num_workers):
                    for split, ids, ends, num_bytes in batch:
                        writer.splits[split].add(ids, num_bytes, ends)
                        uncommitted += num_bytes
                        progress.add(len(ends), num_bytes, len(ids))
                    done += num_pieces
                    if uncommitted >= COMMIT_BYTES:
                        writer.commit(done)
                        uncommitted = 0
            for reason in report.skipped[:10]:
                say(f"skipped: {reason}")
            if report.skipped:
                say(f"skipped {_count(len(report.skipped), 'file')}; text read before the damage in a file is kept")
            description = {**source.describe(), "skipped_files": len(report.skipped), **duplicates}
            if not writer.splits["train"].counts["documents"] and source.num_shards == 1:
                raise UserError(source.describe_emptiness(report))
            unused_separator = source.describe_unused_separator(report)
            shard = (source.shard_index, source.num_shards)
            try:
                metadata = writer.finish(tokenizer, description, fingerprint, shard, source.whole_sha256)
            except UserError as error:
                if unused_separator is None:
                    raise
                raise UserError(f"{error}; {unused_separator}") from error
            if unused_separator:
                say(f"warning: {unused_separator}")
            return metadata
        finally:
            writer.release()
    except OSError as error:
        raise UserError(
            f"cannot write the dataset {directory}: {error.strerror or error}; the finished part is kept "
            f"in {directory.parent}, and the same command resumes it"
        ) from error


def open_pieces(
    source: TextSource, tokenizer: PreTrainedTokenizerBase, report: ReadReport | None = None
) -> tuple[EncodePieces, str, Iterator[Piece]]:
    """The encoder for a text, a sentence on it, and the pieces of the text for it."""
    pieces = source.pieces(report, tokenizer.eos_token_id)
    sample, characters = deque(), 0
    while characters < SAMPLE_CHARACTERS and (piece := next(pieces, None)):
        sample.append(piece)
        characters += len(piece.text)
    slices = [  # short ones: tokenizers needs hundreds of bytes for a token
        Piece(piece.split, piece.text[start : start + SLICE_CHARACTERS], piece.ends)
        for piece in sample
        for start in range(0, min(len(piece.text), SAMPLE_CHARACTERS), SLICE_CHARACTERS)
    ]
    encode, how, takes_parts = build_encoder(tokenizer, slices)

    def sample_first() -> Iterator[Piece]:
        while sample:
            yield sample.popleft()  # and does not keep it
        yield from pieces

    return encode, how, sample_first() if takes_parts else whole_documents(sample_first())


def fingerprint_of(
    source: TextSource, block_size: int, tokenizer: PreTrainedTokenizerBase | None, tokenizer_vocab_size: int | None
) -> str:
    """SHA-256 of all that decides a packed dataset: text, tokenizer (or the size of the one to train), row length."""
    identity = tokenizer_sha256(tokenizer) if tokenizer else f"bpe {tokenizer_vocab_size}"
    return hashlib.sha256(f"{FORMAT_VERSION} {source.fingerprint} {identity} {block_size}".encode()).hexdigest()


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a script the source options of recipe/train.py, under the same names and with the same defaults."""
    for field in dataclasses.fields(TrainConfig):
        if field.name in ("train_file", "dataset_name", *TEXT_OPTIONS):
            kwargs: dict = {"default": field.default, "help": field.metadata["help"].replace("%", "%%")}
            if isinstance(field.default, bool):
                kwargs["action"] = "store_true"
            else:
                kwargs["type"] = float if isinstance(field.default, float) else str
            if field.name.endswith("_file"):
                kwargs["nargs"] = "+"
            parser.add_argument(f"--{field.name}", **kwargs)


def source_from(config: TrainConfig | argparse.Namespace) -> TextSource:
    """The text source that a run's fields, or a script's arguments, name. Raises `UserError` if it is not there."""
    separator = config.document_separator
    return TextSource(
        train_files=tuple(config.train_file or ()),
        validation_files=tuple(config.validation_file or ()),
        dataset_name=config.dataset_name,
        dataset_config_name=config.dataset_config_name,
        dataset_split=config.dataset_split,
        text_column_name=config.text_column_name,
        document_separator=_unescape(separator) if separator else separator,
        validation_split_percentage=config.validation_split_percentage,
        skip_bad_files=config.skip_bad_files,
    )


def _unescape(separator: str) -> str:
    """A shell hands over \\n as two characters."""
    return separator.replace("\\n", "\n").replace("\\t", "\t").replace("\\r", "\r")


def open_dataset_for(config: TrainConfig, source: str | Path | None = None) -> PackedDataset:
    """The run's dataset: `dataset_dir` as it is, or the text prepared in `cache_dir`, once for all runs.

    source: the model the run starts from, whose tokenizer it is (a checkpoint has a copy of the tokenizer). Raises
    `UserError` if `tokenizer_name` is given and is not the one the dataset was made with.
    """
    if source is not None and config.tokenizer_name == config.model_name_or_path:
        config = dataclasses.replace(config, tokenizer_name=str(source))
    if config.dataset_dir is not None:
        dataset = open_packed_dataset(Path(config.dataset_dir), config.block_size)
        if config.tokenizer_name is not None:
            asked_for = tokenizer_sha256(load_tokenizer(config.tokenizer_name))
            if asked_for != dataset.metadata["tokenizer_sha256"]:
                remedy = "prepare it with that one, or leave --tokenizer_name out"
                if config.tokenizer_name == config.model_name_or_path:
                    remedy = f"prepare it with --tokenizer_name {config.tokenizer_name}, the model's own"
                raise UserError(
                    f"{config.dataset_dir} was made with another tokenizer than {config.tokenizer_name}; {remedy}"
                )
        return dataset
    source = source_from(config)
    if config.streaming:
        source = dataclasses.replace(source, head_characters=HEAD_CHARACTERS)
        say("streaming: only the validation text and the head of the training text are prepared")
    tokenizer = load_tokenizer(config.tokenizer_name) if config.tokenizer_name else None
    fingerprint = fingerprint_of(source, config.block_size, tokenizer, config.tokenizer_vocab_size)
    name = name_of_text(config.dataset_name or config.train_file[0])
    directory = Path(config.cache_dir) / f"{name}-{fingerprint[:12]}"
    return prepare_dataset(
        source,
        directory,
        config.block_size,
        tokenizer,
        config.tokenizer_vocab_size,
        overwrite=True,  # the name is the content's: what is there and cannot be opened is damaged
        num_workers=config.preprocessing_num_workers,
    )


def _fingerprint_in(directory: Path) -> str | None:
    """What a packed dataset was made from, or None if the folder holds none."""
    try:
        return str(json.loads((directory / "metadata.json").read_text())["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def count_duplicates(pieces: Iterable[Piece], counts: dict[str, int]) -> Iterator[Piece]:
    """Pass pieces on, counting training documents that are in the validation text too, which comes first."""
    hashes, starts = set(), True
    for piece in pieces:
        if starts:
            if piece.split == "validation":
                hashes.add(hash64(piece.text))
            elif hash64(piece.text) in hashes:
                counts["duplicates_of_validation"] += 1
        starts = piece.ends
        yield piece


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _summarize(directory: Path, metadata: dict, seconds: float) -> None:
    num_bytes = size = 0
    for split, counts in metadata["splits"].items():
        num_bytes += counts["bytes"]
        size += sum(counts["file_bytes"].values())
        if not counts["tokens"]:
            say(f"{split}: nothing in this shard")
            continue
        long_share = counts["tokens_in_long_documents"] / counts["tokens"]
        say(
            f"{split}: {_count(counts['documents'], 'document')}, {_count(counts['bytes'], 'byte')}, "
            f"{_count(counts['tokens'], 'token')} ({counts['tokens'] / counts['bytes']:.3f} per byte), "
            f"{_count(counts['rows'], 'row')}; {_count(counts['long_documents'], 'document')} "
            f"({long_share:.0%} of the tokens) {'is' if counts['long_documents'] == 1 else 'are'} longer than a row"
        )
    if any(counts["long_documents"] for counts in metadata["splits"].values()):
        say("documents longer than a row are cut across rows, which is normal and loses no text")
    if metadata["source"].get("duplicates_of_validation"):
        duplicates = _count(metadata["source"]["duplicates_of_validation"], "training document")
        say(f"warning: the validation text also holds {duplicates}")
    say(f"packed into {directory}, {size / 1e6:,.1f} MB, in {seconds:.1f} s ({num_bytes / 1e6 / seconds:.1f} MB/s)")
