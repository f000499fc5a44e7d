"""What routed experts cost: parameters, bytes sent, and how times move with experts, rows and links."""

from dataclasses import replace
from typing import Any

import pytest

from tests.facts.test_model_sizes import load
from tests.tools.planner.memory_layouts import peak_errors
from tests.tools.planner.test_comms import dgx_a100, link_rate
from torchllm.config import Config, Model, Parallel, Recompute, Training
from torchllm.config.schema import RecomputeMode
from torchllm.facts.flops import parameter_count
from torchllm.facts.parts.costs import PerPass
from torchllm.parallel import optimistic
from torchllm.tools.dry_run.run import examine
from torchllm.tools.planner.case import Case
from torchllm.tools.planner.cluster import Hardware
from torchllm.tools.planner.compute import Kernels, Piece, matmul_seconds
from torchllm.tools.planner.experts import (
    PADDED,
    RoutedRows,
    exchange_seconds,
    expert_group,
    expert_shards,
    grouped_gradient_seconds,
    grouped_seconds,
    other_places,
    routed_rows,
)
from torchllm.tools.planner.parameters import gathered_parameters, sizes_of_split
from torchllm.tools.planner.predict import predict
from torchllm.tools.planner.software import TORCHLLM, Software
from torchllm.tools.planner.stage import ROUTER_WAITS, expert_parallel

QWEN3, GLM, MIXTRAL = load("qwen3_30b_a3b"), load("glm4.5_air"), load("mixtral_8x7b")


def case(
    model: Model = QWEN3, mode: RecomputeMode = "none", batch: int = 512, imbalance: float = 1.0, **degrees: Any
) -> Case:
    """Return a layout on A100s. degrees: of Parallel."""
    training = Training(micro_batch_size=1, global_batch_size=batch, sequence_length=4096)
    degrees.setdefault("dp_shard", 64)
    parallel = Parallel(**degrees)
    kernels = Kernels(fused_norm=True)
    software = TORCHLLM
    return Case(model, training, parallel, Recompute(mode=mode), kernels, dgx_a100(), software, imbalance=imbalance)


def exchange(layout: Case, **facts: bool) -> float:
    """Return the seconds of one exchange of a layout's rows."""
    return exchange_seconds(layout.model, layout.piece, layout.mesh, layout.hardware, **facts)


def card_rate(hardware: Hardware) -> float:
    """Return the bytes per second of one network card."""
    return link_rate(hardware.links[1])


def test_with_ep_a_rank_gathers_its_own_experts_alone() -> None:
    piece = Piece(1, 4096, 4096, tp=1, spread=1)
    (whole,) = sizes_of_split(QWEN3, (QWEN3.layers,), Recompute())
    experts = 3 * QWEN3.experts * QWEN3.hidden * QWEN3.expert_width * QWEN3.layers
    without_ep = gathered_parameters(QWEN3, whole, piece)
    assert without_ep == parameter_count(QWEN3)
    with_ep = gathered_parameters(QWEN3, whole, piece._replace(ep=8))
    assert with_ep == without_ep - experts * 7 / 8


def test_rows_are_those_of_the_tokens_that_a_rank_routes() -> None:
    piece = Piece(1, 4096, 4096, tp=4, spread=4)
    assert routed_rows(MIXTRAL, piece) == RoutedRows(4096, 8192, 8, 14336 / 4)
    assert routed_rows(MIXTRAL, piece._replace(ep=8, imbalance=1.5)) == RoutedRows(1024, 3072, 1, 14336)
    padded = routed_rows(MIXTRAL, piece._replace(ep=8, imbalance=1.5, padded=1.5))
    assert (padded.rows, padded.moved, padded.features) == (3072, 4608, 4608 * 14336)


def test_padding_is_that_of_the_dispatch() -> None:
    assert PADDED == 2 ** (optimistic.MARGIN / optimistic.PER_OCTAVE)
    more = exchange(case(ep=8, expert_dispatch="optimistic")) / exchange(case(ep=8))
    assert more == pytest.approx(PADDED, rel=0.01)


def test_products_of_one_large_expert_are_a_matrix_product() -> None:
    hardware = dgx_a100()
    rows = RoutedRows(8192, 8192, 1, 4096)
    forward = matmul_seconds(8192, 4096, 8192, hardware)
    assert grouped_seconds(rows, 4096, 8192, hardware) == pytest.approx(forward, rel=0.03)
    gradient = matmul_seconds(4096, 8192, 8192, hardware)
    assert grouped_gradient_seconds(rows, 4096, 8192, hardware) == pytest.approx(gradient, rel=0.03)


def test_an_exchange_leaves_the_node_over_one_card() -> None:
    """T x K x D elements of 2 bytes, of which 7 / 8 leave a node of 8 in a group of 64, at the rate of one card."""
    across_nodes, in_a_node = case(ep=64), case(ep=8)
    leaving = 4096 * QWEN3.top_k * QWEN3.hidden * 2 * 56 / 64
    seconds = exchange(across_nodes)
    assert seconds == pytest.approx(leaving / card_rate(across_nodes.hardware), rel=0.01)
    assert exchange(in_a_node) < seconds / 4


