"""Number of cores that this process may use, by Linux and by the quota of its container or batch job."""

import os
from contextlib import suppress
from pathlib import Path

from torchllm.runtime.control_groups import control_groups


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
