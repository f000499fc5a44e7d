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
    """Return the values of a setting that have an effect in a layout; () if none has.

    layout: has the settings that come before this one.
    """
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
    """Yield `layout` with every combination of the settings `keys`."""
    if not keys:
        yield layout
        return
    key, *following = keys
    values = choices(key, layout)
    if not values:
        yield from combinations(following, layout)
    for value in values:
        yield from combinations(following, {**layout, key: value})


def settings_of(layout: Layout) -> Settings:
    """Return the settings for `parity.tiny`: the layout, the sizes, and 4 blocks, or 8 where it has more stages."""
    stages = layout["parallel.pp"] * layout.get("parallel.virtual_stages", 1)
    return {**SIZES, "model.layers": 4 if stages <= 4 else 8, **layout}


def is_valid(layout: Layout) -> bool:
    """Return whether the library accepts a layout, with or without options."""
    config = with_settings(_TINY, settings_of(layout))
    return not any(problems(config, world_size(config)))


_TINY = tiny({})


class Lattice(NamedTuple):
    """The valid layouts, and why the others are refused."""

    layouts: list[Layout]
    refusals: Counter[str]
    """number of layouts refused for each reason, with # for the numbers in its text"""


@functools.cache
def lattice() -> Lattice:
    """Return every combination of LAYOUT on up to 8 ranks."""
    layouts: list[Layout] = []
    refusals: Counter[str] = Counter()
    parallel_keys = [key for key in LAYOUT if key.startswith("parallel.")]
    model_keys = [key for key in LAYOUT if not key.startswith("parallel.")]
    for parallel in combinations(parallel_keys, {}):
        config = tiny(settings_of(parallel))
        for model in combinations(model_keys, {}):
            reasons = list(problems(with_settings(config, model), world_size(config)))
            refusals.update({re.sub(r"\d+", "#", f"{reason.key}: {reason.message}") for reason in reasons})
            if not reasons:
                layouts.append({**parallel, **model})
    return Lattice(layouts, refusals)


class Failed(AssertionError):
    """A layout trains another model, or fails. The text has the reason, and the TOML and command to reproduce it."""


def compare(layout: Layout) -> float:
    """Train a layout and one process, with very unequal numbers of targets; returns the worst gradient error."""
    try:
        return check(settings_of(layout), ragged=True)
    except Exception as error:
        toml = dump_toml(tiny(settings_of(layout)))
        command = "to reproduce it: python -m tests.lattice FILE.toml, with this file:"
        raise Failed(f"{describe(layout)}\n{error}\n{command}\n\n{toml}") from error


def describe(layout: Layout) -> str:
    """Return a layout in one line, without the degrees that are 1."""
    words = []
    for key, value in layout.items():
        if key not in AXES or value > 1:
            words.append(f"{key.split('.')[1]}={value}")
    return " ".join(words)


def read_settings(file: str) -> Settings:
    """Return the settings of a TOML file that differ from the tiny config's. ValueError if the file is invalid."""
    errors: list[str] = []
    faults: list[Fault] = []
    config: Config = read_table(Config, read_files(file, errors).table, faults)
    if errors or faults:
        raise ValueError(f"{file}: {errors} {faults}")
    defaults, values = asdict(tiny({})), asdict(config)
    settings: Settings = {}
    for section, default_values in defaults.items():
        for key, default in default_values.items():
            if values[section][key] != default:
                settings[f"{section}.{key}"] = getattr(getattr(config, section), key)
    return settings


if __name__ == "__main__":
    try:
        print(f"worst relative gradient error {check(read_settings(sys.argv[1]), ragged=True):.1e}")
    finally:
        workers.POOL.stop()
