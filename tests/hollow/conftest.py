"""Fixtures of the tests on the hollow GPU."""

import pytest

from tests.hollow.bed import missing
from tests.hollow.launches import Report, measure_all
from tests.hollow.layouts import layouts


@pytest.fixture(autouse=True, scope="session")
def _cuda_build() -> None:
    """Skip all tests where torch has no CUDA."""
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def reports() -> dict[str, Report]:
    """What a step of each layout did."""
    return measure_all(layouts())
