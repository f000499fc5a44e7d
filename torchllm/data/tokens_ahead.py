"""The tokens further ahead of a sequence, and their labels: `Batch.ahead`, of multi-token prediction."""

import torch
from torch import Tensor

from torchllm.data.batch import IGNORED


def tokens_ahead(ids: Tensor, begins: Tensor, is_target: Tensor | None, length: int) -> Tensor:
    """Return the tokens and labels further ahead of windows of ids (N, L + 1 + D), as `Batch.ahead`: (N, 2, D, L).

    begins: indices of the ids that begin a document. is_target: (N, L + 1 + D), whether an id is trained; None: all
    are. length: L. A label is ignored if a document begins between its position and itself.
    """
    depths = range(1, ids.shape[1] - length)
    begins_here = torch.zeros_like(ids, dtype=torch.long).view(-1).index_fill_(0, begins, 1).view(ids.shape)
    document = begins_here.cumsum(1)
    is_label = torch.ones_like(ids, dtype=torch.bool) if is_target is None else is_target
    labels = []
    for depth in depths:
        there = slice(depth + 1, depth + 1 + length)
        has_label = is_label[:, there] & (document[:, there] == document[:, :length])
        labels.append(ids[:, there].long().where(has_label, IGNORED))
    tokens = [ids[:, depth : depth + length].long() for depth in depths]
    return torch.stack((torch.stack(tokens, 1), torch.stack(labels, 1)), 1)
