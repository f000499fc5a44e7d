"""The layouts whose steps are counted: every technique alone, and every pair of two that go together."""

from collections.abc import Mapping
from itertools import combinations

Settings = Mapping[str, object]
"""dotted keys of a config"""
Arguments = list[str]
"""of a command line"""

SHARDING: dict[str, Settings] = {
    "zero 0": {"parallel.dp_replicate": 2, "parallel.zero_stage": 0},
    "zero 1": {"parallel.dp_shard": 2, "parallel.zero_stage": 1},
    "zero 2": {"parallel.dp_shard": 2, "parallel.zero_stage": 2},
    "zero 3": {"parallel.dp_shard": 2, "parallel.zero_stage": 3},
    "hsdp": {"parallel.dp_replicate": 2, "parallel.dp_shard": 2, "parallel.zero_stage": 3},
}
TENSOR: dict[str, Settings] = {
    "tp": {"parallel.tp": 2, "parallel.sequence_parallel": False},
    "sp": {"parallel.tp": 2, "parallel.sequence_parallel": True},
}
CONTEXT: dict[str, Settings] = {
    "ring": {"parallel.cp": 2, "parallel.cp_method": "ring"},
    "ulysses": {"parallel.cp": 2, "parallel.cp_method": "ulysses"},
}
PIPELINE: dict[str, Settings] = {
    "pp": {"parallel.pp": 2, "parallel.schedule": "1F1B"},
    "pp interleaved": {"parallel.pp": 2, "parallel.schedule": "Interleaved1F1B"},
}
RECOMPUTE: dict[str, Settings] = {
    "full": {"recompute.mode": "full"},
    "selective": {"recompute.mode": "selective"},
    "selective_half": {"recompute.mode": "selective_half"},
}
COMPILE: dict[str, Settings] = {"compile": {"compile.block": True, "compile.loss": True}}
AXES = (SHARDING, TENSOR, CONTEXT, PIPELINE, RECOMPUTE, COMPILE)
"""one technique of each goes with those of all others"""

CONFIG = "train_configs/debug.toml"
MODEL: Settings = {
    "model.hidden": 256,  # heads of width 32, which flash attention takes
    "training.sequence_length": 256,
    "training.micro_batch_size": 2,
    "training.global_batch_size": 16,
    "training.dtype": "bfloat16",
    "compile.block": False,
    "compile.loss": False,
    "parallel.dp_shard": 1,
    "parallel.zero_stage": 3,
}
"""a small model: the number of launches does not depend on widths"""


def as_arguments(config: str, *settings: Settings) -> Arguments:
    """Return the command line of a config and of keys that differ from it; later settings replace earlier ones."""
    merged: dict[str, object] = {}
    for keys in settings:
        merged |= keys
    arguments = [config]
    for key, value in merged.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        arguments.append(f"--{key}={text}")
    return arguments


def layouts() -> dict[str, Arguments]:
    """Return the command line of every layout by its name."""
    named = {"one rank": as_arguments(CONFIG, MODEL)}
    for axis in AXES:
        for name, settings in axis.items():
            named[name] = as_arguments(CONFIG, MODEL, settings)
    for first_axis, second_axis in combinations(AXES, 2):
        for first, first_settings in first_axis.items():
            for second, second_settings in second_axis.items():
                name = f"{first}, {second}"
                named[name] = as_arguments(CONFIG, MODEL, first_settings, second_settings)
    return named
