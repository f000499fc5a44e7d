"""Refuse to train with a key that the recipe does not apply.

Most keys reach the library through an argument that a recipe must pass. Keys with a note `AppliedBy` in the schema need
a call in the recipe; all others are read by the library or by other recipes, too (tests/config/test_applied_keys.py). A
fork without the call, because it is older than the key or removed it, would silently train another model. The called
function registers the key with `applied`, and `refuse_unapplied` ends the run before its first step if a key is set and
not registered. A fork that applies a key in another way calls `applied` itself.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

from torchllm.config.errors import UserError
from torchllm.config.keys import AppliedBy, notes_on_key
from torchllm.config.schema import Config
from torchllm.config.toml import toml_value

AS_SET = object()
"""a key is applied with whatever value the config has"""
BY_LIBRARY = object()
"""a key is applied by the library where the recipe does not"""
_SAVES = (
    "checkpoint.interval",
    "checkpoint.keep",
    "checkpoint.keep_every",
    "checkpoint.remote",
    "checkpoint.asynchronous",
)
CHANGE_NO_WEIGHT = ("recompute", "compile", *_SAVES, "evaluate")
"""keys, and sections for all of their keys, that a loop on one device may ignore: it trains the same model"""


@dataclass
class _Training:
    """The keys applied in a training, or, outside of `new_training`, in this process."""

    config: Config | None = None
    """None: outside of `new_training`"""
    values: dict[str, object] = field(default_factory=dict)
    """applied value by key, or AS_SET"""
    state: dict[str, str] = field(default_factory=dict)
    """key by the name of the tensor that it needs in checkpoints"""
    is_checked: bool = False
    """`refuse_unapplied` was called"""
    saved: Collection[str] | None = None
    """names of the extra tensors in checkpoints; None: the recipe has no checkpoints"""


_training = _Training()


class _Loaded(NamedTuple):
    """The config that this process loaded last."""

    config: Config
    origins: Mapping[str, str]
    """origin by key: "x.toml:12" """
    is_for_loop: bool = False
    """a recipe trains it on one device, by its own loop"""


_loaded = _Loaded(Config(), {})


@contextmanager
def new_training(config: Config) -> Iterator[None]:
    """Return a context around a training, which starts with only the keys of [run] applied: they hold for a process."""
    global _training
    before = _training
    of_process = {key: value for key, value in before.values.items() if key.startswith("run.")}
    _training = _Training(config, of_process)
    try:
        yield
    finally:
        _training = before


def applied(key: str, value: object = AS_SET) -> None:
    """Register a key that the recipe applies, "training.z_loss", or, with a dataclass as value, a section, "recompute".

    value: the applied value, if it may differ from the config's, e.g. an argument with a default.
    """
    if is_dataclass(value):
        for item in fields(value):
            _training.values[f"{key}.{item.name}"] = getattr(value, item.name)
    else:
        _training.values[key] = value


def needs_state(key: str, names: Iterable[str]) -> None:
    """Register tensors that checkpoints must have for a key to be applied."""
    _training.state.update(dict.fromkeys(names, key))


def saves_state(names: Collection[str]) -> None:
    """Register the names of all tensors in checkpoints except for model and optimizer."""
    _training.saved = names


def note_origins(config: Config, origins: Mapping[str, str], *, is_for_loop: bool = False) -> None:
    """Remember the origins of a config's keys ("x.toml:12", "--training.z_loss") for messages."""
    global _loaded
    _loaded = _Loaded(config, origins, is_for_loop)


def config_in_use() -> Config:
    """Return the config of the training, or else the loaded one; the defaults if there is none."""
    return _training.config or _loaded.config


class Unapplied(NamedTuple):
    """A key that is set but not applied."""

    key: str
    value: object
    applied_by: AppliedBy


def unapplied(config: Config) -> Iterator[Unapplied]:
    """Yield the keys that differ from their default and were not applied with their value."""
    defaults = type(config)()
    for section in fields(config):
        table, default_table = getattr(config, section.name), getattr(defaults, section.name)
        for name in [item.name for item in fields(table)] if is_dataclass(table) else ():
            key, value, default = f"{section.name}.{name}", getattr(table, name), getattr(default_table, name)
            call = call_for(type(table), name)
            is_off = value is False and default == "auto"  # a Switch, which no function needs to apply
            if call is None or value == default or is_off:
                continue
            if _training.values.get(key, default) not in (value, AS_SET, BY_LIBRARY):
                yield Unapplied(key, value, call)


