"""Load all weights of a run, for recipes that only use them: frozen ones, which no checkpoint holds, too."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torchllm.checkpoint.agreement import Group
from torchllm.checkpoint.initial import check_same_source
from torchllm.checkpoint.manifest import Manifest
from torchllm.checkpoint.state import WEIGHTS
from torchllm.config import Config
from torchllm.models.decoder import Decoder
from torchllm.parallel.initialize import fill_all
from torchllm.tools.config.changes import check_frozen_weights
from torchllm.tools.hub.initial import initial_weights
from torchllm.tools.hub.weights import load_newest_weights, load_weights


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
