"""A step split into parts: on timelines written by hand, and on real ranks that wait where they are told to."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.workers import run
from torchllm.metrics.breakdown import split
from torchllm.runtime.phase import MESSAGES, PREFIX, phase
from torchllm.runtime.torch_compat import FlightRecord, ProfiledEvent, flight_records, profiled_events

MS = 1_000_000


def event(name: str, start: float, end: float, **more: Any) -> ProfiledEvent:
    """Milliseconds."""
    usual: dict[str, Any] = {"thread": 1, "annotation": False, "backward": False, "asynchronous": False}
    usual |= {"kernel": False, "launched": int(start * MS)} | more
    return ProfiledEvent(name=name, start=int(start * MS), end=int(end * MS), **usual)


def span(name: str, start: float, end: float) -> ProfiledEvent:
    return event(PREFIX + name, start, end, annotation=True)


def sent(number: int, group: str, name: str, created: float) -> FlightRecord:
    return FlightRecord(number, group, name, number, int(created * MS), True, "")


STEP = [
    span("step", 0, 100),
    span("data", 0, 5),
    span("forward_backward", 10, 80),
    event("autograd::engine::evaluate_function: MmBackward0", 40, 80),
    span("optimizer", 85, 95),
]


def parts(events: list[ProfiledEvent], records: list[FlightRecord] | None = None) -> dict[str, float]:
    """Milliseconds."""
    found = split([*STEP, *events], records or [], {"1": "tp", "2": "pp", "3": "cp"}, "2")
    assert sum(found.values()) == pytest.approx(0.1)
    return {name: round(seconds * 1000, 6) for name, seconds in found.items() if seconds}


def test_without_a_collective_the_phases_are_all() -> None:
    assert parts([event("aten::mm", 12, 38)]) == {
        "data": 5, "forward": 30, "backward": 40, "optimizer": 10, "other": 15,
    }  # fmt: skip


def test_a_cpu_waits_where_no_operator_runs_and_something_is_under_way() -> None:
    operators = [event("aten::mm", 12, 20), event("c10d::allreduce_", 20, 20.05), event("aten::mm", 30, 40)]
    under_way = [event("gloo:all_reduce", 21, 28, thread=5, asynchronous=True)]
    found = parts([*operators, *under_way], [sent(7, "1", "gloo:all_reduce", 20)])
    assert found["exposed tp"] == 8  # 20 to 28: from when it was asked for
    assert found["forward"] == 22


def test_what_is_hidden_behind_operators_is_not_exposed() -> None:
    under_way = [event("gloo:all_gather", 14, 18, thread=5, asynchronous=True)]
    assert "exposed tp" not in parts([event("aten::mm", 12, 20), *under_way], [sent(7, "1", "gloo:all_gather", 13)])


def test_a_wait_inside_an_operator_of_dtensor_is_a_wait() -> None:
    """aten::mm of DTensors is around the collective that it needs."""
    inside = [event("aten::mm", 12, 40), event("_c10d_functional::wait_tensor", 14, 34)]
    under_way = [event("gloo:all_reduce", 14, 34, thread=5, asynchronous=True)]
    assert parts([*inside, *under_way], [sent(7, "1", "gloo:all_reduce", 14)])["exposed tp"] == 20


def test_short_gaps_are_pythons_and_a_sleep_is_work() -> None:
    operators = [event("aten::mm", at, at + 0.95) for at in range(10, 80)]
    under_way = [event("gloo:all_reduce", 10, 70, thread=5, asynchronous=True)]
    assert "exposed tp" not in parts([*operators, *under_way], [sent(7, "1", "gloo:all_reduce", 10)])
    asleep = [one for one in operators if not 20 <= one.start / MS < 40]
    assert "exposed tp" not in parts(asleep)


def test_the_bubble_is_what_a_pipeline_waits_beyond_its_messages() -> None:
    operators = [event("aten::mm", 12, 20), event("aten::mm", 35, 40), event("aten::mm", 43, 80)]
    under_way = [event("gloo:recv", 20, 35, thread=5, asynchronous=True)]
    under_way += [event("gloo:recv", 40, 43, thread=5, asynchronous=True)]
    found = parts(
        [*operators, *under_way],
    )
    assert (found["exposed pp"], found["bubble"]) == (6, 12)


def test_messages_of_a_ring_are_its_own() -> None:
    operators = [event("aten::mm", 12, 20), event("aten::mm", 35, 80)]
    under_way = [event("gloo:recv", 20, 35, thread=5, asynchronous=True)]
    found = parts([*operators, *under_way, event(PREFIX + MESSAGES + "3", 19.9, 20.1, annotation=True)])
    assert found["exposed cp"] == 15


def test_a_gpu_computes_where_a_kernel_runs_that_is_not_nccls() -> None:
    kernels = [
        event("gemm", 20, 40, kernel=True, launched=12 * MS),
        event("ncclDevKernel_AllGather", 30, 48, kernel=True, launched=13 * MS),
        event("gemm", 50, 90, kernel=True, launched=45 * MS),
        event("adam", 90, 96, kernel=True, launched=86 * MS),
    ]
    found = parts(kernels, [sent(7, "1", "nccl:all_gather", 12.9), sent(8, "2", "nccl:send", 44)])
    assert found == {"data": 5, "forward": 20, "exposed tp": 8, "backward": 40, "optimizer": 6, "other": 21}


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_large_step_is_split_in_no_time(on_gpu: bool) -> None:
    """5,000 collectives, as 100 layers of tensor parallelism have; work that grew with their square takes minutes."""
    operator, collective = ("gemm", "ncclDevKernel") if on_gpu else ("aten::mm", "gloo:all_reduce")
    computes: dict[str, Any] = {"kernel": on_gpu}
    sends: dict[str, Any] = {"kernel": True} if on_gpu else {"thread": 5, "asynchronous": True}
    events, records = [span("step", 0, 25_000), span("forward_backward", 0, 25_000)], []
    for number in range(5000):  # 1 ms of computing, 4 ms of waiting
        at = 5 * number
        events += [event(operator, at, at + 1, **computes), event(collective, at + 1, at + 5, **sends)]
        records.append(sent(number, "1", collective, at + 1))
    before = time.process_time()
    found = split(events, records, {"1": "tp"}, "")
    assert time.process_time() - before < 5  # 0.1 s here
    assert found["exposed tp"] == pytest.approx(20)
    assert found["forward"] == pytest.approx(5)


def test_real_ranks() -> None:
    """Rank 1 sleeps for 0.3 s before a collective: it works, and rank 0 waits."""
    waits, works = run(_two_ranks, 2)
    for found in (waits, works):
        whole = found.pop("whole")
        assert sum(found.values()) == pytest.approx(whole, rel=0.02)
    assert works["forward"] >= 0.3
    assert works.get("exposed all", 0) < 0.1
    assert waits["forward"] < 0.1
    assert waits["exposed all"] > 0.2


def _two_ranks() -> dict[str, float]:
    x = torch.ones(100, 100)
    before = time.time_ns()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        with phase("step"), phase("forward_backward"):
            x @ x
            if dist.get_rank():
                time.sleep(0.3)
            dist.all_reduce(x)
            x @ x
        seconds = time.perf_counter() - start
    records = flight_records(before)
    assert [record.name for record in records] == ["gloo:barrier", "gloo:all_reduce"]
    group = dist.group.WORLD
    assert group is not None
    assert {record.group for record in records} == {group.group_name}
    found = split(profiled_events(profiler), records, {group.group_name: "all"}, "")
    return found | {"whole": seconds}
