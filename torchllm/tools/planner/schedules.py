"""The order of computation of every pipeline rank in each of torch's schedules. No torch.

The lists are made from the published descriptions; they know no times and no waiting: a rank goes through its list and
waits for inputs that have not arrived. They equal torch's own, entry by entry
(`tests/tools/planner/test_schedules.py`), so that predictions from them hold for a pipelined step.

- GPipe (arXiv 1811.06965): all forwards, then all backwards.
- LoopedBFS (arXiv 2211.05953): the same, stage by stage, the backwards from the last micro batch to the first.
- 1F1B and Interleaved1F1B (arXiv 2104.04473, section 2.2): some forwards, then a forward and a backward in turns.
- InterleavedZeroBubble (arXiv 2401.10241, ZB-H1, with several stages per rank): the same with the gradients of the
  inputs; the gradients of the weights follow some actions later.
- ZBVZeroBubble (arXiv 2401.10241, section 6): two stages per rank, down the ranks and back up.
- DualPipeV (arXiv 2412.19437, folded in half as in github.com/deepseek-ai/DualPipe): a forward and a backward in pairs.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count
from typing import Literal, NamedTuple

from torchllm.config import Parallel
from torchllm.facts.stages import stage_of_rank

Kind = Literal["F", "I", "W", "B"]
"""forward; gradient of a stage's input; gradient of its weights; both gradients at once"""


class Action(NamedTuple):
    """One micro batch through one stage."""

    kind: Kind
    stage: int
    micro_batch: int


Entry = tuple[Action, ...]
"""one action, or a forward and a backward that belong together (DualPipeV): torch computes one after the other, and
sends neither result before both are there"""


def orders(parallel: Parallel, micro_batches: int) -> list[list[Entry]]:
    """Return the actions of each pipeline rank in a step, first to last.

    micro_batches: a number that `tools.config.checks.problems` allows. With pp = 1 the order is one stage's forward and
    backward of each micro batch in turn, whatever the schedule.
    """
    return [rank_order(parallel, micro_batches, rank) for rank in range(parallel.pp)]


def rank_order(parallel: Parallel, micro_batches: int, rank: int) -> list[Entry]:
    """Return one rank's part of `orders`."""
    schedules = {**_SCHEDULES, **PUBLISHED}
    order_of = schedules["1F1B" if parallel.pp == 1 else parallel.schedule]
    stages = stage_of_rank(parallel, rank)
    return list(order_of(_PipelineRank(rank, parallel.pp, stages, micro_batches)))


def flat(order: Iterable[Entry]) -> Iterator[Action]:
    """Yield the actions of an order, one after the other."""
    return chain.from_iterable(order)


