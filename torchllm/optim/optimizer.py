"""The optimizer over all of a rank's stages: decayed and undecayed groups, its state made at once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.sgd import sgd

from torchllm.config import Optimizer as OptimizerConfig
from torchllm.spec.parameters import canonical_name, row_of


def build_optimizer(stages: Sequence[nn.Module], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW or SGD with `layout.py`'s decayed and undecayed parameters as its two groups.

    Moments and counters exist from the start, so that a checkpoint has every key and memory does not grow later.
    fused: one kernel over all parameters, which changes nothing where `found_inf` is set (`apply_if_finite`).
    """
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            groups[row_of(canonical_name(name)).decayed].append(parameter)
    settings = [
        {"params": parameters, "weight_decay": config.weight_decay if decayed else 0.0}
        for decayed, parameters in groups.items()
        if parameters
    ]
    if config.name == "sgd":
        return ShardedSGD(settings, config.learning_rate, config.momentum)
    betas = (config.beta1, config.beta2)
    adamw = torch.optim.AdamW(settings, config.learning_rate, betas, config.epsilon, fused=True)
    _make_adamw_state(adamw)
    return adamw


def apply_if_finite(optimizer: torch.optim.Optimizer, learning_rate: float, finite: Tensor) -> None:
    """Take the optimizer's step where `finite` (a bool (), equal on all ranks) holds; else change nothing at all.

    The decision stays on the device: the fused kernels read `found_inf`, which is how torch's GradScaler skips steps.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.step()


class ShardedSGD(torch.optim.SGD):
    """torch's fused SGD over this rank's shards. (DTensor knows the fused AdamW kernel, but not this one.)"""

    found_inf: Tensor

    def __init__(self, groups: list[dict[str, Any]], learning_rate: float, momentum: float) -> None:
        super().__init__(groups, learning_rate, momentum, fused=True)
        for group in self.param_groups if momentum else []:
            for parameter in group["params"]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            buffers = [self.state[parameter].get("momentum_buffer") for parameter in parameters]
            sgd(
                [_local(parameter) for parameter in parameters],
                [_local(parameter.grad) for parameter in parameters if parameter.grad is not None],
                [_local(buffer) if buffer is not None else None for buffer in buffers],
                fused=True,
                found_inf=self.found_inf,
                **{key: group[key] for key in ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")},
            )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _make_adamw_state(optimizer: torch.optim.AdamW) -> None:
    """A step with zero gradients at rate zero makes the state without changing a weight; then its counters go to 0."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    apply_if_finite(optimizer, 0.0, torch.ones((), dtype=torch.bool, device=parameter.device))
    optimizer.zero_grad()
    for state in optimizer.state.values():
        state["step"].zero_()
