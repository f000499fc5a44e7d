"""Write a config as TOML that loads back to an equal one."""

import os
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from torchllm.config.keys import KeyPath, dotted
from torchllm.config.paths import absolute_paths
from torchllm.config.schema import Config, Kinds
from torchllm.config.toml import toml_value


def dump_toml(config: Config) -> str:
    """Return every key of a config as TOML."""
    return "\n".join(_lines(config, ())).strip() + "\n"


def _lines(value: Any, path: KeyPath) -> list[str]:
    """Return the lines of a table: its own keys first, since a key after a table would belong to that table."""
    lines: list[str] = []
    tables: list[str] = []
    for field in fields(value):
        item = getattr(value, field.name)
        item_path = (*path, field.name)
        if is_dataclass(item):
            tables += ["", f"[{dotted(item_path)}]", *_lines(item, item_path)]
        elif isinstance(item, tuple) and item and is_dataclass(item[0]):
            for element in item:
                tables += ["", f"[[{dotted(item_path)}]]", *_lines(element, item_path)]
        elif isinstance(item, Kinds) and item:
            for name, keys in item.items():
                tables += ["", f"[{dotted((*item_path, name))}]", *(f"{key} = {toml_value(keys[key])}" for key in keys)]
        else:
            lines.append(f"{dotted((field.name,))} = {toml_value(item)}")
    return lines + tables


def write_config(config: Config, path: Path) -> None:
    """Write every key as TOML to `path`, with absolute paths. The replacement is atomic."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.write(dump_toml(absolute_paths(config)))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
