"""What a process shows: lines of the log beside a progress bar, and an output that cannot be written any more."""

import logging
import os
import sys
from typing import TextIO

from tqdm import tqdm

ERASE_LINE = "\r\x1b[K"
"""moves a terminal's cursor to the begin of its line and erases the line"""


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes the log. A bar of this process is erased for a line of it, and drawn again below."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Leave out a line that cannot be written (a full disk, a pipe without reader): the log ends no run."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class RankFormatter(logging.Formatter):
    """Formats the lines of a rank that is not rank 0, whose bar may be in the same terminal: it is erased first."""

    def __init__(self, rank: int, stream: TextIO) -> None:
        super().__init__(f"rank {rank}: %(message)s")
        self.begin = ERASE_LINE if stream.isatty() else ""

    def format(self, record: logging.LogRecord) -> str:
        """Return a line."""
        return self.begin + super().format(record)


def drop_unwritten_output() -> None:
    """Drop what standard output and error could not write: Python would make it the exit status 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # closed when the process was started
                stream.flush()
        except OSError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())
            os.close(nothing)
