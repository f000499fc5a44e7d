"""Functions that open sources and tokenizer files, by kind. Tools add theirs here, so that the core imports no tool.

`torchllm/tools/__init__.py` adds the ones in `torchllm/tools/prepare`, imported at the first source of their kind.
A recipe adds a kind in the same way, and its name to the config's `Source.kind`.
"""

from collections.abc import Callable
from typing import Any

READERS: dict[str, Callable[[], Any]] = {}
"""data.sources.kind -> makes a `SourceReader` of `torchllm/data/readers.py`"""
TOKENIZERS: dict[str, Callable[..., Any]] = {}
"""kind of a tokenizer's file -> makes a `Tokenizer` from the file and a number of threads"""
