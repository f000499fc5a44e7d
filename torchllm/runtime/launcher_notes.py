"""Notes for the launcher that has started this process: files in a folder that the launcher has made. No torch."""

import os
from contextlib import suppress
from pathlib import Path

from torchllm.config.errors import ErrorKind

FOLDER = "TORCHLLM_RANK_NOTES"
"""environment variable: the folder; unset without a launcher"""


def notes_folder() -> Path | None:
    """Return the folder of the notes; None without a launcher."""
    name = os.environ.get(FOLDER)
    return Path(name) if name else None


def write_note(name: str, text: str = "") -> None:
    """Write a note, if there is a launcher."""
    folder = notes_folder()
    if folder is not None:
        with suppress(OSError):  # the launcher will know less
            (folder / name).write_text(text)


def note_error(kind: ErrorKind) -> None:
    """Tell the launcher of an error; it may end this process before it ends itself."""
    write_note(kind)
