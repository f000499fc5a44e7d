"""Every private torch name that the library uses, and every difference between torch 2.11 and 2.15, with its reason.

Those of pipelines are in `torch_pipeline.py`, of the flight recorder in `tools/launch/torch_records.py`, of profiles in
`tools/watch/torch_profile.py`, of other tools in `tools/torch_names.py`. Private names that only one file needs may
stay there: `PRIVATE` in tests/test_architecture.py lists them with reasons. `tests/runtime/test_torch_compat.py` has a
test for each name, which fails when torch moves it.
"""

import inspect
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.attention import SDPBackend
from torch.nn.attention.varlen import varlen_attn
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

VARLEN_ATTENTION = torch.ops.torch_attn._varlen_attn.default
"""the operation that `torch.nn.attention.varlen.varlen_attn` calls; private; selective recomputation looks for it"""

VARLEN_FLASH = torch.ops.aten._flash_attention_forward
"""attention within sequences by torch's flash kernel; private; from 2.15 on `varlen_attn` may take cuDNN's instead, and
the next operation reads flash attention's log-sum-exp alone"""

VARLEN_GRADIENTS = torch.ops.aten._flash_attention_backward
"""its gradients, from any out and lse; private; autograd takes those of one call's keys, a ring those of all keys"""


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


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, window: int = 0, scale: float | None = None
) -> Tensor:
    """Return the causal attention within sequences of unequal length: q (T, H, Q), k and v (T, K, Q) -> (T, H, Q).

    offsets: start of each sequence, and end of the last one, (N + 1,) int32. longest: upper bound of their length.
    window: number of tokens that a token sees, itself included; 0: all before it. scale: of scores; None: 1 / sqrt(Q).
    """
    options = {"window_size": (window - 1, 0), "scale": scale, **_group_option(q, k)}  # -1: no limit
    out = varlen_attn(q, k, v, offsets, offsets, longest, longest, **options)
    assert isinstance(out, Tensor)  # without unused results
    return out


def _group_option(q: Tensor, k: Tensor) -> dict[str, Any]:
    """Return the argument of varlen attention for grouped query heads: from torch 2.12 on; 2.11 detects them."""
    return {"enable_gqa": q.shape[1] != k.shape[1]} if "enable_gqa" in _VARLEN_PARAMETERS else {}


_VARLEN_PARAMETERS = inspect.signature(varlen_attn).parameters


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return all dimensions of a mesh as one dimension called `name`. Private: torch has no public name for it yet."""
    return mesh._flatten(name)


def unflatten_mesh(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return the ranks of a mesh of one dimension as several dimensions, outermost first.

    Private: as `flatten_mesh`.
    """
    return mesh._unflatten(0, sizes, names)


def join_meshes(*meshes: DeviceMesh) -> DeviceMesh:
    """Return one mesh with the dimensions of all `meshes`, outermost first, all sliced from one world mesh.

    Private: torch has no public name for it, and slicing a flattened dimension from the world by name is deprecated.
    """
    return DeviceMesh._concatenate(list(meshes))


def free_gather_buffer(unit: FSDPModule) -> None:
    """Make an FSDP unit free its all-gather buffer as soon as the weights are copied out of it.

    Private: in a forward pass FSDP keeps a unit's buffer until the next unit's weights are gathered. Only asynchronous
    gathers free it earlier, and they have no other switch.
    """
    unit._set_unshard_async_op(True)


def forget_meshes() -> None:
    """Clear DTensor's caches of meshes, whose process groups are destroyed.

    Private: the caches look up results by a mesh's ranks and names, and return tensors on the mesh of the first call.
    After its groups are destroyed, the next collective fails. The caches also keep the groups' threads alive.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # few runs build a second mesh

    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()
    _redistribute.clear_redistribute_planner_cache()


def local_region(parameter: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of the part of a parameter that this rank holds, and its offset in the whole, per dimension.

    A plain tensor is held whole. Private: only this helper of DTensor knows uneven shards and FSDP2's strided ones
    (FSDP and tensor parallelism on one dimension).
    """
    if not isinstance(parameter, DTensor):
        return tuple(parameter.shape), (0,) * parameter.dim()
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(shape), tuple(offset)


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send x[i] to rank i of `group` and return the received tensors: (n, ...) -> (n, ...) for n ranks.

    Not differentiable. Private: the public `all_to_all_single` writes into a tensor that it is given, which selective
    recomputation cannot keep.
    """
    rows_per_rank = [1] * len(x)
    return end_all_to_all(begin_all_to_all(x, rows_per_rank, rows_per_rank, group))


def begin_all_to_all(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Start sending sent[i] rows of x to rank i of `group`: (N, ...) -> (M, ...), for `end_all_to_all`.

    sent: their sum is N; received: rows from each rank, their sum is M. Not differentiable. Private: as `all_to_all`.
    """
    return torch.ops._c10d_functional.all_to_all_single(x, received, sent, group.group_name)


def end_all_to_all(x: Tensor) -> Tensor:
    """Wait for the result of `begin_all_to_all`. Not differentiable. Private: as `all_to_all`."""
    return torch.ops._c10d_functional.wait_tensor(x)


@contextmanager
def gradients_inside_operation() -> Iterator[None]:
    """Let an operation of our own (`torch.library.custom_op`) use `torch.autograd.grad` inside.

    Private: there torch excludes autograd, and `torch.func.vjp`, which works without, fails under a dispatch mode.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False), torch.enable_grad():
        yield


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


def chosen_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str:
    """Return the kernel that `scaled_dot_product_attention` takes: math, flash, efficient, cudnn or overrideable.

    Arguments (B, H, S, Q) as for that function; without a mask, attention is causal. Private: public functions such as
    `torch.backends.cuda.can_use_flash_attention` tell which kernels could run, not which one torch prefers.
    """
    grouped = q.shape[1] != k.shape[1]
    number = torch._fused_sdp_choice(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return SDPBackend(number).name.partition("_")[0].lower()
