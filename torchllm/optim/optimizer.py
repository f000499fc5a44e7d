"""Builds the optimizer of all of a rank's stages, and takes its step where the gradients are finite.

Optimizer states have the sharding of their parameters (ZeRO, Rajbhandari et al. 2020), so nothing is sent here: torch's
fused kernels get each rank's shards as plain tensors. Through DTensor, which has no rule for SGD's, the first step of
AdamW would plan its sharding in time that grows with the square of the parameters: 10 s for the 1,137 of Llama 3 405B.
AdamW: Loshchilov and Hutter 2019, arXiv 1711.05101.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from torchllm.config import Optimizer as OptimizerConfig
from torchllm.parallel.float8 import is_gathered_as_float8, plain_tensor, scale_gathered_weights
from torchllm.spec.parameters import canonical_name, rule_of


def build_optimizer(stages: Sequence[nn.Module], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return AdamW or SGD, whose two groups are the decayed and the undecayed parameters of `spec/parameters.py`.

    Moments and counters exist from the start, so that a checkpoint has every key and memory does not grow later. The
    fused kernels change nothing where `found_inf` is set, which `apply_if_finite` relies on. After each step it scales
    the weights that FSDP gathers as float8.
    """
    groups: dict[bool, list[Tensor]] = {True: [], False: []}  # by whether they are decayed
    for stage in stages:
        for name, parameter in stage.named_parameters():
            groups[rule_of(canonical_name(name)).decayed].append(parameter)
    settings = []
    for decayed, parameters in groups.items():
        if parameters:
            settings.append({"params": parameters, "weight_decay": config.weight_decay if decayed else 0.0})
    optimizer: torch.optim.Optimizer
    if config.name == "sgd":
        optimizer = ShardedSGD(settings, config.learning_rate, config.momentum)
    else:
        optimizer = ShardedAdamW(settings, config)
    if any(is_gathered_as_float8(parameter) for stage in stages for parameter in stage.parameters()):
        optimizer.register_step_post_hook(lambda *_: scale_gathered_weights(stages))
    return optimizer


def apply_if_finite(optimizer: torch.optim.Optimizer, learning_rate: float, finite: Tensor) -> None:
    """Take the optimizer's step if `finite` (a bool (), equal on all ranks) is true; otherwise change nothing at all.

    The decision stays on the device: the fused kernels read `found_inf`, which is how torch's GradScaler skips steps.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    # The two attributes that GradScaler sets are not in torch's stubs.
    optimizer.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.step()


class ShardedAdamW(torch.optim.AdamW):
    """torch's fused AdamW over this rank's shards."""

    found_inf: Tensor

    def __init__(self, groups: list[dict[str, Any]], config: OptimizerConfig) -> None:
        super().__init__(groups, config.learning_rate, (config.beta1, config.beta2), config.epsilon, fused=True)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes no closure
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters: list[Tensor] = []
            gradients: list[Tensor] = []
            means: list[Tensor] = []
            mean_squares: list[Tensor] = []
            steps: list[Tensor] = []
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    parameters.append(_local(parameter))
                    gradients.append(_local(parameter.grad))
                    means.append(_local(state["exp_avg"]))
                    mean_squares.append(_local(state["exp_avg_sq"]))
                    steps.append(state["step"])
            beta1, beta2 = group["betas"]
            adamw(
                parameters,
                gradients,
                means,
                mean_squares,
                [],
                steps,
                fused=True,
                found_inf=self.found_inf,
                amsgrad=group["amsgrad"],
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
            )


class ShardedSGD(torch.optim.SGD):
    """torch's fused SGD over this rank's shards."""

    found_inf: Tensor

    def __init__(self, groups: list[dict[str, Any]], learning_rate: float, momentum: float) -> None:
        super().__init__(groups, learning_rate, momentum, fused=True)
        if momentum:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes no closure
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters: list[Tensor] = []
            gradients: list[Tensor] = []
            buffers: list[Tensor | None] = []
            for parameter in group["params"]:
                if parameter.grad is not None:
                    buffer = self.state[parameter].get("momentum_buffer")
                    parameters.append(_local(parameter))
                    gradients.append(_local(parameter.grad))
                    buffers.append(None if buffer is None else _local(buffer))
            sgd(
                parameters,
                gradients,
                buffers,
                fused=True,
                found_inf=self.found_inf,
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=group["maximize"],
            )


def _local(tensor: Tensor) -> Tensor:
    return plain_tensor(tensor.to_local()) if isinstance(tensor, DTensor) else tensor
