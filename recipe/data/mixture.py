"""Mix packed datasets: training example k is a pure function of (seed, weights, datasets).

Each dataset keeps its own order without replacement (`example_rows`), and starts its next epoch when it ends. The
datasets are interleaved evenly: of the first n examples, round(share * n) come from the first dataset, for every n.
The other datasets divide the rest by the same rule. With two datasets, the number of examples of each never differs
from its share by more than one half.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recipe.config import SPLITS
from recipe.data.packed import (
    COUNTS,
    PackedDataset,
    PackedSplit,
    add_known,
    encoding_of,
    metadata_of,
    open_packed_dataset,
)
from recipe.disk import file_identity
from recipe.errors import UserError

WHOLE = 2**24  # shares are integers that add up to this: int64 arithmetic is exact for 2**39 examples


def open_datasets(directories: Sequence[Path], block_size: int, weights: Sequence[float] | None) -> PackedDataset:
    """Open one packed dataset, or several as a mixture with these `parts`. weights: by default, the numbers of rows.

    A dataset of weight 0 only provides validation rows. Raises `UserError` if one cannot be opened, is given twice, or
    was made with another tokenizer.
    """
    opened = [open_packed_dataset(directory, block_size) for directory in directories]
    if len(opened) == 1:
        return opened[0]
    if len({*map(file_identity, directories)}) < len(directories):
        raise UserError("--dataset_dir names the same dataset twice; pass it once, with a larger --dataset_weights")
    first = opened[0]
    for other in opened[1:]:
        if other.metadata["tokenizer_sha256"] != first.metadata["tokenizer_sha256"]:
            remedy = "prepare both with the same --tokenizer_name"
            raise UserError(f"{first.directory} and {other.directory} were made with different tokenizers; {remedy}")
        if encoding_of(other.metadata) != encoding_of(first.metadata):
            remedy = "prepare both with the same --model_name_or_path and --parse_special_tokens"
            raise UserError(f"{first.directory} and {other.directory} have other special tokens in the text; {remedy}")
    names = [directory.absolute().name for directory in directories]
    if len(set(names)) < len(names):
        names = [str(directory) for directory in directories]
    weights = [len(dataset.train) for dataset in opened] if weights is None else weights
    shares = dict(zip(names, [weight / sum(weights) for weight in weights], strict=True))
    parts = dict(zip(names, opened, strict=True))
    trained = [dataset for name, dataset in parts.items() if shares[name] > 0]
    return dataclasses.replace(
        first,
        metadata=mix_metadata(parts, shares),
        train=PackedSplit.joined([dataset.train for dataset in trained]),
        validation=PackedSplit.joined([dataset.validation for dataset in opened]),
        parts=parts,
        shares=shares,
    )


def mix_metadata(parts: dict[str, PackedDataset], shares: dict[str, float]) -> dict[str, Any]:
    """Return the metadata of a mixture: that of its datasets, the sums of the counts, and a hash of the hashes."""
    mixture = {name: metadata_of(dataset) | {"share": shares[name]} for name, dataset in parts.items()}
    all_parts: list[dict[str, Any]] = list(mixture.values())
    used = {"train": [part for part in all_parts if part["share"] > 0], "validation": all_parts}
    splits = {
        name: {key: add_known(part["splits"][name][key] for part in used[name]) for key in COUNTS} for name in SPLITS
    }
    hashes = json.dumps([part["content_sha256"] for part in all_parts])
    same = {key: all_parts[0][key] for key in ("tokenizer_sha256", "vocab_size", "eos_token_id")}
    same |= {"source": {}, "splits": splits, "mixture": mixture, "inputs": encoding_of(all_parts[0])}
    return same | {"content_sha256": hashlib.sha256(hashes.encode()).hexdigest()}


def order_of(dataset: PackedDataset) -> tuple[tuple[int, int], ...]:
    """Return (rows, integer share) of each dataset of a mixture with training examples; () for a single dataset."""
    trained = [name for name, share in dataset.shares.items() if share > 0]
    shares = whole_shares([dataset.shares[name] for name in trained])
    return tuple((len(dataset.parts[name].train), share) for name, share in zip(trained, shares, strict=True))


def whole_shares(shares: Sequence[float]) -> list[int]:
    """Return integers of at least 1 in the proportion of the shares, which add up to about WHOLE."""
    edges = np.round(np.cumsum(shares) / np.sum(shares) * WHOLE).astype(np.int64)
    return np.maximum(1, np.diff(edges, prepend=0)).tolist()


def split_examples(examples: np.ndarray, shares: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the dataset of each example, and how many earlier examples come from that dataset.

    examples: int64 [n], counted from the start of the run. shares: integers, greater than 0.
    """
    datasets = np.full_like(examples, -1)
    numbers = examples.copy()
    left = sum(shares)
    for index, share in enumerate(shares):
        rest = datasets < 0  # no earlier dataset takes them; `numbers` counts only these
        before = (numbers * share + left // 2) // left  # of them, rounded
        is_own = rest & (((numbers + 1) * share + left // 2) // left > before)
        datasets[is_own] = index
        numbers[is_own] = before[is_own]
        rest &= ~is_own
        numbers[rest] -= before[rest]
        left -= share
    return datasets, numbers
