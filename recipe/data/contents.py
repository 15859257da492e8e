"""What is in a packed dataset: packed dataset -> a table of counts, warnings and a few decoded rows."""

import itertools
import json
import operator
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from unicodedata import east_asian_width

import numpy as np
import xxhash

from recipe.data.documents import SPLITS
from recipe.data.packed import ROWS_NAME, PackedDataset, PackedSplit
from recipe.data.tokenizer import read_tokenizer

BLOCK_TOKENS = 2**18  # read at a time, because they fit in a core's cache
NUM_EXAMPLES = 3  # rows of train to decode
COLUMNS = 80
# A warning follows if a larger share of the documents repeats an earlier one, if a larger share of the validation
# documents is also in train, or if a smaller share of the vocabulary occurs in train.
MANY_REPEATS, MANY_SHARED, LITTLE_SEEN = 0.1, 0.01, 0.1
LABELS = (
    "",
    "documents",
    "  that repeat an earlier one",
    "  that are also in the other split",
    "  cut off at the end, not compared",
    "tokens",
    "  of documents longer than a row",
    "bytes per token",
    "tokens of the longest document",
    "  row in which it begins",
    "share of the vocabulary seen",
)


class SplitContents(NamedTuple):
    """What the rows of a split hold.

    A document is complete if its end-of-text id is in the rows. At the end of the stream, which each merged shard
    has, up to block_size - 1 tokens do not fill a row.
    """

    hashes: np.ndarray  # uint64 [complete documents], of their ids, sorted
    unseen: np.ndarray  # bool [vocab_size], whether an id does not occur
    longest: int  # tokens of the longest document, as far as they are in the rows, and its end-of-text id
    longest_row: int  # in which it begins
    longest_is_complete: bool

    @property
    def num_repeats(self) -> int:
        return int((self.hashes[1:] == self.hashes[:-1]).sum())

    @property
    def share_seen(self) -> float:
        return 1 - self.unseen.mean()


