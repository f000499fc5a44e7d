"""Experts next to a dense layer (Gemma 4 26B-A4B): both read the input of the feed-forward part of a block, each has a
norm before it and after it, and their results are added.

The router reads the same, normed without weight and then multiplied by a vector and by 1 / sqrt(D); the weights of a
token's experts are multiplied by one number per expert. The order of operations is as in transformers'
`Gemma4TextDecoderLayer`.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from torchllm.config import Model
from torchllm.facts.parts.dense import PART as DENSE
from torchllm.facts.parts.experts import PART as EXPERTS
from torchllm.facts.parts.part import Cut, PartParameter, Shape, Start, WeightProduct, linear


def _vector(name: str, shape: Callable[[Model], Shape], cut: Cut, start: Start) -> PartParameter:
    return PartParameter(name=f"mlp.{name}", shape=shape, cut=cut, start=start, role="vector")


def _norm(name: str, cut: Cut) -> PartParameter:
    return _vector(f"{name}.weight", lambda view: (view.hidden,), cut, "identity")


def _products(view: Model) -> list[WeightProduct]:
    """Return the products of the router, the experts and the dense layer, in this order."""
    return EXPERTS.products(view) + DENSE.products(view)


def _problems(view: Model) -> Iterator[tuple[str, str]]:
    """Yield the keys whose values do not combine with the part."""
    if view.shared_experts:
        yield "shared_experts", "does not combine with model.dense_beside, whose layer all tokens use: set it to 0"
    if view.upcycle:
        yield (
            "upcycle",
            "would add the dense layer that it copies a second time, with model.dense_beside: set one false",
        )


PART = replace(
    EXPERTS,
    name="experts_beside",
    build="torchllm.models.parts.experts_beside:ExpertsBesideDense",
    parameters=(
        *EXPERTS.parameters[:2],  # of the router
        _vector("routed.router.input_scale", lambda view: (view.hidden,), "whole_summed", "ones"),
        _vector("routed.router.expert_scale", lambda view: (view.experts,), "whole_summed", "ones"),
        *EXPERTS.parameters[2:],
        _norm("routed.input_norm", "whole_summed"),
        _norm("routed_norm", "whole"),
        _norm("dense_input_norm", "whole"),
        *linear("mlp.dense.gate_proj", lambda view: (view.ffn, view.hidden), "colwise"),
        *linear("mlp.dense.up_proj", lambda view: (view.ffn, view.hidden), "colwise"),
        *linear("mlp.dense.down_proj", lambda view: (view.hidden, view.ffn), "rowwise", to_residual=True),
        _norm("dense_norm", "whole"),
    ),
    products_in_order=_products,
    problems=_problems,
    norms_input=True,
    unread=(),
    norms=4,
    sums=2,
    styles="torchllm.parallel.experts_beside:styles_of_beside",
)
