import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchllm.data.described_sources import rounded_shares
from torchllm.data.held_out import first_epoch
from torchllm.data.order import (
    DataOrder,
    Location,
    MixtureSlot,
    Permutation,
    PlannedStage,
    mixture_counts,
    mixture_shares,
    mixture_table,
)

pytestmark = pytest.mark.quick
sizes = st.integers(1, 1000)
seeds = st.integers(0, 2**63 - 1)


@settings(derandomize=True, deadline=None)
@given(sizes, seeds)
def test_a_permutation_visits_each_number_once(size: int, seed: int) -> None:
    permutation = Permutation(size, seed)
    assert sorted(map(permutation, range(size))) == list(range(size))


STAGES = [
    PlannedStage(0, 90, (1.0, 0.0, 2.0)),
    PlannedStage(0, 91, (0.0, 1.0, 0.0)),
    PlannedStage(0, 300, (1.0, 1.0, 0.0)),
]


def test_a_stage_goes_on_with_each_source_where_the_one_before_has_left_it() -> None:
    source_sizes, end = [5, 70, 31], 500
    order = DataOrder(3, source_sizes, [0.0, 5.0, 1.0], STAGES)
    alone = [DataOrder(3, source_sizes, weights).locate for weights in np.eye(3).tolist()]
    used = [0, 0, 0]
    for n in range(end):
        location = order.locate(n)
        assert location == alone[location.source](used[location.source])
        assert [order.uses(source, n) for source in range(3)] == used
        used[location.source] += 1
    first = 0
    for stage in [*STAGES, PlannedStage(0, end, (0.0, 5.0, 1.0))]:
        length = stage.end - first
        for source, weight in enumerate(stage.weights):
            share = order.uses(source, stage.end) - order.uses(source, first)
            assert abs(share - length * weight / sum(stage.weights)) < 1
        first = stage.end


def test_the_same_weights_in_two_stages_are_one() -> None:
    whole, cut = DataOrder(3, [5, 7], [3, 1]), DataOrder(3, [5, 7], [3, 1], [PlannedStage(0, 16, (3, 1))])
    assert [whole.locate(n) for n in range(60)] == [cut.locate(n) for n in range(60)]


def test_the_order_is_fixed() -> None:
    """A changed order would silently break the resume of every run: these are what the first version gave."""
    permutation = Permutation(1000, 7, 0, 0)
    assert [permutation(i) for i in range(6)] == [407, 411, 385, 196, 488, 412]
    order = DataOrder(3, [5, 7], [3, 1])
    places = [(0, 0, 4), (0, 0, 0), (1, 0, 3), (0, 0, 3), (0, 0, 2), (0, 0, 1), (1, 0, 0), (0, 1, 0)]
    assert [order.locate(n) for n in range(8)] == [Location(*place) for place in places]


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=4), seeds, st.data())
def test_each_epoch_of_each_source_is_a_permutation(sizes: list[int], seed: int, data: st.DataObject) -> None:
    weight = st.sampled_from([0.1, 0.25, 1.0, 2.0, 7.0])
    weights = data.draw(st.lists(weight, min_size=len(sizes), max_size=len(sizes)))
    order = DataOrder(seed, sizes, weights)
    visited: dict[tuple[int, int], list[int]] = {}
    epochs = [-1] * len(sizes)
    for n in range(1500):
        source, epoch, number = order.locate(n)
        assert epoch in (epochs[source], epochs[source] + 1)  # no epoch is skipped or comes back
        epochs[source] = epoch
        visited.setdefault((source, epoch), []).append(number)
    for (source, epoch), numbers in visited.items():
        assert len(set(numbers)) == len(numbers)
        if epoch < epochs[source]:
            assert sorted(numbers) == list(range(sizes[source]))


def test_mixture_counts() -> None:
    for weights, counts in (
        ([5.0], [1]),
        ([0.7, 0.3], [7, 3]),
        ([1, 1, 1], [1, 1, 1]),
        ([0.1, 0.2], [1, 2]),
        ([1e-9, 1.0], [1, 9999]),
        ([math.pi, 1.0], [7585, 2415]),
    ):
        assert mixture_counts(mixture_shares(weights)) == counts


def test_what_is_rounded_is_told() -> None:
    assert rounded_shares([0.7, 0.3]) == []
    assert rounded_shares([math.pi, 1.0]) == []  # by less than 1 %
    (rare,) = rounded_shares([1.0 - 1e-6, 1e-6])
    assert (rare.source, rare.wanted, rare.used) == (1, 1e-6, 1e-4)
    rounded = rounded_shares([1234567, 98765, 432, 77])
    assert [(share.source, round(share.used / share.wanted, 2)) for share in rounded] == [(2, 0.93), (3, 1.73)]


def slow_mixture_table(counts: list[int]) -> list[MixtureSlot]:
    """The definition: each entry goes to the source that lags its share most, the first of several."""
    block = sum(counts)
    taken = [0] * len(counts)
    table = []
    for length in range(1, block + 1):
        lags = [count * length - done * block for count, done in zip(counts, taken, strict=True)]
        source = lags.index(max(lags))
        table.append(MixtureSlot(source, taken[source]))
        taken[source] += 1
    return table


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 12) | st.sampled_from([1, 1, 2, 3, 40]), min_size=1, max_size=40))
def test_a_mixture_is_its_definition(counts: list[int]) -> None:
    assert mixture_table(counts) == slow_mixture_table(counts)


class CountingOrder(DataOrder):
    located = 0

    def locate(self, n: int) -> Location:
        self.located += 1
        return super().locate(n)


def slow_first_epoch(order: DataOrder, sizes: list[int], count: int) -> list[Location]:
    """The definition: walk the run and take the sequences of epoch 0."""
    locations: list[Location] = []
    n = 0
    while len(locations) < min(count, sum(sizes)):
        location = order.locate(n)
        if location.epoch == 0:
            locations.append(location)
        n += 1
    return locations


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(1, 80), st.data())
def test_the_first_epoch_is_its_definition(sizes: list[int], count: int, data: st.DataObject) -> None:
    weight = st.sampled_from([0.1, 1.0, 2.0, 7.0])
    weights = data.draw(st.lists(weight, min_size=len(sizes), max_size=len(sizes)))
    order = DataOrder(0, sizes, weights)
    assert first_epoch(order, sizes, weights, count) == slow_first_epoch(order, sizes, count)


def test_the_first_epoch_does_not_walk_past_an_exhausted_source() -> None:
    """Of source 0 the run reads 10 sequences 1,000 times before source 1 has given its tenth."""
    sizes, weights = [10, 100], [1000, 1]
    order = CountingOrder("validation", sizes, weights)
    assert len(first_epoch(order, sizes, weights, 64)) == 64
    assert order.located == 64
