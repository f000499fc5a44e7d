"""What the loader hands to the step."""

from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """One micro batch of one data rank; every tensor is (B, S) int64."""

    tokens: Tensor
    labels: Tensor
    """the token that follows each position; -100: no target"""
    positions: Tensor
    """from the start of the sequence, or of the document under data.document_mask"""
    document_ids: Tensor | None
    """which document of the sequence a token belongs to; None without data.document_mask"""

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device; the copy runs beside the computation when the memory is pinned."""
        tokens, labels, positions = (x.to(device, non_blocking=True) for x in self[:3])
        documents = self.document_ids
        return Batch(tokens, labels, positions, None if documents is None else documents.to(device, non_blocking=True))
