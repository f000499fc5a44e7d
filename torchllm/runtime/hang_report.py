"""What a rank of a job that hangs knows, and what follows from all of it: which rank the others wait for.

A rank waits in a collective that it has asked for and that is not done. Who of the group has not asked for it, by its
number in the group, is waited for. Ranks that are waited for and wait for nobody hold up the job; where all wait, some
went past an operation that the others stand in: the fewest for those who wait.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torchllm.runtime.torch_compat import FlightRecord

ROOT = f"{Path(__file__).parents[2]}/"
NAMED = 4
"""ranks that are described one by one"""
ENDS = re.compile(r"(\d+)(?:<-|->)(\d+)$")


class Dump(NamedTuple):
    """What a rank knows."""

    rank: int
    host: str
    time: int
    """when, in nanoseconds since 1970, by the clock of the records"""
    stack: list[str]
    """main thread's, outermost first: file:line in function"""
    in_wait: bool
    """the main thread stands where ranks wait for others: perhaps for a message, of which gloo records nothing"""
    groups: dict[str, list[int]]
    """torch's name of each process group of this rank -> the ranks in it"""
    records: list[FlightRecord]
    """oldest first"""

    def recent(self, count: int) -> "Dump":
        """With only the last `count` records of each group."""
        kept, left = [], dict.fromkeys(self.groups, count)
        for record in reversed(self.records):
            left[record.group] = left.get(record.group, count) - 1
            if left[record.group] >= 0:
                kept.append(record)
        return self._replace(records=kept[::-1])

    def json(self) -> str:
        """As text."""
        return json.dumps(self._asdict() | {"records": [record._asdict() for record in self.records]})

    @property
    def place(self) -> str:
        """Where the main thread is: innermost line that is neither torch's nor Python's."""
        return next((line for line in reversed(self.stack) if "/lib/python3" not in line), self.stack[-1])


def read_dump(text: str) -> Dump:
    """The inverse of `Dump.json`."""
    fields = json.loads(text)
    return Dump(**fields | {"records": [FlightRecord(**record) for record in fields["records"]]})


class Wait(NamedTuple):
    """Ranks that wait in one operation."""

    sent: FlightRecord
    members: list[int]
    """of its group"""
    waiting: list[int]
    missing: list[int]
    """who is waited for; none: all have asked for it, yet it is not done"""
    seconds: float


def unfinished(records: Sequence[FlightRecord]) -> list[FlightRecord]:
    """What is asked for and not done.

    FOOTGUN: NCCL never marks the parts of a batch done, only the batch, which is recorded after them. So what comes
    before something of the same group that is done is done.
    """
    done: dict[str, int] = {}
    for index, record in enumerate(records):
        if record.done:
            done[record.group] = index
    return [record for index, record in enumerate(records) if not record.done and index > done.get(record.group, -1)]


def waits(dumps: Sequence[Dump]) -> list[Wait]:
    """Every operation that ranks wait in, the one that is waited for longest first."""
    entered: dict[tuple[str, int], int] = {}
    for dump in dumps:
        for record in dump.records:
            at = record.group, dump.rank
            entered[at] = max(entered.get(at, 0), record.sequence)
    found: dict[tuple[str, int, str], Wait] = {}  # by group, number (of a message: whose it is) and name
    for dump in dumps:
        first: dict[str, int] = {}
        for record in unfinished(dump.records):
            members = dump.groups.get(record.group, [])
            if not record.sequence:  # a message: its name ends with the two ranks in the group
                ends = ENDS.search(record.name)
                key = record.group, -1 - dump.rank, record.name
                missing = [members[int(ends[2])]] if ends and members else []
            elif first.setdefault(record.group, record.sequence) == record.sequence:
                key = record.group, record.sequence, record.name
                missing = [rank for rank in members if entered.get((record.group, rank), 0) < record.sequence]
            else:
                continue
            seconds = (dump.time - record.created) / 1e9
            wait = found.setdefault(key, Wait(record, members, [], missing, seconds))
            wait.waiting.append(dump.rank)
            found[key] = wait._replace(seconds=max(wait.seconds, seconds))
    return sorted(found.values(), key=lambda wait: -wait.seconds)


