"""Private torch names that tools alone use, each with its reason; the rest is as in `runtime/torch_compat.py`."""

from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d


def group_with_name(name: str) -> dist.ProcessGroup:
    """Return the process group with this name. Private: torch has no public way from the name to the group."""
    return c10d._resolve_process_group(name)  # type: ignore[arg-type]  # torch's GroupName is a str


def dump_memory(file: str) -> None:
    """Write a snapshot of the GPU's memory to `file`, in the format of pytorch.org/memory_viz.

    Private: the public `torch.cuda.memory_snapshot` returns the blocks without the history. torch's guide to GPU memory
    names this function.
    """
    torch.cuda.memory._dump_snapshot(file)


def skip_pipeline_vote(schedule: Any) -> None:
    """Let a pipeline schedule start its first step without exchanging whether the shapes of stages are static.

    Private: all stages of this library have static shapes, but torch 2.13 has no setting for it, and fake tensors have
    no answer to read. torch 2.11 has no such exchange, torch 2.15 skips it for fake ranks.
    """

    def all_static(stages: Any, *_: Any) -> None:
        from torch.distributed.pipelining._utils import InferenceMode  # not in torch 2.11

        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    if hasattr(schedule, "_warmup_p2p"):
        schedule._warmup_p2p = all_static
