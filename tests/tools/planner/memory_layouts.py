"""Layouts of every model of train_configs/models, and what the planner and the dry run say of their memory.

A model has its true widths and a few blocks, so that a trace takes seconds. `covering` draws layouts of a model in
which every pair of settings occurs that the config accepts.
"""

import itertools
import random
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.tools.dry_run import preload
from tests.tools.planner.test_comms import cluster
from torchllm import config as c
from torchllm.config.schema import Lora, RecomputeMode
from torchllm.tools.config.checks import problems
from torchllm.tools.config.read import read_table
from torchllm.tools.dry_run.run import examine
from torchllm.tools.planner.case import Case
from torchllm.tools.planner.compute import Kernels
from torchllm.tools.planner.frozen_weights import with_frozen_weights
from torchllm.tools.planner.optimizer_states import with_optimizer_states
from torchllm.tools.planner.peak import Memory
from torchllm.tools.planner.predict import memory_of, stage_sizes
from torchllm.tools.planner.software import TORCHLLM

MODELS = Path(__file__).parents[3] / "train_configs" / "models"
NAMES = sorted(path.stem for path in MODELS.glob("*.toml"))
GPU = c.Cluster(name="dgx_h100")
"""traced as a GPU's kernels hold memory"""


@cache
def read_model(name: str) -> c.Model:
    """Return the model of a file of train_configs/models."""
    table = tomllib.loads((MODELS / f"{name}.toml").read_text())["model"]
    return read_table(c.Model, table, [])


Settings = dict[str, Any]
"""keys of a config, as parallel.tp, and their values"""

RECOMPUTE: dict[str, Settings] = {
    mode: {"recompute.mode": mode}
    for mode in ("none", "full", "segment", "every_k", "ffn", "selective", "selective_half")
}
TENSOR: dict[str, Settings] = {
    "tp 1": {"parallel.tp": 1},
    "tp 2": {"parallel.tp": 2},
    "tp 2, sp": {"parallel.tp": 2, "parallel.sequence_parallel": True},
    "tp 4": {"parallel.tp": 4},
    "tp 8, sp": {"parallel.tp": 8, "parallel.sequence_parallel": True},
}
CONTEXT: dict[str, Settings] = {
    "cp 1": {"parallel.cp": 1},
    "ring 2": {"parallel.cp": 2, "parallel.cp_method": "ring"},
    "ring 4": {"parallel.cp": 4, "parallel.cp_method": "ring"},
    "ulysses 2": {"parallel.cp": 2, "parallel.cp_method": "ulysses"},
}
PIPELINE: dict[str, Settings] = {
    "pp 1": {"parallel.pp": 1},
    "pp 2": {"parallel.pp": 2, "parallel.schedule": "1F1B"},
    "pp 4": {"parallel.pp": 4, "parallel.schedule": "1F1B"},
    "pp 2, interleaved": {"parallel.pp": 2, "parallel.schedule": "Interleaved1F1B"},
    "pp 2, all forwards first": {"parallel.pp": 2, "parallel.schedule": "GPipe"},
    "pp 2, zero bubble": {"parallel.pp": 2, "parallel.schedule": "ZBVZeroBubble"},
}
SHARDING: dict[str, Settings] = {
    "ZeRO 3": {"parallel.dp_shard": 4, "parallel.zero_stage": 3},
    "ZeRO 2": {"parallel.dp_shard": 4, "parallel.zero_stage": 2},
    "ZeRO 1": {"parallel.dp_shard": 4, "parallel.zero_stage": 1},
    "DDP": {"parallel.dp_shard": 1, "parallel.dp_replicate": 4, "parallel.zero_stage": 0},
    "one": {"parallel.dp_shard": 1},
}
BATCH: dict[str, Settings] = {
    "one micro batch": {"training.micro_batch_size": 1, "micro_batches": 1},
    "micro batches": {"training.micro_batch_size": 1, "micro_batches": 4},
    "larger micro batches": {"training.micro_batch_size": 4, "micro_batches": 4},
}
LOSS: dict[str, Settings] = {
    "whole logits": {"training.loss_chunk": 0},
    "logits in chunks": {"training.loss_chunk": 256},
}
DOCUMENTS: dict[str, Settings] = {
    "no mask": {"data.document_mask": False},
    "document mask": {"data.document_mask": True},
}
EXPERTS: dict[str, Settings] = {
    "ep 1": {"parallel.ep": 1},
    "ep 2": {"parallel.ep": 2},
    "ep 8": {"parallel.ep": 8},
}
LORA: dict[str, Settings] = {
    "all weights": {"lora.rank": 0},
    "LoRA": {"lora.rank": 16},
}
POOL = 3000
"""layouts that `covering` chooses from"""
AXES = (RECOMPUTE, TENSOR, CONTEXT, PIPELINE, SHARDING, BATCH, LOSS, DOCUMENTS)


class Choice(NamedTuple):
    """A model, and the name of its setting on each axis."""

    model: str
    names: tuple[str, ...]

    @property
    def label(self) -> str:
        """The choice in words."""
        return ": ".join((self.model, " | ".join(self.names)))


def axes_of(name: str) -> list[dict[str, Settings]]:
    """Return the axes on which layouts of a model differ."""
    model = read_model(name)
    if model.experts:
        return [*AXES, EXPERTS]
    if model.family == "llama":
        return [*AXES, LORA]
    return [*AXES]


def tables_of(choice: Choice) -> dict[str, Settings]:
    """Return the settings of a choice by the section of the config; those of no section by ""."""
    settings: Settings = {}
    for axis, name in zip(axes_of(choice.model), choice.names, strict=True):
        settings |= axis[name]
    tables: dict[str, Settings] = {}
    for key, value in settings.items():
        section, _, field = key.rpartition(".")
        table = tables.setdefault(section, {})
        table[field] = value
    return tables


