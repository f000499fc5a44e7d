"""One step, split: where its time went on this rank, from a profile of it. The parts add up to the step.

    forward, backward, optimizer    computing, and the host's work between kernels
    data, evaluate, checkpoint      waiting for a batch, and what the loop did besides
    exposed AXIS                    waiting for ranks of an axis of the mesh or what they send, with nothing to compute
    bubble                          waiting for a pipeline stage, beyond what its messages take
    other                           the rest of the step: norms, clipping, logging, and a GPU that waits for its host

On a CPU a rank computes where its main thread runs operators; a gap longer than `SHORT` in which a collective is under
way is a wait for it. On a GPU a rank computes where a kernel other than NCCL's runs.

A message's own time, against the bubble's, is that of the fastest of its step: a later one waited for its sender.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence

from torchllm.metrics.intervals import Stretch, difference, intersection, length, union
from torchllm.runtime.phase import MESSAGES, PREFIX
from torchllm.runtime.torch_compat import FlightRecord, ProfiledEvent

SHORT = 100_000
"""ns; a gap between two operators of a CPU that is no wait: Python's"""
COMPUTING = ("forward", "backward", "optimizer")
ASIDE = ("data", "evaluate", "checkpoint")
COMMUNICATION = ("c10d::", "_c10d_functional", "gloo:", "nccl:", "record_param_comms")


def split(
    events: Sequence[ProfiledEvent], sent: Sequence[FlightRecord], axes: Mapping[str, str], pipeline: str
) -> dict[str, float]:
    """Seconds by part, of the profiled stretch that the phase "step" spans.

    events: of the profiler. sent: what the flight recorder holds of that stretch. axes: process group -> its axis;
    pipeline: the group that has the bubble.
    """
    phases = {
        name: union((event.start, event.end) for event in events if event.name == PREFIX + name and not event.kernel)
        for name in ("step", "forward_backward", "backward", *COMPUTING[2:], *ASIDE)
    }
    [whole] = phases["step"]
    kernels = [event for event in events if event.kernel]
    hosted = [event for event in events if not event.kernel]
    backward = union(
        (event.start, event.end) for event in hosted if event.name.startswith("autograd::engine::evaluate_function")
    )
    phases["backward"] = union([*phases["backward"], *intersection(backward, phases["forward_backward"])], SHORT)
    phases["forward"] = difference(phases["forward_backward"], phases["backward"])
    waits = _waits_of_a_gpu(kernels, sent) if kernels else _waits_of_a_cpu(hosted, sent, whole, pipeline)
    aside = union(stretch for name in ASIDE for stretch in phases[name])
    parts = {name: float(length(phases[name])) for name in ASIDE}
    exposed: dict[str, dict[int, int]] = {}  # axis -> record -> ns
    claimed, (now, end) = list(aside), whole
    for (start, stop), of in sorted(waits, key=lambda wait: wait[0]):
        mine = difference([(max(start, now), min(stop, end))], aside) if now < stop and start < end else []
        now = max(now, stop)
        by_record = exposed.setdefault(axes.get(of.group, "other"), {})
        by_record[of.number] = by_record.get(of.number, 0) + length(mine)
        claimed += mine
    claimed = union(claimed)
    messages = exposed.get(axes.get(pipeline, ""), {}).values()
    if messages:
        travel = min(messages) * len(messages)
        parts["bubble"] = float(sum(messages) - travel)
    for axis, by_record in exposed.items():
        parts[f"exposed {axis}"] = float(sum(by_record.values()) if axis != axes.get(pipeline) else travel)
    for name in COMPUTING:
        ran = union(_launched_in(kernels, phases[name])) if kernels else phases[name]
        mine = difference(intersection(ran, [whole]), claimed)
        parts[name] = float(length(mine))
        claimed = union([*claimed, *mine])
    parts["other"] = length([whole]) - sum(parts.values())
    return {name: nanoseconds / 1e9 for name, nanoseconds in parts.items()}


Wait = tuple[Stretch, FlightRecord]


