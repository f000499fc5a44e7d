"""Pretrain language models with PyTorch. Importing this package imports nothing else; see recipes/pretrain.py.

`torchllm.load(FOLDER)` returns a trained model: torchllm/tools/generate/language_model.py.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `__getattr__` imports it
    from torchllm.tools.generate.language_model import load as load

__version__ = "0.2.0"


def __getattr__(name: str) -> object:
    """Return `load`, whose import takes torch, when it is asked for."""
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchllm.tools.generate.language_model import load

    return load
