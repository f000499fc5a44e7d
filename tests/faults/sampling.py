"""Which faults `pytest` tries: a sample of a few minutes. `--trials=2` or more tries every one."""

import pytest

from tests.sampling import part_of

AFTER_CHECKPOINTS = ("an evicted pod", "a lost node", "a killed rank")
"""faults after which two nodes go on from a checkpoint: half a minute each, so `pytest` tries one, by commit"""
BEFORE_THE_FIRST_STEP = ("nodes with different configs", "a signal in the start up")
"""of these, too"""


def has_turn(fault: str) -> bool:
    """Return whether `pytest` tries one of these faults at this commit."""
    return fault in (*part_of(AFTER_CHECKPOINTS, 3), *part_of(BEFORE_THE_FIRST_STEP, 2))


def skip_unless_sampled(trials: int, is_sampled: bool = False) -> None:
    """Skip a case that is not in the sample, where each fault is tried once."""
    if trials == 1 and not is_sampled:
        pytest.skip("not in the sample of `pytest`; --trials=2 tries it")
