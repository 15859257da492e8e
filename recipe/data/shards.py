"""Shards of a packed dataset, prepared apart, made one by metadata alone."""

import json
import os
import shutil
from pathlib import Path

from recipe.data.documents import SPLITS
from recipe.data.packed import ROWS_NAME, open_packed_dataset
from recipe.data.packing import COUNTS, check_counts, sha256_of, sizes_in, write_state
from recipe.errors import UserError

SUMMED = ("skipped_files", "duplicates_of_validation")  # of the source, over shards


def merge_shards(directory: Path, num_shards: int) -> dict:
    """Make one dataset of DIR-00000-of-N, ... by writing metadata alone: the rows stay where they are.

    Raises `UserError` if a shard is missing, or was not made as a part of the same whole.
    """
    if directory.exists():
        raise UserError(f"{directory} exists: the shards were merged already, or it is another dataset; move it away")
    folders = [shard_dir(directory, index, num_shards) for index in range(num_shards)]
    missing = [str(index) for index, folder in enumerate(folders) if not folder.is_dir()]
    if missing:
        raise UserError(
            f"of the {num_shards} shards of {directory} these are missing: {', '.join(missing)}; prepare each with "
            f"--num_shards {num_shards} --shard_index N"
        )
    shards = [open_packed_dataset(folder) for folder in folders]
    for index, shard in enumerate(shards):
        for key in ("block_size", "vocab_size", "tokenizer_sha256", "whole_sha256"):
            if shard.metadata[key] != shards[0].metadata[key] or shard.metadata["shard"] != [index, num_shards]:
                raise UserError(
                    f"{shard.directory} and {shards[0].directory} were not prepared as shards of one dataset: text, "
                    "options, tokenizer or shard number do not match; prepare them again"
                )
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    contents = {shard.directory.name: shard.metadata["content_sha256"] for shard in shards}
    sums = {key: sum(shard.metadata["source"].get(key, 0) for shard in shards) for key in SUMMED}
    metadata = {**shards[0].metadata, "source": {"shards": contents, **sums}, "shard": [0, 1], "splits": {}}
    for split in SPLITS:
        parts = [shard.metadata["splits"][split] for shard in shards]
        files = {
            f"../../{shard.directory.name}/{split}/{name}": size
            for shard, part in zip(shards, parts, strict=True)
            for name, size in part["file_bytes"].items()
            if name.endswith(".arrow")
        }
        merge = {key: sum for key in COUNTS} | {"max_token_id": max}
        counts = {key: how(part[key] for part in parts) for key, how in merge.items()}
        sha256 = sha256_of(part["rows_sha256"] for part in parts)
        (partial / split).mkdir(parents=True)
        shutil.copy(shards[0].directory / split / "dataset_info.json", partial / split)
        write_state(partial / split, split, sha256, list(files))
        rows = [json.loads((shard.directory / split / ROWS_NAME).read_text()) for shard in shards]
        batches = [
            [f"../../{shard.directory.name}/{split}/{name}", offset, num_rows]
            for shard, part in zip(shards, rows, strict=True)
            for name, offset, num_rows in part["batches"]
        ]
        (partial / split / ROWS_NAME).write_text(json.dumps({**rows[0], "batches": batches}) + "\n")
        files |= sizes_in(partial / split)
        metadata["splits"][split] = {**counts, "rows_sha256": sha256, "file_bytes": files}
    try:
        held_out = shards[0].metadata["source"].get("validation_split_percentage")
        check_counts(metadata["splits"], metadata["block_size"], held_out)
    except UserError:
        shutil.rmtree(partial)
        raise
    metadata["content_sha256"] = sha256_of(metadata["splits"][split]["rows_sha256"] for split in SPLITS)
    metadata["fingerprint"] = sha256_of(shard.metadata["fingerprint"] for shard in shards)
    shutil.copytree(shards[0].directory / "tokenizer", partial / "tokenizer")
    (partial / "dataset_dict.json").write_text(json.dumps({"splits": list(SPLITS)}))
    (partial / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    os.rename(partial, directory)
    return metadata


def shard_dir(directory: Path, index: int, num_shards: int) -> Path:
    """Where a shard of a dataset is prepared: beside the dataset it will be a part of."""
    return directory.with_name(f"{directory.name}-{index:05d}-of-{num_shards:05d}")
