"""Imported once by the fork server, so that a new rank starts with torch already loaded."""

from torch.distributed.tensor import _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def clear_dtensor_caches() -> None:
    """Private names, for tests only: production has one process group a process."""
    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()  # keeps every mesh, and with it some 20 threads of gloo
    clear = getattr(_redistribute, "clear_redistribute_planner_cache", None)  # torch 2.13
    if clear is not None:
        clear()
