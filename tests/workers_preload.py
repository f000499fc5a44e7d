"""Imported once by the fork server, so that a new rank starts with torch and the library already loaded."""

import gc

from torch.distributed.tensor import _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import tests.parity  # noqa: F401  # and with it most of the library


def clear_dtensor_caches() -> None:
    """Private names, for tests only: production has one process group a process."""
    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()  # keeps every mesh, and with it some 20 threads of gloo
    clear = getattr(_redistribute, "clear_redistribute_planner_cache", None)  # torch 2.13
    if clear is not None:
        clear()


gc.freeze()  # a collection after each test, on each rank, need not look through all of torch again: 0.2 s
