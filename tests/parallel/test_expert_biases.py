"""Experts with biases train the same model in every layout."""

import pytest

from tests.parity import FEW, Settings, check

WITH_BIASES: Settings = {
    "model.layers": 2,
    "model.experts": 8,
    "model.top_k": 3,
    "model.expert_ffn": 48,
    "model.expert_biases": True,
    "model.activation": "clamped_silu",
    "model.qkv_bias": True,
    "model.o_bias": True,
    "model.sinks": True,
}


def test_a_bias_after_a_sum_over_tp_is_added_once() -> None:
    check({**FEW, **WITH_BIASES, "parallel.tp": 2})


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layout",
    [
        {"parallel.tp": 4, "model.router_dtype": "compute"},
        {"parallel.dp_shard": 2, "parallel.ep": 2},
        {"parallel.dp_shard": 2, "parallel.tp": 2, "parallel.ep": 4},
        {"parallel.dp_shard": 2, "parallel.tp": 2, "parallel.ep": 2, "parallel.sequence_parallel": True},
        {"parallel.dp_shard": 2, "recompute.mode": "selective", "compile.block": True},
        {"parallel.cp": 2, "parallel.ep": 2, "recompute.mode": "selective"},
        {"parallel.tp": 2, "model.balance_loss": "sequence", "model.balance_weight": 0.3, "model.router_z_loss": 0.1},
    ],
    ids=str,
)
def test_other_layouts(layout: Settings) -> None:
    check({**WITH_BIASES, **layout})
