"""Which parts a block has: the library's, by file, and those that a fork registers. No torch."""

from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module

from torchllm.config import Model
from torchllm.config.errors import UserError
from torchllm.facts.parts.part import BlockPart, PartBuffer, PartParameter, found

MIXERS = ("attention", "gated_delta", "latent_attention")
"""values of model.mixer: files of this folder"""
FEED_FORWARDS = ("dense", "experts", "experts_beside")
MTP = "multi_token"
"""part of a block of multi-token prediction, before its mixer and at its end"""
_LOADED: dict[str, BlockPart] = {}
"""parts of the library that this process has asked for, by name"""
MIXERS_OF_FORKS: dict[str, BlockPart] = {}
ADDED_PARAMETERS: dict[str, tuple[PartParameter, ...]] = {}
"""parameters that forks add, by the block or mixer that adds them"""


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


BUFFERS = (PartBuffer("layer_scalar", lambda view: (1,) if view.block_form == "scaled" else None, start=1.0),)
"""of a block, in addition to its parts'"""


def around(view: Model) -> BlockPart | None:
    """Return the part of a view's blocks that is around the mixer and the feed-forward layer; None: there is none."""
    return _of_library(MTP) if view.is_mtp else None


def mixer(view: Model) -> BlockPart:
    """Return the mixer of a view's blocks, with the part around it. UserError if there is none of this name."""
    if problem := problem_of_mixer(view):
        raise UserError(f"model.mixer: {problem}")
    part = MIXERS_OF_FORKS.get(view.mixer) or _of_library(view.mixer)
    outer = around(view)
    return found("torchllm.facts.parts.around:with_part_around")(outer, part) if outer else part


def problem_of_mixer(view: Model) -> str:
    """Return the error in the name of a view's mixer; empty: it is the library's, or registered."""
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
    return _of_library("experts_beside" if view.dense_beside and view.norm_position == "both" else "experts")


def _of_library(name: str) -> BlockPart:
    """Return a part of the library; a run imports only the parts of its model."""
    if name not in _LOADED:
        _LOADED[name] = import_module(f"torchllm.facts.parts.{name}").PART
    return _LOADED[name]


def norm(name: str) -> tuple[PartParameter, PartParameter]:
    """Return weight and bias of a norm of the residual stream; an RMSNorm has no bias."""
    weight = PartParameter(
        name=f"{name}.weight",
        shape=lambda view: (view.hidden,) if view.features.norm_weights else None,
        cut="whole",
        start="identity",
        role="vector",
    )
    bias = PartParameter(
        name=f"{name}.bias",
        shape=lambda view: (view.hidden,) if view.features.norm == "layer" else None,
        cut="whole",
        start="zeros",
        role="vector",
    )
    return weight, bias


def buffer_start(name: str) -> float:
    """Return the initial value of a block's buffer, by its name within the block; of a fork's it is 0."""
    declared = (*BUFFERS, *(buffer for part in _LOADED.values() for buffer in part.buffers))
    return next((buffer.start for buffer in declared if buffer.name == name), 0.0)


def parameter_of_block(name: str) -> PartParameter | None:
    """Return the declaration of a block's parameter by its name within the block; None if no part has it."""
    return next((parameter for parameters in _declared() for parameter in parameters if parameter.name == name), None)


def _declared() -> Iterator[Sequence[PartParameter]]:
    """Yield the parameters of norms and parts; parts that no model of this process has come last."""
    yield _of_norms()
    yield from (part.parameters for part in _LOADED.values())
    yield from ADDED_PARAMETERS.values()
    yield from (_of_library(name).parameters for name in (*MIXERS, *FEED_FORWARDS, MTP) if name not in _LOADED)


@cache
def _of_norms() -> tuple[PartParameter, ...]:
    """Return the parameters of all norms of the residual stream."""
    names = dict.fromkeys(name for places in NORMS.values() for place in places for name in place)
    return tuple(parameter for name in names for parameter in norm(name))
