"""Order: a pure function of (seed, dataset), the same however it is cut up."""

import numpy as np
import pytest
import torch

from recipe.data.batches import TrainOrder, build_train_batches, example_rows, iterate_validation

FROZEN = [5, 597, 782, 629, 771, 972, 361, 714]


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 64, 65, 1000, 4097])
@pytest.mark.parametrize("seed", [0, 1337, 2**63 - 1])
def test_each_epoch_is_a_permutation(num_rows, seed):
    """No row is drawn twice before all were drawn once."""
    for epoch in (0, 1, 5):
        rows = example_rows(np.arange(epoch * num_rows, (epoch + 1) * num_rows), num_rows, seed)
        assert sorted(rows.tolist()) == list(range(num_rows))


def test_epochs_and_seeds_differ_and_look_random():
    """Shuffled: neighbours are not kept, epochs and seeds agree in about one position of `n`, all moves are used."""
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
    """The first rows of an order, written down: a resumed run of next year sees the same examples."""
    assert example_rows(np.arange(8), 1000, 1337).tolist() == FROZEN


def test_example_rows_is_pure():
    """Any subset in any order gives the same rows: position is one integer."""
    whole = example_rows(np.arange(500), 77, 3)
    some = np.array([499, 0, 77, 76, 154, 3])
    np.testing.assert_array_equal(example_rows(some, 77, 3), whole[some])


@pytest.mark.parametrize(
    ("micro_batch_size", "num_processes"), [(12, 1), (4, 1), (1, 1), (6, 2), (2, 2), (1, 3), (4, 3)]
)
def test_a_step_uses_the_same_examples_however_it_is_cut(micro_batch_size, num_processes):
    """Step s is examples [s*G, (s+1)*G), for any micro-batch and number of processes, from any starting step."""
    global_batch_size, num_rows = 12, 50
    for first_step in (0, 3):
        seen = []
        for process in range(num_processes):
            order = iter(
                TrainOrder(num_rows, 5, global_batch_size, micro_batch_size, first_step, process, num_processes)
            )
            per_step = global_batch_size // micro_batch_size // num_processes
            seen.append([np.concatenate([next(order) for _ in range(per_step)]) for _ in range(4)])
        for step in range(4):
            start = (first_step + step) * global_batch_size
            expected = example_rows(np.arange(start, start + global_batch_size), num_rows, 5)
            found = np.concatenate([process_steps[step] for process_steps in seen])
            assert sorted(found.tolist()) == sorted(expected.tolist())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_the_rows_of_the_order(dataset, num_workers):
    """Inputs and targets are int64, shifted by one, in the order's order, with and without workers."""
    split = dataset.splits["train"]
    order = TrainOrder(len(split), 1, 6, 3)
    batches = build_train_batches(split, order, num_workers, torch.device("cpu"))
    expected = iter(order)
    for _ in range(5):
        inputs, targets = next(batches)
        rows = torch.from_numpy(split[next(expected)])
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(inputs, rows[:, :-1]) and torch.equal(targets, rows[:, 1:])


@pytest.mark.parametrize(("batch_size", "num_processes"), [(1, 1), (3, 1), (4, 2), (5, 3), (64, 2)])
def test_validation_takes_each_row_once(dataset, batch_size, num_processes):
    """Every process has as many batches, all of one shape; the real rows are the split, each once."""
    split = dataset.splits["validation"]
    per_process = [list(iterate_validation(split, batch_size, p, num_processes)) for p in range(num_processes)]
    assert len({len(batches) for batches in per_process}) == 1
    real = [rows[:num_real] for batches in per_process for rows, num_real in batches]
    assert all(rows.shape[0] == batch_size for batches in per_process for rows, _ in batches)
    found = sorted(map(tuple, np.concatenate(real).tolist()))
    assert found == sorted(map(tuple, split[np.arange(len(split))].tolist()))
