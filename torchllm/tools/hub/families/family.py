"""A family of published models: fields of its config.json, names and forms of its tensors. No torch.

A family is one file of this folder: a table that is read in both directions, by the import and by the export. Add a
family: docs/hugging_face.md.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torchllm.config import FAMILIES, Model
from torchllm.config.errors import UserError
from torchllm.facts.shapes import Shape, buffer_shapes, parameter_shapes

FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")
"""entries of layer_types: blocks without the window, and with it"""
LINEAR = "linear_attention"
"""entry of layer_types: blocks with another mixer, see `HubFamily.mixers`"""
STACKED_EXPERTS = ".experts.gate_up_proj"
"""ends of the keys of stacked experts: one tensor for all experts of a block"""


class ConfigField(NamedTuple):
    """A field of config.json that has the value of one key of [model]."""

    name: str
    """in config.json: "hidden_size" """
    key: str
    """in [model]: "hidden" """
    default: Any
    """value if a file lacks it: the default of the family's class in transformers"""
    is_fixed: bool = True
    """the weights are of this size, so that a run cannot choose another"""
    other_names: tuple[str, ...] = ()
    """further names of it, which other versions of transformers read: all are read, and all are written"""

    aliases: tuple[str, ...] = ()
    """further names of it (transformers' attribute_map), which are read and never written"""
    spellings: tuple[tuple[Any, Any], ...] = ()
    """pairs of a value in config.json and its value in [model], where they differ"""
    needs: str = ""
    """key of [model] of a field before this one: if it is false, the model lacks this one, and null is written"""
    conversion: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None = None
    """functions from a number in config.json to that in [model], and back; None: it is the same"""

    def value_of(self, spelling: Any) -> Any:
        """Return the value in [model] for a value in config.json."""
        if self.conversion is not None and isinstance(spelling, int | float) and spelling > 0:
            return self.conversion[0](spelling)
        return next((value for known, value in self.spellings if known == spelling), spelling)

    def spelling_of(self, value: Any) -> Any:
        """Return the value in config.json for a value in [model]; None if there is none."""
        if self.conversion is not None:
            return self.conversion[1](value)
        if not self.spellings:
            return value
        return next((spelling for spelling, known in self.spellings if known == value), None)

    @property
    def written_names(self) -> tuple[str, ...]:
        """The names that an export writes."""
        return (self.name, *self.other_names)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.written_names, *self.aliases)


def with_defaults(fields: Iterable[ConfigField], **defaults: Any) -> tuple[ConfigField, ...]:
    """Return fields with other defaults, by key of [model]."""
    return tuple(each._replace(default=defaults.get(each.key, each.default)) for each in fields)


class RequiredField(NamedTuple):
    """A field of config.json that must have one of some values, because the model here has no other form."""

    name: str
    values: tuple[Any, ...]
    """allowed; the first is written at an export"""
    feature: str
    """the feature that another value would need, as the error names it: "biases of the attention's matrices" """
    default: Any = None
    """value if a file lacks it; None: the first of `values`"""

    def value_in(self, content: Mapping[str, Any]) -> Any:
        """Return the value that a config.json says."""
        return content.get(self.name, self.values[0] if self.default is None else self.default)


class TensorRule(NamedTuple):
    """A tensor of a file, and the parameters of this library that it holds. "{}" stands for the index of a block.

    With "{expert}" there is a tensor for each expert, and each holds a matrix of the stacked parameters.
    """

    key: str
    """in the file: "model.layers.{}.self_attn.q_proj.weight", "model.layers.{}.mlp.experts.{expert}.up_proj.weight" """
    names: tuple[str, ...]
    """canonical names; where there are several, the tensor holds their rows one after the other, of stacked parameters
    expert by expert"""
    is_transposed: bool = False
    """the file has inputs as rows and outputs as columns (GPT-2's Conv1D; of each matrix of a stack: gpt-oss)"""
    is_float32: bool = False
    """whatever the type of the other tensors is, because last digits count"""
    alternates: bool = False
    """the rows of several names lie not one after the other but in turns: the first of each, then the second of each"""
    groups: Callable[[Model], int] | None = None
    """returns the number of groups of rows, given the view of the block: the rows of several names lie in turns, the
    first group of each, then the second of each. None: one after the other"""
    swaps: bool = False
    """the two groups of each pair change places: halves of heads, where rotary positions turn backwards (nanochat)"""
    mixer: str = ""
    """model.mixer of the blocks that the rule is for; empty: all. Mixers share names, and the first rule counts"""
    is_convolution: bool = False
    """the file has a dimension of 1 before the last (torch's Conv1d of channels)"""
    is_row: bool = False
    """the file has a vector as a matrix of one row (ERNIE 4.5)"""


