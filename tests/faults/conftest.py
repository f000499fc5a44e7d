"""What all fault tests have in common."""

import pytest


@pytest.fixture
def trials(request: pytest.FixtureRequest) -> int:
    """How often to try each fault, at moments of its own each time: --trials."""
    count: int = request.config.getoption("--trials")
    return count
