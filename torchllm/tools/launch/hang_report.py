"""Code shared by both watches over hangs, and the report of the ranks: the rank that others wait for.

A rank waits in a collective that it has entered and that is not done. The others wait for the members of the group that
have not entered it, by its number in the group. A rank that others wait for, and that waits for no rank itself, holds
up the job. If all ranks wait, some of them went past an operation that others wait in: the operation with the fewest
missing ranks per waiting rank decides which.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torchllm.runtime.heartbeat import Timeout

if TYPE_CHECKING:  # it imports torch, and a launcher needs the texts here
    from torchllm.tools.launch.torch_records import FlightRecord

log = logging.getLogger(__name__)

TICK = 1.0
"""seconds between two looks"""
TIME_FORMAT = "%Y%m%d-%H%M%S"
"""name of the folder of a hang in RUN/hang: when it was found, in local time"""
ROOT = f"{Path(__file__).parents[3]}/"
"""folder of the repository; its files are named without it"""
DESCRIBED = 4
"""ranks that are described in detail; more are only listed"""
LISTED_RUNS = 16
"""runs of ranks that a line names; of more runs it says how many ranks they are"""
MESSAGE_ENDS = re.compile(r"(?P<rank>\d+)(?:<-|->)(?P<peer>\d+)$")
"""end of NCCL's name of a message: "recv 1<-0", by ranks in the group"""

Value = TypeVar("Value")


@dataclass
class Standstill(Generic[Value]):
    """Counts for how long a value has not changed."""

    value: Value | None = None
    seconds: float = 0.0

    def look(self, value: Value, seconds: float) -> float:
        """Return the seconds without a change, now that it is `value`. seconds: since the last look."""
        self.seconds = self.seconds + seconds if value == self.value else 0.0
        self.value = value
        return self.seconds


def look_every_second(look: Callable[[float], None], ended: threading.Event) -> None:
    """Call `look` with the seconds since its last call, once per `TICK` until `ended`.

    Time beyond 2 ticks between two looks does not count: this process was stopped then, and so were the
    processes that it watches. The time of a look counts: its request to the store may wait for a node that is gone.
    """
    looked, last_end = 0.0, time.monotonic()
    while not ended.wait(TICK):
        begin = time.monotonic()
        look(looked + min(begin - last_end, 2 * TICK))
        last_end = time.monotonic()
        looked = last_end - begin


def write_in_thread(file: Path, text: str, then: Callable[[], None] = lambda: None) -> threading.Thread:
    """Start to write a file of a hang, whole, and return the thread: the run folder may be the cause of the hang.

    then: called afterwards, in the thread.
    """

    def write() -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = file.with_name(f".{file.name}")
            unfinished.write_text(text)
            unfinished.rename(file)
        except OSError as error:
            log.error("%s: %s", file, error)
        then()

    thread = threading.Thread(target=write, name="hang report", daemon=True)
    thread.start()
    return thread


class RankDump(NamedTuple):
    """The state of a rank when the job hangs."""

    rank: int
    host: str
    time: int
    """of the dump, in nanoseconds since 1970, by the clock of the records"""
    stack: list[str]
    """of the main thread, outermost first: file:line in function"""
    in_wait: bool
    """the main thread is in code that waits for other ranks, e.g. for a message (gloo keeps no record of messages)"""
    groups: dict[str, str]
    """ranks of each process group of this rank (`write_slices`), by torch's name of the group"""
    records: list[FlightRecord]
    """oldest first"""
    step: int = 0
    """that the rank has begun last"""
    exceeded: Timeout | None = None
    """timeout that the rank has found exceeded"""

    def recent(self, count: int) -> RankDump:
        """Return the dump with only the last `count` records of each group."""
        records: list[FlightRecord] = []
        taken: dict[str, int] = {}
        for record in reversed(self.records):
            taken[record.group] = taken.get(record.group, 0) + 1
            if taken[record.group] <= count:
                records.append(record)
        return self._replace(records=records[::-1])

    def json(self) -> str:
        """Return the dump as JSON, a record as the list of its fields; `read_dump` is the inverse."""
        return json.dumps(self._asdict())

    @property
    def place(self) -> str:
        """Return where the main thread is."""
        return innermost_place(self.stack[::-1])


