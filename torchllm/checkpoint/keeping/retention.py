"""Choose old checkpoints to delete, and delete them in the background, divided over the ranks. No torch."""

import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torchllm.checkpoint.manifest import hide

logger = logging.getLogger(__name__)


def folders_to_delete(newest_first: Iterable[Path], keep: int, is_whole: Callable[[Path], bool]) -> list[Path]:
    """Return the step folders that are older than the `keep` newest whole ones.

    `is_whole` is called from the newest folder on until `keep` are found. It may judge a folder that this run has not
    read by the sizes of its files. That is safe if the run has just written and hashed the newest, which always stays:
    an older one with a flipped bit may count among the `keep`, but the last good one is never deleted.
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
    """Return the folders that `rank` deletes, at most len / ranks rounded up; a single one goes to a random rank."""
    if not folders:
        return []
    first_rank = sum(folders[0].name.encode()) % ranks  # the name of a hidden folder ends in random digits
    return list(folders[(rank - first_rank) % ranks :: ranks])


def hide_all(folders: Iterable[Path]) -> list[Path]:
    """Hide step folders before their deletion, and return them; a folder that cannot be renamed is a warning."""
    hidden = []
    for folder in folders:
        try:
            hidden.append(hide(folder))
        except OSError as error:
            logger.warning("cannot delete the old checkpoint %s: %s", folder, error)
    return hidden


class BackgroundDeletion:
    """Deletes hidden folders, one after the other, in a background thread."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-deletion")

    def delete(self, folders: Iterable[Path]) -> None:
        """Delete the folders in the background; a failure is a warning, and is retried when the run is resumed."""
        for folder in folders:
            self._executor.submit(self._delete, folder)

    def close(self) -> None:
        """Wait until all are deleted."""
        self._executor.shutdown()

    def _delete(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # delete as much as possible
        try:
            if folder.exists():
                shutil.rmtree(folder)
        except OSError as error:
            # Logged as an error, since ranks other than 0 show only errors.
            logger.error(
                "warning: cannot delete %s, which is no checkpoint any more; delete it by hand: %s", folder, error
            )
