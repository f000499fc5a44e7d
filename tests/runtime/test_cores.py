"""The cores that a process may use, from files of control groups as Linux writes them."""

from pathlib import Path

import pytest

from torchllm.runtime import host_limits
from torchllm.runtime.host_limits import usable_cores

pytestmark = pytest.mark.quick

V1_QUOTA, V1_PERIOD = "cpu/job/cpu.cfs_quota_us", "cpu/job/cpu.cfs_period_us"
CASES: list[tuple[str, dict[str, str], int]] = [
    ("0::/pod/rank\n", {"pod/rank/cpu.max": "max 100000", "cpu.max": "max 100000"}, 96),
    ("0::/pod/rank\n", {"pod/rank/cpu.max": "max 100000", "pod/cpu.max": "800000 100000"}, 8),
    ("0::/not/seen/here\n", {"cpu.max": "250000 100000"}, 2),
    ("0::/\n", {"cpu.max": "50000 100000"}, 1),
    ("4:cpu,cpuacct:/job\n", {V1_QUOTA: "400000", V1_PERIOD: "100000"}, 4),
    ("4:cpu,cpuacct:/job\n", {V1_QUOTA: "-1", V1_PERIOD: "100000"}, 96),
    ("4:memory:/job\n", {"cpu.max": "100000 100000"}, 96),
]
"""the groups of a process, the files of groups, and the cores"""


def test_cores_are_those_of_the_host_or_of_a_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_limits.os, "sched_getaffinity", lambda pid: range(96))
    for number, (groups, files, expected) in enumerate(CASES):
        root = tmp_path / str(number)
        texts = {f"sys/fs/cgroup/{name}": f"{text}\n" for name, text in files.items()}
        for name, text in {**texts, "proc/self/cgroup": groups}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        assert usable_cores(root) == expected, groups
