"""What the tests of the dry run share: a trace in a process of its own."""

import multiprocessing
from collections.abc import Callable
from functools import partial
from typing import Any

from torchllm.tools.dry_run.apart import in_processes


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` in a new process: DTensor's caches must not meet the groups of another layout."""
    preload()
    context = multiprocessing.get_context("forkserver")
    ((_, result),) = in_processes(context, partial(_call, function), [arguments], at_once=1)
    return result


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(*arguments)


def preload() -> None:
    """Let the server that the dry run's processes are forked from import torch once."""
    multiprocessing.set_forkserver_preload(["torchllm.tools.dry_run.run", "torch._dynamo"])
