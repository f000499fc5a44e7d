"""Degrees to meshes, on torch's fake process group: every rank of a layout in this one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchllm.config import Parallel
from torchllm.parallel.mesh import AXES, Mesh, build_mesh, destroy_mesh
from torchllm.tools.dry_run.trace import fake_ranks
from torchllm.tools.mesh_axes import axis_of_group

pytestmark = pytest.mark.quick


@contextmanager
def on_rank(rank: int, world_size: int, **degrees: Any) -> Iterator[Mesh]:
    """The mesh as one rank of many sees it; nothing is sent."""
    with fake_ranks(rank, world_size):
        yield build_mesh(Parallel(**{"dp_shard": 1, **degrees}), torch.device("cpu"))


def ranks_of(mesh: DeviceMesh, axis: int = 0) -> list[int]:
    return sorted(dist.get_process_group_ranks(mesh.get_group(axis)))


def test_every_axis_at_once() -> None:
    """HSDP 2 x 2 with tp 2: ranks are numbered with tp innermost, dp_replicate outermost."""
    for rank in range(8):
        replica, shard, tp = rank // 4, rank // 2 % 2, rank % 2
        with on_rank(rank, 8, dp_replicate=2, dp_shard=2, tp=2) as mesh:
            assert ranks_of(mesh.tp) == [rank - tp, rank - tp + 1]
            assert mesh.fsdp.shape == (2, 2)
            first_replica = 2 * shard + tp
            assert ranks_of(mesh.fsdp, 0) == [first_replica, first_replica + 4]
            first_shard = 4 * replica + tp
            assert ranks_of(mesh.fsdp, 1) == [first_shard, first_shard + 2]
            assert ranks_of(mesh.loss) == list(range(tp, 8, 2))
            assert dist.get_process_group_ranks(mesh.loss_group) == ranks_of(mesh.loss)
            assert mesh.data_rank == 2 * replica + shard
            assert mesh.data_size == 4
            assert mesh.describe() == "pp 1 x dp_replicate 2 x dp_shard 2 x cp 1 x tp 2"


def test_ranks_that_share_tp_or_cp_read_the_same_data_and_others_do_not() -> None:
    ranks_by_data_rank: dict[int, list[int]] = {0: [], 1: []}
    for rank in range(8):
        with on_rank(rank, 8, dp_shard=2, cp=2, tp=2) as mesh:
            assert mesh.data_size == 2
            assert 0 <= mesh.data_rank < 2
            same_tp_rank = list(range(rank % 2, 8, 2))
            assert ranks_of(mesh.loss) == same_tp_rank  # cp ranks hold other tokens: their losses add up
            assert mesh.fsdp.shape == (4,)  # FSDP shards over dp_shard x cp
            ranks_by_data_rank[mesh.data_rank].append(rank)
    assert ranks_by_data_rank == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}


def test_zero_stage_0_replicates_everything() -> None:
    for rank in range(4):
        with on_rank(rank, 4, dp_replicate=2, dp_shard=2, zero_stage=0) as mesh:
            assert mesh.fsdp.shape == (4, 1)
            assert ranks_of(mesh.fsdp, 0) == [0, 1, 2, 3]
            assert ranks_of(mesh.fsdp, 1) == [rank]
            assert mesh.data_rank == rank  # the sequences do not depend on it
            assert mesh.data_size == 4


@pytest.mark.parametrize(
    ("zero_stage", "names"),
    [
        (3, {"world", "pp", "dp_replicate", "fsdp", "loss", "cp", "tp"}),
        (0, {"world", "pp", "dp_replicate", "fsdp", "cp", "tp"}),  # the replicas are the ranks whose losses add up
    ],
)
def test_the_axes_of_a_group_are_those_along_which_its_ranks_differ(zero_stage: int, names: set[str]) -> None:
    with on_rank(13, 32, pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2, zero_stage=zero_stage) as mesh:
        axes = axis_of_group(mesh)
        groups = [dist.group.WORLD, mesh.loss_group, *mesh.fsdp.get_all_groups()]
        groups += [part.get_group() for part in (mesh.pp, mesh.cp, mesh.tp)]
        assert {group.group_name for group in groups} == set(axes)
        assert {axis.name for axis in axes.values()} == names
        for group in groups:
            axis = axes[group.group_name]
            ranks = torch.tensor(dist.get_process_group_ranks(group))
            places = torch.unravel_index(ranks, mesh.world.shape)
            differing = [dimension for dimension, place in enumerate(places) if len(place.unique()) > 1]
            assert axis.size == len(ranks)
            divided = [dimension for dimension in axis.dimensions if mesh.world.shape[dimension] > 1]
            assert divided == differing or axis.size == 1, axis


def test_experts_borrow_the_innermost_ranks_of_all_that_have_tokens_of_their_own() -> None:
    """ep 4 is tp 2 and half of dp_shard 4: FSDP shards experts over the other half."""
    with on_rank(13, 16, dp_replicate=2, dp_shard=4, tp=2, ep=4) as mesh:
        assert mesh.ep is not None
        assert mesh.expert_fsdp is not None
        assert ranks_of(mesh.ep) == [12, 13, 14, 15]
        assert mesh.expert_fsdp.shape == (2, 2)
        assert ranks_of(mesh.expert_fsdp, 0) == [5, 13]
        assert ranks_of(mesh.expert_fsdp, 1) == [9, 13]
        axes = {axis.name: axis.dimensions for axis in axis_of_group(mesh).values()}
        assert [AXES[dimension] for dimension in axes["ep"]] == ["tp", "dp_shard"]
        assert [AXES[dimension] for dimension in axes["efsdp"]] == ["dp_shard"]
        assert mesh.describe().endswith("tp 2, ep 4")


def test_ep_may_be_a_part_of_tp() -> None:
    with on_rank(5, 8, dp_shard=2, tp=4, ep=2) as mesh:
        assert mesh.ep is not None
        assert mesh.expert_fsdp is not None
        assert ranks_of(mesh.ep) == [4, 5]
        assert ranks_of(mesh.expert_fsdp) == [1, 3, 5, 7]
        axes = {axis.name: axis.dimensions for axis in axis_of_group(mesh).values()}
        assert [AXES[dimension] for dimension in axes["ep"]] == ["tp"]
        assert [AXES[dimension] for dimension in axes["efsdp"]] == ["tp", "dp_shard"]


def groups_now() -> set[str]:
    return {group.group_name for group in dist.distributed_c10d._world.pg_map}


def test_a_mesh_of_the_same_degrees_is_the_one_that_exists_until_it_is_destroyed() -> None:
    with on_rank(3, 8, dp_shard=4, tp=2) as mesh:
        degrees = Parallel(dp_shard=4, tp=2)
        groups = groups_now()
        assert dist.group.WORLD is not None
        world = dist.group.WORLD.group_name
        assert build_mesh(replace(degrees, split=(1, 2)), torch.device("cpu")) is mesh
        assert build_mesh(replace(degrees, zero_stage=0), torch.device("cpu")) is not mesh
        assert groups_now() > groups
        destroy_mesh(mesh)
        assert groups & groups_now() == {world}
        assert build_mesh(degrees, torch.device("cpu")) is not mesh
    with on_rank(3, 8, dp_shard=4, tp=2) as mesh_of_next_job:
        assert mesh_of_next_job is not mesh
    with on_rank(3, 8, dp_shard=8) as mesh:
        assert mesh.loss_group is dist.group.WORLD
        destroy_mesh(mesh)
        assert len(groups_now()) == 1  # that of all ranks
