"""Which old checkpoints go, and their deletion in the background, shared out over the ranks. No torch."""

import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torchllm.checkpoint.manifest import hide

logger = logging.getLogger(__name__)


def folders_to_delete(newest_first: Iterable[Path], keep: int, is_whole: Callable[[Path], bool]) -> list[Path]:
    """Return the step folders that are older than the `keep` newest whole ones.

    `is_whole` is asked until as many are found, and of none that is older. It may judge a folder that this run has not
    read by the sizes of its files. That is safe if the newest is one that the run has just written and hashed, for it
    always stays: an older one with a flipped bit may take a place among the `keep`, but cannot cost the last good one.
    """
    whole = 0
    old = []
    for folder in newest_first:
        if whole == keep:
            old.append(folder)
        elif is_whole(folder):
            whole += 1
    return old


def share_of(folders: Sequence[Path], rank: int, ranks: int) -> list[Path]:
    """Return the folders that `rank` deletes, at most len / ranks rounded up; a single one is not always rank 0's."""
    if not folders:
        return []
    first_rank = sum(folders[0].name.encode()) % ranks  # the name of a hidden folder ends in random digits
    return list(folders[(rank - first_rank) % ranks :: ranks])


def hide_all(folders: Iterable[Path]) -> list[Path]:
    """Hide step folders that are to be deleted, and return them; what cannot be renamed is a warning, and stays."""
    hidden = []
    for folder in folders:
        try:
            hidden.append(hide(folder))
        except OSError as error:
            logger.warning("cannot delete the old checkpoint %s: %s", folder, error)
    return hidden


class BackgroundDeletion:
    """Deletes folders that are hidden already, one after the other, in a thread of its own."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-deletion")

    def delete(self, folders: Iterable[Path]) -> None:
        """Delete the folders soon; what cannot be deleted is a warning, and is tried again when the run is resumed."""
        for folder in folders:
            self._executor.submit(self._delete, folder)

    def close(self) -> None:
        """Wait until all are deleted."""
        self._executor.shutdown()

    def _delete(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # all of it that can be deleted
        try:
            if folder.exists():
                shutil.rmtree(folder)
        except OSError as error:
            # An error by its level, for of the other ranks' messages than rank 0's only errors are shown.
            logger.error(
                "warning: cannot delete %s, which is no checkpoint any more; delete it by hand: %s", folder, error
            )
