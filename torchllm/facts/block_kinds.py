"""Kinds of blocks that a fork adds: their parameters, FLOPs and memory in one registration. No torch.

`model.block` chooses one by its name. Only a run that sets it imports this file.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, get_args

from torchllm.config import Model
from torchllm.config.errors import UserError
from torchllm.facts.parameters import ADDED_RULES, PARAMETER_RULES, Cut, ParameterRule, Role, Start

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class AddedParameter:
    """A parameter that the blocks of the library do not have."""

    name: str
    """within the block, such as self_attn.g_proj.weight; its module is nn.Linear, or has `local` (docs)"""
    shape: Callable[[Model], Shape]
    cut: Cut
    start: Start
    role: Role
    """matrix: each token is multiplied with it, which counts its FLOPs"""


@dataclass(frozen=True, kw_only=True)
class BlockKind:
    """A kind of block: the library's, changed by `build`."""

    name: str
    """value of model.block"""
    build: Callable[[Any, Model, int], Any]
    """returns a block, given the library's, the model and the index of the block: the given one, changed, or another"""
    parameters: tuple[AddedParameter, ...]
    stored: Callable[[Model, int], float] = lambda model, tp: 0.0
    """bytes per token that a block on one of `tp` ranks keeps for its backward, beyond the library's"""
    flops: Callable[[Model, int], int] = lambda model, sequence_length: 0
    """FLOPs of one token's forward in a block beyond those of matrices, and beyond the library's"""

    def shapes(self, model: Model) -> dict[str, Shape]:
        """Return the shapes of the added parameters, by name within the block."""
        return {parameter.name: parameter.shape(model) for parameter in self.parameters}

    def matrices(self, model: Model) -> list[Shape]:
        """Return the shapes (outputs, inputs) of the added matrices."""
        return [parameter.shape(model) for parameter in self.parameters if parameter.role == "matrix"]


LIBRARY = BlockKind(name="", build=lambda block, model, index: block, parameters=())
"""the kind without a change"""
_KINDS = {LIBRARY.name: LIBRARY}
_CHOICES = {"cut": {*get_args(Cut)} - {"vocab"}, "start": {*get_args(Start)}, "role": {*get_args(Role)}}
"""values of an added parameter"""


def register_block(kind: BlockKind) -> None:
    """Let `model.block` name a kind of block. Call it where the module is imported, above `load_configs`.

    UserError if a parameter's name is taken, it is not in a module of its own, or a value is unknown.
    """
    if kind.name == LIBRARY.name:
        raise UserError("register_block: a kind of block needs a name, which model.block is set to")
    of_others = [rules for name, rules in ADDED_RULES.items() if name != kind.name]
    rules = []
    for added in kind.parameters:
        for key, choices in _CHOICES.items():
            if getattr(added, key) not in choices:
                known = ", ".join(sorted(choices))
                raise UserError(
                    f"block {kind.name!r}: {added.name!r} has {key} {getattr(added, key)!r}, not one of {known}"
                )
        module = added.name.rpartition(".")[0]
        rule = ParameterRule(rf"layers\.\d+\.{re.escape(added.name)}", added.cut, added.start, added.role)
        for other in chain(PARAMETER_RULES, *of_others):
            if re.fullmatch(other.pattern, f"layers.0.{added.name}") and other != rule:
                raise UserError(f"block {kind.name!r}: {added.name!r} is a parameter of other blocks: rename it")
        if module in ("", "self_attn", "mlp"):
            raise UserError(f"block {kind.name!r}: {added.name!r} needs a module of its own, as self_attn.gate.weight")
        rules.append(rule)
    _KINDS[kind.name] = kind
    ADDED_RULES[kind.name] = tuple(rules)


def block_kind(model: Model) -> BlockKind:
    """Return the kind of a model's blocks. UserError if it is not registered."""
    if model.block not in _KINDS:
        raise UserError(
            f"model.block: {model.block!r} is not registered: start the fork that calls register_block for it, or set "
            "RECIPE to its file"
        )
    return _KINDS[model.block]


def changed_block(block: Any, model: Model, index: int) -> Any:
    """Return the block that the kind of `model.block` makes of the library's. UserError if it is not as registered."""
    kind = block_kind(model)
    expected = _shapes(block) | kind.shapes(model)
    changed = kind.build(block, model, index)
    shapes = _shapes(changed)
    for name in sorted(shapes.keys() | expected.keys()):
        if shapes.get(name) != expected.get(name):
            built, registered = shapes.get(name, "missing"), expected.get(name, "missing")
            raise UserError(f"block {kind.name!r}: {name}: {built} in the block, {registered} in its registration")
    return changed


def _shapes(block: Any) -> dict[str, Shape]:
    """Return the shapes of a block's parameters, by name within it."""
    return {name: tuple(parameter.shape) for name, parameter in block.named_parameters()}
