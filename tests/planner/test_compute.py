"""Kernel times: never under the roofline, slower where tiles are few or shallow, fused where it says so."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.test_comms import dgx_a100
from torchllm.config import Model, Recompute
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
        found = attention(MODEL, PIECE, Kernels(kind), SOFTWARE, A100, False)  # type: ignore[arg-type]
        return found.attention + found.elementwise

    assert seconds("eager") > seconds("fused_softmax") > seconds("flash1") > seconds("flash2")


def test_fusing_moves_fewer_bytes() -> None:
    def moved(kernels: Kernels) -> float:
        return elementwise(MODEL, PIECE, kernels, SOFTWARE, A100, False).elementwise

    assert moved(Kernels()) > moved(Kernels(fused_norm=True)) > moved(Kernels(compiled=True))


def test_sequence_parallel_ranks_share_norms_and_residuals() -> None:
    alone = elementwise(MODEL, PIECE._replace(tp=8), Kernels(), SOFTWARE, A100, False).elementwise
    shared = elementwise(MODEL, PIECE._replace(tp=8, spread=8), Kernels(), SOFTWARE, A100, False).elementwise
    assert shared < 0.4 * alone


def test_gathered_logits_cost_every_rank_the_whole_loss() -> None:
    piece = PIECE._replace(tp=8)
    shared = head_seconds(MODEL, piece, Kernels(), SOFTWARE, A100)[0]
    gathered = head_seconds(MODEL, piece, Kernels(), replace(SOFTWARE, whole_logits=True), A100)[0]
    assert gathered.matmul == shared.matmul
    assert gathered.elementwise == pytest.approx(8 * shared.elementwise)


def test_the_embeddings_gradient_is_a_whole_table() -> None:
    larger = replace(MODEL, vocab=128000)
    small, large = (embedding_seconds(model, PIECE, SOFTWARE, A100)[1].elementwise for model in (MODEL, larger))
    assert large > 3 * small


def test_what_is_recomputed() -> None:
    forward = block_forward(MODEL, PIECE, Kernels(), SOFTWARE, A100)
    core = attention(MODEL, PIECE, Kernels(), SOFTWARE, A100, False)
    around = elementwise(MODEL, PIECE, Kernels(), SOFTWARE, A100, False)

    def again(mode: str, software: object = SOFTWARE) -> float:
        return sum(recomputed(MODEL, Recompute(mode=mode), forward, core, around, software)[:3])  # type: ignore[arg-type]

    assert again("none") == 0
    assert again("full") == again("segment") == pytest.approx(2 * again("every_k"))
    assert 0 < again("ffn") < again("full")
    assert again("selective") == pytest.approx(sum(around[:3]))
    assert again("selective") < again("selective_half") < again("full") - sum(core[:3])
    assert again("selective", replace(SOFTWARE, recomputes_attention_only=True)) == pytest.approx(sum(core[:3]))
    assert again("selective", replace(SOFTWARE, keeps_every_other=True)) == again("selective_half")
