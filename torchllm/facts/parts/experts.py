"""A mixture of experts (Shazeer et al. 2017, arXiv 1701.06538): the feed-forward layer of sparse blocks.

Matrices of routed experts are stacked: (E, F, D) and (E, D, F). Shared experts are one layer, which all tokens use.
"""

from collections.abc import Callable, Iterator

from torchllm.config import Model
from torchllm.facts.parts.part import (
    BlockPart,
    Cut,
    PartBuffer,
    PartParameter,
    Shape,
    Start,
    WeightProduct,
    linear,
    product_of,
)


def _shared_shape(view: Model) -> Shape:
    return view.shared_experts * view.expert_width, view.hidden


def _has_shared(view: Model) -> bool:
    return view.shared_experts > 0


def _kept(view: Model, tp: int) -> float:
    """Return the bytes of the shared experts' activations before the gate multiplies them."""
    return 2.0 * view.shared_experts * view.expert_width / tp if view.shared_gate else 0.0


def _stacked(name: str, cut: Cut, start: Start) -> PartParameter:
    """Return the matrices of all experts; cut: colwise, (E, F, D), or rowwise, (E, D, F)."""

    def shape(view: Model) -> Shape:
        width, hidden = view.expert_width, view.hidden
        return (view.experts, width, hidden) if cut == "colwise" else (view.experts, hidden, width)

    return PartParameter(
        name=f"mlp.routed.experts.{name}", shape=shape, cut=cut, start=start, role="matrix", of_experts=True
    )


def _bias(name: str, cut: Cut, shape: Callable[[Model], Shape], of_experts: bool = True) -> PartParameter:
    """Return a bias that models with model.expert_biases have."""
    return PartParameter(
        name=f"mlp.routed.{name}",
        shape=lambda view: shape(view) if view.expert_biases else None,
        cut=cut,
        start="zeros",
        role="vector",
        of_experts=of_experts,
    )


def _products(view: Model) -> list[WeightProduct]:
    """Return router, gate of the shared experts, gate, up, down of the routed ones, and up, gate of the result, down of
    the shared ones.

    A product of the routed experts has the matrices of all of a token's experts.
    """
    shapes = PART.shapes(view)
    routed = [
        product_of(f"routed {name}", shapes[f"mlp.routed.experts.{name}"][1:], view.top_k)
        for name in ("gate_proj", "up_proj", "down_proj")
    ]
    shared = [
        product_of(name, shapes[name])._replace(cut="rowwise" if "down" in name else "colwise")
        for name in (f"mlp.shared.{layer}.weight" for layer in ("gate_proj", "up_proj", "result_gate", "down_proj"))
        if name in shapes
    ]
    router = product_of("mlp.routed.router.weight", shapes["mlp.routed.router.weight"])
    return [router, *shared[:1], *routed, *shared[1:]]


def _problems(view: Model) -> Iterator[tuple[str, str]]:
    """Yield the keys whose values do not combine."""
    if view.upcycle and view.expert_biases:
        yield "expert_biases", "the layers that model.upcycle copies have no biases: set it to false"


PART = BlockPart(
    name="experts",
    build="torchllm.models.experts:MixtureOfExperts",
    parameters=(
        PartParameter(
            name="mlp.routed.router.weight",
            shape=lambda view: (view.experts, view.hidden),
            cut="whole_summed",
            start="normal",
            role="router",
        ),
        _bias("router.logit_bias", "whole_summed", lambda view: (view.experts,), of_experts=False),
        _stacked("gate_proj", "colwise", "normal"),
        _stacked("up_proj", "colwise", "normal"),
        _stacked("down_proj", "rowwise", "residual"),
        _bias("experts.gate_bias", "colwise", lambda view: (view.experts, view.expert_width)),
        _bias("experts.up_bias", "colwise", lambda view: (view.experts, view.expert_width)),
        _bias("experts.down_bias", "whole_summed", lambda view: (view.experts, view.hidden)),
        *linear("mlp.shared.gate_proj", _shared_shape, "colwise", is_there=_has_shared),
        *linear("mlp.shared.up_proj", _shared_shape, "colwise", is_there=_has_shared),
        *linear(
            "mlp.shared.down_proj",
            lambda view: _shared_shape(view)[::-1],
            "rowwise",
            is_there=_has_shared,
            to_residual=True,
        ),
        PartParameter(
            name="mlp.shared.result_gate.weight",
            shape=lambda view: (1, view.hidden) if view.shared_gate and _has_shared(view) else None,
            cut="whole_summed",
            start="normal",
            role="router",
        ),
    ),
    buffers=(
        PartBuffer("mlp.routed.router.bias", lambda view: (view.experts,) if view.router_bias else None, start=0.0),
    ),
    products_in_order=_products,
    needs_last_product=True,
    problems=_problems,
    kept=_kept,
    styles="torchllm.parallel.tensor_experts:styles_of_experts",
    unread=("ffn",),
)
