"""Private names of torch for meshes of ranks and FSDP, as `torch_compat.py` has the others."""

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo


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
