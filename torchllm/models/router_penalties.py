"""Penalties on the logits of a router, each with its gradient in closed form.

A penalty is not added to the loss. Its gradient is added to the gradient of the logits in their backward pass
(`routing_record.py`): so it does not pass through a pipeline, recomputation does not run it twice, and evaluation does
not run it. A step's penalty is the mean over all tokens of all ranks, with or without a target, summed over layers; a
micro batch adds the parts of its tokens.

Shapes: B sequences, S tokens of each on this rank, E experts.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchllm.config import Model


class RoutedTokens(NamedTuple):
    """Output of a router for the tokens of a micro batch."""

    logits: Tensor
    """(B, S, E) float32"""
    probabilities: Tensor
    """p: the scores of a token, divided by their sum, (B, S, E) float32"""
    slopes: Tensor | float
    """(B, S, E): d p_i / d logit_j = p_i ([i = j] - p_j) slope_j"""
    shares: Tensor | None
    """each expert's share of the choices, with the sum 1, (B, E) or (E); None without a balance loss"""


class PenaltySum(NamedTuple):
    """A penalty, summed over the tokens of a micro batch."""

    value: Tensor
    """float32 ()"""
    gradient: Tensor
    """gradient of the value by the logits, (B, S, E) float32"""


BALANCE_LOSS, ROUTER_Z_LOSS = "balance_loss", "router_z_loss"


def penalty_names(model: Model) -> list[str]:
    """Return the penalties of a model's routers."""
    names = []
    if model.balance_loss != "none":
        names.append(BALANCE_LOSS)
    if model.router_z_loss:
        names.append(ROUTER_Z_LOSS)
    return names


RouterPenalty = Callable[[RoutedTokens], PenaltySum]


def softmax_slopes(logits: Tensor) -> float:
    """Return d log e^logit / d logit."""
    return 1.0


def sigmoid_slopes(logits: Tensor) -> Tensor:
    """Return d log sigmoid(logit) / d logit: (..., E) -> (..., E)."""
    return torch.sigmoid(-logits)


def balance_loss(routed: RoutedTokens, weight: float) -> PenaltySum:
    """Return weight x E x sum over experts of f_i p_i, of each token: f_i is expert i's share of the choices.

    It pulls down the probabilities of experts that have many tokens (Fedus et al. 2021, arXiv 2101.03961, equations 4
    to 6; there a token has one expert). f counts choices, so it is a constant for the gradient.
    """
    assert routed.shares is not None
    p = routed.probabilities
    pull = weight * p.shape[-1] * routed.shares.unsqueeze(-2)  # (B, 1, E) or (1, E)
    mean_pull = (p * pull).sum(-1, keepdim=True)
    return PenaltySum(mean_pull.sum(), p * routed.slopes * (pull - mean_pull))


def router_z_loss(routed: RoutedTokens, weight: float) -> PenaltySum:
    """Return weight x (log sum exp of the logits)^2, of each token (ST-MoE, arXiv 2202.08906, equation 5)."""
    log_sum_exp = routed.logits.logsumexp(-1, keepdim=True)
    value = weight * log_sum_exp.square().sum()
    return PenaltySum(value, 2.0 * weight * log_sum_exp * routed.logits.softmax(-1))
