"""LayerNorm, and feed-forward layers of two matrices. Shapes: as in `layers.py`."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchllm.config import Model
from torchllm.models.activations import gelu, squared_relu


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """Return the layer norm of x: x (..., width), weight and bias (width) -> (..., width)."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, epsilon)


class LayerNorm(nn.Module):
    """Normalizes x by its mean and deviation: (x - mean(x)) / std(x) * weight + bias (arXiv 1607.06450)."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.epsilon = epsilon
        self.kernel: Callable[..., Tensor] = layer_norm

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of x: (..., width) -> (..., width)."""
        return self.kernel(x, self.weight, self.bias, self.epsilon)


UNGATED: dict[str, Callable[[Tensor], Tensor]] = {"gelu": gelu, "relu2": squared_relu}
"""functions between the two matrices, by `model.features.feed_forward`"""


class UngatedFeedForward(nn.Module):
    """Computes down(act(up(x))), the feed-forward layer of GPT (GELU) and nanochat (squared ReLU)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        bias = model.features.biases
        self.up_proj = nn.Linear(model.hidden, model.ffn, bias=bias)
        self.down_proj = nn.Linear(model.ffn, model.hidden, bias=bias)
        self.act = UNGATED[model.features.feed_forward]

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token: (B, S, D) -> (B, S, D)."""
        return self.down_proj(self.act(self.up_proj(x)))