def tensors_of_block(*names: str) -> tuple[TensorRule, ...]:
    """Return the tensors of a block that files name as they are named here."""
    return tuple(TensorRule(f"model.layers.{{}}.{name}", (f"layers.{{}}.{name}",)) for name in names)


class StoredPart(NamedTuple):
    """A parameter, or one expert's matrix of a stacked parameter, in a tensor of a file."""

    name: str
    """canonical"""
    first_row: int
    """where its rows begin in the tensor, seen as a matrix (not transposed)"""
    rows: int
    expert: int = 0
    """index of the expert"""
    experts: int = 0
    """how many the parameter stacks; 0: it is not a stack"""
    first_column: int = 0
    """where its columns begin in the tensor, seen as a matrix (not transposed), in a stack of transposed matrices"""
    step: int = 1
    """rows of the tensor from one of its rows to the next"""
    group: int = 0
    """index of the group of its rows"""
    groups: int = 1
    """of equal size, into which its rows are cut"""

    @property
    def first_own_row(self) -> int:
        """The parameter's first row that is here."""
        return self.group * self.rows


class StoredTensor(NamedTuple):
    """A tensor as a file holds it."""

    key: str
    shape: tuple[int, ...]
    """as in the file"""
    is_transposed: bool
    parts: tuple[StoredPart, ...]
    """one after the other along the rows, or expert by expert, their rows in turns"""
    is_float32: bool = False
    """written so, whatever the type of the other tensors is"""

    is_vector: bool = False
    """it has one column, seen as a matrix: of a stack the experts' vectors follow each other in it"""

    @property
    def columns(self) -> int:
        """Columns of the tensor, seen as a matrix with contiguous rows; a vector has one."""
        return 1 if self.is_vector or len(self.shape) == 1 else self.shape[-1]


class FieldError(Exception):
    """A field of config.json that the model here does not support. The message begins with its name."""


class UnmappedParameter(UserError):
    """A parameter without a tensor in a family."""


