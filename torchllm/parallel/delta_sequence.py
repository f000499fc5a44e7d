"""Gated DeltaNet over sequences that several ranks share: context parallelism of `models/parts/delta_rule.py`.

Shapes as there: V value heads with states (Q, P), K key heads, W = 2 K Q + V P channels of q, k and v, r tokens that
the convolution reaches back. n ranks of cp.

Sharded: the sequence, and with it every activation; not the weights.

ulysses: one all-to-all of the streams before the core, which gives a rank all tokens of V / n heads, and one of the
result after it: first B x S / n x (W + 2 V) elements, then B x S / n x V P. The core uses these heads' rows of the
weights; FSDP sums the gradients of all rows over cp.

ring: rank r has pieces r and 2 n - 1 - r of 2 n. The state goes through the pieces in the order of the sequence, and is
linear: after a piece it is T S + A. So each rank computes T and A of its pieces, all ranks gather them, 2 x B x V x Q x
(Q + P) float32 numbers from each, and a rank adds up the states before its own pieces. The backward is the same in the
other direction, with the gradient of that state in place of A. The convolution takes r x W numbers per piece from the
piece before, and sends their gradients back. Documents stop both: T is 0 for a piece with a border.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchllm.config import Model
from torchllm.config.errors import UserError
from torchllm.models.mixer import Mixer
from torchllm.models.parts.delta_rule import Chunks, DeltaCore, HeadWeights, Streams, scan
from torchllm.parallel.context import SharedSequences, UlyssesAttention
from torchllm.parallel.heads import to_heads, to_sequence
from torchllm.parallel.pieces import NeighborPieces, in_sequence, joined, messages, pieces_of
from torchllm.parallel.ring import gather_from_ranks
from torchllm.parallel.saved_results import computed_once


def share_delta(mixer: Mixer, view: Model, shared: SharedSequences) -> None:
    """Replace the core of a mixer. UserError if the convolution reaches over more than a piece of a ring."""
    if shared.method == "ulysses":
        mixer.core = UlyssesDelta(shared.mesh, mixer.core)
        return
    piece = shared.sequence_length // (2 * shared.mesh.size())
    if piece < mixer.core.reach:
        raise UserError(
            f"parallel.cp: a piece of a sequence has {piece} tokens, and model.delta_conv = {view.delta_conv} reaches "
            "further back: use fewer ranks, or longer sequences"
        )
    mixer.core = RingDelta(shared.mesh, mixer.core)


class UlyssesDelta(UlyssesAttention):
    """The core with all-to-alls around it: from a part of the sequence to a part of the heads, and back."""

    window = 0

    @torch.compiler.disable
    def forward(self, streams: Streams, weights: HeadWeights, mask: Tensor | None) -> Tensor:
        """Map the streams of B sequences, this rank's part of each -> (B, S / n, V, P)."""
        own = HeadWeights(*(weight.unflatten(0, (self.ranks, -1))[self.rank] for weight in weights))
        out = self.core(Streams(*to_heads(streams, self.group)), own, mask)
        return to_sequence(out, self.group)


class RingDelta(nn.Module):
    """The core over two pieces per rank, with a scan over the pieces of all ranks."""

    computes_once = True
    """its results are marked with `computed_once`"""
    window = 0

    def __init__(self, mesh: DeviceMesh, core: DeltaCore) -> None:
        super().__init__()
        self.core = core
        self.neighbors = NeighborPieces(mesh, core.reach)

    def mask(self, document_ids: Tensor | None, document_limit: int = 0) -> Tensor | None:
        """Return the document ids of this rank's pieces, each with the tokens before it, (2 B, r + S / 2 n)."""
        if document_ids is None:
            return None
        return self.neighbors.documents_with_tokens_before(document_ids).flatten(0, 1)

    @torch.compiler.disable
    def forward(self, streams: Streams, weights: HeadWeights, mask: Tensor | None) -> Tensor:
        """Map the streams of B sequences, this rank's part of each -> (B, S / n, V, P)."""
        convolved, others = streams[:3], streams[3:]
        before = self.neighbors.with_tokens_before(pieces_of(torch.cat([x.flatten(2) for x in convolved], dim=2)))
        parts = before.flatten(0, 1).split([x.shape[2] * x.shape[3] for x in convolved], dim=2)
        parts = [part.unflatten(2, x.shape[2:]) for part, x in zip(parts, convolved, strict=True)]
        parts += [pieces_of(x).flatten(0, 1) for x in others]  # of 2 B sequences
        ids = self.core.documents_of(Streams(*parts)) if mask is None else mask
        out = _Scanned.apply(self, ids, *parts, *weights)
        return joined(out.unflatten(0, (2, -1)))

    def gathered(self, of_pieces: Tensor) -> list[Tensor]:
        """Return a tensor of each piece of all ranks, in the order of the sequence, given this rank's.

        of_pieces: (2 B, ...).
        """
        with messages(self.neighbors.group):
            of_ranks = gather_from_ranks(of_pieces.unflatten(0, (2, -1)), self.neighbors.group)
        return in_sequence(of_ranks)

    def own(self, of_pieces: list[Tensor]) -> Tensor:
        """Return the tensors of this rank's pieces, as (2 B, ...)."""
        rank = self.neighbors.rank
        return torch.cat((of_pieces[rank], of_pieces[-1 - rank]))


