"""The order in which every pipeline rank computes, for each of torch's schedules. No torch.

The lists are made from the papers; they know no times and no waiting: a rank goes through its list and waits where
something has not arrived. They equal torch's own, entry by entry (`tests/spec/test_schedules.py`), so what is
simulated and counted from them is what a pipelined step runs.

- GPipe (arXiv 1811.06965): all forwards, then all backwards.
- LoopedBFS (arXiv 2211.05953): the same, stage by stage, the backwards from the last micro batch to the first.
- 1F1B and Interleaved1F1B (arXiv 2104.04473, section 2.2): some forwards, then a forward and a backward in turns.
- InterleavedZeroBubble (arXiv 2401.10241, ZB-H1, with several stages a rank): the same with the gradients of the
  inputs; those of the weights follow some actions later.
- ZBVZeroBubble (arXiv 2401.10241, section 6): two stages a rank, down the ranks and back up.
- DualPipeV (arXiv 2412.19437, folded in half as in github.com/deepseek-ai/DualPipe): a forward and a backward in pairs.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count
from typing import Literal, NamedTuple

from torchllm.config import Parallel
from torchllm.spec.stages import stage_of_rank

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
    """What each pipeline rank computes in a step, first to last; `micro_batches` as `config.problems` allows.

    With pp = 1 that is one stage's forward and backward of each micro batch in turn, whatever the schedule.
    """
    return [rank_order(parallel, micro_batches, rank) for rank in range(parallel.pp)]


def rank_order(parallel: Parallel, micro_batches: int, rank: int) -> list[Entry]:
    """One rank's part of `orders`."""
    order_of = {**_SCHEDULES, **PUBLISHED}["1F1B" if parallel.pp == 1 else parallel.schedule]
    return list(order_of(_PipelineRank(rank, parallel.pp, stage_of_rank(parallel, rank), micro_batches)))


def flat(order: Iterable[Entry]) -> Iterator[Action]:
    """The actions of an order, one after the other."""
    return chain.from_iterable(order)


class _PipelineRank(NamedTuple):
    """What a rank's order follows from."""

    rank: int
    ranks: int
    stages: tuple[int, ...]
    micro_batches: int

    @property
    def after(self) -> int:
        """Ranks after this one."""
        return self.ranks - 1 - self.rank

    @property
    def round(self) -> int:
        """Micro batches that go through a stage before the rank turns to its next: as many as there are ranks, or a few
        more where they do not divide (they divide by the rounds)."""
        return self.micro_batches // max(1, self.micro_batches // self.ranks)

    def breadth_first(self, kind: Kind) -> list[Action]:
        """All of the rank's work of one kind, every micro batch through one stage, then through the next."""
        return [Action(kind, stage, number) for stage in self.stages for number in range(self.micro_batches)]

    def depth_first(self, kind: Kind) -> list[Action]:
        """The same round by round: forwards down its stages, gradients up."""
        stages = self.stages if kind == "F" else self.stages[::-1]
        rounds = [range(first, first + self.round) for first in range(0, self.micro_batches, self.round)]
        return [Action(kind, stage, number) for batches in rounds for stage in stages for number in batches]


def _alone(actions: Iterable[Action]) -> Iterator[Entry]:
    return ((action,) for action in actions)


def _in_turns(forwards: Sequence[Action], backwards: Sequence[Sequence[Action]], ahead: int) -> Iterator[Entry]:
    """`ahead` forwards, then one and a backward in turns, then the backwards that are left."""
    together = len(forwards[ahead:])
    turns = ([forward, *backward] for forward, backward in zip(forwards[ahead:], backwards, strict=False))
    return _alone(chain(forwards[:ahead], *turns, *backwards[together:]))


def _gpipe(me: _PipelineRank) -> Iterator[Entry]:
    return _alone([*me.breadth_first("F"), *me.breadth_first("B")])


def _looped_bfs(me: _PipelineRank) -> Iterator[Entry]:
    return _alone([*me.breadth_first("F"), *reversed(me.breadth_first("B"))])


def _one_forward_one_backward(me: _PipelineRank) -> Iterator[Entry]:
    return _in_turns(me.breadth_first("F"), [[action] for action in me.breadth_first("B")], me.after)


def _interleaved(me: _PipelineRank) -> Iterator[Entry]:
    """Ahead: a round through all stages but the last, and what fits in while a micro batch goes to the last rank and
    back."""
    ahead = (len(me.stages) - 1) * me.round + 2 * me.after
    return _in_turns(me.depth_first("F"), [[action] for action in me.depth_first("B")], ahead)


