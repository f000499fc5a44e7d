"""A power law of the loss over compute, and the interval of what it predicts.

    loss = floor + scale x (compute / compute of the smallest run) ^ -exponent

The form of Hoffmann et al. 2022 (arXiv 2203.15556, equation 10) along a path on which tokens grow with the parameters.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

STUDENT = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015}
"""degrees of freedom -> 95 % quantile of Student's t, half of an interval of 90 %"""
LEAST, MOST = min(STUDENT) + 3, max(STUDENT) + 3
"""runs of a fit: three parameters are fitted"""
FLOORS = 2000
"""floors that are tried, from 0 to the lowest loss"""


class Point(NamedTuple):
    """A run that has ended."""

    compute: float
    """in FLOPs"""
    loss: float
    """validation, in nats per token"""


class Interval(NamedTuple):
    """A predicted loss, in nats per token."""

    loss: float
    half_width: float
    """of the interval that has the measured loss in 90 of 100 cases, if the law holds and its errors are normal"""


class Fit(NamedTuple):
    """The law with the least squares above one floor."""

    floor: float
    scale: float
    exponent: float
    squares: float
    """sum of the squared errors, in nats"""


class PowerLaw:
    """The law with the least squares of errors, in nats."""

    def __init__(self, points: Sequence[Point]) -> None:
        """Fit LEAST to MOST points of different compute. Raises ValueError."""
        if not LEAST <= len(points) <= MOST:
            raise ValueError(f"a fit takes {LEAST} to {MOST} runs, not {len(points)}")
        compute, losses = np.array(points).T
        self._first = float(compute.min())
        logs = np.log(compute / self._first)
        floors = np.linspace(0, losses.min(), FLOORS, endpoint=False)
        fits = [_fit_above(float(floor), logs, losses) for floor in floors]
        self.floor, self.scale, self.exponent, squares = min(fits, key=lambda fit: fit.squares)
        degrees_of_freedom = len(points) - 3
        self._variance = squares / degrees_of_freedom
        self._quantile = STUDENT[degrees_of_freedom]
        slopes = np.array([self._slopes(log) for log in logs])
        self._covariance = np.linalg.pinv(slopes.T @ slopes)

    def __str__(self) -> str:
        return f"{self.floor:.3f} + {self.scale:.3f} x (compute / {self._first:.2e})^-{self.exponent:.3f}"

    def _slopes(self, log: float) -> NDArray[np.float64]:
        """Return the derivatives of a loss by floor, logarithm of scale, and exponent."""
        over_floor = self.scale * math.exp(-self.exponent * log)
        return np.array([1.0, over_floor, -over_floor * log])

    def predict(self, compute: float) -> Interval:
        """Return the loss of a run with this compute, in FLOPs. The interval is the delta method's."""
        log = math.log(compute / self._first)
        slopes = self._slopes(log)
        loss = self.floor + self.scale * math.exp(-self.exponent * log)
        variance = self._variance * (1 + slopes @ self._covariance @ slopes)
        return Interval(loss, self._quantile * math.sqrt(variance))


def _fit_above(floor: float, logs: NDArray[np.float64], losses: NDArray[np.float64]) -> Fit:
    """Return the law above a floor: a line through the logarithms, weighted so that its errors are nats."""
    over_floor = losses - floor
    slope, intercept = np.polyfit(logs, np.log(over_floor), 1, w=over_floor)
    errors = over_floor - np.exp(intercept + slope * logs)
    return Fit(floor, math.exp(intercept), -float(slope), float(errors @ errors))
