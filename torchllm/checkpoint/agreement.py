"""How the ranks of a checkpoint agree: a failure on one rank is an error on every rank, never a hang.

Every function takes a host-side (gloo) process group of all ranks, or None for this process alone, and must be called
on all ranks. Without errors, ranks exchange a few bytes as tensors; objects are pickled only by rank 0, and for error
texts. Unpickled objects come from the ranks of this run, never from a file.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchllm.checkpoint.manifest import CheckpointError, DamagedCheckpoint
from torchllm.config.errors import UserError
from torchllm.config.system_errors import describe_system_error

Group = dist.ProcessGroup | None
T = TypeVar("T")

logger = logging.getLogger(__name__)


class _Outcome(NamedTuple):
    """The result of a function on a rank, or the text of its error."""

    value: Any
    error: str = ""
    damaged: bool = False
    """whether the error was a DamagedCheckpoint"""


def on_all(group: Group, function: Callable[[], T]) -> T:
    """Call `function` on every rank and return its result on this one.

    Raises CheckpointError on all ranks if it raised on any; DamagedCheckpoint if all errors are DamagedCheckpoint.
    """
    outcome = _attempt(function)
    outcomes = [outcome]
    if not any_rank(group, outcome.error != ""):
        return outcome.value
    if group is not None:
        outcomes *= size_of(group)
        dist.all_gather_object(outcomes, outcome._replace(value=None), group=group)
    texts = []
    damaged = True
    for rank, failed in enumerate(outcomes):
        if failed.error:
            texts.append(failed.error if len(outcomes) == 1 else f"rank {rank}: {failed.error}")
            damaged = damaged and failed.damaged
    raise _error("; ".join(texts), damaged)


def on_first(group: Group, function: Callable[[], T]) -> T:
    """Call `function` on rank 0 only and return its value on every rank.

    Raises CheckpointError on all ranks if it raised, and DamagedCheckpoint if it raised that.
    """
    outcomes = [_attempt(function) if rank_of(group) == 0 else _Outcome(None)]
    if group is not None:
        dist.broadcast_object_list(outcomes, group_src=0, group=group)
    value, error, damaged = outcomes[0]
    if error:
        raise _error(error, damaged)
    return value


def change_on_first(group: Group, check_owner: Callable[[], None], change: Callable[[], T]) -> T:
    """Change the run folder on rank 0 if this job still owns it, and return the result of `change` on every rank.

    Raises like `on_first`; `check_owner` raises, on rank 0, if another job has taken the run folder.
    """

    def change_if_owned() -> T:
        check_owner()
        return change()

    return on_first(group, change_if_owned)


def any_rank(group: Group, condition: bool) -> bool:
    if group is None:
        return condition
    flag = torch.tensor([condition], dtype=torch.uint8)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return bool(flag)


def first_problem(group: Group, problem: str) -> str:
    """Return the problem of the first rank that has one, with its rank, on every rank; "" if none has.

    A text is sent only if there is a problem, and only from one rank.
    """
    if group is None:
        return problem
    ranks = size_of(group)
    first = torch.tensor(rank_of(group) if problem else ranks)
    dist.all_reduce(first, op=dist.ReduceOp.MIN, group=group)
    if int(first) == ranks:
        return ""
    texts = [problem]
    dist.broadcast_object_list(texts, group_src=int(first), group=group)
    return f"rank {int(first)}: {texts[0]}"


def gather_rows(group: Group, row: Tensor) -> Tensor:
    """Return the rows (n) of all ranks as (ranks, n), on every rank."""
    if group is None:
        return row.unsqueeze(0)
    rows = row.new_empty(size_of(group), len(row))
    dist.all_gather(list(rows), row, group=group)
    return rows


def rank_of(group: Group) -> int:
    return 0 if group is None else dist.get_rank(group)


def size_of(group: Group) -> int:
    return 1 if group is None else dist.get_world_size(group)


def log_on_first(group: Group, message: str, level: int = logging.INFO) -> None:
    if rank_of(group) == 0:
        logger.log(level, message)


def _error(text: str, damaged: bool) -> CheckpointError:
    return DamagedCheckpoint(text) if damaged else CheckpointError(text)


def _attempt(function: Callable[[], Any]) -> _Outcome:
    """Call `function` and catch its error: the text of an error that the user can fix, the traceback of a bug."""
    try:
        return _Outcome(function())
    except UserError as error:
        return _Outcome(None, str(error) or repr(error), isinstance(error, DamagedCheckpoint))
    except Exception as error:
        if text := describe_system_error(error):
            return _Outcome(None, text)
        logger.exception("an error in handling a checkpoint")
        return _Outcome(None, repr(error))
