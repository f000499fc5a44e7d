"""The cores that a process may use, from files of control groups as Linux writes them."""

from pathlib import Path

import pytest

from torchllm.runtime import host_limits
from torchllm.runtime.host_limits import usable_cores

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/pod/rank\n", {"pod/rank/cpu.max": "max 100000", "cpu.max": "max 100000"}, 96),
        ("0::/pod/rank\n", {"pod/rank/cpu.max": "max 100000", "pod/cpu.max": "800000 100000"}, 8),
        ("0::/not/seen/here\n", {"cpu.max": "250000 100000"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("4:cpu,cpuacct:/job\n", {"cpu/job/cpu.cfs_quota_us": "400000", "cpu/job/cpu.cfs_period_us": "100000"}, 4),
        ("4:cpu,cpuacct:/job\n", {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"}, 96),
        ("4:memory:/job\n", {"cpu.max": "100000 100000"}, 96),
    ],
)
def test_cores_are_those_of_the_host_or_of_a_quota(
    groups: str, files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_limits.os, "sched_getaffinity", lambda pid: range(96))
    for name, text in ({"proc/self/cgroup": groups} | {f"sys/fs/cgroup/{key}": files[key] for key in files}).items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n" if name != "proc/self/cgroup" else text)
    assert usable_cores(tmp_path) == expected
