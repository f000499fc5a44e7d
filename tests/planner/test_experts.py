"""What routed experts cost: parameters, bytes sent, and how times move with experts, rows and links."""

from dataclasses import replace
from typing import Any

import pytest

from tests.planner.test_comms import cluster, dgx_a100
from tests.spec.test_model_sizes import load
from torchllm.config import Config, Model, Parallel, Recompute, Training
from torchllm.config.schema import RecomputeMode
from torchllm.dry_run.run import examine
from torchllm.planner.case import Case
from torchllm.planner.compute import Kernels, Piece, matmul_seconds
from torchllm.planner.evidence.stacks import STACKS
from torchllm.planner.experts import (
    RoutedRows,
    exchange_seconds,
    expert_group,
    expert_shards,
    grouped_gradient_seconds,
    grouped_seconds,
    other_places,
    routed_rows,
    without_experts,
)
from torchllm.planner.memory import gathered_parameters, sizes_of_split, stage_parameters
from torchllm.planner.predict import Prediction, predict
from torchllm.planner.stage import expert_parallel
from torchllm.spec.flops import parameter_count
from torchllm.spec.software import Software

QWEN3, GLM, MIXTRAL = load("qwen3_30b_a3b"), load("glm4.5_air"), load("mixtral_8x7b")


def case(
    model: Model = QWEN3, mode: RecomputeMode = "none", batch: int = 512, imbalance: float = 1.0, **degrees: int
) -> Case:
    """Return a layout on A100s. degrees: of Parallel."""
    training = Training(micro_batch_size=1, global_batch_size=batch, sequence_length=4096)
    parallel = Parallel(**{"dp_shard": 64, **degrees})  # type: ignore[arg-type]  # integers
    kernels = Kernels(fused_norm=True)
    software = STACKS["torchllm"]
    return Case(model, training, parallel, Recompute(mode=mode), kernels, dgx_a100(), software, imbalance=imbalance)


def step(**settings: Any) -> Prediction:
    """Return the prediction of a `case`."""
    return predict(case(**settings))


@pytest.mark.parametrize("model", [QWEN3, GLM, MIXTRAL])
def test_stages_hold_all_parameters(model: Model) -> None:
    """Of one stage, and of four."""
    for split in ((model.layers,), (1, 2, 3, model.layers - 6)):
        sizes = sizes_of_split(model, split)
        assert sum(size.dense for size in sizes) == model.dense_layers
        assert sum(stage_parameters(model, size, 1, True) for size in sizes) == parameter_count(model)


def test_with_ep_a_rank_gathers_its_own_experts_alone() -> None:
    piece = Piece(1, 4096, 4096, tp=1, spread=1)
    (whole,) = sizes_of_split(QWEN3, (QWEN3.layers,))
    experts = 3 * QWEN3.experts * QWEN3.hidden * QWEN3.expert_width * QWEN3.layers
    without = gathered_parameters(QWEN3, whole, piece, True)
    assert without == parameter_count(QWEN3)
    assert gathered_parameters(QWEN3, whole, piece._replace(ep=8), True) == without - experts * 7 / 8


def test_rows_are_those_of_the_tokens_that_a_rank_routes() -> None:
    piece = Piece(1, 4096, 4096, tp=4, spread=4)
    assert routed_rows(MIXTRAL, piece) == RoutedRows(4096, 8192, 8, 14336 / 4)
    assert routed_rows(MIXTRAL, piece._replace(ep=8, imbalance=1.5)) == RoutedRows(1024, 3072, 1, 14336)


def test_products_of_one_large_expert_are_a_matrix_product() -> None:
    hardware = dgx_a100()
    rows = RoutedRows(8192, 8192, 1, 4096)
    forward = matmul_seconds(8192, 4096, 8192, hardware)
    assert grouped_seconds(rows, 4096, 8192, hardware) == pytest.approx(forward, rel=0.03)
    gradient = matmul_seconds(4096, 8192, 8192, hardware)
    assert grouped_gradient_seconds(rows, 4096, 8192, hardware) == pytest.approx(gradient, rel=0.03)


def test_few_rows_per_expert_are_slow() -> None:
    """As many operations, shared by more experts: padded tiles, and every matrix is read."""
    seconds = []
    for experts in (4, 32, 256):
        rows = RoutedRows(4096, 4096, experts, 1024)
        seconds.append(grouped_seconds(rows, 1024, 2048, dgx_a100()))
    assert seconds == sorted(seconds)
    assert seconds[-1] > 2 * seconds[0]


def test_an_exchange_leaves_the_node_over_one_card() -> None:
    """T x K x D elements of 2 bytes, of which 7 / 8 leave a node of 8 in a group of 64, at the rate of one card."""
    hardware = dgx_a100()
    network = hardware.links[1]
    card_rate = network.bandwidth * network.efficiency
    across, within = case(ep=64), case(ep=8)
    sent = 4096 * QWEN3.top_k * QWEN3.hidden * 2
    seconds = exchange_seconds(QWEN3, across.piece, across.mesh, hardware)
    assert seconds == pytest.approx(sent * 56 / 64 / card_rate, rel=0.01)
    assert exchange_seconds(QWEN3, within.piece, within.mesh, hardware) < seconds / 4


