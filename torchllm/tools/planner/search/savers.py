"""Find the settings that would free most memory of a run, by the planner's predictions. No torch."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from torchllm.config import Config
from torchllm.config.schema import RecomputeMode
from torchllm.tools.config.checks import conflicts
from torchllm.tools.planner.search.auto import planned
from torchllm.tools.planner.search.explain import GIB

MODES: tuple[RecomputeMode, ...] = ("selective", "full")
"""values of recompute.mode that are tried"""


class Saver(NamedTuple):
    """One setting."""

    setting: str
    """as on the command line"""
    freed: float
    """bytes per rank"""
    slower: float
    """step time over the present one"""

    def __str__(self) -> str:
        return f"{self.setting} frees {self.freed / GIB:.3g} GiB per rank; steps take {self.slower:.2f} times as long"


def savers(config: Config, count: int = 3) -> list[Saver]:
    """Return the `count` settings that free most, each alone; empty if the machine is unknown or nothing helps.

    config: resolved.
    """
    today = planned(config)
    if today is None:
        return []
    helpful = []
    for setting, changed in _changes(config):
        if any(conflicts(changed, config.parallel.ranks)):
            continue
        prediction = planned(changed)
        if prediction is None or (today.has_room_on_host and not prediction.has_room_on_host):
            continue
        freed = today.memory.total - prediction.memory.total
        if freed > 0:
            helpful.append(Saver(setting, freed, prediction.step / today.step))
    helpful.sort(key=lambda saver: -saver.freed)
    return helpful[:count]


def _changes(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield settings that may free memory, as on the command line, each with the config that has it."""
    training, parallel, recompute = config.training, config.parallel, config.recompute
    for mode in MODES:
        if recompute.mode != mode:
            changed = replace(recompute, mode=mode, k=0)
            yield f"--recompute.mode={mode}", replace(config, recompute=changed)
    if recompute.mode in ("full", "segment") and not recompute.offload:
        yield "--recompute.offload=true", replace(config, recompute=replace(recompute, offload=True))
    if config.optimizer.name != "sgd" and config.optimizer.state_dtype == "float32":
        narrow = replace(config.optimizer, state_dtype="bfloat16")
        yield "--optimizer.state_dtype=bfloat16", replace(config, optimizer=narrow)
    if config.optimizer.ema_decay and not config.optimizer.ema_offload:
        yield "--optimizer.ema_offload=true", replace(config, optimizer=replace(config.optimizer, ema_offload=True))
    if config.optimizer.name == "adamw":
        if not config.optimizer.offload:
            yield "--optimizer.offload=true", replace(config, optimizer=replace(config.optimizer, offload=True))
        if training.weights_dtype == "float32":
            yield _training(config, "weights_dtype", "bfloat16")
    if training.micro_batch_size > 1:
        yield _training(config, "micro_batch_size", training.micro_batch_size // 2)
    if not training.loss_chunk:
        yield _training(config, "loss_chunk", 1024)
    for stage in range(parallel.zero + 1, 4):
        yield _parallel(config, zero_stage=stage)
    if parallel.tp > 1 and not parallel.sequence_parallel:
        yield _parallel(config, sequence_parallel=True)
    if parallel.tp > 1 and parallel.sequence_parallel and not parallel.regather:
        yield _parallel(config, regather=True)
    if parallel.dp_shard % 2 == 0:
        for axis in ("tp", "pp", "cp"):
            doubled = {axis: 2 * getattr(parallel, axis)}
            yield _parallel(config, **doubled, dp_shard=parallel.dp_shard // 2)


def _training(config: Config, key: str, value: int | str) -> tuple[str, Config]:
    """Return the setting of a key of [training], and the config that has it."""
    changes: dict[str, Any] = {key: value}
    training = replace(config.training, **changes)
    return f"--training.{key}={value}", replace(config, training=training)


def _parallel(config: Config, **values: Any) -> tuple[str, Config]:
    """Return the setting of keys of [parallel], and the config that has them."""
    settings = [f"--parallel.{key}={str(value).lower()}" for key, value in values.items()]
    parallel = replace(config.parallel, **values)
    return " ".join(settings), replace(config, parallel=parallel)
