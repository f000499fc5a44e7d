"""Puts a step of any number of micro batches and pipeline ranks together from a traced step with few of both.

The memory and messages of an action depend on its kind (F, B, ...), on its stage, and on the kinds of the
stage's previous action (weights may still be gathered) and following action (which may gather its weights ahead). The
first backward of a stage (sums of gradients are allocated) and the last (they are reduced) are separate kinds, and
so is the last action of the step. Each kind of action is traced once; the order of the schedule says how often it runs
and how much memory is in use meanwhile.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from torchllm.tools.dry_run.memory import Bytes, PerMicroBatch, Span, larger_of_each, largest, plus

_ACTION = re.compile(r"(\d+)([A-Z_]+)")
_MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "WAIT_SEND_F", "WAIT_SEND_B")  # torch 2.15 has the waits


class ActionKind(NamedTuple):
    """The properties that decide an action's memory and messages. Actions of one kind cost the same: one is traced."""

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
    ends_step: bool = False
    """last action of the step: the schedule frees everything that it held throughout"""


Key = tuple[ActionKind, ...]
"""one action, or the two that DualPipeV runs as one"""


class Traced(NamedTuple):
    """A step that was run on fake tensors."""

    spans: list[Span]
    """span "begin", the actions in their order, span "tail" (norm, clipping, update)"""
    keys: list[Key]
    """keys of the actions"""
    micro_batches: int
    """number of micro batches in the step"""
    per_micro_batch: PerMicroBatch
    """memory that each micro batch adds throughout the step (its tokens, buffers to receive into)"""
    saved: list[int]
    """bytes that each forward pass stored for its backward"""
    host: int = 0
    """bytes of the optimizer's states in the host's memory; inputs of blocks there are in the spans"""


class Collectives(NamedTuple):
    """All collectives of one kind over one axis in a step."""

    number: int
    bytes: float
    """sum of the bytes that this rank sends"""


SentTotals = dict[tuple[str, str], Collectives]
"""(axis, kind of collective) -> messages of a rank in a step"""


class ReplayedStep(NamedTuple):
    """Memory and messages of one rank in a whole step."""

    peak: Bytes
    """memory when the sum was largest"""
    highest: Bytes
    """for each purpose, its memory when that was largest"""
    end: Bytes
    """memory when the gradients were complete"""
    sent: SentTotals


def action_keys(order: Sequence[str], stages: Sequence[int]) -> list[Key]:
    """Return the key of each action in `order`; actions have names such as 2F0 or (2F1;5B0)OVERLAP_F_B.

    stages: global indices of this rank's stages.
    """
    actions: list[tuple[int, str]] = []
    """position of the stage, and kind"""
    lengths: list[int] = []
    """number of actions that each entry of `order` names"""
    for name in order:
        named = _ACTION.findall(name)
        lengths.append(len(named))
        for stage, kind in named:
            actions.append((stages.index(int(stage)), kind))
    kinds = _action_kinds(actions)
    return [tuple(islice(kinds, length)) for length in lengths]


def _action_kinds(actions: Sequence[tuple[int, str]]) -> Iterator[ActionKind]:
    """Yield the kind of each (stage, kind) of a rank's step, in its order."""
    kinds_of_stage: dict[int, list[str]] = defaultdict(list)
    for stage, kind in actions:
        if kind not in _MESSAGES:
            kinds_of_stage[stage].append(kind)
    total = Counter(actions)
    done: Counter[tuple[int, str]] = Counter()
    computed: Counter[int] = Counter()
    for number, (stage, kind) in enumerate(actions):
        ends_step = number == len(actions) - 1
        if kind in _MESSAGES:
            yield ActionKind(stage, kind, ends_step=ends_step)
            continue
        kinds = kinds_of_stage[stage]
        index = computed[stage]
        is_first = done[stage, kind] == 0
        is_last = done[stage, kind] == total[stage, kind] - 1
        yield ActionKind(
            stage,
            kind,
            previous=kinds[index - 1] if index > 0 else "",
            following=kinds[index + 1] if index + 1 < len(kinds) else "",
            starts_gradients=is_first and kind != "F",
            finishes_gradients=is_last and kind in ("B", "W"),
            ends_step=ends_step,
        )
        computed[stage] += 1
        done[stage, kind] += 1


def replay(traced: Traced, order: Sequence[Key], micro_batches: int, graphs: bool = False) -> ReplayedStep:
    """Return a step of `micro_batches` whose actions are `order`, put together from a traced step.

    KeyError if an action is of no traced kind. graphs: `compile.graphs`: all that the actions had at their peak stays.
    """
    begin, *actions, tail = traced.spans
    span_of_key = dict(zip(traced.keys, actions, strict=True))
    missing = micro_batches - traced.micro_batches
    during_actions, during_tail = traced.per_micro_batch
    level = plus(begin.end, during_actions, missing)
    peaks = [plus(begin.peak, during_actions, missing)]
    highest = plus(begin.highest, during_actions, missing)
    for key in order:
        span = span_of_key[key]
        peaks.append(plus(level, span.above_start(span.peak)))
        highest = larger_of_each(highest, plus(level, span.above_start(span.highest)))
        level = plus(level, span.above_start(span.end))
    # Not the sum over the actions: the last one also frees buffers of earlier ones, e.g. messages in torch 2.15.
    level = plus(tail.start, during_tail, missing)
    peaks.append(plus(largest(peaks) if graphs else level, tail.above_start(tail.peak)))
    sent = _sum_of_sent([begin, *(span_of_key[key] for key in order), tail])
    return ReplayedStep(largest(peaks), highest, level, sent)


def _sum_of_sent(spans: Sequence[Span]) -> SentTotals:
    """Return the number of collectives of each axis and kind, and their bytes."""
    totals: SentTotals = {}
    for span in spans:
        for message in span.sent:
            count, size = totals.get((message.axis, message.kind), (0, 0.0))
            totals[message.axis, message.kind] = Collectives(count + 1, size + message.bytes)
    return totals
