"""Turns the notes of a tracker into memory by purpose: at the start, the end and the peak of every action of a step."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from torchllm.tools.dry_run.tracker import HOST, NEVER, Held, Sent, Tracker

Bytes = Counter[str]
"""bytes by purpose, one of `PURPOSES` or `HOST`; a difference of two may be negative"""

PURPOSES = {
    "parameters": "this rank's share of the weights, float32; frozen ones with updates in the type of the computation",
    "optimizer": "moments, and the average of the weights",
    "gradients": "this rank's share, and sums of whole ones over micro batches",
    "gathered": "weights that are whole for a while, and their buffers",
    "activations": "stored by a forward for its backward",
    "logits": "of the head, and copies in the loss",
    "inputs": "tokens, labels, positions of all of a step's micro batches",
    "buffers": "receive buffers for the other pipeline stages",
    "temporary": "all else: results on their way, recomputed activations",
}


class Span(NamedTuple):
    """Memory and messages from one mark to the next."""

    name: str
    start: Bytes
    end: Bytes
    peak: Bytes
    """memory when the sum was largest"""
    highest: Bytes
    """for each purpose, its memory when that was largest"""
    sent: list[Sent]

    def above_start(self, level: Bytes) -> Bytes:
        """Return `level`, a level within this span, minus the level at its start."""
        return plus(level, self.start, -1)


def purpose(held: Held, tracker: Tracker) -> str:
    """Return the purpose of a storage: the one it was claimed for, or else one deduced from when it lived."""
    if held.kind:
        return held.kind
    if held.born < tracker.marks[0][0]:
        return "buffers"
    if held.window >= 0:
        return "activations" if held.died > tracker.forward_ends[held.window] else "temporary"
    # Of the tensors of a backward pass, only gradients of weights outlive its action: later ones are added to them.
    action_ends = next((time for time, _ in tracker.marks if time > held.born), NEVER)
    return "gradients" if held.like_gradient and action_ends < held.died else "temporary"


def spans(tracker: Tracker, marks: Sequence[tuple[int, str]] = ()) -> list[Span]:
    """Return the step in spans, first mark to last. The first span starts with memory made earlier and still held.

    marks: times and names, if not the tracker's own.
    """
    marks = marks or tracker.marks
    first = marks[0][0]
    level: Bytes = Counter()
    changes: list[_Change] = []
    for held in tracker.held:
        if held.died < first:
            continue
        kind = purpose(held, tracker)
        if held.born < first:
            level[kind] += held.bytes
        else:
            changes.append(_Change(held.born, _MADE, kind, held.bytes))
        if held.died < NEVER:
            changes.append(_Change(held.died, _FREED, kind, -held.bytes))
    changes.sort(key=lambda change: (change.time, change.order))
    sent = [message for message in tracker.sent if message.time >= first]
    ends = [*(time for time, _ in marks[1:]), NEVER]
    found_spans = []
    for (start, name), end in zip(marks, ends, strict=True):
        changes_within = _between(changes, start, end)
        sent_within = _between(sent, start, end)
        span = _span(name, level, changes_within, sent_within)
        found_spans.append(span)
        level = span.end
    return found_spans


_MADE, _FREED = range(2)
"""order of changes at one time: storages are made before others are freed"""


class _Change(NamedTuple):
    """A storage is made or freed."""

    time: int
    order: int
    """_MADE or _FREED"""
    kind: str
    """purpose of the storage"""
    bytes: int
    """size of the storage; negative if it is freed"""


Timed = TypeVar("Timed", _Change, Sent)


def _between(events: Sequence[Timed], start: int, end: int) -> Sequence[Timed]:
    """Return the events, sorted by time, of start <= time < end."""
    return events[bisect_left(events, start, key=_time) : bisect_left(events, end, key=_time)]


def _time(event: _Change | Sent) -> int:
    return event.time


def _span(name: str, start: Bytes, changes: Sequence[_Change], sent: Sequence[Sent]) -> Span:
    """Return the span from one mark to the next, which begins at level `start` and goes through `changes`."""
    level, peak, highest_by_purpose = start.copy(), start.copy(), start.copy()
    total = peak_total = on_device(start)
    for index, change in enumerate(changes):
        level[change.kind] += change.bytes
        total += change.bytes if change.kind != HOST else 0
        highest_by_purpose[change.kind] = max(highest_by_purpose[change.kind], level[change.kind])
        is_last_made = index + 1 == len(changes) or changes[index + 1][:2] != change[:2]
        if change.order == _MADE and is_last_made and total > peak_total:
            peak, peak_total = level.copy(), total
    return Span(name, start.copy(), level, peak, highest_by_purpose, list(sent))


class PerMicroBatch(NamedTuple):
    """Memory that one micro batch adds to a step."""

    actions: Bytes
    """memory from the first action of the step to the last"""
    tail: Bytes
    """memory after the last action"""


def memory_per_micro_batch(tracker: Tracker, since: int, at_least: int, count: int) -> PerMicroBatch:
    """Return the memory that one of `count` micro batches adds to the step.

    These are its inputs (tokens, labels, positions), and storages that were made after `since` and are held when the
    first action begins. Storages smaller than `at_least` bytes are sums over micro batches and do not count. Nor do
    single messages: torch 2.15 takes memory for each when it comes, earlier versions take it for all messages of a step
    before the very first forward pass. But a tensor that a rank passes to a stage on the same rank (ZBV) stays until
    the next step: torch puts it in the place of a buffer.
    """
    first_action, tail_begins = tracker.marks[1][0], tracker.marks[-1][0]
    actions: Bytes = Counter()
    tail: Bytes = Counter()
    for held in tracker.held:
        there_at_first_action = held.born < first_action <= held.died
        if not there_at_first_action or held.bytes < at_least:
            continue
        kind = purpose(held, tracker)
        for_all_messages = kind == "buffers" and held.born < tracker.forward_ends[0]
        of_own_stage = kind == "buffers" and not held.kind
        of_each = for_all_messages or of_own_stage or kind == "temporary"
        if kind == "inputs" or (held.born > since and of_each):
            actions[kind] += held.bytes
            tail[kind] += held.bytes if held.died >= tail_begins else 0
    return PerMicroBatch(_divided(actions, count), _divided(tail, count))


def _divided(level: Bytes, count: int) -> Bytes:
    return Counter({kind: total // count for kind, total in level.items()})


def saved_by_forwards(tracker: Tracker) -> list[int]:
    """Return the bytes that each forward pass made and that outlive it: for its backward, and its result."""
    first = tracker.marks[0][0]
    saved = {number: 0 for number, end in enumerate(tracker.forward_ends) if end > first}
    for held in tracker.held:
        if held.window not in saved or held.died <= tracker.forward_ends[held.window]:
            continue
        if purpose(held, tracker) in ("activations", "logits"):
            saved[held.window] += held.bytes
    return list(saved.values())


def largest(levels: Iterable[Bytes]) -> Bytes:
    """Return the level with the most bytes of the device."""
    return max(levels, key=on_device)


def on_device(level: Bytes) -> int:
    """Return the bytes of all purposes but the host's."""
    return sum(level.values()) - level[HOST]


def larger_of_each(a: Bytes, b: Bytes) -> Bytes:
    """Return the larger of two, purpose by purpose."""
    return Counter({kind: max(a[kind], b[kind]) for kind in a.keys() | b.keys()})


def plus(a: Bytes, b: Bytes, times: int = 1) -> Bytes:
    """Return a + times x b; unlike Counter's own sum it keeps values that are zero or negative."""
    return Counter({kind: a[kind] + times * b[kind] for kind in a.keys() | b.keys()})
