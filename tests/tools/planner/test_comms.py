"""Collectives by formula, and which cards a group has."""

import math
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import pytest

from torchllm.tools.planner.cluster import Hardware, Link, read_cluster
from torchllm.tools.planner.comms import Group, group

pytestmark = pytest.mark.quick


def cluster(name: str = "dgx_a100", **changes: Any) -> Hardware:
    """Return a cluster of train_configs/clusters with these fields changed."""
    problems: list[str] = []
    hardware = read_cluster(name, problems)
    assert hardware is not None, problems
    assert problems == []
    return replace(hardware, **changes)


def dgx_a100() -> Hardware:
    return cluster()


def link_rate(link: Link) -> float:
    """Return the bytes per second that a link is expected to reach."""
    return link.bandwidth * link.efficiency


def test_a_ring_sends_what_the_formulas_say() -> None:
    ring = Group(8, 8, 1e9, 0.0)
    assert ring.gather(8e9) == pytest.approx(7.0)
    assert ring.reduce(8e9) == pytest.approx(14.0)
    assert ring.exchange(8e9) == pytest.approx(7.0)
    assert ring.send(1e9) == pytest.approx(1.0)
    alone = group((1, 1, 1, 1, 8), [0, 1], dgx_a100())
    assert [send(1e9) for send in (alone.gather, alone.reduce, alone.exchange, alone.send)] == [0.0] * 4


def test_an_all_reduce_is_no_slower_than_a_tree_of_hops() -> None:
    assert Group(1024, 8, 1e9, 1e-3).reduce(0.0) == pytest.approx(4 * math.log2(1024) * 1e-3)
    assert Group(4, 4, 1e9, 1e-3).reduce(0.0) == pytest.approx(6e-3)


class AxisOfMesh(NamedTuple):
    """One axis of a mesh, whose groups are of interest."""

    axis: str
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    def group(self, hardware: Hardware, **settings: Any) -> Group:
        _, *shape = self
        dimension = AXES.index(self.axis)
        return group(tuple(shape), [dimension], hardware, **settings)


AXES = AxisOfMesh._fields[1:]


# the number of members on a node is the number of cards that they share
def test_a_group_has_the_cards_of_its_members() -> None:
    for ranks, on_node in [
        (AxisOfMesh("dp_shard", dp_shard=8, tp=8), 1),  # tp fills the node: each data rank has its own card
        (AxisOfMesh("dp_shard", dp_shard=16, tp=2), 4),  # four data ranks of a group on a node, over four cards
        (AxisOfMesh("dp_shard", dp_shard=64), 8),
        (AxisOfMesh("dp_replicate", dp_replicate=8, dp_shard=8), 1),  # HSDP: replicas meet over their own card
        (AxisOfMesh("pp", pp=8, tp=8), 1),
        (AxisOfMesh("tp", dp_shard=8, tp=16), 8),
    ]:
        hardware = dgx_a100()
        node, network, *_ = hardware.links
        card_rate = link_rate(network)
        members = ranks.group(hardware)
        assert members.on_node == on_node, ranks
        assert members.bandwidth == pytest.approx(min(on_node * card_rate, link_rate(node))), ranks
        on_one_card = ranks.group(hardware, one_card=True)
        assert on_one_card.bandwidth == pytest.approx(card_rate), ranks
    in_a_node = AxisOfMesh("tp", pp=4, dp_shard=2, tp=4).group(dgx_a100())
    assert (in_a_node.size, in_a_node.on_node) == (4, 4)
    assert (in_a_node.bandwidth, in_a_node.latency) == (link_rate(node), node.latency)


def test_collectives_get_slower_over_more_nodes_and_single_messages_do_not() -> None:
    ranks = AxisOfMesh("dp_shard", dp_shard=16, tp=8)
    alone = ranks.group(dgx_a100())
    crowded = ranks.group(dgx_a100(), fall=0.5)
    assert crowded.collective_bandwidth == pytest.approx(alone.bandwidth / math.sqrt(16 / 2))
    assert crowded.gather(1e12) == pytest.approx(math.sqrt(8) * alone.gather(1e12), rel=1e-4)
    assert crowded.send(1e12) == alone.send(1e12)


def test_a_network_with_a_measured_fall_keeps_it() -> None:
    hardware = dgx_a100()
    links = tuple(replace(link, fall=0.3) for link in hardware.links)
    measured = replace(hardware, links=links)
    ranks = AxisOfMesh("dp_shard", dp_shard=16, tp=8)
    assert ranks.group(measured, fall=0.5) == ranks.group(hardware, fall=0.3)


def test_nvlink_that_joins_nodes_is_one_link() -> None:
    """A rack of trays of 4 GPUs: 8 ranks meet on NVLink alone, and each sends everything over its own port."""
    rack = cluster("gb200_nvl72")
    port = link_rate(rack.links[1])
    eight = group((8,), [0], rack)
    assert eight.on_node == 8
    assert eight.bandwidth == port
    assert eight.exchange(8e9) == pytest.approx(7e9 / port, rel=1e-3)


def racks_of(gpus: int) -> Hardware:
    """Return GB200 with NVLink among so many GPUs; 4: within trays alone."""
    hardware = cluster("gb200_nvl72")
    tray, rack, network = hardware.links
    network = replace(network, gpus=4096 * gpus)
    return replace(hardware, links=(tray, replace(rack, gpus=gpus), network) if gpus > tray.gpus else (tray, network))


def test_a_larger_rack_never_makes_a_group_slower() -> None:
    """Meshes at random, of any numbers: a job need not use all GPUs of a rack."""
    random = Random(0)
    racks = [racks_of(gpus) for gpus in (4, 8, 64, 72, 144)]
    compared = 0
    while compared < 1000:
        shape = [random.choice((1, 1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64)) for _ in AXES]
        count = random.choice((1, 1, 2))
        first = random.randrange(len(shape) + 1 - count)
        if math.prod(shape) > 16_384:
            continue
        compared += 1
        groups = [group(shape, range(first, first + count), rack, fall=0.2) for rack in racks]
        for smaller, larger in pairwise(groups):
            for seconds in (Group.gather, Group.reduce, Group.exchange, Group.send):
                assert seconds(larger, 1e9) <= seconds(smaller, 1e9) * (1 + 1e-9), (shape, first, count)


def test_a_job_uses_as_many_gpus_of_a_rack_as_keep_its_groups_together() -> None:
    rack = cluster("gb200_nvl72")
    assert rack.used((8, 1, 32, 1, 1)) == 64  # pp 8: stages of 32 ranks, two in a rack
    assert rack.used((1, 1, 9, 1, 32)) == 64
    assert rack.used((1, 1, 36, 1, 8)) == 72
    assert rack.used((1, 1, 9, 1, 8)) == 72  # all in one rack
    assert dgx_a100().used((4, 1, 6, 1, 3)) == 8


def test_the_node_with_the_fewest_members_of_a_group_counts() -> None:
    """Groups of 12 on nodes of 8 GPUs: on one of a group's two nodes are 4, which send over their 4 cards."""
    hardware = dgx_a100()
    ranks = AxisOfMesh("tp", dp_shard=4, tp=12).group(hardware)
    assert ranks.on_node == 4
    assert ranks.bandwidth == pytest.approx(4 * link_rate(hardware.links[1]))
