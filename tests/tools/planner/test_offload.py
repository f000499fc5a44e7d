"""The price of offload, by hand, and what it needs of a cluster."""

from dataclasses import replace

import pytest

from tests.tools.planner.test_comms import dgx_a100
from tests.tools.planner.test_predict import case
from torchllm.config import Optimizer, Training
from torchllm.config.errors import UserError
from torchllm.tools.planner.cluster import Host
from torchllm.tools.planner.offload import update_seconds
from torchllm.tools.planner.optimizer_states import with_optimizer_states
from torchllm.tools.planner.predict import predict

LINK = Host(bandwidth=10e9, memory_bandwidth=1000e9)
MEMORY = Host(bandwidth=1000e9, memory_bandwidth=10e9)


@pytest.mark.parametrize(
    ("host", "dtype", "seconds"),
    [
        (LINK, "float32", (4 + 4 + 4) / 10),  # weight and gradient there, weight back
        (LINK, "bfloat16", (2 + 2 + 2) / 10),
        (MEMORY, "float32", (2 * 12 + 2 * 8) / 10),  # all of that copied and updated, moments updated
        (MEMORY, "bfloat16", (2 * 6 + 2 * 4) / 10),
    ],
)
def test_a_billion_parameters(host: Host, dtype: str, seconds: float) -> None:
    hardware = replace(dgx_a100(), host=host)
    layout = case(hardware=hardware)
    optimizer = Optimizer(offload=True, state_dtype=dtype)  # type: ignore[arg-type]  # one of its words
    training = Training(weights_dtype=dtype)  # type: ignore[arg-type]  # as above
    software = with_optimizer_states(layout.software, layout.model, training, optimizer)
    offloaded = replace(layout, software=software, optimizer=optimizer)
    assert update_seconds(offloaded, 1e9) == pytest.approx(seconds)
    assert predict(offloaded).terms["optimizer"] == pytest.approx(seconds * 13.0e9 / 8 / 1e9, rel=0.01)
    assert predict(offloaded).memory.optimizer == 0


def test_a_cluster_without_a_host_has_no_price() -> None:
    layout = case(hardware=replace(dgx_a100(), host=Host()), optimizer=None)
    with pytest.raises(UserError, match=r"cluster file of .* has no \[host\] .* set the key to false"):
        predict(replace(layout, optimizer=Optimizer(offload=True)))
