"""Whether a quantity grows in a long run: its slope over the steps, beside the noise of that slope."""

import math
from collections.abc import Sequence
from typing import NamedTuple

BLOCKS = 12
"""the samples are averaged in as many blocks: neighbors in time, which share their noise, count as one"""
SETTLED = 3
"""the first of so many parts of a run is not looked at: caches fill in it"""
ERRORS = 3.0
"""a slope is more than noise from so many of its standard errors on"""


class Sample(NamedTuple):
    step: int
    value: float


class Slope(NamedTuple):
    """How fast a quantity grows, in its unit per 1,000 steps."""

    growth: float
    error: float
    """standard error of `growth`"""
    steps: float
    """that the slope was fitted to"""

    def exceeds(self, limit: float, least: float) -> bool:
        """Return whether the growth is over `limit`, over its noise, and `least` or more in all the steps."""
        in_all = self.growth * self.steps / 1000
        return self.growth > limit and self.growth > ERRORS * self.error and in_all >= least


def fit_slope(samples: Sequence[Sample]) -> Slope:
    """Return the slope of the settled part of a run, by least squares through the means of `BLOCKS` blocks.

    Raises ValueError if there are fewer than two samples for a block.
    """
    settled = samples[len(samples) // SETTLED :]
    if len(settled) < 2 * BLOCKS:
        raise ValueError(f"{len(samples)} samples are too few for a slope: it needs {3 * BLOCKS}; run for longer")
    means = []
    for block in range(BLOCKS):
        part = settled[block * len(settled) // BLOCKS : (block + 1) * len(settled) // BLOCKS]
        step = sum(sample.step for sample in part) / len(part)
        value = sum(sample.value for sample in part) / len(part)
        means.append((step, value))
    mean_step = sum(step for step, _ in means) / BLOCKS
    mean_value = sum(value for _, value in means) / BLOCKS
    spread = sum((step - mean_step) ** 2 for step, _ in means)
    slope = sum((step - mean_step) * (value - mean_value) for step, value in means) / spread
    residuals = [value - mean_value - slope * (step - mean_step) for step, value in means]
    error = math.sqrt(sum(residual**2 for residual in residuals) / (BLOCKS - 2) / spread)
    return Slope(1000 * slope, 1000 * error, settled[-1].step - settled[0].step)
