"""Cores whose tokens read a few tokens before them, such as a convolution of three tokens, and their cache.

Shapes: B batch, S sequence, C channels of this rank, r tokens that a token reads before its own.
"""

from typing import Any

import torch
from torch import Tensor, nn

NO_DOCUMENT = -1
"""id of the tokens before a sequence, which do not exist"""


class ShortReach(nn.Module):
    """The base of a mixer's core whose tokens read the `reach` tokens before them, and none further away.

    `parallel/short_reach.py` and `CachedReach` call it with the tokens before a part of a sequence, and drop their
    results. So a token's result may depend on nothing but these tokens: not on its place in x, nor on the length of x.
    """

    reach: int
    """r: tokens before its own that a token reads, at least 1"""
    window = 0

    def mask(self, document_ids: Tensor | None, document_limit: int = 0) -> Tensor | None:
        """Return the ids of documents, (B, S), which `forward` gets; None: each sequence is one document."""
        return document_ids

    def forward(self, x: Tensor, document_ids: Tensor | None, *of_channels: Tensor) -> Tensor:
        """Map (B, S, C) -> (B, S, C), or (B, S, C, ...) -> (B, S, C, ...), each channel by itself.

        No token reads another document's, and positions before a sequence are read as zeros. of_channels: parameters,
        (C, ...) each.
        """
        raise NotImplementedError


class CachedReach(nn.Module):
    """A core whose sequences go on where its last call ended: `Mixer.cached_core` of mixers with a `ShortReach`.

    It caches the last r tokens and their documents. It needs no room that grows, and the mask hides the padding.
    """

    def __init__(self, core: ShortReach) -> None:
        super().__init__()
        self.core = core
        self.mask = core.mask
        self.before: Tensor | None = None
        """(B, up to r, C, ...)"""
        self.ids: Tensor | None = None
        """(B, up to r)"""

    def forward(self, x: Tensor, document_ids: Tensor | None, *of_channels: Any) -> Tensor:
        """Map the next S tokens of B sequences, (B, S, C, ...) -> (B, S, C, ...).

        document_ids: of the first call. The tokens of later calls are of the last document before them.
        """
        known = 0
        if self.before is not None:
            known = self.before.shape[1]
            x = torch.cat((self.before, x), dim=1)
            if self.ids is not None:
                document_ids = torch.cat((self.ids, self.ids[:, -1:].expand(-1, x.shape[1] - known)), dim=1)
        out: Tensor = self.core(x, document_ids, *of_channels)
        kept = max(0, x.shape[1] - self.core.reach)
        self.before = x[:, kept:]
        self.ids = None if document_ids is None else document_ids[:, kept:]
        return out[:, known:]
