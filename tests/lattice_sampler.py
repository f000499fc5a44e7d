"""Draws of the lattice's layouts: few that cover every pair of settings, every mesh, or any.

Greedy: the next layout is the one that has most pairs of settings never drawn before, for what it costs to train.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.lattice import AXES, LAYOUT, MICRO_BATCH, OPTIONS, SIZES, Layout, choices, is_valid, lattice, settings_of


def cost(layout: Layout) -> float:
    """Seconds that `parity.check` takes on two idle cores, roughly (fitted to 18 layouts)."""
    ranks, sharing = math.prod(layout[axis] for axis in AXES), layout["parallel.cp"] * layout["parallel.tp"]
    layers = settings_of(layout)["model.layers"]
    passes = 24 / layout.get(MICRO_BATCH, 6) * layers * sharing
    each = 0.03 if sharing > 1 else 0.005
    return 0.4 + 0.05 * ranks + 0.06 * ranks * layers / layout["parallel.pp"] + each * passes


# Numbers instead of values, so that all layouts are looked through at once. Every pair of settings has a number; 0 is a
# pair of which one does nothing.

KEYS = [*LAYOUT, *OPTIONS]
_COUNTS = np.array([2 if key == MICRO_BATCH else len(values) for key, values in (LAYOUT | OPTIONS).items()])
_A, _B = np.triu_indices(len(KEYS), k=1)
_FIRST = 1 + np.cumsum([0, *(_COUNTS[_A] * _COUNTS[_B])])
PAIRS = int(_FIRST[-1])
THRIFT = 0.4
"""power of the cost that a layout's new pairs are divided by: with 1 a sample is longer and no cheaper"""


class Pair(NamedTuple):
    """Two settings: places in KEYS, and numbers of their values."""

    a: int
    value: int
    b: int
    other: int


def pair_of(number: int) -> Pair:
    """The reverse of what `Sampler.pairs` does."""
    place = int(np.searchsorted(_FIRST, number, side="right")) - 1
    value, other = divmod(number - int(_FIRST[place]), int(_COUNTS[_B[place]]))
    return Pair(int(_A[place]), value, int(_B[place]), other)


class Sampler:
    """Draws of some layouts, and options for them, those first whose pairs of settings have been drawn least.

    Every value is a setting of its own, but of the micro batches in a step only whether they are one or several, and of
    the degrees, unless `exact`, whether they are 1, 2 or more.
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
        """Of a setting's value, -1 where it does nothing."""
        if key not in layout:
            return -1
        if key == MICRO_BATCH:  # one in a step, or several
            ranks = layout["parallel.dp_replicate"] * layout["parallel.dp_shard"]
            return int(layout[key] * ranks < SIZES["training.global_batch_size"])
        number = (LAYOUT | OPTIONS)[key].index(layout[key])
        return min(number, 2) if key in AXES and not self.exact else number

    def numbers(self, layout: Layout) -> list[int]:
        """Of all of a layout's values, in the order of KEYS."""
        return [self.number(key, layout) for key in KEYS]

    @functools.cached_property
    def possible(self) -> np.ndarray:
        """Which pairs occur together in some valid layout, with some options; (PAIRS,) bool."""
        found = np.zeros(PAIRS, dtype=bool)
        found[self.pairs] = True
        # Enough for options: recompute, family and tied embeddings, of which one is taken at random, do not matter.
        order = self.random.permutation(len(self.layouts))
        few = np.array(list({tuple(self.layouts[index].items())[:-3]: index for index in order}.values()))
        for number in range(1, PAIRS):
            found[number] = found[number] or any(True for _ in self.having(number, few))
        found[0] = False
        return found

    def having(self, number: int, among: np.ndarray) -> Iterator[Layout]:
        """The valid layouts among these with a pair of settings, of which at least one is an option."""
        pair = pair_of(number)
        wanted = {KEYS[k]: value for k, value in (pair[:2], pair[2:]) if KEYS[k] in OPTIONS}
        if len(wanted) == 1:
            among = among[self.values[among, pair.a] == pair.value]
        for index in among if wanted else ():
            layout = self.layouts[index]
            options = [
                [(key, value) for value in choices(key, layout) if self.number(key, {**layout, key: value}) == number]
                for key, number in wanted.items()
            ]
            valid = filter(is_valid, ({**layout, **dict(chosen)} for chosen in itertools.product(*options)))
            yield from itertools.islice(valid, 1)

    def complete(self, layout: Layout) -> Layout:
        """A layout with options where it has none yet, those of most worth."""
        for key in [key for key in OPTIONS if key not in layout]:
            candidates = [{**layout, key: value} for value in choices(key, layout)]
            candidates.sort(key=lambda candidate: -self.worth_of(candidate))
            layout = next(filter(is_valid, candidates), layout)
        return {key: layout[key] for key in KEYS if key in layout}

    def best(self, layouts: Iterable[Layout]) -> Layout:
        """Of these, with options, the one of most worth for its cost; drawn."""
        complete = [self.complete(layout) for layout in layouts]
        best = max(complete, key=lambda layout: self.worth_of(layout) / cost(layout) ** THRIFT)
        self.count(best)
        return best

    def count(self, layout: Layout) -> None:
        """A layout is drawn."""
        drawn = pairs(self.numbers(layout))
        self.drawn[drawn] += 1
        self.worth[drawn] = 1e-3 / self.drawn[drawn]
        self.worth[0] = 0.0

    def worth_of(self, layout: Layout) -> float:
        """Of its pairs together."""
        return float(self.worth[pairs(self.numbers(layout))].sum())

    def promising(self, indices: np.ndarray, count: int = 8) -> list[Layout]:
        """The layouts of most worth for their cost among these, before they have options."""
        worth = self.worth[self.pairs[indices]].sum(-1) / self.costs[indices] ** THRIFT
        order = np.argsort(-worth * self.random.uniform(1.0, 1.001, len(indices)))
        return [self.layouts[index] for index in indices[order[:count]]]

    def cover(self) -> list[Layout]:
        """Layouts until every possible pair of settings has been drawn, cheap ones where there is a choice."""
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
    """The numbers of the pairs of settings in `Sampler.numbers`, (..., keys) -> (..., keys (keys - 1) / 2)."""
    one, other = np.asarray(numbers)[..., _A], np.asarray(numbers)[..., _B]
    return np.where((one < 0) | (other < 0), 0, _FIRST[:-1] + one * _COUNTS[_B] + other)


def covering(seed: int) -> list[Layout]:
    """Few layouts with every possible pair of settings."""
    return Sampler(lattice().layouts, seed, exact=False).cover()


MESH = (*AXES, "parallel.schedule", "parallel.cp_method", "parallel.sequence_parallel")
"""what `every_mesh` combines in full"""


def every_mesh(seed: int, done: Sequence[Layout] = ()) -> list[Layout]:
    """Every mesh x schedule x cp method x sequence parallelism; then every pair of settings that this left out.

    Without those that are `done`.
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
    """`count` of all layouts, each as likely, their options in turn."""
    sampler = Sampler(lattice().layouts, seed, exact=True)
    indices = sampler.random.choice(len(sampler.layouts), count, replace=False)
    return [sampler.best([sampler.layouts[index]]) for index in indices]
