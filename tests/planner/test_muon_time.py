"""Muon's time at the end of a step: operations and bytes by hand, and by the optimizer's own order."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.planner.test_comms import dgx_a100
from tests.planner.test_predict import case
from torchllm.config import Lora, Model, Optimizer
from torchllm.optim import muon
from torchllm.planner import muon_time
from torchllm.planner.case import Case
from torchllm.planner.compute import matmul_seconds
from torchllm.planner.muon_time import (
    expert_exchange_seconds,
    expert_seconds,
    iteration_products,
    iteration_seconds,
    matrix_shapes,
    muon_seconds,
    orthogonalization_flops,
)
from torchllm.planner.predict import predict
from torchllm.spec.flops import MatrixShape, target_shapes

MODEL = Model(layers=3, hidden=1024, heads=8, kv_heads=2, ffn=4096, vocab=512)
SHAPES = [(4096, 1024)] * 2 + [(1024, 4096)] + [(1024, 1024)] * 2 + [(256, 1024)] * 2
"""of a block, the most costly first: gate, up, down, q, o, k, v"""
ELEMENTS = 3 * (3 * 4096 + 2 * 1024 + 2 * 256) * 1024
"""of the matrices of all blocks"""


def muon_case(**layout: Any) -> Case:
    """A layout of the model, trained by Muon on machines whose links have no latency."""
    hardware = dgx_a100()
    links = tuple(replace(link, latency=0.0) for link in hardware.links)
    layout = case(model=MODEL, hardware=replace(hardware, links=links), **layout)
    return replace(layout, optimizer=Optimizer(name="muon"))


def seconds_of(shape: tuple[int, int]) -> float:
    """By hand: five iterations of three products."""
    m, n = sorted(shape)
    hardware = dgx_a100()
    products = [(m, m, n), (m, m, m), (m, n, m)]
    return 5 * sum(matmul_seconds(*product, hardware) for product in products)


@pytest.mark.parametrize("shape", [MatrixShape(4096, 14336), MatrixShape(14336, 4096)])
def test_operations_are_those_counted_by_hand(shape: MatrixShape) -> None:
    assert orthogonalization_flops(shape) == 5 * (4 * 4096**2 * 14336 + 2 * 4096**3)
    matrix = muon.OwnedMatrices(torch.empty(0), {}, tuple(shape))
    assert orthogonalization_flops(shape) == muon.ITERATIONS * 2 * matrix.products
    assert muon_time.ITERATIONS == muon.ITERATIONS


@pytest.mark.parametrize("owners", [1, 2, 4, 16, 32])
def test_a_round_takes_as_long_as_its_largest_matrix(owners: int) -> None:
    group: dict[str, Any] = {}
    shapes = [shape for _ in range(MODEL.layers) for shape in target_shapes(MODEL).values()]
    assert sorted(shapes) == sorted(SHAPES * MODEL.layers)
    matrices = [muon.OwnedMatrices(torch.empty(0), group, tuple(shape)) for shape in shapes]
    rounds = muon.deal(matrices, owners)
    expected = sum(max(seconds_of(matrix.shape) for matrix in of_round) for of_round in rounds)
    assert iteration_seconds(MODEL, MODEL.layers, owners, dgx_a100()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_each_rank_sends_its_shards_there_and_back_over_shards_and_over_tp(zero_stage: int) -> None:
    layout = muon_case(dp_replicate=2, dp_shard=8, tp=4, zero_stage=zero_stage)
    in_node, between = layout.hardware.links[:2]
    sent = 2 * 2 * ELEMENTS / 32  # there and back, in 16 bits, of a rank's shards
    over_tp = 3 / 4 * sent / (in_node.bandwidth * in_node.efficiency)
    # 8 ranks in pairs on 4 nodes: each sends to the six on other nodes over its own card
    over_shards = 6 / 8 * sent / (between.bandwidth * between.efficiency)
    expected = iteration_seconds(MODEL, 3, 32, layout.hardware) + over_tp + over_shards
    assert muon_seconds(layout, 3) == pytest.approx(expected, rel=1e-12)


def test_whole_weights_are_not_shared() -> None:
    """zero_stage 0: all data-parallel ranks do all of the work of their tp rank, and send over tp alone."""
    layout = muon_case(dp_shard=8, zero_stage=0)
    assert muon_seconds(layout, 3) == iteration_seconds(MODEL, 3, 1, layout.hardware)


def test_a_step_with_muon_takes_so_much_longer_but_for_its_smaller_state() -> None:
    layout = muon_case(dp_shard=8)
    without = replace(layout, optimizer=Optimizer())
    longer = predict(layout).step - predict(without).step
    assert longer == pytest.approx(muon_seconds(layout, 3), rel=1e-6)
    assert muon_seconds(without, 3) == 0.0
    assert muon_seconds(replace(layout, lora=Lora(rank=4)), 3) == 0.0  # no matrix is trained


def test_experts_are_orthogonalized_where_they_are() -> None:
    """16 experts on 8 ranks: two each, of three matrices; attention is shared out as without."""
    sparse = replace(MODEL, experts=16, top_k=2, expert_ffn=256)
    hardware = dgx_a100()
    products = iteration_products(MatrixShape(256, sparse.hidden))
    per_expert = 5 * sum(matmul_seconds(*product, hardware) for product in products)
    assert expert_seconds(sparse, 3, 8, hardware) == pytest.approx(3 * 3 * 2 * per_expert, rel=1e-12)
    assert len(matrix_shapes(sparse)) == 4  # q, k, v, o
    assert len(matrix_shapes(replace(sparse, shared_experts=1))) == 7
    layout = muon_case(dp_shard=8)
    with_muon = replace(layout, model=sparse)
    assert predict(with_muon).step > predict(replace(with_muon, optimizer=Optimizer())).step


@pytest.mark.parametrize(
    ("degrees", "experts", "group"),
    [
        ({"dp_shard": 8}, 16, 1),  # whole experts
        ({"dp_shard": 2, "tp": 4}, 16, 4),  # their features
        ({"dp_shard": 8, "ep": 2}, 16, 1),  # 8 experts of 4 ranks
        ({"dp_shard": 8, "ep": 2}, 4, 4),  # 2 experts of 4 ranks: hidden states
        ({"dp_shard": 8, "tp": 2, "ep": 16}, 16, 1),
    ],
)
def test_parts_of_experts_are_sent_where_ranks_cut_them(degrees: dict[str, int], experts: int, group: int) -> None:
    """There and back, in 16 bits, of a rank's share of three matrices, to all of the group but itself."""
    layout = muon_case(**{key: value for key, value in degrees.items() if key != "ep"})
    sparse = replace(MODEL, experts=experts, top_k=2, expert_ffn=256)
    layout = replace(layout, model=sparse, parallel=replace(layout.parallel, ep=degrees.get("ep", 1)))
    ranks = degrees["dp_shard"] * degrees.get("tp", 1)
    sent = 2 * 2 * 3 * 3 * experts * 256 * MODEL.hidden / ranks * (group - 1) / group
    in_node = layout.hardware.links[0]
    expected = sent / (in_node.bandwidth * in_node.efficiency)
    assert expert_exchange_seconds(layout, 3) == pytest.approx(expected, rel=1e-12)
    with mock.patch.object(muon_time, "expert_exchange_seconds", return_value=0.0):
        without = muon_seconds(layout, 3)
    assert muon_seconds(layout, 3) - without == pytest.approx(expected, abs=1e-9 * without)
