"""Find the settings that would free most memory of a run, by the planner's predictions. No torch."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from torchllm.config import Config
from torchllm.config.checks import problems
from torchllm.planner.search.auto import planned
from torchllm.planner.search.explain import GIB


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
    found = []
    for setting, changed in _changes(config):
        if not problems(changed, config.parallel.ranks) and (then := planned(changed)):
            found.append(Saver(setting, today.memory.total - then.memory.total, then.step / today.step))
    return sorted((saver for saver in found if saver.freed > 0), key=lambda saver: -saver.freed)[:count]


def _changes(config: Config) -> Iterator[tuple[str, Config]]:
    training, parallel, recompute = config.training, config.parallel, config.recompute
    for mode in ("selective", "full"):
        if recompute.mode != mode:
            yield f"--recompute.mode={mode}", replace(config, recompute=replace(recompute, mode=mode, k=0))
    if training.micro_batch_size > 1:
        size = training.micro_batch_size // 2
        yield f"--training.micro_batch_size={size}", replace(config, training=replace(training, micro_batch_size=size))
    if not training.loss_chunk:
        yield "--training.loss_chunk=1024", replace(config, training=replace(training, loss_chunk=1024))
    for stage in range(parallel.zero_stage + 1, 4):
        yield f"--parallel.zero_stage={stage}", replace(config, parallel=replace(parallel, zero_stage=stage))
    if parallel.tp > 1 and not parallel.sequence_parallel:
        yield "--parallel.sequence_parallel=true", replace(config, parallel=replace(parallel, sequence_parallel=True))
    for axis in ("tp", "pp", "cp"):
        if parallel.dp_shard % 2 == 0:
            wider = {axis: 2 * getattr(parallel, axis), "dp_shard": parallel.dp_shard // 2}
            setting = " ".join(f"--parallel.{key}={value}" for key, value in wider.items())
            yield setting, replace(config, parallel=replace(parallel, **wider))
