"""Verifies the files of corpora that no run has verified since they were last changed, each once per job.

One process per node verifies the node's part of the shards: before the first step for about a second, the rest slowly
in a background thread. Then it polls for changed files, and verifies them again. Files that are not verified yet are
checked by `CheckedFile` while they are read.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from torchllm.data.checked_file import DamagedFile
from torchllm.data.corpus import Corpus
from torchllm.data.error import DataError
from torchllm.data.shard import ShardSplit

log = logging.getLogger(__name__)

_BYTES_AT_START = 2**28
"""most bytes verified before the first step; whole files, so it may be less"""
_BYTES_PER_SECOND = 2**27
"""most bytes per second in the background: some percent of one core"""
_SHARE_OF_CHECKS = 0.05
"""largest share of the time for polling: a poll of 60,000 files may take seconds"""


class _Unverified(NamedTuple):
    corpus: Corpus
    shard: ShardSplit


class _Stopped(Exception):
    """The thread was told to end."""


class Verification:
    """Verifies one node's part of the shards of some corpora."""

    def __init__(self, corpora: Sequence[Corpus], part: int, parts: int) -> None:
        """Verify every `parts`-th shard of `corpora` from shard `part` on."""
        self._corpora = corpora
        self._part = part
        self._parts = parts
        self._waiting: deque[_Unverified] = deque()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self.seconds_between_checks = 60.0
        """least seconds between two polls for changed files"""
        self.problem: DamagedFile | None = None
        """the damage that the thread found; it then ends"""

    def begin(self) -> None:
        """Check the sizes of all files, and verify the first ones. Raises DataError that names a damaged file."""
        self._find_unverified()
        size = 0
        while self._waiting:
            corpus, shard = self._waiting[0]
            size += corpus.bytes_of(*shard)
            if size > _BYTES_AT_START:
                break
            corpus.verify(*shard)
            self._waiting.popleft()

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

    def _find_unverified(self) -> None:
        for corpus in self._corpora:
            for shard in corpus.check(self._part, self._parts):
                self._waiting.append(_Unverified(corpus, shard))

    def _verify_and_watch(self) -> None:
        """Verify waiting files, then poll for changed files, until a file is damaged or the thread is told to end."""
        try:
            while True:
                while self._waiting:
                    corpus, shard = self._waiting[0]
                    corpus.verify(*shard, pace=self._pace)
                    self._waiting.popleft()
                start = time.monotonic()
                self._find_unverified()
                seconds = time.monotonic() - start
                if not self._waiting:
                    self._wait(max(self.seconds_between_checks, seconds / _SHARE_OF_CHECKS))
        except DamagedFile as damage:
            self.problem = damage
        except DataError as error:  # e.g. a stale handle of a network file system, which the readers may never meet
            log.warning("%s; the data is not verified any more in this run", error)
        except _Stopped:
            pass

    def _pace(self, size: int) -> None:
        """Wait for the time that these bytes take at the allowed rate."""
        self._wait(size / _BYTES_PER_SECOND)

    def _wait(self, seconds: float) -> None:
        """Wait, and raise _Stopped if the thread is told to end."""
        if self._stopping.wait(seconds):
            raise _Stopped
