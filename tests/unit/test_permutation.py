from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest

from spmd_rl.data.permutation import Permutation, mix


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000, 65_537])
def test_every_row_once(size):
    order = Permutation(size, seed=7, epoch=3)(np.arange(size))
    assert sorted(order.tolist()) == list(range(size))


def test_any_part_equals_the_whole():
    permutation = Permutation(10_007, seed=1)
    whole = permutation(np.arange(10_007))
    index = np.array([10_006, 0, 5, 5, 4_321])
    assert permutation(index).tolist() == whole[index].tolist()


def test_seed_and_epoch_change_the_order():
    orders = {tuple(Permutation(50, seed, epoch)(np.arange(50))) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_order_is_fixed_for_ever():
    """A checkpoint's cursor means the same rows in every later version."""
    assert Permutation(10, seed=0, epoch=0)(np.arange(10)).tolist() == [6, 2, 0, 4, 3, 5, 9, 7, 1, 8]
    assert mix(1, -2, 3) == 9675851771621011105


@pytest.mark.parametrize("size", [3, 5])
def test_all_orders_of_few_rows_are_equally_likely(size):
    counts: dict[tuple[int, ...], int] = {}
    trials = 2_400
    for seed in range(trials):
        order = tuple(Permutation(size, seed)(np.arange(size)))
        counts[order] = counts.get(order, 0) + 1
    orders = int(np.prod(np.arange(1, size + 1)))
    expected = trials / orders
    chi_square = sum((c - expected) ** 2 / expected for c in counts.values()) + expected * (orders - len(counts))
    assert chi_square < orders + 6 * np.sqrt(2 * orders), (chi_square, orders)


def test_neighbours_are_spread():
    """No correlation between a row's number and its place, nor between neighbours."""
    order = Permutation(100_000, seed=5)(np.arange(100_000))
    assert abs(np.corrcoef(np.arange(100_000), order)[0, 1]) < 0.02
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02


def test_hundred_million_rows_take_no_time_and_no_memory():
    tracemalloc.start()
    begin = time.perf_counter()
    permutation = Permutation(100_000_000, seed=0, epoch=1)
    some = permutation(np.arange(99_999_000, 100_000_000))
    seconds, (_, peak) = time.perf_counter() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(some.tolist())) == 1000 and some.min() >= 0 and some.max() < 100_000_000
    assert seconds < 1 and peak < 1e6


def test_outside_is_refused():
    with pytest.raises(IndexError, match=r"\[0, 5\)"):
        Permutation(5, 0)(np.array([5]))
    assert Permutation(0, 0)(np.arange(0)).tolist() == []
    assert Permutation(2**40, 0)(np.array([2**40 - 1]))[0] < 2**40
