"""The order of examples is a pure function of (seed, dataset), for any micro-batch and number of processes."""

import contextlib
import itertools

import numpy as np
import pytest
import torch
from helpers import BLOCK_SIZE

from recipe.data.batches import TrainBatches, TrainOrder, example_rows, read_rows, row_shift
from recipe.data.mixture import open_datasets, order_of, split_examples, whole_shares
from recipe.data.packed import PackedSplit, Stretch, open_packed_dataset
from recipe.errors import UserError

CPU = torch.device("cpu")
FROZEN = [5, 597, 782, 629, 771, 972, 361, 714]
FROZEN_SHIFTS = [0, 485, 138, 240, 276, 476]


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 64, 65, 1000, 4097])
@pytest.mark.parametrize("seed", [0, 1337, 2**63 - 1])
def test_every_row_is_drawn_once_before_any_is_drawn_twice(num_rows, seed):
    for epoch in (0, 1, 5):
        rows = example_rows(np.arange(epoch * num_rows, (epoch + 1) * num_rows), num_rows, seed)
        assert sorted(rows.tolist()) == list(range(num_rows))


def test_epochs_and_seeds_differ_and_look_random():
    """Neighbors are separated, epochs and seeds agree in about one position of `n`, and rows spread uniformly."""
    n = 10_000
    first, second = (example_rows(np.arange(e * n, (e + 1) * n), n, 1) for e in (0, 1))
    other = example_rows(np.arange(n), n, 2)
    for a, b in ((first, second), (first, other), (first, np.arange(n))):
        assert (a == b).sum() < 12
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.04  # four standard errors
    assert (np.abs(np.diff(first)) == 1).sum() < 15
    # uniform: each tenth of the order draws from each tenth of the rows
    table = np.histogram2d(np.arange(n), first, bins=10)[0]
    assert ((table - 100) ** 2 / 100).sum() < 160  # chi-squared, 81 degrees of freedom: p < 1e-6


def test_the_order_never_changes():
    """The first rows of an order are written down here, because a run resumed next year must see the same examples.

    Epochs move rows by no constant distance: a model learns a text that moves so, also where it has not been yet.
    """
    assert example_rows(np.arange(8), 1000, 1337).tolist() == FROZEN
    assert row_shift(np.arange(6), 1024).tolist() == FROZEN_SHIFTS


@pytest.mark.parametrize(
    ("micro_batch_size", "num_processes"), [(12, 1), (4, 1), (1, 1), (6, 2), (2, 2), (1, 3), (4, 3)]
)
@pytest.mark.parametrize("first", [0, 31])
def test_a_step_is_the_next_examples_for_any_batch_shape(micro_batch_size, num_processes, first):
    """For any micro-batch, number of processes and first example, so a position is one integer."""
    whole = example_rows(np.arange(first + 48), 50, 5)
    orders = [TrainOrder(50, 5, 12, micro_batch_size, first, rank, num_processes) for rank in range(num_processes)]
    iterators = list(map(iter, orders))
    micro_steps = 12 // micro_batch_size // num_processes
    for start in range(first, first + 48, 12):
        found = np.concatenate([next(order) for order in iterators for _ in range(micro_steps)])
        assert sorted(found.tolist()) == sorted(whole[start : start + 12].tolist())


# ------------------------------------------------------------------ rows


