"""What fails on one rank is an error on every rank, never a hang: how the ranks of a checkpoint agree.

Every function takes a host-side (gloo) process group of all ranks, or None for this process alone, and must be called
on all of them. What they send each other is pickled: it comes from the ranks of this run, never from a file.
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
    value: Any
    error: str | None


def on_all(group: Group, function: Callable[[], T]) -> list[T]:
    """What the function returned on each rank; if it raised on one, CheckpointError on all."""
    mine = _attempt(function)
    outcomes = [mine] * size_of(group)
    if group is not None:
        dist.all_gather_object(outcomes, mine, group=group)
    if errors := [
        f"rank {rank}: {outcome.error}" for rank, outcome in enumerate(outcomes) if outcome.error is not None
    ]:
        raise CheckpointError("; ".join(errors))
    return [outcome.value for outcome in outcomes]


def on_first(group: Group, function: Callable[[], T]) -> T:
    """What the function returned on rank 0, the only one to call it; if it raised there, CheckpointError on all."""
    outcomes = [_attempt(function) if rank_of(group) == 0 else _Outcome(None, None)]
    if group is not None:
        dist.broadcast_object_list(outcomes, group_src=0, group=group)
    value, error = outcomes[0]
    if error is not None:
        raise CheckpointError(error)
    return value


def rank_of(group: Group) -> int:
    """This process's rank in the group."""
    return 0 if group is None else dist.get_rank(group)


def size_of(group: Group) -> int:
    """How many ranks the group has."""
    return 1 if group is None else dist.get_world_size(group)


def log_on_first(group: Group, message: str, level: int = logging.INFO) -> None:
    """Log on rank 0."""
    if rank_of(group) == 0:
        logger.log(level, message)


def _attempt(function: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(function(), None)
    except (CheckpointError, OSError) as error:
        return _Outcome(None, str(error))
    except Exception as error:
        logger.exception("an error in handling a checkpoint")
        return _Outcome(None, repr(error))
