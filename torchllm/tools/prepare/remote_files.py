"""Files of text in object storage, read in ranges as they are tokenized: nothing is copied to this machine.

A file is named by its URL. Its version is a number of the entity tag that the storage gives its content, or of the
time of its last change: a file that is replaced while a corpus is made of it is refused (`FilePart.check_unchanged`).
"""

import io
import os
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from typing import Any, BinaryIO, NamedTuple

from torchllm.config.errors import DataError
from torchllm.data.remote_shards import WAITS, patiently, storage_of
from torchllm.runtime.storage import RemoteFolder, StorageError

AHEAD = 2**23
"""bytes of a request"""
KEPT = 4
"""ranges in memory: a file is opened more than once to find out what it is"""
TAGS = ("ETag", "etag", "LastModified", "last_modified", "updated", "mtime", "created")
"""fields of a listing that change with an object's content, in the order of preference; each protocol has some"""


class ObjectFacts(NamedTuple):
    """An object as its storage describes it."""

    size: int
    """in bytes"""
    version: int
    """another one if its content is another"""


def list_objects(url: str) -> dict[str, ObjectFacts]:
    """Return all objects below a URL, or the one of this name, by their URLs; {} without any. Raises DataError."""
    root, name = _split(url)
    try:
        entries = _storage(url).find(name)
    except StorageError as error:
        raise DataError(str(error)) from error
    found = {f"{root}{path}": _facts(entry) for path, entry in entries.items()}
    _known.update(found)
    _listed.update(found)
    return found


def facts_of(url: str) -> ObjectFacts | None:
    """Return size and version of an object; None if there is none. Raises DataError.

    They are asked of the storage, but for the first time after `list_objects`.
    """
    if url in _listed:
        _listed.remove(url)
        return _known[url]
    entry = patiently(lambda: _storage(url).entry(_split(url)[1]), WAITS)
    if entry is None:
        return None
    _known[url] = _facts(entry)
    return _known[url]


_known: dict[str, ObjectFacts] = {}
"""the last answer about each object, which reading it relies on"""
_listed: set[str] = set()
"""objects of `list_objects` that `facts_of` was not asked about since"""


def open_object(url: str) -> BinaryIO:
    """Open an object for reading. Raises OSError if there is none, DataError if the storage fails."""
    facts = _known.get(url) or facts_of(url)
    if facts is None:
        raise FileNotFoundError(f"no such object: {url}")
    return io.BufferedReader(_Object(url, facts), AHEAD)


class _Object(io.RawIOBase):
    """The bytes of an object."""

    def __init__(self, url: str, facts: ObjectFacts) -> None:
        self._url = url
        self._facts = facts
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        begins = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._facts.size}
        self._position = max(0, begins[whence] + offset)
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Read from the present position to the end of a range. Raises DataError."""
        if self._position >= self._facts.size:
            return 0
        number, start = divmod(self._position, AHEAD)
        content = _range(self._url, self._facts, number, os.getpid())[start : start + len(buffer)]
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


@lru_cache(maxsize=KEPT)
def _range(url: str, facts: ObjectFacts, number: int, process: int) -> bytes:
    """Return a range of `AHEAD` bytes of an object, a shorter one at its end. Raises DataError."""
    start, stop = number * AHEAD, min((number + 1) * AHEAD, facts.size)
    content = patiently(lambda: _storage(url).read(_split(url)[1], start, stop), WAITS)
    if len(content) != stop - start:
        raise DataError(f"{url} was changed while it was read: start again")
    return content


def _split(url: str) -> tuple[str, str]:
    """Return the URL of a bucket, and the name of an object there: s3://bucket/ and run/a.txt."""
    scheme, _, rest = url.partition("://")
    bucket, _, name = rest.partition("/")
    return f"{scheme}://{bucket}/", name


def _storage(url: str) -> RemoteFolder:
    """Return the bucket of a URL. Raises DataError if its protocol is not known here."""
    try:
        return storage_of(_split(url)[0], os.getpid())
    except StorageError as error:
        raise DataError(str(error)) from error


def _facts(entry: Mapping[str, Any]) -> ObjectFacts:
    tag = next((str(entry[name]) for name in TAGS if entry.get(name)), "")
    return ObjectFacts(int(entry["size"]), int.from_bytes(sha256(tag.encode()).digest()[:7]))
