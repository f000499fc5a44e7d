"""Say why a plan takes another layout than the user's: by term, by part of the memory, and by the rule that decided.

No torch.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torchllm.tools.planner.predict import predict
from torchllm.tools.planner.search.advice import (
    AS_FAST,
    LEVELS_OF_SIMPLICITY,
    Advice,
    level_of,
    pick,
    pick_lines,
    ratio_of,
)
from torchllm.tools.planner.search.explain import GIB, missing_memory
from torchllm.tools.planner.search.layouts import Job, Layout
from torchllm.tools.planner.search.search import Ranked
from torchllm.tools.planner.validity import RISK, memory_limit


def compare(job: Job, layout: Layout, advice: Advice) -> Iterator[str]:
    """Yield lines that compare a layout with the first pick."""
    yours, first = Ranked(layout, predict(job.case(layout))), advice.first
    yield from pick_lines(pick("yours", job, yours), first)
    yield from pick_lines(advice.simple._replace(title="first pick"), first)
    if layout == first.layout:
        yield "They are the same layout."
        return
    yield ""
    yield from _table("seconds per step", yours.prediction.terms, first.prediction.terms, 1.0)
    yield ""
    memory, first_memory = yours.prediction.memory._asdict(), first.prediction.memory._asdict()
    yield from _table("GiB of the fullest rank", memory, first_memory, GIB)
    yield ""
    yield f"Why not yours: {why_not(job, yours, advice)}."
    yield f"Why the first pick: {advice.reason}."
    yield f"Intervals of the first pick: {advice.evidence}."


def _table(title: str, yours: Mapping[str, float], first: Mapping[str, float], unit: float) -> Iterator[str]:
    """Yield a line per part, the largest difference first, and their sum; parts that neither has are omitted."""
    yield f"{title:26}{'yours':>12}{'first pick':>12}{'difference':>12}"
    lines = []
    for name in dict.fromkeys([*yours, *first]):
        your_part, first_part = yours.get(name, 0.0) / unit, first.get(name, 0.0) / unit
        if your_part or first_part:
            lines.append(Line(name, your_part, first_part))
    lines.sort(key=lambda line: -abs(line.difference))
    lines.append(Line("sum", sum(yours.values()) / unit, sum(first.values()) / unit))
    for line in lines:
        yield f"  {line.name:24}{line.yours:12.4g}{line.first:12.4g}{line.difference:+12.3g}"


class Line(NamedTuple):
    """A part of a step's time or of the memory, of two layouts."""

    name: str
    yours: float
    first: float

    @property
    def difference(self) -> float:
        """Excess of yours over the first pick."""
        return self.yours - self.first


def why_not(job: Job, yours: Ranked, advice: Advice) -> str:
    """Return the rule that a layout fails, so that it is not the first pick."""
    too_large = _why_too_large(job, yours)
    if too_large:
        return too_large
    first = advice.first
    faster = 1 - yours.prediction.step / first.prediction.step
    if faster <= 0:
        return f"it is predicted {-faster:.1%} slower; {_largest_difference(yours, first)}"
    level, first_level = level_of(yours.layout), level_of(first.layout)
    if level <= first_level:
        return "it is as simple and predicted faster, but was not searched: report this"
    needs = LEVELS_OF_SIMPLICITY[level].name
    advantage = f"it needs {needs} and is predicted {faster:.1%} faster"
    if faster <= AS_FAST:
        return f"{advantage}, which is within the error of any prediction"
    low, high = ratio_of(job, first, yours).interval
    return (
        f"{advantage}, but pairs of measured layouts say that the first pick takes {low:.2f} to {high:.2f} times its "
        "step"
    )


def _why_too_large(job: Job, yours: Ranked) -> str:
    """Return why a layout needs too much memory for a plan; empty if it does not."""
    your_pick = pick("yours", job, yours)
    needed = yours.prediction.memory.total
    if your_pick.fits == "does not fit":
        missing = missing_memory(job, yours.prediction)
        return f"it {missing}; {_largest_part(yours)}" if needed > job.hardware.memory else f"it {missing}"
    limit = memory_limit(job.hardware)
    if needed <= limit:
        return ""
    return (
        f"it needs {needed / GIB:.1f} GiB, above a plan's limit of {limit / GIB:.1f} GiB; "
        f"{_largest_part(yours)}; its risk of running out of memory is {your_pick.out_of_memory:.0%} "
        f"(a pick's is at most {RISK:.0%})"
    )


def _largest_part(yours: Ranked) -> str:
    """Return the largest part of a layout's memory."""
    parts = yours.prediction.memory._asdict()
    largest = max(parts, key=lambda name: parts[name])
    return f"most of it is {largest}, {parts[largest] / GIB:.1f} GiB"


def _largest_difference(yours: Ranked, first: Ranked) -> str:
    """Return which term speaks most against a layout."""
    differences = {}
    for name, seconds in yours.prediction.terms.items():
        differences[name] = seconds - first.prediction.terms.get(name, 0.0)
    largest = max(differences, key=lambda name: differences[name])
    return f"most of it is {largest}, {differences[largest]:+.3g} s"
