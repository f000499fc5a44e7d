"""Available host memory per rank, by Linux and by the limits of its container or batch job."""

import os
from pathlib import Path

from torchllm.runtime.control_groups import control_groups


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
