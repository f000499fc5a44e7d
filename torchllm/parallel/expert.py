"""Expert parallelism: each rank has some experts, whole, and tokens travel to them (Lepikhin et al. 2020, GShard).

Sharded: the stacked matrices of the experts, by expert, over the ep ranks. ep borrows the innermost ranks of
dp_shard x cp x tp, so it does not multiply the number of ranks: each of these ranks has different tokens, under tp a
part of the sequence. FSDP shards a rank's experts over the remaining ranks of dp_shard x cp x tp (efsdp). Router and
shared experts are sharded as without ep.

Sent, per sparse block: numbers of rows, 8 bytes per expert; each token once per expert that it uses, to that expert's
rank; its result back; and the gradients of both. The shared experts overlap with this: the first of their three
products with the way there, the others with the way back, and likewise in the backward. With parallel.expert_chunks
the tokens go in chunks (Hwang et al. 2022, Tutel, arXiv 2206.03382): while one is sent, the products of
another compute, in the forward and, in the other order, in the backward.

FOOTGUN: the number of rows that a rank receives depends on the router's choices, so the host waits for the device once
per sparse block and pass (`optimistic.py` does not). Rows are neither dropped nor padded: a rank that receives no
tokens skips the products.
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
from torchllm.runtime.torch_operations import begin_all_to_all, end_all_to_all


class Splits(NamedTuple):
    """Number of rows that an all-to-all sends to each rank and receives from each rank."""

    sent: list[int]
    received: list[int]

    def reversed(self) -> "Splits":
        """Return the numbers for the way back."""
        return Splits(self.received, self.sent)


def apply_expert_parallel(stage: Decoder, mesh: DeviceMesh, chunks: int = 1) -> None:
    """Keep only this rank's experts in every sparse block, in place. mesh: one dimension, the ep ranks.

    The number of experts must be a multiple of the ranks. chunks: `parallel.expert_chunks`.
    """
    for routed in routed_experts(stage):
        experts = routed.experts
        for name, whole in list(experts.named_parameters(recurse=False)):
            own = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]), requires_grad=whole.requires_grad)
            experts.register_parameter(name, own)
        count = experts.gate_proj.shape[0]
        experts.local = _own_experts
        routed.dispatch = ExchangeDispatch(mesh.get_group(), count)
        routed.chunks = chunks


def routed_experts(stage: nn.Module) -> list[RoutedExperts]:
    """Return the routed experts of every sparse block of a stage."""
    return [module for module in stage.modules() if isinstance(module, RoutedExperts)]


def _own_experts(weight: Tensor) -> Tensor:
    assert isinstance(weight, DTensor)
    return weight.to_local()


class RowExchange:
    """An asynchronous all-to-all of rows from `begin` to `end`; in the backward, of their gradients from end to begin.

    FOOTGUN: autograd needs a gradient of the same shape as its tensor, but a rank sends and receives different numbers
    of rows. So `begin` does not return received rows: it returns a ticket with the shape of the sent rows, without
    memory, which carries their gradient.
    """

    def __init__(self, splits: Splits, group: dist.ProcessGroup) -> None:
        self.splits = splits
        self.group = group
        self.arriving: Tensor | None = None

    def begin(self, rows: Tensor) -> Tensor:
        """Start sending rows (N, D), and return the ticket for `end`."""
        ticket: Tensor = _Begin.apply(rows, self)
        return ticket

    def end(self, ticket: Tensor) -> Tensor:
        """Return the received rows, (M, D)."""
        rows: Tensor = _End.apply(ticket, self)
        return rows


class _Begin(torch.autograd.Function):
    """Start sending rows. The backward waits for their gradients, which the backward of `_End` started to send back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: RowExchange) -> Tensor:
        exchange.arriving = begin_all_to_all(rows, exchange.splits.sent, exchange.splits.received, exchange.group)
        return rows.new_empty(()).expand_as(rows)

    @staticmethod
    def backward(ctx: Any, arriving: Tensor) -> tuple[Tensor, None]:
        return end_all_to_all(arriving), None


