"""How equally the experts of a model share its tokens, in logged steps; a warning where some get none.

Shapes: E experts, K experts per token.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torchllm.config import Model
from torchllm.metrics.sinks import Record

if TYPE_CHECKING:
    from torchllm.optim.expert_balance import StepRouting

PATIENCE = 10
"""logged steps in a row after which there is a warning"""
OVERLOAD = 4.0
"""largest load, as a multiple of the mean, over which it is too large"""
SHARE_OF_WORST = 0.75
"""the same as a share of the largest that is possible, E / K: all tokens use the same K experts. The lower counts"""
LISTED = 3
"""experts that a warning names at most"""


class ExpertLoads(NamedTuple):
    """What the routers did in a step, on the host."""

    tokens: list[list[int]]
    """of each expert, by block with experts"""
    entropy: float
    """of a token's scores, divided by their sum, in nats"""
    penalties: dict[str, float]

    @property
    def largest(self) -> list[float]:
        """Return, for each block, the tokens of the expert with most of them as a multiple of the mean."""
        return [max(block) * len(block) / max(1, sum(block)) for block in self.tokens]

    def as_record(self) -> Record:
        """Return what a record has of it."""
        experts = len(self.tokens[0])
        record: Record = {
            "experts/largest_load": max(self.largest),
            "experts/entropy": self.entropy / math.log(experts) if experts > 1 else 0.0,
            "experts/dead": sum(block.count(0) for block in self.tokens),
            "experts/dropped_tokens": 0,
        }
        return record | {f"experts/{name}": value for name, value in self.penalties.items()}


def pack(routing: "StepRouting | None") -> Tensor:
    """Return all numbers of a step's routing in one tensor, float64 (N), for one transfer to the host."""
    if routing is None:
        return torch.empty(0, dtype=torch.float64)
    scalars = torch.stack((routing.entropy, *routing.penalties.values())).double()
    return torch.cat((scalars, routing.tokens_per_expert.flatten().double()))


def unpack(numbers: Sequence[float], routing: "StepRouting") -> ExpertLoads:
    """Return what `pack` has packed, from its numbers on the host; of `routing` only names and shapes are read."""
    entropy, *rest = numbers
    names, (blocks, experts) = list(routing.penalties), routing.tokens_per_expert.shape
    tokens = [int(number) for number in rest[len(names) :]]
    by_block = [tokens[block * experts : (block + 1) * experts] for block in range(blocks)]
    return ExpertLoads(by_block, entropy, dict(zip(names, rest, strict=False)))


class LoadAlarm:
    """Says where an expert had no token, or far too many, in `PATIENCE` logged steps in a row: once, until it ends."""

    def __init__(self, model: Model) -> None:
        self.first_block = model.dense_layers
        self.bound = min(OVERLOAD, SHARE_OF_WORST * model.experts / model.top_k)
        self.steps: Counter[str] = Counter()
        """logged steps in a row with a problem"""

    def notice(self, loads: ExpertLoads) -> str:
        """Return what has gone on for too long since this logged step; empty: nothing."""
        problems = []
        for block, (tokens, largest) in enumerate(zip(loads.tokens, loads.largest, strict=True), self.first_block):
            for expert, count in enumerate(tokens):
                if not count:
                    problems.append(f"expert {expert} of block {block} had no token")
            if self.bound > 1.0 and largest > self.bound:
                problems.append(f"an expert of block {block} had over {self.bound:.3g} times the mean tokens")
        self.steps = Counter({problem: self.steps[problem] + 1 for problem in problems})
        new = [problem for problem, steps in self.steps.items() if steps == PATIENCE]
        if not new:
            return ""
        more = f", and {len(new) - LISTED} more" if len(new) > LISTED else ""
        return f"in {PATIENCE} logged steps in a row {', '.join(new[:LISTED])}{more}"
