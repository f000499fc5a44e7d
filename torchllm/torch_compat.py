"""Every private torch name and every difference between torch 2.11 and 2.13, each with its reason.

`tests/test_torch_compat.py` fails when one of them moves.
"""

from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["checkpoint_wrapper", "flatten_mesh", "local_region"]
# checkpoint_wrapper, which makes a module recompute its forward, has no public path.


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The dimensions of a mesh as one, called `name`. Private because torch has no public name for it yet."""
    return mesh._flatten(name)


def local_region(parameter: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and global offset, per dimension, of what this rank holds of a parameter.

    A plain tensor is held whole. For a DTensor the private helper is the one that knows FSDP2's strided shards (FSDP
    over tensor parallel on one dimension) and uneven ones.
    """
    if not isinstance(parameter, DTensor):
        return tuple(parameter.shape), (0,) * parameter.dim()
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(shape), tuple(offset)