def read_dump(text: str) -> RankDump:
    """Read the output of `RankDump.json`."""
    from torchllm.tools.launch.torch_records import FlightRecord

    fields = json.loads(text)
    records = [FlightRecord(*record) for record in fields.pop("records")]
    exceeded = fields.pop("exceeded")
    return RankDump(**fields, records=records, exceeded=None if exceeded is None else Timeout(*exceeded))


def write_slices(ranks: Sequence[int]) -> str:
    """Return ranks as slices: [0, 1, 2, 8, 16, 24] -> "0:3:1,8:25:8"; `read_slices` is the inverse.

    A group of a mesh is one slice or a few of them, however many ranks are in it.
    """
    slices = []
    index = 0
    while index < len(ranks):
        first, last = ranks[index], ranks[index]
        index += 1
        step = ranks[index] - first if index < len(ranks) else 1
        while index < len(ranks) and ranks[index] == last + step:
            last = ranks[index]
            index += 1
        slices.append(f"{first}:{last + step}:{step}")
    return ",".join(slices)


@cache
def read_slices(text: str) -> tuple[int, ...]:
    """Read ranks that `write_slices` wrote."""
    ranks: list[int] = []
    for piece in text.split(",") if text else ():
        start, stop, step = map(int, piece.split(":"))
        ranks.extend(range(start, stop, step))
    return tuple(ranks)


class BlockedOperation(NamedTuple):
    """A collective or message that ranks wait in."""

    record: FlightRecord
    """of one of the waiting ranks"""
    group_ranks: Sequence[int]
    """all ranks of its process group"""
    waiting: list[int]
    """ranks that wait in it"""
    missing: list[int]
    """ranks that have not entered it; empty if all have, yet it is not done"""
    seconds: float
    """that the longest wait has taken"""

    @property
    def is_message(self) -> bool:
        """Return whether it is a message between two ranks, not a collective."""
        return self.record.sequence == 0


def unfinished_records(records: Sequence[FlightRecord]) -> list[FlightRecord]:
    """Return the records of operations that have begun and are not done.

    FOOTGUN: NCCL never marks the parts of a batch of messages done, only the batch, whose record comes after theirs. So
    all records of a group that come before a done one of that group count as done.
    """
    last_done: dict[str, int] = {record.group: index for index, record in enumerate(records) if record.done}
    unfinished = []
    for index, record in enumerate(records):
        if not record.done and index > last_done.get(record.group, -1):
            unfinished.append(record)
    return unfinished


def blocked_operations(dumps: Sequence[RankDump]) -> list[BlockedOperation]:
    """Return every operation that ranks wait in, the longest wait first."""
    entered = _last_entered(dumps)
    operations: dict[tuple[object, ...], BlockedOperation] = {}
    for dump in dumps:
        for record in _waited_in(dump):
            if record.sequence:
                key: tuple[object, ...] = record.group, record.sequence, record.name
            else:
                key = record.group, "message of rank", dump.rank, record.name
            operation = operations.get(key)
            if operation is None:
                group_ranks = read_slices(dump.groups.get(record.group, ""))
                operation = BlockedOperation(record, group_ranks, [], _missing_in(record, group_ranks, entered), 0.0)
            operation.waiting.append(dump.rank)
            seconds = (dump.time - record.created) / 1e9
            operations[key] = operation._replace(seconds=max(operation.seconds, seconds))
    return sorted(operations.values(), key=lambda operation: -operation.seconds)


def _missing_in(record: FlightRecord, group_ranks: Sequence[int], entered: Mapping[tuple[str, int], int]) -> list[int]:
    """Return the ranks of its group that have not entered an operation. entered: of `_last_entered`."""
    if record.sequence:
        return [rank for rank in group_ranks if entered.get((record.group, rank), 0) < record.sequence]
    ends = MESSAGE_ENDS.search(record.name)  # of a message: the rank at its other end
    return [group_ranks[int(ends["peer"])]] if ends is not None and group_ranks else []


def _last_entered(dumps: Sequence[RankDump]) -> dict[tuple[str, int], int]:
    """Return the number of the last collective that each rank has entered, by group and rank."""
    entered: dict[tuple[str, int], int] = {}
    for dump in dumps:
        for record in dump.records:
            key = record.group, dump.rank
            entered[key] = max(entered.get(key, 0), record.sequence)
    return entered


