"""One cluster for all trials, and the runs without a fault that they are compared with."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.recipes.warm import pretrain
from tests.slurm.cluster import SlurmCluster, missing, slurm_cluster
from tests.slurm.job import SETTINGS, Job, write_recipe


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if reason := missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    write_recipe(folder)
    with slurm_cluster(folder) as made:
        yield made


@pytest.fixture
def job(slurm: SlurmCluster, request: pytest.FixtureRequest) -> Iterator[Job]:
    """A job; it and whatever else is in the queue is cancelled at the end."""
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name.removeprefix("test_"))
    yield Job(slurm, name)
    slurm.reset()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes the run folder of a run on so many ranks, without a fault, outside Slurm; each only once."""
    folders: dict[tuple[int, tuple[str, ...]], Path] = {}

    def run(ranks: int, *settings: str) -> Path:
        if (ranks, settings) not in folders:
            folder = tmp_path_factory.mktemp("undisturbed") / "run"
            assert pretrain(ranks, folder, *settings, settings=SETTINGS) == [""] * ranks
            folders[ranks, settings] = folder
        return folders[ranks, settings]

    return run


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Adds to what the table says of a trial."""

    def add(text: str) -> None:
        record_property("observed", text)

    return add
