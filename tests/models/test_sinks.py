"""Attention with sinks: both cores against a softmax over one more key, with documents, windows and grouped heads."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.test_document_attention import LENGTH, WIDTH, random_documents
from torchllm.config import Model
from torchllm.models import document_attention
from torchllm.models.attention import core_class
from torchllm.models.cached_attention import CachedAttention
from torchllm.models.sinks import sink_attention

pytestmark = pytest.mark.quick
EXACT = 1e-13  # of float64 sums of up to 29 terms of size 1, in another order
Tensors = list[Tensor]


def random_inputs(heads: int, kv: int, dtype: torch.dtype = torch.float64) -> Tensors:
    """Return q, k, v and the sinks, of which some are large."""
    generator = torch.Generator().manual_seed(heads)
    shapes = ((3, LENGTH, heads, WIDTH), (3, LENGTH, kv, WIDTH), (3, LENGTH, kv, WIDTH), (heads,))
    q, k, v, sinks = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.to(dtype) for x in (q, k, v, 3 * sinks)]


def by_definition(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, ids: Tensor, window: int) -> Tensor:
    """Attention over one more key, head by head, for autograd: its score is the sink and its value is 0."""
    position = torch.arange(q.shape[1])
    distance = position[:, None] - position[None, :]
    visible = (distance >= 0) & (distance < (window or len(position))) & (ids[:, :, None] == ids[:, None, :])
    outs = []
    for head in range(q.shape[2]):
        kv_head = head // (q.shape[2] // k.shape[2])
        scores = q[:, :, head] @ k[:, :, kv_head].mT * WIDTH**-0.5
        scores = torch.cat((scores.masked_fill(~visible, -torch.inf), sinks[head].expand(*q.shape[:2], 1)), dim=2)
        values = torch.cat((v[:, :, kv_head], torch.zeros(len(q), 1, WIDTH, dtype=v.dtype)), dim=1)
        outs.append(scores.softmax(-1) @ values)
    return torch.stack(outs, dim=2)


def with_gradients(out: Tensor, inputs: Tensors) -> Tensors:
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


@pytest.mark.parametrize(("heads", "kv", "window", "block"), [(4, 2, 0, 64), (6, 1, 7, 8), (4, 4, 1, 64), (4, 2, 3, 1)])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("with_documents", [False, True])
def test_a_sink_is_one_more_key(
    heads: int, kv: int, window: int, block: int, attention: Any, with_documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out and the gradients of q, k, v and the sinks.

    FOOTGUN: a sink that autograd adds to what a fused kernel returns has the right out, and wrong gradients of q and k.
    """
    monkeypatch.setattr(document_attention, "QUERY_BLOCK", block)
    documents = random_documents(3, seed=heads) if with_documents else None
    model = Model(sinks=True, attention=attention, window=window)
    core = core_class(model)(model)
    inputs = [x.requires_grad_() for x in random_inputs(heads, kv)]
    q, k, v, sinks = inputs
    ids = torch.zeros(3, LENGTH, dtype=torch.int64) if documents is None else documents
    expected = with_gradients(by_definition(q, k, v, sinks, ids, window), inputs)
    results = with_gradients(core(q, k, v, core.mask(documents), sinks), inputs)
    for result, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(result, exact, rtol=0, atol=EXACT * max(1.0, float(exact.abs().max())))


def test_bfloat16_rounds_each_result_once() -> None:
    """2**-8 for out and for each of q, k and v; the sums of the backward are float32."""
    exact = [x.requires_grad_() for x in random_inputs(4, 2, torch.bfloat16)]
    wide = [x.detach().double().requires_grad_() for x in exact]
    model = Model(sinks=True)
    core = core_class(model)(model)
    results = with_gradients(core(*exact[:3], None, exact[3]), exact)
    expected = with_gradients(by_definition(*wide, torch.zeros(3, LENGTH), 0), wide)
    for result, whole in zip(results, expected, strict=True):
        assert result.dtype == torch.bfloat16
        assert (result.double() - whole).norm() <= 2**-6 * whole.norm()


def test_the_operation_is_one_to_torch() -> None:
    """Its shapes for tracing, its gradients, and that it changes no input."""
    q, k, v, sinks = (x.requires_grad_() for x in random_inputs(4, 2, torch.float32))
    for ids in (None, random_documents(3, seed=0)):
        torch.library.opcheck(sink_attention, (q, k, v, sinks, ids, None, 7 if ids is not None else 0, None))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("window", [0, 5])
def test_a_cache_gives_the_same(attention: Any, window: int) -> None:
    model = Model(sinks=True, attention=attention, window=window)
    core = core_class(model)(model)
    q, k, v, sinks = random_inputs(4, 2)
    cached = CachedAttention(core, room=LENGTH)
    parts = [(0, 9), *((i, i + 1) for i in range(9, LENGTH))]
    outs = [cached(q[:, a:b], k[:, a:b], v[:, a:b], cached.mask(None), sinks) for a, b in parts]
    expected = by_definition(q, k, v, sinks, torch.zeros(3, LENGTH), window)
    torch.testing.assert_close(torch.cat(outs, dim=1), expected, rtol=0, atol=EXACT)


def test_padding_is_hidden_from_later_tokens() -> None:
    """The second text has 4 tokens fewer before it; which tokens the prompts see is the mask's, not the cache's."""
    model = Model(sinks=True)
    core = core_class(model)(model)
    q, k, v, sinks = random_inputs(4, 2)
    padding = torch.zeros(3, 9, dtype=torch.bool)
    padding[1, :4] = True
    cached = CachedAttention(core, room=LENGTH, padding=padding)
    cached(q[:, :9], k[:, :9], v[:, :9], cached.mask(None), sinks)
    out = cached(q[:, 9:10], k[:, 9:10], v[:, 9:10], None, sinks)
    expected = by_definition(q[1:2, 4:10], k[1:2, 4:10], v[1:2, 4:10], sinks, torch.zeros(1, 6), 0)
    torch.testing.assert_close(out[1], expected[0, -1:], rtol=0, atol=EXACT)
