"""The optimizer over all of a rank's stages: decayed and undecayed groups, its state made at once."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchllm.config import Optimizer as OptimizerConfig
from torchllm.layout import canonical_name, row_of


def build_optimizer(stages: Sequence[nn.Module], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW or SGD with `layout.py`'s decayed and undecayed parameters as its two groups.

    fused: one kernel over all parameters, which also leaves everything as it is when `found_inf` is set (see
    `apply_if_finite`).
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
    optimizer: torch.optim.Optimizer
    if config.name == "adamw":
        betas = (config.beta1, config.beta2)
        optimizer = torch.optim.AdamW(settings, config.learning_rate, betas, config.epsilon, fused=True)
    else:
        optimizer = torch.optim.SGD(settings, config.learning_rate, config.momentum, fused=True)
    _make_state(optimizer)
    return optimizer


def apply_if_finite(optimizer: torch.optim.Optimizer, learning_rate: float, finite: Tensor) -> None:
    """Take the optimizer's step where `finite` (a bool (), equal on all ranks) holds; else change nothing at all.

    The decision stays on the device: the fused kernels read `found_inf`, which is how torch's GradScaler skips steps.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.step()


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Moments and counters exist from the start, so that a checkpoint has every key and memory does not grow later.

    A step with zero gradients at rate zero makes them without changing a weight; the counters then go back to zero.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].zero_()
