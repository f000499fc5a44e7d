"""Mixers and parameters that forks add. No torch; only forks import it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from torchllm.config import Model
from torchllm.config.errors import UserError
from torchllm.facts.parts.part import BlockPart, Cut, PartParameter, Role, Shape, Start, found
from torchllm.facts.parts.registry import ADDED_PARAMETERS, MIXERS, MIXERS_OF_FORKS, parameter_of_block

_CHOICES = {"cut": {*get_args(Cut)} - {"vocab"}, "start": {*get_args(Start)}, "role": {*get_args(Role)}}
"""values of an added parameter"""


def register_mixer(part: BlockPart) -> None:
    """Let `model.mixer` name a part of a fork. Call it where the module is imported, above `load_configs`.

    UserError if its name or the name of a parameter is taken, a value is unknown, or a parameter is not in a module of
    self_attn.
    """
    if part.name in ("", *MIXERS):
        raise UserError(f"register_mixer: {part.name!r} is one of the library's mixers: give yours another name")
    where = f"mixer {part.name!r}"
    for parameter in part.parameters:
        if not parameter.name.startswith("self_attn."):
            raise UserError(f"{where}: {parameter.name!r} must begin with self_attn., the place of a mixer")
        if parameter.name.count(".") == 1:  # tensor parallelism gathers the input of self_attn itself
            raise UserError(f"{where}: {parameter.name!r} needs a module of its own, as self_attn.taps.weight")
    add_parameters(where, part.parameters)
    MIXERS_OF_FORKS[part.name] = replace(part, build=partial(_built, where, part))


def _built(where: str, part: BlockPart, view: Model) -> Any:
    """Return the module of a view. UserError if its parameters are not as registered."""
    module = found(part.build)(view)
    shapes = {f"self_attn.{name}": tuple(parameter.shape) for name, parameter in module.named_parameters()}
    check_shapes(where, shapes, part.shapes(view))
    return module


def check_shapes(where: str, built: dict[str, Shape], registered: dict[str, Shape]) -> None:
    """UserError if modules of a fork have other parameters than their registration says."""
    for name in sorted(built.keys() | registered.keys()):
        if built.get(name) != registered.get(name):
            shapes = f"{built.get(name, 'missing')} in the block, {registered.get(name, 'missing')} in its registration"
            raise UserError(f"{where}: {name}: {shapes}")


def add_parameters(where: str, parameters: Sequence[PartParameter]) -> None:
    """Add parameters of a fork, in place of those that it added before.

    where: the owner. UserError if one has an unknown value, or the name of another part's and another rule.
    """
    ADDED_PARAMETERS.pop(where, None)
    for added in parameters:
        for key, choices in _CHOICES.items():
            if getattr(added, key) not in choices:
                known = ", ".join(sorted(choices))
                raise UserError(f"{where}: {added.name!r} has {key} {getattr(added, key)!r}, not one of {known}")
        other = parameter_of_block(added.name)
        if other is not None and other.rule != added.rule:
            raise UserError(f"{where}: {added.name!r} is a parameter of other blocks: rename it")
    ADDED_PARAMETERS[where] = tuple(parameters)
