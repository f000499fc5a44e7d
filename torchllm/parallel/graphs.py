"""CUDA graphs (`compile.graphs`): forward and backward of a step are captured once, and then launched as one.

The host launches thousands of kernels in a step, each in some microseconds; where kernels are as short, the GPU waits
for it. A graph has them all, with the addresses that they read and write, and its launch is one call. So its inputs are
copied to where it reads them, and its gradients are each time at the same place. The graph keeps the peak memory of a
step, in a pool of torch's allocator: update and evaluation, which follow a backward, need memory on top of it.

The first steps run as they would without: they compile, make communicators, and choose kernels, which a capture
forbids. A capture runs nothing; its graph is then replayed. The host's work in a forward pass is not done in a replay,
so `graph_problems` in tools/config/rare_parts.py refuses keys that need it. No layout was replayed on a GPU yet;
`python -m tests.hollow.capture` shows which can be captured.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchllm.config.errors import UserError
from torchllm.data.batch import Batch
from torchllm.models.head import SUMS, take_sum
from torchllm.parallel.forward_backward import OneStage
from torchllm.parallel.fsdp import free_gathered

WARM_UP = 2
"""steps before the capture: optimizer and allocator are settled in the second"""


class Graphed:
    """A `ForwardBackward` whose steps, after the first, are replays of one of them."""

    def __init__(self, plain: OneStage, device: torch.device) -> None:
        if device.type != "cuda" or torch.__version__ < "2.13":
            raise UserError(
                f"compile.graphs: needs a GPU and torch 2.13 or later, and this is {device.type} with torch "
                f"{torch.__version__}: set it to false"
            )
        self.plain = plain
        self.stages = plain.stages
        self.loss_sum = plain.loss_sum
        self.steps = 0
        """that ran without a graph"""
        self.stream = torch.cuda.Stream()
        """of warm-up and capture: autograd remembers the stream of a parameter's use, and the default one cannot be
        captured"""

    def __call__(self, batches: Sequence[Batch], scale: Tensor) -> Tensor:
        """See `ForwardBackward`; the next call overwrites the result."""
        if self.steps < WARM_UP:
            self.steps += 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                loss = self.plain(batches, scale)
            torch.cuda.current_stream().wait_stream(self.stream)
            return loss
        # FOOTGUN: an evaluation leaves some units gathered, and the next backward frees them. A replay does not: the
        # norm would look for gradients in the gathered weights, and the next evaluation would take these old weights.
        (model,) = self.stages
        free_gathered(self.stages)
        if self.steps == WARM_UP:
            self.steps += 1
            self._capture(batches, scale)
        inputs = [*_tensors(batches), scale]
        shapes = [x.shape for x in inputs]
        if shapes != [x.shape for x in self.inputs]:
            raise UserError("compile.graphs: a step's micro batches have other shapes than before: set it to false")
        for place, x in zip(self.inputs, inputs, strict=True):
            place.copy_(x)
        self.graph.replay()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        for name, total in self.sums.items():
            setattr(model.lm_head, name, total)
        return self.loss

    def _capture(self, batches: Sequence[Batch], scale: Tensor) -> None:
        """Record the operations of a step. Parameters have no gradients yet, so that the graph makes them new."""
        own = []
        for batch in batches:
            copies: dict[str, Any] = {name: x.clone() for name, x in batch._asdict().items() if isinstance(x, Tensor)}
            own.append(batch._replace(**copies))
        own_scale = scale.clone()
        self.inputs = [*_tensors(own), own_scale]
        self.graph = torch.cuda.CUDAGraph()
        # Other threads (a save, the data) may wait for the GPU meanwhile; "global" would end the capture.
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
            self.loss = self.plain(own, own_scale)
        parameters = [parameter for stage in self.stages for parameter in stage.parameters()]
        self.gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        totals = {name: take_sum(self.stages, name) for name in SUMS}
        self.sums = {name: total for name, total in totals.items() if total is not None}


def _tensors(batches: Sequence[Batch]) -> list[Tensor]:
    return [x for batch in batches for x in batch if isinstance(x, Tensor)]
