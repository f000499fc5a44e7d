"""Predict the seconds of collectives over the links that they cross. No torch.

A ring of n ranks passes n - 1 pieces per gather or reduction, twice that per all-reduce. Several members of a group
on one node, or in one rack that NVLink joins, send over one network card each; the others are used by other groups.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torchllm.tools.planner.cluster import Hardware, Link


class Group(NamedTuple):
    """Ranks that send to each other."""

    size: int
    on_node: int
    """how many of them are on one node, or in one rack that NVLink joins: where they are fewest"""
    bandwidth: float
    """bytes per second that a rank sends"""
    latency: float
    """seconds of one hop, on average over the ring"""
    card: float = math.inf
    """bytes per second that a rank sends to other nodes while all ranks of its node do; inf: there is no other node"""
    collective_share: float = 1.0
    """share of `bandwidth` that is left when all nodes of the group send and receive at once"""

    @property
    def collective_bandwidth(self) -> float:
        """Bytes per second that a rank sends while all ranks of the group do."""
        return self.bandwidth * self.collective_share

    def gather(self, bytes: float) -> float:
        """Return the seconds of an all-gather or reduce-scatter; `bytes`: of the whole tensor."""
        if self.size == 1:
            return 0.0
        hops = self.size - 1
        sending = hops / self.size * bytes / self.collective_bandwidth
        return sending + hops * self.latency

    def reduce(self, bytes: float) -> float:
        """Return the seconds of an all-reduce of `bytes`: a ring, or a tree where that has fewer hops."""
        if self.size == 1:
            return 0.0
        ring_hops = 2 * (self.size - 1)
        levels = math.ceil(math.log2(self.size))
        tree_hops = 4 * levels  # up and down, two hops per level
        sending = ring_hops / self.size * bytes / self.collective_bandwidth
        return sending + min(ring_hops, tree_hops) * self.latency

    def exchange(self, bytes: float) -> float:
        """Return the seconds of an all-to-all of `bytes` per rank.

        A ring leaves a node once, over the cards of all its members there. Here each rank sends its own bytes to every
        other node, over its own card.
        """
        if self.size == 1:
            return 0.0
        if math.isinf(self.card):
            sending = (self.size - 1) / self.size * bytes / self.bandwidth
            return sending + self.latency
        leaving = (self.size - self.on_node) / self.size * bytes / self.card
        staying = (self.on_node - 1) / self.size * bytes / self.bandwidth
        return max(leaving, staying) + self.latency

    def send(self, bytes: float) -> float:
        """Return the seconds of sending `bytes` from one rank to the next."""
        if self.size == 1:
            return 0.0
        return bytes / self.bandwidth + self.latency


ALONE = Group(1, 1, math.inf, 0.0)
"""a rank without peers"""
PAIR = 2
"""nodes over which a collective still has the whole rate"""


def group(
    shape: Sequence[int], dimensions: Sequence[int], hardware: Hardware, fall: float = 0.0, one_card: bool = False
) -> Group:
    """Return the group of ranks that differ in `dimensions` of a mesh, whose ranks are numbered row by row.

    fall: `Constants.fall`. one_card: the group uses one network card per node, even if several of its ranks are there.
    """
    size = math.prod(shape[axis] for axis in dimensions)
    if size == 1:
        return ALONE
    link = hardware.link_among(shape, dimensions) or hardware.links[-1]
    inner = hardware.links[0]
    card = link.bandwidth * link.efficiency
    is_in_node = link.gpus <= hardware.gpus_per_node
    if is_in_node or link.bandwidth >= inner.bandwidth:  # NVLink may join several nodes
        return Group(size, size, card, link.latency)

    together, fewest = _members_together(shape, dimensions, size, hardware.used(shape))
    domains = size / together
    cards = 1 if one_card else fewest
    latencies = domains * link.latency + (size - domains) * inner.latency  # of the hops of a ring
    return Group(
        size,
        fewest,
        bandwidth=min(card * cards, inner.bandwidth * inner.efficiency),
        latency=latencies / size,
        card=card,
        collective_share=_share_of_rate(domains, link, fall),
    )


def _members_together(shape: Sequence[int], dimensions: Sequence[int], size: int, domain: int) -> tuple[int, int]:
    """Return how many ranks of a group of `size` are on the GPUs of a domain: usually, and where it has the fewest.

    Their numbers are a stride apart. A group that is no multiple or divisor of the domain ends within one.
    """
    stride = math.prod(shape[max(dimensions) + 1 :])
    usual = max(1, min(size, domain // stride))
    return usual, max(1, math.gcd(size * stride, domain) // stride)


def _share_of_rate(nodes: float, link: Link, fall: float) -> float:
    """Return the share of a link's rate that remains for a collective over `nodes` nodes."""
    if nodes <= PAIR:
        return 1.0
    exponent = fall if math.isinf(link.fall) else link.fall
    return (nodes / PAIR) ** -exponent
