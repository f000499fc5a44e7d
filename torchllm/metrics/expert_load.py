"""The loads of a model's experts, in logged steps.

Shapes: E experts, K experts per token.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torchllm.metrics.sinks import Record

if TYPE_CHECKING:
    from torchllm.optim.router_balance import StepRouting


class ExpertLoads(NamedTuple):
    """Routing statistics of a step, on the host."""

    tokens: list[list[int]]
    """of each expert, by block with experts"""
    entropy: float
    """of a token's scores, divided by their sum, in nats"""
    penalties: dict[str, float]

    @property
    def largest(self) -> list[float]:
        """Return the tokens of the most loaded expert of each block, as a multiple of the mean."""
        return [max(block) * len(block) / max(1, sum(block)) for block in self.tokens]

    def as_record(self) -> Record:
        """Return the loads as keys and values of a record."""
        experts = len(self.tokens[0])
        record: Record = {
            "experts/largest_load": max(self.largest),
            "experts/entropy": self.entropy / math.log(experts) if experts > 1 else 0.0,
            "experts/dead": sum(block.count(0) for block in self.tokens),
            "experts/dropped_tokens": 0,
        }
        return record | {f"experts/{name}": value for name, value in self.penalties.items()}


def unpack(numbers: Sequence[float], routing: "StepRouting") -> ExpertLoads:
    """Return the loads in the numbers of `routing.packed()`, on the host; of `routing` names and shapes are read."""
    entropy, *rest = numbers
    names, (blocks, experts) = list(routing.penalties), routing.tokens_per_expert.shape
    tokens = [int(number) for number in rest[len(names) :]]
    by_block = [tokens[block * experts : (block + 1) * experts] for block in range(blocks)]
    return ExpertLoads(by_block, entropy, dict(zip(names, rest, strict=False)))
