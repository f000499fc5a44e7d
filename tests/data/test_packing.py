from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from torchllm.data.packing import IGNORED, pack_window

BEGIN, END = 1000, 1001


class Token(NamedTuple):
    """A token of a stream of documents, and all that a training sequence says about it."""

    token: int
    label: int
    document: int
    index: int
    """in its document"""


def stream_of(documents: list[list[int]]) -> list[Token]:
    """The tokens of all documents, one by one."""
    stream = []
    for number, document in enumerate(documents):
        tokens = [BEGIN, *document, END]
        labels = [*tokens[1:], IGNORED]
        for index, (token, label) in enumerate(zip(tokens, labels, strict=True)):
            stream.append(Token(token, label, number, index))
    return stream


def expected_positions(sequence: list[Token], document_mask: bool) -> list[int]:
    """By definition: from the start of the sequence or, with a mask, of a document that begins in it."""
    positions = []
    for position, token in enumerate(sequence):
        began_here = token.document != sequence[0].document
        positions.append(token.index if document_mask and began_here else position)
    return positions


documents_strategy = st.lists(st.lists(st.integers(0, 255), max_size=9), min_size=1, max_size=12)


@settings(deadline=None)
@given(documents_strategy, st.integers(1, 12), st.booleans())
def test_packing_is_its_definition_token_by_token(documents: list[list[int]], length: int, mask: bool) -> None:
    stream = stream_of(documents)
    ids = np.array([token.token for token in stream], dtype=np.uint16)
    begins = np.array([index for index, token in enumerate(stream) if token.index == 0])
    for first in range(0, len(stream) - length, length):
        end = first + length + 1
        inside = begins[(begins >= first) & (begins < end)] - first
        packed = pack_window(ids[first:end], inside, mask)

        sequence = stream[first : first + length]
        assert packed.tokens.tolist() == [token.token for token in sequence]
        assert packed.labels.tolist() == [token.label for token in sequence]
        assert packed.positions.tolist() == expected_positions(sequence, mask)
        if mask:
            assert packed.document_ids is not None
            assert packed.document_ids.tolist() == [token.document - sequence[0].document for token in sequence]
        else:
            assert packed.document_ids is None
        for array in packed:
            assert array is None or array.dtype == np.int64
