"""Join separately prepared shards into one packed dataset."""

import json
import operator
import os
import shutil
from pathlib import Path

from recipe.data.documents import SPLITS
from recipe.data.packed import ROWS_NAME, PackedDataset, open_packed_dataset
from recipe.data.writer import COUNTS, DATA_NAME, check_counts, sha256_of, write_index
from recipe.errors import UserError


def merge_shards(directory: Path, num_shards: int) -> dict:
    """Join DIR-00000-of-N, ... into DIR by hard links to their rows, which take no space. Returns the metadata.

    Raises `UserError` if a shard is missing or belongs to another dataset.
    """
    if directory.exists():
        raise UserError(f"{directory} exists: either the shards are already merged or it is another dataset; move it")
    folders = [shard_dir(directory, index, num_shards) for index in range(num_shards)]
    missing = [str(index) for index, folder in enumerate(folders) if not folder.is_dir()]
    if missing:
        remedy = f"prepare each with --num_shards {num_shards} --shard_index N"
        raise UserError(
            f"of the {num_shards} shards of {directory}, these are missing: {', '.join(missing)}; {remedy}"
        )
    shards = [open_packed_dataset(folder) for folder in folders]
    first = shards[0].metadata
    identity = operator.itemgetter("block_size", "vocab_size", "tokenizer_sha256", "whole_sha256")
    for index, shard in enumerate(shards):
        if identity(shard.metadata) != identity(first) or shard.metadata["shard"] != [index, num_shards]:
            reason = "their text, options, tokenizers or shard numbers do not match; prepare them again"
            folders = f"{shard.directory} and {shards[0].directory}"
            raise UserError(f"{folders} are not shards of the same dataset: {reason}")
    splits = {}
    for split in SPLITS:
        parts = [shard.metadata["splits"][split] for shard in shards]
        splits[split] = {key: (max if key == "max_token_id" else sum)(part[key] for part in parts) for key in COUNTS}
    check_counts(splits, first["block_size"], first["source"].get("validation_split_percentage"))
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(
        shards[0].directory, partial, ignore=shutil.ignore_patterns("*.arrow", "metadata.json", "journal.json")
    )
    for split in SPLITS:
        splits[split] |= _link_rows(split, shards, partial / split)
    summed = ("skipped_files", "duplicates_of_validation")
    sums = {key: sum(shard.metadata["source"].get(key, 0) for shard in shards) for key in summed}
    metadata = {
        **first,
        "content_sha256": sha256_of(splits[split]["rows_sha256"] for split in SPLITS),
        "source": {**first["source"], **sums},
        "fingerprint": sha256_of(shard.metadata["fingerprint"] for shard in shards),
        "shard": [0, 1],
        "splits": splits,
    }
    (partial / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    os.rename(partial, directory)
    return metadata


def _link_rows(split: str, shards: list[PackedDataset], target: Path) -> dict:
    """Link the files of one split of all shards into `target`. Returns their hash and sizes."""
    files = [f"data-{index:05d}-of-{len(shards):05d}.arrow" for index in range(len(shards))]
    batches = []
    for name, shard in zip(files, shards, strict=True):
        try:
            os.link(shard.directory / split / DATA_NAME, target / name)
        except OSError:  # not every file system has hard links
            shutil.copyfile(shard.directory / split / DATA_NAME, target / name)
        layout = json.loads((shard.directory / split / ROWS_NAME).read_text())
        batches += [[name, offset, num_rows] for _, offset, num_rows in layout["batches"]]
    sha256 = sha256_of(shard.metadata["splits"][split]["rows_sha256"] for shard in shards)
    return write_index(target, split, sha256, files, {**layout, "batches": batches})


def shard_dir(directory: Path, index: int, num_shards: int) -> Path:
    """Return where to prepare a shard: next to the dataset that will contain it."""
    return directory.with_name(f"{directory.name}-{index:05d}-of-{num_shards:05d}")
