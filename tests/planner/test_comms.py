"""Collectives by formula, and which cards a group has."""

import math
from dataclasses import replace

import pytest

from torchllm.planner.comms import Group, group
from torchllm.spec.cluster import Hardware, read_cluster


def cluster(name: str) -> Hardware:
    """Return a cluster of train_configs/clusters."""
    problems: list[str] = []
    hardware = read_cluster(name, problems)
    assert hardware is not None, problems
    return hardware


def dgx_a100() -> Hardware:
    return cluster("dgx_a100")


def test_a_ring_sends_what_the_formulas_say() -> None:
    ring = Group(8, 8, 1e9, 0.0)
    assert ring.gather(8e9) == pytest.approx(7.0)
    assert ring.reduce(8e9) == pytest.approx(14.0)
    assert ring.exchange(8e9) == pytest.approx(7.0)
    assert ring.send(1e9) == pytest.approx(1.0)


def test_one_rank_sends_nothing() -> None:
    alone = group((1, 1, 1, 1, 8), [0, 1], dgx_a100())
    for collective in (alone.gather, alone.reduce, alone.exchange, alone.send):
        assert collective(1e9) == 0.0


def test_an_all_reduce_is_no_slower_than_a_tree_of_hops() -> None:
    assert Group(1024, 8, 1e9, 1e-3).reduce(0.0) == pytest.approx(4 * math.log2(1024) * 1e-3)
    assert Group(4, 4, 1e9, 1e-3).reduce(0.0) == pytest.approx(6e-3)


# mesh of pp, dp_replicate, dp_shard, cp, tp; dimensions; members on a node; share of one card's rate
@pytest.mark.parametrize(
    ("shape", "dimensions", "on_node", "cards"),
    [
        ((1, 1, 8, 1, 8), [2], 1, 1),  # tp fills the node: each data rank has its own card
        ((1, 1, 16, 1, 2), [2], 4, 4),  # four data ranks of a group on a node, over four cards
        ((1, 1, 64, 1, 1), [2], 8, 8),
        ((1, 8, 8, 1, 1), [1], 1, 1),  # HSDP: replicas meet over their own card
        ((8, 1, 1, 1, 8), [0], 1, 1),
        ((1, 1, 8, 1, 16), [4], 8, 8),
    ],
)
def test_a_group_has_the_cards_of_its_members(
    shape: tuple[int, ...], dimensions: list[int], on_node: int, cards: int
) -> None:
    hardware = dgx_a100()
    node, network, *_ = hardware.links
    card_rate = network.bandwidth * network.efficiency
    node_rate = node.bandwidth * node.efficiency
    ranks = group(shape, dimensions, hardware)
    assert ranks.on_node == on_node
    assert ranks.bandwidth == pytest.approx(min(cards * card_rate, node_rate))
    assert group(shape, dimensions, hardware, one_card=True).bandwidth == pytest.approx(card_rate)


def test_a_group_in_a_node_is_on_its_link() -> None:
    hardware = dgx_a100()
    node = hardware.links[0]
    ranks = group((4, 1, 2, 1, 4), [4], hardware)
    assert (ranks.size, ranks.on_node) == (4, 4)
    assert ranks.bandwidth == node.bandwidth * node.efficiency
    assert ranks.latency == node.latency


def test_latency_is_of_the_hops_that_leave_the_node() -> None:
    hardware = dgx_a100()
    node, network, *_ = hardware.links
    ranks = group((1, 1, 16, 1, 1), [2], hardware)
    assert ranks.latency == pytest.approx((2 * network.latency + 14 * node.latency) / 16)


def test_a_slower_link_is_never_faster() -> None:
    hardware = dgx_a100()
    groups = [((1, 1, 16, 1, 4), [2]), ((1, 1, 1, 1, 8), [4]), ((4, 1, 4, 1, 8), [0])]
    for factor in (1.0, 0.5, 0.1):
        links = tuple(replace(link, bandwidth=link.bandwidth * factor) for link in hardware.links)
        slower = replace(hardware, links=links)
        for shape, dimensions in groups:
            seconds = group(shape, dimensions, hardware).reduce(1e8)
            assert group(shape, dimensions, slower).reduce(1e8) >= seconds


def test_collectives_get_slower_over_more_nodes_and_single_messages_do_not() -> None:
    hardware = dgx_a100()
    alone = group((1, 1, 16, 1, 8), [2], hardware)
    crowded = group((1, 1, 16, 1, 8), [2], hardware, fall=0.5)
    assert crowded.collective_bandwidth == pytest.approx(alone.bandwidth / math.sqrt(16 / 2))
    assert crowded.gather(1e12) == pytest.approx(math.sqrt(8) * alone.gather(1e12), rel=1e-4)
    assert crowded.send(1e12) == alone.send(1e12)
    for shape in ((1, 1, 2, 1, 8), (1, 1, 8, 1, 1)):  # two nodes, one node
        assert group(shape, [2], hardware, fall=0.5) == group(shape, [2], hardware)


def test_a_network_with_a_measured_fall_keeps_it() -> None:
    hardware = dgx_a100()
    measured = replace(hardware, links=tuple(replace(link, fall=0.3) for link in hardware.links))
    shape, data = (1, 1, 16, 1, 8), [2]
    assert group(shape, data, measured, fall=0.5) == group(shape, data, hardware, fall=0.3)


def test_nvlink_that_joins_nodes_is_one_link() -> None:
    """A rack of trays of 4 GPUs: 8 ranks meet on NVLink alone, and each sends everything over its own port."""
    rack = cluster("gb200_nvl72")
    port = rack.links[1].bandwidth * rack.links[1].efficiency
    eight = group((8,), [0], rack)
    assert (eight.on_node, eight.bandwidth) == (8, port)
    assert eight.exchange(8e9) == pytest.approx(7e9 / port, rel=1e-3)
