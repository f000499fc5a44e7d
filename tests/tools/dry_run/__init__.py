"""What the tests of the dry run share: a trace in a process of its own."""

import multiprocessing
from collections.abc import Callable
from functools import partial
from typing import Any


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` in a new process: DTensor's caches must not meet the groups of another layout."""
    preload()
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        return pool.apply(partial(function, *arguments))


def preload() -> None:
    """Let the server that the dry run's processes are forked from import torch once."""
    multiprocessing.set_forkserver_preload(["torchllm.tools.dry_run.run", "torch._dynamo"])
