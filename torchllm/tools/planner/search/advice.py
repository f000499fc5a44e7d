"""Choose the simplest layout that is almost as fast as the fastest and fits in memory. No torch.

Of each level of simplicity, in the order of `LEVELS_OF_SIMPLICITY`, the fastest layout is taken that leaves room in
memory. The one with the least step time *in the bad case* is the fastest to bet on: a layout of a kind that has hardly
been measured has a wide interval, and must be much faster. The simplest wins that is predicted to be at most `AS_FAST`
slower than that one, or that measurements cannot tell from it: if the 90 % interval of the ratio of the two step times
contains 1, and the expected loss is at most `SMALL_LOSS`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torchllm.tools.planner.residuals import Spread
from torchllm.tools.planner.search.bounds import Bounds
from torchllm.tools.planner.search.layouts import Job, Layout
from torchllm.tools.planner.search.search import Found, Ranked, Search, search
from torchllm.tools.planner.validity import (
    RISK,
    is_measured,
    judge,
    memory_limit,
    spread_of_pair,
)

AS_FAST = 0.02
"""share of the fastest layout's step time that is below any prediction's error"""
SMALL_LOSS = 0.03
"""expected loss that is worth a simpler layout, if it may also be no loss"""
WIDEST = 4.0
"""slowest over fastest step of an interval, beyond which a prediction is no advice"""


class Level(NamedTuple):
    """Layouts that use nothing more complex than this."""

    name: str
    without: dict[str, int]
    """degrees that are 1"""


LEVELS_OF_SIMPLICITY = (
    Level("FSDP", {"pp": 1, "cp": 1, "tp": 1, "dp_replicate": 1}),
    Level("HSDP", {"pp": 1, "cp": 1, "tp": 1}),
    Level("tp", {"pp": 1, "cp": 1}),
    Level("pp", {"cp": 1}),
    Level("cp", {}),
)
"""the simplest first; expert parallelism is not a level: experts need it"""


class Pick(NamedTuple):
    """A layout to choose, with its pessimistic estimate."""

    title: str
    ranked: Ranked
    fits: str
    seconds: tuple[float, float]
    """interval that holds 90 % of the step times of rows like it"""
    out_of_memory: float
    """probability"""


class Advice(NamedTuple):
    """The three layouts that answer "which one?", and why the first of them is the first."""

    simple: Pick
    bet: Pick
    if_right: Pick
    reason: str
    """rule that decided for the simple one"""
    is_measured: bool
    """whether this framework was measured on this GPU"""
    evidence: str
    """rows that the intervals of the simple one are from"""
    candidates: list[Ranked]
    """layouts of every level that fit"""

    @property
    def first(self) -> Ranked:
        """The layout to take."""
        return self.simple.ranked

    @property
    def is_known(self) -> bool:
        """Whether the step of the layout to take is known well enough to advise it."""
        low, high = self.simple.seconds
        return high <= WIDEST * low

    @property
    def picks(self) -> tuple[Pick, Pick, Pick]:
        """The three, the one to take first."""
        return self.simple, self.bet, self.if_right


class Ratio(NamedTuple):
    """The step time of a simple layout divided by another layout's."""

    predicted: float
    interval: tuple[float, float]
    """of 90 % of the pairs of rows like them"""
    mean: float
    """geometric, so that it does not depend on the order of the two"""

    def within_error(self) -> bool:
        """Return whether the simple layout is as good a choice, as far as measurements can tell."""
        low, high = self.interval
        return low <= 1 <= high and self.mean - 1 <= SMALL_LOSS


def advise(job: Job, outcome: Found) -> Advice:
    """Return which layouts to consider. outcome: of `search`, whose best may leave no room in memory."""
    candidates = list(_safe(job, outcome.bounds))
    if candidates:
        bet = min(candidates, key=lambda ranked: judge(job.case(ranked.layout), ranked.prediction).seconds[1])
        simple, reason = simplest(job, candidates, bet)
    else:
        roomy = search(job, count=1, objective="memory", bounds=outcome.bounds).best[0]
        simple = bet = roomy
        reason = (
            f"every layout's risk of running out of memory is above {RISK:.0%}; of those that are nearly the fastest, "
            "this one leaves most room"
        )
    case = job.case(simple.layout)
    return Advice(
        pick("the simple one", job, simple),
        pick("the fastest we would bet on", job, bet),
        pick("the fastest if the model is right", job, outcome.best[0]),
        reason,
        is_measured(case),
        judge(case, simple.prediction).evidence,
        [*candidates, simple],
    )


def pick(title: str, job: Job, ranked: Ranked) -> Pick:
    """Return a layout with its pessimistic estimate."""
    verdict = judge(job.case(ranked.layout), ranked.prediction)
    return Pick(title, ranked, verdict.fits, verdict.seconds, verdict.out_of_memory)


