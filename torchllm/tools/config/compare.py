"""Compare a config with a checkpoint's."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple, get_args

from torchllm.config.errors import UserError
from torchllm.config.keys import IsPath, notes_on, plain_type
from torchllm.config.paths import same_path
from torchllm.config.schema import FUNCTION_SECTIONS, Config
from torchllm.config.toml import toml_value
from torchllm.tools.config.by_key import values_by_key
from torchllm.tools.config.read import type_at

SOURCES_OF_FROZEN_WEIGHTS = ("run.seed", "model.initial_std", "model.from_hf", "checkpoint.initial")
"""keys that decide frozen weights with low-rank updates: checkpoints lack them, so a resumed run makes or reads them"""
NO_OTHER_FUNCTION = (
    "model.attention",
    "model.frozen",
    "model.initial_std",
    "model.base_width",
    "model.upcycle",
    "model.upcycle_noise",
    "model.vocab_padding",
    "model.max_sequence_length",
    "model.from_hf",
    "model.balance_loss",
    "model.balance_weight",
    "model.router_bias_rate",
    "model.router_z_loss",
    "model.mtp_weight",
)
"""keys of [model] that change no output of a model whose tensors are loaded: a kernel, the initial weights, a limit, a
part of the gradients"""


class ConfigChange(NamedTuple):
    """A key whose value differs from the checkpoint."""

    key: str
    saved: str | None
    """as TOML; None: the config of the checkpoint has no such key"""
    current: str | None
    """as TOML; None: this run's config has no such key"""

    def __str__(self) -> str:
        """Return the key with both values."""
        saved = "no such key" if self.saved is None else self.saved
        current = "no such key" if self.current is None else self.current
        return f"{self.key}: {saved} in the checkpoint, {current} now"

    @property
    def undo(self) -> str:
        """How to restore the value of the checkpoint."""
        if self.current is None and not self.key.startswith("model.kinds."):
            return "go on with the version that wrote the checkpoint"
        return f"remove {self.key}" if self.saved is None else f"set {self.key} to {self.saved}"

    @property
    def changes_function(self) -> bool:
        """Whether the model computes something else, although all tensors of the checkpoint fit."""
        section, *_, name = self.key.split(".")  # a key of a kind of blocks is as [model]'s
        return section in FUNCTION_SECTIONS and f"{section}.{name}" not in NO_OTHER_FUNCTION


def config_changes(saved: Mapping[str, Any], config: Config) -> list[ConfigChange]:
    """Return the keys that differ between `config` and `saved`, the config of a checkpoint.

    A key that the checkpoint's version of torchllm did not have yet counts only if it differs from its default.
    """
    saved_values = _values(saved)
    current_values = _values(asdict(config))
    defaults = _values(asdict(type(config)()))
    changes = []
    for key in sorted(saved_values.keys() | current_values.keys()):
        saved_value, current_value = saved_values.get(key), current_values.get(key)
        is_new_key = key not in saved_values and current_value == defaults.get(key)
        kind = type_at(type(config), tuple(key.split(".")))
        if saved_value != current_value and not is_new_key and not _same_paths(kind, saved_value, current_value):
            changes.append(ConfigChange(key, saved_value, current_value))
    return changes


def _same_paths(kind: Any, saved: str | None, current: str | None) -> bool:
    """Return whether two values of a key, as TOML, are the same path or paths."""
    is_path = any(notes_on(each, IsPath) for each in (kind, *get_args(plain_type(kind)[0])))
    if not is_path or saved is None or current is None:
        return False
    values = tomllib.loads(f"saved = {saved}\ncurrent = {current}")
    if isinstance(values["saved"], str):
        return same_path(values["saved"], values["current"])
    return len(values["saved"]) == len(values["current"]) and all(map(same_path, values["saved"], values["current"]))


def check_frozen_weights(record: Mapping[str, Any], config: Config) -> None:
    """Raise UserError if low-rank updates would get other frozen weights than in the checkpoint with this record."""
    if "config" in record:
        refuse_other_frozen_weights(config_changes(record["config"], config), config)


def refuse_other_frozen_weights(changes: Iterable[ConfigChange], config: Config) -> None:
    """Raise UserError if one of the changes gives low-rank updates other frozen weights."""
    for change in changes:
        if config.trained.only_updates and change.key in SOURCES_OF_FROZEN_WEIGHTS:
            raise UserError(
                f"{change}: the checkpoint holds low-rank updates of weights that this key decides, and not those: "
                f"{change.undo}, or set another run.folder"
            )


def _values(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of a config as TOML, by dotted key."""
    return {key: toml_value(value) for key, value in values_by_key(config).items()}
