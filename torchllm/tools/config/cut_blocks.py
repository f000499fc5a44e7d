"""Which layouts cut blocks of moments in 8 bits. No torch."""

from functools import lru_cache
from typing import NamedTuple

from torchllm.config import Model
from torchllm.facts.parameters import rule_of
from torchllm.facts.shapes import parameter_shapes
from torchllm.facts.state_blocks import BLOCK, has_blocks


class CutRows(NamedTuple):
    """Rows of a parameter whose parts are no whole blocks."""

    name: str
    width: int
    """elements of a row"""
    parts: int
    key: str
    """that cuts them"""


@lru_cache(maxsize=1024)
def cut_rows(model: Model, tp: int, ep: int, shards: int) -> CutRows | None:
    """Return the first parameter whose blocks are cut: by tp or, of experts along their hidden states, by FSDP.

    shards: dp_shard x cp. None if no block is cut.
    """
    experts = model.experts
    if ep > 1:
        shards, experts = shards * tp // ep, experts // ep
    cuts_hidden = shards > 0 and experts % shards and model.hidden % shards == 0
    for name, shape in parameter_shapes(model).items():
        is_of_experts, cut = len(shape) == 3, rule_of(name).cut
        key, parts = "parallel.tp", tp if cut == "rowwise" else 1
        if is_of_experts and ep > 1:
            parts = 1
        if is_of_experts and cut == "colwise" and cuts_hidden:
            key, parts = "parallel.dp_shard", shards
        if has_blocks(shape) and shape[-1] % (parts * BLOCK):
            return CutRows(name, shape[-1], parts, key)
    return None
