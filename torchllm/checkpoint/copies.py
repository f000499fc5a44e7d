"""Copies of a run's checkpoints in a second place: what a Checkpointer tells it, and when."""

from collections.abc import Sequence
from pathlib import Path


class Copies:
    """No copies: the interface of `remote.RemoteCopies`. Every method but `mark` must be called on all ranks."""

    def folders(self, local: Sequence[Path]) -> list[Path]:
        """Return the step folders that a run may resume from, newest first: the local ones, and those to fetch."""
        return list(local)

    def fetch(self, folder: Path) -> None:
        """Copy a step folder of `folders` here if it is not here yet. Raises CheckpointError if it cannot be read."""

    def add(self, folder: Path) -> None:
        """Copy a published step folder, in the background."""

    def mark(self) -> None:
        """Copy new marks of step folders, now: the rank that made them calls it, and the run may end after it."""

    def close(self) -> None:
        """Wait for the copies. The last call."""
