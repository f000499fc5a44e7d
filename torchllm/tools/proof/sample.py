"""Draw layouts of a space: a few that cover every pair of settings, one per mesh, or any.

Greedy: the next layout has the most pairs of settings never drawn before, relative to the cost of its training.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from torchllm.tools.proof.layouts import AXES, MICRO_BATCH, LayoutSpace, Settings, ranks_of

THRIFT = 0.4
"""power of the cost that a layout's new pairs are divided by: with 1 a sample is longer and no cheaper"""


def training_seconds(space: LayoutSpace, layout: Settings) -> float:
    """Return the seconds that three steps take on two idle cores, roughly (fitted to 18 layouts of the tests)."""
    ranks = ranks_of(layout)
    sharing = layout["parallel.cp"] * layout["parallel.tp"]
    config = space.sized(layout)
    layers = config.model.layers
    block_passes = config.training.global_batch_size / layout.get(MICRO_BATCH, 6) * layers * sharing
    seconds_per_pass = 0.03 if sharing > 1 else 0.005
    return 0.4 + 0.05 * ranks + 0.06 * ranks * layers / layout["parallel.pp"] + seconds_per_pass * block_passes


class SettingPair(NamedTuple):
    """Two settings: indices of their keys, and numbers of their values."""

    a: int
    value_a: int
    b: int
    value_b: int


class PairNumbers:
    """Numbers every pair of settings, so that numpy can go through all layouts at once.

    Settings are numbers here, not values. 0 is a pair with a setting that has no effect.
    """

    def __init__(self, values: Mapping[str, Sequence[Any]]) -> None:
        """Number the pairs of settings. Micro batches only count as one or several."""
        counts = np.array([2 if key == MICRO_BATCH else len(of_key) for key, of_key in values.items()])
        self.a, self.b = np.triu_indices(len(counts), k=1)
        self.counts_b = counts[self.b]
        self.first = 1 + np.cumsum([0, *(counts[self.a] * self.counts_b)])
        self.total = int(self.first[-1])

    def of(self, numbers: Any, keys: int | None = None) -> np.ndarray:
        """Return the numbers of pairs: of settings (..., all keys) -> of pairs (..., keys (keys - 1) / 2).

        keys: how many keys count, the first ones; None: all.
        """
        counted = self.b < (len(self.b) if keys is None else keys)
        value_a = np.asarray(numbers)[..., self.a[counted]]
        value_b = np.asarray(numbers)[..., self.b[counted]]
        has_no_effect = (value_a < 0) | (value_b < 0)
        pairs = self.first[:-1][counted] + value_a * self.counts_b[counted] + value_b
        return np.where(has_no_effect, 0, pairs).astype(np.int32)

    def pair(self, number: int) -> SettingPair:
        """Return the pair of a number: the reverse of `of`."""
        index = int(np.searchsorted(self.first, number, side="right")) - 1
        value_a, value_b = divmod(number - int(self.first[index]), int(self.counts_b[index]))
        return SettingPair(int(self.a[index]), value_a, int(self.b[index]), value_b)


