"""Where torch keeps its compiled code. FOOTGUN: torch and Triton run the code that they find there.

So only the user may be able to write it: the folder is the user's and has mode 0700, and no other user can rename
a folder above it. torch's own default is a folder in a temporary folder that all users share, whose owner torch does
not look at. No torch.
"""

import atexit
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""environment variable of torch; Triton's cache is inside"""
MOST_NODES = 8
"""the ranks of more nodes would ask too much of a shared file system"""


def choose_compile_cache(run_folder: Path, nodes: int) -> None:
    """Set torch's cache of compiled code, unless the user has: next to the run folder, if that is safe.

    There a restart, on whatever node, and the next run find it. Else it is in the user's cache folder, or in a
    temporary one that is removed at the end of this process. nodes: of the job; of more than `MOST_NODES` each has a
    cache in its own temporary folder.
    """
    if VARIABLE in os.environ:
        return
    for folder in _candidates(run_folder, nodes):
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if is_private(folder):
                os.environ[VARIABLE] = str(folder)
                return
    os.environ[VARIABLE] = tempfile.mkdtemp(prefix="torchllm-compiled-")
    atexit.register(shutil.rmtree, os.environ[VARIABLE], ignore_errors=True)


def _candidates(run_folder: Path, nodes: int) -> Iterator[Path]:
    """Yield folders for the cache, the best first."""
    if nodes > MOST_NODES:
        yield Path(tempfile.gettempdir()) / f"torchllm-compiled-{os.getuid()}"
        return
    yield run_folder.absolute().parent / ".compiled"
    yield Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torchllm" / "compiled"


def is_private(folder: Path) -> bool:
    """Return whether only this user, and root, can write a folder or put another one in its place. Raises OSError.

    A folder of this user that others can only read is made private.
    """
    folder = folder.resolve(strict=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return False
    for above in folder.parents:
        status = above.stat()
        is_open = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
        if status.st_uid not in (0, os.getuid()) or is_open:
            return False
    folder.chmod(0o700)
    return True
