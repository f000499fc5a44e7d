"""Peak memory of a pipeline rank, in bytes by purpose. No torch."""

from collections.abc import Sequence
from operator import add
from typing import NamedTuple

from torchllm.tools.planner.software import Software


class Memory(NamedTuple):
    """Bytes of a rank at its peak."""

    weights: float = 0.0
    """float32 shards, 16-bit ones of frozen weights, or the 16-bit copy of a framework that keeps one"""
    gradients: float = 0.0
    optimizer: float = 0.0
    """moments, and the float32 weights of a framework that computes with separate 16-bit ones"""
    gathered: float = 0.0
    """weights that are gathered for a while, in 16 bits"""
    activations: float = 0.0
    logits: float = 0.0
    buffers: float = 0.0
    """receive buffers of pipeline stages"""
    temporary: float = 0.0
    allocator: float = 0.0
    """memory that the allocator caches and nothing uses"""
    reserve: float = 0.0

    @property
    def total(self) -> float:
        """The sum over all purposes."""
        return sum(self)

    def plus(self, added: "Memory") -> "Memory":
        """Return the sum, purpose by purpose."""
        return Memory(*map(add, self, added))

    @property
    def under_way(self) -> float:
        """The part that comes and goes within a step."""
        return self.gathered + self.activations + self.logits + self.buffers + self.temporary

    @property
    def live(self) -> float:
        """Bytes of tensors: without the allocator's cache and memory outside torch."""
        return sum(self[:-2])


def reserved(memory: Memory, software: Software) -> float:
    """Return the bytes that the allocator reserves: it caches a part of the memory that comes and goes."""
    return memory.total + (software.constants.allocator - 1) * memory.under_way


class Peak(NamedTuple):
    """The worst of several moments. Bytes of tensors and reserved bytes may be largest at two different moments."""

    live: Memory
    """the moment with most bytes of tensors"""
    reserved: float
    """bytes that the allocator has reserved at most"""

    @classmethod
    def of(cls, moments: Sequence[Memory], software: Software) -> "Peak":
        """Return the peak of these moments."""
        live = max(moments, key=lambda moment: moment.total)
        most_reserved = max([reserved(moment, software) for moment in moments])
        return cls(live, most_reserved)

    def with_peak(self, other: "Peak") -> "Peak":
        """Return the peak of the moments of both."""
        live = max(self.live, other.live, key=lambda moment: moment.total)
        return Peak(live, max(self.reserved, other.reserved))
