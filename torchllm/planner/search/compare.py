"""Say why a plan takes another layout than the user's: term by term, part by part of the memory, and by which rule.

No torch.
"""

from collections.abc import Iterator, Mapping

from torchllm.planner.predict import predict
from torchllm.planner.search.advice import (
    AS_FAST,
    LEVELS_OF_SIMPLICITY,
    Advice,
    level_of,
    pick,
    pick_lines,
    ratio_of,
)
from torchllm.planner.search.layouts import Job, Layout
from torchllm.planner.search.search import Ranked
from torchllm.planner.search.validity import RISK, memory_limit

GIB = 2**30


def compare(job: Job, layout: Layout, advice: Advice) -> Iterator[str]:
    """Yield lines on a layout beside the first pick."""
    mine = Ranked(layout, predict(job.case(layout)))
    yield from pick_lines(pick("yours", job, mine), advice.first)
    yield from pick_lines(advice.simple, advice.first)
    if layout == advice.first.layout:
        yield "They are the same layout."
        return
    yield ""
    yield from _table("seconds per step", mine.prediction.terms, advice.first.prediction.terms, 1.0)
    yield ""
    memory, first_memory = mine.prediction.memory._asdict(), advice.first.prediction.memory._asdict()
    yield from _table("GiB of the fullest rank", memory, first_memory, GIB)
    yield ""
    yield f"Why not yours: {why_not(job, mine, advice)}."
    yield f"Why the first pick: {advice.reason}."


def _table(title: str, mine: Mapping[str, float], first: Mapping[str, float], unit: float) -> Iterator[str]:
    """Yield a line per part, the largest difference first, and their sum; parts that neither has are omitted."""
    yield f"{title:26}{'yours':>12}{'first pick':>12}{'difference':>12}"
    names = list(dict.fromkeys([*mine, *first]))
    differences = {name: mine.get(name, 0.0) - first.get(name, 0.0) for name in names}
    for name in sorted(names, key=lambda name: -abs(differences[name])):
        if mine.get(name) or first.get(name):
            yield _line(name, mine.get(name, 0.0) / unit, first.get(name, 0.0) / unit)
    yield _line("sum", sum(mine.values()) / unit, sum(first.values()) / unit)


def _line(name: str, mine: float, first: float) -> str:
    return f"  {name:24}{mine:12.4g}{first:12.4g}{mine - first:+12.3g}"


def why_not(job: Job, mine: Ranked, advice: Advice) -> str:
    """Return the rule by which a layout is not the first pick."""
    case = job.case(mine.layout)
    of_mine = pick("yours", job, mine)
    limit = memory_limit(case)
    held = mine.prediction.memory.total
    if of_mine.fits == "does not fit":
        return f"it needs {(held - job.hardware.memory) / GIB:.1f} GiB more than a GPU has"
    if held > limit:
        return (
            f"it needs {held / GIB:.1f} GiB, above the {limit / GIB:.1f} GiB up to which a plan goes; its risk of "
            f"running out of memory is {of_mine.out_of_memory:.0%} (a pick's is at most {RISK:.0%})"
        )
    slower = mine.prediction.step / advice.first.prediction.step - 1
    if slower >= 0:
        return f"it is predicted {slower:.1%} slower; {_largest_difference(mine, advice.first)}"
    mine_level, first_level = level_of(mine.layout), level_of(advice.first.layout)
    if mine_level <= first_level:
        return "it is as simple and predicted faster, but was not searched: report this"
    needs = LEVELS_OF_SIMPLICITY[mine_level].name
    if -slower <= AS_FAST:
        return f"it needs {needs} and is predicted {-slower:.1%} faster, which is within what nobody can predict"
    low, high = ratio_of(job, advice.first, mine).interval
    return (
        f"it needs {needs} and is predicted {-slower:.1%} faster, but pairs of measured layouts say that the first "
        f"pick takes {low:.2f} to {high:.2f} times its step"
    )


def _largest_difference(mine: Ranked, first: Ranked) -> str:
    """Return which term speaks most against a layout."""
    terms, others = mine.prediction.terms, first.prediction.terms
    name = max(terms, key=lambda name: terms[name] - others.get(name, 0.0))
    return f"most of it is {name}, {terms[name] - others.get(name, 0.0):+.3g} s"
