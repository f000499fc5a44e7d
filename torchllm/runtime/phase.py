"""Names for what the step does, by which a profile of it is read (`metrics/breakdown.py`, or a trace viewer)."""

import torch.distributed as dist
from torch.profiler import record_function

PREFIX = "torchllm:"
MESSAGES = "messages of "


def phase(name: str) -> record_function:
    """A context around a part of the step. Costs a few microseconds where nothing is profiled."""
    return record_function(PREFIX + name)


def messages(group: dist.ProcessGroup) -> record_function:
    """Around sending and receiving from rank to rank, in another group than the pipeline's."""
    return phase(MESSAGES + group.group_name)
