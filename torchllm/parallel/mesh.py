"""Degrees to a DeviceMesh; the only file that spells the axes.

    pp  x  dp_replicate  x  dp_shard  x  cp  x  tp          outermost (slowest links) to innermost (fastest)

tp talks in every layer and sits on neighbouring ranks, inside a node; dp_replicate talks once a step and pp sends one
tensor a micro batch, so they cross nodes. FSDP shards over dp_shard x cp together ("fsdp"): a cp rank holds other
tokens but the same weights. HSDP is FSDP over that axis, replicated over dp_replicate.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchllm.config import Parallel
from torchllm.runtime.torch_compat import flatten_mesh, join_meshes

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


class Axis(NamedTuple):
    """Ranks that send to each other, by what they are for."""

    name: str
    dimensions: tuple[int, ...]
    """which of `AXES` differ among them"""
    size: int


@dataclass(frozen=True)
class Mesh:
    """The sub-meshes that the techniques take, and this rank's place among the data."""

    world: DeviceMesh
    """all five axes, each of at least one rank"""
    fsdp: DeviceMesh
    """one axis to shard over, or two: replicate, shard"""
    pp: DeviceMesh
    """ranks that hold the stages of one pipeline"""
    cp: DeviceMesh
    """ranks that share a sequence"""
    cp_method: str
    """how they share it: ring, ulysses"""
    tp: DeviceMesh
    """ranks that share each matrix"""
    loss: DeviceMesh
    """ranks whose losses and token counts add up: dp x cp, flattened"""
    data_rank: int
    """which part of a step's sequences this rank reads, 0 <= data_rank < data_size"""
    data_size: int
    """ranks that read different sequences"""

    @property
    def loss_group(self) -> dist.ProcessGroup:
        """Process group of `loss`."""
        return self.loss.get_group()

    @property
    def axis_of_group(self) -> dict[str, Axis]:
        """The name torch gave each process group that this rank sends in -> its axis. "world": all ranks."""
        *replicate, shard = self.fsdp.get_all_groups()
        named = [
            ("world", (0, 1, 2, 3, 4), dist.group.WORLD),
            ("pp", (0,), self.pp.get_group()),
            ("cp", (3,), self.cp.get_group()),
            ("tp", (4,), self.tp.get_group()),
            ("loss", (1, 2, 3), self.loss_group),
            ("fsdp", (2, 3), shard),
            # zero_stage 0 with cp: over both
            *(("dp_replicate", (1,) if self.world.size(1) == group.size() else (1, 3), group) for group in replicate),
        ]
        return {group.group_name: Axis(name, axes, dist.get_world_size(group)) for name, axes, group in named if group}

    def describe(self) -> str:
        """The degrees in one line."""
        sizes = dict(zip(AXES, self.world.shape, strict=True))
        return " x ".join(f"{axis} {size}" for axis, size in sizes.items())


def build_mesh(parallel: Parallel, device: torch.device) -> Mesh:
    """The mesh of a config whose degrees are resolved (no -1) and multiply to the world size."""
    replicate, shard = parallel.dp_replicate, parallel.dp_shard
    if parallel.zero_stage == 0:  # whole weights on every rank: all of data parallelism is replication
        replicate, shard = replicate * shard, 1
    world = init_device_mesh(
        device.type, (parallel.pp, replicate, shard, parallel.cp, parallel.tp), mesh_dim_names=AXES
    )
    shards = flatten_mesh(world["dp_shard", "cp"], "fsdp")
    loss = flatten_mesh(world["dp_replicate", "dp_shard", "cp"], "loss")
    if parallel.zero_stage == 0:
        fsdp = join_meshes(loss, world["dp_shard"])  # over cp too
    else:
        fsdp = shards if replicate == 1 else join_meshes(world["dp_replicate"], shards)
    return Mesh(
        world=world,
        fsdp=fsdp,
        pp=world["pp"],
        cp=world["cp"],
        cp_method=parallel.cp_method,
        tp=world["tp"],
        loss=loss,
        data_rank=world.get_local_rank("dp_replicate") * shard + world.get_local_rank("dp_shard"),
        data_size=replicate * shard,
    )
