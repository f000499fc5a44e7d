"""The memory and the cores that a rank may use, from files of control groups as Linux writes them."""

import sys
from pathlib import Path

import pytest

from torchllm.runtime import host_limits
from torchllm.runtime.host_limits import host_memory_per_rank, usable_cores

pytestmark = pytest.mark.quick

GIB = 2**30
AVAILABLE = 100
"""GiB that /proc/meminfo says are available"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    write(tmp_path / "proc/meminfo", f"MemTotal: 1 kB\nMemAvailable:   {AVAILABLE * 2**20} kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/job/step\n")
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def limit(group: Path, limit: str, used: int, stat: str = "") -> None:
    """Write a control group of version 2; limit: bytes or max, used: bytes."""
    write(group / "memory.max", limit)
    write(group / "memory.current", str(used))
    write(group / "memory.stat", stat)


def test_without_limits_the_ranks_of_a_node_share_what_the_host_has(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert host_memory_per_rank(root) == AVAILABLE * GIB
    limit(root / "sys/fs/cgroup/job", "max", used=3)
    assert host_memory_per_rank(root) == AVAILABLE * GIB
    monkeypatch.setenv("WORLD_SIZE", "16")  # if nothing says how many are on the node
    assert host_memory_per_rank(root) == AVAILABLE * GIB // 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert host_memory_per_rank(root) == AVAILABLE * GIB // 8


def test_the_limit_of_any_group_above_counts(root: Path) -> None:
    for group in ("", "job", "job/step"):
        limit(root / "sys/fs/cgroup/job/step", str(60 * GIB), used=0)
        limit(root / "sys/fs/cgroup" / group, str(50 * GIB), used=30 * GIB)
        assert host_memory_per_rank(root) == 20 * GIB, group
        limit(root / "sys/fs/cgroup" / group, "max", used=0)
    write(root / "proc/self/cgroup", "0::/../../kubepods/pod7\n")  # a container does not see the host's folders
    limit(root / "sys/fs/cgroup", str(50 * GIB), used=30 * GIB)
    assert host_memory_per_rank(root) == 20 * GIB


def test_cached_files_can_be_given_up_and_no_limit_is_exceeded(root: Path) -> None:
    limit(root / "sys/fs/cgroup/job", str(50 * GIB), used=30 * GIB, stat=f"anon 1\ninactive_file {8 * GIB}\n")
    assert host_memory_per_rank(root) == 28 * GIB
    limit(root / "sys/fs/cgroup/job", str(50 * GIB), used=51 * GIB)
    assert host_memory_per_rank(root) == 0


def test_version_1_has_other_names(root: Path) -> None:
    write(root / "proc/self/cgroup", "9:cpu,cpuacct:/other\n4:memory:/slurm/job_7\n0::/\n")
    group = root / "sys/fs/cgroup/memory/slurm/job_7"
    write(group / "memory.limit_in_bytes", str(50 * GIB))
    write(group / "memory.usage_in_bytes", str(30 * GIB))
    write(group / "memory.stat", f"inactive_file 0\ntotal_inactive_file {8 * GIB}\n")
    assert host_memory_per_rank(root) == 28 * GIB


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what is available")
def test_this_machine_has_some_and_one_without_linux_is_unknown(tmp_path: Path) -> None:
    assert host_memory_per_rank() > 2**20
    assert host_memory_per_rank(tmp_path) == 0


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
        write(root / "proc/self/cgroup", groups)
        for name, text in files.items():
            write(root / "sys/fs/cgroup" / name, f"{text}\n")
        assert usable_cores(root) == expected, groups
