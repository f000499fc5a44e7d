"""Builds AdamW or Muon whose moments, or weights, are rounded after each step: `optimizer.state_dtype`."""

from collections.abc import Sequence

import torch
from torch import nn

from torchllm.config import Optimizer as OptimizerConfig
from torchllm.optim.fused import Group
from torchllm.optim.rounded import RoundedAdamW, RoundedState


def build_rounded(stages: Sequence[nn.Module], groups: list[Group], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimizer of the groups, which have the parameters of `stages`."""
    if config.state_dtype == "int8":
        from torchllm.optim.eightbit import EightBitState  # of no use to other runs

        storage: RoundedState = EightBitState(stages)
    else:
        storage = RoundedState(stages, getattr(torch, config.state_dtype))
    if config.name == "muon":
        from torchllm.optim.rounded_muon import RoundedMuon  # as above

        return RoundedMuon(groups, config, storage)
    return RoundedAdamW(groups, config, storage)
