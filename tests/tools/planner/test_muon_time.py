"""Muon's time at the end of a step: operations and bytes by hand, and by the optimizer's own order."""

from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from tests.tools.planner.test_comms import dgx_a100, link_rate
from tests.tools.planner.test_predict import case
from torchllm.config import Model, Optimizer
from torchllm.facts.flops import MatrixShape, target_shapes
from torchllm.optim import muon
from torchllm.tools.planner import muon_time
from torchllm.tools.planner.case import Case
from torchllm.tools.planner.compute import matmul_seconds
from torchllm.tools.planner.muon_time import (
    expert_exchange_seconds,
    expert_seconds,
    iteration_products,
    iteration_seconds,
    matrix_shapes,
    muon_seconds,
    orthogonalization_flops,
)
from torchllm.tools.planner.predict import predict

MODEL = Model(layers=3, hidden=1024, heads=8, kv_heads=2, ffn=4096, vocab=512)
SHAPES = {
    "gate": (4096, 1024),
    "up": (4096, 1024),
    "down": (1024, 4096),
    "q": (1024, 1024),
    "o": (1024, 1024),
    "k": (256, 1024),
    "v": (256, 1024),
}
"""of a block"""
ELEMENTS = 3 * (3 * 4096 + 2 * 1024 + 2 * 256) * 1024
"""of the matrices of all blocks"""
MATRICES = tuple(target_shapes(MODEL).values()) * MODEL.layers
BLOCKS = (0,) * MODEL.layers
"""all of one view"""


def muon_case(**layout: Any) -> Case:
    """A layout of the model, trained by Muon on machines whose links have no latency."""
    hardware = dgx_a100()
    links = tuple(replace(link, latency=0.0) for link in hardware.links)
    instant = replace(hardware, links=links)
    trained_by_adamw = case(model=MODEL, hardware=instant, **layout)
    return replace(trained_by_adamw, optimizer=Optimizer(name="muon"))


def seconds_of(shape: tuple[int, int]) -> float:
    """By hand: five iterations of three products."""
    m, n = sorted(shape)
    hardware = dgx_a100()
    gram = matmul_seconds(m, m, n, hardware)
    square = matmul_seconds(m, m, m, hardware)
    update = matmul_seconds(m, n, m, hardware)
    return 5 * (gram + square + update)


def seconds_of_rounds(rounds: list[list[muon.OwnedMatrices]]) -> float:
    """Return the seconds of rounds that take as long as their largest matrix each."""
    seconds = 0.0
    for matrices in rounds:
        seconds += max(seconds_of(matrix.shape) for matrix in matrices)
    return seconds


def test_operations_are_those_counted_by_hand() -> None:
    for shape in [MatrixShape(4096, 14336), MatrixShape(14336, 4096)]:
        flops = orthogonalization_flops(shape)
        assert flops == 5 * (4 * 4096**2 * 14336 + 2 * 4096**3), shape
        matrix = muon.OwnedMatrices(torch.empty(0), {}, tuple(shape))
        assert flops == muon.ITERATIONS * 2 * matrix.products, shape
        assert muon_time.ITERATIONS == muon.ITERATIONS, shape


def test_a_round_takes_as_long_as_its_largest_matrix() -> None:
    for owners in [1, 2, 4, 16, 32]:
        group: dict[str, Any] = {}
        shapes = list(target_shapes(MODEL).values())
        assert sorted(shapes) == sorted(SHAPES.values()), owners
        matrices = []
        for shape in shapes * MODEL.layers:
            matrices.append(muon.OwnedMatrices(torch.empty(0), group, tuple(shape)))
        expected = seconds_of_rounds(muon.deal(matrices, owners))
        seconds = iteration_seconds(tuple(shapes * MODEL.layers), owners, dgx_a100())
        assert seconds == pytest.approx(expected, rel=1e-12), owners


def test_each_rank_sends_its_shards_there_and_back_over_shards_and_over_tp() -> None:
    for zero_stage in [1, 2, 3]:
        layout = muon_case(dp_replicate=2, dp_shard=8, tp=4, zero_stage=zero_stage)
        in_node, between = layout.hardware.links[:2]
        sent = 2 * 2 * ELEMENTS / 32  # there and back, in 16 bits, of a rank's shards
        over_tp = 3 / 4 * sent / link_rate(in_node)
        # 8 ranks in pairs on 4 nodes: each sends to the six on other nodes over its own card
        over_shards = 6 / 8 * sent / link_rate(between)
        computing = iteration_seconds(MATRICES, 32, layout.hardware)
        expected = computing + over_tp + over_shards
        assert muon_seconds(layout, BLOCKS) == pytest.approx(expected, rel=1e-12), zero_stage
    whole = muon_case(dp_shard=8, zero_stage=0)  # all data-parallel ranks do all of the work of their tp rank
    assert muon_seconds(whole, BLOCKS) == iteration_seconds(MATRICES, 1, whole.hardware)


