"""Weights of a published model, read by each rank in parts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from torchllm.checkpoint.agreement import Group, log_on_first, on_all, on_first
from torchllm.checkpoint.manifest import CheckpointError
from torchllm.config import Model
from torchllm.tools.hub.files import HubConfig, HubFiles, check_tensors, find_hub_files, read_hub_config
from torchllm.tools.hub.hf_reader import read_hub_weights
from torchllm.tools.hub.hub import find_hub_model
from torchllm.tools.hub.weights import PartsToFill, initial_parts


@dataclass(frozen=True)
class HubWeights:
    """The weights of a published model."""

    model: Model
    """of the run; it may have more rows of the embedding"""
    parts: PartsToFill = initial_parts
    key: str = "model.from_hf"

    def load(self, stages: Sequence[nn.Module], group: Group) -> dict[str, Any]:
        began = time.monotonic()
        name = self.model.from_hf
        folder = on_all(group, lambda: find_hub_model(name, weights=True, may_download=False).folder)
        config, files = on_first(group, lambda: self.open(folder))
        files.folder = folder  # the cache of another node may be elsewhere
        bytes_read = on_all(group, lambda: read_hub_weights(files, config, stages, self.parts))
        seconds = time.monotonic() - began
        log_on_first(
            group,
            f"starting from the weights of {name}: {len(files.tensors)} tensors; rank 0 has read "
            f"{bytes_read / 2**20:.1f} MiB in {seconds:.1f} s",
        )
        return self.record(config, files)

    def open(self, folder: Path) -> tuple[HubConfig, HubFiles]:
        """Return the files of the model. Raises CheckpointError if they do not fit."""
        config = read_hub_config(folder)
        files = find_hub_files(folder, config)
        problems = check_tensors(files, config, self.model, is_tying_chosen=True)
        if problems:
            raise CheckpointError("\n".join(problems))
        return config, files

    def record(self, config: HubConfig, files: HubFiles) -> dict[str, Any]:
        """Return the record of the model for a checkpoint."""
        return {
            "from": self.model.from_hf,
            "model_type": config.family.model_type,
            "text_part_of": config.read.text_part.architecture if config.read.text_part else "",
            "vocab": config.model.vocab,
            "config_sha256": config.sha256,
            "files": files.record(),
        }
