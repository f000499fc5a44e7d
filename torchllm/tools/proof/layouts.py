"""All layouts of a config that the library accepts on a number of ranks.

A *layout* is a dict of the settings that make a difference in it, by dotted key: where `parallel.pp` is 1 there is no
schedule, where `parallel.cp` is 1 no `cp_method`, so no two are the same one. (But `dp_replicate` alone and `dp_shard`
at `zero_stage` 0 are two words for DDP; both are there.) Whether one is valid is decided by
`torchllm.tools.config.checks.problems`.

`parallel.split` is "balanced" or "uneven", and `model.layers` is doubled where a pipeline has more stages than the
model has blocks.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args

from torchllm import config as c
from torchllm.config import SCHEDULES, Config, Kinds
from torchllm.config.schema import AXES as AXIS_NAMES
from torchllm.tools.config.checks import problems

C = TypeVar("C", bound=Config)
Settings = dict[str, Any]
"""dotted keys and values: {"parallel.tp": 2}"""
AXES = tuple(f"parallel.{axis}" for axis in AXIS_NAMES)
MICRO_BATCH = "training.micro_batch_size"
SPLIT = "parallel.split"
"""its values are no values of the config"""
BALANCED, UNEVEN = "balanced", "uneven"

PARALLEL: dict[str, tuple[Any, ...]] = {
    "parallel.schedule": tuple(SCHEDULES),
    "parallel.virtual_stages": (1, 2, 3, 4),
    "parallel.cp_method": ("ring", "ulysses"),
    "parallel.sequence_parallel": (False, True),
    "parallel.scatter_gather": (True, False),
    "parallel.zero_stage": (3, 2, 1, 0),
    "parallel.ep": (1, 2, 4),
}
"""settings of [parallel] that change how a step is computed, in addition to the degrees"""
RECOMPUTE: dict[str, tuple[Any, ...]] = {"recompute.mode": get_args(c.Recompute.__annotations__["mode"])}
OPTIONS: dict[str, tuple[Any, ...]] = {
    MICRO_BATCH: (24, 12, 8, 6, 4, 3, 2, 1),
    SPLIT: (BALANCED, UNEVEN),
    "recompute.k": (0, 1, 3),
    "training.loss_chunk": (0, 20),  # 20 divides no micro batch's tokens
    "parallel.keep_last_block": (True, False),
    "parallel.prefetch": (1, 0, 2),
    "parallel.regather": (False, True),
}
"""further settings of a layout; each drawn layout gets some of them"""
OPTIONS_OF_EXPERTS: dict[str, tuple[Any, ...]] = {
    "parallel.expert_dispatch": ("exact", "optimistic"),
    "parallel.expert_chunks": (1, 2, 3),
}
"""the same for a model with experts"""


def degrees(most_ranks: int) -> dict[str, tuple[Any, ...]]:
    """Return the degrees that each axis may have on `most_ranks` ranks."""
    return dict.fromkeys(AXES, tuple(range(1, most_ranks + 1)))


def with_settings(config: C, settings: Mapping[str, Any]) -> C:
    """Return the config with some keys changed, also keys of kinds of blocks: "model.kinds.local.window"."""
    values_of_section: dict[str, Settings] = {}
    for key, value in settings.items():
        section, name, *of_kind = key.split(".")
        values = values_of_section.setdefault(section, {})
        if of_kind:
            kind, name_of_kind = of_kind
            kinds = values.get(name, config.model.kinds)
            values[name] = Kinds(kinds | {kind: kinds[kind] | {name_of_kind: value}})
        else:
            values[name] = value
    sections: dict[str, Any] = {}
    for section, values in values_of_section.items():
        sections[section] = replace(getattr(config, section), **values)
    return replace(config, **sections)


@dataclass(frozen=True)
class LayoutSpace:
    """The settings that make up layouts, over a config with degrees of 1."""

    base: Config
    combined: Mapping[str, tuple[Any, ...]]
    """values of the settings that are all combined with each other, the degrees first"""
    options: Mapping[str, tuple[Any, ...]]
    """values of the further settings; a drawn layout gets some of them"""
    most_ranks: int

    @property
    def settings(self) -> dict[str, tuple[Any, ...]]:
        """Values of all settings."""
        return {**self.combined, **self.options}

    def sized(self, layout: Settings) -> Config:
        """Return the base with sizes that a layout can divide: at least a block per stage."""
        layers = self.base.model.layers
        if stages_of(layout) > layers:
            layers *= 2
        return replace(self.base, model=replace(self.base.model, layers=layers))

    def config(self, layout: Settings) -> Config:
        """Return the config of a layout."""
        return with_settings(self.sized(layout), self.keys_of(layout))

    def keys_of(self, layout: Settings) -> Settings:
        """Return the keys of the config that a layout sets, and their values."""
        keys = dict(layout)
        split = keys.pop(SPLIT, BALANCED)
        if split == UNEVEN:
            last = stages_of(layout) - 1
            keys[SPLIT] = (1,) * last + (self.sized(layout).model.layers - last,)
        return keys

    def is_valid(self, layout: Settings) -> bool:
        """Return whether the library accepts a layout, with or without options."""
        config = self.config(layout)
        return not problems(config, config.parallel.ranks)

    def choices(self, key: str, layout: Settings) -> tuple[Any, ...]:
        """Return the values of a setting that have an effect in a layout; () if none has.

        layout: has the settings that come before this one.
        """
        pp, replicas, shard, cp, tp = (layout.get(axis, 1) for axis in AXES)
        values = self.settings[key]
        match key:
            case "parallel.schedule" | "parallel.virtual_stages":
                matters = pp > 1
            case "parallel.split":
                matters = pp > 1 and stages_of(layout) < self.sized(layout).model.layers
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
            case "parallel.ep":
                experts, ranks = self.base.model.experts, shard * cp * tp
                values = tuple(ep for ep in values if experts % ep == ranks % ep == 0)
                matters = experts > 0 and len(values) > 1 and layout.get("parallel.zero_stage") != 0
            case "parallel.expert_dispatch" | "parallel.expert_chunks":
                matters = layout.get("parallel.ep", 1) > 1
            case "parallel.keep_last_block":
                matters = layout.get("parallel.zero_stage") == 3
            case "parallel.prefetch":
                matters = "parallel.zero_stage" in layout
            case "parallel.regather":
                recomputes_all = layout["recompute.mode"] in ("full", "segment")
                matters = layout.get("parallel.sequence_parallel", False) and not recomputes_all
            case "recompute.k":
                matters = layout["recompute.mode"] in ("segment", "every_k")
            case _ if key in AXES:
                ranks = pp * replicas * shard * cp * tp
                return tuple(degree for degree in values if degree * ranks <= self.most_ranks)
            case _:
                matters = True
        return values if matters else ()

    def combinations(self, keys: Sequence[str], layout: Settings) -> Iterator[Settings]:
        """Yield `layout` with every combination of the settings `keys`."""
        if not keys:
            yield layout
            return
        key, *following = keys
        values = self.choices(key, layout)
        if not values:
            yield from self.combinations(following, layout)
        for value in values:
            yield from self.combinations(following, {**layout, key: value})

    def valid_layouts(self) -> list[Settings]:
        """Return every valid combination of the combined settings, on up to `most_ranks` ranks."""
        layouts: list[Settings] = []
        parallel_keys = [key for key in self.combined if key.startswith("parallel.")]
        other_keys = [key for key in self.combined if not key.startswith("parallel.")]
        for parallel in self.combinations(parallel_keys, {}):
            config = self.config(parallel)
            for other in self.combinations(other_keys, {}):
                if not problems(with_settings(config, other), config.parallel.ranks):
                    layouts.append({**parallel, **other})
        return layouts


def ranks_of(layout: Settings) -> int:
    """Return the number of ranks of a layout."""
    ranks = 1
    for axis in AXES:
        ranks *= layout[axis]
    return ranks


def stages_of(layout: Settings) -> int:
    """Return the number of pipeline stages of a layout."""
    stages: int = layout["parallel.pp"] * layout.get("parallel.virtual_stages", 1)
    return stages


def short_name(key: str) -> str:
    """Return the name of a setting in the line of a layout: keys of [parallel] and [training] without their section."""
    return re.sub("^(parallel|training)[.]", "", key)


def describe_layout(layout: Settings) -> str:
    """Return a layout in one line, without the degrees that are 1."""
    words = [f"{short_name(key)}={value}" for key, value in layout.items() if key not in AXES or value > 1]
    return " ".join(words)