@pytest.fixture(scope="module")
def wide_split(tmp_path_factory):
    """Rows of two units, with ids of 16 bits. One row begins in the first and ends in the second."""
    folder = tmp_path_factory.mktemp("wide")
    stretches = []
    for number in range(2):
        path = folder / f"train-{number}.bin"
        np.random.default_rng(number).integers(0, 65_536, 1001).astype(np.uint16).tofile(path)
        stretches.append(Stretch(str(path), "uint16", 0, 1001))
    return PackedSplit("wide", stretches, 8, 65_536)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_the_rows_of_the_order(wide_split, num_workers):
    """Inputs and targets are int64, shifted by one, in the same order for every number of workers."""
    split = PackedSplit.joined([wide_split, wide_split])  # as of a mixture
    order = TrainOrder(len(split), 1, 96, 48, shift_below=8)
    with contextlib.closing(TrainBatches(read_rows(split, order, CPU, num_workers), CPU)) as batches:
        for indices in itertools.islice(order, 2 * len(split) // 48 + 2):  # more than two epochs
            inputs, targets = next(batches)
            rows = torch.from_numpy(split[indices])
            assert inputs.dtype == targets.dtype == torch.int64 and batches.position is None
            assert torch.equal(inputs, rows[:, :-1]) and torch.equal(targets, rows[:, 1:])


def test_each_epoch_cuts_the_text_elsewhere(wide_split):
    """Every token of a dataset is a target once, but for the first `shift` (never) and as many at the end (twice)."""
    split, T = PackedSplit.joined([wide_split, wide_split]), 8  # tokens of a row
    tokens = np.concatenate(wide_split.chunks)
    num_rows = len(wide_split)
    shifts = []
    order = TrainOrder(len(split), 3, 1, 1, shift_below=T, parts=((num_rows, 1), (num_rows, 1)))
    for epoch in range(4):
        indices = order.rows(np.arange(epoch * len(split), (epoch + 1) * len(split)))
        starts, rows = split.row_starts(indices), split[indices]
        shifts.append(int(row_shift(np.array([epoch]), T)[0]))
        for first in (0, len(tokens)):  # of each of the two
            own = starts[(starts >= first) & (starts < first + len(tokens))] - first
            counts = np.bincount((own[:, None] + np.arange(1, T + 1)).flatten(), minlength=num_rows * T + 1)[1:]
            expected = np.ones(num_rows * T, int)
            expected[: shifts[-1]], expected[-T : (shifts[-1] - T) or None] = 0, 2
            assert counts.tolist() == expected.tolist()
        assert all((row == tokens[at % len(tokens) :][: T + 1]).all() for row, at in zip(rows, starts, strict=True))
    assert shifts[0] == 0 and len(set(shifts)) > 2


def test_each_epoch_packs_whole_documents_in_another_order(tmp_path, monkeypatch):
    """0 ends them. A file, and what is scanned at once, end within one. A mixture has the order of its dataset."""
    monkeypatch.setattr("recipe.data.packed.SCANNED_AT_ONCE", 250)
    documents = [(*range(100 * number, 100 * number + 1 + number % 23), 0) for number in range(1, 60)]
    ids = np.concatenate(documents).astype(np.uint16)
    stretches = []
    for number, part in enumerate(np.split(ids, [301])):
        part.tofile(tmp_path / f"{number}.bin")
        stretches.append(Stretch(str(tmp_path / f"{number}.bin"), "uint16", 0, len(part)))
    split = PackedSplit("d", stretches, 8, 10_000, end_of_document=0)
    mixture = PackedSplit.joined([split, split])
    orders = []
    for shift in (0, 5, 3):
        rows = split[np.arange(len(split)) + shift * len(split)]
        assert np.array_equal(mixture[np.arange(len(mixture)) + shift * len(mixture)], np.tile(rows, (2, 1)))
        stream = rows[:-1, :-1].flatten()  # the last row stays in its place
        found = [tuple(document) for document in np.split(stream, np.flatnonzero(stream == 0) + 1)[1:-1]]
        assert len(set(found)) == len(found) > 50 and set(found) <= set(documents)
        orders.append([documents.index(document) for document in found])
    assert orders[0] == sorted(orders[0]) and orders[1] != sorted(orders[1]) != orders[2] != orders[1]


def test_an_id_beyond_the_vocabulary_is_refused(wide_split):
    """The first one, too. On CUDA it would cause a device-side assert."""
    order = TrainOrder(len(wide_split), 1, 64, 64)
    highest = int(wide_split[next(iter(order))].max())
    split = PackedSplit("wide", wide_split.stretches, 8, highest)
    with pytest.raises(UserError, match=str(highest)):
        next(read_rows(split, order, CPU))


# ------------------------------------------------------------------ mixtures


@pytest.mark.parametrize("weights", [[0.3, 0.7], [1, 1, 1], [5, 3, 1, 1], [0.001, 0.999], [0.9, *[0.1 / 19] * 19]])
@pytest.mark.parametrize("first", [0, 123_456_789_012])
def test_any_thousand_examples_of_a_mixture_have_its_shares(weights, first):
    """Within one percent; every example of each dataset follows the one before it."""
    examples = np.arange(first, first + 20_000)
    datasets, numbers = split_examples(examples, whole_shares(weights))
    for index, weight in enumerate(weights):
        own = datasets == index
        windows = np.convolve(own, np.ones(1000, dtype=int), mode="valid")
        assert abs(windows / 1000 - weight / sum(weights)).max() <= 0.01
        assert (np.diff(numbers[own]) == 1).all()
        assert first or numbers[own][0] == 0
    parts = [split_examples(part, whole_shares(weights)) for part in np.array_split(examples, 7)]
    assert np.array_equal(np.concatenate([of for of, _ in parts]), datasets)


def test_each_dataset_of_a_mixture_keeps_its_own_order(dataset_dir, other):
    """Each dataset is drawn without replacement, and starts its next epoch when it ends."""
    mixture = open_datasets([dataset_dir, other], BLOCK_SIZE, [0.3, 0.7])
    alone = [open_packed_dataset(folder, BLOCK_SIZE).train for folder in (dataset_dir, other)]
    order = TrainOrder(len(mixture.train), 5, 8, 4, parts=order_of(mixture))
    rows = np.concatenate(list(itertools.islice(order, 200)))
    first = len(alone[0])
    for found, split in ((rows[rows < first], alone[0]), (rows[rows >= first] - first, alone[1])):
        assert np.array_equal(found, example_rows(np.arange(len(found)), len(split), 5))
    assert len(found) > 2 * len(alone[1])  # two epochs and more
    assert np.array_equal(mixture.train[np.arange(first, len(mixture.train))], alone[1][np.arange(len(alone[1]))])


def test_without_weights_all_datasets_end_their_first_epoch_together(dataset_dir, other):
    """The shares follow the numbers of rows."""
    mixture = open_datasets([dataset_dir, other], BLOCK_SIZE, None)
    rows = next(iter(TrainOrder(1, 5, 1, len(mixture.train), parts=order_of(mixture))))
    assert sorted(rows.tolist()) == list(range(len(mixture.train)))
