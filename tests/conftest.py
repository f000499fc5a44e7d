"""Fixtures of every test."""

from collections.abc import Iterator

import pytest

from tests import workers


@pytest.fixture(scope="session", autouse=True)
def _stop_workers() -> Iterator[None]:
    yield
    workers.POOL.stop()
