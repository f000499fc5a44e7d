"""Private names of torch's pipelines, and differences between its versions; as `torch_compat.py`."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage


class ConnectedStage(PipelineStage):
    """A stage of a pipeline, which is connected to the stages on other ranks before the first step.

    Private: torch 2.11 also connects a stage to a neighbor on the same rank, as V-shaped schedules have, and gloo
    aborts a process that sends to itself. Later versions do not call this.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        messages = super()._get_init_p2p_neighbors_ops()
        return [message for message in messages if message.group_peer != self.group_rank]


def standard_strides(x: Tensor) -> Tensor:
    """Return a view of a contiguous tensor with the strides of a new tensor of its shape.

    The stride of a dimension of size 1 is arbitrary, and a slice has another one there than a new tensor. Pipeline
    stages in torch 2.11 refuse to send it; later versions do not compare strides.
    """
    return x.flatten().view(x.shape)
