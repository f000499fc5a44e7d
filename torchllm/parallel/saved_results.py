"""Lets selective recomputation save the result of a whole function, like the result of one matrix product.

Nothing is sharded or sent here. torch's selective checkpointing decides operation by operation. Ring attention is many
operations with communication in between: only its final result should be saved, so that a recomputation neither
computes nor sends again. `ring.py` marks such a function with `computed_once`; `recompute.py` saves and replays.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

Tensors = tuple[Tensor, ...]
Compute = Callable[[], Tensors]
_handler: ContextVar[Callable[[Compute], Tensors] | None] = ContextVar("handler", default=None)


def computed_once(compute: Compute) -> Tensors:
    """Return `compute()`, or, in a recomputation that saves such results, its result in the forward pass."""
    handler = _handler.get()
    if handler is None:
        return compute()
    return handler(compute)


class SavedResults:
    """The results of `computed_once` in one checkpointed forward, in order."""

    def __init__(self) -> None:
        self.results: list[Tensors] = []
        self.computing = False
        """whether a function marked with `computed_once` is running"""

    def saving(self, mode: AbstractContextManager[Any]) -> AbstractContextManager[None]:
        """Return `mode` as the context of the forward: results are saved within it."""
        return _handling(self._compute_and_save, mode)

    def replaying(self, mode: AbstractContextManager[Any]) -> AbstractContextManager[None]:
        """Return `mode` as the context of the recomputation: saved results are returned within it."""
        return _handling(self._replay, mode)

    def _compute_and_save(self, compute: Compute) -> Tensors:
        self.computing = True
        result = compute()
        self.computing = False
        # Detached: a saved tensor that holds its autograd graph, which holds this object, would never be freed.
        self.results.append(tuple(tensor.detach() for tensor in result))
        return result

    def _replay(self, compute: Compute) -> Tensors:
        return self.results.pop(0)


@contextmanager
def _handling(handler: Callable[[Compute], Tensors], mode: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter `mode`; within it, `handler` returns the results of `computed_once`."""
    token = _handler.set(handler)
    try:
        with mode:
            yield
    finally:
        _handler.reset(token)
