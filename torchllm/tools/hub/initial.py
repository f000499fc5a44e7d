"""The weights that a fresh run starts from, if they are not random: of a published model, or of another run.

A run that resumes from its own checkpoint reads neither, except for frozen weights that have low-rank updates: its
checkpoints do not hold them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from torchllm.checkpoint.agreement import Group, log_on_first, on_first
from torchllm.checkpoint.initial import InitialWeights, check_same_source
from torchllm.checkpoint.manifest import Manifest, step_folders
from torchllm.checkpoint.state import WEIGHTS
from torchllm.config import Config
from torchllm.config.applied_keys import applied
from torchllm.models.decoder import Decoder
from torchllm.parallel.initialize import fill_all
from torchllm.tools.config.changes import check_frozen_weights
from torchllm.tools.hub.weights import PartsToFill, initial_parts, load_newest_weights, load_weights


def initial_weights(config: Config) -> InitialWeights | None:
    """Return where the config says that the weights of a fresh run come from; None: they are random."""
    applied("model.upcycle", config.model.upcycle)
    applied("model.upcycle_noise", config.model.upcycle_noise)
    if not config.checkpoint.initial and not config.model.from_hf:
        return None
    # The imports below take a second, and few runs need them.
    from torchllm.tools.hub.published_weights import HubWeights
    from torchllm.tools.hub.upcycle import UpcycledWeights, dense_parts

    parts = dense_parts if config.model.upcycle else initial_parts
    source: InitialWeights = HubWeights(config.model, parts)
    if config.checkpoint.initial:
        source = RunWeights(Path(config.checkpoint.initial), parts)
    return UpcycledWeights(source, config.model, config.run.seed) if config.model.upcycle else source


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
        load = partial(load_weights, stages=stages, group=group, cast=True, to_fill=self.parts)
        manifest = load_newest_weights(self.folder, load, group=group) if is_run else load(self.folder)
        log_on_first(group, f"starting from the weights of {self.folder}: step {manifest.step}")
        record = {"from": str(self.folder), "step": manifest.step}
        return record | {"initial": manifest.record.get("initial")}


def load_weights_of_run(
    config: Config, stages: Sequence[Decoder], *, group: Group = None, prefix: str = WEIGHTS
) -> Manifest:
    """Load the weights of a run's newest checkpoint, or of the one that `checkpoint.resume` names; return its manifest.

    Frozen weights that are in no checkpoint of the run are read from where the run got them. stages:
    have memory, in any dtype. group, prefix, and errors: see `load_weights`. Also raises CheckpointError or
    UserError if the frozen weights are not those that the checkpoint's updates belong to.
    """
    source = load_frozen_weights(config, stages, group) if config.trained.only_updates else None
    resume = config.checkpoint.resume
    load = partial(load_weights, stages=stages, group=group, cast=True, prefix=prefix)
    if resume in ("auto", "none"):
        manifest = load_newest_weights(config.run.folder, load, group=group)
    else:
        manifest = load(Path(resume))
    if config.trained.only_updates:
        check_frozen_weights(manifest.record, config)
    if source is not None:
        check_same_source(source.key, source.record, manifest.record.get("initial"))
    return manifest


class FrozenSource(NamedTuple):
    """Where the frozen weights were read from."""

    key: str
    """of the config"""
    record: dict[str, Any]
    """its record in a checkpoint"""


def load_frozen_weights(config: Config, stages: Sequence[Decoder], group: Group = None) -> FrozenSource | None:
    """Make or read the weights below low-rank updates; return where they are from, None if they are of the run's seed.

    stages: have memory; their low-rank updates get the values of a fresh run. Call it on all ranks.
    """
    fill_all(stages, config.model, config.run.seed)
    initial = initial_weights(config)
    if initial is None:
        return None
    return FrozenSource(initial.key, initial.load(stages, group))
