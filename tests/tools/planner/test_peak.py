"""The worst of several moments."""

import pytest

from torchllm.tools.planner.peak import Memory, Peak
from torchllm.tools.planner.software import TORCHLLM


def test_what_tensors_hold_and_what_is_reserved_may_peak_at_different_moments() -> None:
    """The allocator's share is of what comes and goes: one moment has more gradients, the other more activations."""
    software = TORCHLLM
    share = software.constants.allocator - 1
    first, second = Memory(gradients=110.0), Memory(activations=100.0)
    peak = Peak.of([first, second], software)
    assert peak == Peak(first, pytest.approx(100 * (1 + share)))
    assert Peak.of([first], software).with_peak(Peak.of([second], software)) == peak
