"""Expert parallelism: each rank has some experts, whole, and tokens travel to them (Lepikhin et al. 2020, GShard).

Sharded: the stacked matrices of the experts, by expert, over the ep ranks. ep borrows the innermost ranks of
dp_shard x cp x tp, so it multiplies nothing: every one of these ranks has tokens of its own, under tp a part of the
sequence. FSDP shards a rank's experts over what is left of dp_shard x cp x tp (efsdp). Router and shared experts are
sharded as without ep.

Sent, per sparse block: numbers of rows, 8 bytes per expert; each token once per expert that it uses, to that expert's
rank; its result back; and the gradients of both. While rows are on their way, the shared experts compute: the first of
their three products on the way there, the others on the way back, and so in the backward.

FOOTGUN: how many rows a rank receives is known only when the router has chosen, so the host waits for the device once
per sparse block and pass. No row is dropped and none is padded: a rank whose experts nobody chose computes nothing.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torchllm.models.decoder import Decoder
from torchllm.models.experts import (
    ExpertRows,
    RoutedExperts,
    Routing,
    SortedRows,
    put_back,
    sort_by_expert,
)
from torchllm.runtime.torch_compat import begin_all_to_all, end_all_to_all


class Splits(NamedTuple):
    """How many rows an all-to-all sends to each rank, and how many it receives from each."""

    sent: list[int]
    received: list[int]

    def reversed(self) -> "Splits":
        """Return those of the way back."""
        return Splits(self.received, self.sent)


def apply_expert_parallel(stage: Decoder, mesh: DeviceMesh) -> None:
    """Leave each rank its share of the experts of every sparse block, in place. mesh: one dimension, the ep ranks.

    The number of experts must be a multiple of the ranks.
    """
    for routed in routed_experts(stage):
        experts = routed.experts
        for name, whole in list(experts.named_parameters(recurse=False)):
            experts.register_parameter(name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))
        count = experts.gate_proj.shape[0]
        experts.local = _own_experts
        routed.dispatch = ExchangeDispatch(mesh.get_group(), count)


def routed_experts(stage: nn.Module) -> list[RoutedExperts]:
    """Return the routed experts of every sparse block of a stage."""
    return [module for module in stage.modules() if isinstance(module, RoutedExperts)]


def _own_experts(weight: Tensor) -> Tensor:
    assert isinstance(weight, DTensor)
    return weight.to_local()


class RowExchange:
    """An all-to-all of rows, which is under way between `begin` and `end`; in the backward that of their gradients is.

    FOOTGUN: autograd wants a gradient of the shape of what it is the gradient of, and a rank sends and receives
    different numbers of rows. So what `begin` returns is no row that arrives: it is a ticket with the shape of the rows
    sent, without memory, whose gradient is that of these rows.
    """

    def __init__(self, splits: Splits, group: dist.ProcessGroup) -> None:
        self.splits = splits
        self.group = group
        self.arriving: Tensor | None = None

    def begin(self, rows: Tensor) -> Tensor:
        """Begin to send rows (N, D), and return the ticket for `end`."""
        ticket: Tensor = _Begin.apply(rows, self)
        return ticket

    def end(self, ticket: Tensor) -> Tensor:
        """Return the rows that arrive here, (M, D)."""
        rows: Tensor = _End.apply(ticket, self)
        return rows


class _Begin(torch.autograd.Function):
    """Begin to send rows. The backward waits for their gradients, which `_End` began to send back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: RowExchange) -> Tensor:
        exchange.arriving = begin_all_to_all(rows, exchange.splits.sent, exchange.splits.received, exchange.group)
        return rows.new_empty(()).expand_as(rows)

    @staticmethod
    def backward(ctx: Any, arriving: Tensor) -> tuple[Tensor, None]:
        return end_all_to_all(arriving), None


class _End(torch.autograd.Function):
    """Wait for the rows. The backward begins to send their gradients back."""

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, exchange: RowExchange) -> Tensor:
        assert exchange.arriving is not None
        ctx.exchange = exchange
        rows = end_all_to_all(exchange.arriving)
        exchange.arriving = None
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        back = ctx.exchange.splits.reversed()
        return begin_all_to_all(gradient.contiguous(), back.sent, back.received, ctx.exchange.group), None


