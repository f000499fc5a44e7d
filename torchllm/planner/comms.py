"""What collectives cost over the links that they really cross: seconds. No torch.

A ring of n ranks passes n - 1 pieces a gather or reduction, twice as many an all-reduce; all of a node's cards carry a
group's pieces if that many of its members are in the node, and each only its own where other groups use the others.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torchllm.spec.cluster import Hardware


class Group(NamedTuple):
    """Ranks that send to each other: how many, how many of them on one node, at what rate and latency."""

    size: int
    on_node: int
    bandwidth: float
    """bytes a second that a rank sends"""
    latency: float
    """seconds of one hop, on average over the ring"""

    def gather(self, bytes: float) -> float:
        """All-gather or reduce-scatter of `bytes`, the whole tensor."""
        if self.size == 1:
            return 0.0
        return (self.size - 1) / self.size * bytes / self.bandwidth + (self.size - 1) * self.latency

    def reduce(self, bytes: float) -> float:
        """All-reduce of `bytes`: a ring, or a tree where that has fewer hops."""
        if self.size == 1:
            return 0.0
        hops = min(2 * (self.size - 1), 4 * math.ceil(math.log2(self.size)))
        return 2 * (self.size - 1) / self.size * bytes / self.bandwidth + hops * self.latency

    def exchange(self, bytes: float) -> float:
        """All-to-all of `bytes` a rank."""
        return (self.size - 1) / self.size * bytes / self.bandwidth + self.latency if self.size > 1 else 0.0

    def send(self, bytes: float) -> float:
        """From one rank to the next."""
        return bytes / self.bandwidth + self.latency if self.size > 1 else 0.0


def group(shape: Sequence[int], dimensions: Sequence[int], hardware: Hardware, one_card: bool = False) -> Group:
    """The group of the ranks that differ in `dimensions` of a mesh, numbered row by row.

    one_card: of all cards of a node that its ranks there could use it uses one.
    """
    size = math.prod(shape[axis] for axis in dimensions)
    if size == 1:
        return Group(1, 1, math.inf, 0.0)
    link = hardware.link_among(shape, dimensions) or hardware.links[-1]
    inner = hardware.links[0]
    stride = math.prod(shape[max(dimensions) + 1 :])
    on_node = max(1, min(size, hardware.gpus_per_node // stride)) if stride < hardware.gpus_per_node else 1
    if link.gpus <= hardware.gpus_per_node:
        return Group(size, size, link.bandwidth * link.efficiency, link.latency)
    nodes = size / on_node
    rate = link.bandwidth * link.efficiency * (1 if one_card else on_node)  # the cards of all its members on a node
    latency = (nodes * link.latency + (size - nodes) * inner.latency) / size
    return Group(size, on_node, min(rate, inner.bandwidth * inner.efficiency), latency)