class LayoutSampler:
    """Draws layouts, and options for them; those first whose pairs of settings have been drawn least often.

    Every value is a separate setting, with two exceptions: the micro batches in a step only count as one or several;
    and the degrees, unless `exact`, only as 1, 2 or more.
    """

    def __init__(self, space: LayoutSpace, layouts: Sequence[Settings], seed: int, exact: bool) -> None:
        """Draw from these layouts of a space, which have no options yet."""
        self.space = space
        self.settings = space.settings  # which puts them together anew each time
        self.keys = list(self.settings)
        self.layouts = layouts
        self.random = np.random.default_rng(seed)
        self.exact = exact
        self.pairs = PairNumbers(self.settings)
        self.values = np.array([self.numbers(layout) for layout in layouts], dtype=np.int32)
        self.pairs_of_layout = self.pairs.of(self.values, keys=len(space.combined))
        self.costs = np.array([training_seconds(space, layout) for layout in layouts])
        self.drawn = np.zeros(self.pairs.total)
        self.worth = np.ones(self.pairs.total)  # of a pair: 1 if it was never drawn, little otherwise
        self.worth[0] = 0.0

    def number(self, key: str, layout: Settings) -> int:
        """Return the number of a setting's value, -1 where the setting has no effect."""
        if key not in layout:
            return -1
        if key == MICRO_BATCH:  # one in a step, or several
            data_ranks = layout["parallel.dp_replicate"] * layout["parallel.dp_shard"]
            return int(layout[key] * data_ranks < self.space.sized(layout).training.global_batch_size)
        number = self.settings[key].index(layout[key])
        return min(number, 2) if key in AXES and not self.exact else number

    def numbers(self, layout: Settings) -> list[int]:
        """Return the numbers of all of a layout's values, in the order of the keys."""
        return [self.number(key, layout) for key in self.keys]

    @functools.cached_property
    def possible(self) -> np.ndarray:
        """Return which pairs occur together in some valid layout, with some options; (pairs,) bool."""
        possible = np.zeros(self.pairs.total, dtype=bool)
        possible[self.pairs_of_layout] = True
        # For options one layout per choice of the parallel settings is enough, taken at random: the other combined
        # settings (recompute mode, family, tied embeddings) do not matter to most of them.
        representatives = {}
        for index in self.random.permutation(len(self.layouts)):
            parallel = tuple(item for item in self.layouts[index].items() if item[0].startswith("parallel."))
            representatives[parallel] = index
        among = np.array(list(representatives.values()))
        for number in range(1, self.pairs.total):
            if not possible[number]:
                possible[number] = any(True for _ in self.having(number, among))
        possible[0] = False
        return possible

    def having(self, number: int, among: np.ndarray) -> Iterator[Settings]:
        """Yield the valid layouts among these with a pair of settings, at least one of them an option."""
        pair = self.pairs.pair(number)
        number_of_option = {}
        for key_index, value_number in ((pair.a, pair.value_a), (pair.b, pair.value_b)):
            if self.keys[key_index] in self.space.options:
                number_of_option[self.keys[key_index]] = value_number
        if not number_of_option:
            return
        if len(number_of_option) == 1:  # options come last in the keys: the other setting is the first of the pair
            among = among[self.values[among, pair.a] == pair.value_a]
        for index in among:
            candidates = [self.layouts[index]]
            for key, number_of_value in number_of_option.items():
                candidates = self.with_value(candidates, key, number_of_value)
            candidate = next(filter(self.space.is_valid, candidates), None)
            if candidate is not None:
                yield candidate

    def with_value(self, layouts: Iterable[Settings], key: str, number: int) -> list[Settings]:
        """Return layouts with one more option: each of its values that have this number."""
        extended = []
        for layout in layouts:
            for value in self.space.choices(key, layout):
                candidate = {**layout, key: value}
                if self.number(key, candidate) == number:
                    extended.append(candidate)
        return extended

    def complete(self, layout: Settings) -> Settings:
        """Return a layout with a value for every option that it lacks, each the valid one of most worth."""
        for key in [key for key in self.space.options if key not in layout]:
            candidates = [{**layout, key: value} for value in self.space.choices(key, layout)]
            candidates.sort(key=lambda candidate: -self.worth_of(candidate))
            layout = next(filter(self.space.is_valid, candidates), layout)
        return {key: layout[key] for key in self.keys if key in layout}

    def best(self, layouts: Iterable[Settings]) -> Settings:
        """Complete these layouts with options; draw and return the one of most worth for its cost."""
        complete = [self.complete(layout) for layout in layouts]
        best = max(
            complete,
            key=lambda layout: self.worth_of(layout) / training_seconds(self.space, layout) ** THRIFT,
        )
        self.count(best)
        return best

    def count(self, layout: Settings) -> None:
        """Note that a layout is drawn."""
        drawn = self.pairs.of(self.numbers(layout))
        self.drawn[drawn] += 1
        self.worth[drawn] = 1e-3 / self.drawn[drawn]
        self.worth[0] = 0.0

    def worth_of(self, layout: Settings) -> float:
        """Return the sum of the worth of a layout's pairs."""
        return float(self.worth[self.pairs.of(self.numbers(layout))].sum())

    def promising(self, indices: np.ndarray, count: int = 8) -> list[Settings]:
        """Return the layouts of most worth for their cost among these, before they have options."""
        worth = self.worth[self.pairs_of_layout[indices]].sum(-1) / self.costs[indices] ** THRIFT
        order = np.argsort(-worth * self.random.uniform(1.0, 1.001, len(indices)))
        return [self.layouts[index] for index in indices[order[:count]]]

    def cover(self) -> Iterator[Settings]:
        """Draw layouts until every possible pair of settings has been drawn, cheap ones where there is a choice."""
        while (missing := np.flatnonzero(self.possible & (self.drawn == 0))).size:
            of_layouts = [pair for pair in missing if self.pairs.pair(int(pair)).b < len(self.space.combined)]
            if of_layouts:
                yield self.best(self.promising(np.arange(len(self.layouts))))
            else:
                having = self.having(self.random.choice(missing), self.random.permutation(len(self.layouts)))
                yield self.best(itertools.islice(having, 20))


def covering(
    space: LayoutSpace, layouts: Sequence[Settings], seed: int, done: Sequence[Settings] = ()
) -> list[Settings]:
    """Return a few layouts that, together with `done`, cover every possible pair of settings."""
    sampler = LayoutSampler(space, layouts, seed, exact=False)
    for layout in done:
        sampler.count(layout)
    return list(sampler.cover())
