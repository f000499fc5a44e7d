"""Requests to stop a run, as the run sees them. `torchllm/tools/launch/stop_requests.py` receives them. No torch."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

STOPPED = "stopped.json"
"""marker in the run folder: the run was asked to stop, has ended for that reason, and can be resumed"""
STOP = "stop"
"""file in the run folder that asks the run to stop; created by run_train.sh or by the user"""


class StopSource:
    """A source of requests to stop this rank. By default there are none."""

    before_early_end: Callable[[], None] = staticmethod(lambda: None)
    """called before a request ends the process in its start-up: takes back notes on work that is not done"""

    def requested(self) -> bool:
        """Return whether this rank was asked to stop."""
        return False

    def is_urgent(self) -> bool:
        """Return whether it was asked so long ago that an evaluation may not go on."""
        return False

    def begin_votes(self) -> None:
        """End this rank's start-up: called before its first vote on stopping."""

    def begin_training(self) -> None:
        """Mark every rank as started: called when the first vote is complete."""


class GivenUp(Exception):
    """An evaluation has ended early, without a result, on all ranks."""


class _Process:
    """The `may_give_up` that this process is in."""

    asks: Callable[[], bool] | None = None
    """the function that it was given; None: it is in none"""


@contextmanager
def may_give_up(asks: Callable[[], bool]) -> Iterator[None]:
    """Return a context where `should_give_up` calls `asks`, and that ends without an error after GivenUp."""
    _Process.asks = asks
    try:
        yield
    except GivenUp:
        pass
    finally:
        _Process.asks = None


def should_give_up() -> bool:
    """Return whether an evaluation should raise GivenUp. Call it on all ranks, before each batch."""
    return _Process.asks is not None and _Process.asks()


def write_marker(folder: Path, step: int | None) -> None:
    """Write the marker that tells run_train.sh: this run has ended early on purpose.

    step: of its last checkpoint; None if it was still starting and had nothing to save.
    """
    (folder / STOPPED).write_text(json.dumps({"step": step}) + "\n")
