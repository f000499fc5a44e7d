"""Where tokenized text and measured layouts are kept between runs."""

import os
from pathlib import Path

from torchllm.config import Data


def cache_root(data: Data) -> Path:
    """Return the cache folder: data.cache if it is set, else torchllm in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "torchllm"
    return Path(data.cache or default).expanduser()
