"""Named parts of a step, by which `tools/watch/breakdown.py` or a trace viewer reads its profile.

Each is a beat too: the launcher sees that the rank goes on, and where it is (`heartbeat.py`).
"""

import torch.distributed as dist
from torch.profiler import record_function

from torchllm.runtime.heartbeat import beat

PREFIX = "torchllm:"
"""begins every name, to tell these parts from annotations of torch"""
MESSAGES = "messages of "
"""begins the name of a part that sends messages; torch's name of the process group follows"""


def phase(name: str) -> record_function:
    """Return a context that names a part of the step. It costs a few microseconds where nothing is profiled."""
    beat(name)
    return record_function(PREFIX + name)


def messages(group: dist.ProcessGroup) -> record_function:
    """Return a context around sending and receiving between ranks of `group`, which is not the pipeline's group.

    It is no beat: it may stand in a compiled block.
    """
    return record_function(PREFIX + MESSAGES + group.group_name)
