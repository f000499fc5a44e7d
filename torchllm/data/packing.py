"""Pack parts of token streams into few bytes, and unpack them on the device into a batch.

A worker of the loader sends packed data to its trainer: 4 bytes per token and 4 per document. Labels, positions and
document ids, 8 bytes per token each, are made on the device, without a loop over documents. A token that is only read,
never trained, is sent as ~id, a negative number.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchllm.data.batch import IGNORED as IGNORED
from torchllm.data.batch import Batch
from torchllm.data.corpus import Window

Packed = npt.NDArray[np.int32]
"""windows in one array, as `pack_windows` makes it"""


class SequencePieces(NamedTuple):
    """A rank's part of each sequence: the pieces with these indices, in this order, of `total` equal pieces."""

    total: int
    indices: tuple[int, ...]
    attends_whole: bool = False
    """attention sees whole sequences, with the pieces of other ranks"""

    def positions(self, length: int) -> list[range]:
        """Return the range of each piece in a sequence of `length` tokens."""
        size = length // self.total
        return [range(index * size, (index + 1) * size) for index in self.indices]


WHOLE_SEQUENCE = SequencePieces(1, (0,))


@dataclass(frozen=True)
class DataRanks:
    """The part of the data that this process reads, and how it exchanges text with other ranks; default: one rank."""

    rank: int = 0
    """data-parallel index, 0 <= rank < size; ranks that share a batch (tp) have the same"""
    size: int = 1
    """number of data-parallel ranks"""
    prepares: bool = True
    """this process tokenizes raw sources and checks corpora for its node"""
    gather_texts: Callable[[str | None], list[str | None]] = lambda text: [text]
    """all-gather of a text over the ranks of the job"""
    preparing_rank: int = 0
    """rank in the job of the process that prepares for this node"""
    pieces: SequencePieces = WHOLE_SEQUENCE
    """part of each sequence that this process reads and trains on; under cp each rank has another part"""


def pack_windows(windows: Sequence[Window], document_mask: bool, documents: Sequence[int] | None = None) -> Packed:
    """Return windows, each of L tokens, the following token and D further ones, in one array (n,).

    It holds the tokens (N, L + 1 + D) of N windows, as ~id if a token is not trained; with `document_mask` the position
    (N,) and then the document (N,) of the first token of each, and the number of documents (N,) that attention sees;
    and the indices of all other tokens that begin a document. documents: that number; None: the documents of a window.
    """
    parts: list[npt.NDArray[Any]] = [_signed(window) for window in windows]
    if document_mask:
        parts.append(np.array([window.position for window in windows]))
        parts.append(np.array([window.document for window in windows]))
        parts.append(np.array(documents or [1 + int(np.count_nonzero(window.begins)) for window in windows]))
    width = len(windows[0].ids)
    for row, window in enumerate(windows):
        parts.append(window.begins[window.begins > 0] + row * width)
    return np.concatenate(parts, dtype=np.int32, casting="unsafe")


def _signed(window: Window) -> npt.NDArray[Any]:
    """Return the ids of a window, (L + 1,), with ~id for tokens that are not trained."""
    if window.targets is None:
        return window.ids
    ids = window.ids.astype(np.int32)
    return np.where(window.targets, ids, ~ids)


