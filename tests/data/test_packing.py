import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchllm.data.packing import IGNORED, pack_window

BEGIN, END = 1000, 1001


def slow(
    documents: list[list[int]], number: int, length: int, mask: bool
) -> tuple[list[int], list[int], list[int], list[int]]:
    """The definition, token by token: (token, label, position, document id) of a sequence of a stream."""
    stream = []
    for index, document in enumerate(documents):
        whole = [BEGIN, *document, END]
        following = [*whole[1:], IGNORED]
        stream += [
            (token, label, index, place) for place, (token, label) in enumerate(zip(whole, following, strict=True))
        ]
    window = stream[number * length : (number + 1) * length]
    out: list[tuple[int, int, int, int]] = []
    for place, (token, label, document, inside) in enumerate(window):
        first = window[0][2]
        position = place if not mask or document == first else inside
        out.append((token, label, position, document - first))
    tokens, labels, positions, ids = (list(column) for column in zip(*out, strict=True))
    return tokens, labels, positions, ids


@given(st.lists(st.lists(st.integers(0, 255), max_size=9), min_size=1, max_size=12), st.integers(1, 12), st.booleans())
def test_packing_is_the_slow_definition(documents: list[list[int]], length: int, mask: bool) -> None:
    stream = np.array([token for document in documents for token in (BEGIN, *document, END)], dtype=np.uint16)
    begins = np.cumsum([0] + [len(document) + 2 for document in documents])[:-1]
    for number in range((len(stream) - 1) // length):
        first, last = number * length, number * length + length + 1
        inside = begins[(begins >= first) & (begins < last)] - first
        found = pack_window(stream[first:last], inside, mask)
        tokens, labels, positions, ids = slow(documents, number, length, mask)
        assert found.tokens.tolist() == tokens
        assert found.labels.tolist() == labels
        assert found.positions.tolist() == positions
        if mask:
            assert found.document_ids is not None
            assert found.document_ids.tolist() == ids
        else:
            assert found.document_ids is None
        assert {array.dtype for array in found if array is not None} == {np.dtype(np.int64)}
