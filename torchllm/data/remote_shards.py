"""The shards of a corpus in object storage: MiB blocks that are read once, verified, and kept in the cache of the data.

The description of the corpus (`corpus_header.py`) is copied into a folder of the cache, with `remote.json`, which names
the URL. There a file of a shard is a folder of its blocks; a block that is missing is read from the storage, compared
with its checksum and renamed into place, so that all processes of a node, and later runs, share it. Where the disk has
little free space, the oldest blocks leave.
"""

import hashlib
import json
import logging
import math
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeVar

from torchllm.config.errors import DataError
from torchllm.data.checked_file import BLOCK, CheckedFile, CorpusFile, FindChecksums, blocks_of, damaged_blocks, has_sum
from torchllm.data.corpus_header import HEADER, REMOTE, SHARD_TABLE, SUMS
from torchllm.runtime.storage import RemoteFolder, StorageError

log = logging.getLogger(__name__)
T = TypeVar("T")

FREE_SHARE, FREE_BYTES = 0.1, 50 * 2**30
"""of the disk, the smaller of which stays free of blocks"""
MADE_AT_ONCE = 0.05
"""of that space, what is made free in addition, since all blocks are listed each time"""
BETWEEN_LOOKS = 64
"""blocks that a process writes between two looks at the free space"""
READ_AT_ONCE = 16
"""requests at a time, for the sequences of a step"""
WAITS = (1.0, 5.0, 20.0, 60.0)
"""seconds between attempts to read, on top of the retries of the storage's own package"""


def copy_description(url: str, cache: Path) -> Path:
    """Copy the description of the corpus at a URL into a folder of `cache`, and return it. Raises DataError.

    The header is read at each call: a corpus that was prepared again has another one, and its blocks another folder.
    """
    try:
        storage = RemoteFolder(url)
        header = storage.read(HEADER)
        folder = cache / "remote" / hashlib.sha256(url.encode() + header).hexdigest()[:16]
        if not (folder / HEADER).exists():
            folder.mkdir(parents=True, exist_ok=True)
            for name in (SHARD_TABLE, SUMS):
                content = storage.read(name)
                if hashlib.sha256(content).hexdigest().encode() not in header:
                    raise DataError(f"{url}/{name} is not as {HEADER} there says: delete both, and copy it again")
                write_whole(folder / name, content)
            write_whole(folder / REMOTE, json.dumps({"url": url}).encode())
            write_whole(folder / HEADER, header)  # last: a folder with it is complete
    except StorageError as error:
        raise DataError(str(error)) from error
    except OSError as error:
        raise DataError(f"data.cache: {cache} cannot be written ({error.strerror})") from error
    return folder


def write_whole(path: Path, content: bytes) -> None:
    """Write a file of the cache so that other processes see all of it or none. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


@lru_cache(maxsize=64)
def storage_of(url: str, process: int) -> RemoteFolder:
    """Return the storage at a URL for a process: connections do not survive a fork."""
    return RemoteFolder(url)


def patiently(ask: Callable[[], T], waits: Sequence[float]) -> T:
    """Return what a storage answers; ask again after each of `waits` seconds if it fails. Raises DataError."""
    try:
        return ask()
    except StorageError as error:
        if not waits:
            raise DataError(str(error)) from error
        log.warning("%s; trying again in %.0f s", error, waits[0])
        time.sleep(waits[0])
    return patiently(ask, waits[1:])


class RemoteFile(CheckedFile):
    """A file of a shard in object storage; its path is the folder of its blocks."""

    written = 0
    """blocks that this process has written"""
    has_warned = False
    """whether this process has said that it cannot write one"""

    def __init__(self, file: CorpusFile, url: str, find_checksums: FindChecksums) -> None:
        """Open `file`, which has the same name at the URL. No request is made."""
        self.file = file
        self.changed_ns = 0
        self._url = url
        self._checksums = find_checksums(0)

    def close(self) -> None:
        """There is nothing to close."""

    def has(self, number: int) -> bool:
        """Return whether a block is in the cache."""
        return self._path(number).exists()

    def read_block(self, number: int) -> bytes:
        """Return a block that has its checksum. Raises DataError."""
        try:
            content = self._path(number).read_bytes()
        except FileNotFoundError:
            content = b""
        if not self._is_right(number, content):  # missing, or damaged on this disk
            where = self.file.block(number)
            name = self.file.path.name
            content = patiently(lambda: storage_of(self._url, os.getpid()).read(name, where.start, where.stop), WAITS)
            if not self._is_right(number, content):
                raise damaged_blocks(self.file, [number])
            self._keep(number, content)
        return content

    def _is_right(self, number: int, content: bytes) -> bool:
        assert self._checksums is not None  # only files that were verified whole have none
        return len(content) == len(self.file.block(number)) and has_sum(content, self._checksums.sums[number])

    def _keep(self, number: int, content: bytes) -> None:
        """Write a block into the cache. Where that fails, as on a full disk, the block is read again next time."""
        RemoteFile.written += 1
        try:
            if RemoteFile.written % BETWEEN_LOOKS == 1:
                make_room(self.file.path.parent)
            self.file.path.mkdir(exist_ok=True)
            write_whole(self._path(number), content)
        except OSError as error:
            if not RemoteFile.has_warned:
                log.warning("%s: the cache cannot be written, training goes on: %s", self.file.path, error.strerror)
            RemoteFile.has_warned = True

    def _path(self, number: int) -> Path:
        return self.file.path / f"{number:06d}"

    def _read_bytes(self, size: int, offset: int) -> bytes:
        end = offset + size
        first = offset // BLOCK
        content = b"".join(map(self.read_block, blocks_of(range(offset, end))))
        return content[offset - first * BLOCK : end - first * BLOCK]

    def _check_blocks(self, checksums: object, start: int, stop: int) -> None:
        """`read_block` checks."""


def fetch(wanted: Iterable[tuple[CheckedFile, Iterable[int]]]) -> None:
    """Read the blocks of files that are missing into the cache, several at a time. Raises DataError."""
    missing = []
    for file, blocks in wanted:
        assert isinstance(file, RemoteFile)
        missing += [partial(file.read_block, block) for block in blocks if not file.has(block)]
    if missing:
        with ThreadPoolExecutor(min(READ_AT_ONCE, len(missing))) as pool:
            list(pool.map(lambda read: read(), missing))


def make_room(folder: Path) -> None:
    """Delete the oldest blocks of all corpora, a tenth at most, if the disk of one lacks free space. Raises OSError."""
    usage = shutil.disk_usage(folder)
    wanted = min(FREE_SHARE * usage.total, FREE_BYTES)
    if usage.free >= wanted:
        return
    leaving = math.ceil((wanted * (1 + MADE_AT_ONCE) - usage.free) / BLOCK)
    files = [file for file in folder.parent.glob("*/*.bin") if os.access(file, os.W_OK)]  # not another user's
    blocks = sorted((block for file in files for block in file.glob("[0-9]*")), key=_changed)
    for block in blocks[: min(leaving, -(-len(blocks) // 10))]:
        block.unlink(missing_ok=True)


def _changed(block: Path) -> float:
    """Return the time of a block's last change; 0 if another process has deleted it."""
    try:
        return block.stat().st_mtime
    except FileNotFoundError:
        return 0.0
