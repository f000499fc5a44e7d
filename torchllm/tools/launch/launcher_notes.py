"""Notes that ranks leave for their launcher, beyond their exit status: files in a folder per attempt. No torch.

A rank that has joined the job has a note until it leaves normally. One that ends in between with exit status 0
(`os._exit(0)` in a library, say) would look like one that is done, while the other ranks wait for it.
"""

import os
from contextlib import suppress
from pathlib import Path

from torchllm.config.environment import RANK_NOTES

STORE = "TORCHLLM_STORE"
"""environment variable: file of the store that all ranks share, in a job of one node that has a launcher"""


def notes_folder() -> Path | None:
    """Return the folder of the notes; None without a launcher."""
    name = os.environ.get(RANK_NOTES)
    return Path(name) if name else None


def has_note(name: str) -> bool:
    """Return whether a rank of this node has left a note of this name (`error_report.py`); for the launcher."""
    folder = notes_folder()
    return folder is not None and (folder / name).exists()


def join(rank: int) -> None:
    """Note that this process, a rank, has joined the job."""
    folder = notes_folder()
    if folder is not None:
        with suppress(OSError):  # the launcher will know less
            (folder / f"rank-{rank}").touch()


def leave(rank: int) -> None:
    """Note that this rank has nothing left to do for the job: it may end with exit status 0."""
    folder = notes_folder()
    if folder is not None:
        with suppress(OSError):
            (folder / f"rank-{rank}").unlink()


def members() -> list[int]:
    """Return the ranks of this node that have joined the job and not left it; for the launcher."""
    folder = notes_folder()
    files = folder.glob("rank-*") if folder is not None else ()
    return sorted(int(file.name.removeprefix("rank-")) for file in files)
