"""What the data loader gives to the training step."""

from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """One micro batch of one data rank; every tensor is (B, S) int64."""

    tokens: Tensor
    labels: Tensor
    """the token that follows each position; -100 where there is no target"""
    positions: Tensor
    """counted from the start of the sequence or, with data.document_mask, of the document"""
    document_ids: Tensor | None
    """which document of the sequence a token belongs to; None without data.document_mask"""

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device; from pinned memory the copy runs in the background."""
        document_ids = self.document_ids
        if document_ids is not None:
            document_ids = document_ids.to(device, non_blocking=True)
        return Batch(
            self.tokens.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            self.positions.to(device, non_blocking=True),
            document_ids,
        )