def test_a_step_with_muon_takes_so_much_longer_but_for_its_smaller_state() -> None:
    layout = muon_case(dp_shard=8)
    with_adamw = replace(layout, optimizer=Optimizer())
    longer = predict(layout).step - predict(with_adamw).step
    assert longer == pytest.approx(muon_seconds(layout, BLOCKS), rel=1e-6)
    assert muon_seconds(with_adamw, BLOCKS) == 0.0


def test_experts_are_orthogonalized_where_they_are() -> None:
    """16 experts on 8 ranks: two each, of three matrices; attention is shared out as without."""
    sparse = with_experts(16)
    hardware = dgx_a100()
    per_expert = 0.0
    for product in iteration_products(MatrixShape(256, sparse.hidden)):
        per_expert += 5 * matmul_seconds(*product, hardware)
    seconds = expert_seconds(sparse, 3, 8, hardware)
    assert seconds == pytest.approx(3 * 3 * 2 * per_expert, rel=1e-12)
    assert len(matrix_shapes(sparse)) == 4  # q, k, v, o
    assert len(matrix_shapes(replace(sparse, shared_experts=1))) == 7


def test_blocks_of_different_views_share_the_rounds() -> None:
    sparse = with_experts(16)
    first_dense = replace(muon_case(), model=replace(sparse, dense_layers=1))
    alone = muon_seconds(muon_case(), (0,)) + muon_seconds(replace(muon_case(), model=sparse), (0, 0))
    assert muon_seconds(first_dense, (0, 1, 1)) == pytest.approx(alone, rel=1e-12)  # one rank, so there is no round
    of_experts = expert_seconds(sparse, 2, 8, dgx_a100())
    of_rounds = muon_seconds(replace(first_dense, parallel=muon_case(dp_shard=8).parallel), (0, 1, 1)) - of_experts
    matrices = [*SHAPES.values(), *2 * [SHAPES[name] for name in "qokv"]]  # 7 of a dense block, 4 of each sparse one
    owned = [muon.OwnedMatrices(torch.empty(0), {}, shape) for shape in matrices]
    assert (
        seconds_of_rounds(muon.deal(owned, 8)) < of_rounds < 1.2 * seconds_of_rounds(muon.deal(owned, 8))
    )  # sent, too


def with_experts(count: int) -> Model:
    """Return the model with experts of width 256 in every block."""
    return replace(MODEL, experts=count, top_k=2, expert_ffn=256)


class CutExperts(NamedTuple):
    """A layout of experts, and how many ranks cut one of them."""

    group: int
    experts: int = 16
    dp_shard: int = 8
    tp: int = 1
    ep: int = 1

    def layout(self) -> Case:
        dense = muon_case(dp_shard=self.dp_shard, tp=self.tp)
        parallel = replace(dense.parallel, ep=self.ep)
        return replace(dense, model=with_experts(self.experts), parallel=parallel)

    def sent(self) -> float:
        """Return by hand what a rank sends: its share of three matrices, to all of the group but itself.

        There and back, in 16 bits.
        """
        elements = 3 * 3 * self.experts * 256 * MODEL.hidden
        share = elements / (self.dp_shard * self.tp)
        return 2 * 2 * share * (self.group - 1) / self.group


def test_parts_of_experts_are_sent_where_ranks_cut_them() -> None:
    for cut in [
        CutExperts(group=1),  # whole experts
        CutExperts(dp_shard=2, tp=4, group=4),  # their features
        CutExperts(ep=2, group=1),  # 8 experts of 4 ranks
        CutExperts(ep=2, experts=4, group=4),  # 2 experts of 4 ranks: hidden states
        CutExperts(tp=2, ep=16, group=1),
    ]:
        layout = cut.layout()
        in_node = layout.hardware.links[0]
        expected = cut.sent() / link_rate(in_node)
        assert expert_exchange_seconds(layout, 3) == pytest.approx(expected, rel=1e-12), cut
        seconds = muon_seconds(layout, BLOCKS)
        with mock.patch.object(muon_time, "expert_exchange_seconds", return_value=0.0):
            without_exchange = muon_seconds(layout, BLOCKS)
        assert seconds - without_exchange == pytest.approx(expected, abs=1e-9 * without_exchange), cut
