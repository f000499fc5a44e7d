"""Varlen attention within documents: a reference of the same signature as torch's kernel, which needs a GPU."""

import inspect
import sys
import types
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.test_document_attention import (
    forward_backward,
    random_documents,
    random_inputs,
)
from torchllm.config import Model
from torchllm.models import varlen_attention
from torchllm.models.attention import ScaledDotProductAttention
from torchllm.models.attention_cores import EagerAttention
from torchllm.models.varlen_attention import document_offsets, find_documents, takes_varlen
from torchllm.runtime import torch_operations

pytestmark = pytest.mark.quick
CPU = torch.device("cpu")
ANNOUNCES_GROUPS = "enable_gqa" in inspect.signature(torch_operations.varlen_attn).parameters
"""whether torch's kernel must be told of groups of query heads; that of torch 2.11 takes them as they are"""


def reference_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute what `torch.nn.attention.varlen.varlen_attn` does, one sequence after the other, by eager attention."""
    assert window_size == (-1, 0), "causal"
    assert cu_seq_q.dtype == torch.int32
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert enable_gqa == (ANNOUNCES_GROUPS and query.shape[1] != key.shape[1])
    out = torch.full_like(query, torch.nan)  # a token outside all sequences gets no result
    eager = EagerAttention(Model(softmax_scale=scale or 0.0))
    begin = 0
    for end in cu_seq_q.tolist()[1:]:
        assert end - begin <= min(max_q, max_k)
        part = slice(begin, end)
        q, k, v = query[part], key[part], value[part]
        if begin < end:
            out[part] = eager(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), None).squeeze(0)
        begin = end
    return out


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the CPU has flash attention, of float32 too."""
    monkeypatch.setattr(torch_operations, "varlen_attn", reference_varlen)
    monkeypatch.setattr(varlen_attention, "has_flash_attention", lambda device: True)
    monkeypatch.setattr(varlen_attention, "takes_varlen", lambda q: True)


@pytest.mark.parametrize(("heads", "kv", "spare"), [(4, 4, 0), (4, 2, 1), (6, 1, 100)])
def test_random_documents_are_eager_attention(on_gpu: None, heads: int, kv: int, spare: int) -> None:
    inputs = random_inputs(5, heads, kv)
    documents = random_documents(5, seed=heads)
    core: Any = ScaledDotProductAttention(Model())
    core.mask = partial(core.mask, document_limit=int((documents.amax(1) + 1).sum()) + spare)
    computed = forward_backward(core, inputs, documents)
    expected = forward_backward(EagerAttention(Model()), inputs, documents)
    # float32 sums over up to 29 tokens and 6 heads, of numbers of size 1
    torch.testing.assert_close(computed, expected, rtol=0, atol=1e-5)


def test_offsets_are_where_documents_begin_and_then_the_number_of_tokens() -> None:
    for seed in range(5):
        documents = random_documents(4, seed)
        expected = [0]
        for row in documents:
            _, lengths = row.unique_consecutive(return_counts=True)
            for length in lengths.tolist():
                expected.append(expected[-1] + length)
        offsets = document_offsets(documents, limit=len(expected) - 1).tolist()
        room = len(offsets) - len(expected)
        assert offsets == expected + [documents.numel()] * room, seed


def test_the_shape_hardly_ever_changes() -> None:
    """A block is compiled again for another shape."""
    length = 1024
    usual, all_lengths = set(), set()
    for limit in range(2, 2 * length):
        offsets = document_offsets(torch.zeros(2, length, dtype=torch.int64), limit)
        all_lengths.add(len(offsets))
        if limit < 2 * length // 128:
            usual.add(len(offsets))
    assert usual == {2 * length // 128 + 1}, "linear in the sequence"
    assert len(all_lengths) <= 8


def test_a_cpu_and_an_unknown_limit_have_no_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = random_documents(3, seed=0)
    assert find_documents(ids, 100).offsets is None
    monkeypatch.setattr(varlen_attention, "has_flash_attention", lambda device: True)
    assert find_documents(ids, 0).offsets is None
    assert find_documents(ids, 100).offsets is not None


def test_the_kernel_takes_16_bit_and_some_widths() -> None:
    taken = [(torch.bfloat16, 64), (torch.float16, 256)]
    refused = [(torch.float32, 64), (torch.bfloat16, 20), (torch.bfloat16, 264)]
    for dtype, width in taken + refused:
        assert takes_varlen(torch.empty(1, 2, 3, width, dtype=dtype)) is ((dtype, width) in taken)


@pytest.mark.parametrize(
    ("capability", "has_flash", "is_installed"),
    [((7, 5), False, True), ((8, 0), True, True), ((9, 0), True, True), ((9, 0), True, False)],
)
def test_flash_attention_3_is_used_on_hopper_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], has_flash: bool, is_installed: bool
) -> None:
    activated: list[str] = []
    package = types.ModuleType("flash_attn_interface")
    package.__spec__ = types.SimpleNamespace() if is_installed else None  # type: ignore[assignment]  # find_spec reads it
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package if is_installed else None)  # type: ignore[arg-type]
    monkeypatch.setattr(varlen_attention, "activate_flash_attention_impl", activated.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    varlen_attention._use_flash_attention_3.cache_clear()
    device = torch.device("cuda", 0)
    for _ in range(2):
        assert varlen_attention.has_flash_attention(device) is has_flash
    assert activated == (["FA3"] if is_installed and capability == (9, 0) else [])
    varlen_attention._use_flash_attention_3.cache_clear()
    assert not varlen_attention.has_flash_attention(CPU)
