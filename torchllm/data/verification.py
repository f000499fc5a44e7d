"""Verifies the files of corpora that no run has verified since they were last changed, each once per job.

One process per node verifies the node's part of the shards: before the first step for about a second, the rest slowly
in a background thread. Then it polls for changed files, and verifies them again. Files that are not verified yet are
checked by `CheckedFile` while they are read.

Before a checkpoint is saved the process looks at all files (`look`). So a file that was changed since the last poll is
found before the steps that may have read it are saved.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchllm.config.errors import DataError
from torchllm.data.checked_file import DamagedFile, FileState
from torchllm.data.corpus import CHECKING_THREADS, ShardStream
from torchllm.data.shard import ShardSplit

log = logging.getLogger(__name__)

_BYTES_AT_ONCE = 2**28
"""most bytes verified before the first step, or before a save; whole files, so it may be less"""
_BYTES_PER_SECOND = 2**27
"""most bytes per second in the background: some percent of one core"""
_SHARE_OF_CHECKS = 0.05
"""largest share of the time for polling: a poll of 60,000 files may take seconds"""


class _Unverified(NamedTuple):
    corpus: ShardStream
    shard: ShardSplit
    file: FileState


class _Stopped(Exception):
    """The thread was told to end."""


class Verification:
    """Verifies one node's part of the shards of some corpora."""

    def __init__(self, corpora: Sequence[ShardStream], part: int, parts: int) -> None:
        """Verify every `parts`-th shard of `corpora` from shard `part` on."""
        self._corpora = corpora
        self._part = part
        self._parts = parts
        self._waiting: deque[_Unverified] = deque()
        self._unverified_at_begin: set[_Unverified] = set()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self.seconds_between_checks = 60.0
        """least seconds between two polls for changed files"""
        self.problem: DamagedFile | None = None
        """the damage that the thread found; it then ends"""

    def begin(self) -> None:
        """Check the sizes of all files, and verify the first ones. Raises DataError that names a damaged file."""
        self._waiting.extend(self._find_unverified())
        self._unverified_at_begin.update(self._waiting)
        _verify_first(self._waiting, _BYTES_AT_ONCE)

    def look(self, everything: bool = False) -> bool:
        """Verify the files that were changed since `begin`: everything, or the first of many bytes.

        Return whether no file is left, so that the data read until now is right. Raises DamagedFile.
        """
        try:
            changed = self._find_changed()
            _verify_first(changed, math.inf if everything else _BYTES_AT_ONCE)
        except DamagedFile:
            raise
        except DataError as error:
            log.warning("%s; whether the data is as it was is not known", error)
            return False
        return not changed

    def start(self) -> None:
        """Go on in a thread."""
        self._stopping.clear()
        self._thread = threading.Thread(target=self._verify_and_watch, name="data verification", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; `start` goes on where it was."""
        if self._thread is not None:
            self._stopping.set()
            self._thread.join()
            self._thread = None

    def _find_unverified(self, threads: int = CHECKING_THREADS) -> Iterator[_Unverified]:
        for corpus in self._corpora:
            for shard, file in corpus.check(self._part, self._parts, threads).items():
                yield _Unverified(corpus, shard, file)

    def _find_changed(self, threads: int = CHECKING_THREADS) -> deque[_Unverified]:
        """Return the unverified files that were changed since `begin`; others are checked as they are read."""
        changed = deque(found for found in self._find_unverified(threads) if found not in self._unverified_at_begin)
        if changed:
            log.warning(
                "%s was changed while the run reads it (%d files in all) and is verified again: if it had other bytes "
                "for a while, steps may have been trained on them",
                changed[0].file.path,
                len(changed),
            )
        return changed

    def _verify_and_watch(self) -> None:
        """Verify waiting files, then poll for changed files, until a file is damaged or the thread is told to end."""
        try:
            while True:
                while self._waiting:
                    corpus, shard, _ = self._waiting[0]
                    corpus.verify(*shard, pace=lambda size: self._wait(size / _BYTES_PER_SECOND))
                    self._waiting.popleft()
                start = time.monotonic()
                # FOOTGUN: a pool refuses work while Python shuts down, with a traceback from this thread.
                self._waiting.extend(self._find_changed(threads=1))
                seconds = time.monotonic() - start
                if not self._waiting:
                    self._wait(max(self.seconds_between_checks, seconds / _SHARE_OF_CHECKS))
        except DamagedFile as damage:
            self.problem = damage
        except DataError as error:  # e.g. a stale handle of a network file system, which the readers may never meet
            log.warning("%s; the data is not verified any more in this run", error)
        except _Stopped:
            pass

    def _wait(self, seconds: float) -> None:
        """Wait, and raise _Stopped if the thread is told to end."""
        if self._stopping.wait(seconds):
            raise _Stopped


def _verify_first(waiting: deque[_Unverified], at_most: float) -> None:
    """Verify the first files, up to a number of bytes, and remove them from `waiting`. Raises DamagedFile."""
    size = 0
    while waiting:
        corpus, shard, _ = waiting[0]
        size += corpus.bytes_of(*shard)
        if size > at_most:
            break
        corpus.verify(*shard)
        waiting.popleft()
