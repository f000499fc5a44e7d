"""The cost of a training in days and money, restarts included. No torch.

Failures come at random, on average one per `hours_between_failures` of the whole job. Each loses half a save interval,
on average, and the time until the job trains again (Young 1974; Daly 2006, docs/references.md). That time is itself
exposed to failures: with L lost per failure and M between failures, a training of T takes T / (1 - L / M).
"""

import math
from typing import NamedTuple

from torchllm.config.errors import UserError


class Purchase(NamedTuple):
    """The user's terms: the length of the training, the price and reliability of the machines."""

    tokens: float = 0.0
    """of the whole training; 0: unknown"""
    dollars_per_gpu_hour: float = 0.0
    """0: unknown"""
    hours_between_failures: float = math.inf
    """of the whole job"""
    save_minutes: float = 30.0
    """between two checkpoints"""
    restart_minutes: float = 10.0
    """from a failure until the job trains again"""

    @property
    def lost_hours(self) -> float:
        """Hours that a failure loses on average."""
        return (self.save_minutes / 2 + self.restart_minutes) / 60

    def lost_share(self) -> float:
        """Return the share of the training's time that failures take.

        UserError if failures come faster than the job restarts.
        """
        share = self.lost_hours / self.hours_between_failures
        if share >= 1:
            raise UserError(
                f"--mtbf-hours {self.hours_between_failures:g}: a failure loses {self.lost_hours:.3g} hours on "
                "average, so the training never ends: save more often, or restart faster"
            )
        return share


NO_PURCHASE = Purchase()
"""of a user who said nothing"""


class Bill(NamedTuple):
    """The cost of a whole training."""

    days: float
    gpu_hours: float
    dollars: float
    lost: float
    """share of the days that failures take"""


def bill(purchase: Purchase, step_seconds: float, tokens_per_step: int, gpus: int) -> Bill:
    """Return the cost of a training. UserError if failures come faster than the job restarts."""
    lost = purchase.lost_share()
    hours = purchase.tokens / tokens_per_step * step_seconds / 3600 / (1 - lost)
    gpu_hours = hours * gpus
    return Bill(hours / 24, gpu_hours, gpu_hours * purchase.dollars_per_gpu_hour, lost)


def failures_line(purchase: Purchase) -> str:
    """Return the share of failures in the days and the price; empty if the user gave no failure rate."""
    if math.isinf(purchase.hours_between_failures):
        return ""
    return (
        f"Days and price include failures: one per {purchase.hours_between_failures:g} hours loses "
        f"{purchase.lost_hours:.2g} hours (half of {purchase.save_minutes:g} minutes between checkpoints, "
        f"{purchase.restart_minutes:g} to restart), which is {purchase.lost_share():.1%} of the time."
    )
