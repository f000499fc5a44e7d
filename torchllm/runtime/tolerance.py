"""Bookkeeping that may fail: what only observes a run logs its failure, once, and training goes on."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("torchllm")


class Tolerance:
    """Lets one piece of bookkeeping fail: logs the first failure, then nothing until it has worked again."""

    def __init__(self, name: str) -> None:
        """name: the file that is written, or what else can fail, as the log names it."""
        self.name = name
        self.failing = False
        """the latest attempt has failed"""

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Return a context around an attempt; an exception in it is logged and goes no further."""
        try:
            yield
        except Exception as error:
            self.failed(error)
        else:
            self.worked()

    def failed(self, error: Exception) -> None:
        """Note that an attempt has failed. What is no error of the system (full disk, …) is logged with its origin."""
        if not self.failing:
            reason, origin = (error.strerror or error, None) if isinstance(error, OSError) else (repr(error), error)
            log.warning("%s: %s; training goes on, and it is tried again", self.name, reason, exc_info=origin)
        self.failing = True

    def worked(self) -> None:
        """Note that an attempt has worked."""
        if self.failing:
            log.warning("%s: works again", self.name)
        self.failing = False
