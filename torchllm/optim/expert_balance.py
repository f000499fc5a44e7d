"""Keeps the loads of experts equal: moves the routers' biases by what a whole step has routed, on all ranks.

Auxiliary-loss-free balancing (Wang et al. 2024, arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section
2.1.2): after each step the bias of an expert moves by a fixed rate, up if it had fewer tokens than the mean of the
layer's experts, down if it had more. Counted are the tokens of all micro batches and ranks, so the biases do not depend
on the layout: every rank holds them all, and they are equal bit for bit.

Sent, per step: one all-reduce of the tokens per expert of all layers.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchllm.models.decoder import Decoder
from torchllm.models.experts import Router
from torchllm.optim.fused import local_tensor


class ExpertBalance:
    """The routers of this rank's stages, whose biases it moves. Without experts it has none, and sends nothing."""

    def __init__(self, stages: Sequence[Decoder]) -> None:
        self.model = stages[0].model
        self.routers: dict[int, Router] = {}
        """by the index of their block"""
        for stage in stages:
            for index, block in stage.layers.items():
                for module in block.modules():
                    if isinstance(module, Router):
                        self.routers[int(index)] = module

    @torch.no_grad()
    def finish_step(self, applied: Tensor) -> Tensor | None:
        """Move the biases by what was routed since the last call; call it on all ranks, after a step's backward passes.

        applied: whether the step changes the weights, bool (): else the biases stay as they are. Returns the tokens per
        expert of all ranks, (blocks with experts, E) int64, on the device and equal on all ranks; None without experts.
        """
        if not self.model.experts:
            return None
        counts = self._count(applied.device)
        for index, router in self.routers.items():
            if router.bias is not None:
                tokens = counts[index - self.model.dense_layers]
                local_tensor(router.bias).add_(self.model.router_bias_rate * below_mean(tokens) * applied)
        return counts

    def _count(self, device: torch.device) -> Tensor:
        """Return the tokens per expert of all ranks and stages, (blocks with experts, E) int64."""
        model = self.model
        counts = torch.zeros(model.layers - model.dense_layers, model.experts, dtype=torch.float64, device=device)
        for index, router in self.routers.items():
            counts[index - model.dense_layers] = router.take_tokens_per_expert().double() / router.repeats
        if dist.is_initialized():
            dist.all_reduce(counts)
        return counts.round().long()  # thirds, of three ranks that route alike, add up to almost 1


def below_mean(tokens: Tensor) -> Tensor:
    """Return 1 for an expert with fewer tokens than the mean, -1 with more, 0 for the mean: (E) int64 -> (E) int64."""
    return torch.sign(tokens.sum() - len(tokens) * tokens)
