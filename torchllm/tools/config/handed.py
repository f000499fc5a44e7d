"""The resolved config that run_train.sh hands to its ranks: they read it, and neither plan nor check anything again."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from torchllm.config.applied_keys import note_origins
from torchllm.config.schema import Config
from torchllm.tools.config.read import ConfigError, read_table

C = TypeVar("C", bound=Config)

HANDED = "TORCHLLM_CONFIG"
"""environment variable: the file, which run_train.sh has made and which --check fills"""


def hand_over(configs: Sequence[Config], origins: Mapping[str, str], words: Sequence[str]) -> None:
    """Write checked configs for the ranks, if run_train.sh waits for them.

    origins: where each key was written. words: the command line.
    """
    file = os.environ.get(HANDED)
    if file:
        handed = {"words": _same_words(words), "configs": [asdict(config) for config in configs], "origins": origins}
        Path(file).write_text(json.dumps(handed))


def _same_words(words: Sequence[str]) -> list[str]:
    """Return the words that --check and the ranks share: run_train.sh gives ranks the folder that it has read."""
    return [word for word in words if word != "--check" and not word.startswith("--run.folder=")]


def handed_configs(words: Sequence[str], schema: type[C]) -> list[C] | None:
    """Return the configs that were handed to this rank; None if there are none, as where a folder was cleaned up.

    words: the command line. A process of another command, started inside of a run, must not train the run's config.
    """
    file = os.environ.get(HANDED)
    if not file or "WORLD_SIZE" not in os.environ or not os.path.isfile(file):
        return None
    with open(file) as opened:
        is_mine = os.fstat(opened.fileno()).st_uid == os.getuid()  # a cleaned /tmp may have another user's by then
        text = opened.read() if is_mine else ""
    if not text:  # the recipe checks its config in another way
        return None
    handed = json.loads(text)
    if handed["words"] != _same_words(words):
        return None
    faults: list[ConfigError] = []
    configs = [read_table(schema, table, faults) for table in handed["configs"]]
    assert not faults, faults
    note_origins(configs[0], handed["origins"])
    return configs