def _waited_in(dump: RankDump) -> Iterator[FlightRecord]:
    """Yield the operations that a rank waits in: each group's first unfinished collective, all unfinished messages."""
    first: dict[str, int] = {}
    for record in unfinished_records(dump.records):
        if not record.sequence or first.setdefault(record.group, record.sequence) == record.sequence:
            yield record


def find_culprits(dumps: Sequence[RankDump], operations: Sequence[BlockedOperation], world_size: int) -> list[int]:
    """Return the ranks that hold up the others; none if all have entered an operation that does not end."""
    silent = set(range(world_size))
    in_wait: set[int] = set()
    for dump in dumps:
        silent.discard(dump.rank)
        if dump.in_wait:
            in_wait.add(dump.rank)
    blocked: set[int] = set()
    awaited: set[int] = set()
    for operation in operations:
        blocked.update(operation.waiting)
        awaited.update(operation.missing)
    waiting = blocked | in_wait
    culprits = (awaited - waiting) | silent
    if not culprits and in_wait:
        # They wait for a message, and no record says whose: any rank that does not wait may be the sender.
        culprits = set(range(world_size)) - waiting
    return sorted(culprits or _fewest_that_went_past(operations))


def _fewest_that_went_past(operations: Sequence[BlockedOperation]) -> set[int]:
    """Return the missing ranks of the operations with the fewest missing ranks per waiting rank."""
    culprits: set[int] = set()
    smallest = float("inf")
    for operation in operations:
        if not operation.missing:
            continue
        share = len(operation.missing) / len(operation.waiting)
        if share < smallest:
            culprits, smallest = set(), share
        if share == smallest:
            culprits.update(operation.missing)
    return culprits


def skipped_record(dump: RankDump, reference: RankDump, group: str) -> FlightRecord | None:
    """Return the collective of `group` that `reference` entered and `dump`'s rank skipped, going on to the next one.

    None if the two agree, or if they differ in more than one skipped collective.
    """
    collectives = _collectives_by_number(dump, group)
    expected = _collectives_by_number(reference, group)
    for number in sorted(collectives.keys() & expected.keys()):
        if _same_call(collectives[number], expected[number]):
            continue
        following = expected.get(number + 1)
        if following is not None and _same_call(collectives[number], following):
            return expected[number]
        return None
    return None


def _collectives_by_number(dump: RankDump, group: str) -> dict[int, FlightRecord]:
    """Return the collectives of a group that a rank has entered, by their number; messages have none."""
    return {record.sequence: record for record in dump.records if record.group == group and record.sequence}


def _same_call(first: FlightRecord, second: FlightRecord) -> bool:
    """Return whether two records are of one operation, called on one line of the program."""
    return first.name == second.name and first.where == second.where


def describe_hang(
    dumps: Sequence[RankDump], world_size: int, host_of: Callable[[int], str], timeout: Timeout, folder: Path
) -> str:
    """Return the report: the rank that holds up the job, the operation, and that rank's stack.

    `host_of` returns the host of a rank, also of one that does not answer; `timeout` was exceeded; `folder` holds the
    dumps.
    """
    operations = blocked_operations(dumps)
    culprits = find_culprits(dumps, operations, world_size)
    lines = [f"hang: ranks waited over {timeout.seconds:g} s ({timeout.key}) for other ranks; aborting"]
    by_rank = {dump.rank: dump for dump in dumps}
    for rank in culprits[:DESCRIBED]:
        lines += _describe_culprit(rank, host_of(rank), by_rank, operations)
    if len(culprits) > DESCRIBED:
        lines.append(f"the same is true of ranks {format_ranks(culprits[DESCRIBED:])}")
    if not culprits and operations:
        operation = _describe_operation(operations[0])
        lines.append(
            f"all ranks of the group have entered {operation}, but it does not end: the network, or tensors of unequal "
            "sizes"
        )
    lines += _describe_unrecorded_waits(dumps)
    lines += _describe_steps(dumps)
    lines.append(f"every rank's stack and last operations: {folder}")
    return "\n  ".join(lines)


