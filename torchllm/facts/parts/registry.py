"""Which parts a block has: the library's, by file, and those that a fork registers. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from torchllm.config import Model
from torchllm.config.errors import UserError
from torchllm.facts.parts.part import BlockPart, PartBuffer, PartParameter, Shape, shapes_of

if TYPE_CHECKING:
    from torchllm.facts.parts.costs import MixerCosts, RankShare

MIXERS = ("attention", "gated_delta", "latent_attention")
"""values of model.mixer: files of this folder"""
FEED_FORWARDS = ("dense", "experts", "experts_beside")
MTP = "multi_token"
"""what a block of multi-token prediction has before its mixer and at its end"""
_LOADED: dict[str, BlockPart] = {}
"""parts of the library that this process has asked for, by name"""
MIXERS_OF_FORKS: dict[str, BlockPart] = {}
ADDED_PARAMETERS: dict[str, tuple[PartParameter, ...]] = {}
"""parameters that forks add, by what adds them"""


NORMS = {
    "before": (("input_layernorm",), ("post_attention_layernorm",), ()),
    "after": ((), ("post_attention_layernorm",), ("post_feedforward_layernorm",)),
    "both": (
        ("input_layernorm",),
        ("post_attention_layernorm",),
        ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
}
"""norms of a block before its mixer, between mixer and feed-forward layer, and after it, by model.norm_position"""


BUFFERS = (PartBuffer("layer_scalar", lambda view: (1,) if view.block_scale else None, start=1.0),)
"""of a block, beside those of its parts"""


def around(view: Model) -> BlockPart | None:
    """Return the part of a view's blocks that is around the mixer and the feed-forward layer; None: there is none."""
    return _of_library(MTP) if view.is_mtp else None


def mixer(view: Model) -> BlockPart:
    """Return the mixer of a view's blocks, with the part around it. UserError if there is none of this name."""
    if problem := problem_of_mixer(view):
        raise UserError(f"model.mixer: {problem}")
    part = MIXERS_OF_FORKS.get(view.mixer) or _of_library(view.mixer)
    outer = around(view)
    return with_part_around(outer, part) if outer else part


@cache
def with_part_around(outer: BlockPart, part: BlockPart) -> BlockPart:
    """Return a part with what another one has around it: its parameters, its products, what it keeps and norms."""

    def costs(view: Model, share: RankShare) -> MixerCosts:
        assert outer.costs is not None
        assert part.costs is not None
        more, own = outer.costs(view, share), part.costs(view, share)
        return replace(own, kept=own.kept + more.kept, normed=own.normed + more.normed)

    return replace(
        part,
        parameters=outer.parameters + part.parameters,
        products_in_order=lambda view: outer.products(view) + part.products(view),
        needs_last_product=outer.needs_last_product,
        costs=part.costs and costs,
    )


def problem_of_mixer(view: Model) -> str:
    """Return what is wrong with the name of a view's mixer; empty: it is the library's, or registered."""
    known = (*MIXERS, *MIXERS_OF_FORKS)
    if view.mixer in known:
        return ""
    return (
        f"{view.mixer!r} is none of {', '.join(known)}: if a fork registers it, start the fork, or set RECIPE to its "
        "file"
    )


def feed_forward(view: Model) -> BlockPart:
    """Return the feed-forward layer of a view's blocks."""
    if not view.experts:
        return _of_library("dense")
    return _of_library("experts_beside" if view.dense_beside else "experts")


def _of_library(name: str) -> BlockPart:
    """Return a part of the library; a run imports those of its model alone."""
    if name not in _LOADED:
        _LOADED[name] = import_module(f"torchllm.facts.parts.{name}").PART
    return _LOADED[name]


def norm(name: str) -> tuple[PartParameter, PartParameter]:
    """Return weight and bias of a norm of the residual stream; an RMSNorm has no bias."""
    weight = PartParameter(
        name=f"{name}.weight", shape=lambda view: (view.hidden,), cut="whole", start="identity", role="vector"
    )
    bias = PartParameter(
        name=f"{name}.bias",
        shape=lambda view: (view.hidden,) if view.features.norm == "layer" else None,
        cut="whole",
        start="zeros",
        role="vector",
    )
    return weight, bias


def shapes_of_view(view: Model) -> dict[str, Shape]:
    """Return the shapes of the parameters of a block of a view, by name within it, without a fork's additions."""
    before, between, after = NORMS[view.norm_position]
    if feed_forward(view).norms_input:
        after = after[1:]
    shapes = norm_shapes(view, *before) | mixer(view).shapes(view)
    shapes |= norm_shapes(view, *between) | feed_forward(view).shapes(view)
    return shapes | norm_shapes(view, *after)


def buffer_shapes(view: Model) -> dict[str, Shape]:
    """Return the shapes of the buffers of a block of a view, by name within it."""
    declared = (*BUFFERS, *mixer(view).buffers, *feed_forward(view).buffers)
    return {buffer.name: shape for buffer in declared if (shape := buffer.shape(view)) is not None}


def buffer_start(name: str) -> float:
    """Return the initial value of a block's buffer, by its name within the block; of a fork's it is 0."""
    declared = (*BUFFERS, *(buffer for part in _LOADED.values() for buffer in part.buffers))
    return next((buffer.start for buffer in declared if buffer.name == name), 0.0)


def norm_shapes(view: Model, *names: str) -> dict[str, Shape]:
    """Return the shapes of some norms of the residual stream."""
    return shapes_of((parameter for name in names for parameter in norm(name)), view)


def parameter_of_block(name: str) -> PartParameter | None:
    """Return the declaration of a block's parameter by its name within the block; None if no part has it."""
    return next((parameter for parameters in _declared() for parameter in parameters if parameter.name == name), None)


def _declared() -> Iterator[Sequence[PartParameter]]:
    """Yield the parameters of norms and parts; those of parts that no model of this process has come last."""
    yield _of_norms()
    yield from (part.parameters for part in _LOADED.values())
    yield from ADDED_PARAMETERS.values()
    yield from (_of_library(name).parameters for name in (*MIXERS, *FEED_FORWARDS, MTP) if name not in _LOADED)


@cache
def _of_norms() -> tuple[PartParameter, ...]:
    """Return the parameters of all norms of the residual stream."""
    names = dict.fromkeys(name for places in NORMS.values() for place in places for name in place)
    return tuple(parameter for name in names for parameter in norm(name))
