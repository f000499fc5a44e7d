"""torch's fused AdamW over this rank's shards; `sgd.py` has SGD.

Optimizer states have the sharding of their parameters (ZeRO, Rajbhandari et al. 2020), so a step needs no
communication: torch's fused kernels get each rank's shards as plain tensors. DTensor has no rule for fused SGD, and
with it the first step of AdamW takes quadratic time in the number of parameters: 10 s for the 1,137 of Llama 3 405B.
AdamW: Loshchilov and Hutter 2019, arXiv 1711.05101.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from torchllm.config import Optimizer as OptimizerConfig
from torchllm.parallel.local_tensor import local_tensor

Group = dict[str, Any]
"""parameters of an optimizer that have the same settings, as torch keeps them"""


class ShardedAdamW(torch.optim.AdamW):
    """torch's fused AdamW over this rank's shards."""

    found_inf = torch.zeros(())  # unless `apply_if_finite` sets another
    state_device: torch.device | None = None
    """of moments and counters; None: their parameter's"""

    def __init__(self, groups: list[Group], config: OptimizerConfig) -> None:
        betas = (config.beta1, config.beta2)
        super().__init__(groups, config.learning_rate, betas, config.epsilon, config.weight_decay, fused=True)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group with its state; torch's constructor adds every group by this."""
        super().add_param_group(param_group)
        start_adamw(self.param_groups[-1], self.state, self.state_device)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes no closure
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            update_by_adamw(group, self.state, self.found_inf)


def has_fewer_bits(groups: list[Group], config: OptimizerConfig) -> bool:
    """Return whether an optimizer has weights or moments that are not float32, and rounds them."""
    dtypes = {parameter.dtype for group in groups for parameter in group["params"]}
    return config.state_dtype != "float32" or torch.bfloat16 in dtypes


def start_adamw(group: Group, state: dict[Tensor, Any], device: torch.device | None = None) -> None:
    """Give every parameter of a group the state of AdamW, zeros. device: of all of it; None: the parameter's."""
    for parameter in group["params"]:
        state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=device or parameter.device),
            "exp_avg": torch.zeros_like(parameter, device=device),
            "exp_avg_sq": torch.zeros_like(parameter, device=device),
        }


def update_by_adamw(group: Group, state: Mapping[Tensor, Any], found_inf: Tensor) -> None:
    """Update every parameter of a group that has a gradient; no change if `found_inf` is not 0."""
    updated = [parameter for parameter in group["params"] if parameter.grad is not None]
    states = [state[parameter] for parameter in updated]
    beta1, beta2 = group["betas"]
    adamw(
        [local_tensor(parameter) for parameter in updated],
        [local_tensor(parameter.grad) for parameter in updated],
        [local_tensor(moments["exp_avg"]) for moments in states],
        [local_tensor(moments["exp_avg_sq"]) for moments in states],
        [],
        [moments["step"] for moments in states],
        fused=True,
        found_inf=found_inf,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