@dataclass(frozen=True)
class HubFamily:
    """A family of models as Hugging Face publishes them."""

    model_type: str
    """as config.json names it"""
    other_types: tuple[str, ...] = field(default=(), kw_only=True)
    """further ones that are read as this one"""
    architecture: str
    """class of transformers with the language model's head"""
    features: dict[str, Any]
    """keys of [model] that all models of the family share"""
    fields: tuple[ConfigField, ...]
    full_fields: tuple[ConfigField, ...] = field(default=(), kw_only=True)
    """fields of the blocks with full attention alone; a null says nothing"""
    prepared: Callable[[Mapping[str, Any]], dict[str, Any]] = field(default=dict, kw_only=True)
    """returns the fields of a config.json in the one spelling that the table reads; raises FieldError"""
    required: tuple[RequiredField, ...]
    """which an export writes"""
    tensors: tuple[TensorRule, ...]
    stacked_tensors: tuple[TensorRule, ...] = ()
    """of files with stacked experts: transformers 5 can save its modules as they are. They are read and never written,
    because transformers 4 and others do not know them"""
    module_key: str = field(default=STACKED_EXPERTS, kw_only=True)
    """end of the keys that identify such files"""
    prefix: str = "model."
    """prefix of the file's keys, except the head's; some published files lack it"""
    ignored_tensors: str = r"(?!)"
    """regular expression of the keys, without the prefix, of buffers that old versions saved and no model needs"""
    unwritten: tuple[RequiredField, ...] = ()
    """further ones that no export writes: the family's class has no such field, and transformers' base classes still
    read it"""
    ignored_fields: tuple[str, ...] = ()
    """fields of config.json that do not change the model's computation here"""
    default_layer_types: Callable[[Mapping[str, Any], Sequence[bool]], list[str]] | None = None
    """returns the layer_types of a config.json that has none, from it and from whether each block has rotary positions;
    None: all blocks have the window, or none"""
    type_of_kinds: str = ""
    """the model_type as which transformers reads a config.json whose layer_types differ (Mistral)"""
    mixers: Mapping[str, str] = field(default_factory=dict)
    """model.mixer of blocks by further entries of layer_types"""
    of_types: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """further keys of [model] that all blocks of an entry of layer_types share"""
    has_optional_rope: bool = False
    """a rope_theta of null says that there are no rotary positions (OLMo Hybrid)"""
    has_window_fields: bool = False
    """a sliding_window is off unless use_sliding_window is true (Qwen, SmolLM3)"""
    has_no_rope_layers: bool = False
    """which blocks have no rotary positions is said by no_rope_layers and no_rope_layer_interval (SmolLM3)"""
    has_rope_by_type: bool = False
    """rope_parameters has a table for each of layer_types, and rope_scaling is of full_attention alone (OLMo 3)"""
    has_no_old_rope: bool = False
    """rotary positions are in rope_parameters alone: transformers 4 does not know the family (Gemma 4)"""
    window_rope_theta: float | None = None
    """base of the rotary frequencies in blocks with a window where config.json has no rope_local_base_freq (Gemma 3);
    None: such a block has rope_theta as all others"""
    derived: Mapping[str, Callable[[int], Any]] = field(default_factory=dict)
    """keys of [model] that follow from hidden_size"""
    has_shared_width: bool = False
    """the field of model.shared_experts has their width in place of their number (Qwen)"""
    has_sparse_step: bool = False
    """which blocks have experts is said by decoder_sparse_step and mlp_only_layers (Qwen)"""
    has_mlp_layer_types: bool = False
    """which blocks have experts is said by mlp_layer_types (GLM-4.7-Flash, HY 3)"""
    has_prediction_blocks: bool = False
    """files may hold blocks after the last one, or tensors mtp.*, which predict the tokens after the next: those that
    model.mtp_depth does not count are not read"""
    has_scaled_scores: bool = False
    """mscale_all_dim of YaRN's table is about the scores too (DeepSeek-V3)"""
    names_own_code: bool = False
    """published files have an auto_map, to code that computes as transformers' class does"""
    constant_fields: Mapping[str, Any] = field(default_factory=dict)
    """values that an export writes for parts that are not read"""
    rotary_fraction: float | None = None
    """share of each head that rotary positions turn, where config.json has no partial_rotary_factor; None: whole heads,
    and no other share is supported"""
    rotary_width: str = ""
    """field with the features of a head that rotary positions turn, another spelling of their share (MiniMax-M2)"""
    rope_theta: float = 10000.0
    """base of the rotary frequencies where config.json has none"""
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    """rope_scaling of a config.json that has neither it nor rope_parameters (gpt-oss)"""
    scales_queries: bool = False
    """whether the class scales queries by their position"""
    norms_after_rotation: bool = False
    """norms of q and k come after the rotary positions, and would divide YaRN's factor out (nanochat)"""
    heads_divide_hidden: bool = False
    """transformers refuses models whose heads do not divide their width, though it could run them"""
    tokenizer_pattern: str = ""
    """regular expression that AutoTokenizer of transformers 5 uses to split texts for all models of this family,
    whatever their tokenizer.json says; empty: it follows tokenizer.json"""
    computes_ffn: bool = False
    """a missing width of the feed-forward layer is four times the model's (GPT-2)"""

    @property
    def says_windows_by_type(self) -> bool:
        """Whether layer_types alone says which blocks have the window: sliding_window is never off."""
        return self.default_layer_types is not None and not self.has_window_fields

    @property
    def has_rotary_positions(self) -> bool:
        """Whether config.json has the fields of rotary positions."""
        return not FAMILIES[self.features["family"]].learned_positions

    @property
    def field_names(self) -> set[str]:
        """The fields of config.json that are keys of [model]."""
        return {name for config_field in (*self.fields, *self.full_fields) for name in config_field.names}

    @property
    def has_experts(self) -> bool:
        """Whether the family's models are mixtures of experts."""
        return any(config_field.key == "experts" for config_field in self.fields)

    def may_have(self, experts: bool) -> bool:
        """Return whether models of the family may have experts; or, if not `experts`, whether they may have none."""
        always = any(config_field.key == "experts" and not config_field.needs for config_field in self.fields)
        return self.has_experts if experts else not always

    def ignores(self, key: str) -> bool:
        """Return whether a tensor is a buffer that no model needs, though files have it."""
        return re.fullmatch(self.ignored_tensors, key.removeprefix(self.prefix)) is not None

    def is_of_prediction_block(self, key: str, layers: int) -> bool:
        """Return whether a tensor of a file is of a block behind the first `layers`, which predicts further tokens."""
        block = re.match(r"(mtp)\.|layers\.(\d+)\.", key.removeprefix(self.prefix))
        return self.has_prediction_blocks and block is not None and (block[1] is not None or int(block[2]) >= layers)

    def with_table_of(self, keys: Iterable[str]) -> "HubFamily":
        """Return the family with the table that the keys of a file follow: `stacked_tensors` or `tensors`."""
        if any(key.endswith(self.module_key) for key in keys) and self.stacked_tensors:
            return replace(self, tensors=self.stacked_tensors)
        return self

    def stored_tensors(self, model: Model) -> Iterator[StoredTensor]:
        """Yield the tensors of a file with the weights of a model, in the order of its layers; a tied head is none.

        Raises UnmappedParameter if the family has no tensor for one of the model's parameters.
        """
        shapes = stored_shapes(model)
        yielded: set[str] = set()
        for name in shapes:
            for stored in self.tensors_of(name, shapes, model):
                if stored.key not in yielded:
                    yielded.add(stored.key)
                    yield stored

    def tensors_of(self, name: str, shapes: dict[str, Shape], model: Model) -> list[StoredTensor]:
        """Return the tensors of a file that hold a parameter: one, or one for each expert of a stacked parameter.

        shapes: `stored_shapes` of the model. Raises UnmappedParameter if there is none.
        """
        block = re.search(r"\d+", name)
        index = block[0] if block else ""
        view = model.of_block(int(index)) if block else model
        for rule in self.tensors:
            names = [pattern.format(index) for pattern in rule.names]
            if name in names and rule.mixer in ("", view.mixer):
                return _build(rule, names, index, shapes, rule.groups(view) if rule.groups else 1)
        raise UnmappedParameter(f"models of type {self.model_type!r} have no tensor for {name}")


