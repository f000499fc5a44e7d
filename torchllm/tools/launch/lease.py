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

import atexit
import errno
import json
import logging
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from torchllm.config.environment import LAUNCHED
from torchllm.config.errors import RefusedStart, UserError
from torchllm.runtime.stop import STOP, STOPPED
from torchllm.tools.config.environment import is_requeued, job_id
from torchllm.tools.launch.process_identity import Process, is_gone, this_process

log = logging.getLogger(__name__)

FOLDER = "lease"
"""in the run folder"""
TAKE = "TORCHLLM_TAKE_LEASE"
"""environment variable of run_train.sh: the run folder that the launcher of node 0 takes"""
HANDED_DOWN = "TORCHLLM_LEASE"
"""environment variable: the claim of the launcher, for its ranks"""
RELEASED = "released".ljust(10)
"""count of an owner whose job has ended; as long as any other count"""
DONE = "done".ljust(10)
"""count of an owner whose job has ended without an error"""

_NUMBERS = ("pid", "started", "since")
"""fields of an Owner that are numbers; the others are texts"""
_FILE = re.compile(r"\d{6,}")
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}")
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""errors of link() on a file system without hard links"""


class FolderOwned(RefusedStart):
    """The run folder belongs to another job, which lives: nothing was touched."""


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
        """Return the content of the file."""
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


class Lease:
    """A lease that this process holds.

    A thread counts in its file until `release` is called. Where another job has taken the lease, it ends this process.
    """

    def __init__(self, run_folder: Path, claim: Claim, owner: Owner, timing: Timing) -> None:
        self.run_folder = run_folder
        self.claim = claim
        self._owner = owner
        self._timing = timing
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._count, name="lease", daemon=True)
        self._thread.start()
        _HELD.append(self)
        atexit.register(self.release)  # a process that ends gives its folder back, unless it is killed

    def release(self, count: str = RELEASED) -> None:
        """Give the folder back: a job that waits for it may start at once. The second call does nothing.

        count: RELEASED or DONE.
        """
        if self._released.is_set() or os.getpid() != self._owner.pid:  # a forked child has the object, not the lease
            return
        self._released.set()
        self._thread.join(self._timing.beat)
        with suppress(OSError):  # the process ends, which frees the folder a little later
            self._write(count)
        _HELD.remove(self)
        atexit.unregister(self.release)

    def _count(self) -> None:
        """Count every `Timing.beat` seconds, until `release` is called or the lease is lost."""
        count = 0
        is_failing = False
        while not self._released.wait(self._timing.beat):
            count += 1
            try:
                check_owner(self.run_folder, self.claim)
                self._write(f"{count:010d}")
                is_failing = False
            except LeaseLost as lost:
                print(f"error: {lost}", file=sys.stderr, flush=True)
                os._exit(1)  # the main thread may be anywhere, a save among it: nothing more may be written
            except OSError as error:
                if not is_failing:
                    log.warning("cannot renew the lease of %s: %s", self.run_folder, error)
                is_failing = True

    def _write(self, count: str) -> None:
        """Overwrite the file of this lease in place; it is not made anew where another job has removed it."""
        file = os.open(_file(self.run_folder / FOLDER, self.claim.number), os.O_WRONLY)
        try:
            os.pwrite(file, replace(self._owner, count=count).text().encode(), 0)
        finally:
            os.close(file)


_HELD: list[Lease] = []
"""the leases of this process"""


def release_leases(count: str = RELEASED) -> None:
    """Release every lease that this process holds. count: RELEASED, or DONE after a success."""
    for lease in list(_HELD):
        lease.release(count)


def take_lease(run_folder: Path, timing: Timing | None = None) -> Lease:
    """Make this process the owner of a run folder, which is created if it is missing.

    Waits up to `Timing.limit` seconds for a sign of life of an owner, unless its process is known to have ended. Raises
    FolderOwned if another job owns the folder, and RefusedStart if it cannot be written.
    """
    try:
        lease_folder = run_folder / FOLDER
        lease_folder.mkdir(parents=True, exist_ok=True)
        return _take(run_folder, lease_folder, timing or Timing())
    except OSError as error:
        raise RefusedStart(f"run.folder = {str(run_folder)!r} cannot be written: {error}") from error


def _take(run_folder: Path, lease_folder: Path, timing: Timing) -> Lease:
    """Do what `take_lease` says, in a folder that exists. Raises OSError if the disk fails."""
    while True:
        newest = _newest_number(lease_folder)
        if newest:
            _wait_until_free(run_folder, newest, timing)
        _remove_requests(run_folder)
        owner = _new_owner()
        claim = Claim(newest + 1, owner.nonce)
        is_linked = _link(lease_folder, claim.number, owner)
        if is_linked and _newest_number(lease_folder) == claim.number:
            _remove_older(lease_folder, claim.number)
            return Lease(run_folder, claim, owner, timing)
        if is_linked:  # the numbers had gone on, and this one had been removed, while this process was suspended
            _file(lease_folder, claim.number).unlink(missing_ok=True)


def _remove_requests(run_folder: Path) -> None:
    """Remove stop requests to an earlier job from a free folder.

    Not after the lease is taken: run_train.sh makes a signal a request as soon as it is.
    """
    for name in (STOP, STOPPED):
        (run_folder / name).unlink(missing_ok=True)


def own_for_ranks() -> None:
    """Take the run folder that run_train.sh names, if it does, and hand the claim down to the ranks of a launcher.

    Raises SystemExit with 2, after a line on stderr, if the folder belongs to another job or cannot be written.
    """
    run_folder = os.environ.pop(TAKE, None)
    if run_folder is None:
        return
    try:
        lease = take_lease(Path(run_folder))
    except RefusedStart as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    os.environ[HANDED_DOWN] = lease.claim.text()


def take_or_inherit(run_folder: Path) -> Claim:
    """Return the claim that a launcher has handed down, or else of a new lease that this process takes.

    Errors as in `take_lease`. A claim on another folder, in the environment of a job that was started
    from within a job, does not count.
    """
    claim = Claim.parse(os.environ.get(HANDED_DOWN, ""))
    if claim is not None:
        with suppress(OSError):
            owner = _parse(_file(run_folder / FOLDER, claim.number).read_bytes())
            if owner is not None and owner.nonce == claim.nonce:
                return claim
    return take_lease(run_folder).claim


def check_owner(run_folder: Path, claim: Claim) -> None:
    """Raise LeaseLost unless the folder still belongs to who has this claim. It costs a listing and an open.

    A file system that does not answer is not a reason: the next write will fail by itself.
    """
    lease_folder = run_folder / FOLDER
    name = f"run.folder = {str(run_folder)!r}"
    try:
        newest = _newest_number(lease_folder)
        owner = _parse(_file(lease_folder, newest).read_bytes()) if newest else None
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


def _wait_until_free(run_folder: Path, number: int, timing: Timing) -> None:
    """Return when the owner of `number` has ended, or another number is the newest.

    Raises FolderOwned if it lives, unless it is an earlier start of this job: on a node that Slurm does not reach any
    more and therefore has replaced, it goes on for as long as its ranks wait for the other nodes.
    """
    file = _file(run_folder / FOLDER, number)
    name = f"run.folder = {str(run_folder)!r}"
    content = _read(file)
    if content is None:  # whoever took the folder since the listing has removed it
        return
    owner = _parse(content)
    if not has_ended(owner):
        wait = f"waiting up to {timing.limit:g} s for a sign of life"
        print(f"{name} belongs to {owner or 'an unknown job'}: {wait}", file=sys.stderr, flush=True)
    is_earlier_start = False
    silent = 0.0
    looked = timing.clock()
    while not has_ended(owner) and silent < timing.limit:
        timing.sleep(timing.look)
        moment = timing.clock()
        silent += min(moment - looked, 2 * timing.look)  # if this process was suspended, so, perhaps, was the owner
        looked = moment
        latest = _read(file)
        if latest == content:
            continue
        content, owner = latest, _parse(latest)
        if content is None or _newest_number(file.parent) != number:
            return
        if has_ended(owner):
            return
        if owner is None or not is_requeued() or owner.job != job_id():
            raise FolderOwned(
                f"{name} belongs to another job, which is running: {owner or 'unknown'}. "
                "End that job, or set another run.folder"
            )
        if not is_earlier_start:
            wait = "this job's earlier start, which lives on a node that Slurm has given up; waiting for its end"
            print(f"{name} belongs to {owner}: {wait}", file=sys.stderr, flush=True)
        is_earlier_start = True
        silent = 0.0


def _read(file: Path) -> bytes | None:
    """Return the content of a file, as it is now; None if the file is gone."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None


