"""Turns the degrees of [parallel] into a DeviceMesh; the only file that spells the axes.

    pp  x  dp_replicate  x  dp_shard  x  cp  x  tp          outermost (slowest links) to innermost (fastest)

tp communicates in every layer, so its ranks are neighbors inside a node; dp_replicate communicates once per step and
pp sends one tensor per micro batch, so these two cross nodes. FSDP shards over dp_shard x cp together ("fsdp"): cp
ranks hold different tokens but need the same weights. HSDP is FSDP over that axis, replicated over dp_replicate.

Experts (ep) borrow the innermost ranks of dp_shard x cp x tp, so ep is not an axis; FSDP shards experts over the
remaining ranks ("efsdp").

FOOTGUN: `fully_shard` on a two-dimensional mesh means HSDP (replicate, shard), not sharding over both dimensions. That
is why dp_shard and cp are flattened into one dimension here.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchllm.config import Parallel
from torchllm.data.packing import SequencePieces
from torchllm.runtime.torch_meshes import flatten_mesh, forget_meshes, join_meshes, unflatten_mesh

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Mesh:
    """The sub-meshes that the techniques use, and this rank's part of the data."""

    world: DeviceMesh
    """all five axes, each of at least one rank"""
    fsdp: DeviceMesh
    """one dimension (shard) or two (replicate, shard), in FSDP2's order"""
    pp: DeviceMesh
    """ranks that hold the stages of one pipeline"""
    cp: DeviceMesh
    """ranks that share a sequence"""
    cp_method: str
    """how they share it: ring or ulysses"""
    tp: DeviceMesh
    """ranks that share each matrix"""
    loss: DeviceMesh
    """ranks whose losses and token counts add up: dp x cp, flattened"""
    expert_ranks: DeviceMesh | None
    """dp_shard x cp x tp, flattened, which have different tokens where experts are shared; None without ep"""
    ep: DeviceMesh | None
    """ranks that share the experts; None without expert parallelism"""
    expert_fsdp: DeviceMesh | None
    """like `fsdp`, of the experts"""
    data_rank: int
    """index of this rank's part of a step's sequences, 0 <= data_rank < data_size"""
    data_size: int
    """ranks that read different sequences"""

    @property
    def loss_group(self) -> dist.ProcessGroup:
        """Process group of `loss`."""
        return self.loss.get_group()

    def describe(self) -> str:
        """Return the degrees in one line: "pp 1 x dp_replicate 2 x ..."."""
        degrees = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, self.world.shape, strict=True))
        return degrees if self.ep is None else f"{degrees}, ep {self.ep.size()}"


class MeshKey(NamedTuple):
    """Everything that a mesh depends on."""

    job: dist.ProcessGroup | None
    """the default process group"""
    device_type: str
    degrees: tuple[int, ...]
    """by `AXES`"""
    whole_weights: bool
    """zero_stage 0: every rank holds whole weights, so all data parallel ranks are replicas"""
    cp_method: str
    ep: int


_BUILT: dict[MeshKey, Mesh] = {}
"""cache of this job's meshes: another training in the same processes reuses the groups if its degrees are equal. New
groups would need new connections between all ranks, and torch's caches would keep the old ones"""


def build_mesh(parallel: Parallel, device: torch.device) -> Mesh:
    """Return the mesh of a config whose degrees are resolved (no -1) and multiply to the world size.

    If this job has built it, return that one. Call it on all ranks, in the same order.
    """
    degrees = (parallel.pp, parallel.dp_replicate, parallel.dp_shard, parallel.cp, parallel.tp)
    key = MeshKey(dist.group.WORLD, device.type, degrees, parallel.zero == 0, parallel.cp_method, parallel.ep)
    for built in list(_BUILT):
        if built.job is not key.job:  # from a job that this process has left
            del _BUILT[built]
    if key not in _BUILT:
        _BUILT[key] = _new_mesh(parallel, device)
    return _BUILT[key]


def destroy_mesh(mesh: Mesh) -> None:
    """Destroy the process groups of a mesh, and with them their memory on the GPU. Call it on all ranks."""
    for key, built in list(_BUILT.items()):
        if built is mesh:
            del _BUILT[key]
    meshes = [mesh.world, mesh.fsdp, mesh.loss]
    meshes += [part for part in (mesh.ep, mesh.expert_fsdp, mesh.expert_ranks) if part is not None]
    groups = {group.group_name: group for part in meshes for group in part.get_all_groups()}
    for group in groups.values():
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    forget_meshes()


def _new_mesh(parallel: Parallel, device: torch.device) -> Mesh:
    """Build the mesh of a config, with new process groups."""
    replicate = parallel.dp_replicate
    shard = parallel.dp_shard
    if parallel.zero == 0:  # every rank holds whole weights: all data parallel ranks are replicas
        replicate, shard = replicate * shard, 1
    degrees = (parallel.pp, replicate, shard, parallel.cp, parallel.tp)
    world = init_device_mesh(device.type, degrees, mesh_dim_names=AXES)
    loss = flatten_mesh(world["dp_replicate", "dp_shard", "cp"], "loss")
    if parallel.zero == 0:
        fsdp = join_meshes(loss, world["dp_shard"])  # replicated over cp too; the shard dimension has one rank
    else:
        fsdp = flatten_mesh(world["dp_shard", "cp"], "fsdp")
        if replicate > 1:
            fsdp = join_meshes(world["dp_replicate"], fsdp)
    expert_ranks = ep = expert_fsdp = None
    if parallel.ep > 1:
        expert_ranks = flatten_mesh(world["dp_shard", "cp", "tp"], "expert_ranks")
        sharing = unflatten_mesh(expert_ranks, (expert_ranks.size() // parallel.ep, parallel.ep), ("efsdp", "ep"))
        ep, expert_fsdp = sharing["ep"], sharing["efsdp"]
        if replicate > 1:
            expert_fsdp = join_meshes(world["dp_replicate"], expert_fsdp)
    return Mesh(
        world=world,
        fsdp=fsdp,
        pp=world["pp"],
        cp=world["cp"],
        cp_method=parallel.cp_method,
        tp=world["tp"],
        loss=loss,
        expert_ranks=expert_ranks,
        ep=ep,
        expert_fsdp=expert_fsdp,
        data_rank=world.get_local_rank("dp_replicate") * shard + world.get_local_rank("dp_shard"),
        data_size=replicate * shard,
    )


def sequence_pieces(mesh: Mesh) -> SequencePieces:
    """Return the part of each sequence that this rank reads and trains on.

    Under "ring" rank r of n has pieces r and 2 n - 1 - r of 2 n, so that all ranks have the same work.
    """
    rank, ranks = mesh.cp.get_local_rank(), mesh.cp.size()
    if ranks > 1 and mesh.cp_method == "ring":
        return SequencePieces(2 * ranks, (rank, 2 * ranks - 1 - rank))
    return SequencePieces(ranks, (rank,), attends_whole=ranks > 1)
