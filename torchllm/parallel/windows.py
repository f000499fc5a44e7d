"""Attention with a window over sequences that are sharded as for a ring: no ring, one exchange with both neighbors.

Sharded: the sequence, in 2 n equal pieces; rank r of n has pieces r and 2 n - 1 - r, as `ring.py` says. A window of W
tokens reaches W - 1 tokens back, which is no longer than a piece: so a piece needs the last W - 1 keys and values of
the piece before it, and then the plain attention core computes it in one call. Nothing is merged.

Sent, per layer and rank: in the forward the last keys and values of both pieces, each to one neighbor,
2 x 2 x B x (W - 1) x K x Q numbers; in the backward their gradients, which are as large, back again. Document ids are
exchanged in the same way once per forward, in `mask`. Heads are not expanded. Selective recomputation keeps the
received tensors, so nothing is sent again.

Also computed, for kernels that need equal numbers of queries and keys: W - 1 unused queries before each piece.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchllm.parallel.pieces import NO_DOCUMENT, NeighborPieces, joined, pieces_of


class WindowAttention(nn.Module):
    """An attention core with a window, over sequences sharded over `mesh` (one dimension), two pieces per rank.

    core: the plain one, whose window is at most one token longer than a piece.
    """

    computes_once = True
    """its results are marked with `computed_once`"""

    def __init__(self, mesh: DeviceMesh, core: Any) -> None:
        super().__init__()
        self.core = core
        self.neighbors = NeighborPieces(mesh, reach=core.window - 1)

    def mask(self, document_ids: Tensor | None, document_limit: int = 0) -> Any:
        """Return the core's mask of this rank's pieces, each with the tokens before it; document_ids: (B, S / n).

        None without document ids: `forward` makes it, which knows the shape.
        """
        if document_ids is None:
            return None
        ids = self.neighbors.documents_with_tokens_before(document_ids)
        # The tokens before may be of more documents than the loader counted here. Those of the piece's first document
        # alone are seen, so the others become one.
        before, first_own = ids[..., : self.neighbors.reach], ids[..., self.neighbors.reach, None]
        before.masked_fill_(before != first_own, NO_DOCUMENT)
        # A sequence may have all of its documents in both of its pieces, and each piece may begin with no document.
        limit = 2 * (document_limit + len(document_ids)) if document_limit else 0
        return self.core.mask(ids.flatten(0, 1), limit)

    @torch.compiler.disable
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, *of_heads: Tensor) -> Tensor:
        """Map q (B, S / n, H, Q), k and v (B, S / n, K, Q) -> (B, S / n, H, Q). of_heads: for the core."""
        reach = self.neighbors.reach
        kv = self.neighbors.with_tokens_before(pieces_of(torch.cat((k, v), dim=2)))
        if mask is None:  # each piece is one document, and so are the tokens before the first
            ids = torch.zeros(kv.shape[:3], dtype=torch.int64, device=q.device)
            mask = self.core.mask(self.neighbors.none_before_the_first(ids).flatten(0, 1), 3 * len(q))
        k, v = kv.flatten(0, 1).chunk(2, dim=2)
        q = F.pad(pieces_of(q), (0, 0, 0, 0, reach, 0)).flatten(0, 1)  # (2 B, W - 1 + S / 2 n, H, Q)
        return joined(self.core(q, k, v, mask, *of_heads)[:, reach:].unflatten(0, (2, -1)))
