"""Draws layouts from the lattice: a few that cover every pair of settings, one per mesh, or any.

Greedy: the next layout is the one with the most pairs of settings never drawn before, for what it costs to train.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.lattice import AXES, LAYOUT, MICRO_BATCH, OPTIONS, SIZES, Layout, choices, is_valid, lattice, settings_of


def cost(layout: Layout) -> float:
    """Return the seconds that `parity.check` takes on two idle cores, roughly (fitted to 18 layouts)."""
    ranks = math.prod(layout[axis] for axis in AXES)
    sharing = layout["parallel.cp"] * layout["parallel.tp"]
    layers = settings_of(layout)["model.layers"]
    block_passes = 24 / layout.get(MICRO_BATCH, 6) * layers * sharing
    seconds_per_pass = 0.03 if sharing > 1 else 0.005
    return 0.4 + 0.05 * ranks + 0.06 * ranks * layers / layout["parallel.pp"] + seconds_per_pass * block_passes


# Settings are numbers here, not values, so that numpy can go through all layouts at once. Every pair of settings has a
# number; 0 is a pair of which one setting has no effect.

KEYS = [*LAYOUT, *OPTIONS]
_COUNTS = np.array([2 if key == MICRO_BATCH else len(values) for key, values in (LAYOUT | OPTIONS).items()])
_A, _B = np.triu_indices(len(KEYS), k=1)
_FIRST = 1 + np.cumsum([0, *(_COUNTS[_A] * _COUNTS[_B])])
PAIRS = int(_FIRST[-1])
THRIFT = 0.4
"""power of the cost that a layout's new pairs are divided by: with 1 a sample is longer and no cheaper"""


class Pair(NamedTuple):
    """Two settings: indices of their keys in KEYS, and numbers of their values."""

    a: int
    value_a: int
    b: int
    value_b: int


def pair_of(number: int) -> Pair:
    """Return the pair of a number: the reverse of `pairs`."""
    index = int(np.searchsorted(_FIRST, number, side="right")) - 1
    a, b = int(_A[index]), int(_B[index])
    value_a, value_b = divmod(number - int(_FIRST[index]), int(_COUNTS[b]))
    return Pair(a, value_a, b, value_b)


