"""The interface of the weights of a fresh run that are not random (`torchllm/tools/hub/initial.py`)."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from torchllm.checkpoint.agreement import Group
from torchllm.checkpoint.manifest import CheckpointError
from torchllm.config.paths import same_path


class InitialWeights(Protocol):
    """The source of a fresh run's weights."""

    @property
    def key(self) -> str:
        """The key of the config that names it."""

    def load(self, stages: Sequence[nn.Module], group: Group) -> dict[str, Any]:
        """Fill this rank's part of the model; return a record of the weights' origin for checkpoints.

        Call it on all ranks. Raises CheckpointError on all of them.
        """


def check_same_source(key: str, found: Mapping[str, Any], recorded: Mapping[str, Any] | None) -> None:
    """Raise CheckpointError if frozen weights have another origin than a checkpoint has recorded.

    key: key of the config that names them. found: the current record from `InitialWeights.load`.
    """
    if recorded is not None and same_path(recorded["from"], found["from"]):
        recorded = {**recorded, "from": found["from"]}
    if json.dumps(found, sort_keys=True) != json.dumps(recorded, sort_keys=True):  # tuples are lists in a checkpoint
        raise CheckpointError(
            f"{key}: the frozen weights are not those that the run started from: the checkpoint's low-rank updates "
            "belong to others. Restore them there, or set another run.folder"
        )