def call_for(section: type, name: str) -> AppliedBy | None:
    """Return the call that applies a key of a section; None if a recipe cannot ignore it."""
    return next(iter(notes_on_key(section, name, AppliedBy)), None)


def refuse_unapplied(config: Config, *, left_out: Collection[str] = (), one_device: bool = False) -> list[str]:
    """Raise UserError if a key is set but not applied; return the keys that are ignored.

    Ignored are the keys in `left_out` and, inside of `new_training`, keys of parts that a fork may replace.
    left_out: keys, or sections with all of their keys. one_device: leave out `CHANGE_NO_WEIGHT`, too.
    """
    if one_device:
        left_out = (*left_out, *CHANGE_NO_WEIGHT)
    _training.is_checked = True
    lines, passed_over = [], []
    for item in unapplied(config):
        if item.key in left_out or item.key.partition(".")[0] in left_out:
            passed_over.append(item.key)
        elif item.applied_by.is_replaceable:
            passed_over += [item.key] if _training.config is not None else []
        else:
            lines.append(
                f"{_located(item.key, config)}: is {_shown(item.value)}, but this recipe does not apply it: call "
                f"{item.applied_by.call}, as torchllm's own recipes do; or remove the key"
            )
    lines += _unsaved_state(config)
    if lines:
        raise UserError("\n".join(lines))
    return passed_over


def replaced_parts() -> list[str]:
    """Return the keys that name parts of this training which its recipe has replaced by others."""
    names = ("data.sources", "optimizer.name", "schedule.name")
    return [name for name in names if _training.config is not None and name not in _training.values]


def refuse_unchecked_step() -> None:
    """Call `refuse_unapplied` before the first update if the recipe has not done so."""
    if _training.config is not None and not _training.is_checked:
        refuse_unapplied(_training.config)
    elif _loaded.is_for_loop and not _training.is_checked:
        refuse_unapplied(_loaded.config, one_device=True)


def leave_to_library(*keys: str) -> None:
    """Register keys that the library applies, if the recipe has not applied them until then."""
    for key in keys:
        _training.values.setdefault(key, BY_LIBRARY)


def is_left_to_library(key: str) -> bool:
    """Return whether the library applies a key because the recipe does not."""
    return _training.values.get(key) is BY_LIBRARY


def wants_average() -> bool:
    """Return whether the config wants the average of the weights evaluated and the recipe does not do so."""
    config = _training.config
    return config is not None and config.evaluate.ema and _training.values.get("evaluate.ema") not in (True, AS_SET)


def refuse_evaluation_of_weights() -> None:
    """Raise UserError if the weights were evaluated but the config wants their average (`evaluate.ema`)."""
    if _training.config is not None and wants_average() and not is_left_to_library("evaluate.ema"):
        raise UserError(
            f"{_located('evaluate.ema', _training.config)}: is true, but this recipe evaluates the weights: call "
            "torchllm's evaluate(...), or its own inside of "
            "`with average.in_place_of_weights(config.evaluate.ema):`; or remove the key"
        )


def _unsaved_state(config: Config) -> list[str]:
    """Return a line for each key whose state the recipe's checkpoints lack."""
    if _training.saved is None:
        return []
    missing = {key: name for name, key in _training.state.items() if name not in _training.saved}
    return [
        f"{_located(key, config)}: needs {name} in every checkpoint, and this recipe does not save it: give "
        "Checkpointer extra_state=average.tensors | step.expert_balance.tensors, as torchllm's own recipes do; or "
        "remove the key"
        for key, name in missing.items()
    ]


def _located(key: str, config: Config) -> str:
    """Return a key after its origin, as in an error; the key alone if its value is not the loaded one."""
    section, name = key.split(".")
    is_loaded = getattr(getattr(config, section), name) == getattr(getattr(_loaded.config, section), name)
    origin = _loaded.origins.get(key, "") if is_loaded else ""
    return origin if origin.startswith("--") else f"{origin}: {key}" if origin else key


def _shown(value: Any) -> str:
    return "set" if isinstance(value, tuple) and value and is_dataclass(value[0]) else toml_value(value)
