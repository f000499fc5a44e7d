"""Files outside of a run's folder: those that a user names, and the cache.

A FIFO or a device is refused: reading one may wait for ever, or never end. A pointer of git-lfs is a small text file in
place of a file that was not fetched.
"""

import errno
import hashlib
import os
import stat
from pathlib import Path

from torchllm.config.schema import Data

LARGEST_TEXT = 64 << 20
"""most bytes of a config, an index or a template: a thousand times the usual size"""

_POINTER = b"version https://git-lfs.github.com/spec/"
_LARGEST_POINTER = 1024
"""bytes, by the specification of git-lfs"""

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def is_url(path: str) -> bool:
    """Return whether a path is the URL of a storage, and none of this machine."""
    return "://" in path


def check_regular(path: Path | str) -> int:
    """Return the size of a file in bytes. Raises OSError, also if it is no regular file; links are followed."""
    return _size_of(os.stat(path), path)


def open_regular(path: Path | str) -> int:
    """Open a file for reading, and return its descriptor. Raises OSError, also if it is no regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would wait for a writer
    try:
        _size_of(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: Path | str, at_most: int = LARGEST_TEXT) -> bytes:
    """Return the content of a small file. Raises OSError, also if it is no regular file or has over `at_most` bytes."""
    with os.fdopen(open_regular(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > at_most:
            raise OSError(errno.EFBIG, f"has over {at_most >> 20} MiB, more than such a file can have", str(path))
        return file.read()  # read(N) would ask for N bytes of memory at once, whatever the file has


def sha256_of(path: Path | str) -> str:
    """Return the sha256 of a file's content in hex. Raises OSError, also if it is no regular file."""
    with os.fdopen(open_regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size_of(status: os.stat_result, path: Path | str) -> int:
    """Return the size of a regular file. Raises OSError for anything else."""
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"is {kind}, not a regular file", str(path))
    return status.st_size


def why_pointer(path: str | Path, size: int) -> str:
    """Return advice if a file of `size` bytes is only a pointer of git-lfs; "" if it is none."""
    if not len(_POINTER) < size < _LARGEST_POINTER:
        return ""
    try:
        with open(path, "rb") as file:
            if file.read(len(_POINTER)) != _POINTER:
                return ""
    except OSError:
        return ""
    return "is a pointer of git-lfs in place of the file: run `git lfs pull` in its folder, or download it again"


def cache_root(data: Data) -> Path:
    """Return the folder of tokenized text and measured layouts: data.cache, or torchllm in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "torchllm"
    return Path(data.cache or default).expanduser()
