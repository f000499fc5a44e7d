"""Where the time of one step went on this rank, from a profile of it. The parts add up to the step.

    forward, backward, optimizer    computing, and the host's work between kernels
    data, evaluate, checkpoint      waiting for a batch, and other work of the loop in the step
    exposed AXIS                    waiting for ranks of an axis of the mesh, or for their data, with nothing to compute
    bubble                          waiting for a pipeline stage, beyond the time that its messages take
    other                           the rest: norms, clipping, logging, and a GPU that waits for its host

On a CPU a rank computes where its main thread runs operators; a gap longer than `SHORT` while a collective is under
way is a wait for it. On a GPU a rank computes where a kernel other than NCCL's runs.

How long a pipeline's message travels cannot be seen: the profile has the wait for its sender as well. It is taken to be
as long as the shortest exposed wait for a message in the step; the rest of the longer waits is the bubble.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torchllm.runtime.heartbeat import MESSAGES, PREFIX
from torchllm.tools.launch.torch_records import FlightRecord
from torchllm.tools.mesh_axes import AXIS_NAMES
from torchllm.tools.watch.intervals import Stretch, difference, intersection, length, union
from torchllm.tools.watch.torch_profile import ProfiledEvent

SHORT = 100_000
"""ns; a shorter gap between two operators of a CPU is Python's, no wait"""
COMPUTING = ("forward", "backward", "optimizer")
ASIDE = ("data", "evaluate", "checkpoint")
PARTS = (
    *COMPUTING,
    *ASIDE,
    "bubble",
    *(f"exposed {axis}" for axis in (*AXIS_NAMES, "host", "other")),
    "other",
)
"""every part that a step may have"""
PHASES = ("step", "forward_backward", "backward", "optimizer", *ASIDE)
"""stretches that the program itself names (`torchllm.runtime.heartbeat.phase`)"""
COMMUNICATION = ("c10d::", "_c10d_functional", "gloo:", "nccl:", "record_param_comms")
"""how the names of operators begin that send or wait"""

Phases = Mapping[str, list[Stretch]]


class Collective(NamedTuple):
    """A collective or message that this rank took part in; or a wait for it, without computing."""

    start: int
    stop: int
    axis: str
    """mesh axis of its process group; "other" if the group belongs to none"""
    number: int
    """tells it from all others of the step"""


class ExposedWait(NamedTuple):
    """The part of a wait that is charged to its collective."""

    stretches: list[Stretch]
    """none, if all of it is charged to something else"""
    axis: str
    number: int


def breakdown(
    events: Sequence[ProfiledEvent],
    records: Sequence[FlightRecord],
    axis_of_group: Mapping[str, str],
    pipeline_group: str,
) -> dict[str, float]:
    """Return seconds by part of the profiled step, which the phase "step" spans.

    events: the profiler's. records: of the flight recorder, since the profile began. axis_of_group: name of a process
    group -> its mesh axis. pipeline_group: the group whose waits are messages and bubble.
    """
    kernels = [event for event in events if event.kernel]
    host_events = [event for event in events if not event.kernel]
    phases = find_phases(host_events)
    [step] = phases["step"]
    pipeline_axis = axis_of_group.get(pipeline_group, "other")
    if kernels:
        waits = waits_of_gpu(kernels, records, axis_of_group)
    else:
        collectives = find_collectives(host_events, records, axis_of_group)
        collectives += find_received_messages(host_events, axis_of_group, pipeline_axis)
        waits = waits_of_cpu(host_events, collectives, step)

    aside = union(stretch for name in ASIDE for stretch in phases[name])
    exposed = exposed_waits(waits, step, aside)
    charged = list(aside)
    for wait in exposed:
        charged.extend(wait.stretches)

    parts = {name: length(phases[name]) for name in ASIDE}
    parts |= waiting_parts(exposed, pipeline_axis if pipeline_group in axis_of_group else None)
    parts |= computing_parts(phases, kernels, step, union(charged))
    parts["other"] = length([step]) - sum(parts.values())
    return {name: nanoseconds / 1e9 for name, nanoseconds in parts.items()}


