"""AdamW whose moments are in the host's memory, and whose update runs there (`optimizer.offload`).

A GPU holds 8 bytes less per parameter: weights and gradients stay, so that nothing else of a step changes. After the
norm, and the clipping by it, is known, weights and gradients go to the host, one parameter after the other; torch's
fused CPU kernel updates them, and the weights return. While one parameter is updated, the next one arrives and the last
one returns, through two buffers of pinned memory. Nothing overlaps with the backward pass: its gradients are not
clipped yet, and the host must know whether the step is applied.

Weights leave in every step, although the host has had them: a checkpoint, an average or a fork may have written others.
Offload of the optimizer: ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840.
"""

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchllm.config import Optimizer as OptimizerConfig
from torchllm.config.errors import UserError
from torchllm.optim.fused import Group, ShardedAdamW, has_fewer_bits, update_by_adamw
from torchllm.optim.rounded import RoundedAdamW, RoundedState
from torchllm.parallel.local_tensor import local_tensor
from torchllm.runtime.heartbeat import beat

HOST = torch.device("cpu")


class OnHost(NamedTuple):
    """This rank's part of a parameter, in a buffer of the host's memory."""

    group: Group
    parameter: Tensor
    weight: Tensor
    gradient: Tensor
    arrived: torch.cuda.Event | None
    """when both are copied; None: they are"""


class Buffer(NamedTuple):
    """Bytes of the host for the largest part of a parameter: pinned if it comes from a GPU."""

    weight: Tensor
    gradient: Tensor


class OffloadedAdamW(ShardedAdamW):
    """torch's fused AdamW on the host, over this rank's shards.

    FOOTGUN: a step waits for the device, until every gradient is there.
    """

    state_device = HOST
    buffers: tuple[Buffer, ...] = ()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes no closure
        """Update every parameter that has a gradient."""
        self.found_inf = self.found_inf.to(HOST)
        leaving = self._leaving()
        here = next(leaving, None)
        while here is not None:
            following = next(leaving, None)  # on its way while this one is updated
            if here.arrived is not None:
                here.arrived.synchronize()
            self.update_part(here.group, here.parameter, here.weight, here.gradient)
            local_tensor(here.parameter).copy_(here.weight, non_blocking=True)
            beat("optimizer")  # billions of parameters are minutes of a few cores
            here = following

    def update_part(self, group: Group, parameter: Tensor, weight: Tensor, gradient: Tensor) -> None:
        """Update this rank's part of one parameter: a plain tensor, with its gradient, on the host."""
        weight = weight.detach()
        weight.grad = gradient
        update_by_adamw({**group, "params": [weight]}, {weight: self.state[parameter]}, self.found_inf)

    def _leaving(self) -> Iterator[OnHost]:
        """Start the copies of one parameter after the other.

        They take two buffers in turn. On a GPU one stream copies in both directions, so that a buffer is not filled
        again before the weight in it has returned.
        """
        grouped = [(group, parameter) for group in self.param_groups for parameter in group["params"]]
        updated = [(group, parameter) for group, parameter in grouped if parameter.grad is not None]
        for (group, parameter), buffer in zip(updated, cycle(self._buffers(updated)), strict=False):
            weight = _copied(local_tensor(parameter), buffer.weight)
            gradient = _copied(local_tensor(parameter.grad), buffer.gradient)
            arrived = torch.cuda.current_stream().record_event() if parameter.is_cuda else None
            yield OnHost(group, parameter, weight, gradient, arrived)

    def _buffers(self, updated: Sequence[tuple[Group, Tensor]]) -> Sequence[Buffer]:
        """Return the two buffers, which are made at the first step."""
        parts = [local_tensor(parameter) for _, parameter in updated]
        size = max((part.nbytes for part in parts), default=0)
        if not self.buffers or len(self.buffers[0].weight) < size:
            pinned = any(part.is_cuda for part in parts)
            made = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(4)]
            self.buffers = Buffer(*made[:2]), Buffer(*made[2:])
        return self.buffers


def _copied(tensor: Tensor, buffer: Tensor) -> Tensor:
    """Start to copy a tensor into the bytes of a buffer; return the copy."""
    return buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)


class OffloadedRoundedAdamW(OffloadedAdamW, RoundedAdamW):
    """The same with weights or moments in bfloat16, which the host rounds."""

    def update_part(self, group: Group, parameter: Tensor, weight: Tensor, gradient: Tensor) -> None:
        """Update as `OffloadedAdamW`, and round."""
        state = {**self.state[parameter], "weight": weight}
        self.storage.update_part(group, parameter, state, gradient, self.found_inf)


def build_offloaded_adamw(stages: Sequence[nn.Module], groups: list[Group], config: OptimizerConfig) -> OffloadedAdamW:
    """Return AdamW on the host, of groups of the parameters of `stages`. Raises UserError for other optimizers."""
    if config.name != "adamw" or config.state_dtype == "int8":
        raise UserError("optimizer.offload is for AdamW with moments in float32 or bfloat16: set it to false")
    if has_fewer_bits(groups, config):
        return OffloadedRoundedAdamW(groups, config, RoundedState(stages, getattr(torch, config.state_dtype), HOST))
    return OffloadedAdamW(groups, config)