def culprits(dumps: Sequence[Dump], found: Sequence[Wait], world_size: int) -> list[int]:
    """Ranks that hold up the others; none where all have entered what does not end."""
    silent = set(range(world_size)) - {dump.rank for dump in dumps}
    waiting = {rank for wait in found for rank in wait.waiting} | {dump.rank for dump in dumps if dump.in_wait}
    awaited = {rank for wait in found for rank in wait.missing}
    ends = (awaited - waiting) | silent
    if not ends and any(dump.in_wait for dump in dumps):  # for a message of nobody knows whom
        ends = set(range(world_size)) - waiting
    if not ends:
        shares = [(len(wait.missing) / len(wait.waiting), wait.missing) for wait in found if wait.missing]
        ends = {rank for share, missing in shares if share == min(shares)[0] for rank in missing}
    return sorted(ends)


def skipped(dump: Dump, other: Dump, group: str) -> FlightRecord | None:
    """What `other` has asked its group for and `dump`'s rank has not, going on to the next one instead."""
    mine, theirs = ({r.sequence: r for r in one.records if r.group == group and r.sequence} for one in (dump, other))
    for number in sorted(mine.keys() & theirs.keys()):
        if not _same(mine[number], theirs[number]):
            return theirs[number] if number + 1 in theirs and _same(mine[number], theirs[number + 1]) else None
    return None


def _same(one: FlightRecord, other: FlightRecord) -> bool:
    return (one.name, one.where) == (other.name, other.where)


def report(dumps: Sequence[Dump], hosts: Sequence[str], seconds: float, folder: Path) -> str:
    """The message: who holds up the job, in what, and where that rank's program is. hosts: of every rank, by number."""
    by_rank = {dump.rank: dump for dump in dumps}
    found = waits(dumps)
    named = culprits(dumps, found, len(hosts))
    lines = [f"the job hangs: ranks have waited for others for {seconds:g} s (run.timeout), and it is ended"]
    for rank in named[:NAMED]:
        lines += _of_a_culprit(rank, by_rank, found, hosts[rank])
    if len(named) > NAMED:
        lines.append(f"the same goes for ranks {spans(named[NAMED:])}")
    if not named:
        lines += _of_an_operation(found)
    if lost := [dump for dump in dumps if dump.in_wait and not unfinished(dump.records)]:
        place = f" at {shorten(lost[0].place)}" + f" in rank {lost[0].rank}" * (len(lost) > 1)
        lines.append(f"{_ranks(dump.rank for dump in lost)} waited for a message{place}")
    return "\n  ".join([*lines, f"every rank's stack and last operations: {folder}"])


def _of_a_culprit(rank: int, by_rank: Mapping[int, Dump], found: Sequence[Wait], host: str) -> Iterator[str]:
    dump, wait = by_rank.get(rank), next((wait for wait in found if rank in wait.missing), None)
    who = f"rank {rank} ({host})"
    if wait is not None and wait.sent.sequence:
        yield f"{who} has not entered {_operation(wait)}; {_waited(wait)}"
    elif wait is not None:
        yield f"{who} has not answered {_operation(wait)}; {_waited(wait)}"
    else:
        yield f"{who} waits for nobody"
    if dump is None:
        yield f"rank {rank} says nothing: its process has ended, is stopped, or is stuck outside Python"
        return
    yield f"rank {rank}'s main thread is at {shorten(dump.place)}"
    if own := next((wait for wait in found if rank in wait.waiting), None):
        yield f"rank {rank} waits in {_operation(own)} meanwhile"
    if wait is not None and (left := skipped(dump, by_rank[wait.waiting[0]], wait.sent.group)):
        where = f" at {shorten(left.where)}" * bool(left.where)
        yield f"rank {rank} seems to have skipped number {left.sequence} of them, {left.name}{where}"


def _of_an_operation(found: Sequence[Wait]) -> Iterator[str]:
    for wait in found[:1]:
        yield f"all of the group have entered {_operation(wait)}, which does not end: the network, or unequal sizes"


def _operation(wait: Wait) -> str:
    number = f" number {wait.sent.sequence}" * bool(wait.sent.sequence)
    where = f" ({shorten(wait.sent.where)})" * bool(wait.sent.where)
    return f"{wait.sent.name}{number} of ranks {spans(wait.members)}{where}"


def _waited(wait: Wait) -> str:
    verb = "has" if len(wait.waiting) == 1 else "have"
    return f"{_ranks(wait.waiting)} {verb} waited {wait.seconds:.0f} s"


def _ranks(ranks: Sequence[int] | Iterator[int]) -> str:
    every = list(ranks)
    return f"rank{'s' * (len(every) > 1)} {spans(every)}"


def spans(ranks: Sequence[int]) -> str:
    """1, 2, 3, 7 -> "1-3, 7"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def shorten(place: str) -> str:
    """A place in this repository without the way to it."""
    return place.removeprefix(ROOT)
