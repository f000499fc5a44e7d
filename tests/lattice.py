"""Every layout of a tiny model that the library accepts, and how one of them is compared with one process.

A *layout* is a dict of the settings that make a difference in it, by dotted key: where `parallel.pp` is 1 there is no
schedule, where `parallel.cp` is 1 no `cp_method`, so no two are the same one. (But `dp_replicate` alone and `dp_shard`
at `zero_stage` 0 are two words for DDP; both are there.) Whether one is valid is decided by
`torchllm.config.checks.problems`.

Two groups of settings: those of LAYOUT are all combined with each other, which is `lattice()`; of OPTIONS every layout
that is drawn (`lattice_sampler.py`) gets some. One that failed is run again from its TOML by

    python -m tests.lattice FILE.toml
"""

import functools
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, get_args

from tests import workers
from tests.parity import Settings, check, tiny, with_settings, world_size
from torchllm import config as c
from torchllm.config import SCHEDULES, Config
from torchllm.config.checks import problems
from torchllm.config.read import Fault, read_table
from torchllm.config.toml import read_files
from torchllm.config.write import dump_toml

Layout = Settings
MOST_RANKS = 8
AXES = tuple(f"parallel.{axis}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
MICRO_BATCH = "training.micro_batch_size"

LAYOUT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(AXES, tuple(range(1, MOST_RANKS + 1))),
    "parallel.schedule": tuple(SCHEDULES),
    "parallel.virtual_stages": (1, 2, 3, 4),
    "parallel.cp_method": ("ring", "ulysses"),
    "parallel.sequence_parallel": (False, True),
    "parallel.scatter_gather": (True, False),
    "parallel.zero_stage": (3, 2, 1, 0),
    "recompute.mode": get_args(c.Recompute.__annotations__["mode"]),
    "model.family": get_args(c.Model.__annotations__["family"]),
    "model.tied_embeddings": (False, True),
}
OPTIONS: dict[str, tuple[Any, ...]] = {
    MICRO_BATCH: (24, 12, 8, 6, 4, 3, 2, 1),
    "model.kv_heads": (8, 4, 2),
    "model.attention": ("sdpa", "eager"),
    "model.qk_norm": (False, True),
    "model.vocab": (96, 97),  # 97: shards of unequal size
    "data.document_mask": (False, True),
    "training.loss_chunk": (0, 20),  # 20 divides no micro batch's tokens
    "parallel.keep_last_block": (True, False),
    "parallel.prefetch": (1, 0),
    "optimizer.name": ("adamw", "sgd"),
}
EASIEST: Settings = {MICRO_BATCH: 1, "model.kv_heads": 8}
"""the options under which a layout is valid if it is under any"""
SIZES: Settings = {"training.global_batch_size": 24, "training.sequence_length": 48, **EASIEST}
"""what 1, 2, 3, 4, 6 and 8 ranks can share"""


def choices(key: str, layout: Layout) -> tuple[Any, ...]:
    """The values of a setting that make a difference in a layout, which has those before it; () if none does."""
    pp, replicas, shard, cp, tp = (layout.get(axis, 1) for axis in AXES)
    values = (LAYOUT | OPTIONS)[key]
    match key:
        case "parallel.schedule" | "parallel.virtual_stages":
            matters = pp > 1
        case "parallel.cp_method":
            matters = cp > 1
        case "parallel.sequence_parallel":
            matters = tp > 1
        case "parallel.scatter_gather":
            matters = pp > 1 and tp > 1 and not layout["parallel.sequence_parallel"]
        case "parallel.zero_stage":
            matters = shard * cp > 1
            if replicas > 1:  # stage 0 makes replicas of all of dp
                values = tuple(stage for stage in values if stage > 0)
        case "parallel.keep_last_block":
            matters = layout.get("parallel.zero_stage") == 3
        case "parallel.prefetch":
            matters = "parallel.zero_stage" in layout
        case _ if key in AXES:
            return tuple(degree for degree in values if degree * pp * replicas * shard * cp * tp <= MOST_RANKS)
        case _:
            matters = True
    return values if matters else ()


def combinations(keys: Sequence[str], layout: Layout) -> Iterator[Layout]:
    """`layout` with every combination of the settings `keys`."""
    if not keys:
        yield layout
        return
    values = choices(keys[0], layout)
    for more in [{keys[0]: value} for value in values] or [{}]:
        yield from combinations(keys[1:], {**layout, **more})


def settings_of(layout: Layout) -> Settings:
    """What `parity.tiny` needs: the layout, the sizes, and 4 blocks or as many more as its stages need."""
    stages = layout["parallel.pp"] * layout.get("parallel.virtual_stages", 1)
    return {**SIZES, "model.layers": 4 if stages <= 4 else 8, **layout}


def is_valid(layout: Layout) -> bool:
    """What the library says of a layout, with or without options."""
    config = with_settings(_TINY, settings_of(layout))
    return not any(problems(config, world_size(config)))


_TINY = tiny({})


class Lattice(NamedTuple):
    """What is valid and what is not."""

    layouts: list[Layout]
    refusals: Counter[str]
    """how many are refused for each reason, the numbers in it written #"""


@functools.cache
def lattice() -> Lattice:
    """Every combination of LAYOUT on up to 8 ranks."""
    found = Lattice([], Counter())
    last = [key for key in LAYOUT if not key.startswith("parallel.")]
    for layout in combinations([key for key in LAYOUT if key not in last], {}):
        config = tiny(settings_of(layout))
        for more in combinations(last, {}):
            reasons = list(problems(with_settings(config, more), world_size(config)))
            found.refusals.update({re.sub(r"\d+", "#", f"{reason.key}: {reason.message}") for reason in reasons})
            if not reasons:
                found.layouts.append({**layout, **more})
    return found


class Failed(AssertionError):
    """A layout that trains another model, or none: what was wrong, and the TOML and command to see it again."""


def compare(layout: Layout) -> float:
    """Train a layout and one process, with very unequal numbers of targets; the worst relative gradient error."""
    try:
        return check(settings_of(layout), ragged=True)
    except Exception as error:
        toml = dump_toml(tiny(settings_of(layout)))
        again = "to see it again: python -m tests.lattice FILE.toml, with this file:"
        raise Failed(f"{describe(layout)}\n{error}\n{again}\n\n{toml}") from error


def describe(layout: Layout) -> str:
    """A layout in one line."""
    return " ".join(f"{key.split('.')[1]}={value}" for key, value in layout.items() if not (key in AXES and value == 1))


def read_settings(file: str) -> Settings:
    """What a TOML file sets that the tiny config has otherwise. ValueError if something is wrong with it."""
    found: list[str] = []
    faults: list[Fault] = []
    config: Config = read_table(Config, read_files(file, found).table, faults)
    if found or faults:
        raise ValueError(f"{file}: {found} {faults}")
    plain, given = asdict(tiny({})), asdict(config)
    return {
        f"{section}.{key}": getattr(getattr(config, section), key)
        for section, keys in plain.items()
        for key, value in keys.items()
        if given[section][key] != value
    }


if __name__ == "__main__":
    try:
        print(f"worst relative gradient error {check(read_settings(sys.argv[1]), ragged=True):.1e}")
    finally:
        workers.POOL.stop()
