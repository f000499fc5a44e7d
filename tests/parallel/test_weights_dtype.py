"""Weights in bfloat16: every layout trains the same model as one process, and routers stay float32."""

import numpy as np
import numpy.typing as npt
import pytest

from tests.parity import Settings, tiny, train, world_size
from tests.workers import run

ONE_PASS: Settings = {"training.weights_dtype": "bfloat16", "training.micro_batch_size": 8}
LAYOUTS: dict[str, Settings] = {
    "fsdp": {"parallel.dp_shard": 2, "training.micro_batch_size": 4},
    "tp, sp": {"parallel.tp": 2, "parallel.sequence_parallel": True},
    "ring": {"parallel.cp": 2},
    "HSDP, moments too": {
        **{"parallel.dp_replicate": 2, "parallel.dp_shard": 2, "training.micro_batch_size": 2},
        "optimizer.state_dtype": "bfloat16",
    },
    "pipeline": {"parallel.pp": 2, "parallel.zero_stage": 1, "training.micro_batch_size": 4},
    "experts": {"parallel.dp_shard": 2, "parallel.ep": 2, "model.experts": 4, "training.micro_batch_size": 4},
    "compiled": {"parallel.dp_shard": 2, "compile.block": True, "training.micro_batch_size": 4},
}
BY_DEFAULT = ("fsdp", "experts")
NAMES = [name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.exhaustive) for name in LAYOUTS]
SPACING = 2.0**-7
"""largest distance between two bfloat16, relative to them"""


def differing(got: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    """The share of numbers that were rounded otherwise; none differ by a spacing of the largest of them."""
    difference = np.abs(got - expected)
    assert difference.max() <= SPACING * np.abs(expected).max()
    return float((difference > 1e-3 * SPACING * np.abs(expected) + 1e-7).mean())


@pytest.mark.parametrize("name", NAMES)
def test_every_layout_trains_the_weights_of_one_process(name: str) -> None:
    settings = {**ONE_PASS, **LAYOUTS[name]}
    of_model = {key: value for key, value in settings.items() if not key.startswith(("parallel.", "compile."))}
    (expected,) = run(train, 1, {**of_model, **ONE_PASS})
    got, *_ = run(train, world_size(tiny(settings)), settings)
    assert got.losses == pytest.approx(expected.losses, rel=1e-4)
    # Sums in float32 differ by 1e-7 to 1e-6, and so are rounded otherwise once in some thousand numbers.
    for key, gradient in expected.gradients[0].items():
        assert differing(got.gradients[0][key], gradient) < 0.02, key
    for key, weight in expected.weights[-1].items():
        assert differing(got.weights[-1][key], weight) < 0.02, key
