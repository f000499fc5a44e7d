"""torch's fused SGD over this rank's shards: see `fused.py`."""

import torch
from torch.optim.sgd import sgd

from torchllm.config import Optimizer as OptimizerConfig
from torchllm.optim.fused import Group
from torchllm.parallel.local_tensor import local_tensor


class ShardedSGD(torch.optim.SGD):
    """torch's fused SGD over this rank's shards."""

    found_inf = torch.zeros(())

    def __init__(self, groups: list[Group], config: OptimizerConfig) -> None:
        super().__init__(groups, config.learning_rate, config.momentum, weight_decay=config.weight_decay, fused=True)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group with its state, which is empty without momentum."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            self.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)} if group["momentum"] else {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes no closure
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            updated = [parameter for parameter in group["params"] if parameter.grad is not None]
            buffers = [self.state[parameter].get("momentum_buffer") for parameter in updated]
            sgd(
                [local_tensor(parameter) for parameter in updated],
                [local_tensor(parameter.grad) for parameter in updated],
                [None if buffer is None else local_tensor(buffer) for buffer in buffers],
                fused=True,
                found_inf=self.found_inf,
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=group["maximize"],
            )
