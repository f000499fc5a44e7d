"""Every layout trains the same model as one process: loss, every gradient, the norm, the updated weights."""

import pytest

from tests.parity import Settings, check

LAYOUTS: dict[str, Settings] = {
    "dp2": {"parallel.dp_shard": 2, "parallel.zero_stage": 0},
    **{
        f"zero{stage}-{ranks}": {"parallel.dp_shard": ranks, "parallel.zero_stage": stage}
        for stage in (1, 2, 3)
        for ranks in (2, 4, 8)
    },
    "hsdp2x2": {"parallel.dp_replicate": 2, "parallel.dp_shard": 2},
    "hsdp2x4": {"parallel.dp_replicate": 2, "parallel.dp_shard": 4},
    "tp2": {"parallel.tp": 2},
    "tp4": {"parallel.tp": 4},
    "tp2+sp": {"parallel.tp": 2, "parallel.sequence_parallel": True},
    "tp4+sp": {"parallel.tp": 4, "parallel.sequence_parallel": True},
    **{
        f"fsdp{dp}xtp{tp}{'+sp' * sp}": {
            "parallel.dp_shard": dp,
            "parallel.tp": tp,
            "parallel.sequence_parallel": sp,
        }
        for dp, tp in ((2, 2), (2, 4), (4, 2))
        for sp in (False, True)
    },
    "hsdp2x2xtp2": {"parallel.dp_replicate": 2, "parallel.dp_shard": 2, "parallel.tp": 2},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_trains_the_same_model(name: str) -> None:
    check(LAYOUTS[name])
