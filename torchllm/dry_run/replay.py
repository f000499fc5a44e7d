"""A whole step of any number of micro batches and pipeline ranks, put together from a traced one of a few.

What an action does to memory and what it sends follows from its kind (F, B, ...), its stage, and the kinds of the
stage's actions before it (weights that are still there need not be gathered) and after it (which may gather before it
has begun, as torch counts). Apart are the first backward (sums of gradients begin) and the last (they are reduced).
Each such action is traced once; the true order of the schedule says how often each comes, and what is under way
together.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from torchllm.dry_run.memory import Bytes, Span, each_largest, largest, plus

_ACTION = re.compile(r"(\d+)([A-Z_]+)")
_MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")

Key = tuple[tuple[int, str, str, str, bool, bool], ...]
"""of an action, or of the two that DualPipeV runs as one: position of the stage on its rank, kind, kinds before and
after it on the stage, first backward of its kind, last one"""


class Traced(NamedTuple):
    """A step that was run."""

    spans: list[Span]
    """ "begin", the actions in their order, "tail" (norm, clipping, update)"""
    keys: list[Key]
    """of the actions"""
    micro_batches: int
    each: Bytes
    """what each micro batch adds throughout its forwards and backwards (its tokens, buffers to receive in)"""
    each_tail: Bytes
    """and after them"""
    saved: list[int]
    """bytes that each forward pass left, for its backward"""


class Step(NamedTuple):
    """A whole step of one rank."""

    peak: Bytes
    """when most memory was held"""
    most: Bytes
    """of each purpose, when that was largest"""
    end: Bytes
    """when the gradients were complete"""
    sent: dict[tuple[str, str], tuple[int, float]]
    """axis and kind of collective -> how many, bytes in all"""


def keys(order: Sequence[str], stages: Sequence[int]) -> list[Key]:
    """Of actions named like 2F0 or (2F1;5B0)OVERLAP_F_B; `stages`: this rank's."""
    actions = [[(stages.index(int(stage)), kind) for stage, kind in _ACTION.findall(name)] for name in order]
    total = Counter(action for entry in actions for action in entry)
    done: Counter[tuple[int, str]] = Counter()
    before: dict[int, str] = {}
    of_stages: dict[int, list[str]] = defaultdict(list)
    for position, kind in chain(*actions):
        of_stages[position] += [kind] * (kind not in _MESSAGES)
    after = {position: kinds[1:] for position, kinds in of_stages.items()}
    found: list[Key] = []
    for entry in actions:
        key = []
        for action in entry:
            position, kind = action
            done[action] += 1
            if kind in _MESSAGES:
                key.append((position, kind, "", "", False, False))
                continue
            first, last = done[action] == 1, done[action] == total[action]
            around = before.get(position, ""), after[position].pop(0) if after[position] else ""
            key.append((position, kind, *around, first and kind != "F", last and kind in ("B", "W")))
            before[position] = kind
        found.append(tuple(key))
    return found


def replay(traced: Traced, order: Sequence[Key], micro_batches: int) -> Step:
    """The step of `order`. KeyError: an action is not like any of the traced ones."""
    begin, *actions, tail = traced.spans
    costs = dict(zip(traced.keys, actions, strict=True))
    more = micro_batches - traced.micro_batches
    level = plus(begin.end, traced.each, more)
    peaks, most = [plus(begin.peak, traced.each, more)], plus(begin.most, traced.each, more)
    for key in order:
        cost = costs[key]
        peaks.append(plus(level, plus(cost.peak, cost.start, -1)))
        most = each_largest(most, plus(level, plus(cost.most, cost.start, -1)))
        level = plus(level, plus(cost.end, cost.start, -1))
    level = plus(plus(level, traced.each, -more), traced.each_tail, more)
    peaks.append(plus(level, plus(tail.peak, tail.start, -1)))
    return Step(largest(peaks), most, level, _sum_of_sent([begin, *(costs[key] for key in order), tail]))


def _sum_of_sent(spans: Sequence[Span]) -> dict[tuple[str, str], tuple[int, float]]:
    found: dict[tuple[str, str], tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for span in spans:
        for one in span.sent:
            count, total = found[one.axis, one.kind]
            found[one.axis, one.kind] = count + 1, total + one.bytes
    return dict(found)
