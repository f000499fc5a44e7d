"""The pool of ranks of the tests: see `torchllm/tools/proof/pool.py`. `run(function, world_size, *arguments)`."""

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from tests.patience import patience
from torchllm.config import Config, applied_keys
from torchllm.tools.proof.pool import TIMEOUT, Pool, WorkerFailed

__all__ = ["POOL", "WorkerFailed", "nothing_applied", "run"]

POOL = Pool(preload=["tests.parity"], timeout=patience(TIMEOUT))
atexit.register(POOL.close)  # a script that uses the pool ends, although its ranks wait for more calls


@contextmanager
def nothing_applied() -> Iterator[None]:
    """Forget the config and the applied keys of earlier tests: a process trains once, those of tests often."""
    with (
        mock.patch.object(applied_keys, "_training", applied_keys._Training()),
        mock.patch.object(applied_keys, "_loaded", applied_keys._Loaded(Config(), {})),
    ):
        yield


def _call(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    with nothing_applied():
        return function(*arguments, **keywords)


def run(function: Callable[..., Any], world_size: int, *arguments: Any, **keywords: Any) -> list[Any]:
    """Call a function on each rank of the pool: see `Pool.run`."""
    return POOL.run(_call, world_size, function, *arguments, **keywords)
