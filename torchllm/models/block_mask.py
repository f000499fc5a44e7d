"""The block mask of FlexAttention, from the documents of blocks and the window: blocks x blocks numbers, never S x S.

torch's `create_block_mask` evaluates its function at every pair of tokens, in 10 bytes per pair unless it is compiled.
The lowest and the highest document of each block suffice: two blocks interact if these ranges overlap, and a block of
one document sees all of an earlier block of the same document, within the window. The kernel evaluates single tokens
only in partial blocks. No synchronization with the device.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""whether query q of sequence b and head h sees key k, from the indices b, h, q, k"""

SMALLEST_BLOCK = 128
"""tokens per block, FlexAttention's own default; a longer sequence has larger blocks, `MOST_BLOCKS` of them"""
MOST_BLOCKS = 1024
"""so that the lists of blocks, about 32 bytes per pair of blocks, take 32 MiB per sequence at most"""


class _Blocks(NamedTuple):
    """The key blocks that each query block sees, in the form of `BlockMask`."""

    counts: Tensor
    """number of key blocks, (B, 1, blocks) int32"""
    indices: Tensor
    """indices of these blocks, followed by all others, (B, 1, blocks, blocks) int32"""


def document_block_mask(document_ids: Tensor, window: int = 0) -> BlockMask:
    """Return the mask that hides later tokens and other documents from a token; document_ids: (B, S).

    window: most tokens that a token sees, itself included; 0: no limit.
    """

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return _in_window(q, k, window) & (document_ids[b, q] == document_ids[b, k])

    return _block_mask(document_ids, visible, window)


def _in_window(query: Tensor, key: Tensor, window: int) -> Tensor:
    """Return whether a key, by its index in the sequence, is not later than the query and not before its window."""
    visible = query >= key
    return visible & (query - key < window) if window else visible


@cache
def causal_block_mask(length: int, device: torch.device, window: int = 0) -> BlockMask:
    """Return the mask that hides later tokens, and those before a window over 0, the same for all sequences."""

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return _in_window(q, k, window)

    return _block_mask(torch.zeros(1, length, dtype=torch.int64, device=device), visible, window)


def _block_mask(document_ids: Tensor, visible: Visible, window: int) -> BlockMask:
    """Return the mask of documents (B, S) and a window; `visible` says the same of single tokens."""
    length = document_ids.shape[1]
    size = block_size(length)
    last_ids = document_ids[:, -1:].expand(-1, -length % size)  # fill the last block
    ids_of_blocks = torch.cat((document_ids, last_ids), dim=1).unflatten(1, (-1, size))
    pairs = _pairs_of_blocks(lowest=ids_of_blocks.amin(2), highest=ids_of_blocks.amax(2))
    if window:
        pairs = _pairs_in_window(pairs, size, window)
    return BlockMask.from_kv_blocks(
        *_listed(pairs.partial),
        *_listed(pairs.full),
        BLOCK_SIZE=size,
        mask_mod=visible,
        seq_lengths=(length, length),
    )


class _Pairs(NamedTuple):
    """Whether a query block sees a key block; each (B, blocks, blocks) bool, queries before keys."""

    partial: Tensor
    """some tokens, perhaps: the kernel evaluates each"""
    full: Tensor
    """all tokens"""


def _pairs_of_blocks(lowest: Tensor, highest: Tensor) -> _Pairs:
    """Compare the blocks' lowest and highest document, each (B, blocks)."""
    query_lowest, query_highest = lowest.unsqueeze(2), highest.unsqueeze(2)
    key_lowest, key_highest = lowest.unsqueeze(1), highest.unsqueeze(1)
    share_documents = (query_lowest <= key_highest) & (key_lowest <= query_highest)
    one_document = (query_highest == key_lowest) & (key_highest == query_lowest)  # all four equal
    full = one_document.tril(-1)
    partial = share_documents.tril() & ~full
    return _Pairs(partial, full)


def _pairs_in_window(pairs: _Pairs, size: int, window: int) -> _Pairs:
    """Return the pairs restricted to the last `window` tokens of each token; size: tokens per block."""
    seen_in_full = window // size - 1  # preceding blocks that a block's last token sees completely
    seen_in_part = -(-(window - 1) // size)  # preceding blocks that a block's first token sees in part
    full = pairs.full.triu(-seen_in_full)
    partial = (pairs.partial | pairs.full).triu(-seen_in_part) & ~full
    return _Pairs(partial, full)


def block_size(length: int) -> int:
    """Return the tokens per block of a sequence of `length` tokens, a multiple of `SMALLEST_BLOCK`."""
    smallest_blocks_per_block = -(-length // (SMALLEST_BLOCK * MOST_BLOCKS))
    return SMALLEST_BLOCK * max(1, smallest_blocks_per_block)


def _listed(sees: Tensor) -> _Blocks:
    """Turn whether a query block sees a key block, (B, blocks, blocks) bool, into lists."""
    indices = sees.int().argsort(dim=-1, descending=True, stable=True)
    counts = sees.sum(-1, dtype=torch.int32)
    return _Blocks(counts.unsqueeze(1), indices.int().unsqueeze(1))
