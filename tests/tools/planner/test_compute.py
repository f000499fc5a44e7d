"""Kernel times: never under the roofline, slower where tiles are few or shallow, fused where it says so."""

import functools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.planner.test_comms import dgx_a100
from torchllm.config import Model, Recompute
from torchllm.config.schema import RecomputeMode
from torchllm.tools.planner.compute import (
    Kernels,
    Piece,
    Seconds,
    attention,
    block_forward,
    elementwise,
    matmul_seconds,
    recomputed,
)
from torchllm.tools.planner.software import TORCHLLM, AttentionKernel, Software

a100 = functools.cache(dgx_a100)
MODEL = Model(layers=4, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000)
SOFTWARE = TORCHLLM
PIECE = Piece(1, 2048, 2048, 1, 1)
PLAIN = Kernels()
sizes = st.integers(64, 16384)


def attention_seconds(kernels: Kernels, piece: Piece = PIECE, backward: bool = False) -> Seconds:
    """Return the time of a block's attention on an A100."""
    return attention(MODEL, piece, kernels, SOFTWARE, a100(), backward)


def elementwise_seconds(kernels: Kernels, piece: Piece = PIECE) -> Seconds:
    """Return the time of the elementwise work of a block's forward on an A100."""
    return elementwise(MODEL, piece, kernels, SOFTWARE, a100(), False)


def seconds_of(work: Seconds) -> float:
    """Return what matrix products, attention and elementwise work take together."""
    return work.matmul + work.attention + work.elementwise


@settings(deadline=None, derandomize=True)
@given(sizes, sizes, sizes)
def test_a_product_is_under_its_roofline(m: int, n: int, k: int) -> None:
    seconds = matmul_seconds(m, n, k, a100())
    flops = 2 * m * n * k
    elements = m * k + k * n + m * n
    assert seconds >= flops / a100().achievable
    assert seconds >= 2 * elements / a100().memory_bandwidth
    assert matmul_seconds(m, n, 2 * k, a100()) >= seconds


def test_flash_attention_computes_half_of_a_causal_mask() -> None:
    """Of a sequence so long that its kernel reaches its rate."""
    kernels = Kernels("flash2")
    long = Piece(1, 2**20, 2**20, 1, 1)
    forward = attention_seconds(kernels, long)
    operations = 2 * 2**40 * 32 * 128
    assert forward.attention == pytest.approx(operations / a100().attention.flash2, rel=0.01)
    backward = attention_seconds(kernels, long, backward=True)
    assert backward.attention > 2.5 * forward.attention


def test_norms_of_queries_and_keys_take_bytes_and_kernels() -> None:
    for kernels in [PLAIN, Kernels(fused_norm=True)]:
        plain = elementwise_seconds(kernels)
        with_norms = elementwise(replace(MODEL, qk_norm="head"), PIECE, kernels, SOFTWARE, a100(), False)
        assert with_norms.elementwise > plain.elementwise, kernels
        assert with_norms.kernels > plain.kernels, kernels


def test_scores_in_memory_are_slower_than_none() -> None:
    def seconds(kind: AttentionKernel) -> float:
        work = attention_seconds(Kernels(kind))
        return work.attention + work.elementwise

    assert seconds("eager") > seconds("fused_softmax")
    assert seconds("fused_softmax") > seconds("flash1")
    assert seconds("flash1") > seconds("flash2")


def recomputed_seconds(mode: RecomputeMode, software: Software = SOFTWARE) -> float:
    """Return the seconds of what a block computes again."""
    forward = block_forward(MODEL, PIECE, PLAIN, SOFTWARE, a100())
    recompute = Recompute(mode=mode)
    work = recomputed(MODEL, recompute, forward, attention_seconds(PLAIN), elementwise_seconds(PLAIN), software)
    return seconds_of(work)


def test_what_is_recomputed() -> None:
    full = recomputed_seconds("full")
    assert recomputed_seconds("none") == 0
    assert recomputed_seconds("segment") == full
    assert full == pytest.approx(2 * recomputed_seconds("every_k"))
    assert 0 < recomputed_seconds("ffn") < full
    selective = recomputed_seconds("selective")
    half_of_products = recomputed_seconds("selective_half")
    assert selective == pytest.approx(seconds_of(elementwise_seconds(PLAIN)))
    assert selective < half_of_products
    assert half_of_products < full - seconds_of(attention_seconds(PLAIN))


def test_frameworks_differ_in_what_selective_recomputation_is() -> None:
    of_attention = replace(SOFTWARE, recomputes_attention_only=True)
    assert recomputed_seconds("selective", of_attention) == pytest.approx(seconds_of(attention_seconds(PLAIN)))
    every_other = replace(SOFTWARE, keeps_every_other=True)
    assert recomputed_seconds("selective", every_other) == recomputed_seconds("selective_half")
