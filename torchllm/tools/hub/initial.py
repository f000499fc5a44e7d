"""The weights that a fresh run starts from, if they are not random: of a published model, or of another run.

A run that resumes from its own checkpoint reads neither, except for frozen weights that have low-rank updates: its
checkpoints do not hold them.
"""

from pathlib import Path

from torchllm.checkpoint.initial import InitialWeights
from torchllm.config import Config
from torchllm.config.applied_keys import applied


def initial_weights(config: Config) -> InitialWeights | None:
    """Return where the config says that the weights of a fresh run come from; None: they are random."""
    applied("model.upcycle", config.model.upcycle)
    applied("model.upcycle_noise", config.model.upcycle_noise)
    if not config.checkpoint.initial and not config.model.from_hf:
        return None
    # The imports below take a second, and few runs need them.
    from torchllm.tools.hub.published_weights import HubWeights
    from torchllm.tools.hub.upcycle import UpcycledWeights, dense_parts
    from torchllm.tools.hub.weights import RunWeights, initial_parts

    parts = dense_parts if config.model.upcycle else initial_parts
    source: InitialWeights = HubWeights(config.model, parts)
    if config.checkpoint.initial:
        source = RunWeights(Path(config.checkpoint.initial), parts)
    return UpcycledWeights(source, config.model, config.run.seed) if config.model.upcycle else source