def _describe_culprit(
    rank: int, host: str, by_rank: Mapping[int, RankDump], operations: Sequence[BlockedOperation]
) -> Iterator[str]:
    """Yield lines on a rank that holds up the job."""
    held_up = next((operation for operation in operations if rank in operation.missing), None)
    if held_up is None:
        yield f"rank {rank} ({host}) is not waiting for any rank"
    else:
        verb = "answered" if held_up.is_message else "entered"
        yield f"rank {rank} ({host}) has not {verb} {_describe_operation(held_up)}; {_describe_waiting(held_up)}"
    dump = by_rank.get(rank)
    if dump is None:
        yield f"rank {rank} does not answer: its process has ended, is stopped, or is stuck outside Python"
        return
    yield f"rank {rank}'s main thread is at {dump.place}"
    waited_in = next((operation for operation in operations if rank in operation.waiting), None)
    if waited_in is not None:
        yield f"rank {rank} itself waits in {_describe_operation(waited_in)}"
    if held_up is not None:
        yield from _describe_skipped(dump, by_rank[held_up.waiting[0]], held_up.record.group)


def _describe_skipped(dump: RankDump, reference: RankDump, group: str) -> Iterator[str]:
    """Yield which collective of `group` the rank of `dump` has skipped, if it has skipped one."""
    skipped = skipped_record(dump, reference, group)
    if skipped is not None:
        location = f" at {shorten_path(skipped.where)}" if skipped.where else ""
        operation = f"number {skipped.sequence} of this group, {skipped.name}{location}"
        yield f"rank {dump.rank} seems to have skipped {operation}"


def _describe_unrecorded_waits(dumps: Sequence[RankDump]) -> Iterator[str]:
    """Yield the ranks that wait for a message without a record, as with gloo."""
    waiting = [dump for dump in dumps if dump.in_wait and not unfinished_records(dump.records)]
    if waiting:
        first = waiting[0]
        rank = f" on rank {first.rank}" if len(waiting) > 1 else ""
        ranks = _name_ranks([dump.rank for dump in waiting])
        yield f"{ranks} waited for a message at {first.place}{rank}"


def _describe_steps(dumps: Sequence[RankDump]) -> Iterator[str]:
    """Yield the steps that the ranks are at, if they are not at one step."""
    ranks_by_step: dict[int, list[int]] = {}
    for dump in dumps:
        ranks_by_step.setdefault(dump.step, []).append(dump.rank)
    if len(ranks_by_step) > 1:
        yield "; ".join(f"step {step}: {_name_ranks(ranks)}" for step, ranks in sorted(ranks_by_step.items()))


def _describe_operation(operation: BlockedOperation) -> str:
    """Return name, number, ranks and place of an operation."""
    record = operation.record
    number = "" if operation.is_message else f" number {record.sequence}"
    location = f" ({shorten_path(record.where)})" if record.where else ""
    return f"{record.name}{number} of ranks {format_ranks(operation.group_ranks)}{location}"


def _describe_waiting(operation: BlockedOperation) -> str:
    verb = "has" if len(operation.waiting) == 1 else "have"
    return f"{_name_ranks(operation.waiting)} {verb} waited {operation.seconds:.0f} s"


def _name_ranks(ranks: Sequence[int]) -> str:
    noun = "ranks" if len(ranks) > 1 else "rank"
    return f"{noun} {format_ranks(ranks)}"


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as text, runs of them shortened: [1, 2, 3, 7] -> "1-3, 7"; [0, 8, 16] -> "0-16 in steps of 8"."""
    ordered = sorted(ranks)
    runs: list[tuple[int, int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], rank
        else:
            runs.append((rank, rank))
    regular = write_slices(ordered)
    if len(runs) > 2 and "," not in regular:
        return f"{ordered[0]}-{ordered[-1]} in steps of {regular.rpartition(':')[2]}"
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:LISTED_RUNS]]
    if len(runs) > LISTED_RUNS:
        texts.append(f"… ({len(ordered)} ranks in all)")
    return ", ".join(texts)


def innermost_place(stack: Sequence[str]) -> str:
    """Return where a program is: its innermost line outside torch and Python's library; "" if nothing is known.

    stack: "file:line in function", innermost first.
    """
    own = f"{ROOT}torchllm/"  # perhaps in site-packages
    outside = [line for line in stack if line.startswith(own) or "/lib/python3" not in line]
    return shorten_path((outside or [*stack, ""])[0])


def shorten_path(location: str) -> str:
    """Return a file:line without the folder of the repository, if it is in there."""
    return location.removeprefix(ROOT)
