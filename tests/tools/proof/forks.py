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


MEAN_OVER_LOCAL_TOKENS = Change("""
def subtract_mean(mlp, inputs):
    return (inputs[0] - inputs[0].mean(dim=1, keepdim=True),)


def change(stages):
    for stage in stages:
        for block in stage.layers.values():
            block.mlp.register_forward_pre_hook(subtract_mean)
""")
"""under cp a rank has some of the tokens"""

MEAN_OVER_LOCAL_SEQUENCES = Change("""
def subtract_mean(mlp, inputs):
    return (inputs[0] - inputs[0].mean(dim=0, keepdim=True),)


def change(stages):
    for stage in stages:
        for block in stage.layers.values():
            block.mlp.register_forward_pre_hook(subtract_mean)
""")
"""under dp, and with several micro batches, a rank has some of the sequences at a time"""

PAST_THE_RESIDUAL_STREAM = Change("""
FIRST = {}


def keep(block, inputs, output):
    FIRST["output"] = output


def add(block, inputs):
    x, *rest = inputs
    return (x + FIRST.get("output", 0.0), *rest)


def change(stages):
    for stage in stages:
        if "0" in stage.layers:
            stage.layers["0"].register_forward_hook(keep)
        if "3" in stage.layers:
            stage.layers["3"].register_forward_pre_hook(add)
""")
"""under pp the last block may be on another rank than the first one"""

CHANGING_STATE = Change("""
def scale(mlp, inputs):
    mlp.calls = getattr(mlp, "calls", 0) + 1
    return (inputs[0] * (1 + 0.1 * mlp.calls),)


def change(stages):
    for stage in stages:
        for block in stage.layers.values():
            block.mlp.register_forward_pre_hook(scale)
""")
"""recomputed, a forward runs twice"""

LOSS_OF_A_CHUNK = Change("""
def change(stages):
    for stage in stages:
        if stage.lm_head is not None:
            whole = stage.lm_head.cross_entropy
            stage.lm_head.cross_entropy = lambda logits, labels: whole(logits, labels) + logits.float().std()
""")
"""with loss_chunk the loss gets some of the tokens at a time"""

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