def read_contents(split: PackedSplit, eos_token_id: int) -> SplitContents:
    """Read all rows of a split. Takes a few MB of memory, and 16 bytes per document.

    Raises `UserError` for an id outside the vocabulary.
    """
    layout = json.loads((split.directory / ROWS_NAME).read_text())
    hashes, unseen, longest = [np.array([], np.uint64)], np.ones(split.vocab_size, bool), (0, 0, True)
    by_length = operator.itemgetter(0)
    position = 0  # in the split, whose row i begins at i * block_size
    for name, batches in itertools.groupby(layout["batches"], key=operator.itemgetter(0)):
        begins, begun = position, xxhash.xxh3_64()  # the document that has begun
        for ids in _read_stream(split.directory / name, batches, np.dtype(layout["dtype"]), split.block_size):
            split.check(ids)
            unseen[ids[unseen.take(ids)]] = False  # few ids are new, and take is three times as fast as an assignment
            ends = np.flatnonzero(ids == eos_token_id) + 1
            begun.update(ids[: ends[0]] if len(ends) else ids)
            if len(ends):
                bounds, view = itertools.pairwise(ends.tolist()), memoryview(ids)
                others = [xxhash.xxh3_64_intdigest(view[start:end]) for start, end in bounds]
                hashes.append(np.array([begun.intdigest(), *others], np.uint64))
                starts = np.append(begins, position + ends)
                lengths = np.diff(starts)
                found = (int(lengths.max()), int(starts[lengths.argmax()]) // split.block_size, True)
                longest = max(longest, found, key=by_length)
                begins, begun = int(starts[-1]), xxhash.xxh3_64(ids[ends[-1] :])
            position += len(ids)
        longest = max(longest, (position - begins, begins // split.block_size, False), key=by_length)
        position -= 1  # the last token of a stream begins no row
    all_hashes = np.concatenate(hashes)
    all_hashes.sort()
    return SplitContents(all_hashes, unseen, *longest)


def _read_stream(path: Path, batches: Iterable[list], dtype: np.dtype, block_size: int) -> Iterator[np.ndarray]:
    """Yield the tokens of a shard's rows in order, without the overlap of rows.

    The file is read, not mapped, because mapped pages would count as memory of this process.
    """
    width = block_size + 1
    step = max(1, BLOCK_TOKENS // width)
    for _, offset, num_rows in batches:
        for start in range(0, num_rows, step):
            count, begin = min(step, num_rows - start) * width, offset + start * width * dtype.itemsize
            rows = np.fromfile(path, dtype, count, offset=begin).reshape(-1, width)
            yield rows[:, :-1].flatten()
    yield rows[-1, -1:]


def print_contents(dataset: PackedDataset) -> None:
    """Print a table of what a dataset holds, warnings where it demands them, and the start of a few rows.

    Takes about 3 s per billion tokens in documents of 1,000. Raises `UserError` if the dataset is damaged.
    """
    eos_token_id = dataset.metadata["eos_token_id"]
    train, validation = (read_contents(dataset.splits[split], eos_token_id) for split in SPLITS)
    num_shared = count_shared(validation.hashes, train.hashes)
    columns = (
        LABELS,
        _column(dataset, "train", train, count_shared(train.hashes, validation.hashes)),
        _column(dataset, "validation", validation, num_shared),
    )
    for label, of_train, of_validation in zip(*columns, strict=True):
        print(f"{label:36}{of_train:>18}{of_validation:>18}")
    for text in _warnings(dataset, train, validation, num_shared):
        print(f"warning: {text}")
    for line in _decode_examples(dataset):
        print(line)


def count_shared(hashes: np.ndarray, others: np.ndarray) -> int:
    """Count the hashes that also occur in `others`. Both are sorted."""
    return int((np.searchsorted(others, hashes, "right") > np.searchsorted(others, hashes)).sum())


def _column(dataset: PackedDataset, split: str, contents: SplitContents, num_shared: int) -> tuple[str, ...]:
    """Return the numbers of a split, in the order of `LABELS`."""
    counts = dataset.metadata["splits"][split]
    return (
        split,
        f"{counts['documents']:,}",
        f"{contents.num_repeats:,}",
        f"{num_shared:,}",
        f"{counts['documents'] - len(contents.hashes):,}",
        f"{counts['tokens']:,}",
        f"{counts['tokens_in_long_documents'] / max(1, counts['tokens']):.1%}",
        f"{1 / dataset.tokens_per_byte(split):.2f}" if counts["tokens"] else "-",  # a shard may be empty
        ("" if contents.longest_is_complete else "> ") + f"{contents.longest:,}",
        f"{contents.longest_row:,}",
        f"{contents.share_seen:.1%}",
    )


def _warnings(
    dataset: PackedDataset, train: SplitContents, validation: SplitContents, num_shared: int
) -> Iterator[str]:
    """Yield what is unusual. num_shared: validation documents that also occur in train."""
    counts = dataset.metadata["splits"]["train"]
    if train.num_repeats > len(train.hashes) * MANY_REPEATS:
        yield f"{train.num_repeats / len(train.hashes):.0%} of the training documents repeat an earlier one"
    if num_shared > len(validation.hashes) * MANY_SHARED:
        yield f"{num_shared / len(validation.hashes):.0%} of the validation documents also occur in train"
    if counts["documents"] > 1 and train.longest > counts["tokens"] / 2:
        yield f"one document holds {train.longest / counts['tokens']:.0%} of the training tokens"
    if train.share_seen < LITTLE_SEEN:
        yield f"only {train.share_seen:.1%} of the vocabulary occurs in the training text; a smaller one suffices"


def _decode_examples(dataset: PackedDataset) -> Iterator[str]:
    """Yield two lines for each of a few rows of train: its number and the start of its text."""
    decode = read_tokenizer(str(dataset.directory / "tokenizer")).backend_tokenizer.decode
    rows = dataset.splits["train"]
    for row in sorted({number * len(rows) // NUM_EXAMPLES for number in range(NUM_EXAMPLES)} if len(rows) else ()):
        head = rows[np.array([row])][0, : 8 * COLUMNS]  # at least one token in four ends a character
        text = decode(head.tolist(), skip_special_tokens=False)
        yield from fill_lines(f"row {row:,}: ", text)[:2]


def fill_lines(label: str, text: str) -> list[str]:
    """Break a text into lines of up to 80 columns, with line breaks and other control characters as escapes."""
    lines, width = [label], len(label)
    for character in text:
        escaped = character if character.isprintable() else repr(character)[1:-1]
        columns = sum(1 + (east_asian_width(part) in "WF") for part in escaped)
        if width + columns > COLUMNS:
            lines.append("  ")
            width = 2
        lines[-1] += escaped
        width += columns
    return lines
