"""Pipeline balance: how long each stage takes, measured, and the split of the blocks that would even it out.

The split that a run starts with goes by operations (`planner/split.py`); kernels and machines are not that even. The
forwards of each stage are timed in the first steps; where the slowest is more than `UNEVEN` over the mean, the blocks
are split anew, at the next checkpoint, from which the run goes on with the new split: same weights, same samples.
"""

from collections.abc import Sequence

UNEVEN = 0.05
"""how much the slowest stage may be over the mean"""


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
