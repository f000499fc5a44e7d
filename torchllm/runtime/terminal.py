"""Terminal output: log lines together with a progress bar, and output that cannot be written."""

import logging
import os
import sys
from typing import TextIO

from tqdm import tqdm

ERASE_LINE = "\r\x1b[K"
"""moves a terminal's cursor to the start of its line and erases the line"""


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes the log. A progress bar of this process is erased before a line, and drawn again below."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop a line that cannot be written (a full disk, a closed pipe): logging must not end a run."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class RankFormatter(logging.Formatter):
    """Formats the lines of ranks other than 0; rank 0's bar may be in the same terminal and is erased first."""

    def __init__(self, rank: int, stream: TextIO) -> None:
        super().__init__(f"rank {rank}: %(message)s")
        self.begin = ERASE_LINE if stream.isatty() else ""

    def format(self, record: logging.LogRecord) -> str:
        """Return a line."""
        return self.begin + super().format(record)


def drop_unwritten_output() -> None:
    """Drop unwritten standard output and error: Python would exit with status 120 because of it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # closed when the process was started
                stream.flush()
        except OSError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())
            os.close(nothing)
