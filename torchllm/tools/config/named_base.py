"""How a TOML file that a tool writes names its base: `torchllm/tools/resources.py` finds the file again."""

import os
from pathlib import Path

from torchllm.tools.resources import find_base, resource


def name_base(file: str, directory: str) -> str:
    """Return the `base` of a new TOML file in `directory` for the parent `file`.

    A file of the train_configs that come with torchllm is named relative to their folder, which holds on every machine.
    """
    path = Path(file).resolve()
    train_configs = resource("train_configs").resolve()
    if path.is_relative_to(train_configs):
        name = path.relative_to(train_configs).as_posix()
        if Path(find_base(directory, name)).resolve() == path:
            return name
    return os.path.relpath(path, Path(directory).resolve())
