"""Keeps the loads of experts equal (`router_balance.py`); does nothing for a model without experts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from torchllm.config import Training
from torchllm.config.applied_keys import applied, config_in_use, needs_state
from torchllm.config.errors import UserError
from torchllm.models.decoder import Decoder

if TYPE_CHECKING:
    from torchllm.optim.router_balance import RouterBalance, StepRouting


class ExpertBalance:
    """Balances the routers of this rank's stages; does nothing for a model without experts."""

    balance: "RouterBalance | None" = None

    def __init__(self, stages: Sequence[Decoder], training: Training) -> None:
        """Set the number of tokens per step in the routers. Call it when the stages are materialized.

        Where it changes (`global_batch_size` or `sequence_length` of a data.stage), `begin_step` sets it.
        """
        self.must_begin_steps = config_in_use().data.changes_size
        model = stages[0].model
        if model.experts:
            from torchllm.optim.router_balance import RouterBalance  # few models have experts

            self.balance = RouterBalance(stages, training)
        self.tensors = self.balance.tensors if self.balance else {}
        """shares of the last step by name, for `Checkpointer(extra_state=...)`"""
        for key in ("router_bias", "router_bias_rate", "balance_loss"):
            applied(f"model.{key}", getattr(model, key))
        needs_state("model.balance_loss", self.tensors)

    def begin_step(self, tokens: int) -> None:
        """Set the number of tokens in the step, of all ranks."""
        self.must_begin_steps = False
        if self.balance:
            self.balance.set_tokens(tokens)

    @torch.no_grad()
    def finish_step(self, applied: Tensor, *, sums: Tensor | None = None) -> "StepRouting | None":
        """Update biases and shares from the tokens routed since the last call; return statistics, None without experts.

        Call it on all ranks, after a step's backward passes. applied: whether the step changes the weights, bool (); if
        not, biases and shares do not change either. sums: from `take_sums`, over all ranks, in any shape;
        None: they are taken and summed here.
        """
        if self.balance is None:
            return None
        if sums is None:
            sums = self.balance.take_sums(applied.device)
            if dist.is_initialized():
                dist.all_reduce(sums)
        if self.must_begin_steps:
            raise UserError("data.stage: steps have other sizes: call ExpertBalance.begin_step, or remove these keys")
        return self.balance.update(applied, sums)

    @torch.no_grad()
    def take_sums(self, device: torch.device) -> Tensor:
        """Return this rank's sums of the step's routing, and begin new ones: float64, a row for each sparse block."""
        return self.balance.take_sums(device) if self.balance else torch.empty(0, dtype=torch.float64, device=device)
