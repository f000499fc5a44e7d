"""recipes/pretrain.py on the warm ranks of the pool, as torchrun would start it."""

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests import workers
from tests.tiny_run import DEBUG, ROOT, SMALL, changed, free_port, process_as_it_was
from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.tools.config.load import load_config
from torchllm.tools.front.start import load_configs

Change = Callable[[Any, int], None]
"""what to do to the module recipes.pretrain on a rank before it runs"""


def pretrain(
    ranks: int,
    folder: Path,
    *overrides: str,
    change: Change | None = None,
    config: Path = ROOT / DEBUG,
    settings: Sequence[str] = SMALL,
    recipe: str = "recipes.pretrain",
) -> list[str]:
    """Train on warm ranks, and return each rank's UserError, or "" where it had none. recipe: a module."""
    arguments = [str(config), *settings, "--data.workers=0", "--metrics.tensorboard=false", f"--run.folder={folder}"]
    return workers.run(_train, ranks, recipe, changed(arguments, *overrides), free_port(), change)


def alone(folder: Path, *overrides: str) -> Config:
    """Return the config of a run for the recipes that run in one process."""
    return load_config([str(folder / "config.toml"), *overrides], one_device=True)


def _train(name: str, arguments: list[str], port: int, change: Change | None) -> str:
    recipe = importlib.import_module(name)
    names = dict(vars(recipe))
    rank = dist.get_rank()
    with rank_of_torchrun(port):
        try:
            if change is not None:
                change(recipe, rank)
            recipe.main(*load_configs(arguments))
            return ""
        except UserError as error:
            return str(error)
        finally:
            vars(recipe).update(names)


@contextmanager
def rank_of_torchrun(port: int) -> Iterator[None]:
    """Makes a warm rank one that torchrun has started: a recipe makes its own process group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with _environment({name: str(value) for name, value in variables.items()}), process_as_it_was():
        yield


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of 2 ranks (FSDP), with checkpoints and evaluations at steps 4 and 8."""
    folder = tmp_path_factory.getbasetemp() / "trained"  # of this process, for all files that import the fixture
    if not folder.exists():
        folder.mkdir()
        assert pretrain(2, folder) == ["", ""]
    return folder
