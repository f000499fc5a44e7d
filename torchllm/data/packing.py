"""A window of a token stream as what the model is trained on. Pure, no loop over tokens."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

IGNORED = -100
"""label of a position that has no target (torch's default ignore_index)"""

Int64 = npt.NDArray[np.int64]


class PackedSequence(NamedTuple):
    """One training sequence; each (S,) int64, document_ids None without document_mask."""

    tokens: Int64
    labels: Int64
    positions: Int64
    document_ids: Int64 | None


def pack_window(window: npt.NDArray[Any], begins: Int64, document_mask: bool) -> PackedSequence:
    """Tokens, next-token labels and positions of a window of S + 1 ids of a stream of whole documents.

    `begins`: the places in the window, ascending, at which a document begins. A document's last token has no label, for
    what follows it is another document. Positions count from the window's start, or with `document_mask` from where the
    document begins inside the window; document_ids then number the documents of the window from 0.
    """
    length = len(window) - 1
    tokens, labels = window[:-1].astype(np.int64), window[1:].astype(np.int64)
    inner = begins[begins > 0]
    labels[inner - 1] = IGNORED
    positions = np.arange(length, dtype=np.int64)
    if not document_mask:
        return PackedSequence(tokens, labels, positions, None)
    first = np.zeros(length, dtype=np.int64)
    inner = inner[inner < length]
    first[inner] = 1
    document_ids = np.cumsum(first)
    start_of = np.concatenate([np.zeros(1, dtype=np.int64), inner])
    return PackedSequence(tokens, labels, positions - start_of[document_ids], document_ids)
