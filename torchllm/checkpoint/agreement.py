"""How the ranks of a checkpoint agree: what fails on one rank is an error on every rank, never a hang.

Every function takes a host-side (gloo) process group of all ranks, or None for this process alone, and must be called
on all ranks. What they send each other is pickled: it comes from the ranks of this run, never from a file.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from torchllm.checkpoint.manifest import CheckpointError

Group = dist.ProcessGroup | None
T = TypeVar("T")

logger = logging.getLogger(__name__)


class _Outcome(NamedTuple):
    """What a function has returned, or the text of the error that it has raised."""

    value: Any
    error: str | None


def on_all(group: Group, function: Callable[[], T]) -> list[T]:
    """Call `function` on every rank and return what it returned on each, by rank.

    Raises CheckpointError on all ranks if it raised on any.
    """
    local_outcome = _attempt(function)
    outcomes = [local_outcome] * size_of(group)
    if group is not None:
        dist.all_gather_object(outcomes, local_outcome, group=group)
    errors = []
    for rank, outcome in enumerate(outcomes):
        if outcome.error is not None:
            errors.append(f"rank {rank}: {outcome.error}")
    if errors:
        raise CheckpointError("; ".join(errors))
    return [outcome.value for outcome in outcomes]


def on_first(group: Group, function: Callable[[], T]) -> T:
    """Call `function` on rank 0 only and return its value on every rank.

    Raises CheckpointError on all ranks if it raised.
    """
    outcomes = [_attempt(function) if rank_of(group) == 0 else _Outcome(None, None)]
    if group is not None:
        dist.broadcast_object_list(outcomes, group_src=0, group=group)
    value, error = outcomes[0]
    if error is not None:
        raise CheckpointError(error)
    return value


def rank_of(group: Group) -> int:
    """Return this process's rank in the group."""
    return 0 if group is None else dist.get_rank(group)


def size_of(group: Group) -> int:
    """Return the number of ranks in the group."""
    return 1 if group is None else dist.get_world_size(group)


def log_on_first(group: Group, message: str, level: int = logging.INFO) -> None:
    """Log a message on rank 0."""
    if rank_of(group) == 0:
        logger.log(level, message)


def _attempt(function: Callable[[], Any]) -> _Outcome:
    """Call `function` and catch what it raises: an error the user can act on by its text, a bug with its traceback."""
    try:
        return _Outcome(function(), None)
    except (CheckpointError, OSError) as error:
        return _Outcome(None, str(error))
    except Exception as error:
        logger.exception("an error in handling a checkpoint")
        return _Outcome(None, repr(error))
