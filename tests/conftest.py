"""Fixtures and options of every test, and which tests a command runs."""

import gc
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import workers
from tests.launched import Started
from tests.patience import patience

os.environ.setdefault("PYTEST_TIMEOUT", str(patience(300)))  # seconds for a test, read by pytest-timeout

MOST_PROCESSES = 8
"""that run tests at once: each has a pool of ranks"""


def pytest_addoption(parser: pytest.Parser) -> None:
    """How often each fault is tried."""
    parser.addoption("--trials", type=int, default=1, help="of each fault, and of a dozen kills of copies")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return how many processes run the tests: one per core for `pytest`, 0 (none but this one) for a part of it."""
    is_whole = config.args == config.getini("testpaths") and not config.option.markexpr
    return min(len(os.sched_getaffinity(0)), MOST_PROCESSES) if is_whole else 0


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the tests without Python's garbage collector, which takes a quarter of that time and finds nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """For `pytest -m quick` import only the files with that mark: to import all takes a third as long as its tests."""
    if config.option.markexpr == "quick" and collection_path.name.startswith("test_"):
        return True if "mark.quick" not in collection_path.read_text(encoding="utf-8") else None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the exhaustive tests to `pytest -m exhaustive`."""
    if "exhaustive" in config.option.markexpr:
        return
    by_default, at_night = [], []
    for item in items:
        (at_night if item.get_closest_marker("exhaustive") else by_default).append(item)
    items[:] = by_default
    config.hook.pytest_deselected(items=at_night)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Compute with one thread, as the pool's ranks do: on tiny tensors the threads of two wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _nothing_is_applied() -> Iterator[None]:
    """Forget what another test has loaded and applied."""
    with workers.nothing_applied():
        yield


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


@pytest.fixture
def trials(request: pytest.FixtureRequest) -> int:
    """How often to try each fault, at moments of its own each time: --trials."""
    count: int = request.config.getoption("--trials")
    return count
