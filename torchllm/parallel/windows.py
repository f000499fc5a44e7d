"""Attention with a window over sequences that are sharded as for a ring: no ring, one exchange with both neighbors.

Sharded: the sequence, in 2 n equal pieces; rank r of n has pieces r and 2 n - 1 - r, as `ring.py` says. A window of W
tokens reaches W - 1 tokens back, which is no longer than a piece: so a piece needs the last W - 1 keys and values of
the piece before it, and then the plain attention core computes it in one call. Nothing is merged.

Sent, per layer and rank: in the forward the last keys and values of both pieces, each to one neighbor,
2 x 2 x B x (W - 1) x K x Q numbers; in the backward their gradients, which are as large, back again. Document ids are
exchanged in the same way once per forward, in `mask`. Heads are not expanded. Selective recomputation keeps what was
received, so nothing is sent again.

Also computed, for kernels that take as many queries as keys: W - 1 queries before each piece, which nobody reads.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchllm.parallel.saved_results import computed_once
from torchllm.runtime.phase import messages

NO_DOCUMENT = -1
"""id of the tokens before the first piece of a sequence, which do not exist"""


class WindowAttention(nn.Module):
    """An attention core with a window, over sequences sharded over `mesh` (one dimension), two pieces per rank.

    core: the plain one, whose window is at most one token longer than a piece.
    """

    def __init__(self, mesh: DeviceMesh, core: Any) -> None:
        super().__init__()
        self.group = mesh.get_group()
        self.rank = mesh.get_local_rank()
        self.ranks = mesh.size()
        self.core = core
        self.reach: int = core.window - 1
        """tokens before its own that a token sees"""

    def mask(self, document_ids: Tensor | None, document_limit: int = 0) -> Any:
        """Return the core's mask of this rank's pieces, each with the tokens before it; document_ids: (B, S / n).

        None without document ids: `forward` makes it, which knows the shape.
        """
        if document_ids is None:
            return None
        ids = _pieces(document_ids)
        # A sequence may have all of its documents in both of its pieces, and one piece begins with no document.
        limit = 2 * document_limit + len(document_ids) if document_limit else 0
        return self._mask(torch.cat((self.exchange(self.last_tokens(ids)), ids), dim=2), limit)

    def _mask(self, ids: Tensor, limit: int) -> Any:
        """Return the core's mask; ids: (2, B, W - 1 + S / 2 n)."""
        if self.rank == 0:
            ids[0, :, : self.reach] = NO_DOCUMENT
        return self.core.mask(ids.flatten(0, 1), limit)

    def last_tokens(self, x: Tensor) -> Tensor:
        """Return a view of the last tokens of both pieces, which the next pieces see: (2, B, W - 1, ...)."""
        return x[:, :, x.shape[2] - self.reach :]

    @torch.compiler.disable
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, *of_heads: Tensor) -> Tensor:
        """Map q (B, S / n, H, Q), k and v (B, S / n, K, Q) -> (B, S / n, H, Q). of_heads: for the core."""
        joined = _WithTokensBefore.apply(_pieces(torch.cat((k, v), dim=2)), self)
        if mask is None:  # each piece is one document, and so are the tokens before the first
            ids = torch.zeros(joined.shape[:3], dtype=torch.int64, device=q.device)
            mask = self._mask(ids, 3 * len(q))
        k, v = joined.flatten(0, 1).chunk(2, dim=2)
        q = F.pad(_pieces(q), (0, 0, 0, 0, self.reach, 0)).flatten(0, 1)  # (2 B, W - 1 + S / 2 n, H, Q)
        out = self.core(q, k, v, mask, *of_heads)[:, self.reach :]
        return out.unflatten(0, (2, -1)).transpose(0, 1).flatten(1, 2)

    def exchange(self, of_pieces: Tensor, *, back: bool = False) -> Tensor:
        """Send tensors of both pieces, (2, ...), to the pieces after them; return those of the pieces before them.

        back: send them to the pieces before, and return those of the pieces after. Nothing comes from where no piece
        is: zeros.
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


def _pieces(x: Tensor) -> Tensor:
    """Return a view of a rank's two pieces: (B, S / n, ...) -> (2, B, S / 2 n, ...)."""
    return x.unflatten(1, (2, -1)).transpose(0, 1)


class _WithTokensBefore(torch.autograd.Function):
    """Maps the pieces kv (2, B, S / 2 n, 2 K, Q) -> (2, B, W - 1 + S / 2 n, 2 K, Q), with the tokens before each."""

    @staticmethod
    def forward(ctx: Any, kv: Tensor, attention: WindowAttention) -> Tensor:
        ctx.attention = attention
        (before,) = computed_once(lambda: (attention.exchange(attention.last_tokens(kv)),))
        return torch.cat((before, kv), dim=2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        reach = ctx.attention.reach
        of_own = gradient[:, :, reach:].clone()
        last = ctx.attention.last_tokens(of_own)
        last += ctx.attention.exchange(gradient[:, :, :reach], back=True)
        return of_own, None
