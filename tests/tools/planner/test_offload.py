"""The price of offload, by hand, and what it needs of a cluster."""

from dataclasses import replace
from typing import Literal

import pytest

from tests.tools.planner.test_comms import dgx_a100
from tests.tools.planner.test_predict import case
from torchllm.config import Optimizer, Recompute, Training
from torchllm.config.errors import UserError
from torchllm.tools.planner.cluster import Host
from torchllm.tools.planner.compute import memory_seconds
from torchllm.tools.planner.offload import USABLE, average_seconds, exposed_copy_seconds, host_update_seconds
from torchllm.tools.planner.optimizer_states import with_optimizer_states
from torchllm.tools.planner.predict import predict

LINK = Host(bandwidth=10e9, memory_bandwidth=1000e9)
MEMORY = Host(bandwidth=1000e9, memory_bandwidth=10e9)


@pytest.mark.parametrize(
    ("host", "dtype", "seconds"),
    [
        (LINK, "float32", (4 + 4 + 4) / 10),  # weight and gradient there, weight back
        (LINK, "bfloat16", (2 * 6 + 2 * 4 + 3 * 350) / 1000),  # weight and moments rounded, longer than the link
        (MEMORY, "float32", (2 * 12 + 2 * 8) / 10),  # all of that copied and updated, moments updated
        (MEMORY, "bfloat16", (2 * 6 + 2 * 4 + 3 * 350) / 10),
    ],
)
def test_a_billion_parameters(host: Host, dtype: str, seconds: float) -> None:
    hardware = replace(dgx_a100(), host=host)
    layout = case(hardware=hardware)
    optimizer = Optimizer(offload=True, state_dtype=dtype)  # type: ignore[arg-type]  # one of its words
    training = Training(weights_dtype=dtype)  # type: ignore[arg-type]  # as above
    software = with_optimizer_states(layout.software, layout.model, training, optimizer)
    offloaded = replace(layout, software=software, optimizer=optimizer)
    assert host_update_seconds(offloaded, 1e9) == pytest.approx(seconds)
    assert predict(offloaded).terms["optimizer"] == pytest.approx(seconds * 13.0e9 / 8 / 1e9, rel=0.01)
    assert predict(offloaded).memory.optimizer == 0
    assert predict(offloaded).on_host == pytest.approx(13.0e9 / 8 * (8 if dtype == "float32" else 4), rel=0.01)
    assert predict(replace(offloaded, optimizer=Optimizer())).on_host == 0


@pytest.mark.parametrize(("dtype", "weight"), [("float32", 4), ("bfloat16", 2)])
def test_an_average_on_the_host_is_copied_and_then_moved(dtype: Literal["float32", "bfloat16"], weight: int) -> None:
    layout = case(hardware=replace(dgx_a100(), host=Host(10e9, 20e9)))
    predictions = []
    for offload in (False, True):
        optimizer = Optimizer(ema_decay=0.9, ema_offload=offload)
        training = Training(weights_dtype=dtype)
        software = with_optimizer_states(layout.software, layout.model, training, optimizer)
        averaged = replace(layout, software=software, optimizer=optimizer)
        predictions.append(predict(averaged))
    seconds = weight / 10 + (weight + 8 + 12 + 12) / 20  # difference of two, its product, sum of two
    assert average_seconds(averaged, 1e9) == pytest.approx(seconds)
    on_device, on_host = predictions
    parameters = 13.0e9 / 8
    assert on_device.memory.optimizer - on_host.memory.optimizer == pytest.approx(4 * parameters, rel=0.01)
    assert (on_device.on_host, on_host.on_host) == (0, pytest.approx(4 * parameters, rel=0.01))
    saved = memory_seconds(2 * 4 * parameters, layout.hardware)
    longer = on_host.terms["optimizer"] - on_device.terms["optimizer"]
    assert longer == pytest.approx(seconds * parameters / 1e9 - saved, rel=0.01)


def test_keys_that_do_nothing_cost_nothing() -> None:
    """Another optimizer than AdamW, and no average."""
    layout = case(hardware=replace(dgx_a100(), host=Host(10e9, 20e9)))
    predictions = []
    for offload in (False, True):
        optimizer = Optimizer("muon", offload=offload, ema_offload=offload)
        software = with_optimizer_states(layout.software, layout.model, Training(), optimizer)
        predictions.append(predict(replace(layout, software=software, optimizer=optimizer)))
    assert predictions[0] == predictions[1]


def test_the_host_must_have_room() -> None:
    """A layout with the moments on the host fits up to `USABLE` of a GPU's share of the host's memory."""
    layout = case(mode="full", hardware=replace(dgx_a100(), host=LINK))
    offloaded = replace(layout, optimizer=Optimizer(offload=True))
    needed = predict(offloaded).on_host

    def fits(capacity: float) -> bool:
        hardware = replace(offloaded.hardware, host=replace(LINK, capacity=capacity))
        return predict(replace(offloaded, hardware=hardware)).fits

    assert [fits(share * needed / USABLE) for share in (0, 0.99, 1.01)] == [True, False, True]


def test_inputs_of_blocks_on_the_host_are_those_of_the_micro_batches_in_flight() -> None:
    kept = case(mode="full", hardware=replace(dgx_a100(), host=LINK), micro_batch_size=2)
    moved = replace(kept, recompute=replace(kept.recompute, offload=True))
    input_of_block = 2 * (2 * 2048) * 5120
    assert predict(moved).on_host == kept.model.layers * input_of_block
    segments = replace(moved, recompute=Recompute("segment", 4, offload=True))
    assert predict(segments).on_host == kept.model.layers / 4 * input_of_block
    pipeline = case(mode="full", hardware=moved.hardware, pp=4, dp_shard=2, micro_batch_size=2)
    of_pipeline = replace(pipeline, recompute=moved.recompute)
    assert predict(of_pipeline).on_host == kept.model.layers * input_of_block  # a quarter, of four micro batches


def test_a_cluster_without_a_host_has_no_price() -> None:
    layout = case(hardware=replace(dgx_a100(), host=Host()), optimizer=None)
    with pytest.raises(UserError, match=r"cluster file of .* has no \[host\] .* set them to false"):
        predict(replace(layout, optimizer=Optimizer(offload=True)))


def test_a_block_waits_for_the_copy_of_its_input_that_its_computation_does_not_hide() -> None:
    slow = replace(dgx_a100(), host=Host(bandwidth=1e9, memory_bandwidth=1e9))
    kept = case(mode="full", hardware=slow, micro_batch_size=2, sequence_parallel=True, tp=2)
    moved = replace(kept, recompute=replace(kept.recompute, offload=True))
    copied = 2 * (2 * 2048) * 5120 / 2 / 1e9  # bfloat16 of two sequences, on each of two ranks half
    assert exposed_copy_seconds(kept, 0.0) == 0
    assert exposed_copy_seconds(moved, 0.0) == pytest.approx(copied)
    assert exposed_copy_seconds(moved, 0.01) == pytest.approx(copied - 0.01)
    in_segments = replace(moved, recompute=Recompute("segment", 4, offload=True))
    assert exposed_copy_seconds(in_segments, 0.0) == pytest.approx(copied / 4)
    fast = replace(moved, hardware=replace(slow, host=LINK))
    assert predict(fast).step == predict(replace(kept, hardware=fast.hardware)).step
    assert predict(moved).step > predict(kept).step
    assert predict(moved).memory.activations < predict(kept).memory.activations
