"""Results of many operations that selective recomputation keeps whole, as it keeps the result of a product.

torch's selective checkpoint decides operation by operation. Ring attention is many of them, with sends in between: what
matters is the result, and a recomputation should neither compute nor send it again.
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
    """`compute()`; in a recomputation that keeps such results, what it returned in the forward."""
    handler = _handler.get()
    return compute() if handler is None else handler(compute)


class Kept:
    """What `computed_once` returned in one checkpointed forward, in order."""

    def __init__(self) -> None:
        self.results: list[Tensors] = []
        self.computing = False

    def keeping(self, mode: AbstractContextManager[Any]) -> AbstractContextManager[None]:
        """`mode`, within which results are kept: the forward."""

        def keep(compute: Compute) -> Tensors:
            self.computing = True
            result = compute()
            self.computing = False
            self.results.append(tuple(x.detach() for x in result))  # one that knew its graph would never be freed
            return result

        return _within(keep, mode)

    def giving(self, mode: AbstractContextManager[Any]) -> AbstractContextManager[None]:
        """`mode`, within which they are given back: the recomputation."""
        return _within(lambda compute: self.results.pop(0), mode)


@contextmanager
def _within(handler: Callable[[Compute], Tensors], mode: AbstractContextManager[Any]) -> Iterator[None]:
    token = _handler.set(handler)
    try:
        with mode:
            yield
    finally:
        _handler.reset(token)
