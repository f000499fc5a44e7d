"""A run folder has one owner: the lease, which one process of a job holds for as long as the job runs. No torch.

Two jobs in one run folder delete each other's saves and cut each other's metrics.jsonl. So a job takes the lease before
anything is written: node 0's launcher takes it, and holds it over restarts of the ranks; or rank 0 of a recipe that was
started without a launcher. Processes that only read a run take nothing.

`RUN/lease` holds numbered files, and the highest number owns the folder. To take it, a process writes a temporary file
and links it to the next number: link() is atomic, so exactly one of several processes succeeds. The owner increments
a counter in its file every `Timing.beat` seconds. A process that wants the folder polls the counter:

    it changes                                       the owner lives: the folder is refused
    it says RELEASED or DONE                         free
    same boot of the same machine, process gone      free at once
    no change for `Timing.limit` seconds             free

by its own monotonic clock: hosts' clocks and a file's times may be hours off. An owner that was only suspended may come
back after that. Therefore it looks for a higher number before it publishes a checkpoint, appends to metrics.jsonl or
deletes leftovers of a save (`check_owner`), and ends itself if there is one. Between that look and the write it may
be suspended too; then the rename that publishes a checkpoint still overwrites nothing.

This works on NFS: opening a file or a folder asks the server for changes, and the highest file is never removed.
"""

import json
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from torchllm.config.errors import UserError
from torchllm.tools.launch.process_identity import Process, is_gone

FOLDER = "lease"
"""in the run folder"""
HANDED_DOWN = "TORCHLLM_LEASE"
"""environment variable that gives the launcher's claim to its ranks"""
RELEASED = "released".ljust(10)
"""count of an owner whose job has ended; as long as any other count"""
DONE = "done".ljust(10)
"""count of an owner whose job has ended without an error"""

_NUMBERS = ("pid", "started", "since")
"""fields of an Owner that are numbers; the others are texts"""
NUMBERED = re.compile(r"\d{6,}")


class LeaseLost(UserError):
    """The run folder belongs to another job by now, or is gone: this job may not write there any more."""


class Timing(NamedTuple):
    """When an owner counts, and when a reader believes that it is dead. Tests pass shorter times."""

    beat: float = 10.0
    """seconds between two counts of the owner"""
    limit: float = 90.0
    """seconds without a count after which an owner is dead"""
    look: float = 1.0
    """seconds between two looks of a reader"""
    clock: Callable[[], float] = time.monotonic
    """of the reader"""
    sleep: Callable[[float], None] = time.sleep
    """of the reader"""


@dataclass(frozen=True)
class Owner(Process):
    """The content of a file of the lease. Its length never changes, so it can be overwritten in place."""

    nonce: str
    """differs between any two attempts to take a lease"""
    job: str
    """the scheduler's id of the job; "" without a scheduler"""
    launched: str
    """`LAUNCHED`: run_train.sh recognizes its own job by it; "" without it"""
    since: int
    """seconds since 1970, by the owner's clock: for messages only"""
    count: str
    """ten digits; RELEASED or DONE when the job has ended"""

    def text(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    def __str__(self) -> str:
        job = f"job {self.job}, " if self.job else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(self.since))
        return f"{job}process {self.pid} on {self.host}, since {since}"


class Claim(NamedTuple):
    """Proof that a job owns a folder: it wrote the file of this number."""

    number: int
    nonce: str

    def text(self) -> str:
        """Return the claim as one word; `parse` is the inverse."""
        return f"{self.number}:{self.nonce}"

    @classmethod
    def parse(cls, text: str) -> "Claim | None":
        """Read a word that `text` wrote; None if it is none."""
        match = re.fullmatch(r"(\d{1,18}):([0-9a-f]{32})", text)
        return cls(int(match[1]), match[2]) if match else None


def inherited_claim(run_folder: Path) -> Claim | None:
    """Return the claim on a run folder that a launcher has handed down to its ranks; None if there is none.

    A claim on another folder, in the environment of a job that was started from within a job, does not count.
    """
    claim = Claim.parse(os.environ.get(HANDED_DOWN, ""))
    if claim is not None:
        with suppress(OSError):
            owner = parse_owner(numbered_file(run_folder / FOLDER, claim.number).read_bytes())
            if owner is not None and owner.nonce == claim.nonce:
                return claim
    return None


HELD: list[Callable[[str], None]] = []
"""the `Lease.release` of each lease that this process holds"""


def release_leases(count: str = RELEASED) -> None:
    """Release every lease that this process holds. count: RELEASED, or DONE after a success."""
    for release in list(HELD):
        release(count)


def check_owner(run_folder: Path, claim: Claim) -> None:
    """Raise LeaseLost unless the folder still belongs to who has this claim. It costs a listing and an open.

    A file system that does not answer is not a reason: the next write will fail by itself.
    """
    lease_folder = run_folder / FOLDER
    name = f"run.folder = {str(run_folder)!r}"
    try:
        newest = newest_number(lease_folder)
        owner = parse_owner(numbered_file(lease_folder, newest).read_bytes()) if newest else None
    except FileNotFoundError:
        owner, newest = None, 0
    except OSError:
        return
    if newest == 0:
        raise LeaseLost(
            f"{name}: its lease is gone: the folder was deleted, moved or unmounted; nothing more is written"
        )
    if newest != claim.number or (owner is not None and owner.nonce != claim.nonce):
        raise LeaseLost(
            f"{name} belongs to another job by now ({owner or 'unknown'}): this one was suspended for too long; "
            "nothing more is written"
        )


def read_if_there(file: Path) -> bytes | None:
    """Return the content of a file, as it is now; None if the file is gone."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None


def has_ended(owner: Owner | None) -> bool:
    """Return whether an owner has given its folder back, or is known to be gone; False of an unknown one."""
    return owner is not None and (owner.count in (RELEASED, DONE) or is_gone(owner))


def parse_owner(content: bytes | None) -> Owner | None:
    """Return the owner that a file names; None if the file is damaged or not written yet."""
    try:
        owner = Owner(**json.loads(content or b""))
    except (ValueError, TypeError):
        return None
    for name, value in asdict(owner).items():
        if type(value) is not (int if name in _NUMBERS else str):
            return None
    return owner


def numbered_file(lease_folder: Path, number: int) -> Path:
    return lease_folder / f"{number:06d}"


def newest_number(lease_folder: Path) -> int:
    """Return the highest number in the folder of a lease; 0 if there is none. Raises FileNotFoundError without it."""
    numbers = [int(name) for name in os.listdir(lease_folder) if NUMBERED.fullmatch(name)]
    return max(numbers, default=0)