def level_of(layout: Layout) -> int:
    """Return the index of the first of `LEVELS_OF_SIMPLICITY` that has this layout."""
    degrees = layout._asdict()
    if layout.dp_shard == 1:
        degrees["dp_replicate"] = 1  # plain data parallelism has one data axis, whatever its name
    for index, level in enumerate(LEVELS_OF_SIMPLICITY):
        if all(degrees[axis] == 1 for axis in level.without):
            return index
    raise AssertionError("the last level has all layouts")


def _safe(job: Job, bounds: Bounds | None) -> Iterator[Ranked]:
    """Yield the fastest layout of each level that leaves room in memory, the simplest level first."""
    layouts = set()
    for level in LEVELS_OF_SIMPLICITY:
        ranked = fastest_of(job, level, bounds)
        if ranked is not None and ranked.layout not in layouts:
            layouts.add(ranked.layout)
            yield ranked


def fastest_of(job: Job, level: Level, bounds: Bounds | None) -> Ranked | None:
    """Return the fastest layout of a level that stays below its limit of memory; None if there is none.

    bounds: of the job; None: there are none yet.
    """
    restricted = only(job, level.without)
    if restricted is None:
        return None
    best = Search(within_risk(restricted), count=1, bounds=bounds).find_best().best
    return best[0] if best else None


def within_risk(job: Job) -> Job:
    """Return the job with as much memory as a pick may need."""
    return replace(job, hardware=replace(job.hardware, memory=memory_limit(job.hardware)))


def only(job: Job, without: dict[str, int]) -> Job | None:
    """Return the job with these degrees fixed; None if the run sets one of them to something else."""
    if any(job.fixed.get(key, degree) != degree for key, degree in without.items()):
        return None
    fixed: dict[str, Any] = {**job.fixed, **without}
    return replace(job, fixed=fixed)


def simplest(job: Job, candidates: Sequence[Ranked], bet: Ranked) -> tuple[Ranked, str]:
    """Return the layout that the rule takes, and why. candidates: the fastest of each level, simplest first."""
    name = LEVELS_OF_SIMPLICITY[level_of(bet.layout)].name
    for simple in candidates:
        if simple.layout == bet.layout:
            return simple, "it has the least step time in the bad case, and no simpler one comes close"
        ratio = ratio_of(job, simple, bet)
        slower = f"it is predicted {ratio.predicted - 1:.1%} slower than the fastest to bet on, which needs {name}"
        if ratio.predicted <= 1 + AS_FAST:
            return simple, slower
        if ratio.within_error():
            low, high = ratio.interval
            pairs = f"pairs of measured layouts say {low:.2f} to {high:.2f} times its step, {ratio.mean:.2f} on average"
            return simple, f"{slower}; {pairs}"
    raise AssertionError("the fastest to bet on is one of them")


def ratio_of(job: Job, simple: Ranked, complex: Ranked) -> Ratio:
    """Return the step time of the simple layout divided by the complex one's, with the spread of measured pairs."""
    predicted = simple.prediction.step / complex.prediction.step
    spread = reversed_spread(spread_of_pair(job.case(simple.layout), job.case(complex.layout)))
    low, high = spread.interval
    return Ratio(predicted, (predicted * math.exp(low), predicted * math.exp(high)), predicted * math.exp(spread.mean))


def reversed_spread(spread: Spread) -> Spread:
    """Return the residuals of the inverse ratios."""
    return spread._replace(quantiles=tuple(-quantile for quantile in reversed(spread.quantiles)))


def pick_lines(choice: Pick, first: Ranked) -> Iterator[str]:
    """Yield a line with the layout, and one with its expected and its pessimistic step time."""
    prediction = choice.ranked.prediction
    low, high = choice.seconds
    comparison = ""
    if choice.ranked.layout != first.layout:
        change = prediction.step / first.prediction.step - 1
        comparison = f" ({change:+.1%})"
    yield f"{choice.title}: {choice.ranked.layout.text()}"
    yield (
        f"    {prediction.step:.4g} s per step{comparison}, {low:.4g} to {high:.4g} s in 9 of 10 cases; "
        f"out of memory in {100 * choice.out_of_memory:.0f} of 100"
    )


def advice_lines(advice: Advice) -> Iterator[str]:
    """Yield the three picks, the rule that decided, and the sources of the intervals."""
    shown: dict[Layout, Pick] = {}
    for choice in advice.picks:
        layout = choice.ranked.layout
        if layout in shown:
            yield f"{choice.title}: the same as {shown[layout].title}"
            continue
        shown[layout] = choice
        yield from pick_lines(choice, advice.first)
    if advice.is_known:
        yield f"Take the first: {advice.reason}."
    else:
        low, high = advice.simple.seconds
        yield (
            f"Which is the fastest is not known: the first's step is known to a factor of {high / low:.0f} only. "
            "Measure the first two runs below before you decide (--write-sweep writes them)."
        )
    yield f"Intervals: {advice.evidence}."
