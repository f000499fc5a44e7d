"""Every private torch name that the library uses, and every difference between torch 2.11 and 2.15, with its reason.

Names of meshes and FSDP are in `torch_meshes.py`, operations that few runs call in `torch_operations.py`, names of
pipelines in `torch_pipeline.py`, of the flight recorder in `tools/launch/torch_records.py`, of profiles in
`tools/watch/torch_profile.py`, of other tools in `tools/torch_names.py`. Private names that only one file needs may
stay there: `PRIVATE` in tests/test_architecture.py lists them with reasons. `tests/runtime/test_torch_compat.py` has a
test for each name, which fails when torch moves it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper as CheckpointWrapper
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper as checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Re-exported, since they have no public path:
# - checkpoint_wrapper: makes a module recompute its forward in the backward pass, as a module, which FSDP needs;
#   CheckpointWrapper is its class.
# - FakeTensor, FakeTensorMode: tensors with shapes and devices but no memory, used by the dry run.
# - TorchDispatchMode: a hook that sees every operation, of the backward pass too.

PROFILER_MARKS = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)
"""the operations of `torch.profiler.record_function`, which FSDP calls when it gathers a unit; private; selective
recomputation of a block with a unit inside must ignore them"""


@contextmanager
def unrecorded() -> Iterator[None]:
    """Keep operations out of the profiler, also when they run later, in another thread, as gloo's do.

    Private. A profiler that is stopped frees the records of all threads: a worker of gloo that begins its operation
    just then writes into freed memory, and the process ends with "malloc(): unsorted double linked list corrupted".
    """
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


def one_thread_of_gloo() -> str:
    """Return the name of a backend, which is registered here: gloo whose groups have one worker thread.

    Private: only private options set the number. Torch's two threads write the names of their operations to one string,
    without a lock. Where gathers of DTensor are in flight, that ends the process: "malloc(): unaligned tcache chunk".
    """

    gloo: Any = dist.ProcessGroupGloo  # torch's stub for type checkers lacks the private options

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        options = gloo._Options()
        options._threads, options._timeout = 1, timeout
        names = os.environ.get("GLOO_SOCKET_IFNAME")
        devices = [gloo.create_device(interface=name) for name in names.split(",")] if names else []
        options._devices = devices or [gloo.create_default_device()]
        return gloo(store, rank, size, options)

    dist.Backend.register_backend("one_thread_of_gloo", create, devices=["cpu"])
    return "one_thread_of_gloo"


def local_region(parameter: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of the part of a parameter that this rank holds, and its offset in the whole, per dimension.

    A plain tensor is held whole. Private: only this helper of DTensor knows uneven shards and FSDP2's strided ones
    (FSDP and tensor parallelism on one dimension).
    """
    if not isinstance(parameter, DTensor):
        return tuple(parameter.shape), (0,) * parameter.dim()
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(shape), tuple(offset)


def foreach_norm(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the L2 norm of each tensor, summed in `dtype`, in one operation; there must be at least one tensor.

    Private: the public `torch.nn.utils.get_total_norm` calls it too, but sums in the tensors' own type.
    """
    return list(torch._foreach_norm(tensors, 2.0, dtype))


def foreach_multiply(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply every tensor by `factor`, (), in place, in one operation; there must be at least one tensor.

    Private: the public `torch.nn.utils.clip_grads_with_norm_` calls it too, but takes parameters, whose gradients are
    DTensors of several meshes: it multiplies each by itself, and its factor may not be one of them.
    """
    torch._foreach_mul_(tensors, factor)


def reads_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer skips its step if its attribute `found_inf` is not 0.

    GradScaler reads the same attribute, which torch's fused optimizers set.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
