"""The weights that a fresh run starts from, if they are not random: of a published model, or of another run.

A run that resumes from a checkpoint of its own reads neither, but for the weights that LoRA freezes: its checkpoints
do not hold them.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import nn

from torchllm.checkpoint.agreement import Group, log_on_first, on_all, on_first
from torchllm.checkpoint.manifest import CheckpointError, Manifest, step_folders
from torchllm.checkpoint.state import WEIGHTS, PartsToFill, initial_parts
from torchllm.checkpoint.weights import load_newest_weights
from torchllm.config import Config, Model
from torchllm.config.applied_keys import applied
from torchllm.config.changes import check_frozen_weights
from torchllm.config.paths import same_path
from torchllm.models.decoder import Decoder
from torchllm.parallel.initialize import fill_all
from torchllm.tools.hub.files import HubConfig, HubFiles, check_tensors, find_hub_files, read_hub_config
from torchllm.tools.hub.hf_reader import read_hub_weights
from torchllm.tools.hub.hub import find_hub_model
from torchllm.tools.hub.upcycle import copy_first_expert, dense_parts


class InitialWeights(Protocol):
    """Where the weights of a fresh run come from."""

    @property
    def key(self) -> str:
        """The key of the config that names it."""

    def load(self, stages: Sequence[nn.Module], group: Group) -> dict[str, Any]:
        """Fill this rank's part of the model; return what checkpoints remember of where the weights came from.

        Call it on all ranks. Raises CheckpointError on all of them.
        """


def initial_weights(config: Config) -> InitialWeights | None:
    """Return where the config says that the weights of a fresh run come from; None: they are random."""
    applied("model.upcycle", config.model.upcycle)
    applied("model.upcycle_noise", config.model.upcycle_noise)
    parts = dense_parts if config.model.upcycle else initial_parts
    source: InitialWeights
    if config.checkpoint.initial:
        source = RunWeights(Path(config.checkpoint.initial), parts)
    elif config.model.from_hf:
        source = HubWeights(config.model, parts)
    else:
        return None
    return UpcycledWeights(source, config.model, config.run.seed) if config.model.upcycle else source


def load_weights_of_run(
    config: Config, stages: Sequence[Decoder], *, group: Group = None, prefix: str = WEIGHTS
) -> Manifest:
    """Load the weights of a run's newest checkpoint, or of the one that `checkpoint.resume` names; return its manifest.

    With LoRA the frozen weights, which are in no checkpoint of the run, are read from where the run got them. stages:
    have memory, in any dtype. group, prefix, and what is raised: see `load_weights`. Also raises CheckpointError or
    UserError if the frozen weights are not those that the checkpoint's updates belong to.
    """
    source = load_frozen_weights(config, stages, group) if config.lora.is_on else None
    folder, resume = config.run.folder, config.checkpoint.resume
    manifest = load_newest_weights(folder, resume, stages, group=group, cast=True, prefix=prefix)
    if config.lora.is_on:
        check_frozen_weights(manifest.record, config)
    if source is not None:
        check_same_source(source.key, source.record, manifest.record.get("initial"))
    return manifest


class FrozenSource(NamedTuple):
    """Where weights that LoRA freezes were read from."""

    key: str
    """of the config"""
    record: dict[str, Any]
    """what a checkpoint remembers of it"""


def load_frozen_weights(config: Config, stages: Sequence[Decoder], group: Group = None) -> FrozenSource | None:
    """Make or read the weights that LoRA freezes; return where they are from, None if they are of the run's seed.

    stages: have memory; their low-rank updates become those of a fresh run. Call it on all ranks.
    """
    fill_all(stages, config.model, config.run.seed)
    initial = initial_weights(config)
    if initial is None:
        return None
    return FrozenSource(initial.key, initial.load(stages, group))


def check_same_source(key: str, found: Mapping[str, Any], recorded: Mapping[str, Any] | None) -> None:
    """Raise CheckpointError if the weights that LoRA freezes come from elsewhere than a checkpoint has recorded.

    key: of the config, which names them. found: what `InitialWeights.load` returns of them now.
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


@dataclass(frozen=True)
class HubWeights:
    """The weights of a published model."""

    model: Model
    """of the run; it may have more rows of the embedding"""
    parts: PartsToFill = initial_parts
    key: str = "model.from_hf"

    def load(self, stages: Sequence[nn.Module], group: Group) -> dict[str, Any]:
        """Fill this rank's part of the model: see `InitialWeights`."""
        began = time.monotonic()
        name = self.model.from_hf
        folder = on_all(group, lambda: find_hub_model(name, weights=True, may_download=False).folder)
        config, files = on_first(group, lambda: self.open(folder))
        files.folder = folder  # the cache of another node may be elsewhere
        totals = on_all(group, lambda: read_hub_weights(files, config, stages, self.parts))
        seconds = time.monotonic() - began
        log_on_first(
            group,
            f"starting from the weights of {name}: {len(files.tensors)} tensors; rank 0 has read "
            f"{totals.bytes_read / 2**20:.1f} MiB in {seconds:.1f} s",
        )
        return self.record(config, files)

    def open(self, folder: Path) -> tuple[HubConfig, HubFiles]:
        """Return the files of the model. Raises CheckpointError if they do not fit."""
        config = read_hub_config(folder)
        files = find_hub_files(folder, config.family)
        problems = check_tensors(files, config, self.model, is_tying_chosen=True)
        if problems:
            raise CheckpointError("\n".join(problems))
        return config, files

    def record(self, config: HubConfig, files: HubFiles) -> dict[str, Any]:
        """Return what a checkpoint remembers of the model."""
        return {
            "from": self.model.from_hf,
            "model_type": config.family.model_type,
            "vocab": config.model.vocab,
            "config_sha256": config.sha256,
            "files": files.record(),
        }


@dataclass(frozen=True)
class UpcycledWeights:
    """The weights of a dense model, of whose feed-forward layers all experts of a block are copies."""

    source: InitialWeights
    """fills `dense_parts`"""
    model: Model
    """of the run"""
    seed: int

    @property
    def key(self) -> str:
        """See `InitialWeights`."""
        return self.source.key

    def load(self, stages: Sequence[nn.Module], group: Group) -> dict[str, Any]:
        """Fill this rank's part of the model, but for the routers: see `InitialWeights`."""
        record = self.source.load(stages, group)
        copy_first_expert(stages, self.model, self.seed)
        return record
