"""The base of mixers: the modules of a block where a token sees others."""

from typing import Any

from torch import Tensor, nn

from torchllm.config.errors import UserError
from torchllm.models.layers import Rotary


class Mixer(nn.Module):
    """Mixes the tokens of a sequence: x (B, S, D) -> (B, S, D). All that needs several tokens is in its `core`."""

    core: Any
    """module, called with tensors of this rank's heads, each (B, S, heads, width), and the mask that its method
    `mask(document_ids, document_limit)` makes; replaceable: context parallelism and generation put another around it.
    `core.window`: tokens that a token sees, itself included; 0: all before it"""

    def forward(self, x: Tensor, rotary: Rotary | None, mask: Any) -> Tensor:
        """Return the tokens mixed: x (B, S, D) -> (B, S, D). rotary: None without rotary positions."""
        raise NotImplementedError

    def cached_core(self, *, room: int, padding: Tensor | None) -> nn.Module:
        """Return a core with a cache, for generation one token at a time.

        The first call has the prompts, each later one a token per text. room: tokens of the longest text. padding:
        tokens of the first call that no later token may see, (B, S) bool; None: there are none. UserError if the mixer
        has none.
        """
        raise UserError(f"{type(self).__name__} has no `cached_core`, so it cannot generate text")
