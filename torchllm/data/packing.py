"""Turn a window of a token stream into what the model is trained on. Pure functions, without a loop over tokens."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

IGNORED = -100
"""label of a position without a target (torch's default ignore_index)"""

Int64 = npt.NDArray[np.int64]


class PackedSequence(NamedTuple):
    """One training sequence; each array is (S,) int64."""

    tokens: Int64
    labels: Int64
    """the token that follows each position, or `IGNORED`"""
    positions: Int64
    document_ids: Int64 | None
    """None without data.document_mask"""


def pack_window(window: npt.NDArray[Any], begins: Int64, document_mask: bool) -> PackedSequence:
    """Return tokens, next-token labels and positions of a window (S + 1,) of a stream of whole documents.

    `begins` are the indices in the window, ascending, at which a document begins. The last token of a document has no
    label, for another document follows it. Positions count from the start of the window or, with `document_mask`, from
    where the document begins in the window; document_ids then number the documents of the window from 0.
    """
    length = len(window) - 1
    tokens = window[:-1].astype(np.int64)
    labels = window[1:].astype(np.int64)
    inner_begins = begins[begins > 0]
    labels[inner_begins - 1] = IGNORED
    positions = np.arange(length, dtype=np.int64)
    if not document_mask:
        return PackedSequence(tokens, labels, positions, None)
    inner_begins = inner_begins[inner_begins < length]
    is_begin = np.zeros(length, dtype=np.int64)
    is_begin[inner_begins] = 1
    document_ids = np.cumsum(is_begin)
    document_begins = np.concatenate([np.zeros(1, dtype=np.int64), inner_begins])
    return PackedSequence(tokens, labels, positions - document_begins[document_ids], document_ids)
