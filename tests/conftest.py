"""Fixtures and options of every test."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import workers
from tests.launched import Started


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `pytest -m lattice` draws (see test_lattice.py), and how often each fault of tests/faults is tried."""
    parser.addoption("--count", default="20", help="layouts to draw: a number, all-meshes, or all-expert-meshes")
    parser.addoption("--seed", type=int, default=0, help="of the layouts drawn")
    parser.addoption("--report", default="", help="file that gets a line of JSON for each layout drawn")
    parser.addoption("--trials", type=int, default=1, help="of each fault in tests/faults")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Compute with one thread, as the pool's ranks do: on tiny tensors the threads of two wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _stop_workers() -> Iterator[None]:
    yield
    workers.POOL.stop()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Starts run_train.sh in the background; whatever is left of it at the end of the test is killed."""
    started: list[Started] = []

    def start(*arguments: str, **options: Any) -> Started:
        started.append(Started(tmp_path / f"output-{len(started)}", arguments, **options))
        return started[-1]

    yield start
    for run in started:
        if run.process.poll() is None:
            run.kill_everything()