@dataclass(frozen=True)
class PackedBatches:
    """Micro batches of one rank: M of B sequences each, with P pieces of L tokens per sequence on this rank."""

    values: Tensor
    """(n,) int32: M x B x P windows from `pack_windows`"""
    micro_batches: int
    micro_batch_size: int
    pieces: Sequence[range]
    """the rank's pieces of a sequence"""
    document_mask: bool
    has_targets: bool = False
    """some tokens are not trained"""
    depth: int = 0
    """D, tokens further ahead of `Batch.ahead`"""

    def unpack(self, device: torch.device) -> list[Batch]:
        """Return the M micro batches on a device; every tensor is (B, P x L). From pinned memory it is asynchronous.

        The last token of a document has no label. Positions count from the start of the sequence or, with
        `document_mask`, from the start of the document in the sequence; document_ids then number the documents of the
        sequence from 0. A token that is not trained is no label.
        """
        windows = self.micro_batches * self.micro_batch_size * len(self.pieces)
        length = len(self.pieces[0])
        width = length + 1 + self.depth
        values = self.values.to(device, non_blocking=True)
        ids = values[: windows * width].view(windows, width)
        rest = values[windows * width :]
        is_target = None
        if self.has_targets:
            is_target = ids >= 0
            ids = torch.where(is_target, ids, ~ids)
        tokens = self._by_micro_batch(ids[:, :length].long())
        begins = rest[3 * windows :].long() if self.document_mask else rest.long()
        labels = self._by_micro_batch(_labels(ids, begins, is_target, length))
        ahead: list[Tensor | None] = [None] * self.micro_batches
        if self.depth:
            from torchllm.data.tokens_ahead import tokens_ahead  # few models predict them

            of_windows = tokens_ahead(ids, begins, is_target, length).unflatten(
                0, (*labels.shape[:2], len(self.pieces))
            )
            ahead = [*of_windows.movedim(2, -2).flatten(-2)]
        if not self.document_mask:
            pieces = [torch.arange(piece.start, piece.stop, device=device) for piece in self.pieces]
            positions = torch.cat(pieces).expand(self.micro_batch_size, -1)  # in the memory of one sequence
            return [Batch(x, y, positions, None, 0, z) for x, y, z in zip(tokens, labels, ahead, strict=True)]
        first_tokens = rest[: 2 * windows].view(2, windows, 1)
        positions, document_ids = _within_documents(first_tokens, begins, width, length)
        of_documents = self._by_micro_batch(positions), self._by_micro_batch(document_ids)
        documents = self.values[windows * (width + 2) : windows * (width + 3)]  # on the host: nothing waits
        limit = int(documents.view(self.micro_batches, -1).sum(1).max())
        fields_of_batches = zip(tokens, labels, *of_documents, strict=True)
        return [Batch(*fields, limit, x) for fields, x in zip(fields_of_batches, ahead, strict=True)]

    def _by_micro_batch(self, x: Tensor) -> Tensor:
        """Map (M x B x P, L) -> (M, B, P x L)."""
        return x.reshape(self.micro_batches, self.micro_batch_size, -1)


def _labels(ids: Tensor, begins: Tensor, is_target: Tensor | None, length: int) -> Tensor:
    """Return the labels (N, L) of windows of ids (N, L + 1 + D).

    begins: indices of the ids that begin a document. is_target: (N, L + 1 + D), whether an id is trained; None: all
    are. length: L.
    """
    labels = ids[:, 1:].long().contiguous()
    if is_target is not None:
        labels.masked_fill_(~is_target[:, 1:], IGNORED)
    rows = begins // ids.shape[1]
    labels.view(-1).index_fill_(0, begins - rows - 1, IGNORED)  # labels of a row start at its second id
    return labels[:, :length]


def _within_documents(first_tokens: Tensor, begins: Tensor, width: int, length: int) -> tuple[Tensor, Tensor]:
    """Return positions and document ids, both (N, L), of the first L = `length` tokens of windows of `width` ids.

    first_tokens: positions and document ids of the windows' first tokens, (2, N, 1). begins: indices of the ids that
    begin a document.
    """
    first_positions, first_documents = first_tokens
    windows = len(first_positions)
    is_begin = torch.zeros(windows * width, dtype=torch.bool, device=begins.device)
    is_begin = is_begin.index_fill_(0, begins, True).view(windows, width)[:, :length]
    index = torch.arange(length, device=begins.device)
    # The document of the first token may begin before the window, at a negative index.
    document_begins = torch.where(is_begin, index, -first_positions).cummax(1).values
    return index - document_begins, first_documents + is_begin.cumsum(1)
