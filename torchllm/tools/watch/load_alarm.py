"""Warns of experts without a token, or with far too many, in many logged steps in a row."""

from collections import Counter

from torchllm.config import Model
from torchllm.metrics.expert_load import ExpertLoads

PATIENCE = 10
"""logged steps in a row after which there is a warning"""
OVERLOAD = 4.0
"""largest load, as a multiple of the mean, over which it is too large"""
SHARE_OF_WORST = 0.75
"""the same as a share of the largest that is possible, E / K: all tokens use the same K experts. The lower counts"""
LISTED = 3
"""experts that a warning names at most"""


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
