"""Keeps selective recomputation from saving, and from computing again, a rank's parts of sums over tp.

A product that is cut by its inputs, as o and down, gives each rank a part of a sum (B, S, D), which only the reduction
over the ranks reads. The recomputation has the saved result of the reduction, and needs no part: in its place it gets
memory that is never written. Nothing is sharded or sent here.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import SAC_IGNORED_OPS

from torchllm.runtime.torch_compat import TorchDispatchMode

EMPTY = torch.ops.aten.empty_like.default


def without_sums(
    saver: Callable[[], Any], products: tuple[Any, ...]
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of `saver`, for the forward and for the recomputation, which never see a part of a sum.

    products: operations whose results may be parts.
    """
    forward, recomputation = saver()
    parts: list[DTensor] = []
    in_forward, in_recomputation = (Products(products, parts, computes) for computes in (True, False))
    return _within(forward, in_forward), _within(recomputation, in_recomputation)


@contextmanager
def _within(mode: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with mode, inner:
        yield


class Products(TorchDispatchMode):
    """Takes the products that are parts of sums to itself, in a forward or in its recomputation.

    products: operations that may be. parts: placeholders of their results, in order. computes: whether this is the
    forward.
    """

    def __init__(self, products: tuple[Any, ...], parts: list[DTensor], computes: bool) -> None:
        super().__init__()
        self.products, self.parts, self.computes = products, parts, computes
        self.next = 0
        """number of products so far in the recomputation"""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let functions be compiled within it, such as norms: there are no parts of sums in them."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.products or not is_cut_by_inputs(*args):
            return func(*args, **(kwargs or {}))
        if not self.computes:
            self.next += 1
            with unseen(EMPTY):
                return torch.empty_like(self.parts[self.next - 1], memory_format=torch.contiguous_format)
        with unseen(func):
            out: DTensor = func(*args, **(kwargs or {}))
        self.parts.append(without_memory(out))
        return out


@contextmanager
def unseen(operation: Any) -> Iterator[None]:
    """Let no selective checkpoint of this process see an operation."""
    SAC_IGNORED_OPS.add(operation)
    try:
        yield
    finally:
        SAC_IGNORED_OPS.discard(operation)


def is_cut_by_inputs(*factors: Any) -> bool:
    """Return whether the first factor of a product, after a bias, is a DTensor whose last dimension is sharded."""
    x = next((factor for factor in factors if isinstance(factor, DTensor) and factor.ndim > 1), None)
    return x is not None and any(placement.is_shard(x.ndim - 1) for placement in x.placements)


@torch.no_grad()
def without_memory(like: DTensor) -> DTensor:
    """Return a DTensor of the same shape and placements whose elements are one number."""
    local = like.to_local()
    one = local.new_zeros(()).expand(local.shape)
    return DTensor.from_local(
        one, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
