"""Gated DeltaNet in chunks is a recurrence over tokens; documents, sizes, what is kept."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torchllm.facts.parts.gated_delta import DeltaSizes
from torchllm.models.parts.delta_rule import DeltaCore, HeadWeights, Streams

EXACT = 1e-12  # of the largest element, in float64: the same sums in another order
BATCH, KEY_HEADS, VALUE_HEADS, KEY_WIDTH, VALUE_WIDTH, KERNEL = 2, 2, 4, 6, 5, 4

SIZES = DeltaSizes(KEY_HEADS, VALUE_HEADS, KEY_WIDTH, VALUE_WIDTH, KERNEL)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def streams_of(length: int) -> Streams:
    return Streams(
        q=random(BATCH, length, KEY_HEADS, KEY_WIDTH, seed=1),
        k=random(BATCH, length, KEY_HEADS, KEY_WIDTH, seed=2),
        v=random(BATCH, length, VALUE_HEADS, VALUE_WIDTH, seed=3),
        a=random(BATCH, length, VALUE_HEADS, seed=4) * 2 - 3,  # decays of a token: from 0.5 to 0.999
        b=random(BATCH, length, VALUE_HEADS, seed=5),
    )


def weights_of() -> HeadWeights:
    return HeadWeights(
        q_conv=random(KEY_HEADS * KEY_WIDTH, KERNEL, seed=6),
        k_conv=random(KEY_HEADS * KEY_WIDTH, KERNEL, seed=7),
        v_conv=random(VALUE_HEADS * VALUE_WIDTH, KERNEL, seed=8),
        A_log=random(VALUE_HEADS, seed=9) * 0.5,
        dt_bias=random(VALUE_HEADS, seed=10) * 0.5,
    )


def documents_of(lengths: list[int]) -> Tensor:
    """Return the ids of one sequence."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def token_by_token(streams: Streams, weights: HeadWeights, ids: Tensor | None, largest_beta: float = 1.0) -> Tensor:
    """The recurrence as its definition has it, one token after the other, with a state that documents reset."""
    length = streams.a.shape[1]
    ids = torch.zeros(BATCH, length) if ids is None else ids
    q, k, v = (convolution(x, weight, ids) for x, weight in zip(streams[:3], weights[:3], strict=True))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (torch.stack([x[:, :, head * KEY_HEADS // VALUE_HEADS] for head in range(VALUE_HEADS)], 2) for x in (q, k))
    decay = torch.exp(-torch.exp(weights.A_log) * torch.log1p(torch.exp(streams.a + weights.dt_bias)))
    beta = largest_beta / (1 + torch.exp(-streams.b))
    state = torch.zeros(BATCH, VALUE_HEADS, KEY_WIDTH, VALUE_WIDTH, dtype=torch.float64)
    outs = []
    for token in range(length):
        if token:
            state = state.where((ids[:, token] == ids[:, token - 1])[:, None, None, None], 0.0)
        state = state * decay[:, token, :, None, None]
        missing = v[:, token] - torch.einsum("bhkv,bhk->bhv", state, k[:, token])
        state = state + beta[:, token, :, None, None] * torch.einsum("bhk,bhv->bhkv", k[:, token], missing)
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, token]) * KEY_WIDTH**-0.5)
    return torch.stack(outs, 1)


def convolution(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    outs = []
    for token in range(x.shape[1]):
        total = torch.zeros_like(x[:, 0])
        for back in range(min(KERNEL, token + 1)):
            is_same = (ids[:, token - back] == ids[:, token])[:, None, None]
            total = total + (x[:, token - back] * weight[:, KERNEL - 1 - back].view_as(x[0, 0])).where(is_same, 0.0)
        outs.append(total * total.sigmoid())
    return torch.stack(outs, 1)


def results(compute: Callable[[Streams, HeadWeights], Tensor], streams: Streams, weights: HeadWeights) -> list[Tensor]:
    """Return the outputs, and the gradients of all inputs."""
    inputs = [x.clone().requires_grad_() for x in (*streams, *weights)]
    out = compute(Streams(*inputs[:5]), HeadWeights(*inputs[5:]))
    d_out = random(*out.shape, seed=11)
    return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]


LENGTHS = {
    "one token": [1],
    "a part of a chunk": [37],
    "chunks": [128],
    "a chunk and a token": [65],
    "documents in a chunk": [3, 1, 1, 20, 2],
    "documents over chunks": [70, 1, 57, 5],
    "documents that end with chunks": [64, 1, 63, 5],
}


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("name", LENGTHS)
def test_chunks_are_the_recurrence_over_tokens(name: str, negative: bool) -> None:
    lengths = LENGTHS[name]
    streams, weights = streams_of(sum(lengths)), weights_of()
    ids = None
    if len(lengths) > 1:
        ids = torch.stack((documents_of(lengths), documents_of(lengths[::-1])))
    core = DeltaCore(SIZES._replace(negative_eigenvalues=negative))
    found = results(lambda s, w: core(s, w, core.mask(ids)), streams, weights)
    expected = results(lambda s, w: token_by_token(s, w, ids, 2.0 if negative else 1.0), streams, weights)
    for result, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=0, atol=EXACT * float(reference.abs().max().clamp(min=1.0)))


def test_16_bit_inputs_lose_no_more_than_their_rounding() -> None:
    """The state is float32: over 300 tokens that hardly decay, the error is the inputs' and the result's alone."""
    streams, weights = streams_of(300), weights_of()._replace(A_log=torch.full((VALUE_HEADS,), -9.0))
    rounded = Streams(*(x.bfloat16() for x in streams)), HeadWeights(*(x.bfloat16() for x in weights))
    found = DeltaCore(SIZES)(*rounded, None)
    expected = token_by_token(
        Streams(*(x.double() for x in rounded[0])), HeadWeights(*(x.double() for x in rounded[1])), None
    )
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-4)


def test_the_backward_keeps_the_inputs_alone() -> None:
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    streams, weights = streams_of(256), weights_of()
    inputs = [x.requires_grad_() for x in (*streams, *weights)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        DeltaCore(SIZES)(Streams(*inputs[:5]), HeadWeights(*inputs[5:]), None)
    *others, ids = kept
    assert ids.dtype == torch.int64
    assert [x.data_ptr() for x in others] == [x.data_ptr() for x in inputs]