def find_phases(host_events: Sequence[ProfiledEvent]) -> Phases:
    """Return when the program was in each phase; "forward" is "forward_backward" without "backward"."""
    named: dict[str, list[Stretch]] = {PREFIX + name: [] for name in PHASES}
    autograd = []
    for event in host_events:
        if event.name in named:
            named[event.name].append((event.start, event.end))
        elif event.name.startswith("autograd::engine::evaluate_function"):
            autograd.append((event.start, event.end))
    phases = {name: union(named[PREFIX + name]) for name in PHASES}
    # Split backwards of a pipeline name themselves; others are known by autograd's nodes.
    backward = intersection(union(autograd), phases["forward_backward"])
    phases["backward"] = union([*phases["backward"], *backward], bridge=SHORT)
    phases["forward"] = difference(phases["forward_backward"], phases["backward"])
    return phases


def find_collectives(
    host_events: Iterable[ProfiledEvent], records: Iterable[FlightRecord], axis_of_group: Mapping[str, str]
) -> list[Collective]:
    """Return the recorded collectives, each from its creation to the end of its event in the profile.

    Records and events have no number in common: a record's event is the first of its name that ends after the record
    was created, and that no earlier record has.
    """
    unmatched: dict[str, list[ProfiledEvent]] = {}
    for event in sorted(host_events, key=lambda event: event.start):
        if event.asynchronous:
            unmatched.setdefault(event.name, []).append(event)
    collectives = []
    for record in sorted(records, key=lambda record: record.created):
        candidates = unmatched.get(record.name, [])
        for index, event in enumerate(candidates):
            if event.end > record.created:
                axis = axis_of_group.get(record.group, "other")
                collectives.append(Collective(record.created, event.end, axis, record.number))
                del candidates[index]
                break
    return collectives


def find_received_messages(
    host_events: Sequence[ProfiledEvent], axis_of_group: Mapping[str, str], pipeline_axis: str
) -> list[Collective]:
    """Return the messages that gloo received; no rank waits for its sent ones.

    FOOTGUN: gloo's messages are not in the flight recorder, so their group is unknown. They are the pipeline's, except
    inside a stretch that names their group (`pieces.messages`). Their numbers are negative: records have others.
    """
    owners = [event for event in host_events if event.name.startswith(PREFIX + MESSAGES)]
    receives = [event for event in host_events if event.name == "gloo:recv" and event.asynchronous]
    messages = []
    for count, receive in enumerate(sorted(receives, key=lambda event: event.start), 1):
        axis = pipeline_axis
        for owner in owners:
            if owner.start <= receive.start <= owner.end:
                group = owner.name.removeprefix(PREFIX + MESSAGES)
                axis = axis_of_group.get(group, "other")
                break
        messages.append(Collective(receive.start, receive.end, axis, number=-count))
    return messages


def waits_of_cpu(
    host_events: Sequence[ProfiledEvent], collectives: Iterable[Collective], step: Stretch
) -> list[Collective]:
    """Return the gaps between the main thread's operators while a collective was running.

    A gap belongs to the collective that ended it: the last one to stop in it.
    """
    coming = sorted(collectives, key=lambda collective: collective.start, reverse=True)
    under_way: list[Collective] = []
    waits = []
    for gap_start, gap_stop in idle_stretches(host_events, step):
        while coming and coming[-1].start < gap_stop:
            under_way.append(coming.pop())
        under_way = [collective for collective in under_way if collective.stop > gap_start]
        if not under_way:
            continue
        ended_it = max(under_way, key=lambda collective: min(collective.stop, gap_stop))
        communicating = union((collective.start, collective.stop) for collective in under_way)
        for start, stop in intersection([(gap_start, gap_stop)], communicating):
            waits.append(ended_it._replace(start=start, stop=stop))
    return waits


def idle_stretches(host_events: Sequence[ProfiledEvent], step: Stretch) -> list[Stretch]:
    """Return when the main thread ran no operator for longer than `SHORT`.

    An operator around a communication does not compute meanwhile: aten::mm of DTensors is around the collective that
    it needs.
    """
    main_thread = next(event.thread for event in host_events if event.name == PREFIX + "step")
    operators, communication = [], []
    for event in host_events:
        if event.thread != main_thread or event.asynchronous:
            continue
        if event.name.startswith(COMMUNICATION):
            communication.append((event.start, event.end))
        if is_operator(event):
            operators.append((event.start, event.end))
    computing = difference(union(operators), union(communication))
    return difference([step], union(computing, bridge=SHORT))


