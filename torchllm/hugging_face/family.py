"""What a family of published models is: fields of its config.json, names and forms of its tensors. No torch.

A family is one file of `families/`: a table that is read in both directions, by the import and by the export. Add a
family: docs/hugging_face.md.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchllm.config import FAMILIES, Model
from torchllm.config.errors import UserError
from torchllm.spec.shapes import parameter_shapes


class ConfigField(NamedTuple):
    """A field of config.json that says what one key of [model] says."""

    name: str
    """in config.json: "hidden_size" """
    key: str
    """in [model]: "hidden" """
    default: Any
    """what it is where a file lacks it: the default of the family's class in transformers"""
    is_fixed: bool = True
    """the weights are of this size, so that a run cannot choose another"""


class RequiredField(NamedTuple):
    """A field of config.json that must have one of some values, because the model here has no other form."""

    name: str
    values: tuple[Any, ...]
    """allowed; the first is written at an export"""
    feature: str
    """what another value would mean, for the error: "biases of the attention's matrices" """


class TensorRule(NamedTuple):
    """A tensor of a file, and the parameters of this library that it holds. "{}" stands for the index of a block."""

    key: str
    """in the file: "model.layers.{}.self_attn.q_proj.weight" """
    names: tuple[str, ...]
    """canonical names; where there are several, the tensor holds their rows one after the other"""
    is_transposed: bool = False
    """the file has inputs as rows and outputs as columns (GPT-2's Conv1D)"""


class StoredPart(NamedTuple):
    """A parameter in a tensor of a file."""

    name: str
    """canonical"""
    first_row: int
    """where its rows begin in the tensor (not transposed)"""
    rows: int


class StoredTensor(NamedTuple):
    """A tensor as a file holds it."""

    key: str
    shape: tuple[int, ...]
    """as in the file"""
    is_transposed: bool
    parts: tuple[StoredPart, ...]
    """one after the other along the rows"""


class UnmappedParameter(UserError):
    """A parameter for which a family has no tensor."""


@dataclass(frozen=True)
class HubFamily:
    """A family of models as Hugging Face publishes them."""

    model_type: str
    """as config.json names it"""
    architecture: str
    """class of transformers with the language model's head"""
    features: dict[str, Any]
    """keys of [model] that all models of the family share"""
    fields: tuple[ConfigField, ...]
    required: tuple[RequiredField, ...]
    tensors: tuple[TensorRule, ...]
    prefix: str = "model."
    """what the keys of the file begin with, except the head's; some published files lack it"""
    ignored_tensors: str = r"(?!)"
    """regular expression of the keys, without the prefix, of buffers that old versions saved and no model needs"""
    ignored_fields: tuple[str, ...] = ()
    """fields of config.json that do not change what the model computes here"""
    has_window_fields: bool = False
    """sliding windows are said by use_sliding_window, max_window_layers and layer_types (Qwen)"""
    computes_ffn: bool = False
    """a missing width of the feed-forward layer is four times the model's (GPT-2)"""

    @property
    def has_rotary_positions(self) -> bool:
        """Whether config.json has the fields of rotary positions."""
        return not FAMILIES[self.features["family"]].learned_positions

    @property
    def field_names(self) -> set[str]:
        """The fields of config.json that are keys of [model]."""
        return {field.name for field in self.fields}

    def stored_tensors(self, model: Model) -> Iterator[StoredTensor]:
        """Yield the tensors of a file with the weights of a model, in the order of its layers; a tied head is none.

        Raises UnmappedParameter if the family has no tensor for one of the model's parameters.
        """
        shapes = parameter_shapes(model)
        yielded: set[str] = set()
        for name in shapes:
            stored = self.tensor_of(name, shapes)
            if stored.key not in yielded:
                yielded.add(stored.key)
                yield stored

    def tensor_of(self, name: str, shapes: dict[str, tuple[int, ...]]) -> StoredTensor:
        """Return the tensor of a file that holds a parameter. shapes: `parameter_shapes` of the model.

        Raises UnmappedParameter if there is none.
        """
        block = re.search(r"\d+", name)
        index = block[0] if block else ""
        for rule in self.tensors:
            names = [pattern.format(index) for pattern in rule.names]
            if name in names:
                return _build(rule, names, index, shapes)
        raise UnmappedParameter(f"models of type {self.model_type!r} have no tensor for {name}")


def _build(rule: TensorRule, names: list[str], index: str, shapes: dict[str, tuple[int, ...]]) -> StoredTensor:
    """Return the tensor of a rule for one block."""
    parts = []
    first_row = 0
    for name in names:
        rows = shapes[name][0]
        parts.append(StoredPart(name, first_row, rows))
        first_row += rows
    shape = (first_row, *shapes[names[0]][1:])
    if rule.is_transposed:
        shape = shape[::-1]
    return StoredTensor(rule.key.format(index), shape, rule.is_transposed, tuple(parts))
