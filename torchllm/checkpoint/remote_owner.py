"""Which run copies its checkpoints to a URL: one at a time, or their steps would mix. No torch.

    URL/owner/000001           {"nonce": ..., "run": ..., "host": ..., "since": ...}: the highest number is the owner
    URL/owner/000001.count     how often the owner has counted, or "released"

A run takes the next number by an object that is put if absent: of several runs one succeeds. Its nonce stays in the run
folder, whose lease only one job has, so a run that starts again there is the owner at once. Another run watches the
count: if it changes within `OwnerTiming.limit` seconds, the URL is refused, else free; hosts' clocks do not matter.
"""

import json
import logging
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import NamedTuple

from torchllm.checkpoint import manifest as manifests
from torchllm.config.errors import UserError
from torchllm.runtime.storage import RemoteFolder, StorageError

FOLDER = "owner"
NONCE = "owner"
"""in the run's `checkpoints/`: the nonce of this run"""
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


def newest_owner(storage: RemoteFolder) -> int:
    """Return the number of the owner of a URL; 0 if there was none."""
    return max((int(name) for name in storage.sizes(FOLDER) if name.isdecimal()), default=0)


def refuse_followed(storage: RemoteFolder, number: int) -> None:
    """Raise NotOwner if the owner of this number has been followed by another run."""
    if newest_owner(storage) != number:
        raise NotOwner(f"{storage.url} belongs to another run by now: no checkpoint is copied any more")


class RemoteOwner:
    """This run as the owner of a URL; a thread counts until `release`."""

    def __init__(self, storage: RemoteFolder, root: Path, timing: OwnerTiming = TIMING) -> None:
        """Take the URL for the run with the step folders in `root`. Raises NotOwner, or StorageError."""
        self._storage = storage
        self._timing = timing
        self.number = self._take(root)
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._count, name="checkpoint-owner", daemon=True)
        self._thread.start()

    def _take(self, root: Path) -> int:
        identity = {"nonce": nonce_of(root), "run": str(root.parent)}  # a copied run folder has the same nonce
        newest = newest_owner(self._storage)
        if newest:
            owner = self._read(newest)
            if owner is not None and identity.items() <= owner.items():
                return newest
            self._wait_for_end(newest, owner)
        name = f"{FOLDER}/{newest + 1:06d}"
        content = json.dumps(identity | {"host": socket.gethostname(), "since": time.ctime()}).encode()
        # False for its own record, too: a client writes again where the answer was lost
        if not self._storage.put_if_absent(name, content) and self._storage.read(name) != content:
            raise NotOwner(f"checkpoint.remote = {self._storage.url!r}: another run has just taken it")
        return newest + 1

    def _read(self, number: int) -> dict[str, str] | None:
        """Return the record of an owner; None if it is no JSON, as after a kill while it was written to a disk."""
        try:
            owner: dict[str, str] = json.loads(self._storage.read(f"{FOLDER}/{number:06d}"))
        except ValueError:
            return None
        return owner

    def _counted(self, number: int) -> bytes:
        name = f"{number:06d}.count"
        return self._storage.read(f"{FOLDER}/{name}") if name in self._storage.sizes(FOLDER) else b""

    def _wait_for_end(self, number: int, owner: dict[str, str] | None) -> None:
        """Return when an owner has released the URL, or has not counted for too long; else raise NotOwner."""
        url = self._storage.url
        who = f"the run {owner['run']} on {owner['host']}, since {owner['since']}" if owner else "an unknown run"
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

    def _count(self) -> None:
        count = 0
        while not self._released.is_set():
            count += 1
            try:
                self._storage.put(f"{FOLDER}/{self.number:06d}.count", f"{count} {uuid.uuid4().hex}".encode())
            except StorageError as error:
                logger.warning("%s", error)  # it is tried again at the next count
            self._released.wait(self._timing.beat)

    def release(self) -> None:
        """Give the URL back, for any other run."""
        self._released.set()
        self._thread.join()
        self._storage.put(f"{FOLDER}/{self.number:06d}.count", RELEASED)


def nonce_of(root: Path) -> str:
    """Return the nonce of the run with the step folders in `root`, which its first start makes."""
    file = root / NONCE
    if not file.exists():
        root.mkdir(parents=True, exist_ok=True)
        manifests.write_file(file, uuid.uuid4().hex.encode())
    return file.read_text(encoding="utf-8")
