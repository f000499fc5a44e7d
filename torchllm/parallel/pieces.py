"""The pieces of sequences that are sharded as for a ring, and exchanges between neighboring pieces.

Sharded: the sequence, in 2 n equal pieces; rank r of n has pieces r and 2 n - 1 - r, as `ring.py` says. Tensors of both
pieces of a rank have them in their first dimension: (2, B, S / 2 n, ...).

Sent, per rank, by `with_tokens_before`: the last tokens of both pieces, each to one neighbor; in the backward their
gradients, which are as large, back again.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from torchllm.parallel.saved_results import computed_once
from torchllm.runtime.heartbeat import MESSAGES, PREFIX

NO_DOCUMENT = -1
"""id of the tokens before the first piece of a sequence, which do not exist"""


def messages(group: dist.ProcessGroup) -> record_function:
    """Return a context around sending and receiving between ranks of `group`, which is not the pipeline's group.

    It sends no heartbeat, so that it may be in a compiled block.
    """
    return record_function(PREFIX + MESSAGES + group.group_name)


def pieces_of(x: Tensor) -> Tensor:
    """Return a view of a rank's two pieces: (B, S / n, ...) -> (2, B, S / 2 n, ...)."""
    return x.unflatten(1, (2, -1)).transpose(0, 1)


def joined(pieces: Tensor) -> Tensor:
    """Return a rank's part of the sequence: (2, B, S / 2 n, ...) -> (B, S / n, ...)."""
    return pieces.transpose(0, 1).flatten(1, 2)


def in_sequence(of_ranks: list[Tensor]) -> list[Tensor]:
    """Return the tensors of all 2 n pieces in the order of the sequence, given each rank's: (2, ...) each."""
    return [first for first, _ in of_ranks] + [second for _, second in reversed(of_ranks)]


class NeighborPieces:
    """The pieces before and after this rank's. mesh: one dimension, the ranks of a sequence."""

    def __init__(self, mesh: DeviceMesh, reach: int) -> None:
        """reach: tokens before its own that a piece needs, at most its length."""
        self.group = mesh.get_group()
        self.rank = mesh.get_local_rank()
        self.ranks = mesh.size()
        self.reach = reach

    def last_tokens(self, x: Tensor) -> Tensor:
        """Return a view of the last tokens of both pieces, which the next pieces need: (2, B, reach, ...)."""
        return x[:, :, x.shape[2] - self.reach :]

    def with_tokens_before(self, x: Tensor) -> Tensor:
        """Return the pieces with the tokens before each: (2, B, S / 2 n, ...) -> (2, B, reach + S / 2 n, ...).

        Before the first piece of the sequence are zeros. Differentiable.
        """
        return _WithTokensBefore.apply(x, self)

    def documents_with_tokens_before(self, document_ids: Tensor) -> Tensor:
        """Return the pieces of document ids (B, S / n) with the ids of the tokens before: (2, B, reach + S / 2 n)."""
        return self.none_before_the_first(self.with_tokens_before(pieces_of(document_ids)))

    def none_before_the_first(self, ids: Tensor) -> Tensor:
        """Write NO_DOCUMENT to the tokens before the sequence, and return the ids: (2, B, reach + S / 2 n)."""
        if self.rank == 0:
            ids[0, :, : self.reach] = NO_DOCUMENT
        return ids

    def exchange(self, of_pieces: Tensor, *, back: bool = False) -> Tensor:
        """Send tensors of both pieces, (2, ...), to the pieces after them; return the ones from the pieces before.

        back: send them to the pieces before, and return the ones from the pieces after. Where there is no
        piece: zeros.
        """
        if not self.reach:
            return of_pieces
        first, second = of_pieces.contiguous()
        received = torch.zeros_like(of_pieces, memory_format=torch.contiguous_format)
        # The first pieces rise with the ranks and the second ones fall: their neighbors are the same two ranks.
        ahead, behind = (self.rank - 1, self.rank + 1) if back else (self.rank + 1, self.rank - 1)
        transfers = []
        for tensor, into, to, source in ((first, received[0], ahead, behind), (second, received[1], behind, ahead)):
            if 0 <= to < self.ranks:
                transfers.append(dist.P2POp(dist.isend, tensor, group=self.group, group_peer=to))
            if 0 <= source < self.ranks:
                transfers.append(dist.P2POp(dist.irecv, into, group=self.group, group_peer=source))
        with messages(self.group):
            works = dist.batch_isend_irecv(transfers)
        for work in works:
            work.wait()
        if self.rank == self.ranks - 1:  # it has both pieces in the middle of the sequence
            received[0 if back else 1] = second if back else first
        return received


class _WithTokensBefore(torch.autograd.Function):
    """Maps the pieces (2, B, S / 2 n, ...) -> (2, B, reach + S / 2 n, ...)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, neighbors: NeighborPieces) -> Tensor:
        ctx.neighbors = neighbors
        (before,) = computed_once(lambda: (neighbors.exchange(neighbors.last_tokens(x)),))
        return torch.cat((before, x), dim=2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        reach = ctx.neighbors.reach
        of_own = gradient[:, :, reach:].clone()
        last = ctx.neighbors.last_tokens(of_own)
        last += ctx.neighbors.exchange(gradient[:, :, :reach], back=True)
        return of_own, None
