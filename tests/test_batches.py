"""The order of examples is a pure function of (seed, dataset), for any micro-batch and number of processes."""

import itertools

import numpy as np
import pytest
import torch

from recipe.data.batches import TrainBatches, TrainOrder, example_rows, iterate_validation, read_rows, row_shift
from recipe.data.packed import PackedSplit, TokenWriter
from recipe.errors import UserError

CPU = torch.device("cpu")
FROZEN = [5, 597, 782, 629, 771, 972, 361, 714]
FROZEN_SHIFTS = [0, 485, 138, 240, 276, 476]


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 64, 65, 1000, 4097])
@pytest.mark.parametrize("seed", [0, 1337, 2**63 - 1])
def test_each_epoch_is_a_permutation(num_rows, seed):
    """Every row is drawn once before any is drawn twice."""
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
    """The first rows of an order are written down here, because a run resumed next year must see the same examples."""
    assert example_rows(np.arange(8), 1000, 1337).tolist() == FROZEN
    assert row_shift(np.arange(6), 1024).tolist() == FROZEN_SHIFTS


def test_rows_never_move_by_a_constant_distance():
    """A model learns a text that moves by the same number of tokens in every epoch, also where it has not been yet."""
    for below in (64, 256, 1024, 1000):
        shifts = row_shift(np.arange(100), below)
        assert shifts[0] == 0 and shifts.min() >= 0 and shifts.max() < below
        distances = np.diff(shifts) % below
        assert np.unique(distances, return_counts=True)[1].max() < 10
        assert len(np.unique(shifts)) > 0.5 * min(100, below)


def test_example_rows_is_pure():
    """Any subset in any order has the same rows, so a position is one integer."""
    whole = example_rows(np.arange(500), 77, 3)
    some = np.array([499, 0, 77, 76, 154, 3])
    np.testing.assert_array_equal(example_rows(some, 77, 3), whole[some])


@pytest.mark.parametrize(
    ("micro_batch_size", "num_processes"), [(12, 1), (4, 1), (1, 1), (6, 2), (2, 2), (1, 3), (4, 3)]
)
@pytest.mark.parametrize("first", [0, 31])
def test_a_step_uses_the_same_examples_for_any_batch_shape(micro_batch_size, num_processes, first):
    """A step is the next G examples for any micro-batch, number of processes and first example."""
    seen = []
    for process in range(num_processes):
        order = iter(TrainOrder(50, 5, 12, micro_batch_size, first, process, num_processes))
        per_step = 12 // micro_batch_size // num_processes
        seen.append([np.concatenate([next(order) for _ in range(per_step)]) for _ in range(4)])
    for step in range(4):
        start = first + step * 12
        expected = example_rows(np.arange(start, start + 12), 50, 5)
        found = np.concatenate([process_steps[step] for process_steps in seen])
        assert sorted(found.tolist()) == sorted(expected.tolist())


