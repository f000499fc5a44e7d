from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.metrics.test_monitor import monitor_of
from tests.parity import CPU, tiny
from tests.tools.watch.test_notices import log_lines
from tests.workers import run
from torchllm.facts.flops import flops_per_token
from torchllm.parallel.mesh import build_mesh
from torchllm.tools.watch.profiled_steps import ProfiledSteps
from torchllm.tools.watch.slow_rank import SlowRank
from torchllm.tools.watch.step_profiler import ProfiledStep


def _report_two_steps(folder: Path) -> tuple[list[Any], list[str], float]:
    """The records and lines of two profiled steps on a device whose peak is 1 GFLOP/s; the MFU of the first."""
    records: list[Any] = []
    sink: Any = SimpleNamespace(write=lambda step, record: records.append(record), close=lambda: None)
    config = tiny({})
    with log_lines() as lines:
        profiled = ProfiledSteps()
        monitor = monitor_of(folder, config, [profiled])
        monitor.add_sink(sink)
        monitor.meter.peak = 1e9
        before = len(lines)
        profiled.report(ProfiledStep(4, {"forward": 0.5, "backward": 1.0, "exposed fsdp": 0.5}, None))
        profiled.report(ProfiledStep(8, {"forward": 2.0}, SlowRank(2, "node-7", "forward", 0.9, 0.3)))
        monitor.end()
    length = config.training.sequence_length
    return (
        records,
        lines[before:],
        config.training.global_batch_size * length / 2.0 * flops_per_token(config.model, length) / 1e9,
    )


def test_a_profiled_step_has_a_record_of_its_own_and_the_first_a_line(tmp_path: Path) -> None:
    [(records, lines, mfu)] = run(_report_two_steps, 1, tmp_path)
    shares = {"breakdown/forward": 0.25, "breakdown/backward": 0.5, "breakdown/exposed fsdp": 0.25}
    assert records == [{"step": 4} | shares, {"step": 8, "breakdown/forward": 1.0}]
    assert lines[0].startswith("step 4, 2 s: backward 50.0%, ")
    assert f"MFU {mfu:.1%} measured; exposed fsdp costs {100 * (mfu / 0.75 - mfu):.1f} points" in lines[0]
    assert lines[1] == "step 8: rank 2 (node-7) is slow: forward takes 0.9 s, 0.3 s on its peers"


def _has_profiler(folder: Path, interval: int, start: int) -> bool:
    config = tiny({"training.steps": 8, "metrics.breakdown_interval": interval})
    runtime = SimpleNamespace(folder=folder, rank=0, host_group=dist.new_group(backend="gloo"), device=CPU)
    run: Any = SimpleNamespace(config=config, runtime=runtime, mesh=build_mesh(config.parallel, CPU), start=start)
    profiled = ProfiledSteps()
    profiled.begin(run)
    return profiled.profiler is not None


@pytest.mark.parametrize(
    ("interval", "start", "profiles"), [(8, 6, True), (8, 7, False), (9, 0, False), (3, 4, True), (3, 5, False)]
)
def test_a_run_that_ends_before_a_profiled_step_makes_no_profiler(
    tmp_path: Path, interval: int, start: int, profiles: bool
) -> None:
    """The first step after a start is not profiled."""
    assert run(_has_profiler, 1, tmp_path, interval, start) == [profiles]