def stored_shapes(model: Model) -> dict[str, Shape]:
    """Return the shapes of all stored tensors of a model: parameters and buffers."""
    shapes = parameter_shapes(model)
    for index, view in enumerate(model.views):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in buffer_shapes(view).items()}
    return shapes


def _build(rule: TensorRule, names: list[str], block: str, shapes: dict[str, Shape], groups: int) -> list[StoredTensor]:
    """Return the tensors of a rule for one block. groups: of rows, in turns."""
    shape = shapes[names[0]]
    if ".experts." not in names[0]:
        parts = _parts_of_tensor(names, shapes, groups, rule.swaps)
        whole = (parts[-1].first_row + parts[-1].rows, *((1,) if rule.is_convolution else ()), *shape[1:])
        stored_shape = (1, *whole) if rule.is_row else whole[::-1] if rule.is_transposed else whole
        key, is_vector = rule.key.format(block), rule.is_row
        return [StoredTensor(key, stored_shape, rule.is_transposed, parts, rule.is_float32, is_vector)]
    experts, _, *columns = shape
    parts = _parts_of_stack(names, shapes, rule)
    if "{expert}" not in rule.key:
        rows = sum(shapes[name][1] for name in names)
        matrix = (*columns, rows) if rule.is_transposed else (rows, *columns)
        is_vector = not columns
        return [
            StoredTensor(rule.key.format(block), (experts, *matrix), rule.is_transposed, parts, is_vector=is_vector)
        ]
    tensors = []
    for part in parts:
        key = rule.key.format(block, expert=part.expert)
        tensors.append(StoredTensor(key, (part.rows, *columns), False, (part._replace(first_row=0),)))
    return tensors


def _parts_of_tensor(names: list[str], shapes: dict[str, Shape], groups: int, swaps: bool) -> tuple[StoredPart, ...]:
    """Return the places of parameters that lie one after the other in a tensor, group by group."""
    parts = []
    first_row = 0
    for group in range(groups):
        for name in names:
            rows = shapes[name][0] // groups
            parts.append(StoredPart(name, first_row, rows, group=group ^ swaps, groups=groups))
            first_row += rows
    return tuple(parts)


def _parts_of_stack(names: list[str], shapes: dict[str, Shape], rule: TensorRule) -> tuple[StoredPart, ...]:
    """Return the places of the experts' matrices in a tensor that has all parameters of an expert, then of the next."""
    experts, _, *columns = shapes[names[0]]
    rows_of_expert = sum(shapes[name][1] for name in names)
    parts = []
    for expert in range(experts):
        first_row = 0 if rule.is_transposed else expert * rows_of_expert
        first_column = expert * columns[0] if rule.is_transposed else 0
        for number, name in enumerate(names):
            rows = shapes[name][1]
            begin, step = (first_row + number, len(names)) if rule.alternates else (first_row, 1)
            parts.append(StoredPart(name, begin, rows, expert, experts, first_column, step))
            first_row += 0 if rule.alternates else rows
    return tuple(parts)
