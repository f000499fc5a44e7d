"""Fixtures and options of every test."""

from collections.abc import Iterator

import pytest
import torch

from tests import workers


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `pytest -m lattice` draws; see test_lattice.py."""
    parser.addoption("--count", default="20", help="layouts to draw: a number, or all-meshes")
    parser.addoption("--seed", type=int, default=0, help="of the layouts drawn")
    parser.addoption("--report", default="", help="file that gets a line of JSON for each layout drawn")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Compute with one thread, as the pool's ranks do: on tiny tensors the threads of two wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _stop_workers() -> Iterator[None]:
    yield
    workers.POOL.stop()
