"""Attention with grouped heads (Ainslie et al. 2023, arXiv 2305.13245): the mixer of most models."""

from collections.abc import Callable, Iterator

from torchllm.config import Model
from torchllm.facts.parts.part import BlockPart, Cut, PartParameter, Shape, WeightProduct, linear, product_of


def _query_shape(view: Model) -> Shape:
    return view.query_outputs, view.hidden


def _key_shape(view: Model) -> Shape:
    return view.kv * view.head_width, view.hidden


def _norm(name: str, kind: str, cut: Cut, width: Callable[[Model], int]) -> PartParameter:
    """Return the weight of a norm of queries or keys, which models with this model.qk_norm have."""
    return PartParameter(
        name=f"self_attn.{name}.weight",
        shape=lambda view: (width(view),) if view.qk_norm == kind and view.features.norm_weights else None,
        cut=cut,
        start="identity",
        role="vector",
    )


def _has_bias(view: Model) -> bool:
    return view.has_qkv_bias


def _products(view: Model) -> list[WeightProduct]:
    """Return the products with q, k, v, the gate of heads if there is one, and o."""
    shapes = PART.shapes(view)
    before = [f"self_attn.{layer}.weight" for layer in ("q_proj", "k_proj", "v_proj", "head_gate")]
    output = product_of("self_attn.o_proj.weight", shapes["self_attn.o_proj.weight"])._replace(cut="rowwise")
    return [*(product_of(name, shapes[name]) for name in before if name in shapes), output]


def _problems(view: Model) -> Iterator[tuple[str, str]]:
    """Yield the options of attention that do not go together."""
    if view.qk_norm == "width" and not view.features.norm_weights:
        yield "qk_norm", f'norms without weights, as model.family = "{view.family}" has them, are per head: set "head"'
    if view.sinks and view.attention == "flash":
        yield "attention", "flash drops the gradient of the log-sum-exp, which sinks need: use sdpa, or eager"
    if view.sinks and view.attention == "flex":
        yield "attention", "flex has no backward on a CPU, where sinks are proven: use sdpa, or eager"


PART = BlockPart(
    name="attention",
    build="torchllm.models.attention:build_attention",
    parameters=(
        *linear("self_attn.q_proj", _query_shape, "colwise", has_bias=_has_bias),
        *linear("self_attn.k_proj", _key_shape, "colwise", has_bias=_has_bias),
        *linear(
            "self_attn.v_proj", _key_shape, "colwise", has_bias=_has_bias, is_there=lambda view: not view.keys_as_values
        ),
        *linear(
            "self_attn.o_proj",
            lambda view: (view.hidden, view.heads * view.head_width),
            "rowwise",
            has_bias=lambda view: view.has_o_bias,
            to_residual=True,
        ),
        PartParameter(
            name="self_attn.sinks.weight",
            shape=lambda view: (view.heads,) if view.sinks else None,
            cut="colwise",
            start="normal",
            role="vector",
        ),
        _norm("q_norm", "head", "whole_per_head", lambda view: view.head_width),
        _norm("k_norm", "head", "whole_per_head", lambda view: view.head_width),
        _norm("q_width_norm", "width", "colwise", lambda view: view.heads * view.head_width),
        _norm("k_width_norm", "width", "colwise", lambda view: view.kv * view.head_width),
        *linear(
            "self_attn.head_gate",
            lambda view: (view.heads, view.hidden),
            "colwise",
            has_bias=lambda view: view.features.biases,
            is_there=lambda view: view.attention_gate == "head",
        ),
    ),
    products_in_order=_products,
    problems=_problems,
    costs="torchllm.facts.parts.attention_costs:costs_of_attention",
    core_flops=lambda view, keys: 4 * view.heads * view.head_width * keys,
    context="torchllm.parallel.context:share_attention",
)
