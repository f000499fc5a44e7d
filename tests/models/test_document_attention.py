"""Attention within documents, block by block: the numbers of the eager core."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from torchllm.config import Model
from torchllm.models import document_attention as module
from torchllm.models.attention import ScaledDotProductAttention
from torchllm.models.attention_cores import EagerAttention
from torchllm.models.document_attention import QUERY_BLOCK, document_attention

LENGTH = 29
WIDTH = 8


def random_documents(sequences: int, seed: int) -> Tensor:
    """Return documents (B, S) of 1 to 9 tokens; of the first sequence one document, of the second one per token."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.zeros(LENGTH, dtype=torch.int64), torch.arange(LENGTH)]
    while len(rows) < sequences:
        lengths = torch.randint(1, 10, (LENGTH,), generator=generator)
        rows.append(torch.arange(LENGTH).repeat_interleave(lengths)[:LENGTH])
    return torch.stack(rows)


class Inputs(NamedTuple):
    """Random inputs of an attention core: (B, S, heads, Q)."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor


def random_inputs(sequences: int, heads: int, kv: int, dtype: torch.dtype = torch.float32) -> Inputs:
    generator = torch.Generator().manual_seed(heads)

    def random(count: int) -> Tensor:
        return torch.randn(sequences, LENGTH, count, WIDTH, generator=generator).to(dtype)

    return Inputs(random(heads), random(kv), random(kv), random(heads))


class Results(NamedTuple):
    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def forward_backward(core: Any, inputs: Inputs, documents: Tensor | None) -> Results:
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out = core(*leaves, core.mask(documents))
    return Results(out.detach(), *torch.autograd.grad(out, leaves, inputs.d_out))


@pytest.mark.parametrize(("heads", "kv", "window", "block"), [(4, 2, 0, 1), (6, 1, 7, 8), (4, 4, 1, 64)])
def test_random_documents_in_blocks_are_eager_attention(
    heads: int, kv: int, window: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUERY_BLOCK", block)
    inputs = random_inputs(5, heads, kv)
    documents = random_documents(5, seed=heads)
    computed = forward_backward(ScaledDotProductAttention(Model(window=window)), inputs, documents)
    expected = forward_backward(EagerAttention(Model(window=window)), inputs, documents)
    # float32 sums over up to 29 tokens and 6 heads, of numbers of size 1
    torch.testing.assert_close(computed, expected, rtol=0, atol=1e-5)


def test_bfloat16_sums_the_gradients_of_keys_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float32 on the same numbers: bfloat16 rounds scores, weights and results once, not per block.

    Norms differ by 3.1e-3 at most; by 8e-3 where dk or dv is summed in bfloat16.
    """
    inputs = random_inputs(3, 4, 2, torch.bfloat16)
    documents = torch.zeros(3, LENGTH, dtype=torch.int64)
    expected = forward_backward(EagerAttention(Model()), Inputs(*(x.float() for x in inputs)), documents)
    for block in (1, 64):
        monkeypatch.setattr(module, "QUERY_BLOCK", block)
        computed = forward_backward(ScaledDotProductAttention(Model()), inputs, documents)
        for result, exact in zip(computed, expected, strict=True):
            assert result.dtype == torch.bfloat16
            assert (result.float() - exact).norm() <= 2**-8 * exact.norm()


def test_documents_need_not_follow_each_other() -> None:
    documents = torch.tensor([[3, 1] * 14 + [3]])
    inputs = random_inputs(1, 4, 2)
    computed = forward_backward(ScaledDotProductAttention(Model()), inputs, documents)
    expected = forward_backward(EagerAttention(Model()), inputs, documents)
    torch.testing.assert_close(computed, expected, rtol=0, atol=1e-5)


def test_the_operation_is_what_torch_expects_of_one() -> None:
    """Its schema, gradient and result without numbers agree with what it does; also when traced."""
    inputs = random_inputs(2, 4, 2)
    q, k, v = (x.requires_grad_() for x in inputs[:3])
    torch.library.opcheck(document_attention, (q, k, v, random_documents(2, seed=0), 7))


def test_only_the_pairs_near_a_window_are_computed() -> None:
    """Counted: without a window the pairs grow with the square of the sequence, with one in proportion to it."""

    def pairs(length: int, window: int) -> int:
        ids = torch.zeros(1, length, dtype=torch.int64)
        return sum(block.visible.numel() for block in module.query_blocks(ids, window))

    for window, expected in ((0, 1.9), (100, 1.0)):
        exponent = math.log2(pairs(16 * QUERY_BLOCK, window) / pairs(8 * QUERY_BLOCK, window))
        assert exponent == pytest.approx(expected, abs=0.05)
