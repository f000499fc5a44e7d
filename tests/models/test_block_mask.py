"""FlexAttention's block mask from the documents of blocks, against torch's own, which looks at every pair."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from torchllm.models import block_mask
from torchllm.models.block_mask import block_size, causal_block_mask, document_block_mask

pytestmark = pytest.mark.quick
SIZE = block_mask.SMALLEST_BLOCK


def documents_of(lengths: list[int]) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


DOCUMENTS: dict[str, Tensor] = {
    "one": documents_of([5 * SIZE]),
    "blocks": documents_of([SIZE] * 5),
    "across blocks": documents_of([1, 1, SIZE, 2 * SIZE + 7, SIZE + 1, 2 * SIZE - 10 - SIZE]),
    "single tokens": torch.arange(5 * SIZE),
    "short last block": documents_of([SIZE + 3, 2 * SIZE, 50]),
    "less than a block": documents_of([3, 1, 4]),
}
BATCHES = {name: row.unsqueeze(0) for name, row in DOCUMENTS.items()}
BATCHES["each sequence its own"] = torch.stack([DOCUMENTS[name] for name in ("one", "across blocks", "single tokens")])


def torchs_own(documents: Tensor, window: int = 0) -> BlockMask:
    reach = window or documents.shape[1]

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k < reach) & (documents[b, q] == documents[b, k])

    sequences, length = documents.shape
    return create_block_mask(visible, sequences, None, length, length, device="cpu")


def listed(mask: BlockMask, kind: str) -> list[list[list[int]]]:
    """Return the blocks that each block sees, or is seen by, of each sequence; kind: kv, full_kv, q or full_q."""
    counts, indices = getattr(mask, f"{kind}_num_blocks"), getattr(mask, f"{kind}_indices")
    assert (counts.dtype, indices.dtype) == (torch.int32, torch.int32)
    sequences = []
    for sequence in range(len(counts)):
        rows = zip(counts[sequence, 0].tolist(), indices[sequence, 0].tolist(), strict=True)
        sequences.append([sorted(row[:count]) for count, row in rows])
    return sequences


def test_blocks_are_those_of_torch() -> None:
    windows = (0, 1, 2, SIZE, SIZE + 1, 2 * SIZE - 1, 2 * SIZE, 2 * SIZE + 2, 9 * SIZE)
    for window, (name, documents) in itertools.product(windows, BATCHES.items()):
        mask, expected = document_block_mask(documents, window), torchs_own(documents, window)
        assert mask.shape == expected.shape
        assert mask.BLOCK_SIZE == expected.BLOCK_SIZE == (SIZE, SIZE)
        for kind in ("kv", "full_kv", "q", "full_q"):
            assert listed(mask, kind) == listed(expected, kind), (window, name, kind)


def test_documents_that_come_back_are_looked_at_token_by_token() -> None:
    """Where ids do not ascend, a range of documents says less: a block may be called partial that nothing sees."""
    documents = torch.tensor([[0] * SIZE + [1] * SIZE + [0, 2] * (SIZE // 2)])
    mask, expected = document_block_mask(documents), torchs_own(documents)
    assert listed(mask, "full_kv") == listed(expected, "full_kv") == [[[], [], []]]
    assert listed(expected, "kv") == [[[0], [1], [0, 2]]]
    assert listed(mask, "kv") == [[[0], [1], [0, 1, 2]]]
    mask = document_block_mask(torch.tensor([[7] * SIZE + [3] * SIZE + [5] * SIZE]))
    assert listed(mask, "kv") == [[[0], [1], [2]]]  # documents that descend do not meet


def test_the_causal_mask_is_one_document() -> None:
    mask = causal_block_mask(3 * SIZE, torch.device("cpu"))
    assert listed(mask, "kv") == [[[0], [1], [2]]]
    assert listed(mask, "full_kv") == [[[], [0], [0, 1]]]
    assert causal_block_mask(3 * SIZE, torch.device("cpu")) is mask
    mask = causal_block_mask(4 * SIZE, torch.device("cpu"), 2 * SIZE)
    assert listed(mask, "kv") == [[[0], [1], [0, 2], [1, 3]]]
    assert listed(mask, "full_kv") == [[[], [0], [1], [2]]]


def test_a_long_sequence_has_larger_blocks() -> None:
    most = block_mask.MOST_BLOCKS
    assert [block_size(length) for length in (1, SIZE, 131_072)] == [SIZE] * 3
    assert block_size(1_000_000) == 1024
    for length in (SIZE * most + 1, 1_000_000, 16_000_000):
        assert -(-length // block_size(length)) <= most
