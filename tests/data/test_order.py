import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchllm.data.order import DataOrder, Permutation, mixture_counts, mixture_table

sizes = st.integers(1, 1000)
seeds = st.integers(0, 2**63 - 1)


@given(sizes, seeds)
def test_a_permutation_is_one(size: int, seed: int) -> None:
    permutation = Permutation(size, seed)
    assert sorted(map(permutation, range(size))) == list(range(size))


def test_a_permutation_mixes() -> None:
    size = 10_000
    order = np.array([Permutation(size, 1)(i) for i in range(size)])
    # of a random one: neighbours a third of the size apart, no correlation with the place (standard error 0.01)
    assert abs(np.abs(np.diff(order)).mean() / size - 1 / 3) < 0.01
    assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.04
    assert (order == [Permutation(size, 2)(i) for i in range(size)]).mean() < 0.002


def test_every_element_comes_first_about_as_often() -> None:
    counts = np.bincount([Permutation(10, seed)(0) for seed in range(10_000)], minlength=10)
    assert np.all(np.abs(counts - 1000) < 150)  # 5 standard deviations


def test_the_order_is_fixed() -> None:
    """A changed order would silently break the resume of every run: these are what the first version gave."""
    assert [Permutation(1000, 7, 0, 0)(i) for i in range(6)] == FIRST_OF_7
    assert [DataOrder(3, [5, 7], [3, 1]).locate(n) for n in range(8)] == FIRST_OF_3


@settings(max_examples=40, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=4), seeds, st.data())
def test_each_epoch_of_each_source_is_a_permutation(sizes: list[int], seed: int, data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.sampled_from([0.1, 0.25, 1.0, 2.0, 7.0]), min_size=len(sizes), max_size=len(sizes)))
    order = DataOrder(seed, sizes, weights)
    seen: dict[tuple[int, int], list[int]] = {}
    epochs = [-1] * len(sizes)
    for n in range(1500):
        source, epoch, number = order.locate(n)
        assert epoch in (epochs[source], epochs[source] + 1)  # one epoch after the other
        epochs[source] = epoch
        seen.setdefault((source, epoch), []).append(number)
    for (source, epoch), numbers in seen.items():
        assert len(set(numbers)) == len(numbers)
        if epoch < epochs[source]:
            assert sorted(numbers) == list(range(sizes[source]))


def test_epochs_differ() -> None:
    order = DataOrder(0, [100], [1.0])
    first, second = ([order.locate(n)[2] for n in range(start, start + 100)] for start in (0, 100))
    assert sorted(first) == sorted(second)
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 10


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([5.0], [1]),
        ([0.7, 0.3], [7, 3]),
        ([1, 1, 1], [1, 1, 1]),
        ([0.1, 0.2], [1, 2]),
        ([1e-9, 1.0], [1, 9999]),
        ([math.pi, 1.0], [7585, 2415]),
    ],
)
def test_mixture_counts(weights: list[float], counts: list[int]) -> None:
    assert mixture_counts(weights) == counts


@given(st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_a_mixture_is_exact_in_blocks_and_even_within(counts: list[int]) -> None:
    table = mixture_table(counts)
    block = sum(counts)
    taken = [0] * len(counts)
    for place, (source, before) in enumerate(table, start=1):
        assert before == taken[source]
        taken[source] += 1
        for s, count in enumerate(counts):
            assert abs(taken[s] - count * place / block) < len(counts)
    assert taken == counts


def test_far_out_is_as_quick_as_the_start() -> None:
    order = DataOrder(0, [10**12, 10**9], [3.0, 1.0])
    start = time.process_time()
    order.locate(10**15)
    assert time.process_time() - start < 0.01


@given(st.lists(st.integers(1, 20), min_size=1, max_size=3), st.integers(1, 80))
def test_first_gives_each_once(sizes: list[int], count: int) -> None:
    found = DataOrder("validation", sizes, [1.0 + s for s in range(len(sizes))]).first(count)
    assert len(found) == len(set(found)) == min(count, sum(sizes))
    assert all(number < sizes[source] for source, number in found)


FIRST_OF_7 = [407, 411, 385, 196, 488, 412]
FIRST_OF_3 = [(0, 0, 4), (0, 0, 0), (1, 0, 3), (0, 0, 3), (0, 0, 2), (0, 0, 1), (1, 0, 0), (0, 1, 0)]