def test_a_token_that_is_sent_once_travels_to_each_node_and_rank_once() -> None:
    """Of 8 experts on 64 ranks of 8 nodes, a token's are on 4.6 of 7 other nodes; a copy per expert leaves 7 times."""
    hardware, of = dgx_a100(), case(ep=64)
    link = hardware.links[1]
    card = link.bandwidth * link.efficiency
    other_nodes = 7 * (1 - (7 / 8) ** QWEN3.top_k)
    assert other_places(8, QWEN3.top_k) == pytest.approx(other_nodes)
    once = exchange_seconds(QWEN3, of.piece, of.mesh, hardware, sends_tokens_once=True)
    assert once == pytest.approx(4096 * QWEN3.hidden * 2 * other_nodes / card, rel=0.01)
    assert once < exchange_seconds(QWEN3, of.piece, of.mesh, hardware)
    assert other_places(8, 1) == pytest.approx(7 / 8)


def test_shared_experts_hide_a_part_of_both_exchanges() -> None:
    """Gate computes on the way to the experts, up and down on the way back, and twice as long in the backward."""
    layout = case(GLM, ep=64)
    constants = layout.software.constants
    exchange = exchange_seconds(GLM, layout.piece, layout.mesh, layout.hardware)
    nothing, little, much = (expert_parallel(layout, shared) for shared in (0.0, 0.3 * exchange, 30 * exchange))
    hidden = 1 - constants.exposed
    assert nothing.forward - little.forward == pytest.approx(0.3 * exchange * hidden)
    assert nothing.backward - little.backward == pytest.approx(0.6 * exchange * hidden)
    assert nothing.forward - much.forward == pytest.approx(2 * exchange * hidden)


def test_frameworks_differ_in_what_they_send_and_move() -> None:
    usual = case(ep=64)
    terms = predict(usual).terms
    once = predict(replace(usual, software=replace(usual.software, sends_tokens_once=True))).terms
    assert once["expert parallel"] < terms["expert parallel"]
    fused = predict(replace(usual, software=replace(usual.software, fuses_permutations=True))).terms
    assert fused["elementwise"] < 0.8 * terms["elementwise"]


def test_products_of_experts_are_faster_in_float8() -> None:
    hardware, rows = cluster("dgx_h100"), RoutedRows(32768, 32768, 4, 4096)
    for seconds in (grouped_seconds, grouped_gradient_seconds):
        assert seconds(rows, 4096, 4096, hardware, 0.8) == pytest.approx(seconds(rows, 4096, 4096, hardware) / 1.6)
    usual = replace(case(batch=64), hardware=hardware)
    fast = replace(usual, kernels=usual.kernels._replace(float8=0.8))
    assert predict(fast).terms["matmul"] < 0.9 * predict(usual).terms["matmul"]  # half waits for memory, or the router


def test_groups_are_the_innermost_ranks() -> None:
    """2 pipeline ranks x 2 replicas x 4 shards x 2 x 4 with ep 16: two groups of experts' shards per 32 ranks."""
    mesh = (2, 2, 4, 2, 4)
    hardware = dgx_a100()
    assert expert_group(mesh, 16, hardware).size == 16
    shards = expert_shards(mesh, 16, hardware, Software())
    assert (shards.size, shards.on_node) == (2, 1)


def test_ep_sends_what_the_dry_run_says() -> None:
    """Two exchanges forward, and their gradients; the planner's bytes by the trace of a layout with even routing."""
    model = replace(QWEN3, layers=2)
    layout = case(model, dp_shard=8, ep=8, batch=8)
    training = replace(layout.training, dtype="bfloat16")
    report = examine(Config(model=model, training=training, parallel=layout.parallel))
    rows = routed_rows(model, layout.piece).rows
    counts = 8.0 * model.experts  # numbers of rows, which only the forward sends
    expected = model.layers * (4 * 2.0 * rows * model.hidden + counts) * 7 / 8
    (kind,) = report.kinds
    sent = {axis: total for (axis, operation), total in kind.sent.items() if operation == "all_to_all"}
    assert list(sent) == ["ep"]
    assert sent["ep"].bytes == expected


def test_an_uneven_load_costs_time_and_memory() -> None:
    even, uneven = step(ep=8), step(ep=8, imbalance=1.5)
    assert uneven.step > even.step
    assert uneven.terms["expert parallel"] > even.terms["expert parallel"]
    assert uneven.memory.activations > even.memory.activations
    assert step(imbalance=1.5).step == step().step  # without ep all ranks have all experts


def test_recomputation_sends_again() -> None:
    none, full = step(ep=8), step(ep=8, mode="full")
    assert full.terms["expert parallel"] == pytest.approx(1.5 * none.terms["expert parallel"], rel=0.03)


def test_without_experts_nothing_changes() -> None:
    dense = without_experts(GLM)
    assert step(model=dense).terms["expert parallel"] == 0.0
    assert step(model=dense) == step(model=dense, imbalance=3.0)


def test_first_dense_blocks_cost_as_dense_blocks() -> None:
    """One dense block more: the step is longer by what a dense block costs in place of a sparse one."""
    seconds = []
    for dense in (0, 1, 2):
        seconds.append(step(model=replace(GLM, layers=8, dense_layers=dense)).step)
    assert seconds[2] - seconds[1] == pytest.approx(seconds[1] - seconds[0], rel=0.05)
