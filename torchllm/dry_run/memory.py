"""From what a tracker noted to memory by purpose: at the start, the end and the peak of every action of a step."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from torchllm.dry_run.tracker import NEVER, Held, Sent, Tracker

Bytes = Counter[str]
"""bytes by purpose, one of `PURPOSES`; a difference of two may be negative"""

PURPOSES = {
    "parameters": "this rank's share of the weights, float32",
    "optimizer": "moments",
    "gradients": "this rank's share, and sums of whole ones over micro batches",
    "gathered": "weights that are whole for a while, and what they are gathered in",
    "activations": "kept from a forward for its backward",
    "logits": "of the head, and what the loss makes of them",
    "inputs": "tokens, labels, positions of all of a step's micro batches",
    "buffers": "of what the other pipeline stages send",
    "temporary": "all else: results on their way, recomputed activations",
}


class Span(NamedTuple):
    """What happened from one mark to the next."""

    name: str
    start: Bytes
    end: Bytes
    peak: Bytes
    """when the sum was largest"""
    most: Bytes
    """of each purpose, when that was largest"""
    sent: list[Sent]

    def above_start(self, level: Bytes) -> Bytes:
        """Return what `level`, one of this span's, has over its start."""
        return plus(level, self.start, -1)


def purpose(held: Held, tracker: Tracker) -> str:
    """What a storage is for, which its life tells where nobody has said it."""
    if held.kind:
        return held.kind
    if held.born < tracker.marks[0][0]:
        return "buffers"
    if held.window >= 0:
        return "activations" if held.died > tracker.forward_ends[held.window] else "temporary"
    # Of what a backward pass makes, only gradients of weights outlive its action: later ones are added to them.
    action_ends = next((time for time, _ in tracker.marks if time > held.born), NEVER)
    return "gradients" if held.like_gradient and action_ends < held.died else "temporary"


def spans(tracker: Tracker) -> list[Span]:
    """The step as marked, first mark to last; what came before the first mark and still lives is in its start."""
    births: dict[int, list[Held]] = {}
    deaths: dict[int, list[Held]] = {}
    purposes = {}
    first = tracker.marks[0][0]
    level: Bytes = Counter()
    for held in tracker.held:
        if held.died < first:
            continue
        purposes[held] = purpose(held, tracker)
        if held.born < first:
            level[purposes[held]] += held.bytes
        else:
            births.setdefault(held.born, []).append(held)
        deaths.setdefault(held.died, []).append(held)
    times = sorted(births.keys() | deaths.keys() - {NEVER})
    sent = iter([*(one for one in tracker.sent if one.time >= first), None])
    next_sent = next(sent)
    found: list[Span] = []
    at = 0
    for (_, name), end in zip(tracker.marks, [time for time, _ in tracker.marks[1:]] + [NEVER], strict=True):
        start, peak, most, highest, messages = level.copy(), level.copy(), level.copy(), sum(level.values()), []
        while at < len(times) and times[at] < end:
            for held in births.get(times[at], ()):
                level[purposes[held]] += held.bytes
                most[purposes[held]] = max(most[purposes[held]], level[purposes[held]])
            if (total := sum(level.values())) > highest:
                peak, highest = level.copy(), total
            for held in deaths.get(times[at], ()):
                level[purposes[held]] -= held.bytes
            at += 1
        while next_sent is not None and next_sent.time < end:
            messages.append(next_sent)
            next_sent = next(sent)
        found.append(Span(name, start, level.copy(), peak, most, messages))
    return found


def of_each_micro_batch(tracker: Tracker, since: int, at_least: int, count: int) -> tuple[Bytes, Bytes]:
    """What one of `count` micro batches adds from the first action of the step on, and in its tail.

    That is: tokens and the like, and what was made after `since` and is there before any action; what is smaller than
    `at_least` is a sum over micro batches.
    """
    first_action, tail = tracker.marks[1][0], tracker.marks[-1][0]
    actions: Bytes = Counter()
    after: Bytes = Counter()
    for held in tracker.held:
        if not (held.born < first_action <= held.died and held.bytes >= at_least):
            continue
        kind = purpose(held, tracker)
        if kind == "inputs" or (held.born > since and kind in ("buffers", "temporary")):
            actions[kind] += held.bytes
            after[kind] += held.bytes * (held.died >= tail)
    return tuple(Counter({kind: total // count for kind, total in of.items()}) for of in (actions, after))  # type: ignore[return-value]


def left_by_forwards(tracker: Tracker) -> list[int]:
    """Bytes that each forward pass made and left: what its backward needs, and its result."""
    first = tracker.marks[0][0]
    left = {number: 0 for number, end in enumerate(tracker.forward_ends) if end > first}
    for held in tracker.held:
        if held.window in left and purpose(held, tracker) in ("activations", "logits"):
            left[held.window] += held.bytes * (held.died > tracker.forward_ends[held.window])
    return list(left.values())


def largest(levels: Iterable[Bytes]) -> Bytes:
    """The one with the largest sum."""
    return max(levels, key=lambda level: sum(level.values()))


def each_largest(one: Bytes, other: Bytes) -> Bytes:
    """The larger of two, purpose by purpose."""
    return Counter({kind: max(one[kind], other[kind]) for kind in one.keys() | other.keys()})


def plus(one: Bytes, other: Bytes, times: int = 1) -> Bytes:
    """one + times x other; unlike Counter's own sum it keeps what is not positive."""
    return Counter({kind: one[kind] + times * other[kind] for kind in one.keys() | other.keys()})
