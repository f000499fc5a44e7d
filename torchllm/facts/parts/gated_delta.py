"""Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464): the mixer of Qwen3-Next, Qwen3.5 and OLMo Hybrid.

Shapes: K key heads of width Q, V value heads of width P.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torchllm.config import Model
from torchllm.facts.parts.costs import MixerCosts, PerPass, RankShare
from torchllm.facts.parts.part import (
    KEYS_OF_ATTENTION,
    BlockPart,
    PartParameter,
    Start,
    linear,
)

CHUNK = 64
"""tokens that are computed at a time"""


class DeltaSizes(NamedTuple):
    """Sizes of a mixer."""

    key_heads: int
    """K"""
    value_heads: int
    """V, a multiple of K"""
    key_width: int
    """Q, of each head"""
    value_width: int
    """P, of each head"""
    kernel: int
    """tokens that the convolution sees, the current one included: at least 2"""
    negative_eigenvalues: bool = False
    """beta up to 2 in place of 1: a token may negate the value that the state has for its key (arXiv 2411.12537)"""

    @property
    def keys(self) -> int:
        """Width of the keys of all heads, and of the queries."""
        return self.key_heads * self.key_width

    @property
    def values(self) -> int:
        """Width of the values of all heads."""
        return self.value_heads * self.value_width

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values


def delta_sizes(view: Model) -> DeltaSizes:
    """Return the sizes of a view's mixer, resolved."""
    return DeltaSizes(
        key_heads=view.delta_key_heads or view.kv,
        value_heads=view.delta_value_heads or view.heads,
        key_width=view.delta_key_dim or view.head_width,
        value_width=view.delta_value_dim or view.head_width,
        kernel=view.delta_conv,
        negative_eigenvalues=view.delta_negative,
    )


def _heads(view: Model) -> dict[str, int]:
    sizes = delta_sizes(view)
    return {"delta_value_heads": sizes.value_heads, "delta_key_heads": sizes.key_heads}


def _resolved(view: Model) -> dict[str, int]:
    sizes = delta_sizes(view)
    return _heads(view) | {"delta_key_dim": sizes.key_width, "delta_value_dim": sizes.value_width}


def _problems(view: Model) -> Iterator[tuple[str, str]]:
    sizes = delta_sizes(view)
    if sizes.value_heads % sizes.key_heads:
        yield "delta_key_heads", f"{sizes.key_heads} key heads do not divide {sizes.value_heads} value heads"


def _small_sizes(view: Model) -> dict[str, int]:
    """Return 0 for each size, so that the small copy's sizes follow its attention heads."""
    return dict.fromkeys(("delta_key_heads", "delta_value_heads", "delta_key_dim", "delta_value_dim"), 0)


def _core_flops(view: Model, keys: float) -> float:
    """Return the FLOPs of the recurrence as its definition has it, whatever the chunks of a kernel, and convolution."""
    sizes = delta_sizes(view)
    read_twice_and_written = 6 * sizes.value_heads * sizes.key_width * sizes.value_width
    return read_twice_and_written + 2 * sizes.kernel * sizes.channels


def _costs(view: Model, share: RankShare) -> MixerCosts:
    """Return the costs of `models/parts/delta_rule.py`; in a ring, of `parallel/delta_sequence.py`.

    The core is an operation whose backward computes the chunks again. Memory and traffic of both are multiples of the
    widths: fitted to traces of the core with 4 taps, heads from 64 to 256 wide, within 5 %.
    """
    sizes = delta_sizes(view)
    heads, keys, values, channels = (
        n / share.tp for n in (sizes.value_heads, sizes.keys, sizes.values, sizes.channels)
    )
    of_states = heads * sizes.key_width * (sizes.key_width + sizes.value_width)

    def float32(of_queries: float, of_values: float, of_chunks: float, states: float, of_keys: float) -> float:
        """Return the bytes of these multiples of value heads' queries, values and scores, of states, and of keys."""
        of_heads = heads * (of_queries * sizes.key_width + of_chunks * CHUNK) + of_values * values
        return 4.0 * (of_heads + states * of_states / CHUNK + of_keys * keys)

    pieces = 2 if share.ring else 1 / share.cp  # of the sequence of this rank's tokens, or of its heads
    scanned = 2 * share.ring / share.length  # pieces of a ring, per token
    chunks = -(-share.length // (pieces * CHUNK))
    return MixerCosts(
        inputs=channels + 2 * heads,
        results=values,
        # The gate, its SiLU, the normed and the gated result; the state before each piece.
        kept=6.0 * values + 4.0 * scanned * heads * sizes.key_width * sizes.value_width,
        normed=values,
        gated=values,
        working=float32(4, 12, 5, 5.6 if share.ring else 2.3, 24) - 8.0 * values,  # the gate's, freed before
        moved=PerPass(
            float32(13, 47, 17, 17 if share.ring else 7, 96), float32(60, 131, 66, 42 if share.ring else 20, 264)
        ),
        kernels=PerPass(69 + 12 * sizes.kernel + 2 * chunks, 188 + 30 * sizes.kernel + 5 * chunks),
        sent=share.pieces_sent / share.length * (sizes.kernel - 1) * channels,
        gathered=2 * scanned * of_states,  # in float32
    )


def _of_heads(name: str, shape: Callable[[DeltaSizes], tuple[int, ...]], start: Start) -> PartParameter:
    """Return a parameter of the heads that is no matrix."""
    return PartParameter(
        name=f"self_attn.of_heads.{name}",
        shape=lambda view: shape(delta_sizes(view)),
        cut="colwise",
        start=start,
        role="vector",
    )


def _projection(name: str, outputs: Callable[[DeltaSizes], int]) -> tuple[PartParameter, ...]:
    return linear(f"self_attn.{name}", lambda view: (outputs(delta_sizes(view)), view.hidden), "colwise")


PART = BlockPart(
    name="gated_delta",
    build="torchllm.models.parts.gated_delta:GatedDeltaNet",
    parameters=(
        *_projection("q_proj", lambda sizes: sizes.keys),
        *_projection("k_proj", lambda sizes: sizes.keys),
        *_projection("v_proj", lambda sizes: sizes.values),
        *_projection("a_proj", lambda sizes: sizes.value_heads),
        *_projection("b_proj", lambda sizes: sizes.value_heads),
        _of_heads("q_conv", lambda sizes: (sizes.keys, sizes.kernel), "normal"),
        _of_heads("k_conv", lambda sizes: (sizes.keys, sizes.kernel), "normal"),
        _of_heads("v_conv", lambda sizes: (sizes.values, sizes.kernel), "normal"),
        _of_heads("A_log", lambda sizes: (sizes.value_heads,), "decay"),
        _of_heads("dt_bias", lambda sizes: (sizes.value_heads,), "time_step"),
        PartParameter(
            name="self_attn.o_norm.weight",
            shape=lambda view: (delta_sizes(view).value_width,),
            cut="whole_per_head",
            start="ones",
            role="vector",
        ),
        *_projection("g_proj", lambda sizes: sizes.values),
        *linear("self_attn.o_proj", lambda view: (view.hidden, delta_sizes(view).values), "rowwise", to_residual=True),
    ),
    unread=KEYS_OF_ATTENTION,
    core_flops=_core_flops,
    costs=_costs,
    heads=_heads,
    resolved=_resolved,
    problems=_problems,
    small_sizes=_small_sizes,
    context="torchllm.parallel.delta_sequence:share_delta",
)
