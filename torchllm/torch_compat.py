"""Every private torch name and every difference between torch 2.11 and 2.13, each with its reason.

`tests/test_torch_compat.py` fails when one of them moves.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "accumulate_in_reduce_dtype",
    "all_to_all",
    "checkpoint_wrapper",
    "flatten_mesh",
    "join_meshes",
    "local_region",
    "skip_pipeline_vote",
]
# No public path have: checkpoint_wrapper, which makes a module recompute its forward; FakeTensorMode, under which
# tensors have shapes but no memory; TorchDispatchMode, which sees every operation.


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The dimensions of a mesh as one, called `name`. Private because torch has no public name for it yet."""
    return mesh._flatten(name)


def join_meshes(*meshes: DeviceMesh) -> DeviceMesh:
    """Meshes cut or flattened from one world as the dimensions of one mesh, outermost first.

    Private because torch has no public name for it; to cut a flattened dimension from the world by name is deprecated.
    """
    return DeviceMesh._concatenate(list(meshes))


def local_region(parameter: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and global offset, per dimension, of what this rank holds of a parameter.

    A plain tensor is held whole. For a DTensor the private helper is the one that knows FSDP2's strided shards (FSDP
    over tensor parallel on one dimension) and uneven ones.
    """
    if not isinstance(parameter, DTensor):
        return tuple(parameter.shape), (0,) * parameter.dim()
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(shape), tuple(offset)


def accumulate_in_reduce_dtype(unit: FSDPModule) -> None:
    """Move the gradients of an FSDP unit's gathered weights into their sums over micro batches, of the reduce dtype.

    FSDP does so itself in its backward hooks. A weight gradient that is computed outside a backward pass is left in the
    weight's own dtype: several of them would be summed in bfloat16.
    """
    state = unit._get_fsdp_state()
    # 2.13 allows several parameter groups a unit; 2.11 has one, or None.
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    for group in groups:
        for parameter in group.fsdp_params if group is not None else []:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(n, ...) -> (n, ...): x[i] goes to rank i of the n of `group`, out[i] comes from it. Not differentiable.

    Private because the public `all_to_all_single` fills a given tensor, which selective recomputation cannot keep.
    """
    ops = torch.ops._c10d_functional
    each = [1] * len(x)
    return ops.wait_tensor(ops.all_to_all_single(x, each, each, group.group_name))


def skip_pipeline_vote(schedule: Any) -> None:
    """Let a pipeline schedule's first step begin without asking the other stages whether theirs have static shapes.

    All of ours have; and with fake tensors there is no answer to read. 2.11 does not ask.
    """

    def all_static(stages: Any, *rest: Any) -> None:
        from torch.distributed.pipelining._utils import InferenceMode

        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    if hasattr(schedule, "_warmup_p2p"):
        schedule._warmup_p2p = all_static
