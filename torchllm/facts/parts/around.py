"""Joins a mixer and the part around a block, as multi-token prediction has one. No torch."""

from dataclasses import replace
from functools import cache

from torchllm.config import Model
from torchllm.facts.parts.costs import MixerCosts, RankShare
from torchllm.facts.parts.part import BlockPart, found


@cache
def with_part_around(outer: BlockPart, part: BlockPart) -> BlockPart:
    """Return `part` with the parameters, products and costs of `outer`, the part around it."""

    def costs(view: Model, share: RankShare) -> MixerCosts:
        assert outer.costs is not None
        assert part.costs is not None
        more, own = found(outer.costs)(view, share), found(part.costs)(view, share)
        return replace(own, kept=own.kept + more.kept, normed=own.normed + more.normed)

    return replace(
        part,
        parameters=outer.parameters + part.parameters,
        products_in_order=lambda view: outer.products(view) + part.products(view),
        needs_last_product=outer.needs_last_product,
        costs=part.costs and costs,
    )