def test_a_token_that_is_sent_once_travels_to_each_node_and_rank_once() -> None:
    """Of 8 experts on 64 ranks of 8 nodes, a token's are on 4.6 of 7 other nodes; a copy per expert leaves 7 times."""
    layout = case(ep=64)
    other_nodes = 7 * (1 - (7 / 8) ** QWEN3.top_k)
    assert other_places(8, QWEN3.top_k) == pytest.approx(other_nodes)
    once = exchange(layout, sends_tokens_once=True)
    sent = 4096 * QWEN3.hidden * 2 * other_nodes
    assert once == pytest.approx(sent / card_rate(layout.hardware), rel=0.01)
    per_expert = exchange(layout)
    assert once < per_expert
    assert other_places(8, 1) == pytest.approx(7 / 8)


def test_shared_experts_hide_a_part_of_both_exchanges() -> None:
    """Gate computes on the way to the experts, up and down on the way back, and twice as long in the backward."""
    layout = case(GLM, ep=64)
    hideable = exchange(layout) * (1 - layout.software.constants.exposed)
    nothing = expert_parallel(layout, 0.0)
    little = expert_parallel(layout, 0.3 * exchange(layout))
    much = expert_parallel(layout, 30 * exchange(layout))
    assert nothing.forward - little.forward == pytest.approx(0.3 * hideable)
    assert nothing.backward - little.backward == pytest.approx(0.6 * hideable)
    assert nothing.forward - much.forward == pytest.approx(2 * hideable)


def test_products_hide_the_exchanges_of_all_chunks_but_one() -> None:
    """Half of the rows is sent while the others' products compute; matrices are read once per chunk."""
    whole, halves = case(ep=64), case(ep=64, expert_chunks=2)
    share = whole.software.constants.exposed
    of_chunk = exchange(halves)
    assert of_chunk == pytest.approx(exchange(whole) / 2, rel=0.01)
    without, nothing = expert_parallel(whole, 0.0), expert_parallel(halves, 0.0)
    waits = whole.software.constants.wait
    assert nothing.forward - without.forward == pytest.approx(ROUTER_WAITS * waits, rel=0.05)
    much = expert_parallel(halves, 0.0, PerPass(10 * of_chunk, 20 * of_chunk))
    assert nothing.forward - much.forward == pytest.approx(2 * of_chunk * (1 - share))
    assert nothing.backward - much.backward == pytest.approx(2 * of_chunk * (1 - share))
    little = expert_parallel(halves, 0.0, PerPass(0.6 * of_chunk, 0.0))
    assert nothing.forward - little.forward == pytest.approx(2 * 0.3 * of_chunk * (1 - share))

    rows = routed_rows(QWEN3, halves.piece)
    hardware = halves.hardware
    one = grouped_seconds(rows._replace(chunks=1), 768, 2048, hardware)
    assert one < grouped_seconds(rows, 768, 2048, hardware) < 2 * one
    assert case(ep=1, expert_chunks=2).piece.chunks == 1


def test_chunks_pay_where_rows_leave_the_node() -> None:
    """The figures of docs/mixture_of_experts.md."""
    for model, across, inside in ((QWEN3, 0.96, 1.02), (GLM, 0.92, 1.01)):
        for ep, expected in ((64, across), (8, inside)):
            layout = {"ep": ep, "expert_dispatch": "optimistic"}
            one, two = (predict(case(model, expert_chunks=chunks, **layout)).step for chunks in (1, 2))
            assert round(two / one, 2) == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("dispatch", ["exact", "optimistic"])
@pytest.mark.parametrize("mode", ["none", "full", "selective", "ffn"])
def test_chunks_hold_what_the_dry_run_says(dispatch: str, mode: RecomputeMode) -> None:
    model = replace(QWEN3, layers=4)
    for layout in ({"dp_shard": 8, "ep": 8}, {"dp_shard": 4, "tp": 2, "ep": 2, "sequence_parallel": True}):
        errors = peak_errors(model, {**layout, "expert_chunks": 2, "expert_dispatch": dispatch}, mode)
        assert max(map(abs, errors.values())) < 0.01, (layout, errors)


def test_groups_are_the_innermost_ranks() -> None:
    """2 pipeline ranks x 2 replicas x 4 shards x 2 x 4 with ep 16: two groups of experts' shards per 32 ranks."""
    mesh = (2, 2, 4, 2, 4)
    hardware = dgx_a100()
    assert expert_group(mesh, 16, hardware).size == 16
    shards = expert_shards(mesh, 16, hardware, Software())
    assert shards.size == 2
    assert shards.on_node == 1


@pytest.mark.parametrize(("dispatch", "chunks"), [("exact", 1), ("optimistic", 1), ("exact", 2)])
def test_ep_sends_what_the_dry_run_says(dispatch: str, chunks: int) -> None:
    """Two exchanges forward, and their gradients; the planner's bytes by the trace of a layout with even routing."""
    model = replace(QWEN3, layers=1, hidden=256, vocab=1024)
    layout = case(model, dp_shard=8, ep=8, batch=8, expert_dispatch=dispatch, expert_chunks=chunks)
    training = replace(layout.training, dtype="bfloat16")
    report = examine(Config(model=model, training=training, parallel=layout.parallel))
    rows = routed_rows(model, layout.piece).moved
    counts = chunks * 8.0 * model.experts  # numbers of rows, which only the forward sends
    per_block = 4 * 2.0 * rows * model.hidden + counts
    (kind,) = report.kinds
    exchanged = {}
    for (axis, operation), total in kind.sent.items():
        if operation == "all_to_all":
            exchanged[axis] = total.bytes
    rounding = 0.002 if dispatch == "optimistic" else 0  # of 4,096 rows to a tile
    assert exchanged == {"ep": pytest.approx(model.layers * per_block * 7 / 8, rel=rounding, abs=0)}
