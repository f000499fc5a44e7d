"""Where weights of a run come from is one place, however its path is written."""

import pytest

from torchllm.checkpoint.initial import check_same_source
from torchllm.checkpoint.manifest import CheckpointError

pytestmark = pytest.mark.quick


def test_frozen_weights_are_known_by_their_files_and_a_path_of_any_working_folder() -> None:
    found = {"from": "/home/me/hf", "files": (1,)}
    check_same_source("model.from_hf", found, {"from": "hf", "files": [1]})
    for recorded in ({"from": "other", "files": [1]}, {"from": "hf", "files": [2]}, None):
        with pytest.raises(CheckpointError, match=r"model\.from_hf: the frozen weights are not those"):
            check_same_source("model.from_hf", found, recorded)
