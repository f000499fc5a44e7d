"""Take the lease of a run folder, and keep it until the job ends; see `lease.py`. No torch."""

import atexit
import errno
import logging
import os
import re
import sys
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from torchllm.config.environment import LAUNCHED
from torchllm.config.errors import RefusedStart
from torchllm.runtime.stop import STOP, STOPPED
from torchllm.tools.config.environment import is_requeued, job_id
from torchllm.tools.launch.lease import (
    FOLDER,
    HANDED_DOWN,
    HELD,
    NUMBERED,
    RELEASED,
    Claim,
    LeaseLost,
    Owner,
    Timing,
    check_owner,
    has_ended,
    newest_number,
    numbered_file,
    parse_owner,
    read_if_there,
)
from torchllm.tools.launch.process_identity import this_process

log = logging.getLogger(__name__)

TAKE = "TORCHLLM_TAKE_LEASE"
"""environment variable of run_train.sh: the run folder that the launcher of node 0 takes"""
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}")
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""errors of link() on a file system without hard links"""


class FolderOwned(RefusedStart):
    """The run folder belongs to another job, which lives: nothing was touched."""


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
        HELD.append(self.release)
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
        HELD.remove(self.release)
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
        file = os.open(numbered_file(self.run_folder / FOLDER, self.claim.number), os.O_WRONLY)
        try:
            os.pwrite(file, replace(self._owner, count=count).text().encode(), 0)
        finally:
            os.close(file)


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
    """Do the work of `take_lease`, in a folder that exists. Raises OSError if the disk fails."""
    while True:
        newest = newest_number(lease_folder)
        if newest:
            _wait_until_free(run_folder, newest, timing)
        # Requests to an earlier job; once the lease is taken, run_train.sh makes a signal a request to this one.
        for name in (STOP, STOPPED):
            (run_folder / name).unlink(missing_ok=True)
        owner = Owner(
            **asdict(this_process()),
            nonce=uuid.uuid4().hex,
            job=job_id(),
            launched=os.environ.get(LAUNCHED, ""),
            since=int(time.time()),
            count=f"{0:010d}",
        )
        claim = Claim(newest + 1, owner.nonce)
        is_linked = _link(lease_folder, claim.number, owner)
        if is_linked and newest_number(lease_folder) == claim.number:
            _remove_older(lease_folder, claim.number)
            return Lease(run_folder, claim, owner, timing)
        if is_linked:  # the numbers had gone on, and this one had been removed, while this process was suspended
            numbered_file(lease_folder, claim.number).unlink(missing_ok=True)


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


def _wait_until_free(run_folder: Path, number: int, timing: Timing) -> None:
    """Return when the owner of `number` has ended, or another number is the newest.

    Raises FolderOwned if it lives, unless it is an earlier start of this job: on a node that Slurm does not reach any
    more and therefore has replaced, it goes on for as long as its ranks wait for the other nodes.
    """
    file = numbered_file(run_folder / FOLDER, number)
    name = f"run.folder = {str(run_folder)!r}"
    content = read_if_there(file)
    if content is None:  # whoever took the folder since the listing has removed it
        return
    owner = parse_owner(content)
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
        latest = read_if_there(file)
        if latest == content:
            continue
        content, owner = latest, parse_owner(latest)
        if content is None or newest_number(file.parent) != number:
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


def _link(lease_folder: Path, number: int, owner: Owner) -> bool:
    """Write the file of a number unless it exists; return whether that succeeded. Raises OSError if the disk fails."""
    temporary = lease_folder / f".{owner.nonce}"
    try:
        with temporary.open("xb") as file:
            file.write(owner.text().encode())
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, numbered_file(lease_folder, number))
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
            return _create(numbered_file(lease_folder, number), owner)
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
        if _TEMPORARY.fullmatch(name) or (NUMBERED.fullmatch(name) and int(name) < number):
            with suppress(OSError):
                (lease_folder / name).unlink()
