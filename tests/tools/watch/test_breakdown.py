"""The parts of a step: on timelines written by hand, and on real ranks that wait where they are told to."""

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.growth.counting import lines_run
from tests.parity import Settings, build, my_batches, tiny
from tests.workers import run
from torchllm.models.experts import Experts
from torchllm.parallel.parallelize import build_forward_backward
from torchllm.runtime.heartbeat import MESSAGES, PREFIX, phase
from torchllm.tools.launch.torch_records import FlightRecord, flight_records
from torchllm.tools.mesh_axes import axis_of_group
from torchllm.tools.watch.breakdown import breakdown
from torchllm.tools.watch.torch_profile import ProfiledEvent, profiled_events

MS = 1_000_000


def event(name: str, start: float, end: float, **fields: Any) -> ProfiledEvent:
    """An operator of the main thread, from `start` to `end` ms, but for what `fields` say."""
    operator = ProfiledEvent(
        name,
        int(start * MS),
        int(end * MS),
        thread=1,
        annotation=False,
        backward=False,
        asynchronous=False,
        kernel=False,
        launched=int(start * MS),
    )
    return operator._replace(**fields)


def operator(start: float, end: float) -> ProfiledEvent:
    return event("aten::mm", start, end)


def collective(name: str, start: float, end: float) -> ProfiledEvent:
    """One of gloo's, on a thread of its own."""
    return event(name, start, end, thread=5, asynchronous=True)


def kernel(name: str, start: float, end: float, launched: float) -> ProfiledEvent:
    return event(name, start, end, kernel=True, launched=int(launched * MS))


def annotation(name: str, start: float, end: float) -> ProfiledEvent:
    return event(PREFIX + name, start, end, annotation=True)


def record(number: int, group: str, name: str, created: float) -> FlightRecord:
    return FlightRecord(number, group, name, number, int(created * MS), True, "")


STEP = [
    annotation("step", 0, 100),
    annotation("data", 0, 5),
    annotation("forward_backward", 10, 80),
    event("autograd::engine::evaluate_function: MmBackward0", 40, 80),
    annotation("optimizer", 85, 95),
]
AXES = {"1": "tp", "2": "pp", "3": "cp"}


def parts(events: list[ProfiledEvent], records: list[FlightRecord] | None = None) -> dict[str, float]:
    """Milliseconds of the parts of a step of 100 ms that are not 0."""
    seconds = breakdown([*STEP, *events], records or [], AXES, pipeline_group="2")
    assert sum(seconds.values()) == pytest.approx(0.1)
    return {name: round(part * 1000, 6) for name, part in seconds.items() if part}


def test_without_a_collective_the_phases_are_all() -> None:
    expected = {"data": 5, "forward": 30, "backward": 40, "optimizer": 10, "other": 15}
    assert parts([operator(12, 38)]) == expected


def test_a_cpu_waits_where_no_operator_runs_and_a_collective_is_under_way() -> None:
    operators = [operator(12, 20), event("c10d::allreduce_", 20, 20.05), operator(30, 40)]
    all_reduce = collective("gloo:all_reduce", 21, 28)
    milliseconds = parts([*operators, all_reduce], [record(7, "1", "gloo:all_reduce", 20)])
    assert milliseconds["exposed tp"] == 8  # 20 to 28: from its creation
    assert milliseconds["forward"] == 22


def test_a_collective_behind_operators_is_not_exposed() -> None:
    all_gather = collective("gloo:all_gather", 14, 18)
    assert "exposed tp" not in parts([operator(12, 20), all_gather], [record(7, "1", "gloo:all_gather", 13)])


def test_a_wait_inside_an_operator_of_dtensor_is_a_wait() -> None:
    """aten::mm of DTensors is around the collective that it needs."""
    dtensor = [operator(12, 40), event("_c10d_functional::wait_tensor", 14, 34)]
    all_reduce = collective("gloo:all_reduce", 14, 34)
    assert parts([*dtensor, all_reduce], [record(7, "1", "gloo:all_reduce", 14)])["exposed tp"] == 20


def test_short_gaps_are_pythons_and_a_sleep_is_work() -> None:
    operators = [operator(at, at + 0.95) for at in range(10, 80)]
    all_reduce = collective("gloo:all_reduce", 10, 70)
    assert "exposed tp" not in parts([*operators, all_reduce], [record(7, "1", "gloo:all_reduce", 10)])
    asleep = [event for event in operators if not 20 <= event.start / MS < 40]
    assert "exposed tp" not in parts(asleep)


def test_overlapping_waits_are_charged_once_to_the_one_that_began_first() -> None:
    """Two NCCL kernels at once, the second longer; the GPU computes nothing meanwhile."""
    kernels = [
        kernel("gemm", 12, 20, launched=11),
        kernel("ncclDevKernel_AllReduce", 20, 30, launched=13),
        kernel("ncclDevKernel_AllGather", 25, 38, launched=15),
    ]
    records = [record(7, "1", "nccl:all_reduce", 12.5), record(8, "3", "nccl:all_gather", 14)]
    milliseconds = parts(kernels, records)
    assert (milliseconds["exposed tp"], milliseconds["exposed cp"]) == (10, 8)


