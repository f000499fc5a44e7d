"""Tensor parallelism of latent attention (`models/parts/latent_attention.py`).

Sharded: the projections from latents to heads by heads, and o_proj as in any attention. The projections to latents and
their norms are whole on every rank: latents are narrow, and each head needs all of them.

Sent, per block: with sequence parallelism a rank computes the latents of its S / tp tokens, and one all-gather collects
those latents, W numbers each, and the backward has one reduce-scatter of their gradients. Without it every rank
computes all latents, the forward sends nothing, and the backward has one all-reduce. W is model.latent_q_width +
latent_kv_width + rope_head_dim (2,112 in DeepSeek-V3, whose hidden states have 7,168); without a latent of queries
these are projected from the hidden states, which are then a part of W. The gradient of a latent is a sum over the
ranks, as each has some of the heads. So are, with sequence parallelism, the gradients of the projections to latents
and of the norms, since each rank has other tokens.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from torchllm.config import Model
from torchllm.models.parts.latent_attention import LatentAttention, Latents
from torchllm.parallel.tensor import WholeNorm, gathered

if TYPE_CHECKING:
    from torchllm.parallel.context import SharedSequences


def styles(attention: nn.Module, hidden: Placement, shares_experts: bool) -> dict[str, ParallelStyle]:
    """Return the style of each module inside a latent attention, and of itself, by name.

    hidden: placement of hidden states (B, S, D).
    """
    of_tokens: Placement = Partial() if isinstance(hidden, Shard) else Replicate()  # gradient of a whole weight
    of_modules: dict[str, ParallelStyle] = {
        "": LatentsOfAllTokens(hidden),
        "q_a_proj": WholeLinear(hidden),
        "q_a_norm": WholeNorm(of_tokens),
        "kv_a_proj": WholeLinear(hidden),
        "kv_a_norm": WholeNorm(of_tokens),
        "q_proj": ColwiseParallel(),
        "q_b_proj": ColwiseParallel(),
        "kv_b_proj": ColwiseParallel(),
        "o_proj": RowwiseParallel(output_layouts=hidden),
    }
    there = {name for name, _ in attention.named_modules()}
    return {name: style for name, style in of_modules.items() if name in there}


def share_latents(attention: nn.Module, view: Model, shared: "SharedSequences") -> None:
    """Let the ranks of cp exchange the queries, keys and values of the heads, as in any attention."""
    from torchllm.parallel.context import share_attention  # of no use to runs without cp

    assert isinstance(attention, LatentAttention)
    share_attention(attention.core, view, shared)


class LatentsOfAllTokens(ParallelStyle):
    """Gives the heads of a rank the latents of all tokens, whose gradients are summed over the ranks."""

    gradient_of_keys: Placement = Partial()
    """placement of the gradient of `key_rope`, which all heads have in their keys"""

    def __init__(self, hidden: Placement) -> None:
        self.hidden = hidden

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, LatentAttention)
        module.gather = gathered  # type: ignore[assignment]  # a seam
        module.for_own_heads = partial(self._whole, device_mesh, module)
        return module

    def _whole(self, mesh: DeviceMesh, module: LatentAttention, latents: Latents) -> Latents:
        """Gather all parts in one message; those that are projected to heads stay DTensors."""
        widths = [part.shape[-1] for part in latents]
        parts = DTensor.from_local(torch.cat(latents, dim=-1), mesh, [self.hidden], run_check=False)
        q, kv, key_rope = module.gather(parts).split(widths, dim=-1)  # type: ignore[operator]
        assert isinstance(key_rope, DTensor)
        return Latents(q, kv, key_rope.to_local(grad_placements=[self.gradient_of_keys]))


class WholeLinear(ParallelStyle):
    """A linear layer that is whole on every rank: of a rank's own tokens, or of all of them."""

    def __init__(self, hidden: Placement) -> None:
        # Which tokens a rank has does not matter here. Sharded over B instead of S, (B, S) flattens without a message.
        self.tokens: Placement = Shard(0) if isinstance(hidden, Shard) else Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, self._distributed, self._to_local)

    def _distributed(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return DTensor.from_local(inputs[0], mesh, [self.tokens], run_check=False)

    def _to_local(self, module: nn.Module, out: Any, mesh: DeviceMesh) -> Any:
        return out.to_local()
