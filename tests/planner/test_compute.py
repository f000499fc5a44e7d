"""Kernel times: never under the roofline, slower where tiles are few or shallow, fused where it says so."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.test_comms import dgx_a100
from torchllm.config import Model, Recompute
from torchllm.config.schema import RecomputeMode
from torchllm.planner.compute import (
    Kernels,
    Piece,
    attention,
    block_backward,
    block_forward,
    elementwise,
    embedding_seconds,
    head_seconds,
    matmul_seconds,
    products,
    recomputed,
)
from torchllm.planner.evidence.stacks import STACKS
from torchllm.spec.cluster import read_cluster
from torchllm.spec.software import Software

A100 = dgx_a100()
MODEL = Model(layers=4, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000)
SOFTWARE = STACKS["torchllm"]
PIECE = Piece(1, 2048, 2048, 1, 1)
sizes = st.integers(64, 16384)


@settings(deadline=None)
@given(sizes, sizes, sizes)
def test_a_product_is_under_its_roofline(m: int, n: int, k: int) -> None:
    seconds = matmul_seconds(m, n, k, A100)
    assert seconds >= 2 * m * n * k / A100.achievable
    assert seconds >= 2 * (m * k + k * n + m * n) / A100.memory_bandwidth
    assert matmul_seconds(m, n, 2 * k, A100) >= seconds


def test_a_large_product_reaches_nearly_what_can_be_reached() -> None:
    rate = 2 * 16384**3 / matmul_seconds(16384, 16384, 16384, A100)
    assert 0.95 * A100.achievable < rate <= A100.achievable


@pytest.mark.parametrize(("share", "gain"), [(0.0, 1.0), (0.8, 1.6), (0.62, 1.24)])
def test_products_in_float8_gain_their_share_of_the_peaks(share: float, gain: float) -> None:
    h100 = read_cluster("dgx_h100", [])
    assert h100 is not None
    size = 16384
    seconds = matmul_seconds(size, size, size, h100, share)
    assert matmul_seconds(size, size, size, h100) / seconds == pytest.approx(gain, rel=1e-3)


def test_narrow_products_are_slower_for_their_size() -> None:
    """Hence tensor parallelism, and small micro batches, cost more than their share."""

    def rate(m: int, n: int) -> float:
        return 2 * m * n * 4096 / matmul_seconds(m, n, 4096, A100)

    assert rate(2048, 4096) < rate(8192, 4096) < rate(8192, 16384)
    assert rate(2048, 512) < 0.8 * rate(2048, 4096)


def test_a_blocks_products_are_its_matrices() -> None:
    elements = 2 * 4096 * (32 + 8) * 128 + 3 * 4096 * 14336
    assert sum(outs * ins for outs, ins in products(MODEL, 1)) == elements
    assert sum(outs * ins for outs, ins in products(MODEL, 4)) == elements / 4


def test_a_backward_is_twice_the_products() -> None:
    forward = block_forward(MODEL, PIECE, Kernels(), SOFTWARE, A100)
    inputs, weights = block_backward(MODEL, PIECE, Kernels(), SOFTWARE, A100)
    assert inputs.matmul + weights.matmul == pytest.approx(2 * forward.matmul, rel=0.05)


def test_flash_attention_computes_half_of_a_causal_mask() -> None:
    """Of a sequence so long that its kernel reaches its rate."""
    long = Piece(1, 2**20, 2**20, 1, 1)
    seconds = attention(MODEL, long, Kernels("flash2"), SOFTWARE, A100, False).attention
    assert seconds == pytest.approx(2 * 2**40 * 32 * 128 / A100.attention.flash2, rel=0.01)
    assert attention(MODEL, long, Kernels("flash2"), SOFTWARE, A100, True).attention > 2.5 * seconds


def test_scores_in_memory_are_slower_than_none() -> None:
    def seconds(kind: str) -> float:
        core = attention(MODEL, PIECE, Kernels(kind), SOFTWARE, A100, False)  # type: ignore[arg-type]
        return core.attention + core.elementwise

    assert seconds("eager") > seconds("fused_softmax") > seconds("flash1") > seconds("flash2")


def test_fusing_moves_fewer_bytes() -> None:
    def moved(kernels: Kernels) -> float:
        return elementwise(MODEL, PIECE, kernels, SOFTWARE, A100, False).elementwise

    assert moved(Kernels()) > moved(Kernels(fused_norm=True)) > moved(Kernels(compiled=True))


def test_sequence_parallel_ranks_share_norms_and_residuals() -> None:
    whole, shared = PIECE._replace(tp=8), PIECE._replace(tp=8, spread=8)
    alone = elementwise(MODEL, whole, Kernels(), SOFTWARE, A100, False)
    together = elementwise(MODEL, shared, Kernels(), SOFTWARE, A100, False)
    assert together.elementwise < 0.4 * alone.elementwise


def test_gathered_logits_cost_every_rank_the_whole_loss() -> None:
    piece = PIECE._replace(tp=8)
    gathers = replace(SOFTWARE, whole_logits=True)
    shared, *_ = head_seconds(MODEL, piece, Kernels(), SOFTWARE, A100)
    gathered, *_ = head_seconds(MODEL, piece, Kernels(), gathers, A100)
    assert gathered.matmul == shared.matmul
    assert gathered.elementwise == pytest.approx(8 * shared.elementwise)


def test_the_embeddings_gradient_is_a_whole_table() -> None:
    larger = replace(MODEL, vocab=128000)
    _, small_gradient = embedding_seconds(MODEL, PIECE, SOFTWARE, A100)
    _, large_gradient = embedding_seconds(larger, PIECE, SOFTWARE, A100)
    assert large_gradient.elementwise > 3 * small_gradient.elementwise


def test_what_is_recomputed() -> None:
    forward = block_forward(MODEL, PIECE, Kernels(), SOFTWARE, A100)
    core = attention(MODEL, PIECE, Kernels(), SOFTWARE, A100, False)
    elementwise_work = elementwise(MODEL, PIECE, Kernels(), SOFTWARE, A100, False)
    core_seconds, elementwise_seconds = sum(core[:3]), sum(elementwise_work[:3])

    def seconds(mode: RecomputeMode, software: Software = SOFTWARE) -> float:
        recompute = Recompute(mode=mode)
        return sum(recomputed(MODEL, recompute, forward, core, elementwise_work, software)[:3])

    assert seconds("none") == 0
    assert seconds("full") == seconds("segment") == pytest.approx(2 * seconds("every_k"))
    assert 0 < seconds("ffn") < seconds("full")
    assert seconds("selective") == pytest.approx(elementwise_seconds)
    assert seconds("selective") < seconds("selective_half") < seconds("full") - core_seconds
    of_attention = replace(SOFTWARE, recomputes_attention_only=True)
    assert seconds("selective", of_attention) == pytest.approx(core_seconds)
    every_other = replace(SOFTWARE, keeps_every_other=True)
    assert seconds("selective", every_other) == seconds("selective_half")