def is_operator(event: ProfiledEvent) -> bool:
    """Whether an event is an operator itself, not something around several and around waits between them."""
    if event.annotation or event.backward or event.name.startswith("autograd::engine"):
        return False
    return "::" in event.name or event.name.startswith("Torch-Compiled")


def waits_of_gpu(
    kernels: Sequence[ProfiledEvent], records: Iterable[FlightRecord], axis_of_group: Mapping[str, str]
) -> list[Collective]:
    """Return when kernels of NCCL ran alone, each with the record created last before the kernel was launched."""
    busy = union((kernel.start, kernel.end) for kernel in kernels if not is_nccl(kernel))
    records = sorted(records, key=lambda record: record.created)
    waits = []
    for kernel in filter(is_nccl, kernels):
        index = bisect_right(records, kernel.launched, key=lambda record: record.created) - 1
        if index < 0:
            continue
        record = records[index]
        axis = axis_of_group.get(record.group, "other")
        # Only the part that overlaps the kernel: with all of `busy` the time would be quadratic in the step.
        first = bisect_right(busy, kernel.start, key=lambda stretch: stretch[1])
        last = bisect_left(busy, kernel.end, key=lambda stretch: stretch[0])
        for start, stop in difference([(kernel.start, kernel.end)], busy[first:last]):
            waits.append(Collective(start, stop, axis, record.number))
    return waits


def is_nccl(kernel: ProfiledEvent) -> bool:
    return "nccl" in kernel.name


def exposed_waits(waits: Iterable[Collective], step: Stretch, aside: list[Stretch]) -> list[ExposedWait]:
    """Cut overlapping waits: each nanosecond is charged once, to the wait that began first, and none of `aside`."""
    step_start, step_stop = step
    charged_until = step_start
    exposed = []
    for wait in sorted(waits, key=lambda wait: (wait.start, wait.stop)):
        start = max(wait.start, charged_until)
        stop = min(wait.stop, step_stop)
        stretches = difference([(start, stop)], aside) if start < stop else []
        exposed.append(ExposedWait(stretches, wait.axis, wait.number))
        charged_until = max(charged_until, wait.stop)
    return exposed


def waiting_parts(exposed: Iterable[ExposedWait], pipeline_axis: str | None) -> dict[str, int]:
    """Return nanoseconds of "exposed AXIS", and of the "bubble" if the pipeline's axis has waits."""
    by_axis: dict[str, dict[int, int]] = {}
    for wait in exposed:
        by_collective = by_axis.setdefault(wait.axis, {})
        by_collective[wait.number] = by_collective.get(wait.number, 0) + length(wait.stretches)
    parts = {}
    for axis, by_collective in by_axis.items():
        waited = sum(by_collective.values())
        if axis == pipeline_axis:
            traveled = min(by_collective.values()) * len(by_collective)
            parts["bubble"] = waited - traveled
            waited = traveled
        parts[f"exposed {axis}"] = waited
    return parts


def computing_parts(
    phases: Phases, kernels: Sequence[ProfiledEvent], step: Stretch, charged: list[Stretch]
) -> dict[str, int]:
    """Return nanoseconds of forward, backward and optimizer that are not `charged` to something else.

    On a GPU a phase is when the kernels ran that were launched in it.
    """
    parts = {}
    for name in COMPUTING:
        ran = launched_in(kernels, phases[name]) if kernels else phases[name]
        computing = difference(intersection(ran, [step]), charged)
        parts[name] = length(computing)
        charged = union([*charged, *computing])
    return parts


def launched_in(kernels: Iterable[ProfiledEvent], phase: list[Stretch]) -> list[Stretch]:
    """Return when the kernels ran that the host launched within a phase, without NCCL's."""
    ran = []
    for kernel in kernels:
        index = bisect_right(phase, kernel.launched, key=lambda stretch: stretch[0]) - 1
        within = index >= 0 and kernel.launched < phase[index][1]
        if within and not is_nccl(kernel):
            ran.append((kernel.start, kernel.end))
    return union(ran)
