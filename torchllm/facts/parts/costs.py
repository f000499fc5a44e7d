"""The costs of a mixer on one rank, for the planner: see `BlockPart.costs`. No torch."""

from dataclasses import dataclass
from typing import NamedTuple


class RankShare(NamedTuple):
    """The share of a block's computation that one rank has."""

    tp: int
    """ranks that share the heads"""
    spread: int
    """ranks that share the tokens between the matrices: tp with sequence parallelism, else 1"""
    length: int
    """tokens of a sequence on this rank"""
    cp: int = 1
    """ranks that share each sequence"""
    ring: bool = False
    """whether they do as a ring; else they exchange heads (ulysses)"""

    @property
    def pieces_sent(self) -> int:
        """Pieces of a sequence whose last tokens the busiest rank of a ring sends to its neighbors.

        The first rank has the last piece too, and the last rank's pieces follow each other: both send one.
        """
        return min(2, self.cp - 1) if self.ring else 0


class PerPass(NamedTuple):
    """A number of the forward, and the same of the backward."""

    forward: float
    backward: float

    def of(self, backward: bool) -> float:
        """Return the number of one pass."""
        return self.backward if backward else self.forward


NOTHING = PerPass(0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class MixerCosts:
    """Costs of a mixer on one rank: numbers (of 16 bits) and bytes, per token of the rank.

    The planner adds the costs of the products: their time, their inputs.
    """

    inputs: float
    """numbers that the core reads, kept for the backward; ulysses exchanges them"""
    results: float
    """numbers of the core's results, kept for the next operations; ulysses exchanges them"""
    kept: float = 0.0
    """further bytes that autograd keeps, and the input of the last product unless that is the core's result"""
    latents: float = 0.0
    """numbers that the ranks of tp gather before the heads, or whose gradients they sum; 0: the hidden states"""
    heads: float = 0.0
    """heads of model.head_width that score every key which a query sees; 0: the core is no attention"""
    turned: float = 0.0
    """numbers that rotary positions turn: queries and keys"""
    copied: float = 0.0
    """numbers that are copied twice on their way to the core: queries and keys"""
    normed: float = 0.0
    """numbers that norms inside the mixer read, such as queries and keys"""
    normed_without_weight: float = 0.0
    """numbers that norms without weight read"""
    gated: float = 0.0
    """numbers that a gate multiplies"""
    gates: float = 0.0
    """numbers of the gate, whose sigmoid is kept; 0: `kept` has it, or there is none"""
    working: float = 0.0
    """bytes that the core's backward holds at its peak, minus those kept that are freed by then; of attention 0: its
    scores are known"""
    moved: PerPass = NOTHING
    """bytes that the core's kernels read and write, of attention without its scores"""
    kernels: PerPass = NOTHING
    """kernels of the core for a micro batch, of attention without its scores"""
    turns: float = 0.0
    """numbers that a rank of a ring passes on cp - 1 times while it computes: keys and values"""
    sent: float = 0.0
    """numbers that the busiest rank of a ring sends to its neighbors once, and their gradients back"""
    gathered: float = 0.0
    """numbers that a rank of a ring sends to all others once per pass"""