def has_ended(owner: Owner | None) -> bool:
    """Return whether an owner has given its folder back, or is known to be gone; False of an unknown one."""
    return owner is not None and (owner.count in (RELEASED, DONE) or is_gone(owner))


def newest_owner(run_folder: Path) -> Owner | None:
    """Return the last owner of a run folder, as its file says now; None if there is none. Raises OSError."""
    lease_folder = run_folder / FOLDER
    try:
        number = _newest_number(lease_folder)
        content = _read(_file(lease_folder, number)) if number else None
    except FileNotFoundError:
        return None
    return _parse(content)


def _new_owner() -> Owner:
    return Owner(
        **asdict(this_process()),
        nonce=uuid.uuid4().hex,
        job=job_id(),
        launched=os.environ.get(LAUNCHED, ""),
        since=int(time.time()),
        count=f"{0:010d}",
    )


def _parse(content: bytes | None) -> Owner | None:
    """Return the owner that a file names; None if the file is damaged or not written yet."""
    try:
        owner = Owner(**json.loads(content or b""))
    except (ValueError, TypeError):
        return None
    for name, value in asdict(owner).items():
        if type(value) is not (int if name in _NUMBERS else str):
            return None
    return owner


def _file(lease_folder: Path, number: int) -> Path:
    return lease_folder / f"{number:06d}"


