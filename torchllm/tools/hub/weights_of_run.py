"""Load all weights of a run, for recipes that only use them: frozen ones, which no checkpoint holds, too."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torchllm.checkpoint.agreement import Group
from torchllm.checkpoint.initial import check_same_source
from torchllm.checkpoint.manifest import Manifest
from torchllm.checkpoint.state import WEIGHTS
from torchllm.config import Config
from torchllm.models.decoder import Decoder
from torchllm.parallel.initialize import fill_all
from torchllm.tools.config.compare import check_frozen_weights
from torchllm.tools.hub.initial import initial_weights
from torchllm.tools.hub.weights import load_newest_weights, load_weights


def load_weights_of_run(
    config: Config, stages: Sequence[Decoder], *, group: Group = None, prefix: str = WEIGHTS
) -> Manifest:
    """Load the weights of a run's newest checkpoint, or of the one that `checkpoint.resume` names; return its manifest.

    Weights below low-rank updates are in no checkpoint of the run: they are read from where the run got them, or made
    from its seed. stages: have memory, in any dtype. group, prefix, and errors: see `load_weights`. Also raises
    CheckpointError or UserError if the frozen weights are not those that the checkpoint's updates belong to.
    """
    initial = origin = None
    if config.trained.only_updates:
        fill_all(stages, config.model, config.run.seed)
        initial = initial_weights(config)
        origin = None if initial is None else initial.load(stages, group)
    resume = config.checkpoint.resume
    load = partial(load_weights, stages=stages, group=group, cast=True, prefix=prefix)
    if resume in ("auto", "none"):
        manifest = load_newest_weights(config.run.folder, load, group=group)
    else:
        manifest = load(Path(resume))
    if config.trained.only_updates:
        check_frozen_weights(manifest.record, config)
    if initial is not None and origin is not None:
        check_same_source(initial.key, origin, manifest.record.get("initial"))
    return manifest
