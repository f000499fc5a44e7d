"""When bad records end a preparation: at the first one, or when too many of a file would be left out.

A process that writes a shard counts the records of each file by a RecordTally; the process that collects the shards
adds the tallies up in BadShare. Where a file is one record, as a text file is, all files of the source count together.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torchllm.config import Source
from torchllm.config.errors import DataError
from torchllm.tools.prepare.file_kinds import kind_of_file, source_kind
from torchllm.tools.prepare.records import ANOTHER_FORM, EMPTY_FILE, UNREADABLE, WRONG_KEY, Origin, TextRecord

_LOOKED_AT = 20
"""bad records at the beginning of a file after which all of it is taken to be bad"""
_NAMED = 3
"""files that an error names"""
_FEW = 10
"""bad records of a file that never end a preparation"""


class FileTally(NamedTuple):
    """The records of a file, or of a part of it."""

    records: int
    bad: dict[str, int]
    """how many have a fault, by the fault"""
    first: Origin | None
    """of the first bad one"""


class RecordTally:
    """Counts the records of a shard by file. If a bad one is an error, it is raised once the advice is known.

    A fault that all records of a file share is not cured by leaving them out. So the first bad record of a file without
    a good one before it waits for the next ones.
    """

    def __init__(self, source: Source, on_bad_record: str) -> None:
        is_whole_files = source.kind in ("text", "stdlib") and not source.delimiter
        self._kind = source.kind
        self._is_error = on_bad_record == "error"
        self._together = source.path if is_whole_files else ""
        """name under which all files count"""
        self._records: Counter[str] = Counter()
        self._bad: dict[str, Counter[str]] = {}
        self._first: dict[str, Origin] = {}
        self._waiting: TextRecord | None = None

    def good(self, record: TextRecord) -> None:
        """Count a record that is written. Raises DataError if one that waits is an error."""
        name = self._name(record)
        if self._waiting is not None:
            self._raise_waiting(is_shared=name != self._name(self._waiting))
        self._records[name] += 1

    def bad(self, record: TextRecord) -> None:
        """Count a bad record. Raises DataError if it, or the one that waits, is an error."""
        name = self._name(record)
        if record.fault == EMPTY_FILE:
            return
        if self._waiting is not None and name != self._name(self._waiting):
            self._raise_waiting(is_shared=True)
        has_good = self._records[name] > sum(self._bad.get(name, Counter()).values())
        self._records[name] += 1
        self._bad.setdefault(name, Counter())[record.fault] += 1
        self._first.setdefault(name, record.origin)
        if not self._is_error:
            return
        self._waiting = self._waiting or record
        if has_good:
            self._raise_waiting(is_shared=False)
        is_of_file = record.origin.byte is None and record.origin.row is None
        if is_of_file or self._records[name] == _LOOKED_AT:
            self._raise_waiting(is_shared=True)

    def finish(self) -> None:
        """Raise DataError if a record waits."""
        if self._waiting is not None:
            self._raise_waiting(is_shared=True)

    def tallies(self) -> dict[str, FileTally]:
        """Return the tallies of the files with bad records, and of the first and the last, in their order.

        Other shards may have a part of the first and the last.
        """
        names = list(self._records)
        wanted = {*names[:1], *names[-1:], *self._bad}
        found = {}
        for name in names:
            if name in wanted:
                bad = dict(self._bad.get(name, {}))
                found[name] = FileTally(self._records[name], bad, self._first.get(name))
        return found

    def _name(self, record: TextRecord) -> str:
        return self._together or record.origin.name

    def _raise_waiting(self, is_shared: bool) -> None:
        assert self._waiting is not None
        record = self._waiting
        count = self._records[self._name(record)]
        other = source_kind([kind_of_file(record.origin.name)])
        if is_shared and other not in ("", "text", self._kind) and record.fault != ANOTHER_FORM:
            advice = f'by its name the file is for kind = "{other}"'
        elif is_shared and record.fault == WRONG_KEY:
            advice = "set that key to a name that the file has, or take the file out of data.sources.path"
        elif not is_shared and record.fault != UNREADABLE:  # a source that lacks a file is refused, too
            advice = 'set data.on_bad_record = "skip" to leave such records out and count them'
        elif count == 1 or record.fault == UNREADABLE:
            advice = "fix the file, or take it out of data.sources.path"
        else:
            advice = (
                f"so are the {count - 1} after it: fix their common fault, or take the file out of data.sources.path"
            )
        raise DataError(f"{record.origin.describe()}: {record.fault}{record.detail}; {advice}")


class BadShare:
    """Adds up the tallies of all shards, and raises DataError when too many records of a file are left out."""

    def __init__(self, most: float) -> None:
        """`most`: share of the records of a file that may be left out; 1: all."""
        self._most = most
        self._tallies: dict[str, FileTally] = {}

    def add(self, tallies: Mapping[str, FileTally]) -> None:
        """Add the tallies of the next shard. Raises DataError if a file that ends in it lost too many records."""
        for name, (records, bad, first) in tallies.items():
            before = self._tallies.get(name, FileTally(0, {}, None))
            together = dict(Counter(before.bad) + Counter(bad))
            self._tallies[name] = FileTally(before.records + records, together, before.first or first)
        self._check(list(tallies)[:-1])

    def finish(self) -> None:
        """Raise DataError if any file lost too many records."""
        self._check(self._tallies)

    def _check(self, names: Iterable[str]) -> None:
        worst = [name for name in names if self._lost_too_many(self._tallies[name])]
        if not worst:
            return
        worst.sort(key=lambda name: -sum(self._tallies[name].bad.values()) / self._tallies[name].records)
        described = [describe_bad(name, self._tallies[name]) for name in worst[:_NAMED]]
        if len(worst) > _NAMED:
            described.append(f"and {len(worst) - _NAMED:,} more files")
        raise DataError(
            f'data.on_bad_record = "skip" would leave out {"; ".join(described)}. That is more than '
            f"data.max_bad_share = {self._most:g} of the records of a file: fix it, take it out of data.sources.path, "
            f"or set data.max_bad_share to at least {self._enough(worst):g}"
        )

    def _enough(self, names: Iterable[str]) -> float:
        """Return a share, in steps of 1 %, that allows all bad records so far."""
        tallies = [self._tallies[name] for name in names]
        if any(sum(tally.bad.values()) == tally.records or UNREADABLE in tally.bad for tally in tallies):
            return 1.0
        return math.ceil(100 * max(sum(tally.bad.values()) / tally.records for tally in tallies)) / 100

    def _lost_too_many(self, tally: FileTally) -> bool:
        bad = sum(tally.bad.values())
        if self._most >= 1 or bad == 0:
            return False
        return bad == tally.records or UNREADABLE in tally.bad or (bad > _FEW and bad > self._most * tally.records)


def describe_bad(name: str, tally: FileTally) -> str:
    """Return how many records of a file are bad, why, and where the first is."""
    bad = sum(tally.bad.values())
    faults = ", ".join(f"{count:,} {fault}" for fault, count in tally.bad.items())
    where = f", the first at {tally.first.describe()}" if tally.first else ""
    return f"{bad:,} of the {tally.records:,} records of {name} ({faults}{where})"


def check_not_empty(name: str, documents: int, left_out: Mapping[str, int]) -> None:
    """Raise DataError if a corpus has no document; `left_out`: records by their fault."""
    if documents:
        return
    faults = ", ".join(f"{count:,} {fault}" for fault, count in left_out.items())
    raise DataError(f"{name}: there is no document to train on" + (f" ({faults})" if faults else ""))
