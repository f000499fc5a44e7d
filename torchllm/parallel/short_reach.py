"""Context parallelism of cores whose tokens read a few tokens before them (`models/short_reach.py`).

Sharded: the sequence, and with it every activation; not the weights. Shapes: n ranks of cp, S tokens of whole
sequences, C channels, r tokens that the core reaches back.

ring: rank r has pieces r and 2 n - 1 - r of 2 n. Each gets the last r tokens of the piece before it, and the plain core
computes both; results of the tokens before are dropped. Sent, per rank: 2 x B x r x C numbers in the forward, and their
gradients in the backward.

ulysses: one all-to-all of the core's input, which gives a rank all tokens of C / n channels, and one of its result:
B x S / n x C elements each. The core uses these channels' rows of the parameters; FSDP sums the gradients of all rows
over cp.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchllm.config import Model
from torchllm.config.errors import UserError
from torchllm.models.mixer import Mixer
from torchllm.models.short_reach import ShortReach
from torchllm.parallel.context import SharedSequences, UlyssesAttention
from torchllm.parallel.heads import to_heads, to_sequence
from torchllm.parallel.pieces import NeighborPieces, joined, pieces_of


def share_short_reach(mixer: Mixer, view: Model, shared: SharedSequences) -> None:
    """Replace the core of a mixer, a `ShortReach`. UserError if it reaches over more than a piece of a ring."""
    if shared.method == "ulysses":
        mixer.core = UlyssesReach(shared.mesh, mixer.core)
        return
    piece = shared.sequence_length // (2 * shared.mesh.size())
    if piece < mixer.core.reach:
        raise UserError(
            f"parallel.cp: a piece of a sequence has {piece} tokens, and mixer {view.mixer!r} reaches "
            f"{mixer.core.reach} tokens back: use fewer ranks, or longer sequences"
        )
    mixer.core = RingReach(shared.mesh, mixer.core)


class RingReach(nn.Module):
    """The core over two pieces per rank, each with the tokens before it."""

    computes_once = True
    """its messages are marked with `computed_once`"""
    window = 0

    def __init__(self, mesh: DeviceMesh, core: ShortReach) -> None:
        super().__init__()
        self.core = core
        self.neighbors = NeighborPieces(mesh, core.reach)

    def mask(self, document_ids: Tensor | None, document_limit: int = 0) -> Tensor | None:
        """Return the core's mask of this rank's pieces, each with the tokens before it; document_ids: (B, S / n)."""
        if document_ids is None:
            return None
        return self.core.mask(self.neighbors.documents_with_tokens_before(document_ids).flatten(0, 1))

    @torch.compiler.disable
    def forward(self, x: Tensor, mask: Tensor | None, *of_channels: Tensor) -> Tensor:
        """Map this rank's part of B sequences, (B, S / n, C, ...) -> (B, S / n, C, ...)."""
        pieces = self.neighbors.with_tokens_before(pieces_of(x)).flatten(0, 1)  # (2 B, r + S / 2 n, C, ...)
        out = self.core(pieces, mask, *of_channels)[:, self.core.reach :]
        return joined(out.unflatten(0, (2, -1)))


class UlyssesReach(UlyssesAttention):
    """The core with all-to-alls around it: from a part of the sequence to a part of the channels, and back."""

    @torch.compiler.disable
    def forward(self, x: Tensor, mask: Tensor | None, *of_channels: Tensor) -> Tensor:
        """Map this rank's part of B sequences, (B, S / n, C, ...) -> (B, S / n, C, ...)."""
        (x,) = to_heads((x,), self.group)
        of_own = [parameter.unflatten(0, (self.ranks, -1))[self.rank] for parameter in of_channels]
        return to_sequence(self.core(x, mask, *of_own), self.group)