def _waits_of_a_cpu(
    events: Sequence[ProfiledEvent], sent: Sequence[FlightRecord], whole: Stretch, pipeline: str
) -> list[Wait]:
    """Gaps between the main thread's operators in which something was under way, each with what ended it."""
    thread = next(event.thread for event in events if event.name == PREFIX + "step")
    mine = [event for event in events if event.thread == thread and not event.asynchronous]
    talking = union((event.start, event.end) for event in mine if event.name.startswith(COMMUNICATION))
    operators = union((event.start, event.end) for event in mine if _computes(event))
    gaps = difference([whole], union(difference(operators, talking), SHORT))
    coming = sorted(_ends(events, sent, pipeline), key=lambda pair: -pair[0].created)
    found: list[Wait] = []
    under_way: list[tuple[FlightRecord, int]] = []
    for gap in gaps:
        while coming and coming[-1][0].created < gap[1]:
            under_way.append(coming.pop())
        under_way = [(record, end) for record, end in under_way if end > gap[0]]
        if under_way:
            ended_it = max(under_way, key=lambda pair: min(pair[1], gap[1]))[0]
            together = intersection([gap], union((record.created, end) for record, end in under_way))
            found += [(stretch, ended_it) for stretch in together]
    return found


def _computes(event: ProfiledEvent) -> bool:
    """Whether an event is an operator itself, not something around several and around waits between them."""
    wrapper = event.annotation or event.name.startswith("autograd::engine") or event.backward
    return not wrapper and ("::" in event.name or event.name.startswith("Torch-Compiled"))


def _ends(
    events: Sequence[ProfiledEvent], sent: Sequence[FlightRecord], pipeline: str
) -> list[tuple[FlightRecord, int]]:
    """When each thing sent was done: the profiler's event of that kind that began next after it was created.

    FOOTGUN: gloo's messages are not in the flight recorder. They are the pipeline's, but for those of a stretch that
    says whose (`phase.messages`). What is sent is not waited for, but received.
    """
    ended: list[tuple[FlightRecord, int]] = []
    free: dict[str, list[ProfiledEvent]] = {}
    for event in sorted(events, key=lambda event: event.start):
        if event.asynchronous:
            free.setdefault(event.name, []).append(event)
    for record in sorted(sent, key=lambda record: record.created):
        waiting = free.get(record.name, [])
        at = next((index for index, event in enumerate(waiting) if event.end > record.created), None)
        if at is not None:
            ended.append((record, waiting.pop(at).end))
    whose = [event for event in events if event.name.startswith(PREFIX + MESSAGES)]
    for number, event in enumerate(free.get("gloo:recv", []), 1):
        within = (one.name.removeprefix(PREFIX + MESSAGES) for one in whose if one.start <= event.start <= one.end)
        ended.append((FlightRecord(-number, next(within, pipeline), event.name, 0, event.start, True, ""), event.end))
    return ended


def _waits_of_a_gpu(kernels: Iterable[ProfiledEvent], sent: Sequence[FlightRecord]) -> list[Wait]:
    """What NCCL's kernels run alone, each with what was sent last before it was launched."""
    busy = union((event.start, event.end) for event in kernels if "nccl" not in event.name)
    starts, ends = [start for start, _ in busy], [end for _, end in busy]
    sent = sorted(sent, key=lambda record: record.created)
    created = [record.created for record in sent]
    found = []
    for event in kernels:
        latest = bisect_right(created, event.launched) - 1
        if "nccl" in event.name and latest >= 0:
            beside = busy[bisect_right(ends, event.start) : bisect_left(starts, event.end)]
            found += [(stretch, sent[latest]) for stretch in difference([(event.start, event.end)], beside)]
    return found


def _launched_in(kernels: Iterable[ProfiledEvent], phase: list[Stretch]) -> list[Stretch]:
    starts = [start for start, _ in phase]

    def inside(event: ProfiledEvent) -> bool:
        before = bisect_right(starts, event.launched) - 1
        return before >= 0 and event.launched < phase[before][1]

    return [(event.start, event.end) for event in kernels if "nccl" not in event.name and inside(event)]