class Sampler:
    """Draws layouts, and options for them; those first whose pairs of settings have been drawn least often.

    Every value is a setting of its own, with two exceptions: of the micro batches in a step it only counts whether they
    are one or several; and of the degrees, unless `exact`, whether they are 1, 2 or more.
    """

    def __init__(self, layouts: Sequence[Layout], seed: int, exact: bool) -> None:
        self.layouts = layouts
        self.random = np.random.default_rng(seed)
        self.exact = exact
        self.values = np.array([self.numbers(layout) for layout in layouts], dtype=np.int32)
        self.pairs = pairs(self.values)[:, len(LAYOUT) > _B].astype(np.int16)
        self.costs = np.array([cost(layout) for layout in layouts])
        self.drawn = np.zeros(PAIRS)
        self.worth = np.ones(PAIRS)  # of a pair: 1 if it was never drawn, little otherwise
        self.worth[0] = 0.0

    def number(self, key: str, layout: Layout) -> int:
        """Return the number of a setting's value, -1 where the setting has no effect."""
        if key not in layout:
            return -1
        if key == MICRO_BATCH:  # one in a step, or several
            ranks = layout["parallel.dp_replicate"] * layout["parallel.dp_shard"]
            return int(layout[key] * ranks < SIZES["training.global_batch_size"])
        number = (LAYOUT | OPTIONS)[key].index(layout[key])
        return min(number, 2) if key in AXES and not self.exact else number

    def numbers(self, layout: Layout) -> list[int]:
        """Return the numbers of all of a layout's values, in the order of KEYS."""
        return [self.number(key, layout) for key in KEYS]

    @functools.cached_property
    def possible(self) -> np.ndarray:
        """Return which pairs occur together in some valid layout, with some options; (PAIRS,) bool."""
        possible = np.zeros(PAIRS, dtype=bool)
        possible[self.pairs] = True
        # For options one layout per choice of the parallel settings is enough, taken at random: recompute mode, family
        # and tied embeddings, a layout's last three settings, do not matter to them.
        representatives = {}
        for index in self.random.permutation(len(self.layouts)):
            parallel = tuple(self.layouts[index].items())[:-3]
            representatives[parallel] = index
        among = np.array(list(representatives.values()))
        for number in range(1, PAIRS):
            if not possible[number]:
                possible[number] = any(True for _ in self.having(number, among))
        possible[0] = False
        return possible

    def having(self, number: int, among: np.ndarray) -> Iterator[Layout]:
        """Yield the valid layouts among these with a pair of settings, of which at least one is an option."""
        pair = pair_of(number)
        number_of_option = {}
        for key_index, value_number in ((pair.a, pair.value_a), (pair.b, pair.value_b)):
            if KEYS[key_index] in OPTIONS:
                number_of_option[KEYS[key_index]] = value_number
        if not number_of_option:
            return
        if len(number_of_option) == 1:  # options come last in KEYS: the other setting is the first of the pair
            among = among[self.values[among, pair.a] == pair.value_a]
        for index in among:
            layout = self.layouts[index]
            candidates = [
                [
                    {key: value}
                    for value in choices(key, layout)
                    if self.number(key, {**layout, key: value}) == wanted_number
                ]
                for key, wanted_number in number_of_option.items()
            ]
            for options in itertools.product(*candidates):
                candidate = dict(layout)
                for option in options:
                    candidate |= option
                if is_valid(candidate):
                    yield candidate
                    break

    def complete(self, layout: Layout) -> Layout:
        """Return a layout with a value for every option that it lacks, each the valid one of most worth."""
        for key in [key for key in OPTIONS if key not in layout]:
            candidates = [{**layout, key: value} for value in choices(key, layout)]
            candidates.sort(key=lambda candidate: -self.worth_of(candidate))
            layout = next(filter(is_valid, candidates), layout)
        return {key: layout[key] for key in KEYS if key in layout}

    def best(self, layouts: Iterable[Layout]) -> Layout:
        """Complete these layouts with options; draw and return the one of most worth for its cost."""
        complete = [self.complete(layout) for layout in layouts]
        best = max(complete, key=lambda layout: self.worth_of(layout) / cost(layout) ** THRIFT)
        self.count(best)
        return best

    def count(self, layout: Layout) -> None:
        """Note that a layout is drawn."""
        drawn = pairs(self.numbers(layout))
        self.drawn[drawn] += 1
        self.worth[drawn] = 1e-3 / self.drawn[drawn]
        self.worth[0] = 0.0

    def worth_of(self, layout: Layout) -> float:
        """Return the sum of the worth of a layout's pairs."""
        return float(self.worth[pairs(self.numbers(layout))].sum())

    def promising(self, indices: np.ndarray, count: int = 8) -> list[Layout]:
        """Return the layouts of most worth for their cost among these, before they have options."""
        worth = self.worth[self.pairs[indices]].sum(-1) / self.costs[indices] ** THRIFT
        order = np.argsort(-worth * self.random.uniform(1.0, 1.001, len(indices)))
        return [self.layouts[index] for index in indices[order[:count]]]

    def cover(self) -> list[Layout]:
        """Draw layouts until every possible pair of settings has been drawn, cheap ones where there is a choice."""
        rows = []
        while (missing := np.flatnonzero(self.possible & (self.drawn == 0))).size:
            of_layouts = [pair for pair in missing if pair_of(pair).b < len(LAYOUT)]
            if of_layouts:
                rows.append(self.best(self.promising(np.arange(len(self.layouts)))))
            else:
                having = self.having(self.random.choice(missing), self.random.permutation(len(self.layouts)))
                rows.append(self.best(itertools.islice(having, 20)))
        return rows


def pairs(numbers: Any) -> np.ndarray:
    """Return the numbers of the pairs of settings: `Sampler.numbers` (..., keys) -> (..., keys (keys - 1) / 2)."""
    value_a = np.asarray(numbers)[..., _A]
    value_b = np.asarray(numbers)[..., _B]
    has_no_effect = (value_a < 0) | (value_b < 0)
    return np.where(has_no_effect, 0, _FIRST[:-1] + value_a * _COUNTS[_B] + value_b)


def covering(seed: int) -> list[Layout]:
    """Return a few layouts that have every possible pair of settings among them."""
    return Sampler(lattice().layouts, seed, exact=False).cover()


MESH = (*AXES, "parallel.schedule", "parallel.cp_method", "parallel.sequence_parallel")
"""what `every_mesh` combines in full"""


def every_mesh(seed: int, done: Sequence[Layout] = ()) -> list[Layout]:
    """Draw every mesh x schedule x cp method x sequence parallelism, then every pair of settings still missing.

    done: layouts that need not be drawn.
    """
    sampler = Sampler(lattice().layouts, seed, exact=True)
    groups: dict[Any, list[int]] = {}
    for index, layout in enumerate(sampler.layouts):
        groups.setdefault(tuple(map(layout.get, MESH)), []).append(index)
    for layout in done:
        sampler.count(layout)
        groups.pop(tuple(map(layout.get, MESH)), None)
    return [sampler.best(sampler.promising(np.array(indices))) for indices in groups.values()] + sampler.cover()


def at_random(count: int, seed: int) -> list[Layout]:
    """Draw `count` of all layouts, each as likely, with options that have been drawn least often."""
    sampler = Sampler(lattice().layouts, seed, exact=True)
    indices = sampler.random.choice(len(sampler.layouts), count, replace=False)
    return [sampler.best([sampler.layouts[index]]) for index in indices]
