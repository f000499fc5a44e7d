"""The batch type that the data loader passes to the training step."""

from typing import NamedTuple

from torch import Tensor

IGNORED = -100
"""label of a position without a target (torch's default ignore_index)"""


class Batch(NamedTuple):
    """One micro batch of one rank, on its device; every tensor is (B, S) int64, on one of n cp ranks (B, S / n)."""

    tokens: Tensor
    labels: Tensor
    """the token that follows each position; -100 where there is no target"""
    positions: Tensor
    """counted from the start of the sequence or, with data.document_mask, of the document"""
    document_ids: Tensor | None
    """number of the document that a token belongs to, rising along the sequence; None without data.document_mask"""
    document_limit: int = 0
    """upper bound of the number of documents that attention sees here, summed over the sequences; 0: unknown"""
    ahead: Tensor | None = None
    """(B, 2, D, S): the token that is k after each position, and the one k + 1 after it as label, for k from 1 to
    D = model.mtp_depth; None: D is 0"""
    label_bytes: Tensor | None = None
    """held-out sequences: bytes of the text that each label stands for, 0 for a special token and where there is no
    label; None: in training, or unknown"""
    source: str = ""
    """held-out sequences: name of their source, equal on all ranks"""
