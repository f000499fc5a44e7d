"""Attention within documents on a GPU: torch's flash attention over sequences of unequal length.

The documents of a micro batch are sequences of unequal length in one row of tokens. The kernel gets the start index of
each document and computes no pair of tokens of different documents: nothing has size S x S. The indices are computed on
the device; the size of their tensor, the most documents there can be, comes from the loader. So no synchronization is
needed.
"""

import importlib.util
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl

from torchllm.facts.parts.part import WIDEST_HEAD
from torchllm.models.document_attention import document_attention
from torchllm.runtime.torch_operations import varlen_attention

TOKENS_PER_DOCUMENT = 128
"""a micro batch has room for tokens / this documents, so that the shape rarely changes: each new shape recompiles a
compiled block"""


class Documents(NamedTuple):
    """The documents of a micro batch."""

    ids: Tensor
    """document of each token, (B, S)"""
    offsets: Tensor | None
    """start of each document among all tokens of the micro batch, padded with the number of tokens: (N + 1,) int32;
    None if varlen attention cannot be used"""


def find_documents(ids: Tensor, limit: int) -> Documents:
    """Return the documents of sequences whose tokens have these ids, (B, S), rising by one from document to document.

    limit: upper bound of the number of documents, summed over the sequences; 0: unknown.
    """
    if not limit or not has_flash_attention(ids.device):
        return Documents(ids, None)
    return Documents(ids, document_offsets(ids, limit))


def one_document(sequences: int, length: int, device: torch.device) -> Documents:
    """Return the documents of sequences of `length` tokens that are one document each."""
    ids = torch.zeros(sequences, length, dtype=torch.int64, device=device)
    if not has_flash_attention(device):
        return Documents(ids, None)
    offsets = torch.arange(0, (sequences + 1) * length, length, dtype=torch.int32, device=device)
    return Documents(ids, offsets)


def document_offsets(ids: Tensor, limit: int) -> Tensor:
    """Return the offsets of `Documents`. limit: upper bound of the number of documents."""
    room = max(limit, ids.numel() // TOKENS_PER_DOCUMENT)
    room = 1 << (room - 1).bit_length()
    begins = torch.ones_like(ids)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    document = begins.flatten().cumsum(0)  # of each token, from 1
    wanted = torch.arange(1, room + 2, device=ids.device)
    return torch.searchsorted(document, wanted).int()


def has_flash_attention(device: torch.device) -> bool:
    """Return whether torch has flash attention for a device; if so, FlashAttention 3 is used where it is installed."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    if torch.cuda.get_device_capability(device) == (9, 0):
        _use_flash_attention_3()
    return True


@cache
def _use_flash_attention_3() -> None:
    """Let torch's flash attention be FlashAttention 3 on a Hopper GPU, if its package is installed."""
    if importlib.util.find_spec("flash_attn_interface") is not None:
        activate_flash_attention_impl("FA3")


def takes_varlen(q: Tensor) -> bool:
    """Return whether the kernel computes with the type and the width of these heads, (B, S, H, Q)."""
    width = q.shape[-1]
    return q.dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= WIDEST_HEAD


def attend_to_part(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents | None, window: int = 0, scale: float | None = None
) -> Tensor:
    """Let each token attend within its document and window, by the varlen kernel or else by `document_attention`.

    q (B, S, H, Q), k and v (B, S, K, Q) -> (B, S, H, Q). documents: None: a sequence is one. scale: of scores; None:
    1 / sqrt(Q).
    """
    if documents is None:
        documents = one_document(q.shape[0], q.shape[1], q.device)
    if documents.offsets is not None and takes_varlen(q):
        return attend_within_documents(q, k, v, documents.offsets, window, scale)
    return document_attention(q, k, v, documents.ids, window, scale)


def attend_within_documents(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, window: int = 0, scale: float | None = None
) -> Tensor:
    """Let each token attend to the tokens of its document that are not later, the last `window` of them if over 0.

    q (B, S, H, Q), k and v (B, S, K, Q) -> (B, S, H, Q). offsets: of `Documents`. scale: of scores; None: 1 / sqrt(Q).
    """
    batch, length = q.shape[:2]
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    return varlen_attention(q, k, v, offsets, length, window, scale).unflatten(0, (batch, length))
