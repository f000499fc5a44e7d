"""Declarations of the parts of a block. No torch.

A block has two parts: a mixer, the only place where a token sees others, and a feed-forward layer. A part is declared
once, for a view: a `Model` whose blocks are all like the block in question (`Model.of_block`). Code for sizes,
cuts over tp, initial values, roles, FLOPs or memory reads the declaration, and so does the decoder, which builds it.

Shapes: D hidden, H heads, K key-value heads, Q head width, F feed-forward, E experts.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torchllm.config import Model

if TYPE_CHECKING:  # the planner alone computes them
    from torchllm.facts.parts.costs import MixerCosts, RankShare

Shape = tuple[int, ...]
Cut = Literal["vocab", "colwise", "rowwise", "whole", "whole_per_head", "whole_summed"]
"""vocab: rows are tokens, over tp. colwise: output features over tp. rowwise: input features over tp. whole: on every
tp rank. whole_per_head: on every tp rank, which uses it for its own heads, so that gradients are summed over tp.
whole_summed: the same for a rank's own output features, or its own input features."""
Start = Literal["normal", "residual", "ones", "zeros", "identity", "decay", "time_step"]
"""normal: standard deviation model.initial_std. residual: that / sqrt(2 L), for outputs to the residual stream.
identity: of a norm that only normalizes: 1, or 0 with model.norm_offset. For recurrences, as Mamba-2 (arXiv
2405.21060): decay: logarithm of a uniform number from 0 to 16; time_step: the softplus of the number is between 0.001
and 0.1, its logarithm uniform."""
Role = Literal["embedding", "position", "matrix", "router", "head", "adapter", "vector"]
"""embedding: of tokens; the head too where they are tied. position: learned positions. matrix: of attention, of the
feed-forward layer and of experts, stacked. router: of experts, and the gate of shared ones.
adapter: of LoRA. vector: weights and biases of norms, biases of matrices, numbers of heads or channels."""


WIDEST_HEAD = 256
"""largest width of a head in flash attention"""
KEYS_OF_ATTENTION = (
    *("attention", "qk_norm", "qkv_bias", "o_bias", "softmax_scale", "score_softcap", "attention_gate"),
    *("window", "sinks", "v_norm", "keys_as_values", "rotary_fraction", "rope_proportional", "rope_theta"),
    "rope_scaling_factor",
)
"""keys of [model] that a mixer without attention's scores and rotary positions does not read"""


class ParameterRule(NamedTuple):
    """How one kind of parameter is cut, starts and is optimized."""

    cut: Cut
    start: Start
    role: Role
    """the optimizer sets learning rate and weight decay by role; each token is multiplied with a matrix or router"""


@dataclass(frozen=True, kw_only=True)
class PartParameter:
    """A parameter of a block."""

    name: str
    """within the block, such as self_attn.q_proj.weight"""
    shape: Callable[[Model], Shape | None]
    """of a view; None: its blocks do not have the parameter"""
    cut: Cut
    start: Start
    role: Role
    """matrix: each token is multiplied with it, which counts its FLOPs"""
    of_experts: bool = False
    """whether its first dimension is the experts; a token uses top_k of them"""

    @property
    def module(self) -> str:
        """Name of its module within the block."""
        return self.name.rpartition(".")[0]

    @property
    def rule(self) -> ParameterRule:
        """How it is cut, starts and is optimized."""
        return ParameterRule(self.cut, self.start, self.role)


class PartBuffer(NamedTuple):
    """A tensor of a block that is stored with its parameters, and that no optimizer trains."""

    name: str
    """within the block"""
    shape: Callable[[Model], Shape | None]
    """of a view; None: its blocks do not have it"""
    start: float
    """value of all elements"""


class WeightProduct(NamedTuple):
    """A product of each token with a weight matrix."""

    layer: str
    """name of the layer, such as q_proj"""
    outputs: int
    inputs: int
    times: int = 1
    """matrices of this shape that a token uses"""
    cut: Cut = "colwise"
    """of the weight"""

    @property
    def elements(self) -> int:
        """Elements of the matrices that a token is multiplied with: two FLOPs each."""
        return self.outputs * self.inputs * self.times


