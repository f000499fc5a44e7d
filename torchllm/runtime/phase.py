"""Named parts of a step, for `tools/watch/breakdown.py` and trace viewers.

Each also sends a heartbeat to the launcher (`heartbeat.py`).
"""

import torch.distributed as dist
from torch.profiler import record_function

from torchllm.runtime.heartbeat import beat

PREFIX = "torchllm:"
"""prefix of the names, to tell these parts from annotations of torch"""
MESSAGES = "messages of "
"""prefix of the names of parts that send messages, before torch's name of the process group"""


def phase(name: str) -> record_function:
    """Return a context that names a part of the step. It costs a few microseconds without a profiler."""
    beat(name)
    return record_function(PREFIX + name)


def messages(group: dist.ProcessGroup) -> record_function:
    """Return a context around sending and receiving between ranks of `group`, which is not the pipeline's group.

    It sends no heartbeat, so that it may be in a compiled block.
    """
    return record_function(PREFIX + MESSAGES + group.group_name)