def _newest_number(lease_folder: Path) -> int:
    """Return the highest number in the folder of a lease; 0 if there is none. Raises FileNotFoundError without it."""
    numbers = [int(name) for name in os.listdir(lease_folder) if _FILE.fullmatch(name)]
    return max(numbers, default=0)


def _link(lease_folder: Path, number: int, owner: Owner) -> bool:
    """Write the file of a number unless it exists; return whether that succeeded. Raises OSError if the disk fails."""
    temporary = lease_folder / f".{owner.nonce}"
    try:
        with temporary.open("xb") as file:
            file.write(owner.text().encode())
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, _file(lease_folder, number))
        except (FileExistsError, FileNotFoundError) as error:
            # A network file system that repeats a request whose answer was lost says "exists" about a link that it has
            # made itself: the number of links decides. Opening the file makes it ask the server.
            try:
                with temporary.open("rb") as file:
                    is_linked = os.fstat(file.fileno()).st_nlink == 2
            except FileNotFoundError:  # another process has removed it, and is a step ahead
                return False
            if not is_linked and isinstance(error, FileNotFoundError):  # it is there: link() would fail for ever
                raise
            return is_linked
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return _create(_file(lease_folder, number), owner)
        return True
    finally:
        temporary.unlink(missing_ok=True)


def _create(file: Path, owner: Owner) -> bool:
    """Do the same without links: a reader may see the file before its content, and takes it for an unknown owner's."""
    try:
        with file.open("xb") as created:
            created.write(owner.text().encode())
    except FileExistsError:
        return False
    return True


def _remove_older(lease_folder: Path, number: int) -> None:
    """Remove the files of lower numbers, and of processes that were killed while they took the lease.

    A process that is still taking it starts again. Files that cannot be removed do no harm.
    """
    for name in os.listdir(lease_folder):
        if _TEMPORARY.fullmatch(name) or (_FILE.fullmatch(name) and int(name) < number):
            with suppress(OSError):
                (lease_folder / name).unlink()