def test_a_run_that_loses_and_regains_devices_uses_each_example_once():
    """From 8 processes to 6 and back: batches of 512, 510 and 512, each for three steps."""
    seen, first = [], 0
    for num_processes, batch, size in ((8, 512, 16), (6, 510, 17), (8, 512, 32)):
        orders = [
            iter(TrainOrder(5000, 1, batch, size, first, p, num_processes).examples()) for p in range(num_processes)
        ]
        seen += [next(order) for order in orders for _ in range(3 * batch // (size * num_processes))]
        first += 3 * batch
    assert sorted(np.concatenate(seen).tolist()) == list(range(first))


@pytest.fixture(scope="module")
def wide_split(tmp_path_factory):
    """Rows of two units, with ids of 16 bits. One row begins in the first and ends in the second."""
    folder, chunks = tmp_path_factory.mktemp("wide"), []
    for name, seed in (("0.arrow", 0), ("1.arrow", 1)):
        writer = TokenWriter(folder / name, 65_536)
        writer.write(np.random.default_rng(seed).integers(0, 65_536, 1001))
        writer.close()
        chunks += [[name, *chunk] for chunk in writer.chunks]
    return PackedSplit(folder, chunks, 8, 65_536)


@pytest.mark.parametrize(("placement", "num_workers"), [("mmap", 0), ("mmap", 2), ("ram", 0), ("device", 0)])
def test_batches_are_the_rows_of_the_order(wide_split, placement, num_workers):
    """Inputs and targets are int64, shifted by one, in the same order for every placement."""
    order = TrainOrder(len(wide_split), 1, 96, 48, shift_below=8)
    batches = TrainBatches(read_rows(wide_split, order, CPU, num_workers, placement), CPU)
    for indices in itertools.islice(order, 2 * len(wide_split) // 48 + 2):  # more than two epochs
        inputs, targets = next(batches)
        rows = torch.from_numpy(wide_split[indices])
        assert inputs.dtype == targets.dtype == torch.int64 and batches.position is None
        assert torch.equal(inputs, rows[:, :-1]) and torch.equal(targets, rows[:, 1:])
    batches.close()


def test_each_epoch_cuts_the_text_elsewhere(wide_split):
    """Every token of a dataset is a target once, but for the first `shift` (never) and as many at the end (twice)."""
    split, T = PackedSplit.joined([wide_split, wide_split]), 8  # tokens of a row
    tokens = wide_split.in_memory().chunks[0]
    num_rows, shifts = len(wide_split), []
    for epoch in range(4):
        order = TrainOrder(len(split), 3, 1, 1, shift_below=T, parts=((num_rows, 1), (num_rows, 1)))
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


@pytest.mark.parametrize("placement", ["mmap", "ram", "device"])
def test_every_placement_rejects_an_id_beyond_the_vocabulary(wide_split, placement):
    """The first one, too. On CUDA it would cause a device-side assert."""
    order = TrainOrder(len(wide_split), 1, 64, 64)
    highest = int(wide_split[next(iter(order))].max())
    split = PackedSplit(wide_split.directory, wide_split.where, 8, highest)
    with pytest.raises(UserError, match=f"beyond its vocabulary of {highest}"):
        next(read_rows(split, order, CPU, 0, placement))


def test_batches_do_not_draw_from_torchs_generator(wide_split):
    """Dropout after a resume would differ."""
    before = torch.get_rng_state()
    batches = TrainBatches(read_rows(wide_split, TrainOrder(len(wide_split), 1, 8, 8), CPU), CPU)
    next(batches)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("batch_size", "num_processes"), [(1, 1), (3, 1), (4, 2), (5, 3), (64, 2)])
def test_validation_takes_each_row_once(dataset, batch_size, num_processes):
    """Every process has the same number of batches of one shape, and the rows that count are the split, each once."""
    split = dataset.validation
    per_process = [
        list(iterate_validation(split, len(split), batch_size, p, num_processes)) for p in range(num_processes)
    ]
    assert len({len(batches) for batches in per_process}) == 1
    real = [rows[:num_real] for batches in per_process for rows, num_real in batches]
    assert all(rows.shape[0] == batch_size for batches in per_process for rows, _ in batches)
    found = sorted(map(tuple, np.concatenate(real).tolist()))
    assert found == sorted(map(tuple, split[np.arange(len(split))].tolist()))


@pytest.mark.parametrize("num_rows", [1, 7, 20])
def test_a_sample_of_the_validation_rows_is_spread_over_the_split(dataset, num_rows):
    """A sample takes distinct rows at equal distances, starting at the first row."""
    split = dataset.validation
    found = np.concatenate([rows[:n] for rows, n in iterate_validation(split, num_rows, 3, 0, 1)])
    expected = [i * len(split) // num_rows for i in range(num_rows)]
    assert len(set(expected)) == num_rows < len(split)
    assert (found == split[np.array(expected)]).all()
