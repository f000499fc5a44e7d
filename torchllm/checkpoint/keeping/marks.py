"""Status files of a published checkpoint, in its step folder. No torch.

    proven.json     the following steps were finite: the newest such checkpoint is never deleted
    suspect.json    the run went wrong after it, or trained on wrong data before: a restarted run loads an older one

The existence of the file is the mark; its content tells a person the reason. The mark is copied, moved and deleted with
its folder.
"""

import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from torchllm.checkpoint.manifest import CheckpointError, write_file

PROVEN = "proven.json"
SUSPECT = "suspect.json"

logger = logging.getLogger(__name__)


def mark_proven(folder: Path, reason: str) -> None:
    """Mark a step folder as proven: the following steps were finite."""
    _mark(folder, PROVEN, reason)


def mark_suspect(folder: Path, reason: str) -> None:
    """Mark a step folder as suspect: a restarted run loads an older one."""
    _mark(folder, SUSPECT, reason)


def _mark(folder: Path, name: str, reason: str) -> None:
    """Write a mark atomically; a failure is only a warning, since it must not end the run."""
    temporary = folder / f".{name}"
    try:
        write_file(temporary, json.dumps({"reason": reason}).encode() + b"\n")
        os.replace(temporary, folder / name)
    except OSError as error:
        logger.warning("cannot write %s: %s", folder / name, error)


def read_suspects(folders: Iterable[Path]) -> dict[Path, str]:
    """Return the step folders that are marked as suspect, and why."""
    suspects = {}
    for folder in folders:
        path = folder / SUSPECT
        if path.exists():
            suspects[folder] = _reason(path)
    return suspects


def _reason(path: Path) -> str:
    try:
        return str(json.loads(path.read_bytes())["reason"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return f"{path.name} cannot be read"


def find_proven(newest_first: Iterable[Path]) -> Path | None:
    """Return the newest step folder that is marked as proven, None if there is none."""
    for folder in newest_first:
        if (folder / PROVEN).exists():
            return folder
    return None


def without_suspects(
    newest_first: Sequence[Path], suspects: dict[Path, str], warn: Callable[[str], None]
) -> list[Path]:
    """Return the step folders that are not suspect.

    Warns of each suspect that is newer than all of them. Raises CheckpointError if there are folders, but all are
    suspect.
    """
    usable = [folder for folder in newest_first if folder not in suspects]
    if newest_first and not usable:
        listed = "\n  ".join(f"{folder.name}: {suspects[folder]}" for folder in newest_first)
        raise CheckpointError(
            f"every checkpoint in {newest_first[0].parent} is marked as suspect: name one with checkpoint.resume, or "
            f"move them away to start from scratch\n  {listed}"
        )
    for folder in newest_first:
        if folder == usable[0]:
            break
        warn(f"SUSPECT CHECKPOINT {folder.name} is skipped, an older one is used instead: {suspects[folder]}")
    return usable
