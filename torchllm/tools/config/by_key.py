"""The values of a config, one by one."""

from collections.abc import Mapping
from typing import Any

from torchllm.config.keys import KeyPath, dotted


def values_by_key(value: Any, path: KeyPath = ()) -> dict[str, Any]:
    """Return the values in nested tables and arrays of tables by dotted key: data.sources.0.kind."""
    if isinstance(value, (tuple, list)) and value and isinstance(value[0], Mapping):
        value = {str(index): item for index, item in enumerate(value)}
    if not isinstance(value, Mapping):
        return {dotted(path): value}
    values: dict[str, Any] = {}
    for key, item in value.items():
        values |= values_by_key(item, (*path, key))
    return values
