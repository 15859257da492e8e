"""A run's dataset: the folder that it names, or its text, prepared once for all runs."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.arguments import shell_command
from recipe.config import ONLY_OF_THE_HUB, TrainConfig
from recipe.data.mixture import open_datasets
from recipe.data.packed import PackedDataset, encoding_of, read_metadata
from recipe.data.prepare import fingerprint_of, inputs_of, is_made_from, prepare_dataset, say
from recipe.data.source import TextSource, name_of_text, source_from
from recipe.data.tokenizer import added_ids, load_tokenizer, tokenizer_sha256, without_template
from recipe.errors import UserError

HEAD_UNITS = 4  # prepared before streaming, for the tokenizer and the validation rows


@dataclass(frozen=True)
class Known:
    """What a resumed run knows of its data."""

    checkpoint: Path  # holds the tokenizer
    content_sha256: str  # of the ids
    streamed_text: str | None  # the fingerprint of the text, if it is streamed


def open_dataset_for(config: TrainConfig, model: str | Path | None = None) -> PackedDataset:
    """Open the run's dataset; text is prepared first. Arguments and errors: as for `prepare_text`."""
    return open_datasets(prepare_text(config, model), config.block_size, config.dataset_weights)


def prepare_text(config: TrainConfig, model: str | Path | None = None, known: Known | None = None) -> list[Path]:
    """Return the run's datasets: those of `dataset_dir`, or the text prepared once for all runs in `cache_dir`.

    model: what the run starts from, `model_name_or_path` or a checkpoint, which holds the same tokenizer. known: for a
    resumed run, whose tokenizer also packs the new text of a branch. Raises `UserError` if `tokenizer_name` is not the
    tokenizer that made the dataset.
    """
    if model is not None and config.tokenizer_name == config.model_name_or_path:
        config = dataclasses.replace(config, tokenizer_name=str(model))
    source = source_from(config) if config.dataset_dir is None else None
    num_units = HEAD_UNITS if config.streaming else None
    if source is not None and config.streaming and not source.is_on_hub:
        raise UserError(f"{source.name} is not a dataset of the Hub; {ONLY_OF_THE_HUB}")
    if source is not None and known is not None and not config.tokenizer_name:
        is_same = False
        if not source.is_tokenized:
            inputs = inputs_of(source, None, config.tokenizer_vocab_size, num_units)
            is_same = content_of(cached_directory(config, source, inputs)) == known.content_sha256
            is_same = is_same or fingerprint_of(inputs) == known.streamed_text
        if not is_same:
            config = dataclasses.replace(config, tokenizer_name=str(known.checkpoint))
    tokenizer = load_tokenizer(config.tokenizer_name) if config.tokenizer_name else None
    if source is None:
        directories = config.dataset_dir or []
        if tokenizer is not None:
            for directory in directories:
                metadata = read_metadata(Path(directory))
                if tokenizer_sha256(tokenizer) != metadata["tokenizer_sha256"]:
                    remedy = "prepare it with that tokenizer, or omit --tokenizer_name"
                    if config.tokenizer_name == config.model_name_or_path:
                        option = shell_command(tokenizer_name=config.tokenizer_name)
                        remedy = f"prepare it with {option}, the model's tokenizer"
                    made = f"was made with another tokenizer than {config.tokenizer_name}"
                    raise UserError(f"{directory} {made}; {remedy}")
                if model is not None and added_ids(tokenizer)[0] != encoding_of(metadata)["document_prefix"]:
                    remedy = f"prepare it with {shell_command(model_name_or_path=config.model_name_or_path)}"
                    say(f"warning: {directory} does not begin its documents as the model expects; {remedy}")
        return [Path(directory) for directory in directories]
    if tokenizer is not None and model is None:
        tokenizer = without_template(tokenizer)
    source = source.for_tokenizer(tokenizer)
    inputs = inputs_of(source, tokenizer, config.tokenizer_vocab_size, num_units)
    directory = cached_directory(config, source, inputs)
    if num_units:
        say("streaming: preparing only a part of the text, for validation")
    prepare_dataset(
        source,
        directory,
        tokenizer,
        config.tokenizer_vocab_size,
        overwrite=True,  # the name says what it holds, so what cannot be opened is damaged
        num_workers=config.preprocessing_num_workers,
        num_units=num_units,
    )
    return [directory]


def content_of(directory: Path) -> str | None:
    """Return the hash of the ids of a complete dataset."""
    try:
        return read_metadata(directory)["content_sha256"]
    except UserError:
        return None


def cached_directory(config: TrainConfig, source: TextSource, inputs: dict[str, Any]) -> Path:
    """Return the folder that a text's fingerprint names; without access to the Hub, the newest one of the dataset."""
    cache = Path(config.cache_dir)
    name = name_of_text(source.dataset_name or source.train_files[0])
    directory = cache / f"{name}-{fingerprint_of(inputs)[:12]}"
    others = () if directory.is_dir() else cache.glob(f"{name}-*/metadata.json")
    others = sorted(others, key=os.path.getmtime, reverse=True)
    return next((path.parent for path in others if is_made_from(path.parent, inputs, source)), directory)
