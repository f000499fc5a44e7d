"""LoRA (Hu et al. 2021, arXiv 2106.09685): the weights are frozen, and low-rank updates of some matrices are trained.

A layer y = W x + b becomes y = W x + b + alpha / r * B A x, with A (r, M) and B (N, r) for W (N, M). B starts at zero,
so that training starts from the unchanged model. A frozen weight has no gradient and no optimizer state, and has the
dtype of the computation. There is no dropout: its random numbers would differ between layouts.

Names follow the package peft: `q_proj.lora_A.weight` next to `q_proj.weight`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchllm.config.schema import Lora
from torchllm.models.layers import widened


class LowRankFactor(nn.Module):
    """One of the two factors of an update, A or B: the only weights that are trained."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))


class UpdatedLinear(nn.Module):
    """Adds a low-rank update to the output of a frozen linear layer.

    `add_update` is replaceable: under tensor parallelism it gets this rank's parts. The name of the layer inside,
    `base_layer`, is no part of a canonical parameter name.
    """

    def __init__(self, base_layer: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base_layer = base_layer
        with base_layer.weight.device:
            self.lora_A = LowRankFactor(rank, base_layer.in_features)
            self.lora_B = LowRankFactor(base_layer.out_features, rank)
        self.scale = scale
        self.add_update: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor] = add_low_rank_update

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token: (..., M) -> (..., N)."""
        return self.add_update(self.base_layer(x), x, self.lora_A.weight, self.lora_B.weight, self.scale)


def add_low_rank_update(out: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return out + scale * B A x: out (..., N), x (..., M), a (r, M), b (N, r) -> (..., N)."""
    return torch.add(out, F.linear(F.linear(x, a), b), alpha=scale)


def apply_lora(model: nn.Module, lora: Lora, dtype: torch.dtype) -> None:
    """Freeze a model and give each of the matrices `lora.targets` an update, in place; with `lora.rank` 0 do nothing.

    Call it on the plain model, before it is cut into stages. dtype: of the computation and of the frozen weights. The
    updates are float32, like all trained weights.
    """
    if not lora.is_on:
        return
    model.requires_grad_(False)
    model.to(dtype)
    for parent in list(model.get_submodule("layers").modules()):
        for name, layer in list(parent.named_children()):
            if name in lora.targets and isinstance(layer, nn.Linear):
                parent.register_module(name, UpdatedLinear(layer, lora.rank, lora.scale))


def merge_update(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return W + scale * B A in W's type, computed in float32: weight (N, M), a (r, M), b (N, r) -> (N, M)."""
    return torch.addmm(widened(weight), widened(b), widened(a), alpha=scale).to(weight.dtype)