def build_config(choice: Choice) -> c.Config:
    """Return the config of a choice. The number of blocks follows from the number of stages."""
    tables = tables_of(choice)
    parallel = c.Parallel(**tables["parallel"])
    whole_model = read_model(choice.model)
    blocks = max(3, 2 * parallel.stages, len(whole_model.pattern))
    model = replace(whole_model, layers=blocks, dense_layers=min(whole_model.dense_layers, 1))
    micro_batches = tables[""]["micro_batches"]
    if parallel.pp > 1:
        micro_batches *= 2
    batch = tables["training"]
    batch["global_batch_size"] = micro_batches * batch["micro_batch_size"] * parallel.data_ranks
    training = c.Training(**batch, sequence_length=2048, dtype="bfloat16")
    return c.Config(
        model=model,
        parallel=parallel,
        training=training,
        recompute=c.Recompute(**tables["recompute"]),
        data=c.Data(**tables["data"]),
        lora=Lora(**tables.get("lora", {})),
        cluster=GPU,
    )


def is_valid(config: c.Config) -> bool:
    """Whether the config's own checks accept a layout."""
    return not problems(config, config.parallel.ranks)


def pairs_of(names: Sequence[str]) -> set[Any]:
    return set(itertools.combinations(enumerate(names), 2))


TOYS = ("debug", "moe_debug")
"""models whose few MB are less than what the formulas omit: a step's messages, its recomputed blocks"""


def models_like(name: str) -> tuple[str, ...]:
    """Return the models that hold the same kinds of tensors: they differ in sizes."""

    def kind(name: str) -> tuple[bool, str, bool, frozenset[str]]:
        model = read_model(name)
        return bool(model.experts), model.family, model.tied_embeddings, frozenset(view.mixer for view in model.views)

    return tuple(other for other in NAMES if other not in TOYS and kind(other) == kind(name))


@cache
def covering(models: tuple[str, ...], seed: int = 0) -> list[Choice]:
    """Return layouts of like models in which every pair of settings, and of a model and a setting, occurs.

    Pairs of which none of `POOL` drawn layouts that are valid has both do not count.
    """
    draw = random.Random(seed)
    names_of_axes = [list(axis) for axis in axes_of(models[0])]
    valid = []
    for _ in range(POOL):
        choice = Choice(draw.choice(models), tuple(draw.choice(names) for names in names_of_axes))
        if is_valid(build_config(choice)):
            valid.append(choice)
    pairs = {choice: pairs_of((choice.model, *choice.names)) for choice in valid}
    missing: set[Any] = set().union(*pairs.values())
    drawn: list[Choice] = []
    while missing:
        best = max(valid, key=lambda choice: len(pairs[choice] & missing))
        drawn.append(best)
        missing -= pairs[best]
    return drawn


def case_of(config: c.Config, fused_norm: bool = True, compiled_loss: bool = False) -> Case:
    """Return a layout as the planner takes it, with equal loads of experts."""
    model, parallel, training = config.model, config.parallel, config.training
    attention = "eager" if model.attention == "eager" else "flash2"
    fused_norm = fused_norm and not model.norm_offset  # of which a GPU has no kernel, either
    kernels = Kernels(attention, fused_norm=fused_norm, compiled_loss=compiled_loss, graphs=config.compile.graphs)
    software = with_optimizer_states(TORCHLLM, model, training, config.optimizer)
    software = with_frozen_weights(software, model, config.trained)
    hardware = cluster("dgx_h100")  # bytes do not depend on it
    of_run = model, training, parallel, config.recompute, kernels, hardware, software, config.trained, config.optimizer
    return Case(*of_run, imbalance=1.0)


def planned_memory(config: c.Config, rank: int = 0, fused_norm: bool = True, compiled_loss: bool = False) -> Memory:
    """Return what the planner says of a pipeline rank."""
    case = case_of(config, fused_norm, compiled_loss)
    return memory_of(case, stage_sizes(case), rank)


def peak_errors(
    model: c.Model,
    layout: dict[str, Any],
    mode: RecomputeMode,
    chunk: int = 0,
    micro_batches: int = 4,
    document_mask: bool = False,
) -> dict[int, float]:
    """Return the planned peak over the traced one, minus 1, by pipeline rank.

    layout: of [parallel]. chunk: tokens of the loss. Micro batches have one sequence of 4,096 tokens.
    """
    preload()
    parallel = c.Parallel(dp_replicate=1, **layout)
    training = c.Training(
        sequence_length=4096,
        dtype="bfloat16",
        micro_batch_size=1,
        global_batch_size=micro_batches * parallel.data_ranks,
        loss_chunk=chunk,
    )
    recompute, data = c.Recompute(mode=mode), c.Data(document_mask=document_mask)
    config = c.Config(model=model, parallel=parallel, training=training, recompute=recompute, data=data, cluster=GPU)
    kinds = examine(config).kinds
    return {kind.shown: planned_memory(config, kind.shown).live / sum(kind.memory.values()) - 1 for kind in kinds}


class Compared(NamedTuple):
    """A pipeline rank's peak: by the planner, and by the dry run."""

    choice: Choice
    rank: int
    planned: Memory
    traced: dict[str, int]

    @property
    def difference(self) -> float:
        """The planner's bytes over the dry run's, minus 1."""
        return self.planned.live / sum(self.traced.values()) - 1


def compare(choice: Choice) -> Iterator[Compared]:
    """Yield every kind of pipeline rank of a layout."""
    config = build_config(choice)
    preload()
    for kind in examine(config).kinds:
        yield Compared(choice, kind.shown, planned_memory(config, kind.shown), dict(kind.memory))
