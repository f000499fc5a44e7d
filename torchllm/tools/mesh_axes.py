"""Names the axis of each process group of a mesh, for tools that count or time its messages."""

from typing import NamedTuple

import torch.distributed as dist

from torchllm.parallel.mesh import AXES, Mesh

AXIS_NAMES = ("world", "pp", "dp_replicate", "fsdp", "loss", "cp", "tp", "efsdp", "ep")
"""names of the process groups, see `MeshAxis`"""


class MeshAxis(NamedTuple):
    """A process group of this rank: its purpose and its ranks."""

    name: str
    """one of `AXIS_NAMES`"""
    dimensions: tuple[int, ...]
    """indices in `AXES` of the axes that its ranks span"""
    size: int
    """number of ranks"""


def axis_of_group(mesh: Mesh) -> dict[str, MeshAxis]:
    """Return the axis of each process group that this rank communicates in, by torch's name of the group."""
    axes: dict[str, MeshAxis] = {}

    def add(name: str, group: dist.ProcessGroup | None, *dimensions: str) -> None:
        if group is not None:
            positions = tuple(AXES.index(dimension) for dimension in dimensions)
            axes[group.group_name] = MeshAxis(name, positions, dist.get_world_size(group))

    add("world", dist.group.WORLD, *AXES)
    add("pp", mesh.pp.get_group(), "pp")
    add("cp", mesh.cp.get_group(), "cp")
    add("tp", mesh.tp.get_group(), "tp")
    add("loss", mesh.loss_group, "dp_replicate", "dp_shard", "cp")
    *replicate_groups, shard_group = mesh.fsdp.get_all_groups()
    add("fsdp", shard_group, "dp_shard", "cp")
    for group in replicate_groups:
        # With zero_stage 0 the weights are replicated over cp as well.
        over_cp = group.size() != mesh.world.size(AXES.index("dp_replicate"))
        dimensions = ("dp_replicate", "cp") if over_cp else ("dp_replicate",)
        add("dp_replicate", group, *dimensions)
    if mesh.ep is not None and mesh.expert_fsdp is not None:
        add("efsdp", mesh.expert_fsdp.get_all_groups()[-1], *_divided_by_experts(mesh, inner=False))
        add("ep", mesh.ep.get_group(), *_divided_by_experts(mesh, inner=True))
    return axes


def _divided_by_experts(mesh: Mesh, *, inner: bool) -> list[str]:
    """Return the axes that the ranks of ep (inner), or of efsdp, span; an axis may be split between both."""
    assert mesh.ep is not None
    ep = mesh.ep.size()
    within = []
    beyond = []
    ranks = 1  # number of neighboring ranks that the axes so far span
    for axis in ("tp", "cp", "dp_shard"):
        size = mesh.world.size(AXES.index(axis))
        if size > 1 and ranks < ep:
            within.append(axis)
        ranks *= size
        if size > 1 and ranks > ep:
            beyond.append(axis)
    return within if inner else beyond
