"""The weights that a fresh run starts from, if they are not random: the interface, and the weights of another run.

Weights of a published model are in `torchllm/tools/hub/published_weights.py`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from torchllm.checkpoint.agreement import Group, log_on_first, on_first
from torchllm.checkpoint.manifest import CheckpointError, step_folders
from torchllm.checkpoint.state import PartsToFill, initial_parts
from torchllm.checkpoint.weights import load_newest_weights
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
    """Raise CheckpointError if the weights that LoRA freezes have another origin than a checkpoint has recorded.

    key: key of the config that names them. found: the current record from `InitialWeights.load`.
    """
    if recorded is not None and same_path(recorded["from"], found["from"]):
        recorded = {**recorded, "from": found["from"]}
    if json.dumps(found, sort_keys=True) != json.dumps(recorded, sort_keys=True):  # tuples are lists in a checkpoint
        raise CheckpointError(
            f"{key}: the frozen weights are not those that the run started from: the checkpoint's low-rank updates "
            "(lora.rank) belong to others. Restore them there, or set another run.folder"
        )


@dataclass(frozen=True)
class RunWeights:
    """The weights of a checkpoint of another run."""

    folder: Path
    """a step folder, or a run folder"""
    parts: PartsToFill = initial_parts
    key: str = "checkpoint.initial"

    def load(self, stages: Sequence[nn.Module], group: Group) -> dict[str, Any]:
        """Fill this rank's part of the model: see `InitialWeights`."""
        is_run = on_first(group, lambda: bool(step_folders(self.folder / "checkpoints")))
        if is_run:
            manifest = load_newest_weights(self.folder, "auto", stages, group=group, cast=True, to_fill=self.parts)
        else:
            manifest = load_newest_weights("", str(self.folder), stages, group=group, cast=True, to_fill=self.parts)
        log_on_first(group, f"starting from the weights of {self.folder}: step {manifest.step}")
        record = {"from": str(self.folder), "step": manifest.step}
        return record | {"initial": manifest.record.get("initial")}
