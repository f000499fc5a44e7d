"""The public API for recipes. Each name is imported from its module on first use, so that most need no torch.

`recipe.pyi` lists the names, for type checkers and editors too. They keep their meaning from one version to the next.
New parameters are keyword-only and have a default; a renamed function works for one more version, with a FutureWarning.
A section that a recipe adds to the config takes its types from `torchllm.config`.
"""

import ast
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

with suppress(ModuleNotFoundError):  # the core trains without tools, on prepared tokens
    import torchllm.tools  # noqa: F401  # registers their readers: text, token files of others, tokenizers

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_IMPORTS = [node for node in _STUB.body if isinstance(node, ast.ImportFrom)]
HOMES = {alias.name: str(node.module) for node in _IMPORTS for alias in node.names}
"""name -> the module that defines it"""
__all__ = sorted(HOMES)


def __getattr__(name: str) -> Any:
    """Import the module of a name in the table, and return the name from it."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)
