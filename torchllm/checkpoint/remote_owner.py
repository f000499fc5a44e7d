"""Which run copies its checkpoints to a URL: one at a time, or their steps would mix. No torch.

    URL/owner/000001           {"nonce": ..., "run": ..., "host": ..., "since": ...}: the highest number is the owner
    URL/owner/000001.count     how often the owner has counted, or "released"

A run takes the next number by an object that is put if absent: of several runs one succeeds. Its nonce stays in the run
folder, whose lease only one job has, so a run that starts again is the owner at once. Another run watches the count: if
it changes within `OwnerTiming.limit` seconds, the URL is refused, else it is free; hosts' clocks do not matter.
"""

import json
import logging
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import NamedTuple

from torchllm.config.errors import UserError
from torchllm.runtime.storage import RemoteFolder, StorageError

FOLDER = "owner"
NONCE = "remote.json"
"""in the run's `checkpoints/`: the nonce of this run, by URL"""
RELEASED = b"released"

logger = logging.getLogger(__name__)


class OwnerTiming(NamedTuple):
    """In seconds; tests pass shorter times."""

    beat: float = 30.0
    """between two counts of the owner"""
    limit: float = 150.0
    """without a count after which an owner is dead"""
    look: float = 5.0
    """between two looks of a run that waits"""


TIMING = OwnerTiming()


class NotOwner(UserError):
    """Another run copies its checkpoints to this URL."""


class RemoteOwner:
    """This run as the owner of a URL; a thread counts until `release`."""

    def __init__(self, storage: RemoteFolder, root: Path, timing: OwnerTiming = TIMING) -> None:
        """Take the URL for the run with the step folders in `root`. Raises NotOwner, or StorageError."""
        self._storage = storage
        self._timing = timing
        self._number = self._take(root)
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._count, name="checkpoint-owner", daemon=True)
        self._thread.start()

    def _take(self, root: Path) -> int:
        url = self._storage.url
        nonce = read_nonce(root, url)
        newest = self._newest()
        if newest:
            owner = json.loads(self._storage.read(f"{FOLDER}/{newest:06d}"))
            if owner["nonce"] == nonce:
                return newest
            self._wait_for_end(newest, owner)
        nonce = nonce or uuid.uuid4().hex
        owner = {"nonce": nonce, "run": str(root.parent), "host": socket.gethostname(), "since": time.ctime()}
        if not self._storage.put_if_absent(f"{FOLDER}/{newest + 1:06d}", json.dumps(owner).encode()):
            raise NotOwner(f"checkpoint.remote = {url!r}: another run has just taken it")
        write_nonce(root, url, nonce)
        return newest + 1

    def _newest(self) -> int:
        return max((int(name) for name in self._storage.sizes(FOLDER) if name.isdecimal()), default=0)

    def _counted(self, number: int) -> bytes:
        name = f"{number:06d}.count"
        return self._storage.read(f"{FOLDER}/{name}") if name in self._storage.sizes(FOLDER) else b""

    def _wait_for_end(self, number: int, owner: dict[str, str]) -> None:
        """Return when an owner has released the URL, or has not counted for too long; else raise NotOwner."""
        url = self._storage.url
        who = f"the run {owner['run']} on {owner['host']}, since {owner['since']}"
        before = self._counted(number)
        if before == RELEASED:
            return
        logger.info("%s belongs to %s: watching for %.0f s whether it is alive", url, who, self._timing.limit)
        end = time.monotonic() + self._timing.limit
        while time.monotonic() < end:
            time.sleep(self._timing.look)
            now = self._counted(number)
            if now == RELEASED:
                return
            if now != before:
                raise NotOwner(f"checkpoint.remote = {url!r} is in use by {who}: name another URL, or end that run")

    def check(self) -> None:
        """Raise NotOwner if another run has taken the URL, because this one was suspended for too long."""
        newest = self._newest()
        if newest != self._number:
            raise NotOwner(f"{self._storage.url} belongs to another run by now: no checkpoint is copied any more")

    def _count(self) -> None:
        count = 0
        while not self._released.is_set():
            count += 1
            try:
                self._storage.put(f"{FOLDER}/{self._number:06d}.count", f"{count} {uuid.uuid4().hex}".encode())
            except StorageError as error:
                logger.warning("%s", error)  # it is tried again at the next count
            self._released.wait(self._timing.beat)

    def release(self) -> None:
        """Give the URL back, for any other run."""
        self._released.set()
        self._thread.join()
        self._storage.put(f"{FOLDER}/{self._number:06d}.count", RELEASED)


def read_nonce(root: Path, url: str) -> str:
    """Return the nonce with which the run copied to this URL before; "" if it did not."""
    try:
        stored = json.loads((root / NONCE).read_bytes())
    except (OSError, ValueError):
        return ""
    nonce: str = stored.get(url, "")
    return nonce


def write_nonce(root: Path, url: str, nonce: str) -> None:
    root.mkdir(parents=True, exist_ok=True)
    (root / NONCE).write_text(json.dumps({url: nonce}), encoding="utf-8")
