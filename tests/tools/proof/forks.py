"""Forks of recipes/pretrain.py that are right in one process and wrong in a layout."""

import re
from pathlib import Path
from typing import NamedTuple

from tests.tiny_run import ROOT


class Change(NamedTuple):
    definitions: str
    """above `train`"""
    call: str = "    change(stages)\n"
    """below the call of `parallelize`"""
    replaced: tuple[tuple[str, str], ...] = ()
    """texts of the recipe, and what stands in their place"""


def documented_change() -> Change:
    """Return the change of docs/prove.md: a norm over all heads, of which a rank has some under tp."""
    definitions, call = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "prove.md").read_text(), re.S)
    return Change(definitions, call)


PARALLELIZE = (
    "parallelize(model, mesh, config.parallel, config.recompute, config.compile, config.float8, dtype, length)"
)
CALL = f"    stages = {PARALLELIZE}\n"


def write_fork(file: Path, change: Change) -> Path:
    """Write a copy of the reference recipe that changes its stages once they are parallelized."""
    text = (ROOT / "recipes" / "pretrain.py").read_text()
    assert CALL in text
    text = text.replace(CALL, f"{CALL}{change.call}")
    for old, new in change.replaced:
        assert old in text, old
        text = text.replace(old, new)
    file.write_text(text.replace("\ndef train(", f"\n{change.definitions}\n\ndef train(", 1))
    return file
