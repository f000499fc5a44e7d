"""Tolerate failures of code that only observes a run: log the first failure, and go on with training."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("torchllm")


class Tolerance:
    """Lets one piece of bookkeeping fail: logs the first failure, then nothing until it has worked again."""

    def __init__(self, name: str) -> None:
        """name: name in the log, e.g. the file that is written."""
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
        """Record a failed attempt. Errors other than the system's (full disk, …) are logged with their origin."""
        if not self.failing:
            reason, origin = (error.strerror or error, None) if isinstance(error, OSError) else (repr(error), error)
            log.warning("%s: %s; training goes on, and it is tried again", self.name, reason, exc_info=origin)
        self.failing = True

    def worked(self) -> None:
        """Record a successful attempt."""
        if self.failing:
            log.warning("%s: works again", self.name)
        self.failing = False