def _interleaved_zero_bubble(me: _PipelineRank) -> Iterator[Entry]:
    """Gradients of weights are `rank` actions behind those of the inputs: so many are left to fill the end."""
    inputs, none = me.depth_first("I"), list[Action]()
    weights = [none] * me.rank + [[action._replace(kind="W")] for action in inputs]
    backwards = [[action, *late] for action, late in zip(inputs, weights, strict=False)]
    ahead = (len(me.stages) - 1) * me.round + me.after
    return chain(_in_turns(me.depth_first("F"), backwards, ahead), _alone(chain(*weights[len(inputs) :])))


def _zero_bubble_h1(me: _PipelineRank) -> Iterator[Entry]:
    """One stage a rank, as many micro batches in flight as in 1F1B; gradients of weights are `rank` actions late."""
    return _interleaved_zero_bubble(me)


def _zero_bubble_h2(me: _PipelineRank) -> Iterator[Entry]:
    """Twice as many in flight fill the start; weights' gradients of the last 2 `rank` micro batches fill the end."""
    inputs = me.breadth_first("I")
    late = inputs[max(0, len(inputs) - 2 * me.rank) :]
    backwards = [[action] if action in late else [action, action._replace(kind="W")] for action in inputs]
    ahead = min(2 * me.after, me.micro_batches - 1)
    return chain(
        _in_turns(me.breadth_first("F"), backwards, ahead), _alone(action._replace(kind="W") for action in late)
    )


UnnumberedOrder = list[tuple[tuple[Kind, int], ...]]
"""entries without their micro batches: the n-th forward of a stage, and each of its gradients, is of the n-th"""


def _one_by_one(*each: tuple[Kind, int]) -> UnnumberedOrder:
    return [(work,) for work in each]


def _numbered(plan: UnnumberedOrder) -> Iterator[Entry]:
    numbers: defaultdict[tuple[Kind, int], count[int]] = defaultdict(count)
    for entry in plan:
        actions = []
        for kind, stage in entry:
            if kind == "B":  # both gradients: that of the weights is done too
                next(numbers["W", stage])
            actions.append(Action(kind, stage, next(numbers["I" if kind == "B" else kind, stage])))
        yield tuple(actions)


def _zero_bubble_v(me: _PipelineRank) -> Iterator[Entry]:
    """Return the published order of at least 2 ranks - 1 micro batches; of fewer, that order without the others."""
    down, up = me.stages
    here_on, steps = me.after + 1, max(me.micro_batches, 2 * me.ranks - 1) - me.ranks
    forward_down, backward_down = _one_by_one(("F", down)), _one_by_one(("I", down), ("W", down))
    forward_up, backward_up = _one_by_one(("F", up)), _one_by_one(("I", up), ("W", up))
    fill = forward_down * (2 * here_on - 1) + (forward_up + forward_down) * me.rank
    fill += (forward_up + backward_up) * here_on
    steady = (forward_down + backward_down + forward_up + backward_up) * (steps - me.after)
    steady += (backward_down + forward_up + backward_up) * me.after
    drain = _one_by_one(("I", down), ("I", up)) * me.rank + backward_down * here_on
    drain += _one_by_one(("W", up)) * me.rank + _one_by_one(("W", down)) * me.rank
    return (entry for entry in _numbered(fill + steady + drain) if entry[0].micro_batch < me.micro_batches)


def _dual_pipe_v(me: _PipelineRank) -> Iterator[Entry]:
    """Of at least twice as many micro batches as ranks. The last `ranks` gradients of weights fill the end."""
    down, up = me.stages
    steps = me.micro_batches - 2 * me.ranks + me.rank + 1
    forward_down, forward_up = _one_by_one(("F", down)), _one_by_one(("F", up))
    down_and_back: UnnumberedOrder = [(("F", down), ("B", up))]
    up_and_back: UnnumberedOrder = [(("F", up), ("B", down))]
    fill = forward_down * (2 * me.after) + (forward_down + forward_up) * (me.rank + 1)
    fill += (_one_by_one(("I", up), ("W", up)) + forward_up) * me.after
    steady = (down_and_back + up_and_back) * steps
    if not me.after:  # the last rank's first backward needs its forward of just before: no use to run them together
        steady[:1] = _one_by_one(("F", down), ("B", up))
    steady += (_one_by_one(("B", up)) + up_and_back) * me.after
    last = [up, down] * (me.rank + 1) + [down] * me.after
    whole, halved = last[: me.rank + 1], last[me.rank + 1 :]
    weights = iter(halved)
    drain = _one_by_one(*(("B", stage) for stage in whole), *(("I", stage) for stage in halved[: me.rank + 1]))
    for stage in halved[me.rank + 1 :]:
        drain += _one_by_one(("W", next(weights)), ("I", stage))
    drain += _one_by_one(*(("W", stage) for stage in weights))
    return _numbered(fill + steady + drain)


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