class PieceScan:
    """The chunks of some pieces, and the pieces as functions of the state before them."""

    def __init__(self, core: DeltaCore, ids: Tensor, inputs: Any) -> None:
        """inputs: the streams, with r tokens before, then the weights. ids: (2 B, r + S / 2 n)."""
        streams = Streams(*inputs[:5])
        self.chunks: Chunks = core.chunks(streams, HeadWeights(*inputs[5:]), ids)
        self.dtype = streams.v.dtype
        width, self.values = self.chunks.additions.shape[-2:]
        # A state of P + Q columns: P of a state that begins as 0, and Q of one that begins as the unit matrix.
        begin = torch.eye(width, dtype=self.chunks.additions.dtype, device=ids.device)
        begin = F.pad(begin, (self.values, 0)).expand(*self.chunks.additions.shape[:3], -1, -1)
        self.states, self.after = scan(self.chunks.transitions, F.pad(self.chunks.additions, (0, width)), begin)

    def results(self, state: Tensor) -> Tensor:
        """Return the results, given the state before each piece: (2 B, K, R, Q, P) -> (2 B, S / 2 n, V, P)."""
        of_zero, of_unit = self.states.split((self.values, self.states.shape[-1] - self.values), dim=-1)
        return self.chunks.results(of_zero + of_unit @ state.unsqueeze(3)).to(self.dtype)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split (..., Q, P + Q) of `after`, or of the same shape, into the addition and the transition of pieces."""
        addition, transition = x.split((self.values, x.shape[-1] - self.values), dim=-1)
        return addition, transition


class _Scanned(torch.autograd.Function):
    """Maps the streams of this rank's pieces, and weights -> (2 B, S / 2 n, V, P).

    Keeps them and the states before the pieces, (2 B, K, R, Q, P): the backward computes the chunks again.
    """

    @staticmethod
    def forward(ctx: Any, ring: RingDelta, ids: Tensor, *inputs: Tensor) -> Tensor:
        out, states = computed_once(lambda: scan_pieces(ring, ids, inputs))
        ctx.ring = ring
        ctx.save_for_backward(ids, states, *inputs)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        ids, states, *inputs = ctx.saved_tensors
        return None, None, *scan_pieces_back(ctx.ring, ids, states, inputs, d_out)


def scan_pieces(ring: RingDelta, ids: Tensor, inputs: Any) -> tuple[Tensor, Tensor]:
    """Return the results of this rank's pieces, and the states before them."""
    pieces = PieceScan(ring.core, ids, inputs)
    before: list[Tensor] = []
    state: Tensor | None = None
    for of_piece in ring.gathered(pieces.after):
        addition, transition = pieces.parts(of_piece)
        before.append(torch.zeros_like(addition) if state is None else state)
        state = addition if state is None else addition + transition @ state
    states = ring.own(before)
    return pieces.results(states), states


def scan_pieces_back(ring: RingDelta, ids: Tensor, states: Tensor, inputs: Any, d_out: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of the inputs, given `d_out` and the states before this rank's pieces."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in inputs]
        states = states.detach().requires_grad_()
        pieces = PieceScan(ring.core, ids, inputs)
        out = pieces.results(states)
    (d_states,) = torch.autograd.grad(out, states, d_out, retain_graph=True)
    _, transitions = pieces.parts(pieces.after.detach())
    after: list[Tensor] = []
    gradient: Tensor | None = None  # of the state after a piece, from all pieces behind it
    for of_piece in reversed(ring.gathered(torch.cat((d_states, transitions), dim=-1))):
        d_before, transition = pieces.parts(of_piece)
        after.append(torch.zeros_like(d_before) if gradient is None else gradient)
        gradient = d_before if gradient is None else d_before + transition.mT @ gradient
    d_addition = ring.own(after[::-1])
    d_after = torch.cat((d_addition, d_addition @ states.detach().mT), dim=-1)
    return torch.autograd.grad((out, pieces.after), inputs, (d_out, d_after))