class SentRows(NamedTuple):
    """Rows on their way to the ranks of their experts."""

    order: SortedRows
    """of the rows that this rank sent; those to one rank are neighbours, for its experts are"""
    exchange: RowExchange
    ticket: Tensor
    """what `RowExchange.end` takes"""
    origins: Tensor
    """rows that arrive from each rank for each expert here, (ep, E / ep) int64"""
    by_expert: Tensor
    """order of the arriving rows by expert, (N) int64: they arrive by rank"""


class Returned(NamedTuple):
    """Results on their way to the ranks of their tokens."""

    exchange: RowExchange
    ticket: Tensor
    """what `RowExchange.end` takes"""


class ExchangeDispatch:
    """Sends rows to the ranks of their experts and back, by two all-to-alls. Replaces `LocalDispatch`."""

    def __init__(self, group: dist.ProcessGroup, experts: int) -> None:
        self.group = group
        self.experts = experts
        self.splits: Callable[[Tensor, Tensor, int], Splits] = read_splits
        """replaceable: the numbers of rows; a dry run has none to read"""

    def send(self, tokens: Tensor, routing: Routing) -> SentRows:
        """Sort the rows by expert, and begin to send them. Waits for the device."""
        order = sort_by_expert(tokens, routing, self.experts)
        ranks = self.group.size()
        per_rank = [self.experts // ranks] * ranks
        origins = end_all_to_all(begin_all_to_all(order.counts, per_rank, per_rank, self.group)).view(ranks, -1)
        splits = self.splits(order.counts.view(ranks, -1).sum(1), origins.sum(1), len(order.rows))
        exchange = RowExchange(splits, self.group)
        ticket = exchange.begin(order.rows)
        return SentRows(order, exchange, ticket, origins, _order_by_expert(origins, sum(splits.received)))

    def receive(self, sent: SentRows) -> ExpertRows:
        """Wait for the rows of this rank's experts, and sort them by expert."""
        rows = sent.exchange.end(sent.ticket)
        ends = sent.origins.sum(0).cumsum(0).int()
        return ExpertRows(rows.index_select(0, sent.by_expert), ends)

    def send_back(self, results: Tensor, sent: SentRows) -> Returned:
        """Begin to send the results to where the rows came from."""
        by_rank = results.index_select(0, _inverse(sent.by_expert))
        exchange = RowExchange(sent.exchange.splits.reversed(), self.group)
        return Returned(exchange, exchange.begin(by_rank))

    def receive_back(self, returned: Returned, sent: SentRows) -> Tensor:
        """Wait for the results, and put them back in the order of the tokens."""
        return put_back(returned.exchange.end(returned.ticket), sent.order)


def read_splits(sent: Tensor, received: Tensor, rows: int) -> Splits:
    """Return the numbers of rows, for which the host waits. sent, received: (ep) int64. rows: that are sent."""
    to_each, from_each = torch.stack((sent, received)).tolist()
    return Splits(to_each, from_each)


def even_splits(sent: Tensor, received: Tensor, rows: int) -> Splits:
    """Return the same, of ranks whose tokens use all experts equally often: nothing is read."""
    ranks = len(sent)
    share, rest = divmod(rows, ranks)
    each = [share + int(rank < rest) for rank in range(ranks)]
    return Splits(each, each)


def split_evenly(stage: nn.Module) -> None:
    """Let a stage on fake tensors, which have no numbers, send equally many rows to each rank."""
    for routed in routed_experts(stage):
        if isinstance(routed.dispatch, ExchangeDispatch):
            routed.dispatch.splits = even_splits


def _order_by_expert(origins: Tensor, rows: int) -> Tensor:
    """Return the order that sorts arriving rows by expert, and then by the rank that they come from: (N) int64.

    origins: rows from each rank for each expert here, (ep, E / ep). rows: their sum, which the host knows.
    """
    ranks, experts = origins.shape
    expert_of_part = torch.arange(experts, device=origins.device).repeat(ranks)
    expert_of_row = expert_of_part.repeat_interleave(origins.flatten(), output_size=rows)
    return expert_of_row.argsort(stable=True)


def _inverse(order: Tensor) -> Tensor:
    """Return the permutation that undoes another, (N) int64."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
