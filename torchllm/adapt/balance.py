"""Pipeline balance: how long each stage takes, measured, and the split of the blocks that would even it out.

The split that a run starts with goes by operations (`planner/split.py`); kernels and machines are not that even. The
forwards of each stage are timed in the first steps; where the slowest is more than `UNEVEN` over the mean, the blocks
are split anew, at the next checkpoint, from which the run goes on with the new split: same weights, same samples.
"""

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

UNEVEN = 0.05
"""how much the slowest stage may be over the mean"""
STEPS = 5
"""that are timed, after the first"""


class StageClock:
    """Times the forwards of this rank's stages. Make it before the first step; `close` takes it off again."""

    def __init__(self, stages: Sequence[nn.Module], indices: Sequence[int], device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.marks: dict[int, list[tuple[Any, Any]]] = {index: [] for index in indices}
        self.began: dict[int, Any] = {}
        self.hooks = []
        for index, stage in zip(indices, stages, strict=True):
            self.hooks.append(stage.register_forward_pre_hook(lambda *_, index=index: self._begin(index)))
            self.hooks.append(stage.register_forward_hook(lambda *_, index=index: self._end(index)))

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _begin(self, index: int) -> None:
        self.began[index] = self._now()

    def _end(self, index: int) -> None:
        self.marks[index].append((self.began[index], self._now()))

    def seconds(self) -> dict[int, float]:
        """Of each stage's forward, the median."""
        if self.on_gpu:
            torch.cuda.synchronize()
            times = {i: [a.elapsed_time(b) / 1000 for a, b in marks] for i, marks in self.marks.items()}
        else:
            times = {i: [b - a for a, b in marks] for i, marks in self.marks.items()}
        return {index: median(found) for index, found in times.items() if found}

    def close(self) -> None:
        """No more is timed."""
        for hook in self.hooks:
            hook.remove()


def gathered(seconds: dict[int, float], group: dist.ProcessGroup) -> list[float]:
    """The times of all stages, first to last, on every rank: of ranks that hold the same stage the median."""
    theirs: list[dict[int, float]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(theirs, seconds, group=group)
    indices = sorted({index for found in theirs for index in found})
    return [median(found[index] for found in theirs if index in found) for index in indices]


def better_split(split: Sequence[int], seconds: Sequence[float], ends: tuple[float, float]) -> tuple[int, ...] | None:
    """The split whose slowest stage is fastest, if it is at least `UNEVEN` / 2 faster; None where all is even.

    split: blocks of each stage. seconds: of each. ends: the embedding's and the head's share of the first and the last
    stage's, as fractions. A block that moves takes along what the blocks of its stage cost.
    """
    if max(seconds) <= (1 + UNEVEN) * sum(seconds) / len(seconds):
        return None
    fixed = [0.0] * len(split)
    fixed[0] += ends[0] * seconds[0]
    fixed[-1] += ends[1] * seconds[-1]
    blocks = [(s - f) / n for n, s, f in zip(split, seconds, fixed, strict=True) for _ in range(n)]
    best = partition(blocks, fixed)
    slowest = max(_stages(best, blocks, fixed))
    return best if slowest < (1 - UNEVEN / 2) * max(seconds) else None


def partition(blocks: Sequence[float], fixed: Sequence[float]) -> tuple[int, ...]:
    """Blocks a stage, one at least, in order, so that the largest sum, `fixed` added, is least."""
    count, stages = len(blocks), len(fixed)
    before = [0.0]
    for cost in blocks:
        before.append(before[-1] + cost)
    # best[n]: least largest sum of the first n blocks over the stages so far, and how many of them the last one has
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(stages):
        here: dict[int, tuple[float, int]] = {}
        for n in range(stage + 1, count - (stages - stage - 1) + 1):
            ways = [
                (max(best[-1][m][0], before[n] - before[m] + fixed[stage]), n - m) for m in range(n) if m in best[-1]
            ]
            here[n] = min(ways)
        best.append(here)
    found, n = [], count
    for stage in range(stages, 0, -1):
        found.append(best[stage][n][1])
        n -= found[-1]
    return tuple(reversed(found))


def _stages(split: Sequence[int], blocks: Sequence[float], fixed: Sequence[float]) -> list[float]:
    found, at = [], 0
    for count, own in zip(split, fixed, strict=True):
        found.append(sum(blocks[at : at + count]) + own)
        at += count
    return found
