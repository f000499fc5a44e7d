"""Gated DeltaNet with a cache, for generation: the state, and the inputs of the convolution that it still reaches."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchllm.models.parts.delta_rule import DeltaCore, HeadWeights, Streams, scan


class CachedDelta(nn.Module):
    """A core whose sequences go on where its last call ended. Its cache does not grow with them.

    The first call has the prompts, whose mask hides the padding before them.
    """

    window = 0

    def __init__(self, core: DeltaCore) -> None:
        super().__init__()
        self.core = core
        self.mask = core.mask
        self.state: Tensor | None = None
        """(B, K, R, Q, P)"""
        self.before: tuple[Tensor, ...] = ()
        """last inputs of the convolution, (B, r, heads, width) each of q, k and v"""
        self.ids: Tensor | None = None
        """their documents, (B, r)"""

    def forward(self, streams: Streams, weights: HeadWeights, mask: Tensor | None) -> Tensor:
        """Map the streams of the next S tokens of B sequences -> (B, S, V, P)."""
        reach, length = self.core.reach, streams.a.shape[1]
        if self.ids is None:
            ids = self.core.documents_of(streams) if mask is None else mask
            q, k, v = (F.pad(x, (0, 0, 0, 0, reach, 0)) for x in streams[:3])
        else:
            ids = torch.cat((self.ids, self.ids[:, -1:].expand(-1, length)), dim=1)
            q, k, v = (torch.cat(parts, dim=1) for parts in zip(self.before, streams[:3], strict=True))
        chunks = self.core.chunks(streams._replace(q=q, k=k, v=v), weights, ids)
        state = torch.zeros_like(chunks.additions[..., 0, :, :]) if self.state is None else self.state
        states, self.state = scan(chunks.transitions, chunks.additions, state)
        self.before, self.ids = tuple(x[:, -reach:] for x in (q, k, v)), ids[:, -reach:]
        return chunks.results(states).to(streams.v.dtype)
