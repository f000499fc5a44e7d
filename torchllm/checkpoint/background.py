"""Decides whether checkpoints are written in the background if checkpoint.asynchronous is "auto"."""

import logging
from collections.abc import Mapping

from torchllm.checkpoint.agreement import Group, first_problem, log_on_first
from torchllm.checkpoint.state import Part
from torchllm.config.schema import Switch

SAVES_IN_BACKGROUND = "saves in the background"
"""description of a process group whose timeout is run.save_timeout, whatever the main thread is doing"""
SHARE = 0.5
"""share of the available host memory for copies: pinned memory comes in powers of two, at most twice the copies"""


def saves_in_background(asynchronous: Switch, parts: Mapping[str, Part], group: Group) -> bool:
    """Return whether a rank with these `parts` writes its checkpoints in the background: the same on all ranks.

    "auto" is true on GPUs if the host's memory allows it on every node. On a CPU it is false: the thread that writes
    would take a core from training. Must be called on all ranks.
    """
    if asynchronous != "auto":
        return asynchronous
    is_on_gpu = any(part.local.is_cuda for part in parts.values())
    if not is_on_gpu:
        return False
    from torchllm.runtime.host_limits import host_memory_per_rank  # a CPU saves in the foreground

    copies = sum(part.local.nbytes for part in parts.values())
    lack = first_problem(group, lack_of_host_memory(copies, host_memory_per_rank()))
    if lack:
        log_on_first(group, f"checkpoint.asynchronous: auto is false: {lack}", logging.WARNING)
    else:
        log_on_first(group, "checkpoints are written in the background: checkpoint.asynchronous is auto")
    return not lack


def lack_of_host_memory(copies: int, available: int) -> str:
    """Return why copies of this size do not fit into the host memory per rank; "" if they fit.

    copies, available: bytes per rank.
    """
    if available == 0:
        return "the host's available memory is unknown"
    if copies <= SHARE * available:
        return ""
    return (
        f"a copy of a rank's state takes {copies / 2**30:.1f} GiB of host memory, more than half of the "
        f"{available / 2**30:.1f} GiB that are available per rank"
    )
