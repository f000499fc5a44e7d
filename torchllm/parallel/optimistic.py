"""Expert parallelism without a wait of the host in forward and backward: `parallel.expert_dispatch = "optimistic"`.

The all-to-all of `expert.py` sends the rows that the router chose, whose number the host must read. This one sends
buffers of a known size: a rank has `capacity` rows for each rank, padded where the router chose fewer. The true
numbers travel as before, and stay on the device. Padded rows come last in the order by expert, past the last group, so
that no product has them, and nothing reads the results and gradients in their places.

Capacities are learned. In the step's message of loss and norm every rank tells the largest number of rows that it had
for one rank, per block. So all ranks know the largest of all, and choose the same capacity: the largest of the last
steps, and a margin. If a rank had more rows than fit, all ranks see it in the same message: the step is not applied, as
if it were not finite, and the same batches run again by the exact dispatch, which has no capacity. So no token is
dropped in a step that is applied, weights are as with the exact dispatch, and a step runs twice at most. The first
step is exact, and so are evaluations, and blocks whose load is so uneven that most of a buffer would be padding.

The host reads that message once per step, after it has launched the update, which the GPU still has to do.

Sent in addition: the padding, and in the step's message `LEVELS` + 1 numbers of 8 bytes per sparse block.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchllm.config import Training
from torchllm.models.decoder import Decoder
from torchllm.models.experts import RoutedExperts, Routing, SortedRows, sort_by_expert
from torchllm.parallel.expert import (
    ExchangeDispatch,
    RowExchange,
    SentRows,
    Splits,
    detached,
    order_by_expert,
    routed_experts,
)
from torchllm.parallel.mesh import Mesh

PER_OCTAVE = 8
"""levels of capacity from one to its double: each is 9 % above the one before"""
LEVELS = 2 * PER_OCTAVE + 1
"""from the mean number of rows to four times the mean; blocks that need more are left to the exact dispatch"""
MARGIN = 2
"""levels above the largest number of rows of the last steps: 19 %"""
WINDOW = 32
"""number of these steps"""
TILE = 16
"""a capacity is a multiple of this number of rows"""


def apply_optimistic_dispatch(stage: Decoder, chunks: int = 1) -> None:
    """Let the sparse blocks of a stage send padded buffers, in place, after `apply_expert_parallel`.

    chunks: `parallel.expert_chunks`, each of which has its own buffers.
    """
    stage.padded_chunks = chunks
    for routed in routed_experts(stage):
        assert isinstance(routed.dispatch, ExchangeDispatch)
        routed.dispatch = OptimisticDispatch(routed.dispatch.group, routed.dispatch.experts)


class OptimisticDispatch(ExchangeDispatch):
    """Sends padded buffers if it has a capacity, and gradients are on; else rows without padding."""

    def __init__(self, group: dist.ProcessGroup, experts: int) -> None:
        super().__init__(group, experts)
        self.capacity: int | None = None
        """rows for each rank, equal on all ranks; None: no padding"""
        self.most: Tensor | None = None
        """largest number of rows for one rank since `take_most`, () int64; None: no `Capacities` learn from it"""

    def limit(self, capacity: int | None) -> None:
        """Set the capacity, between steps."""
        self.capacity = capacity

    def take_most(self, nothing: Tensor) -> Tensor | None:
        """Return `most`, and begin with `nothing`, () int64, of the same device."""
        most, self.most = self.most, nothing
        return most

    def send(self, tokens: Tensor, routing: Routing) -> SentRows:
        """Sort the rows by expert, and start sending them. Waits for the device if there is no capacity."""
        if self.most is None or not torch.is_grad_enabled():  # an evaluation: no step would repeat it
            return super().send(tokens, routing)
        order = sort_by_expert(tokens, routing, self.experts)
        origins = self.exchange_counts(order.counts)
        rows = order.counts.view(len(origins), -1).sum(1)
        self.most = torch.maximum(self.most, rows.amax())  # not in place: the same operations in a recomputation
        if self.capacity is None:
            return self.send_sorted(order, origins)
        return self._send_padded(order, rows, origins, self.capacity)

    def _send_padded(self, order: SortedRows, rows: Tensor, origins: Tensor, capacity: int) -> SentRows:
        """Start sending buffers of `capacity` rows. rows: this rank's for each rank, (ep) int64.

        Rows that do not fit are not sent: whatever takes their place, the step is not applied.
        """
        ranks = len(rows)
        ends = rows.cumsum(0)
        index = torch.arange(len(order.rows), device=rows.device)
        rank = torch.searchsorted(ends, index, right=True)
        places = rank * capacity + (index - (ends - rows)[rank]).clamp(max=capacity - 1)
        fill = torch.arange(capacity, device=rows.device) + (ends - rows).unsqueeze(1)
        padded = _Pad.apply(order.rows, fill.clamp(max=len(index) - 1).flatten(), places)
        positions = places[order.positions.flatten()].view_as(order.positions)

        exchange = RowExchange(Splits([capacity] * ranks, [capacity] * ranks), self.group)
        ticket = exchange.begin(padded)
        arrived = origins.cumsum(1).clamp(max=capacity).diff(dim=1, prepend=torch.zeros_like(origins[:, :1]))
        padding = capacity - arrived.sum(1, keepdim=True)  # like the rows of one more expert, the last
        by_expert = order_by_expert(torch.cat((arrived, padding), 1), ranks * capacity)
        return SentRows(detached(order)._replace(positions=positions), exchange, ticket, arrived, by_expert)


class _Pad(torch.autograd.Function):
    """Put sorted rows (N, D) in buffers (M, D), whose padding is copies of some rows: their gradients are not read."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, fill: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return rows.index_select(0, fill)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradient.index_select(0, places), None, None


