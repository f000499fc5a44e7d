"""Latent attention under each technique: gradients equal one process, and latents are sent instead of hidden states.

With experts within groups, as DeepSeek-V3 has them, where a layout has `MIXTURE`. Others: the lattice, whose sample has
each pair of a setting and a mixer.
"""

from tests.lattice import MIXERS, MIXTURES
from tests.parallel import tiers
from tests.parallel.trace import Collective, traced
from tests.parity import Settings, check
from tests.workers import run

LATENT: Settings = {**MIXERS["DeepSeek-V3"], "model.kv_heads": 0}
NO_Q_LATENT: Settings = {"model.latent_q_width": 0}
MIXTURE: Settings = {**MIXTURES["DeepSeek-V3"], "model.dense_layers": 1}
TP: Settings = {"parallel.tp": 2}
SP: Settings = {**TP, "parallel.sequence_parallel": True}
BY_DEFAULT: dict[str, Settings] = {"tensor parallel": {**TP, "data.document_mask": True}, "sequence parallel": SP}
LAYOUTS: dict[str, Settings] = {
    "compiled blocks": {**SP, "compile.block": True},
    "compiled blocks of FSDP": {"parallel.dp_shard": 2, "compile.block": True, **MIXTURE, "model.attention": "eager"},
    "compiled norms": {**TP, "compile.norm": True},
    "low-rank updates": {**TP, **NO_Q_LATENT, "lora.rank": 3, "lora.targets": ("q_proj", "o_proj", "up_proj")},
}


@tiers.train(BY_DEFAULT, LAYOUTS)
def test_a_layout_trains_the_same_latents(settings: Settings) -> None:
    check({**LATENT, **settings}, ragged=True)


def sent(settings: Settings) -> list[int]:
    """Return the elements of what a step sends over tp within the blocks, in their order."""
    return [event.elements for event in traced(settings) if isinstance(event, Collective) and event.axis == "tp"]


def test_sequence_parallelism_gathers_latents_instead_of_hidden_states() -> None:
    sizes: Settings = {"model.layers": 1, "training.global_batch_size": 1, "training.sequence_length": 48}
    latents, hidden = 48 * (20 + 24 + 4), 48 * 64
    with_sp = run(sent, 2, {**LATENT, **sizes, **SP})[0]
    assert with_sp.count(latents) == 2, with_sp  # forward, and backward
    # embedding, o, gate, down, head: once in the forward and once in the backward each
    assert with_sp.count(hidden) == 10, with_sp
    without = run(sent, 2, {**LATENT, **sizes, **TP})[0]
    assert without.count(latents) == 1, without