class _End(torch.autograd.Function):
    """Wait for the rows. The backward starts sending their gradients back."""

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
    """Rows that are being sent to the ranks of their experts."""

    order: SortedRows
    """rows that this rank sent, detached, and their order: by expert, so that rows to the same rank are contiguous"""
    exchange: RowExchange
    ticket: Tensor
    """ticket for `RowExchange.end`"""
    origins: Tensor
    """number of rows received from each rank for each expert on this rank, (ep, E / ep) int64"""
    by_expert: Tensor
    """order that sorts the received rows by expert, (N) int64: they are received by rank"""


class Returned(NamedTuple):
    """Results that are being sent to the ranks of their tokens."""

    exchange: RowExchange
    ticket: Tensor
    """ticket for `RowExchange.end`"""


class ExchangeDispatch:
    """Sends rows to the ranks of their experts and back, by two all-to-alls. Replaces `LocalDispatch`."""

    def __init__(self, group: dist.ProcessGroup, experts: int) -> None:
        self.group = group
        self.experts = experts
        self.splits: Callable[[Tensor, Tensor, int], Splits] = read_splits
        """replaceable: computes the numbers of rows, which a dry run cannot read"""

    def send(self, tokens: Tensor, routing: Routing) -> SentRows:
        """Sort the rows by expert, and start sending them. Waits for the device."""
        order = sort_by_expert(tokens, routing, self.experts)
        return self.send_sorted(order, self.exchange_counts(order.counts))

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """Return the `origins` of `SentRows`. counts: rows that this rank sends to each expert, (E) int64."""
        ranks = self.group.size()
        per_rank = [self.experts // ranks] * ranks
        return end_all_to_all(begin_all_to_all(counts, per_rank, per_rank, self.group)).view(ranks, -1)

    def send_sorted(self, order: SortedRows, origins: Tensor) -> SentRows:
        """Start sending sorted rows. Waits for the device."""
        splits = self.splits(order.counts.view(len(origins), -1).sum(1), origins.sum(1), len(order.rows))
        exchange = RowExchange(splits, self.group)
        ticket = exchange.begin(order.rows)
        by_expert = order_by_expert(origins, sum(splits.received))
        return SentRows(detached(order), exchange, ticket, origins, by_expert)

    def receive(self, sent: SentRows) -> ExpertRows:
        """Wait for the rows of this rank's experts, and sort them by expert."""
        rows = sent.exchange.end(sent.ticket)
        ends = sent.origins.sum(0).cumsum(0).int()
        return ExpertRows(rows.index_select(0, sent.by_expert), ends)

    def send_back(self, results: Tensor, sent: SentRows) -> Returned:
        """Start sending the results back to the ranks of the rows."""
        by_rank = results.index_select(0, _inverse(sent.by_expert))
        exchange = RowExchange(sent.exchange.splits.reversed(), self.group)
        return Returned(exchange, exchange.begin(by_rank))

    def receive_back(self, returned: Returned, sent: SentRows) -> Tensor:
        """Wait for the results, and put them back in the order of the tokens."""
        return put_back(returned.exchange.end(returned.ticket), sent.order)


def detached(order: SortedRows) -> SortedRows:
    """Return the same rows without a gradient, which goes by the ticket.

    FOOTGUN: FSDP's autograd function has as inputs all tensors that experts get, and makes zeros for those without use.
    """
    return order._replace(rows=order.rows.detach())


def read_splits(sent: Tensor, received: Tensor, rows: int) -> Splits:
    """Return the numbers of rows. Waits for the device. sent, received: (ep) int64. rows: number of sent rows."""
    to_each, from_each = torch.stack((sent, received)).tolist()
    return Splits(to_each, from_each)


def order_by_expert(origins: Tensor, rows: int) -> Tensor:
    """Return the order that sorts received rows by expert, then by source rank: (N) int64.

    origins: rows from each rank for each expert on this rank, (ep, E / ep). rows: their sum, known to the host.
    """
    ranks, experts = origins.shape
    expert_of_part = torch.arange(experts, dtype=torch.int16, device=origins.device).repeat(ranks)
    expert_of_row = expert_of_part.repeat_interleave(origins.flatten(), output_size=rows)
    return expert_of_row.argsort(stable=True)


def _inverse(order: Tensor) -> Tensor:
    """Return the permutation that undoes another, (N) int64."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