class Padding(NamedTuple):
    """The cost of the dispatch up to a step, equal on all ranks."""

    share: float
    """of the rows that ranks sent to experts in this step: rows that are padding"""
    repeated: int
    """steps since the start of this process that ran twice, as rows did not fit"""


class Capacities:
    """Learns the capacities of all sparse blocks, equal on all ranks; `TrainStep` lets it ride in its message."""

    def __init__(self, stages: Sequence[Decoder], training: Training, mesh: Mesh, device: torch.device) -> None:
        assert mesh.ep is not None
        model = stages[0].model
        self.nothing = torch.zeros((), dtype=torch.int64, device=device)
        self.row_of = {index: row for row, index in enumerate(model.sparse_blocks)}
        """row of a block in the numbers of all, by its index"""
        self.dispatches: dict[int, OptimisticDispatch] = {}
        """of this rank's sparse blocks, by their row"""
        for stage in stages:
            for name, block in stage.layers.items():
                for module in block.modules():
                    if isinstance(module, RoutedExperts) and isinstance(module.dispatch, OptimisticDispatch):
                        self.dispatches[self.row_of[int(name)]] = module.dispatch
                        module.dispatch.take_most(self.nothing)
        tokens = training.micro_batch_size * training.sequence_length // (mesh.cp.size() * mesh.tp.size())
        self.rows = math.ceil(tokens / stages[0].padded_chunks) * model.top_k
        """of the longest chunk of a micro batch on a rank"""
        self.ranks = mesh.ep.size()
        self.capacities = capacities(self.rows, self.ranks)
        self.bounds = torch.tensor(self.capacities, device=device)
        self.last = [deque[int](maxlen=WINDOW) for _ in self.row_of]
        """levels that each block needed in the last steps; `LEVELS`: more than any"""
        self.repeated = 0
        self.padding = Padding(0.0, 0)
        """of the last step"""
        self.columns = torch.arange(LEVELS + 1, device=device)
        self.event = torch.cuda.Event() if device.type == "cuda" else None
        """of the copy of `needed`, which the host waits for"""
        self.needed = torch.zeros(len(self.row_of), dtype=torch.int64)
        """largest level that a rank needed, of each block, on the host"""
        self.read: Callable[[Tensor], list[int]] = lambda needed: needed.tolist()
        """replaceable: reads it, which a dry run cannot"""
        self.choose([LEVELS] * len(self.row_of))

    def choose(self, levels: Sequence[int]) -> None:
        """Set the level of each block; `LEVELS`: the exact dispatch."""
        self.levels = list(levels)
        self.limits = torch.tensor(self.levels).to(self.columns.device, non_blocking=True)
        for row, dispatch in self.dispatches.items():
            level = self.levels[row]
            dispatch.limit(None if level == LEVELS else self.capacities[level])

    def take_sums(self) -> Tensor:
        """Return this rank's part of the step's message: 1 at the level that each block needed, float64 (N)."""
        sums = torch.zeros(len(self.row_of), len(self.columns), dtype=torch.float64, device=self.columns.device)
        for row, dispatch in self.dispatches.items():
            most = dispatch.take_most(self.nothing)
            assert most is not None
            sums[row] = self.columns == torch.bucketize(most, self.bounds)
        return sums.flatten()

    def fits(self, finite: Tensor, sums: Tensor) -> Tensor:
        """Return whether the step is finite, bool (), and rows fitted on all ranks. sums: `take_sums`, of all ranks."""
        needed = ((sums.view(-1, len(self.columns)) > 0) * self.columns).amax(1)
        self.needed = needed.to("cpu", non_blocking=True)
        if self.event is not None:
            self.event.record()
        return finite & (needed <= self.limits).all()

    def must_repeat(self) -> bool:
        """Wait for the result of `fits` and return it; choose capacities: for the repetition the exact dispatch.

        Call it when the update is launched, which the device does while the host goes on.
        """
        if self.event is not None:
            self.event.synchronize()
        needed = self.read(self.needed)
        if any(level > limit for level, limit in zip(needed, self.levels, strict=True)):
            self.repeated += 1
            self.choose([LEVELS] * len(needed))
            return True
        for last, level in zip(self.last, needed, strict=True):
            last.append(level)
        levels = [next_level(max(last), level) for last, level in zip(self.last, self.levels, strict=True)]
        self.padding = Padding(self._share(), self.repeated)
        if levels != self.levels:
            self.choose(levels)
        return False

    def _share(self) -> float:
        """Return `Padding.share`."""
        sent = [self.rows if level == LEVELS else self.ranks * self.capacities[level] for level in self.levels]
        return 1 - len(sent) * self.rows / sum(sent)


def capacities(rows: int, ranks: int) -> list[int]:
    """Return the capacity of each level. rows: all that a rank sends, to this number of `ranks`."""
    tiles = [math.ceil(rows / ranks * 2 ** (level / PER_OCTAVE) / TILE) for level in range(LEVELS)]
    return [min(rows, number * TILE) for number in tiles]


def next_level(needed: int, level: int) -> int:
    """Return the level for the next step: the present one while it fits. needed: the largest one of the last steps."""
    if needed == LEVELS:
        return LEVELS
    if needed <= level < min(needed + 2 * MARGIN + 1, LEVELS):
        return level
    return min(needed + MARGIN, LEVELS - 1)
