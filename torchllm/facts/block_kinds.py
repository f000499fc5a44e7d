"""Kinds of blocks that a fork adds: their parameters, FLOPs and memory in one registration. No torch.

`model.block` chooses one by its name. Only a run that sets it imports this file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchllm.config import Model
from torchllm.config.errors import UserError
from torchllm.facts.parts.added import add_parameters, check_shapes
from torchllm.facts.parts.part import PartParameter, Shape, shapes_of

AddedParameter = PartParameter
"""a parameter that the blocks of the library do not have; its module is nn.Linear, or has `local` (docs)"""


@dataclass(frozen=True, kw_only=True)
class BlockKind:
    """A kind of block: the library's, changed by `build`."""

    name: str
    """value of model.block"""
    build: Callable[[Any, Model, int], Any]
    """returns a block, given the library's, the model and the index of the block: the given one, changed, or another"""
    parameters: tuple[PartParameter, ...]
    stored: Callable[[Model, int], float] = lambda model, tp: 0.0
    """bytes per token that a block on one of `tp` ranks keeps for its backward, beyond the library's"""
    flops: Callable[[Model, int], int] = lambda model, sequence_length: 0
    """FLOPs of one token's forward in a block, in addition to the library's, without the added matrices"""

    def shapes(self, model: Model) -> dict[str, Shape]:
        """Return the shapes of the added parameters, by name within the block."""
        return shapes_of(self.parameters, model)

    def matrices(self, model: Model) -> list[Shape]:
        """Return the shapes (outputs, inputs) of the added matrices."""
        matrices = [parameter for parameter in self.parameters if parameter.role == "matrix"]
        return list(shapes_of(matrices, model).values())


LIBRARY = BlockKind(name="", build=lambda block, model, index: block, parameters=())
"""the kind without a change"""
_KINDS = {LIBRARY.name: LIBRARY}


def register_block(kind: BlockKind) -> None:
    """Let `model.block` name a kind of block. Call it where the module is imported, above `load_configs`.

    UserError if a parameter's name is taken, it is not in a separate module, or a value is unknown.
    """
    if kind.name == LIBRARY.name:
        raise UserError("register_block: a kind of block needs a name, which model.block is set to")
    where = f"block {kind.name!r}"
    for added in kind.parameters:
        if added.name.rpartition(".")[0] in ("", "self_attn", "mlp"):
            raise UserError(f"{where}: {added.name!r} needs a module of its own, as self_attn.gate.weight")
    add_parameters(where, kind.parameters)
    _KINDS[kind.name] = kind


def is_registered(model: Model) -> bool:
    """Return whether the kind of a model's blocks is registered, or the library's."""
    return model.block in _KINDS


def block_kind(model: Model) -> BlockKind:
    """Return the kind of a model's blocks. UserError if it is not registered."""
    if not is_registered(model):
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
    check_shapes(f"block {kind.name!r}", _shapes(changed), expected)
    return changed


def _shapes(block: Any) -> dict[str, Shape]:
    """Return the shapes of a block's parameters, by name within it."""
    return {name: tuple(parameter.shape) for name, parameter in block.named_parameters()}
