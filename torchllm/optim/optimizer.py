"""Builds the optimizer of all of a rank's stages, and takes its step if the gradients are finite."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from torchllm.config import Model
from torchllm.config import Optimizer as OptimizerConfig
from torchllm.config.applied_keys import applied, refuse_unchecked_step
from torchllm.facts.parameters import canonical_name, rule_of
from torchllm.facts.parts.part import Role
from torchllm.models.decoder import Decoder
from torchllm.optim.fused import ShardedAdamW, has_fewer_bits
from torchllm.parallel.local_tensor import is_gathered_as_float8, scale_gathered_weights
from torchllm.runtime.torch_compat import reads_found_inf


class RoleSettings(NamedTuple):
    """Optimizer settings of the parameters of one role."""

    learning_rate_factor: float
    """their learning rate as a multiple of the schedule's"""
    weight_decay: float
    orthogonalized: bool = False
    """whether Muon updates them by their orthogonalized momentum"""


def settings_by_role(config: OptimizerConfig, width: float = 1.0) -> dict[Role, RoleSettings]:
    """Return the settings of every role. width: `Model.width_ratio`.

    muP for Adam (Yang et al. 2022, arXiv 2203.03466, table 3): rates of matrices whose inputs grow with the width are
    divided by it. AdamW's decay of a weight, rate x decay, stays the same (Wortsman et al. 2023, arXiv 2309.14322).
    """
    decay, of_inputs = config.weight_decay, config.weight_decay * width
    return {
        "matrix": RoleSettings(1.0 / width, of_inputs, orthogonalized=config.name == "muon"),
        "router": RoleSettings(1.0 / width, of_inputs),
        "embedding": RoleSettings(config.embedding_rate, decay * config.embedding_decay),
        "position": RoleSettings(config.embedding_rate, decay * config.vector_decay),
        "head": RoleSettings(config.head_rate / width, of_inputs * config.head_decay),
        "adapter": RoleSettings(1.0, decay),
        "vector": RoleSettings(config.vector_rate, decay * config.vector_decay),
    }


def parameter_groups(stages: Sequence[nn.Module], config: OptimizerConfig) -> list[dict[str, Any]]:
    """Return the groups for a `torch.optim.Optimizer`: one for each pair of learning rate and weight decay.

    Frozen parameters are in no group. `apply_if_finite` sets a group's rate to the schedule's times its
    `learning_rate_factor`.
    """
    parameters: dict[RoleSettings, list[Tensor]] = {}
    for stage in stages:
        model = stage.model if isinstance(stage, Decoder) else Model()
        applied("model.base_width", model.base_width)
        by_role = settings_by_role(config, model.width_ratio)
        for name, parameter in stage.named_parameters():
            if parameter.requires_grad:
                settings = by_role[rule_of(canonical_name(name)).role]
                parameters.setdefault(settings, []).append(parameter)
    if not parameters:  # all of a pipeline rank are frozen; torch refuses an empty list
        parameters[settings_by_role(config)["vector"]] = []
    return [{"params": members, **settings._asdict()} for settings, members in parameters.items()]


def build_optimizer(stages: Sequence[nn.Module], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return AdamW, SGD or Muon of the `parameter_groups`.

    Moments and counters exist from the start, so that a checkpoint has every key and memory does not grow later. Each
    optimizer skips its step if `found_inf` is set, as `apply_if_finite` needs. A hook after each step computes the
    scales of weights that FSDP gathers as float8.
    """
    for key in fields(config):
        if not key.name.startswith("ema_"):  # of `optim/average.py`
            applied(f"optimizer.{key.name}", getattr(config, key.name))
    groups = parameter_groups(stages, config)
    optimizer: torch.optim.Optimizer
    if config.name == "sgd":
        from torchllm.optim.sgd import ShardedSGD  # of no use to other runs

        optimizer = ShardedSGD(groups, config)
    elif config.offloads:
        from torchllm.optim.offload import build_offloaded_adamw  # as above

        optimizer = build_offloaded_adamw(stages, groups, config)
    elif has_fewer_bits(groups, config):
        from torchllm.optim.rounded_optimizer import build_rounded

        optimizer = build_rounded(stages, groups, config)
    elif config.name == "muon":
        from torchllm.optim.muon import Muon  # as above

        optimizer = Muon(groups, config)
    else:
        optimizer = ShardedAdamW(groups, config)
    if any(is_gathered_as_float8(parameter) for stage in stages for parameter in stage.parameters()):
        optimizer.register_step_post_hook(lambda *_: scale_gathered_weights(stages))
    return optimizer


def set_mode(optimizer: torch.optim.Optimizer, mode: Literal["train", "eval"]) -> None:
    """Call an optimizer's `train` or `eval` if it has them: it then trains other weights than those to evaluate."""
    getattr(optimizer, mode, lambda: None)()


def apply_if_finite(optimizer: torch.optim.Optimizer, learning_rate: float, finite: Tensor) -> None:
    """Take the optimizer's step if `finite` (a bool (), equal on all ranks) is true; otherwise change nothing at all.

    The decision stays on the device if the optimizer reads `found_inf`, which is how torch's GradScaler skips steps:
    the optimizers of `build_optimizer` and torch's fused ones do. Any other optimizer needs a synchronization.
    Raises UserError at the first step of a loop that does not apply a key of the config (`refuse_unapplied`).
    """
    refuse_unchecked_step()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("learning_rate_factor", 1.0)  # a fork's optimizer may have none
    if not reads_found_inf(optimizer):
        if finite:
            optimizer.step()
        return
    # The two attributes that GradScaler sets; the gradients are not scaled.
    vars(optimizer).update(found_inf=(~finite).to(torch.float32), grad_scale=None)
    optimizer.step()
