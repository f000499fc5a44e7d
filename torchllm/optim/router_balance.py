"""Keeps the loads of experts equal, from the routing of a whole step on all ranks.

The routers' biases (Wang et al. 2024, arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2):
after each step the bias of an expert moves by a fixed rate, up if it had fewer tokens than the mean of the layer's
experts, down if it had more.

Penalties of the routers (`models/router_penalties.py`) are gradients in the backward pass. From here they need the
number of tokens of a step and, with `model.balance_loss = "global"`, each expert's share of the previous step.

The counts include the tokens of all micro batches and ranks, so biases and shares do not depend on the layout: they are
replicated, and bitwise equal on all ranks.

Communication per step: the tokens per expert of all layers and the sums that are logged, in the message of the loss.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchllm.config import Training
from torchllm.models.decoder import Decoder
from torchllm.models.experts import Router
from torchllm.models.router_penalties import penalty_names
from torchllm.parallel.local_tensor import local_tensor


class StepRouting(NamedTuple):
    """Routing statistics of a step over all ranks and stages. The tensors are on the device, equal on all ranks."""

    tokens_per_expert: Tensor
    """(blocks with experts, E) int64"""
    entropy: Tensor
    """entropy of a token's normalized scores, in nats; mean over tokens and blocks, float64 ()"""
    penalties: dict[str, Tensor]
    """weighted penalty by name, summed over blocks, not part of the loss, float64 ()"""

    def packed(self) -> Tensor:
        """Return all numbers in one tensor, float64 (N), for one transfer to the host."""
        scalars = torch.stack((self.entropy, *self.penalties.values())).double()
        return torch.cat((scalars, self.tokens_per_expert.flatten().double()))


class RouterBalance:
    """Balances the routers of this rank's stages of a model with experts."""

    def __init__(self, stages: Sequence[Decoder], training: Training) -> None:
        self.model = stages[0].model
        self.routers = find_routers(stages)
        """router by index of its block"""
        self.row_of = {index: row for row, index in enumerate(self.model.sparse_blocks)}
        """row of a block in the statistics, by its index"""
        self.tensors: dict[str, Tensor] = {}
        """shares of the last step by name; 0 before the first step, no effect"""
        self.set_tokens(training.global_batch_size * training.sequence_length)
        for index, router in self.routers.items():
            if self.model.balance_loss == "global":
                router.last_shares = torch.zeros(self.model.experts, device=router.weight.device)
                self.tensors[f"expert_shares.layers.{index}"] = router.last_shares

    def set_tokens(self, tokens: int) -> None:
        """Set the number of tokens in a step, of all ranks."""
        for router in self.routers.values():
            router.tokens_per_step = tokens

    def take_sums(self, device: torch.device) -> Tensor:
        """Return this rank's sums of the step's routing, as `ExpertBalance.take_sums`."""
        blocks, columns = len(self.row_of), self.model.experts + 1 + len(penalty_names(self.model))
        sums = torch.zeros(blocks, columns, dtype=torch.float64, device=device)
        for index, router in self.routers.items():
            own = router.take_sums()
            if own is not None:
                sums[self.row_of[index]] = own / router.repeats
        return sums

    def update(self, applied: Tensor, sums: Tensor) -> StepRouting:
        """Update biases and shares, as `ExpertBalance.finish_step`. sums: over all ranks."""
        routing = self._statistics(sums)
        for index, router in self.routers.items():
            tokens = routing.tokens_per_expert[self.row_of[index]]
            if router.bias is not None and router.weight.requires_grad:  # else the router is frozen, and its bias too
                local_tensor(router.bias).add_(self.model.router_bias_rate * below_mean(tokens) * applied)
            if router.last_shares is not None:
                router.last_shares.copy_(torch.where(applied, tokens / tokens.sum(), router.last_shares))
        return routing

    def _statistics(self, sums: Tensor) -> StepRouting:
        """Return the statistics of all ranks and stages. sums: from `take_sums`, over all ranks."""
        model, names = self.model, penalty_names(self.model)
        sums = sums.view(-1, model.experts + 1 + len(names))
        # If three ranks route the same tokens, each adds a third of the counts, and the sum may not be a whole number.
        tokens_per_expert = sums[:, : model.experts].round().long()
        entropy, *penalties = sums[:, model.experts :].sum(0)
        tokens = tokens_per_expert.sum() / model.top_k  # a token counts once per block
        return StepRouting(tokens_per_expert, entropy / tokens, dict(zip(names, penalties, strict=True)))


def find_routers(stages: Sequence[Decoder]) -> dict[int, Router]:
    """Return the routers of this rank's stages by the index of their block."""
    blocks = [(int(name), block) for stage in stages for name, block in stage.layers.items()]
    return {index: module for index, block in blocks for module in block.modules() if isinstance(module, Router)}


def below_mean(tokens: Tensor) -> Tensor:
    """Return 1 for an expert with fewer tokens than the mean, -1 with more, 0 for the mean: (E) int64 -> (E) int64."""
    return torch.sign(tokens.sum() - len(tokens) * tokens)