class _PipelineRank(NamedTuple):
    """A rank of a pipeline, and the inputs of its order."""

    rank: int
    ranks: int
    stages: tuple[int, ...]
    """global indices of the rank's stages, first to last"""
    micro_batches: int

    @property
    def ranks_behind(self) -> int:
        """Number of ranks that come after this one in the pipeline."""
        return self.ranks - 1 - self.rank

    @property
    def round_size(self) -> int:
        """Micro batches that go through a stage before the rank turns to its next one.

        One per rank, or a few more where they do not divide (they divide by the rounds).
        """
        rounds = max(1, self.micro_batches // self.ranks)
        return self.micro_batches // rounds

    def breadth_first(self, kind: Kind) -> list[Action]:
        """Return the rank's work of one kind: every micro batch through one stage, then through the next."""
        actions = []
        for stage in self.stages:
            actions += [Action(kind, stage, number) for number in range(self.micro_batches)]
        return actions

    def depth_first(self, kind: Kind) -> list[Action]:
        """Return the same round by round: forwards from the first stage to the last, gradients from last to first."""
        stages = self.stages if kind == "F" else self.stages[::-1]
        actions = []
        for first in range(0, self.micro_batches, self.round_size):
            for stage in stages:
                actions += [Action(kind, stage, number) for number in range(first, first + self.round_size)]
        return actions


def _entries(actions: Iterable[Action]) -> Iterator[Entry]:
    """Yield each action as a single entry."""
    for action in actions:
        yield (action,)


def _in_turns(forwards: Sequence[Action], backwards: Sequence[Sequence[Action]], warm_up: int) -> Iterator[Entry]:
    """Yield `warm_up` forwards, then a forward and a backward in turns, then the remaining backwards.

    A backward is one action, or two where the gradients of inputs and of weights are computed apart.
    """
    yield from _entries(forwards[:warm_up])
    paired = forwards[warm_up:]
    for forward, backward in zip(paired, backwards, strict=False):
        yield (forward,)
        yield from _entries(backward)
    for backward in backwards[len(paired) :]:
        yield from _entries(backward)


def _gpipe(rank: _PipelineRank) -> Iterator[Entry]:
    yield from _entries(rank.breadth_first("F"))
    yield from _entries(rank.breadth_first("B"))


def _looped_bfs(rank: _PipelineRank) -> Iterator[Entry]:
    yield from _entries(rank.breadth_first("F"))
    yield from _entries(reversed(rank.breadth_first("B")))


def _one_forward_one_backward(rank: _PipelineRank) -> Iterator[Entry]:
    backwards = [[action] for action in rank.breadth_first("B")]
    return _in_turns(rank.breadth_first("F"), backwards, warm_up=rank.ranks_behind)


def _interleaved(rank: _PipelineRank) -> Iterator[Entry]:
    """Return the order of Interleaved1F1B.

    Its warm-up: a round through all stages but the last, and the forwards that fit in while a micro batch goes to the
    last rank and back.
    """
    backwards = [[action] for action in rank.depth_first("B")]
    warm_up = (len(rank.stages) - 1) * rank.round_size + 2 * rank.ranks_behind
    return _in_turns(rank.depth_first("F"), backwards, warm_up)


def _interleaved_zero_bubble(rank: _PipelineRank) -> Iterator[Entry]:
    """Return the order of ZB-H1: gradients of weights come `rank` actions after the gradients of inputs.

    So `rank` of them remain to fill the end of the step.
    """
    inputs = rank.depth_first("I")
    weights = [action._replace(kind="W") for action in inputs]
    backwards = []
    for index, action in enumerate(inputs):
        backward = [action]
        if index >= rank.rank:
            backward.append(weights[index - rank.rank])
        backwards.append(backward)
    postponed = min(rank.rank, len(weights))
    warm_up = (len(rank.stages) - 1) * rank.round_size + rank.ranks_behind
    yield from _in_turns(rank.depth_first("F"), backwards, warm_up)
    yield from _entries(weights[len(weights) - postponed :])


def _zero_bubble_h1(rank: _PipelineRank) -> Iterator[Entry]:
    """Return the order of ZB-H1 with one stage per rank: it has the same number of micro batches in flight as 1F1B."""
    return _interleaved_zero_bubble(rank)


def _zero_bubble_h2(rank: _PipelineRank) -> Iterator[Entry]:
    """Return the order of ZB-H2: twice the micro batches in flight of 1F1B fill the start of the step.

    The gradients of weights of the last 2 `rank` micro batches fill its end.
    """
    inputs = rank.breadth_first("I")
    first_postponed = max(0, len(inputs) - 2 * rank.rank)
    backwards = [[action, action._replace(kind="W")] for action in inputs[:first_postponed]]
    backwards += [[action] for action in inputs[first_postponed:]]
    warm_up = min(2 * rank.ranks_behind, rank.micro_batches - 1)
    yield from _in_turns(rank.breadth_first("F"), backwards, warm_up)
    yield from _entries(action._replace(kind="W") for action in inputs[first_postponed:])


UnnumberedOrder = list[tuple[tuple[Kind, int], ...]]
"""entries as (kind, stage) without micro batches: the n-th forward of a stage, and each of its gradients, is of the
n-th micro batch"""


def _one_by_one(*actions: tuple[Kind, int]) -> UnnumberedOrder:
    """Return an entry for each action."""
    return [(action,) for action in actions]


def _numbered(order: UnnumberedOrder) -> Iterator[Entry]:
    """Yield the entries with their micro batches."""
    numbers: defaultdict[tuple[Kind, int], count[int]] = defaultdict(count)
    for entry in order:
        actions = []
        for kind, stage in entry:
            if kind == "B":  # both gradients: it takes a number of each
                next(numbers["W", stage])
                number = next(numbers["I", stage])
            else:
                number = next(numbers[kind, stage])
            actions.append(Action(kind, stage, number))
        yield tuple(actions)


def _zero_bubble_v(rank: _PipelineRank) -> Iterator[Entry]:
    """Yield the published order, which has at least 2 ranks - 1 micro batches; of fewer, that order without the others.

    down, up: the stage on the way down the ranks, and the one on the way back.
    """
    down, up = rank.stages
    ranks_from_here = rank.ranks_behind + 1
    steps = max(rank.micro_batches, 2 * rank.ranks - 1) - rank.ranks
    forward_down = _one_by_one(("F", down))
    forward_up = _one_by_one(("F", up))
    backward_down = _one_by_one(("I", down), ("W", down))
    backward_up = _one_by_one(("I", up), ("W", up))
    order = forward_down * (2 * ranks_from_here - 1)
    order += (forward_up + forward_down) * rank.rank
    order += (forward_up + backward_up) * ranks_from_here
    order += (forward_down + backward_down + forward_up + backward_up) * (steps - rank.ranks_behind)
    order += (backward_down + forward_up + backward_up) * rank.ranks_behind
    order += _one_by_one(("I", down), ("I", up)) * rank.rank
    order += backward_down * ranks_from_here
    order += _one_by_one(("W", up)) * rank.rank
    order += _one_by_one(("W", down)) * rank.rank
    for entry in _numbered(order):
        if entry[0].micro_batch < rank.micro_batches:
            yield entry


def _dual_pipe_v(rank: _PipelineRank) -> Iterator[Entry]:
    """Return the order for at least two micro batches per rank.

    The gradients of weights of the last `ranks` backwards fill the end of the step.
    """
    down, up = rank.stages
    order = _dual_pipe_v_start(rank)
    down_and_back: UnnumberedOrder = [(("F", down), ("B", up))]
    up_and_back: UnnumberedOrder = [(("F", up), ("B", down))]
    steady = (down_and_back + up_and_back) * (rank.micro_batches - 2 * rank.ranks + rank.rank + 1)
    if rank.ranks_behind == 0:  # its first backward needs the forward just before it: they cannot run together
        steady[:1] = _one_by_one(("F", down), ("B", up))
    order += steady
    order += (_one_by_one(("B", up)) + up_and_back) * rank.ranks_behind
    order += _dual_pipe_v_end(rank)
    return _numbered(order)


def _dual_pipe_v_start(rank: _PipelineRank) -> UnnumberedOrder:
    """Return the forwards that fill the pipeline, and the first backwards."""
    down, up = rank.stages
    forward_down = _one_by_one(("F", down))
    forward_up = _one_by_one(("F", up))
    backward_up = _one_by_one(("I", up), ("W", up))
    order = forward_down * (2 * rank.ranks_behind)
    order += (forward_down + forward_up) * (rank.rank + 1)
    order += (backward_up + forward_up) * rank.ranks_behind
    return order


def _dual_pipe_v_end(rank: _PipelineRank) -> UnnumberedOrder:
    """Return the last backwards: some whole, then those whose gradients of weights are put off."""
    down, up = rank.stages
    stages = [up, down] * (rank.rank + 1) + [down] * rank.ranks_behind
    whole, halved = stages[: rank.rank + 1], stages[rank.rank + 1 :]
    postponed = iter(halved)
    order = _one_by_one(*(("B", stage) for stage in whole))
    order += _one_by_one(*(("I", stage) for stage in halved[: rank.rank + 1]))
    for stage in halved[rank.rank + 1 :]:
        order += _one_by_one(("W", next(postponed)), ("I", stage))
    order += _one_by_one(*(("W", stage) for stage in postponed))
    return order


_SCHEDULES: dict[str, Callable[[_PipelineRank], Iterator[Entry]]] = {
    "GPipe": _gpipe,
    "1F1B": _one_forward_one_backward,
    "Interleaved1F1B": _interleaved,
    "LoopedBFS": _looped_bfs,
    "InterleavedZeroBubble": _interleaved_zero_bubble,
    "ZBVZeroBubble": _zero_bubble_v,
    "DualPipeV": _dual_pipe_v,
}

PUBLISHED: dict[str, Callable[[_PipelineRank], Iterator[Entry]]] = {"ZB-H1": _zero_bubble_h1, "ZB-H2": _zero_bubble_h2}
"""schedules that torch does not have and others have published measurements of (arXiv 2401.10241)"""