@dataclass(frozen=True, kw_only=True)
class BlockPart:
    """A mixer, a feed-forward layer, or a part around both."""

    name: str
    """value of model.mixer"""
    build: str | Callable[[Any], Any]
    """returns the module of a view, uninitialized: a function or class, or where it is, as "MODULE:NAME"; of a part
    around others the class of a block, given the one without the part"""
    parameters: tuple[PartParameter, ...]
    """in the order of their use"""
    core_flops: Callable[[Model, float], float] = lambda view, keys: 0.0
    """FLOPs of one token's forward beyond its products with weights; keys: that a query sees, on average"""
    buffers: tuple[PartBuffer, ...] = ()
    products_in_order: Callable[[Model], list[WeightProduct]] | None = None
    """products in the order of their use; None: those with the matrices among `parameters`"""
    needs_last_product: bool = False
    """whether a gradient needs the result of the last product, so that a recomputation computes it again; of a part
    around others: of the block's"""
    problems: Callable[[Model], Iterable[tuple[str, str]]] | None = None
    """returns the keys of [model] whose values in a view the part does not have, each with the reason"""
    heads: Callable[[Model], dict[str, int]] = Model.heads_of_attention
    """numbers of heads, or channels, of a mixer, by key of [model], which tp must divide; ulysses divides the heads
    of the last key"""
    resolved: Callable[[Model], dict[str, int]] = lambda view: {}
    """keys of [model] whose 0 leaves a size of a mixer to other keys, and the sizes; without kv_heads and head_dim"""
    small_sizes: Callable[[Model], dict[str, int]] = lambda view: {}
    """keys of [model] and their values in a small copy of a view's model, which `torchllm prove` trains"""
    costs: str | Callable[[Model, "RankShare"], "MixerCosts"] | None = None
    """of a mixer: its costs on one rank; None: not known, and the planner refuses to plan the model"""
    kept: Callable[[Model, int], float] = lambda view, tp: 0.0
    """of a feed-forward layer: bytes per token that autograd keeps on one of `tp` ranks, in addition to SwiGLU's"""
    norms_input: bool = False
    """of a feed-forward layer: whether it has the norm of its input itself, so that a block has none before it"""
    norms: int = 0
    """norms of hidden states inside a feed-forward layer, in addition to the block's"""
    sums: int = 1
    """of a feed-forward layer: sums of hidden states over tp"""
    unread: tuple[str, ...] = ()
    """keys of [model] that it does not read: for attention, or the width of a feed-forward layer"""
    decoder: str = ""
    """class of models with such blocks, as "MODULE:NAME"; empty: `models.decoder.Decoder`"""
    context: str | Callable[..., None] = ""
    """lets the ranks of cp share each sequence, given module, view and `parallel.context.SharedSequences`; empty: the
    mixer is refused with cp"""
    styles: str | Callable[..., dict[str, Any]] = ""
    """returns the styles of tensor parallelism of the modules inside, by name, given the module, the placement of
    hidden states and whether ranks share the experts; empty: the input is gathered, and the parameters say the rest by
    their cuts"""

    def shapes(self, view: Model) -> dict[str, Shape]:
        """Return the shapes of the parameters that a view has, by name within the block."""
        return shapes_of(self.parameters, view)

    def products(self, view: Model) -> list[WeightProduct]:
        """Return the products of a token with the part's matrices, in the order of their use."""
        if self.products_in_order:
            return self.products_in_order(view)
        shapes = self.shapes(view)
        there = [parameter for parameter in self.parameters if parameter.name in shapes]
        matrices = [parameter for parameter in there if parameter.role in ("matrix", "router")]
        return [product_of(matrix.name, shapes[matrix.name])._replace(cut=matrix.cut) for matrix in matrices]


def shapes_of(parameters: Iterable[PartParameter], view: Model) -> dict[str, Shape]:
    """Return the shapes of the parameters that a view has, by name within the block."""
    return {parameter.name: shape for parameter in parameters if (shape := parameter.shape(view)) is not None}


def product_of(name: str, shape: Shape, times: int = 1) -> WeightProduct:
    """Return the product with a weight: its name within the block and its shape, (outputs, inputs)."""
    outputs, inputs = shape
    return WeightProduct(name.removesuffix(".weight").rpartition(".")[2], outputs, inputs, times)


def linear(
    name: str,
    shape: Callable[[Model], Shape],
    cut: Cut,
    *,
    has_bias: Callable[[Model], bool] | None = None,
    is_there: Callable[[Model], bool] = lambda view: True,
    to_residual: bool = False,
) -> tuple[PartParameter, ...]:
    """Return weight and bias of a linear layer. shape: (outputs, inputs). has_bias: None: in no view.

    to_residual: its result is added to the residual stream. The bias of a layer that is cut by its inputs is whole: it
    is added after the sum.
    """
    weight = PartParameter(
        name=f"{name}.weight",
        shape=lambda view: shape(view) if is_there(view) else None,
        cut=cut,
        start="residual" if to_residual else "normal",
        role="matrix",
    )
    if has_bias is None:
        return (weight,)
    bias = PartParameter(
        name=f"{name}.bias",
        shape=lambda view: shape(view)[:1] if is_there(view) and has_bias(view) else None,
        cut="colwise" if cut == "colwise" else "whole",
        start="zeros",
        role="vector",
    )
    return weight, bias


def found(reference: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that a part names as "MODULE:NAME", or the function itself."""
    if callable(reference):
        return reference
    module, _, name = reference.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function
