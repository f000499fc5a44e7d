from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchllm.data.corpus import Window
from torchllm.data.packing import IGNORED, WHOLE_SEQUENCE, PackedBatches, SequencePieces, pack_windows

pytestmark = pytest.mark.quick
BEGIN, END = 1000, 1001
CPU = torch.device("cpu")


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


def window_of(sequence: list[Token], following: list[Token], piece: range) -> Window:
    """A piece of a sequence and the token that follows it. following: the tokens after the sequence."""
    tokens = [*sequence, *following][piece.start : piece.stop + 1]
    return Window(
        ids=np.array([token.token for token in tokens], dtype=np.uint16),
        begins=np.array([index for index, token in enumerate(tokens) if token.index == 0], dtype=np.int64),
        document=tokens[0].document - sequence[0].document,
        position=expected_positions(sequence, True)[piece.start],
    )


documents_strategy = st.lists(st.lists(st.integers(0, 255), max_size=9), min_size=1, max_size=12)
pieces_strategy = st.sampled_from(
    [WHOLE_SEQUENCE, SequencePieces(2, (1,)), SequencePieces(4, (0, 3)), SequencePieces(4, (1, 2))]
)


@settings(derandomize=True, deadline=None)
@given(
    documents_strategy,
    st.integers(1, 12),
    st.integers(1, 3),
    pieces_strategy,
    st.booleans(),
    st.sampled_from([0, 1, 3]),
)
def test_packing_is_its_definition_token_by_token(
    documents: list[list[int]], length: int, micro_batch_size: int, pieces: SequencePieces, mask: bool, depth: int
) -> None:
    stream = stream_of(documents)
    length *= pieces.total
    sequences = [stream[first : first + length] for first in range(0, len(stream) - length - depth, length)]
    micro_batches = len(sequences) // micro_batch_size
    sequences = sequences[: micro_batches * micro_batch_size]
    if not sequences:
        return
    ranges = pieces.positions(length)
    windows = []
    for number, sequence in enumerate(sequences):
        end = (number + 1) * length
        read = [range(piece.start, piece.stop + depth) for piece in ranges]
        windows += [window_of(sequence, stream[end : end + 1 + depth], piece) for piece in read]
    values = torch.from_numpy(pack_windows(windows, mask))
    assert values.dtype == torch.int32
    batches = PackedBatches(values, micro_batches, micro_batch_size, ranges, mask, depth=depth).unpack(CPU)

    assert len(batches) == micro_batches
    own = [position for piece in ranges for position in piece]
    for number, sequence in enumerate(sequences):
        batch, row = batches[number // micro_batch_size], number % micro_batch_size
        tokens = [sequence[position] for position in own]
        positions = expected_positions(sequence, mask)
        assert batch.tokens[row].tolist() == [token.token for token in tokens]
        assert batch.labels[row].tolist() == [token.label for token in tokens]
        assert batch.positions[row].tolist() == [positions[position] for position in own]
        if mask:
            assert batch.document_ids is not None
            assert batch.document_ids[row].tolist() == [token.document - sequence[0].document for token in tokens]
        else:
            assert batch.document_ids is None
        for ahead in range(1, depth + 1):
            assert batch.ahead is not None
            later = [stream[number * length + position + ahead] for position in own]
            labels = [stream[number * length + position + ahead + 1] for position in own]
            assert batch.ahead[row, 0, ahead - 1].tolist() == [token.token for token in later]
            pairs = zip(tokens, labels, strict=True)
            expected = [label.token if label.document == token.document else IGNORED for token, label in pairs]
            assert batch.ahead[row, 1, ahead - 1].tolist() == expected
        assert batch.ahead is None or depth
    most = 0
    for batch in batches:
        for field in (batch.tokens, batch.labels, batch.positions, batch.document_ids):
            if field is not None:
                assert field.dtype == torch.int64
                assert field.shape == (micro_batch_size, len(own))
        if batch.document_ids is not None:
            most = max(most, int((batch.document_ids.diff(dim=1) != 0).sum()) + micro_batch_size)
    windows_per_batch = micro_batch_size * len(ranges)
    for batch in batches:
        assert most <= batch.document_limit <= (most + (2 + depth) * windows_per_batch if mask else 0)


def test_a_token_that_is_no_target_keeps_its_id_and_is_no_label() -> None:
    ids = np.array([0, 7, 300, 2, 1], dtype=np.uint16)
    targets = np.array([False, False, True, True, False])
    values = torch.from_numpy(pack_windows([Window(ids, np.array([0]), targets=targets)], document_mask=False))
    (batch,) = PackedBatches(values, 1, 1, [range(4)], document_mask=False, has_targets=True).unpack(CPU)
    assert batch.tokens.tolist() == [[0, 7, 300, 2]]
    assert batch.labels.tolist() == [[IGNORED, 300, 2, IGNORED]]
    (batch,) = PackedBatches(values, 1, 1, [range(2)], document_mask=False, has_targets=True, depth=2).unpack(CPU)
    assert batch.ahead is not None
    assert batch.ahead.tolist() == [[[[7, 300], [300, 2]], [[300, 2], [2, IGNORED]]]]


def test_the_limit_of_documents_counts_every_begin_in_a_micro_batch() -> None:
    windows = [Window(np.arange(9), np.array(begins)) for begins in ([0, 3, 6], [0], [0, 1], [2, 4, 5])]
    values = torch.from_numpy(pack_windows(windows, document_mask=True))
    for micro_batches, limit in ((4, 3 + 1), (2, 4 + 2), (1, 6 + 4)):
        batches = PackedBatches(values, micro_batches, 4 // micro_batches, [range(8)], document_mask=True).unpack(CPU)
        assert {batch.document_limit for batch in batches} == {limit}
    values = torch.from_numpy(pack_windows(windows, document_mask=True, documents=[7, 5, 9, 8]))  # of whole sequences
    batches = PackedBatches(values, 2, 2, [range(8)], document_mask=True).unpack(CPU)
    assert [batch.document_limit for batch in batches] == [17, 17]


def test_a_packed_token_takes_four_bytes_and_a_document_four() -> None:
    begins = np.arange(0, 1024, 64)
    windows = [Window(np.zeros(1025, dtype=np.uint16), begins)] * 8
    tokens, documents = 8 * 1024, 8 * (len(begins) - 1)
    followers = 8
    assert pack_windows(windows, document_mask=False).nbytes == 4 * (tokens + followers + documents)
    of_windows = 3 * 8
    assert pack_windows(windows, document_mask=True).nbytes == 4 * (tokens + followers + documents + of_windows)
