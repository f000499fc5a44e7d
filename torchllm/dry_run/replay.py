"""A whole step of any number of micro batches and pipeline ranks, put together from a traced one of a few.

What an action does to memory and what it sends follows from its kind (F, B, ...), its stage, and the kinds of the
stage's actions before it (weights that are still there need not be gathered) and after it (which may gather before it
has begun, as torch counts). Apart are the first backward (sums of gradients begin) and the last (they are reduced).
Each such action is traced once; the true order of the schedule says how often each comes, and what is under way
together.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchllm.dry_run.memory import Bytes, Span, each_largest, largest, plus

_ACTION = re.compile(r"(\d+)([A-Z_]+)")
_MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")


class ActionKind(NamedTuple):
    """What decides an action's memory and messages. Two actions of one kind cost the same: one of them is traced."""

    stage: int
    """position of the stage among this rank's stages"""
    kind: str
    """F, B, I, W, or a message"""
    previous: str = ""
    """kind of the action before it on the same stage: weights may still be gathered; messages do not count"""
    following: str = ""
    """kind of the action after it on the same stage: it may gather its weights ahead"""
    starts_gradients: bool = False
    """first backward of its kind on the stage: sums of gradients are allocated"""
    finishes_gradients: bool = False
    """last backward of the stage: its gradients are reduced"""


Key = tuple[ActionKind, ...]
"""one action, or the two that DualPipeV runs as one"""


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


class ReplayedStep(NamedTuple):
    """A whole step of one rank."""

    peak: Bytes
    """when most memory was held"""
    most: Bytes
    """of each purpose, when that was largest"""
    end: Bytes
    """when the gradients were complete"""
    sent: dict[tuple[str, str], tuple[int, float]]
    """axis and kind of collective -> how many, bytes in all"""


def action_keys(order: Sequence[str], stages: Sequence[int]) -> list[Key]:
    """Return the key of each action of `order`, which are named like 2F0 or (2F1;5B0)OVERLAP_F_B.

    stages: global indices of this rank's stages.
    """
    entries: list[list[tuple[int, str]]] = []
    """of each entry of the order the position of the stage, and the kind"""
    for name in order:
        entries.append([(stages.index(int(stage)), kind) for stage, kind in _ACTION.findall(name)])
    kinds_of_action = iter(_action_kinds([action for entry in entries for action in entry]))
    return [tuple(next(kinds_of_action) for _ in entry) for entry in entries]


def _action_kinds(actions: Sequence[tuple[int, str]]) -> Iterator[ActionKind]:
    """Yield the kind of each (stage, kind) of a rank's step, in its order."""
    kinds_of_stage: dict[int, list[str]] = defaultdict(list)
    for stage, kind in actions:
        if kind not in _MESSAGES:
            kinds_of_stage[stage].append(kind)
    total = Counter(actions)
    done: Counter[tuple[int, str]] = Counter()
    computed: Counter[int] = Counter()
    for stage, kind in actions:
        if kind in _MESSAGES:
            yield ActionKind(stage, kind)
            continue
        kinds, place = kinds_of_stage[stage], computed[stage]
        is_first = done[stage, kind] == 0
        is_last = done[stage, kind] == total[stage, kind] - 1
        yield ActionKind(
            stage,
            kind,
            previous=kinds[place - 1] if place > 0 else "",
            following=kinds[place + 1] if place + 1 < len(kinds) else "",
            starts_gradients=is_first and kind != "F",
            finishes_gradients=is_last and kind in ("B", "W"),
        )
        computed[stage] += 1
        done[stage, kind] += 1


def replay(traced: Traced, order: Sequence[Key], micro_batches: int) -> ReplayedStep:
    """Put the step of `order` together from a traced one. KeyError: an action is of no traced kind."""
    begin, *actions, tail = traced.spans
    span_of_key = dict(zip(traced.keys, actions, strict=True))
    missing = micro_batches - traced.micro_batches
    level = plus(begin.end, traced.each, missing)
    peaks = [plus(begin.peak, traced.each, missing)]
    most = plus(begin.most, traced.each, missing)
    for key in order:
        span = span_of_key[key]
        peaks.append(plus(level, span.above_start(span.peak)))
        most = each_largest(most, plus(level, span.above_start(span.most)))
        level = plus(level, span.above_start(span.end))
    level = plus(level, traced.each, -missing)
    level = plus(level, traced.each_tail, missing)
    peaks.append(plus(level, tail.above_start(tail.peak)))
    sent = _sum_of_sent([begin, *(span_of_key[key] for key in order), tail])
    return ReplayedStep(largest(peaks), most, level, sent)


def _sum_of_sent(spans: Sequence[Span]) -> dict[tuple[str, str], tuple[int, float]]:
    """Return how many collectives of an axis and kind there are, and their bytes in all."""
    counts: Counter[tuple[str, str]] = Counter()
    sizes: dict[tuple[str, str], float] = defaultdict(float)
    for span in spans:
        for message in span.sent:
            counts[message.axis, message.kind] += 1
            sizes[message.axis, message.kind] += message.bytes
    return {key: (counts[key], sizes[key]) for key in counts}