def test_a_wait_while_the_loop_waits_for_data_is_the_datas() -> None:
    """Until 5 ms; a collective that ends at 8 ms is exposed for the last 3."""
    milliseconds = parts([collective("gloo:all_reduce", 1, 8)], [record(7, "1", "gloo:all_reduce", 1)])
    assert (milliseconds["data"], milliseconds["exposed tp"]) == (5, 3)


def test_the_bubble_is_what_a_pipeline_waits_beyond_its_messages() -> None:
    operators = [operator(12, 20), operator(35, 40), operator(43, 80)]
    messages = [collective("gloo:recv", 20, 35), collective("gloo:recv", 40, 43)]
    milliseconds = parts([*operators, *messages])
    assert (milliseconds["exposed pp"], milliseconds["bubble"]) == (6, 12)


def test_messages_of_a_ring_are_its_own() -> None:
    operators = [operator(12, 20), operator(35, 80)]
    receive = collective("gloo:recv", 20, 35)
    milliseconds = parts([*operators, receive, annotation(MESSAGES + "3", 19.9, 20.1)])
    assert milliseconds["exposed cp"] == 15


def test_a_gpu_computes_where_a_kernel_runs_that_is_not_nccls() -> None:
    kernels = [
        kernel("gemm", 20, 40, launched=12),
        kernel("ncclDevKernel_AllGather", 30, 48, launched=13),
        kernel("gemm", 50, 90, launched=45),
        kernel("adam", 90, 96, launched=86),
    ]
    milliseconds = parts(kernels, [record(7, "1", "nccl:all_gather", 12.9), record(8, "2", "nccl:send", 44)])
    assert milliseconds == {"data": 5, "forward": 20, "exposed tp": 8, "backward": 40, "optimizer": 6, "other": 21}


def large_step(collectives: int, on_gpu: bool) -> tuple[list[ProfiledEvent], list[FlightRecord]]:
    """Return the events of a step with so many collectives: each after 1 ms of computing, 4 ms of waiting."""
    events = [annotation("step", 0, 5 * collectives), annotation("forward_backward", 0, 5 * collectives)]
    records = []
    for number in range(collectives):
        at = 5 * number
        if on_gpu:
            events.append(kernel("gemm", at, at + 1, launched=at))
            events.append(kernel("ncclDevKernel", at + 1, at + 5, launched=at + 1))
        else:
            events.append(operator(at, at + 1))
            events.append(collective("gloo:all_reduce", at + 1, at + 5))
        records.append(record(number, "1", "gloo:all_reduce", at + 1))
    return events, records


@pytest.mark.parametrize("on_gpu", [False, True])
def test_work_grows_with_the_collectives_and_not_with_their_square(on_gpu: bool) -> None:
    lines = []
    for collectives in (100, 400):
        events, records = large_step(collectives, on_gpu)
        seconds: dict[str, float] = {}

        def work(events: Any = events, records: Any = records, seconds: dict[str, float] = seconds) -> None:
            seconds |= breakdown(events, records, {"1": "tp"}, pipeline_group="")

        lines.append(lines_run(work))
        assert seconds["exposed tp"] == pytest.approx(collectives * 4e-3)
        assert seconds["forward"] == pytest.approx(collectives * 1e-3)
    assert 2 * lines[0] < lines[1] < 5 * lines[0]


@pytest.mark.exhaustive
def test_a_rank_waits_for_rows_of_experts_that_another_computes() -> None:
    """Rank 1's experts take `LATE` longer: more than a loaded machine delays either rank."""
    waiting, working = run(_slow_experts, 2)
    assert waiting["exposed ep"] > 0.75 * LATE
    assert working.get("exposed ep", 0.0) < 0.5 * LATE
    assert working["forward"] > LATE


LATE = 1.0
"""seconds"""


def _slow_experts() -> dict[str, float]:
    experts: Settings = {"model.experts": 4, "model.top_k": 2, "model.layers": 1, "training.global_batch_size": 2}
    config = tiny({**experts, "parallel.dp_shard": 2, "parallel.ep": 2})
    mesh, stages = build(config)
    step = build_forward_backward(stages, mesh, config.parallel, config.training, torch.float32)
    batches = my_batches(config, mesh, 1, ragged=False)
    step(batches, torch.tensor(1.0))  # connects the ranks
    transform = Experts.transform

    def late_transform(module: Experts, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        time.sleep(LATE * dist.get_rank())
        return transform(module, rows, ends)

    dist.barrier()
    begun = time.time_ns()
    late = mock.patch.object(Experts, "transform", late_transform)
    profiling = profile(activities=[ProfilerActivity.CPU])
    with late, profiling as profiler, phase("step"), phase("forward_backward"):
        step(batches, torch.tensor(1.0))
    axes = {group: axis.name for group, axis in axis_of_group(mesh).items()}
    return breakdown(profiled_events(profiler), flight_records(begun), axes, pipeline_group="")
