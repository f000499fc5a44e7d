"""Predict the seconds of collectives over the links that they cross. No torch.

A ring of n ranks passes n - 1 pieces per gather or reduction, and twice as many per all-reduce. Several members of a
group on one node send over as many of its network cards; the other cards are used by other groups.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torchllm.spec.cluster import Hardware


class Group(NamedTuple):
    """Ranks that send to each other."""

    size: int
    on_node: int
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
        return (self.size - 1) / self.size * bytes / self.collective_bandwidth + (self.size - 1) * self.latency

    def reduce(self, bytes: float) -> float:
        """Return the seconds of an all-reduce of `bytes`: a ring, or a tree where that has fewer hops."""
        if self.size == 1:
            return 0.0
        hops = min(2 * (self.size - 1), 4 * math.ceil(math.log2(self.size)))
        return 2 * (self.size - 1) / self.size * bytes / self.collective_bandwidth + hops * self.latency

    def exchange(self, bytes: float) -> float:
        """Return the seconds of an all-to-all of `bytes` per rank.

        A ring leaves a node once, over the cards of all its members there. Here each rank sends its own bytes to every
        other node, over its own card.
        """
        if self.size == 1:
            return 0.0
        if math.isinf(self.card):
            return (self.size - 1) / self.size * bytes / self.bandwidth + self.latency
        leaving = (self.size - self.on_node) / self.size * bytes / self.card
        staying = (self.on_node - 1) / self.size * bytes / self.bandwidth
        return max(leaving, staying) + self.latency

    def send(self, bytes: float) -> float:
        """Return the seconds of sending `bytes` from one rank to the next."""
        return bytes / self.bandwidth + self.latency if self.size > 1 else 0.0


def group(
    shape: Sequence[int], dimensions: Sequence[int], hardware: Hardware, fall: float = 0.0, one_card: bool = False
) -> Group:
    """Return the group of ranks that differ in `dimensions` of a mesh, whose ranks are numbered row by row.

    fall: `Constants.fall`. one_card: the group uses one network card per node, even if several of its ranks are there.
    """
    size = math.prod(shape[axis] for axis in dimensions)
    if size == 1:
        return Group(1, 1, math.inf, 0.0)
    link = hardware.link_among(shape, dimensions) or hardware.links[-1]
    inner = hardware.links[0]
    stride = math.prod(shape[max(dimensions) + 1 :])
    on_node = max(1, min(size, hardware.gpus_per_node // stride)) if stride < hardware.gpus_per_node else 1
    if link.gpus <= hardware.gpus_per_node or link.bandwidth >= inner.bandwidth:  # NVLink may join several nodes
        return Group(size, size, link.bandwidth * link.efficiency, link.latency)
    nodes = size / on_node
    rate = link.bandwidth * link.efficiency * (1 if one_card else on_node)  # the cards of all its members on a node
    latency = (nodes * link.latency + (size - nodes) * inner.latency) / size
    card = link.bandwidth * link.efficiency
    exponent = fall if math.isinf(link.fall) else link.fall
    share = (nodes / PAIR) ** -exponent if nodes > PAIR else 1.0
    return Group(size, on_node, min(rate, inner.bandwidth * inner.efficiency), latency, card, share)


PAIR = 2
"""nodes over which a collective still has the whole rate"""
