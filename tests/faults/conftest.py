"""What all fault tests have in common."""

from pathlib import Path

import pytest

from tests.recipes.warm import pretrain


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of 2 ranks (FSDP), with checkpoints and evaluations at steps 4 and 8."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert pretrain(2, folder) == ["", ""]
    return folder
