"""Cores and memory that this process may use, by Linux and by the limits of its container or batch job.

Slurm, Kubernetes and containers limit both by control groups.
"""

import os
from contextlib import suppress
from pathlib import Path

FOLDER = "sys/fs/cgroup"
"""mount point on Linux"""


def control_groups(controller: str, root: Path = Path("/")) -> list[Path]:
    """Return the folders of this process's control groups that `controller` ("memory", "cpu") can limit, up to the top.

    In a container Linux may return the host's path, which is not visible there; the root is visible, and is the
    container's group. root: the root of the file system, another one in tests.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            top = root / FOLDER
        elif controller in controllers.split(","):  # version 1: a folder per set of controllers, or a link to it
            top = root / FOLDER / controller
        else:
            continue
        own = top / path.lstrip("/")
        groups += [folder for folder in (own, *own.parents) if folder == top or top in folder.parents]
    return groups


def usable_cores(root: Path = Path("/")) -> int:
    """Return the cores that this process may use, at least 1. root: the root of the file system, another one in tests.

    A container on 96 cores may have a quota of 8: 96 threads would each run for a twelfth of the time.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for group in control_groups("cpu", root) if (quota := _quota(group)) is not None]
    return max(1, int(min([cores, *quotas])))


def _quota(group: Path) -> float | None:
    """Return the cores' worth of time that a control group may use; None if it has no limit."""
    with suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()  # version 2: "max 100000" without a limit
        return int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota = (group / "cpu.cfs_quota_us").read_text()  # version 1: -1 without a limit
        if int(quota) > 0:
            return int(quota) / int((group / "cpu.cfs_period_us").read_text())
    return None


def host_memory_per_rank(root: Path = Path("/")) -> int:
    """Return the bytes of host memory that are available to each rank of this node; 0 if unknown.

    It assumes that all ranks of the node share the memory that this one sees, even if it has a separate control group.
    root: the root of the file system, another one in tests.
    """
    available = _available_on_host(root)
    for group in control_groups("memory", root):
        left = _left_of_limit(group)
        if left is not None:
            available = min(available, left)
    ranks = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))  # as Runtime.ranks_on_node
    return available // int(ranks)


def _available_on_host(root: Path) -> int:
    """Return MemAvailable: the memory that can be used without swapping, including the page cache; 0: unknown."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return 0
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 0


def _left_of_limit(group: Path) -> int | None:
    """Return the bytes that a control group may still use; None if it has no limit."""
    limit = _read_bytes(group / "memory.max", group / "memory.limit_in_bytes")
    used = _read_bytes(group / "memory.current", group / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    return max(0, limit - used + _cached_files(group))


def _read_bytes(*files: Path) -> int | None:
    """Return the number in the first of the files that exists; None if none does, or it says "max"."""
    for file in files:
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        return None if text == "max" else int(text)
    return None


def _cached_files(group: Path) -> int:
    """Return the bytes of inactive page cache: they count as used, but Linux can free them."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split() for line in lines)
    return int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))
